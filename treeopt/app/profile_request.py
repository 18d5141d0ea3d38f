"""What to measure, as one frozen value that can wait in the queue."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from profiler.refine import coarse_tokens
from treeopt.errors import ProfileError

__all__ = ["ProfileRequest"]


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What to measure: one curve for each combination.

    Parameters
    ----------
    model : str
        What the model is called: a hub id, a folder, or ``demo``.
    config : str or None
        ``config.json`` (or its folder) to build the model from with random weights.
    tokens : tuple of int or None
        Input lengths; None for coarse to fine up to ``max_tokens``.
    max_tokens : int
        Largest input length when ``tokens`` is None.
    seconds : float
        Time for refinement, per curve, when ``tokens`` is None.
    contexts, batch_sizes : tuple of int
        Tokens in the cache; rows decoded together.
    dtypes, attentions, caches, graph_modes : tuple of str
        As the runtime takes them.
    kernels : str
        Plan of linear-layer kernels.
    device : str
        ``auto``, ``cpu``, ``mps``, ``cuda`` or ``cuda:N``.
    forward : bool
        Time the bare forward pass too.
    fresh : bool
        Measure anew even when a curve is unfinished or could be refined.
    """

    model: str
    config: str | None = None
    tokens: tuple[int, ...] | None = None
    max_tokens: int = 64
    seconds: float = 60.0
    contexts: tuple[int, ...] = (512,)
    batch_sizes: tuple[int, ...] = (1,)
    dtypes: tuple[str, ...] = ("float32",)
    attentions: tuple[str, ...] = ("auto",)
    caches: tuple[str, ...] = ("dynamic",)
    graph_modes: tuple[str, ...] = ("eager",)
    kernels: str = "auto"
    device: str = "auto"
    forward: bool = True
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.tokens is not None and 1 not in self.tokens:
            raise ProfileError("--tokens: must hold 1, plain decoding, which every speedup is measured against")
        checks = {
            "--tokens": self.tokens or (self.max_tokens,),
            "--contexts": self.contexts,
            "--batch-sizes": self.batch_sizes,
        }
        for flag, values in checks.items():
            if not values or min(values) < 1:
                raise ProfileError(f"{flag}: must be whole numbers from 1, not {','.join(map(str, values))}")
        choices = {
            "--dtype": (self.dtypes, ("float32", "float64", "bfloat16", "float16")),
            "--attention": (self.attentions, ("auto", "sdpa", "eager")),
            "--cache": (self.caches, ("dynamic", "static")),
            "--graph-mode": (self.graph_modes, ("eager", "compiled", "cuda_graph")),
        }
        for flag, (names, known) in choices.items():
            wrong = [name for name in names if name not in known]
            if wrong or not names:
                raise ProfileError(f"{flag}: must be among {', '.join(known)}, not {','.join(names)!r}")

        modes = [mode for mode in self.graph_modes if mode != "eager"]
        if modes and set(self.caches) != {"static"}:
            raise ProfileError(f"--graph-mode {','.join(modes)}: needs --cache static; shapes must not change")

    @property
    def grid(self) -> tuple[int, ...]:
        """Input lengths that make a curve complete."""
        return coarse_tokens(self.max_tokens) if self.tokens is None else tuple(sorted(set(self.tokens)))

    @property
    def largest(self) -> int:
        """Largest input length."""
        return max(self.grid)

    def to_spec(self) -> dict[str, Any]:
        """Return the request as JSON, for the queue."""
        return {name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in self.__slots__}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> "ProfileRequest":
        """Read what `to_spec` wrote.

        Raises
        ------
        ProfileError
            When the queue holds something else.
        """
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in spec.items()}
        try:
            return cls(**fields)
        except TypeError as error:
            raise ProfileError(
                f"job: {error}; it was queued by another version, cancel it and queue it anew"
            ) from error
