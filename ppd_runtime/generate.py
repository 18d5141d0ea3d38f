"""Generate text: the public way into the runtime."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList

from ppd_runtime import hf
from ppd_runtime.buffers import StateBuffers, compile_design, plain_buffers
from ppd_runtime.cache import TreeCache
from ppd_runtime.compiled import compiled_forward, rounded_capacity
from ppd_runtime.decode import decode
from ppd_runtime.graphs import Forward, GraphedForward
from ppd_runtime.guesses import GuessSource
from ppd_runtime.models import LoadedModel
from ppd_runtime.prompts import encode_prompt
from ppd_runtime.sampling import TokenRule, generation_processors
from ppd_runtime.session import Session, Text
from ppd_runtime.settings import Settings
from ppd_runtime.stopping import StopRule, TextStream
from treeopt.artifact import digest
from treeopt.errors import DecodeError
from treeopt.types import DecodeRun, SwitchTable, TreeDesign

__all__ = ["Generation", "TextPiece", "generate", "open_session", "run_of", "session_of", "stream"]

COLUMNS_AHEAD = 256
"""New tokens that a growing cache makes room for at once."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A decoded text and what it took.

    Parameters
    ----------
    prompt_token_ids, token_ids : tuple of int
        What was read; what was written, an end-of-text token included.
    text : str or None
        The new tokens as text, cut before a stop string; None without a tokenizer.
    run : DecodeRun
        Steps, states, times, and why it ended.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    run: DecodeRun

    @property
    def finish_reason(self) -> str:
        """Why it ended: eos, length, stop or context."""
        return self.run.finish_reason

    @property
    def seconds(self) -> float:
        """Prefill and decoding, seconds."""
        return self.run.prefill_s + self.run.decode_s


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one step added to one text of a stream."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    generation: Generation | None = field(default=None)  # of the whole text, with its last piece


def generate(
    loaded: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    design: TreeDesign | SwitchTable | None = None,
    source: GuessSource | None = None,
    settings: Settings | None = None,
    *,
    raw: bool = False,
) -> list[Generation]:
    """Decode prompts together, in one batch.

    Parameters
    ----------
    loaded : LoadedModel
        From `load_model` or `wrap_model`.
    prompts : sequence of str or of sequences of int
        Texts (put into the model's chat template) or token ids. Each ends on its own and comes out as it would alone.
    design : TreeDesign or SwitchTable, optional
        The trees, or designs to switch between while decoding; None is plain decoding, exactly one token a pass.
    source : GuessSource, optional
        Where guesses come from; needed with a design.
    settings : Settings, optional
        How to decode; greedy by default.
    raw : bool
        No chat template.

    Returns
    -------
    list of Generation
        In the order of the prompts.

    Raises
    ------
    DecodeError
        When tree, guesses, model and prompts do not fit together, or memory runs out.

    Examples
    --------
    >>> loaded = load_model("demo")  # doctest: +SKIP
    >>> generate(loaded, ["Name three colours."])[0].text  # doctest: +SKIP
    """
    session, texts = open_session(loaded, prompts, design, source, settings or Settings(), raw=raw)
    for _ in decode(session):
        pass
    return [_result(loaded, text, design, source) for text in texts]


def stream(
    loaded: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    design: TreeDesign | SwitchTable | None = None,
    source: GuessSource | None = None,
    settings: Settings | None = None,
    *,
    raw: bool = False,
) -> Iterator[TextPiece]:
    """Decode like `generate`, handing out every step's tokens as they come.

    Yields
    ------
    TextPiece
        Pieces of the texts in the order they are decoded; text that may yet turn out to be the start of a stop string,
        or part of a character, waits for the next piece.
    """
    session, texts = open_session(loaded, prompts, design, source, settings or Settings(), raw=raw, streaming=True)
    index_of = {id(text): index for index, text in enumerate(texts)}
    for text, token_ids in decode(session):
        generation = None if text.finish_reason is None else _result(loaded, text, design, source)
        piece = text.stop.text.read() if text.stop.text is not None else ""
        yield TextPiece(index_of[id(text)], tuple(token_ids), piece, generation)


def open_session(
    loaded: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    design: TreeDesign | SwitchTable | None,
    source: GuessSource | None,
    settings: Settings,
    *,
    raw: bool = False,
    streaming: bool = False,
) -> tuple[Session, list[Text]]:
    """Check that everything fits together and prepare a call of `ppd_runtime.decode.decode`.

    Returns
    -------
    session : Session
        Ready for prefill.
    texts : list of Text
        One per prompt, in order; the session drops those that have ended.
    """
    if not prompts:
        raise DecodeError("prompts: none given; give at least one")
    texts = [
        _open_text(loaded, index, encode_prompt(loaded, prompt, raw=raw), settings, streaming)
        for index, prompt in enumerate(prompts)
    ]
    return session_of(loaded, texts, design, source, settings.max_new_tokens, settings.cache), texts


def session_of(
    loaded: LoadedModel,
    texts: Sequence[Text],
    design: TreeDesign | SwitchTable | None,
    source: GuessSource | None,
    max_new_tokens: int,
    cache: str,
) -> Session:
    """Compile the design and allocate the cache for some texts."""
    designs, source = _compile(loaded, design, source)
    if cache == "graph" and loaded.device.type != "cuda":
        raise DecodeError(f"cache: graph needs a CUDA device, the model is on {loaded.device}; use dynamic or static")
    static = cache != "dynamic"
    num_prompt_rows = 0 if source is None else source.num_distances * source.num_epts
    ahead = max_new_tokens if static else min(max_new_tokens, COLUMNS_AHEAD)
    longest = max(len(text.prompt_ids) for text in texts)
    if loaded.context_limit is not None:
        ahead = min(ahead, max(0, loaded.context_limit - longest))
    widest = max(tree.pass_tokens for trees in designs for tree in trees)
    capacity = longest + ahead + max(num_prompt_rows, widest)
    if cache == "compiled":
        capacity = rounded_capacity(capacity)
    return Session(
        loaded=loaded,
        forward=_forward_of(cache),
        cache=TreeCache(
            hf.text_config(loaded.model.config).num_hidden_layers,
            len(texts),
            capacity,
            device=loaded.device,
            static=static,
        ),
        texts=list(texts),
        trees=designs[0],
        source=source,
        switch=design if isinstance(design, SwitchTable) else None,
        designs=designs,
    )


