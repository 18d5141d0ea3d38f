"""A machine whose time is declared: steps with known costs, a clock that moves only when they run."""

import random
from collections.abc import Callable


class FakeClock:
    """Seconds; moves when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FakeMachine:
    """Builds steps that cost ``cost(num_tokens, step number, now)`` seconds, and records what was run.

    ``kept`` is what a cache would hold: a step adds its tokens, `restore` puts the context back. A step on a cache
    that was not restored is an error, and so is timing one that was never warmed up.
    """

    def __init__(self, cost: Callable[[int, int, float], float]) -> None:
        self.clock = FakeClock()
        self.cost = cost
        self.runs: list[int] = []
        self.restored_s = 0.0
        self.synchronised = 0

    def __call__(self, num_tokens: int, context_len: int, batch_size: int) -> "FakeStep":
        return FakeStep(self, num_tokens)

    def synchronise(self) -> None:
        self.synchronised += 1


class FakeStep:
    """One step of a `FakeMachine`."""

    def __init__(self, machine: FakeMachine, num_tokens: int) -> None:
        self.machine = machine
        self.num_tokens = num_tokens
        self.clean = False

    def restore(self) -> None:
        self.machine.clock.now_s += 50.0  # if this were timed, every figure would be wrong
        self.clean = True

    def run(self) -> None:
        if not self.clean:
            raise AssertionError("a step ran on a cache that was not restored")
        self.clean = False
        machine = self.machine
        machine.runs.append(self.num_tokens)
        count = machine.runs.count(self.num_tokens)
        machine.clock.now_s += machine.cost(self.num_tokens, count, machine.clock.now_s)


def noisy(medians_s: dict[int, float], spread: float, seed: int) -> Callable[[int, int, float], float]:
    """Costs around medians, uniformly within +- spread of each."""
    source = random.Random(seed)
    return lambda n, _count, _now: medians_s[n] * (1 + spread * (2 * source.random() - 1))
