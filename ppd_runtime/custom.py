"""The way in from Hugging Face's own ``model.generate``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ppd_runtime import hf
from ppd_runtime.decode import decode
from ppd_runtime.generate import session_of
from ppd_runtime.guesses import FreeGuesses, GuessSource, LookupGuesses, PromptGuesses
from ppd_runtime.kernels import planned_name
from ppd_runtime.models import LoadedModel, wrap_model
from ppd_runtime.prompt_tokens import PromptTokens
from ppd_runtime.sampling import TokenRule, check_processors
from ppd_runtime.session import Text
from ppd_runtime.stopping import StopRule
from treeopt.errors import DecodeError
from treeopt.types import TreeDesign

__all__ = ["custom_generate", "guess_source"]

_checked: "WeakKeyDictionary[PreTrainedModel, tuple[object, dict[str, Any]]]" = WeakKeyDictionary()
"""What was found of models that were used before, without the models: with them, they would never be freed."""


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    tree: TreeDesign | None = None,
    prompt_tokens: PromptTokens | None = None,
    guesses: str | GuessSource | None = None,
    **model_kwargs: object,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode with a tree inside ``model.generate``.

    ``model.generate(**inputs, custom_generate=ppd_runtime.custom_generate, tree=design, prompt_tokens=tokens)`` returns
    what ``model.generate(**inputs)`` returns. All of generate's options keep their meaning or are refused by name.

    Parameters
    ----------
    model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
        Given by ``generate``. Batches are padded on the left.
    tree : TreeDesign, optional
        The trees; None is plain decoding.
    prompt_tokens : PromptTokens, optional
        Trained prompt tokens.
    guesses : {"prompt", "free", "lookup"} or GuessSource, optional
        Where guesses come from: the prompt tokens if given, else lookup or free, by the tree's ``e``.

    Returns
    -------
    LongTensor, shape (batch, prompt + new tokens), or GenerateDecoderOnlyOutput
        As ``generate``.

    Raises
    ------
    DecodeError
        For options that a tree cannot honour: beams, scores, foreign logits processors.

    Notes
    -----
    transformers passes no streamer to custom functions; `ppd_runtime.stream` streams.
    """
    _refuse_options(generation_config)
    attention = _attention(input_ids, model_kwargs)
    max_new_tokens = int(generation_config.max_length) - input_ids.shape[1]
    with _as_for_decoding(model):
        loaded = _wrapped(model)
        source = None if tree is None else _source_for(loaded, tree, prompt_tokens, guesses)
        texts = [
            _text(loaded, b, row, int((mask == 0).sum()), logits_processor, stopping_criteria, generation_config)
            for b, (row, mask) in enumerate(zip(input_ids.tolist(), attention, strict=True))
        ]
        for _ in decode(session_of(loaded, texts, tree, source, max_new_tokens, "dynamic")):
            pass
    sequences = _join(input_ids, texts, generation_config)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def _attention(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> Tensor:
    """Return the attention mask of a batch; refuse inputs that are not whole texts, padded on the left."""
    if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise DecodeError("inputs_embeds: cannot be decoded with a tree; give input_ids only")
    for name in ("past_key_values", "cache"):
        cache = model_kwargs.get(name)
        if isinstance(cache, Cache) and cache.get_seq_length() > 0:
            raise DecodeError(
                f"{name}: a filled cache cannot be continued with a tree; give the whole text as input_ids"
            )
    attention = model_kwargs.get("attention_mask")
    if attention is None:
        return torch.ones_like(input_ids)
    if attention.shape != input_ids.shape or bool((attention[:, 1:] < attention[:, :-1]).any()):
        raise DecodeError("attention_mask: must be of the shape of input_ids, with padding on the left and no holes")
    return attention


def _wrapped(model: PreTrainedModel) -> LoadedModel:
    """Check a model once, and again when it was moved, cast or given another attention."""
    now = (model.device, model.dtype, hf.attention_backend(model))
    kept = _checked.get(model)
    if kept is None or kept[0] != now:
        # A kernel plan that it was loaded with stays.
        loaded = wrap_model(model, kernels=planned_name(model))
        kept = (now, {each.name: getattr(loaded, each.name) for each in fields(loaded) if each.name != "model"})
        _checked[model] = kept
    return LoadedModel(model=model, **kept[1])


@contextmanager
def _as_for_decoding(model: PreTrainedModel) -> Iterator[None]:
    """Switch dropout off for a call, and leave the model to its owner's training as it was found."""
    training = [module for module in model.modules() if module.training]
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True
        for weight in trainable:
            weight.requires_grad_(True)


def guess_source(
    loaded: LoadedModel, kind: str, num_distances: int, prompt_tokens: PromptTokens | None = None
) -> GuessSource:
    """Make a source of guesses by name.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    kind : {"prompt", "free", "lookup"}
        Which source.
    num_distances : int
        ``m`` of the tree, for the sources that take any.
    prompt_tokens : PromptTokens, optional
        For ``prompt``.

    Raises
    ------
    DecodeError
        For an unknown name, or ``prompt`` without prompt tokens.
    """
    if kind == "prompt":
        if prompt_tokens is None:
            raise DecodeError("guesses: prompt needs prompt tokens; give a file, or use free or lookup")
        return PromptGuesses(loaded, prompt_tokens)
    if kind == "free":
        # The embedding that treeopt measure calls free: what is measured is what decodes.
        return FreeGuesses(loaded, num_distances, init="vocabulary", num_frequent=hf.vocab_size(loaded.model))
    if kind == "lookup":
        return LookupGuesses(num_distances, device=loaded.device)
    raise DecodeError(f"guesses: must be prompt, free or lookup, not {kind!r}")


def _source_for(
    loaded: LoadedModel, tree: TreeDesign, prompt_tokens: PromptTokens | None, guesses: str | GuessSource | None
) -> GuessSource:
    if guesses is None:
        guesses = "prompt" if prompt_tokens is not None else "lookup" if tree.tokens_per_prompt_token == 0 else "free"
    if isinstance(guesses, str):
        return guess_source(loaded, guesses, tree.num_distances, prompt_tokens)
    return guesses


def _refuse_options(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise DecodeError(f"generation mode {mode.value}: cannot be decoded with a tree; use greedy search or sampling")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise DecodeError(f"{name}: is not recorded when decoding with a tree; leave it out")


def _text(
    loaded: LoadedModel,
    batch_row: int,
    padded_ids: list[int],
    num_padding: int,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
) -> Text:
    """Turn a row of the batch into a text without padding; rules that count tokens see the padding, as in generate."""
    prompt_ids = tuple(padded_ids[num_padding:])
    room = None if loaded.context_limit is None else loaded.context_limit - len(prompt_ids)
    if not prompt_ids or (room is not None and room < 1):
        raise DecodeError(
            f"input_ids, row {batch_row}: has {len(prompt_ids)} tokens, the context is {loaded.context_limit}; give at "
            "least one token and leave room for one"
        )
    eos = frozenset(token for each in criteria if hasattr(each, "eos_token_id") for token in each.eos_token_id.tolist())
    others = [
        each for each in criteria if not hasattr(each, "eos_token_id") and not isinstance(each, MaxLengthCriteria)
    ]
    stop = StopRule(
        max_new_tokens=int(config.max_length) - len(padded_ids),
        eos_token_ids=eos,
        room=room,
        criterion=_criterion(StoppingCriteriaList(others), padded_ids, loaded.device) if others else None,
    )
    generator = None
    if config.do_sample:
        # Drawn from the global generator: torch.manual_seed governs sampling here as it does in generate.
        generator = torch.Generator(loaded.device).manual_seed(int(torch.randint(2**62, (1,))))
    padding = padded_ids[:num_padding]
    return Text(prompt_ids, TokenRule(_of_row(processors, batch_row, padding), generator), stop)


def _criterion(
    criteria: StoppingCriteriaList, padded_ids: list[int], device: torch.device
) -> Callable[[Sequence[int]], bool]:
    def stops(new_ids: Sequence[int]) -> bool:
        return bool(criteria(torch.tensor([[*padded_ids, *new_ids]], device=device), None).all())

    return stops


class _WithPadding(LogitsProcessorList):
    """Processors of one row, which see its text with the padding that generate has before it."""

    def __init__(self, processors: LogitsProcessorList, padding: list[int]) -> None:
        super().__init__(processors)
        self._padding = padding

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        padding = input_ids.new_tensor([self._padding])
        return super().__call__(torch.cat([padding, input_ids], dim=1), scores, **kwargs)


def _of_row(processors: LogitsProcessorList, batch_row: int, padding: list[int]) -> LogitsProcessorList:
    """Return a row's own processors: the repetition penalty holds the padding of the whole batch."""
    own = LogitsProcessorList()
    for processor in check_processors(processors):
        if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(
            processor.prompt_ignore_length, Tensor
        ):
            own.append(
                RepetitionPenaltyLogitsProcessor(
                    processor.penalty, prompt_ignore_length=processor.prompt_ignore_length[batch_row : batch_row + 1]
                )
            )
        else:
            own.append(processor)
    return _WithPadding(own, padding) if own and padding else own


def _join(input_ids: Tensor, texts: Sequence[Text], config: GenerationConfig) -> Tensor:
    pad = config.pad_token_id
    if config._pad_token_tensor is not None:
        pad = int(config._pad_token_tensor)
    longest = max(len(text.new_ids) for text in texts)
    written = input_ids.new_full((len(texts), longest), 0 if pad is None else pad)
    for b, text in enumerate(texts):
        written[b, : len(text.new_ids)] = input_ids.new_tensor(text.new_ids)
    return torch.cat([input_ids, written], dim=1)
