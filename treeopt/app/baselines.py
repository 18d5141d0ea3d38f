"""Ways to decode a prompt, each timed alike: our runtime with a design, and transformers' own.

What is timed is the wall clock from the end of the first pass, which is prefill, to the last token. transformers runs
with the model's own linear layers, as it would without us; our kernel plan is put back afterwards. Its first pass may
already write several tokens (drafted ones), and these are left out on both sides of the ratio.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from ppd_runtime import hf, kernels
from ppd_runtime.cache import TreeCache
from ppd_runtime.compiled import compiled_forward, rounded_capacity
from ppd_runtime.decode import decode
from ppd_runtime.generate import open_session, run_of
from ppd_runtime.graphs import Forward, GraphedForward
from ppd_runtime.guesses import GuessSource, LookupGuesses
from ppd_runtime.models import LoadedModel
from ppd_runtime.settings import Settings
from treeopt.app.bench_results import Timing
from treeopt.errors import DecodeError
from treeopt.types import DecodeRun, LatencyProfile, SparseTree, TreeDesign

__all__ = ["GRAPH_MODES", "Contender", "Engine", "library_contender", "padded_design", "tree_contender"]

GRAPH_MODES = ("eager", "compiled", "cuda_graph")

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to decode: ``decode(prompt index, token ids, tokens to write at most)``, the last None for all.

    ``pass_tokens`` are those of each state's pass, where it is ours.
    """

    name: str
    decode: Callable[[int, Sequence[int], int | None], Timing]
    pass_tokens: tuple[int, ...] = ()


