"""The runtime's decoding step, packed for the profiler: what is timed is what decoding executes.

`StepBench.step` builds a whole step (guesses filled in, tree mask and positions, one pass, verification, cache
compaction); `StepBench.forward` the bare pass of the same number of rows beside it, so that one sees what the rest
costs. One token is plain decoding, the step that every speedup is measured against. Both put the cache back to
the context before every step, which is not timed.

Imports torch: import this module inside the function that needs it.
"""

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ppd_runtime import hf
from ppd_runtime.buffers import StateBuffers, compile_tree
from ppd_runtime.cache import TreeCache
from ppd_runtime.compiled import compiled_forward, rounded_capacity
from ppd_runtime.decode import Walk, commit, forward, propose, verify
from ppd_runtime.generate import open_session
from ppd_runtime.graphs import GraphedForward
from ppd_runtime.guesses import PromptGuesses
from ppd_runtime.models import LoadedModel, load_model, wrap_model
from ppd_runtime.prefill import prefill
from ppd_runtime.prompt_tokens import PromptTokens
from ppd_runtime.session import Session, Text
from ppd_runtime.settings import Settings
from treeopt.errors import ModelError, ProfileError
from treeopt.types import SparseTree

__all__ = ["StepBench", "load", "profiling_tree"]

NUM_DISTANCES = 3
"""``m`` of the trees that are timed, as in the paper."""

ROOM = 2**30
"""New tokens a text may write: no step may end it."""


def profiling_tree(num_tokens: int, num_distances: int = NUM_DISTANCES) -> SparseTree:
    """Return an ordinary tree of exactly ``num_tokens`` rows: half candidates, half prompt tokens.

    Latency hangs on the number of rows, hardly on the shape; this one branches like the trees that searches return.

    Examples
    --------
    >>> [profiling_tree(n).size(1) for n in (1, 2, 3, 8, 64)]
    [1, 2, 3, 8, 64]
    """
    num_candidates = (num_tokens - 1) // 2
    prompt_tokens: dict[tuple[int, ...], int] = {(): 0}
    # Best first over paths: a rank costs as much as two levels, so trees get both broad and deep.
    waiting: list[tuple[int, tuple[int, ...]]] = [(1, (0,))]
    while len(prompt_tokens) <= num_candidates:
        cost, path = heapq.heappop(waiting)
        prompt_tokens[path] = 0
        heapq.heappush(waiting, (cost + 2, (*path[:-1], path[-1] + 1)))
        if len(path) < num_distances:
            heapq.heappush(waiting, (cost + 1, (*path, 0)))
    left = num_tokens - len(prompt_tokens)
    nodes = sorted(prompt_tokens, key=lambda path: (len(path), path))
    for i in range(left):  # at most two rounds: there are no more prompt tokens than nodes, plus one
        prompt_tokens[nodes[i % len(nodes)]] += 1
    return SparseTree.from_prompt_tokens(prompt_tokens)


def load(model: str, *, config: str | None, dtype: str, device: str, attention: str, kernels: str) -> LoadedModel:
    """Load a model, or build one with random weights in the shape of a ``config.json``: latency needs no training.

    Raises
    ------
    ModelError
        When the model cannot be loaded or built.
    """
    if config is None:
        return load_model(model, dtype=dtype, device=device, attention=attention, kernels=kernels)
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        shape = AutoConfig.from_pretrained(config)
        backend = hf.default_attention(shape) if attention == "auto" else attention
        with torch.device(device), torch.random.fork_rng(devices=[]):
            build: Any = AutoModelForCausalLM.from_config
            built = build(shape, dtype=getattr(torch, dtype), attn_implementation=backend)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"--config {config}: no model can be built from it ({reason}); give a config.json") from error
    return wrap_model(built, name=model, kernels=kernels)


class _Cycle:
    """A step to be timed: what puts the cache back, and what is timed."""

    def __init__(self, restore: Callable[[], None], run: Callable[[], object]) -> None:
        self._restore = restore
        self._run = run

    def restore(self) -> None:
        """Put the cache and the texts back."""
        with torch.inference_mode():
            self._restore()

    def run(self) -> None:
        """Do what is timed."""
        with torch.inference_mode():
            self._run()


