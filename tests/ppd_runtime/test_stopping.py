import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_runtime.stopping import StopRule, TextStream
from tests.ppd_runtime.tokenizers import byte_tokenizer
from treeopt.errors import InvalidValueError

TOKENIZER = byte_tokenizer()


def run(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], int, bool]:
    """Push a text byte by byte; return the pieces, the bytes pushed until it stopped, and whether it did."""
    stream = TextStream(TOKENIZER, stop)
    pieces, ids = [], TOKENIZER(text)["input_ids"]
    for count, token in enumerate(ids, start=1):
        stream.push(token)
        pieces.append(stream.read())
        if stream.stopped:
            return pieces, count, True
    stream.finish()
    return [*pieces, stream.read()], len(ids), False


@given(st.text(max_size=30))
def test_pieces_add_up_to_the_text_and_no_character_is_cut(text: str) -> None:
    pieces, _, _ = run(text)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.text(alphabet="abé", max_size=25), st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_the_first_stop_string_and_at_its_last_token(text: str, stop: list[str]) -> None:
    pieces, pushed, stopped = run(text, tuple(stop))
    # By hand: the shortest start of the text that contains a stop string.
    ends = [n for n in range(len(text) + 1) if any(each in text[:n] for each in stop)]
    assert stopped == bool(ends)
    if not ends:
        assert "".join(pieces) == text
        return
    read = text[: ends[0]]
    assert pushed == len(read.encode())
    assert "".join(pieces) == read[: min(read.find(each) for each in stop if each in read)]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(TOKENIZER, ("END",))
    seen = []
    for token in TOKENIZER("xENyEN")["input_ids"]:
        stream.push(token)
        seen.append(stream.read())
    assert seen == ["x", "", "", "ENy", "", ""]
    assert stream.finish() == "xENyEN"
    assert stream.read() == "EN"


def test_a_stream_decodes_a_few_tokens_at_a_time_however_long_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, longest = TextStream(TOKENIZER), 0
    decode = stream._decode

    def watched(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    monkeypatch.setattr(stream, "_decode", watched)
    for token in TOKENIZER("abcdéfgh€" * 30)["input_ids"]:
        stream.push(token)
    assert longest <= 6


@pytest.mark.parametrize(
    ("new_ids", "reason"),
    [([1, 2], None), ([1, 9], "eos"), ([8], "eos"), ([1, 2, 3, 4, 5], "length"), ([1, 2, 3, 4, 9], "eos")],
)
def test_end_of_text_comes_before_length(new_ids: list[int], reason: str | None) -> None:
    assert StopRule(5, frozenset({8, 9}), room=5).after(new_ids) == reason


def test_length_comes_before_context_and_criteria_before_both() -> None:
    assert StopRule(5, room=3).after([1, 2, 3]) == "context"
    assert StopRule(3, room=3).after([1, 2, 3]) == "length"
    assert StopRule(3, criterion=lambda ids: len(ids) == 3).after([1, 2, 3]) == "stop"


def test_empty_stop_strings_and_lengths_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="stop: holds an empty string"):
        TextStream(TOKENIZER, ("a", ""))
    with pytest.raises(InvalidValueError, match="max_new_tokens: must be at least 1"):
        StopRule(0)