class Engine:
    """How our runtime runs its passes, shared by all designs: the kind of cache, and compiled or captured passes.

    Fixed shapes need one cache for all prompts, with room for the longest.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    settings : Settings
        How to decode; greedy.
    graph_mode : {"eager", "compiled", "cuda_graph"}
        The latter two need ``settings.cache`` static.
    capacity : int
        Tokens of the longest prompt, its answer and the largest pass together.
    clock : callable
        Seconds.

    Raises
    ------
    DecodeError
        When cache, device and graph mode do not go together.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: Settings,
        *,
        graph_mode: str = "eager",
        capacity: int,
        clock: Clock = time.perf_counter,
    ) -> None:
        if graph_mode not in GRAPH_MODES:
            raise DecodeError(f"graph mode: must be one of {', '.join(GRAPH_MODES)}, not {graph_mode!r}")
        if graph_mode != "eager" and settings.cache != "static":
            raise DecodeError(f"graph mode {graph_mode}: needs --cache static; shapes and addresses must not change")
        if graph_mode == "cuda_graph" and loaded.device.type != "cuda":
            raise DecodeError(f"graph mode cuda_graph: needs a CUDA device, the model is on {loaded.device}")
        self.loaded = loaded
        self.settings = settings
        self.clock = clock
        self._forward: Forward | None = None
        self._cache: TreeCache | None = None
        if graph_mode == "compiled":
            self._forward = compiled_forward()
            capacity = rounded_capacity(capacity)
        elif graph_mode == "cuda_graph":
            self._forward = GraphedForward()
        if settings.cache == "static":
            num_layers = hf.text_config(loaded.model.config).num_hidden_layers
            self._cache = TreeCache(num_layers, 1, capacity, device=loaded.device, static=True)

    def decode(
        self,
        name: str,
        prompt: int,
        token_ids: Sequence[int],
        design: TreeDesign | None,
        source: GuessSource | None,
        limit: int | None = None,
    ) -> Timing:
        """Decode one prompt, to ``limit`` tokens if given, and time it."""
        settings = self.settings if limit is None else replace(self.settings, max_new_tokens=limit)
        session, (text,) = open_session(self.loaded, [list(token_ids)], design, source, settings)
        if self._cache is not None:
            session.cache = self._cache
        if self._forward is not None:
            session.forward = self._forward
        first_s = None
        for _ in decode(session):
            if first_s is None:
                self._wait()
                first_s = self.clock()
        self._wait()
        seconds = self.clock() - (first_s or 0.0)
        run = replace(run_of(self.loaded, text, design, source), decode_s=seconds)
        return Timing(name, prompt, tuple(text.new_ids), len(text.new_ids) - 1, seconds, run)

    def _wait(self) -> None:
        if self.loaded.device.type == "cuda":
            torch.cuda.synchronize(self.loaded.device)


def tree_contender(engine: Engine, name: str, design: TreeDesign | None, source: GuessSource | None) -> Contender:
    """Return our runtime with a design; without one, plain decoding."""
    sizes = (1,) if design is None else design.pass_tokens
    return Contender(name, lambda prompt, ids, limit: engine.decode(name, prompt, ids, design, source, limit), sizes)


def padded_design(latency: LatencyProfile) -> tuple[TreeDesign, GuessSource] | None:
    """Return plain decoding whose pass is padded to the cheapest measured size; None when that is one token.

    It shows how much of a tree's gain a faster pass gives by itself: latency curves have stairs that fall.
    """
    best = latency.cheapest(1, latency.points[-1].num_tokens)
    if best is None or best.num_tokens == 1:
        return None
    # A tree without candidates, with guesses that cost nothing: the pass holds the root and padding.
    root = SparseTree.from_prompt_tokens({(): 1})
    design = TreeDesign(
        trees=(root, root),
        budget=None,
        method="imported",
        objective="tokens_per_second",
        acceptance_model=None,
        tokens_per_prompt_token=0,
        pass_tokens=(best.num_tokens, best.num_tokens),
        acceptance_length=None,
        upper_bound=None,
    )
    return design, LookupGuesses(1, max_ngram=1, max_matches=1)


class _Stopwatch(StoppingCriteria):
    """Never stops anything: notes when each pass was done, and how long the text was."""

    def __init__(self, clock: Clock, wait: Callable[[], None]) -> None:
        self.marks: list[tuple[float, int]] = []
        self._clock = clock
        self._wait = wait

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self._wait()
        self.marks.append((self._clock(), input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def library_contender(
    loaded: LoadedModel,
    settings: Settings,
    name: str = "generate",
    *,
    lookup_tokens: int | None = None,
    assistant: LoadedModel | None = None,
    clock: Clock = time.perf_counter,
) -> Contender:
    """Return ``model.generate`` of transformers: plain, with prompt lookup, or with an assistant model.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    settings : Settings
        ``max_new_tokens`` and the tokens that end a text.
    name : str
        Name in the results.
    lookup_tokens : int, optional
        Prompt lookup with so many candidates a step.
    assistant : LoadedModel, optional
        Assisted generation with this model, which must share the tokenizer.
    clock : callable
        Seconds.

    Raises
    ------
    DecodeError
        When the assistant has another vocabulary.
    """
    if assistant is not None and hf.vocab_size(assistant.model) != hf.vocab_size(loaded.model):
        raise DecodeError(
            f"assistant {assistant.name}: its vocabulary is not that of {loaded.name}; give a model with the same "
            "tokenizer"
        )
    extra: dict[str, Any] = {}
    if lookup_tokens is not None:
        extra["prompt_lookup_num_tokens"] = lookup_tokens
    if assistant is not None:
        extra["assistant_model"] = assistant.model
    guesses = "none" if not extra else "lookup" if assistant is None else "assistant"
    config = _greedy_config(loaded, settings)

    def wait() -> None:
        if loaded.device.type == "cuda":
            torch.cuda.synchronize(loaded.device)

    def decode_prompt(prompt: int, token_ids: Sequence[int], limit: int | None) -> Timing:
        watch = _Stopwatch(clock, wait)
        wanted = copy.deepcopy(config)
        wanted.max_new_tokens = limit or settings.max_new_tokens
        ids = torch.tensor([list(token_ids)], device=loaded.device)
        started_s = clock()
        with _own_layers(loaded), _quiet(), torch.inference_mode():
            generate: Any = loaded.model.generate
            output = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=wanted,
                stopping_criteria=StoppingCriteriaList([watch]),
                **extra,
            )
        new_ids = tuple(output[0, len(token_ids) :].tolist())
        (first_s, first_len), (last_s, last_len) = watch.marks[0], watch.marks[-1]
        ended = bool(new_ids) and new_ids[-1] in _ending_ids(loaded, settings)
        run = DecodeRun(
            model=loaded.name,
            guesses=guesses,
            tree_digest=None,
            num_prompt_tokens=len(token_ids),
            num_new_tokens=len(new_ids),
            num_steps=len(watch.marks) - 1,
            steps_per_state=(),
            prefill_s=first_s - started_s,
            decode_s=last_s - first_s,
            finish_reason="eos" if ended else "length",
        )
        return Timing(name, prompt, new_ids, last_len - first_len, last_s - first_s, run)

    return Contender(name, decode_prompt)


def _ending_ids(loaded: LoadedModel, settings: Settings) -> frozenset[int]:
    return hf.eos_token_ids(loaded.model) if settings.eos_token_ids is None else settings.eos_token_ids


def _greedy_config(loaded: LoadedModel, settings: Settings) -> GenerationConfig:
    """Return the model's own settings, greedy and of our length: what our runtime follows too."""
    config = copy.deepcopy(loaded.model.generation_config)
    config.do_sample = False
    config.temperature = config.top_p = config.top_k = None
    config.max_length = None
    config.max_new_tokens = settings.max_new_tokens
    ending = sorted(_ending_ids(loaded, settings))
    config.eos_token_id = ending or None
    if config.pad_token_id is None:
        config.pad_token_id = ending[0] if ending else 0
    return config


@contextmanager
def _own_layers(loaded: LoadedModel) -> Iterator[None]:
    """Give the model its own linear layers for a while."""
    kernels.remove_plan(loaded.model)
    try:
        yield
    finally:
        kernels.apply_plan(loaded.model, kernels.KernelPlan(loaded.kernels))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' advice out of the output."""
    before = logging.get_verbosity()
    logging.set_verbosity(40)  # errors only
    try:
        yield
    finally:
        logging.set_verbosity(before)
