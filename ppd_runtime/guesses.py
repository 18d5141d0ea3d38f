"""Where guesses come from: one small interface, three sources.

========  ===========================================================  ==================================
source    a guess is made of                                           costs
========  ===========================================================  ==================================
prompt    the logits of trained prompt tokens                          ``n`` rows per prompt token
free      the logits of prompt tokens made of the model's embeddings   1 row per prompt token
lookup    what followed the text's last words earlier in the text      nothing; the state is always ``m``
========  ===========================================================  ==================================

A `GuessSource` belongs to a model and is shared by all texts; its `TextGuesser` belongs to one text. Guesses may be as
bad as they like: verification keeps the output right.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ppd_runtime import hf
from ppd_runtime.buffers import StateBuffers
from ppd_runtime.models import LoadedModel
from ppd_runtime.prompt_tokens import PromptTokens, check_base_model, prompt_visibility
from treeopt.errors import InvalidValueError

__all__ = [
    "NO_GUESS",
    "FreeGuesses",
    "GuessSource",
    "LookupGuesses",
    "PromptGuesses",
    "TextGuesser",
    "rank_guesses",
]

NO_GUESS = -1
"""Stands where a node of the tree has no guess. No token has this id, so such a node is never accepted."""


class TextGuesser(Protocol):
    """Guesses for one text."""

    @property
    def embeddings(self) -> Tensor | None:
        """Prompt-token embeddings in flat order, shape (m n, hidden); None when none are needed."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hear of tokens that the text has gained. Must not cost more the longer the text is."""

    def guess(self, tree: StateBuffers, logits: Tensor | None) -> Tensor:
        """Guess a token for every node.

        Parameters
        ----------
        tree : StateBuffers
            The tree to fill.
        logits : Tensor or None, shape (state, vocabulary)
            What the last accepted node's prompt tokens said, distance by distance, EPTs averaged.

        Returns
        -------
        LongTensor, shape (num_nodes,)
            Token ids, `NO_GUESS` where there is none. The entry of the root is ignored. Siblings differ.
        """


class GuessSource(Protocol):
    """Makes a `TextGuesser` for every text."""

    @property
    def name(self) -> str:
        """Name for records: prompt, free, lookup."""

    @property
    def num_distances(self) -> int:
        """``m``."""

    @property
    def num_epts(self) -> int:
        """Rows per prompt token, ``e``: 0 when the source needs no prompt tokens."""

    @property
    def visibility(self) -> Tensor | None:
        """Which prompt-token row of one chain sees which, shape (m n, m n); None is causal."""

    def begin(self, token_ids: Sequence[int]) -> TextGuesser:
        """Start a text with its prompt."""


def rank_guesses(tree: StateBuffers, logits: Tensor) -> Tensor:
    """Fill a tree with the best guesses for each distance.

    The node with path ``(.., r)`` at depth ``j`` holds the rank-``r`` guess for distance ``j``. Logits that are not a
    number guess nothing.

    Parameters
    ----------
    tree : StateBuffers
        The tree of state ``k``.
    logits : Tensor, shape (k, vocabulary)
        One row per distance.

    Returns
    -------
    LongTensor, shape (num_nodes,)
    """
    guesses = torch.full((tree.num_nodes,), NO_GUESS, dtype=torch.long, device=logits.device)
    if tree.num_nodes > 1:
        best = logits[: tree.depth].topk(tree.num_ranks, dim=-1)
        distance, rank = tree.depths[1:] - 1, tree.ranks[1:]
        known = ~best.values[distance, rank].isnan()
        guesses[1:] = torch.where(known, best.indices[distance, rank], NO_GUESS)
    return guesses


class PromptGuesses:
    """Guesses by trained prompt tokens.

    Parameters
    ----------
    loaded : LoadedModel
        The model they are used with.
    tokens : PromptTokens
        The trained embeddings.

    Raises
    ------
    ModelError
        When they were trained for another model.
    """

    name = "prompt"

    def __init__(self, loaded: LoadedModel, tokens: PromptTokens) -> None:
        check_base_model(
            tokens,
            hidden_size=hf.embedding_size(loaded.model),
            base_model=loaded.name,
            base_digest=loaded.digest,
        )
        self.num_distances = tokens.num_distances
        self.num_epts = tokens.num_epts
        self.visibility = prompt_visibility(tokens.num_distances, tokens.num_epts, tokens.mask)
        self._embeddings = tokens.embeddings.flatten(0, 1).to(loaded.device, loaded.dtype)

    def begin(self, token_ids: Sequence[int]) -> TextGuesser:
        """Start a text; trained embeddings are the same for all."""
        return _LogitGuesser(self._embeddings)


class _LogitGuesser:
    """Guesses read off the logits of fixed prompt tokens."""

    def __init__(self, embeddings: Tensor) -> None:
        self.embeddings = embeddings

    def extend(self, token_ids: Sequence[int]) -> None:
        pass

    def guess(self, tree: StateBuffers, logits: Tensor | None) -> Tensor:
        if logits is None:
            logits = self.embeddings.new_empty((0, 1))
        return rank_guesses(tree, logits)


