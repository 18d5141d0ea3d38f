"""How to decode: one frozen value."""

from dataclasses import dataclass

from ppd_runtime.sampling import Typical
from treeopt.errors import InvalidValueError

__all__ = ["CACHES", "Settings"]

CACHES = ("dynamic", "static", "compiled", "graph")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to decode.

    Parameters
    ----------
    max_new_tokens : int
        Tokens to write at most, exactly.
    temperature : float
        0 is greedy. Above 0 tokens are sampled from the model's distribution at that temperature, exactly.
    top_k : int
        Sample among this many most probable tokens; 0 for all.
    top_p : float
        Sample among the most probable tokens that reach this share together; 1 for all.
    seed : int
        Text ``i`` of a call is sampled with ``seed + i``.
    typical : Typical, optional
        Typical acceptance in place of exact verification: more tokens per step, and no longer the model's
        distribution. Needs a temperature.
    stop : tuple of str
        Strings that end a text.
    eos_token_ids : frozenset of int, optional
        Tokens that end a text; the model's own when None.
    cache : {"dynamic", "static", "compiled", "graph"}
        Growing KV cache; fixed shapes; fixed shapes run by compiled code; fixed shapes replayed as CUDA graphs.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    typical: Typical | None = None
    stop: tuple[str, ...] = ()
    eos_token_ids: frozenset[int] | None = None
    cache: str = "dynamic"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InvalidValueError("max_new_tokens", f"must be at least 1, not {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise InvalidValueError("temperature", f"must be 0 or more, not {self.temperature}")
        if self.top_k < 0:
            raise InvalidValueError("top_k", f"must be 0 or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InvalidValueError("top_p", f"must lie above 0 and at most at 1, not {self.top_p}")
        if self.typical is not None and self.temperature == 0:
            raise InvalidValueError("typical", "needs a temperature above 0; typical acceptance judges probabilities")
        if self.cache not in CACHES:
            raise InvalidValueError("cache", f"must be one of {', '.join(CACHES)}, not {self.cache!r}")