class StepBench:
    """Steps of one loaded model at any context, sharing one prefilled cache per context and batch.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    cache : {"dynamic", "static"}
        Kind of KV cache.
    graph_mode : {"eager", "compiled", "cuda_graph"}
        How passes are run; the latter two need the static cache.
    max_tokens : int
        Largest input length that will be asked for.
    seed : int
        Of the random text that fills the context.
    """

    def __init__(self, loaded: LoadedModel, *, cache: str, graph_mode: str, max_tokens: int, seed: int = 0) -> None:
        if graph_mode != "eager" and cache != "static":
            raise ProfileError(f"--graph-mode {graph_mode}: needs --cache static; shapes and addresses must not change")
        if graph_mode == "cuda_graph" and loaded.device.type != "cuda":
            raise ProfileError(f"--graph-mode cuda_graph: needs a CUDA device, the model is on {loaded.device}")
        self._loaded = loaded
        self._cache = cache
        self._graph_mode = graph_mode
        self._max_tokens = max_tokens
        self._seed = seed
        self._key: tuple[int, int] | None = None
        self._session: Session | None = None
        std = float(next(loaded.model.get_input_embeddings().parameters()).float().std())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            embeddings = std * torch.randn(NUM_DISTANCES, 1, hf.embedding_size(loaded.model))
        tokens = PromptTokens(embeddings, "ensemble", base_model=loaded.name, base_digest=loaded.digest)
        self._source = PromptGuesses(loaded, tokens)

    @torch.inference_mode()
    def _prepared(self, context_len: int, batch_size: int) -> Session:
        """Fill a cache with the context, and keep it until another context is asked for."""
        if self._session is not None and self._key == (context_len, batch_size):
            return self._session
        limit = self._loaded.context_limit
        if context_len < 1 or (limit is not None and context_len + NUM_DISTANCES >= limit):
            raise ProfileError(
                f"--contexts {context_len}: must be from 1 to {(limit or ROOM) - NUM_DISTANCES - 1} for this model"
            )
        self._session = None  # frees the old cache before the new one is allocated
        generator = torch.Generator().manual_seed(self._seed)
        vocabulary = hf.vocab_size(self._loaded.model)
        prompts = torch.randint(vocabulary, (batch_size, context_len), generator=generator).tolist()
        settings = Settings(max_new_tokens=ROOM, eos_token_ids=frozenset())
        session, texts = open_session(self._loaded, prompts, None, None, settings, raw=True)
        for text in texts:
            text.stop = replace(text.stop, room=None)
        session.source = self._source
        session.trees = (session.trees[0],) * (NUM_DISTANCES + 1)
        capacity = context_len + max(self._max_tokens, NUM_DISTANCES) + 1
        session.cache = TreeCache(
            len(session.cache.layers),
            batch_size,
            rounded_capacity(capacity) if self._graph_mode == "compiled" else capacity,
            device=self._loaded.device,
            static=self._cache == "static",
        )
        prefill(session)
        if self._graph_mode == "cuda_graph":
            session.forward = GraphedForward()
        elif self._graph_mode == "compiled":
            session.forward = compiled_forward()
        self._key, self._session = (context_len, batch_size), session
        return session

    def step(self, num_tokens: int, context_len: int, batch_size: int) -> _Cycle:
        """Return the whole step; see `profiler.latency.StepFactory`."""
        base = self._prepared(context_len, batch_size)
        session = self._session_for(base, num_tokens)
        fresh = [_copy(text) for text in base.texts]
        tree = session.trees[-1]
        # The last child of the root is accepted: its row is not where it has to end up, so compaction moves it.
        rows = (0, tree.children[0][-1]) if tree.children[0] else (0,)
        walks = [Walk(rows, tuple(1 for _ in rows))] * batch_size

        def restore() -> None:
            session.cache.settle([context_len] * batch_size)
            session.texts = [_copy(text) for text in fresh]
            if session.source is None:
                for text in session.texts:
                    text.guesser, text.state, text.guess_logits = None, 0, None

        def run() -> None:
            proposal = propose(session)
            logits = forward(session, proposal)
            verify(session, proposal, logits)
            commit(session, proposal, logits, walks)

        return _Cycle(restore, run)

    def forward(self, num_tokens: int, context_len: int, batch_size: int) -> _Cycle:
        """Return the bare pass over as many rows, nothing prepared or kept inside the timed region."""
        base = self._prepared(context_len, batch_size)
        session = self._session_for(base, num_tokens)
        device, cache = self._loaded.device, session.cache
        ids = torch.ones((batch_size, num_tokens), dtype=torch.long, device=device)
        embeddings = hf.embed_tokens(self._loaded.model, ids)
        positions = context_len + torch.arange(num_tokens, device=device).repeat(batch_size, 1)
        if self._loaded.context_limit is not None:
            positions.clamp_(max=self._loaded.context_limit - 1)
        allowed = torch.ones((num_tokens, num_tokens), dtype=torch.bool, device=device).tril().repeat(batch_size, 1, 1)
        rows = torch.arange(num_tokens, device=device)
        state: dict[str, Any] = {}

        def restore() -> None:
            cache.settle([context_len] * batch_size)
            cache.open(num_tokens)
            state["mask"] = cache.pass_mask(allowed)

        def run() -> None:
            session.forward(
                self._loaded.model,
                inputs_embeds=embeddings,
                mask=state["mask"],
                position_ids=positions,
                cache=cache,
                rows=rows,
            )

        return _Cycle(restore, run)

    def _session_for(self, base: Session, num_tokens: int) -> Session:
        """Return a session that shares everything with the prepared one but the trees."""
        if num_tokens > self._max_tokens:
            raise ProfileError(f"step of {num_tokens} tokens: the bench was made for {self._max_tokens} at most")
        state = 0 if num_tokens == 1 else NUM_DISTANCES
        buffers: StateBuffers = compile_tree(
            profiling_tree(num_tokens), state, num_tokens, vocab_size=hf.vocab_size(self._loaded.model),
            device=self._loaded.device,
        )  # fmt: skip
        return Session(
            loaded=base.loaded,
            forward=base.forward,
            cache=base.cache,
            texts=[],
            trees=(buffers,) * (state + 1),
            source=None if num_tokens == 1 else self._source,
        )

    def synchronise(self) -> None:
        """Wait for the device."""
        kind = self._loaded.device.type
        if kind == "cuda":
            torch.cuda.synchronize(self._loaded.device)
        elif kind == "mps":
            torch.mps.synchronize()


def _copy(text: Text) -> Text:
    """Return a text as it was after prefill; a step changes its lists, not its logits."""
    return replace(text, new_ids=list(text.new_ids), steps_per_state=list(text.steps_per_state), step_s={})
