"""Train prompt tokens: a frozen model, a few embeddings, and the model's own predictions as the teacher.

A step runs some texts through the model once without gradients, inserts groups of prompt tokens at random positions
of each, runs all groups against the text's keys and values, and moves the embeddings down the gradient. Nothing else
in the process has a gradient. A step is a pure function of the state before it and of the plan's seed, so a run that
was killed goes on from its last checkpoint to exactly the weights it would have reached.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ppd_runtime import hf
from ppd_runtime.answers import Text
from ppd_runtime.groups import group_attention, group_logits, text_pass
from ppd_runtime.losses import distillation_loss
from ppd_runtime.models import LoadedModel
from ppd_runtime.prompt_tokens import MASKS, MAX_DISTANCES, PromptTokens
from treeopt.errors import InvalidValueError, TrainingError

__all__ = [
    "TrainingPlan",
    "TrainingState",
    "choose_insertions",
    "initial_state",
    "learning_rate_at",
    "train_steps",
    "usable_texts",
]

LOSSES = ("distillation", "labels")
INSERTIONS = ("random", "end")
STARTS = ("text", "vocabulary", "random", "given")

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8

START_TEXT = " next word"
"""Text whose token embeddings, averaged, are the start of every prompt token."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Everything that decides the result of a training run, besides the model and the texts.

    Parameters
    ----------
    num_distances : int
        ``m``, prompt tokens, 1 to 8.
    num_epts : int
        EPTs per prompt token.
    mask : {"ensemble", "decoder", "encoder"}
        How EPTs see each other.
    num_steps : int
        Steps of the optimiser.
    texts_per_step, groups_per_text : int
        Texts whose gradients a step adds up; groups inserted into each (fewer where a text is short).
    learning_rate : float
        Highest rate of Adam; after a linear warm-up it falls to 0 along half a cosine.
    warmup_share : float
        Share of the steps that the warm-up takes.
    decay : float
        Alpha: weight of distance ``j`` is ``decay ** (j - 1)`` (paper eq. 1).
    loss : {"distillation", "labels"}
        KL to the model's own predictions, or cross-entropy to the tokens of the text.
    insertion : {"random", "end"}
        Random positions, or one group at the end of each text.
    start : {"text", "vocabulary", "random", "given"}
        What the embeddings start from: the mean of a few text tokens, of the whole vocabulary, noise of the same
        length, or prompt tokens from before. EPTs get a little noise on top of means, so that they differ.
    seed : int
        Order of the texts, positions and noise.
    """

    num_distances: int = 3
    num_epts: int = 1
    mask: str = "ensemble"
    num_steps: int = 1000
    texts_per_step: int = 2
    groups_per_text: int = 64
    learning_rate: float = 0.02
    warmup_share: float = 0.02
    decay: float = 0.8
    loss: str = "distillation"
    insertion: str = "random"
    start: str = "text"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, high in (
            ("num_distances", MAX_DISTANCES),
            ("num_epts", None),
            ("num_steps", None),
            ("texts_per_step", None),
            ("groups_per_text", None),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (high and value > high):
                raise InvalidValueError(
                    name, f"must be a whole number from 1{f' to {high}' if high else ''}, not {value!r}"
                )
        for name, choices in (("mask", MASKS), ("loss", LOSSES), ("insertion", INSERTIONS), ("start", STARTS)):
            if getattr(self, name) not in choices:
                raise InvalidValueError(name, f"must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InvalidValueError("learning_rate", f"must be above 0, not {self.learning_rate!r}")
        if not 0 < self.decay <= 1:
            raise InvalidValueError("decay", f"must be above 0 and at most 1, not {self.decay!r}")
        if not 0 <= self.warmup_share < 1:
            raise InvalidValueError("warmup_share", f"must be from 0 to below 1, not {self.warmup_share!r}")


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """Where a run stands: all that the next step depends on.

    Parameters
    ----------
    step : int
        Steps done.
    embeddings, exp_avg, exp_avg_sq : Tensor, float32, shape (m, num_epts, hidden)
        The prompt tokens and Adam's two moments.
    loss : float
        Loss of the last step, nats; nan before the first.
    """

    step: int
    embeddings: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    loss: float = math.nan


def initial_state(loaded: LoadedModel, plan: TrainingPlan, given: PromptTokens | None = None) -> TrainingState:
    """Make the state before the first step.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    plan : TrainingPlan
        Says what to start from.
    given : PromptTokens, optional
        The prompt tokens of ``start="given"``.

    Raises
    ------
    TrainingError
        When the start is a text and the model comes without a tokenizer, or given prompt tokens do not fit the plan.
    """
    matrix = loaded.model.get_input_embeddings().weight.detach().float().cpu()
    generator = torch.Generator().manual_seed(plan.seed)
    shape = (plan.num_distances, plan.num_epts, matrix.shape[1])
    noise = torch.randn(shape, generator=generator)
    if plan.start == "given":
        found = None if given is None else tuple(given.embeddings.shape)
        if found != shape:
            raise TrainingError(f"start: prompt tokens of the shape {shape} are needed to start from, not {found}")
        embeddings = given.embeddings.clone()
    elif plan.start == "random":
        embeddings = noise * matrix.norm(dim=1).mean() / math.sqrt(matrix.shape[1])
    else:
        embeddings = _mean_embedding(loaded, plan.start).float().cpu().expand(shape).clone()
        if plan.num_epts > 1:
            embeddings += 0.1 * noise * matrix.std()
    return TrainingState(0, embeddings, torch.zeros(shape), torch.zeros(shape))


def _mean_embedding(loaded: LoadedModel, start: str) -> Tensor:
    """Average the embeddings a run starts from, scaled as the model's own lookup scales them."""
    if start == "vocabulary":
        token_ids = torch.arange(loaded.model.get_input_embeddings().weight.shape[0], device=loaded.device)
    elif loaded.tokenizer is None:
        raise TrainingError(
            f"start: text needs a tokenizer, and model {loaded.name} has none; use vocabulary or random"
        )
    else:
        token_ids = torch.tensor(
            loaded.tokenizer(START_TEXT, add_special_tokens=False)["input_ids"], device=loaded.device
        )
    with torch.no_grad():
        return hf.embed_tokens(loaded.model, token_ids).float().mean(dim=0)


