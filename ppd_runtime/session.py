"""The state of a decoding call: the texts, and what their steps share."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppd_runtime.buffers import StateBuffers, plain_buffers
from ppd_runtime.cache import TreeCache
from ppd_runtime.graphs import Forward
from ppd_runtime.guesses import GuessSource, TextGuesser
from ppd_runtime.models import LoadedModel
from ppd_runtime.sampling import TokenRule
from ppd_runtime.stopping import StopRule
from treeopt.errors import DecodeError
from treeopt.types import SwitchTable

__all__ = ["Clock", "Session", "Text", "choose_trees", "clear_memory_errors", "enter_state", "refuse_nan"]


@dataclass(slots=True, eq=False)
class Text:
    """One text of the batch while it is decoded. The newest token is the next pass's root."""

    prompt_ids: tuple[int, ...]
    rule: TokenRule
    stop: StopRule
    new_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    guesser: TextGuesser | None = None
    state: int = 0
    guess_logits: Tensor | None = None  # [state, vocabulary]; None when the source reads none
    steps_per_state: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    step_s: dict[str, float] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and new tokens."""
        return [*self.prompt_ids, *self.new_ids]

    def append(self, token_ids: Sequence[int]) -> list[int]:
        """Write tokens until one of them ends the text; return those written."""
        written = []
        for token in token_ids:
            self.new_ids.append(token)
            written.append(token)
            self.finish_reason = self.stop.after(self.new_ids)
            if self.finish_reason is not None:
                break
        return written


@dataclass(slots=True, eq=False)
class Session:
    """What all steps of one call share.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    forward : callable
        Runs a pass: `ppd_runtime.hf.forward_rows`, or a captured graph of it.
    cache : TreeCache
        Keys and values of the texts in ``texts``, in that order.
    texts : list of Text
        Texts still running.
    trees : tuple of StateBuffers
        Entry ``k`` for state ``k``.
    source : GuessSource, optional
        Where guesses come from; None for plain decoding.
    switch : SwitchTable, optional
        Designs to switch between; ``designs`` are the compiled trees of its entries.
    """

    loaded: LoadedModel
    forward: Forward
    cache: TreeCache
    texts: list[Text]
    trees: tuple[StateBuffers, ...]
    source: GuessSource | None = None
    switch: SwitchTable | None = None
    designs: tuple[tuple[StateBuffers, ...], ...] = ()
    warned: bool = False

    @property
    def limit(self) -> int | None:
        """Positions the model has."""
        return self.loaded.context_limit

    def warn_not_finite(self) -> None:
        """Say once that guesses are missing; the text is right without them."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                "prompt tokens: their logits are not finite; decoding goes on without these guesses (the output is not "
                "affected) - train the prompt tokens again or use another dtype",
                RuntimeWarning,
                stacklevel=3,
            )

    def decode_plainly(self) -> None:
        """Give up guessing for the rest of the call."""
        self.source = self.switch = None
        self.trees = (plain_buffers(self.loaded.device),)
        for text in self.texts:
            text.guesser, text.state, text.guess_logits = None, 0, None


def choose_trees(session: Session) -> None:
    """Take the design that the switching table has for the texts still running and the longest context among them.

    A state means the same in every design, the number of prompt tokens that guesses were made with, so a text's next
    tree may come from another design than its last one.
    """
    if session.switch is not None:
        session.trees = session.designs[session.switch.place(len(session.texts), max(session.cache.lengths))]


def enter_state(session: Session, text: Text, prompt_tokens: int, position: int, logits: Tensor) -> None:
    """Set state and guess logits from the prompt tokens after a node.

    Parameters
    ----------
    session, text
        The text that moves.
    prompt_tokens : int
        Prompt tokens of the node.
    position : int
        The node's position: prompt token j sits at position + j, and counts only inside the context.
    logits : Tensor, shape (rows, vocabulary)
        Logits from the node's first prompt-token row on.
    """
    num_epts = session.source.num_epts
    text.state = prompt_tokens
    if num_epts == 0:
        return
    if session.limit is not None:
        text.state = max(0, min(prompt_tokens, session.limit - 1 - position))
    chains = logits[: text.state * num_epts]
    text.guess_logits = chains if num_epts == 1 else _mean_of_epts(chains, num_epts)


def _mean_of_epts(chains: Tensor, num_epts: int) -> Tensor:
    """Average the logits of each prompt token's EPTs, in float32 as in training and measuring."""
    wide = torch.promote_types(chains.dtype, torch.float32)
    return chains.to(wide).unflatten(0, (-1, num_epts)).mean(1)


class Clock:
    """Adds the time of each part of a step to the texts that took part."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Book the time since the last lap, seconds; work queued on a GPU is waited for."""
        if self._session.loaded.device.type == "cuda":
            torch.cuda.synchronize(self._session.loaded.device)
        now = time.perf_counter()
        for text in self._session.texts:
            text.step_s[part] = text.step_s.get(part, 0.0) + now - self._last
        self._last = now


@contextmanager
def clear_memory_errors(session: Session) -> Iterator[None]:
    """Say what to do when memory runs out. CPU allocators raise a bare RuntimeError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
        if not is_memory:
            raise
        raise DecodeError(
            f"out of memory on {session.loaded.device} with {len(session.texts)} texts of up to "
            f"{max(len(text.token_ids) for text in session.texts)} tokens; decode fewer prompts at once, use a smaller "
            "tree or fewer new tokens (the model is still usable)"
        ) from error


def refuse_nan(session: Session) -> DecodeError:
    """Return the error for a model whose own logits are not a number."""
    return DecodeError(
        f"model {session.loaded.name}: its logits are not a number; check the weights or use a wider dtype"
    )
