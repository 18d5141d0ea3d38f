# ruff: noqa: N802, N815 - the names are pynvml's
"""A stand-in for the pynvml module: cards, MIG slices, what they support, what they are doing."""

from dataclasses import dataclass, field
from types import SimpleNamespace


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 6: "Not Found", 15: "GPU is lost", 9: "Driver Not Loaded"}[value])
        self.value = value


@dataclass
class Card:
    uuid: str
    name: str = "NVIDIA H200"
    memory: int = 141 * 2**30
    capability: tuple[int, int] = (9, 0)
    power_mw: int | None = 700_000
    slices: list["Card"] | None = None
    pids: list[int] | None = field(default_factory=list)
    utilisation: int | None = 0
    free: int = 140 * 2**30
    reasons: int = 0
    lost: bool = False


class FakeNvml:
    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_FOUND = 6
    nvmlClocksEventReasonSwPowerCap = 0x4
    nvmlClocksEventReasonHwSlowdown = 0x8
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self, *cards: Card, driver: bool = True) -> None:
        self.cards = cards
        self.driver = driver
        self.open = 0

    def _alive(self, card: Card) -> Card:
        if card.lost:
            raise NVMLError(15)
        return card

    def _supported(self, value: object) -> object:
        if value is None:
            raise NVMLError(3)
        return value

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError(9)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, i: int) -> Card:
        return self.cards[i]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        for card in self.cards:
            for one in (card, *(card.slices or ())):
                if one.uuid == uuid:
                    return self._alive(one)
        raise NVMLError(6)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: Card) -> Card:
        return next(card for card in self.cards if part in (card.slices or ()))

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> bytes:
        return card.name.encode()

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> SimpleNamespace:
        return SimpleNamespace(total=card.memory, free=card.free)

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> tuple[int, int]:
        return card.capability

    def nvmlDeviceGetEnforcedPowerLimit(self, card: Card) -> object:
        return self._supported(card.power_mw)

    def nvmlDeviceGetMigMode(self, card: Card) -> object:
        return (1, 1) if card.slices is not None else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, i: int) -> Card:
        parts = card.slices or []
        if i % 2 == 1 or i // 2 >= len(parts):  # slots are filled with gaps
            raise NVMLError(6)
        return parts[i // 2]

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self._supported(card.pids)]

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._supported(card.utilisation))

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: Card) -> int:
        return card.reasons