def _forward_of(cache: str) -> Forward:
    if cache == "graph":
        return GraphedForward()
    return compiled_forward() if cache == "compiled" else hf.forward_rows


def _compile(
    loaded: LoadedModel, design: TreeDesign | SwitchTable | None, source: GuessSource | None
) -> tuple[tuple[tuple[StateBuffers, ...], ...], GuessSource | None]:
    """Return the trees of every entry of a switching table, or of the one design there is."""
    if design is None:
        return ((plain_buffers(loaded.device),),), None
    if source is None:
        raise DecodeError(
            "guesses: a tree needs a source of guesses; give prompt tokens, or use free or lookup guesses"
        )
    compiled: dict[TreeDesign, tuple[StateBuffers, ...]] = {}
    wanted = [entry.tree for entry in design.entries] if isinstance(design, SwitchTable) else [design]
    for each in wanted:
        if each not in compiled:
            compiled[each] = compile_design(
                each,
                num_distances=source.num_distances,
                vocab_size=hf.vocab_size(loaded.model),
                num_epts=source.num_epts,
                visibility=source.visibility,
                device=loaded.device,
            )
    return tuple(compiled[each] for each in wanted), source


def _open_text(
    loaded: LoadedModel, index: int, prompt_ids: tuple[int, ...], settings: Settings, streaming: bool
) -> Text:
    room = None if loaded.context_limit is None else loaded.context_limit - len(prompt_ids)
    if room is not None and room < 1:
        raise DecodeError(
            f"prompt {index}: has {len(prompt_ids)} tokens, which leaves no room in the model's context of "
            f"{loaded.context_limit}; shorten it"
        )
    if settings.stop and loaded.tokenizer is None:
        raise DecodeError(f"stop strings: model {loaded.name} has no tokenizer; load it with one")
    special = set(getattr(loaded.tokenizer, "all_special_tokens", ()))
    hidden = next((token for token in special if any(token in each for each in settings.stop)), None)
    if hidden is not None:
        raise DecodeError(f"stop strings: {hidden} is a special token, which texts leave out; use another stop string")
    watches_text = loaded.tokenizer is not None and (streaming or settings.stop)
    eos = settings.eos_token_ids
    stop = StopRule(
        max_new_tokens=settings.max_new_tokens,
        eos_token_ids=hf.eos_token_ids(loaded.model) if eos is None else eos,
        room=room,
        text=TextStream(loaded.tokenizer, settings.stop) if watches_text else None,
    )
    return Text(prompt_ids, _rule(loaded, index, len(prompt_ids), settings), stop)


def _rule(loaded: LoadedModel, index: int, prompt_length: int, settings: Settings) -> TokenRule:
    """Build what ``model.generate`` would: the model's own defaults, with the sampling of the settings."""
    if not loaded.model.can_generate():
        processors = LogitsProcessorList()
    else:
        config = copy.deepcopy(loaded.model.generation_config)
        config.do_sample = settings.temperature > 0
        config.temperature = settings.temperature or 1.0
        config.top_k, config.top_p = settings.top_k, settings.top_p
        config.min_p = config.typical_p = config.top_h = None
        config.epsilon_cutoff = config.eta_cutoff = 0.0
        processors = generation_processors(
            loaded.model, config, prompt_length=prompt_length, max_new_tokens=settings.max_new_tokens
        )
    generator = None
    if settings.temperature > 0:
        generator = torch.Generator(loaded.device).manual_seed(settings.seed + index)
    return TokenRule(processors, generator, settings.typical)


def _result(
    loaded: LoadedModel, text: Text, design: TreeDesign | SwitchTable | None, source: GuessSource | None
) -> Generation:
    return Generation(
        text.prompt_ids, tuple(text.new_ids), _text_of(loaded, text), run_of(loaded, text, design, source)
    )


def _text_of(loaded: LoadedModel, text: Text) -> str | None:
    if loaded.tokenizer is None:
        return None
    if text.stop.text is None:
        return loaded.tokenizer.decode(text.new_ids, skip_special_tokens=True)
    return text.stop.text.finish()


def run_of(
    loaded: LoadedModel, text: Text, design: TreeDesign | SwitchTable | None, source: GuessSource | None
) -> DecodeRun:
    """Return the record of a text that has ended."""
    parts = {name: text.step_s.get(name, 0.0) for name in ("forward", "propose", "verify", "commit")}
    return DecodeRun(
        model=loaded.name,
        guesses="none" if design is None or source is None else source.name,
        tree_digest=None if design is None else digest(design),
        num_prompt_tokens=len(text.prompt_ids),
        num_new_tokens=len(text.new_ids),
        num_steps=sum(text.steps_per_state),
        steps_per_state=tuple(text.steps_per_state),
        prefill_s=text.prefill_s,
        decode_s=sum(parts.values()),
        finish_reason=text.finish_reason,
        forward_s=parts["forward"],
        propose_s=parts["propose"],
        verify_s=parts["verify"],
        commit_s=parts["commit"],
    )