def usable_texts(texts: Sequence[Text], context_limit: int | None, num_distances: int) -> list[Text]:
    """Keep the texts that have something to learn from, and refuse to train on none.

    Parameters
    ----------
    texts : sequence of Text
        Candidates.
    context_limit : int or None
        The model's longest text, tokens.
    num_distances : int
        ``m``.

    Returns
    -------
    list of Text
        Those with at least two new tokens: one for the root, one to guess.

    Raises
    ------
    TrainingError
        When none is left, or one is too long for the model.
    """
    for i, text in enumerate(texts):
        if context_limit is not None and len(text.token_ids) + num_distances > context_limit:
            raise TrainingError(
                f"texts[{i}]: has {len(text.token_ids)} tokens; with {num_distances} prompt tokens that is past the "
                f"context of {context_limit}; cut it or leave it out"
            )
    usable = [text for text in texts if text.num_new_tokens >= 2 and text.num_prompt_tokens >= 1]
    if not usable:
        raise TrainingError("texts: none has two new tokens or more, so there is nothing to guess; give longer texts")
    return usable


def learning_rate_at(step: int, plan: TrainingPlan) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then half a cosine down to 0."""
    warmup = round(plan.num_steps * plan.warmup_share)
    if step < warmup:
        return plan.learning_rate * (step + 1) / warmup
    share = (step - warmup) / max(1, plan.num_steps - warmup)
    return plan.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


def train_steps(
    loaded: LoadedModel,
    plan: TrainingPlan,
    texts: Sequence[Text],
    state: TrainingState,
    *,
    rank: int = 0,
    num_processes: int = 1,
    reduce_mean: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[TrainingState]:
    """Train from a state to the end of the plan.

    Parameters
    ----------
    loaded : LoadedModel
        The frozen model.
    plan : TrainingPlan
        What to do.
    texts : sequence of Text
        From `usable_texts`.
    state : TrainingState
        Where to go on from.
    rank, num_processes : int
        This process's share of every step's texts.
    reduce_mean : callable, optional
        Averages a tensor over the processes.

    Yields
    ------
    TrainingState
        After every step.

    Raises
    ------
    TrainingError
        When a loss or gradient is not finite (the state yielded last is still good), or the texts of a step cannot be
        shared out evenly.
    """
    if plan.texts_per_step % num_processes:
        raise TrainingError(
            f"texts_per_step: is {plan.texts_per_step}; {num_processes} processes need a multiple of their number"
        )
    size = plan.num_distances * plan.num_epts
    # With gradient in an ordinary backward pass the model would keep its weights' activations for nothing.
    loaded.model.requires_grad_(False)
    with group_attention(loaded.model, size) if loaded.model.device.type == "cpu" else nullcontext():
        for step in range(state.step, plan.num_steps):
            chosen = _texts_of_step(plan, len(texts), step)[rank::num_processes]
            embeddings = state.embeddings.detach().clone().to(loaded.device).requires_grad_(True)
            loss = 0.0
            for place, index in chosen:
                part = _text_loss(loaded, plan, texts[index], embeddings, _generator(plan, step, place))
                (part / max(1, len(chosen))).backward()
                loss += part.item() / max(1, len(chosen))
            gradient = torch.zeros_like(embeddings) if embeddings.grad is None else embeddings.grad
            if reduce_mean is not None:
                gradient = reduce_mean(gradient)
            if not (math.isfinite(loss) and bool(torch.isfinite(gradient).all())):
                raise TrainingError(
                    f"step {step + 1}: the loss is {loss:g} and the gradient is not usable; go on from the last "
                    "checkpoint with a lower --learning-rate or with --dtype float32"
                )
            state = _adam_step(state, gradient.cpu(), learning_rate_at(step, plan), loss)
            yield state


def _texts_of_step(plan: TrainingPlan, num_texts: int, step: int) -> list[tuple[int, int]]:
    """Return (place in the step, index of the text): epochs of shuffled texts, cut into steps."""
    places = range(step * plan.texts_per_step, (step + 1) * plan.texts_per_step)
    orders = {
        epoch: torch.randperm(num_texts, generator=torch.Generator().manual_seed(plan.seed * 100_003 + epoch))
        for epoch in {place // num_texts for place in places}
    }
    return [(i, int(orders[place // num_texts][place % num_texts])) for i, place in enumerate(places)]


def _generator(plan: TrainingPlan, step: int, place: int) -> torch.Generator:
    """Return the source of chance of one text of one step: nothing is carried over, so nothing needs saving."""
    return torch.Generator().manual_seed(((plan.seed * 1_000_003 + step) * 1_009 + place) % (2**63))


def choose_insertions(text: Text, plan: TrainingPlan, generator: torch.Generator) -> Tensor:
    """Choose the tokens that groups follow; LongTensor of shape (groups,), ascending.

    The first is the last token of the prompt (prefill's own prompt tokens follow it), the last is the one whose
    distance 1 is still inside the text.
    """
    first, last = text.num_prompt_tokens - 1, len(text.token_ids) - 3
    if plan.insertion == "end":
        return torch.tensor([max(first, last - plan.num_distances + 1)])
    order = torch.randperm(last - first + 1, generator=generator)
    return order[: plan.groups_per_text].sort().values + first


def _text_loss(
    loaded: LoadedModel, plan: TrainingPlan, text: Text, embeddings: Tensor, generator: torch.Generator
) -> Tensor:
    """Return the loss of one text: mean over groups of the weighted mean over distances (paper eq. 1)."""
    token_ids = torch.tensor(text.token_ids, device=loaded.device)
    insertions = choose_insertions(text, plan, generator).to(loaded.device)
    first = int(insertions[0]) + 1
    distances = torch.arange(1, plan.num_distances + 1, device=loaded.device)
    sources = insertions[:, None] + distances  # the position whose own prediction prompt token j imitates
    inside = sources + 1 < len(token_ids)
    memory, own = text_pass(loaded.model, token_ids, slice(first, len(token_ids)))
    guesses = group_logits(loaded.model, embeddings, memory, insertions, plan.mask)
    weights = torch.where(inside, plan.decay ** (distances - 1.0), 0.0) / inside.numel()
    if plan.loss == "distillation":
        return distillation_loss(guesses[inside], own, (sources - first)[inside], weights[inside])
    losses = functional.cross_entropy(guesses[inside].float(), token_ids[(sources + 1)[inside]], reduction="none")
    return (losses * weights[inside]).sum()


def _adam_step(state: TrainingState, gradient: Tensor, learning_rate: float, loss: float) -> TrainingState:
    """Move the embeddings by one step of Adam (Kingma and Ba, 2015, algorithm 1)."""
    beta1, beta2 = ADAM_BETAS
    step = state.step + 1
    exp_avg = beta1 * state.exp_avg + (1 - beta1) * gradient
    exp_avg_sq = beta2 * state.exp_avg_sq + (1 - beta2) * gradient.square()
    scale = (exp_avg_sq / (1 - beta2**step)).sqrt() + ADAM_EPS
    embeddings = state.embeddings - learning_rate * (exp_avg / (1 - beta1**step)) / scale
    return TrainingState(step, embeddings, exp_avg, exp_avg_sq, loss)
