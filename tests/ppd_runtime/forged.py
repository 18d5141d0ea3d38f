"""Guess sources for tests: guesses whose ranks are known in advance."""

from collections.abc import Callable, Sequence

import torch

from ppd_runtime.buffers import StateBuffers
from ppd_runtime.guesses import NO_GUESS

WRONG = -2
"""Stands for a guess that the model never agrees with, and that costs no token of the vocabulary."""


class ForgedGuesses:
    """Guesses by a function of the text so far: ``guess(token_ids, path) -> token``.

    Costs prompt tokens like trained ones do (``num_epts`` rows each), whose logits are ignored.
    """

    name = "forged"
    visibility = None

    def __init__(
        self, guess: Callable[[Sequence[int], tuple[int, ...]], int], m: int, hidden_size: int, num_epts: int = 1
    ) -> None:
        self.guess = guess
        self.num_distances = m
        self.num_epts = num_epts
        self.embeddings = torch.zeros(m * num_epts, hidden_size, dtype=torch.float64) if num_epts else None

    def begin(self, token_ids: Sequence[int]) -> "_ForgedGuesser":
        return _ForgedGuesser(self, list(token_ids))


class _ForgedGuesser:
    def __init__(self, source: ForgedGuesses, token_ids: list[int]) -> None:
        self._source = source
        self.token_ids = token_ids
        self.embeddings = source.embeddings

    def extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids

    def guess(self, tree: StateBuffers, logits: torch.Tensor | None) -> torch.Tensor:
        guesses = [NO_GUESS] + [self._source.guess(self.token_ids, path) for path in tree.paths[1:]]
        return torch.tensor(guesses)