class FreeGuesses:
    """Guesses without training: prompt tokens made of the model's own embeddings (arXiv 2603.17942).

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    num_distances : int
        ``m``.
    init : {"context", "vocabulary"}
        Mean of the embeddings of the text so far, kept up to date token by token; or of the most frequent tokens.
        How frequent a token is nobody records: byte-pair vocabularies are numbered in the order of their merges, so the
        lowest ids stand for it.
    num_frequent : int
        Tokens averaged with ``init="vocabulary"``.
    """

    name = "free"
    num_epts = 1
    visibility = None

    def __init__(
        self, loaded: LoadedModel, num_distances: int, *, init: str = "context", num_frequent: int = 1000
    ) -> None:
        if num_distances < 1:
            raise InvalidValueError("num_distances", f"must be at least 1, not {num_distances}")
        if init not in ("context", "vocabulary"):
            raise InvalidValueError("init", f"must be context or vocabulary, not {init!r}")
        self.num_distances = num_distances
        self._loaded = loaded
        self._frequent = None
        if init == "vocabulary":
            ids = torch.arange(min(num_frequent, hf.vocab_size(loaded.model)), device=loaded.device)
            mean = hf.embed_tokens(loaded.model, ids).detach().float().mean(0).to(loaded.dtype)
            self._frequent = mean.expand(num_distances, -1)

    def begin(self, token_ids: Sequence[int]) -> TextGuesser:
        """Start a text with the mean of its prompt."""
        if self._frequent is not None:
            return _LogitGuesser(self._frequent)
        guesser = _ContextMeanGuesser(self._loaded, self.num_distances)
        guesser.extend(token_ids)
        return guesser


class _ContextMeanGuesser(_LogitGuesser):
    """Prompt tokens that follow the running mean of the text's embeddings."""

    def __init__(self, loaded: LoadedModel, num_distances: int) -> None:
        self._loaded = loaded
        self._num_distances = num_distances
        self._sum: Tensor | float = 0.0
        self._count = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        ids = torch.tensor(list(token_ids), device=self._loaded.device)
        self._sum = self._sum + hf.embed_tokens(self._loaded.model, ids).detach().float().sum(0)
        self._count += len(token_ids)
        self.embeddings = (self._sum / self._count).to(self._loaded.dtype).expand(self._num_distances, -1)


class LookupGuesses:
    """Guesses whole continuations from the text itself: what followed its last tokens before.

    Parameters
    ----------
    num_distances : int
        ``m``: how far a continuation is followed.
    max_ngram : int
        Longest run of last tokens that is looked up; longer matches are better guesses.
    max_matches : int
        Earlier places considered, most recent first.
    device : torch.device, optional
        Where the guesses go.
    """

    name = "lookup"
    num_epts = 0
    visibility = None

    def __init__(
        self, num_distances: int, *, max_ngram: int = 3, max_matches: int = 16, device: torch.device | None = None
    ) -> None:
        for name, value in (("num_distances", num_distances), ("max_ngram", max_ngram), ("max_matches", max_matches)):
            if value < 1:
                raise InvalidValueError(name, f"must be at least 1, not {value}")
        self.num_distances = num_distances
        self.max_ngram = max_ngram
        self.max_matches = max_matches
        self.device = device

    def begin(self, token_ids: Sequence[int]) -> TextGuesser:
        """Start a text by indexing its prompt."""
        guesser = _LookupGuesser(self)
        guesser.extend(token_ids)
        return guesser


class _LookupGuesser:
    """Index of every n-gram of one text: n-gram -> places right after it, in order of appearance."""

    embeddings = None

    def __init__(self, source: LookupGuesses) -> None:
        self._source = source
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self._tokens.append(token)
            end = len(self._tokens)
            for n in range(1, min(self._source.max_ngram, end) + 1):
                self._places.setdefault(tuple(self._tokens[end - n :]), []).append(end)

    def guess(self, tree: StateBuffers, logits: Tensor | None) -> Tensor:
        """Rank the children of a node by the first match, longest n-gram and latest place first, that has them."""
        guesses = [NO_GUESS] * tree.num_nodes
        continuations: dict[int, list[list[int]]] = {0: self._continuations(tree.depth)}
        for row, children in enumerate(tree.children):
            depth = len(tree.paths[row])
            by_token: dict[int, list[list[int]]] = {}  # in order of first appearance, which is the order of ranks
            for continuation in continuations.get(row, ()):
                if len(continuation) > depth:
                    by_token.setdefault(continuation[depth], []).append(continuation)
            ranked = list(by_token.items())
            for child in children:
                rank = tree.paths[child][-1]
                if rank < len(ranked):
                    guesses[child], continuations[child] = ranked[rank]
        return torch.tensor(guesses, device=self._source.device)

    def _continuations(self, depth: int) -> list[list[int]]:
        """Return what followed the last tokens, best match first, each place once."""
        tokens, seen = self._tokens, dict[int, None]()
        for n in range(min(self._source.max_ngram, len(tokens)), 0, -1):
            places = self._places[tuple(tokens[-n:])]
            # The last place is the end of the text itself: nothing has followed there yet.
            for place in reversed(places[-self._source.max_matches - 1 : -1]):
                seen.setdefault(place)
                if len(seen) == self._source.max_matches:
                    return [tokens[at : at + depth] for at in seen]
        return [tokens[at : at + depth] for at in seen]
