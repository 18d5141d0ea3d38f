"""When a text ends, and how its tokens become text while it grows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from treeopt.errors import InvalidValueError

__all__ = ["StopRule", "TextStream"]

UNFINISHED = "\ufffd"
"""What tokenizers write for a character of which some bytes are still to come."""


@dataclass(slots=True)
class StopRule:
    """Decides after every token whether a text has ended.

    Parameters
    ----------
    max_new_tokens : int
        Tokens to write at most, exactly.
    eos_token_ids : frozenset of int
        Any of these ends the text; it is the text's last token.
    room : int, optional
        Tokens that fit after the prompt.
    text : TextStream, optional
        Ends the text at its stop strings.
    criterion : callable, optional
        A further rule, asked last: takes the new tokens, says whether to stop.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    room: int | None = None
    text: "TextStream | None" = None
    criterion: Callable[[Sequence[int]], bool] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InvalidValueError("max_new_tokens", f"must be at least 1, not {self.max_new_tokens}")

    def after(self, new_ids: Sequence[int]) -> str | None:
        """Return why the text ends with its newest token: eos, stop, length or context; None when it goes on."""
        if self.text is not None:
            self.text.push(new_ids[-1])
        if new_ids[-1] in self.eos_token_ids:
            return "eos"
        if self.text is not None and self.text.stopped:
            return "stop"
        if self.criterion is not None and self.criterion(new_ids):
            return "stop"
        if len(new_ids) >= self.max_new_tokens:
            return "length"
        if self.room is not None and len(new_ids) >= self.room:
            return "context"
        return None


class TextStream:
    """Turns tokens into text one by one, at a cost that does not grow with the text.

    A token need not be whole characters, and some tokenizers write a token differently after another (leading spaces).
    So the last few tokens are decoded together, once with and once without the newest ones, and what the newest add is
    the difference; it waits while it ends inside a character.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The model's tokenizer.
    stop : sequence of str
        Strings that end the text. The text is cut before the first of them; the tokens keep it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        if any(not each for each in stop):
            raise InvalidValueError("stop", "holds an empty string, which every text contains; remove it")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._shown = 0  # ids[:shown] are in the text
        self._context = 0  # ids[context:shown] are decoded again, to see what comes after them in place
        self._parts: list[str] = []  # the text, certain
        self._num_read = 0
        self._tail = ""  # text that may still be cut: the longest start of a stop string it ends with
        self.stopped = False

    def push(self, token_id: int) -> None:
        """Add a token."""
        if self.stopped:
            return
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._shown])
        after = self._decode(self._ids[self._context :])
        if len(after) > len(before) and not after.endswith(UNFINISHED):
            self._context, self._shown = self._shown, len(self._ids)
            self._add(after[len(before) :])

    def finish(self) -> str:
        """Add what was held back, for the text has ended, and return all of it."""
        if not self.stopped:
            before = self._decode(self._ids[self._context : self._shown])
            self._add(self._decode(self._ids[self._context :])[len(before) :])
            self._shown = self._context = len(self._ids)
            self._parts.append(self._tail)
            self._tail = ""
        return "".join(self._parts)

    def read(self) -> str:
        """Return the text that has become certain since the last call."""
        text = "".join(self._parts[self._num_read :])
        self._num_read = len(self._parts)
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True) if token_ids else ""

    def _add(self, piece: str) -> None:
        text = self._tail + piece
        found = [at for at in (text.find(each) for each in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._parts.append(text[: min(found)])
            self._tail = ""
            return
        held = _overlap(text, self._stop)
        self._parts.append(text[: len(text) - held])
        self._tail = text[len(text) - held :]


def _overlap(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of the text that a stop string starts with."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(each.startswith(text[-n:]) for each in stop)), 0)
