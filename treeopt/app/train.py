"""Use case: train prompt tokens for a model, and keep everything about the run in one folder.

==========================  ===================================================================
``adapter_config.json``     the prompt tokens, with the training record
``adapter_model.safetensors``
``checkpoint.safetensors``  where an interrupted run goes on; removed when the run is done
``log.jsonl``               one object a line: steps, evaluations, the end
``loss.png``                the loss curve
==========================  ===================================================================
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from matplotlib.figure import Figure

from ppd_runtime.acceptance import acceptance_table
from ppd_runtime.answers import Text
from ppd_runtime.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ppd_runtime.measure import measure_texts
from ppd_runtime.models import LoadedModel
from ppd_runtime.prompt_tokens import PromptTokens
from ppd_runtime.token_files import save_prompt_tokens
from ppd_runtime.train import TrainingPlan, initial_state, learning_rate_at, train_steps, usable_texts
from treeopt.errors import DocumentError, TrainingError
from treeopt.plot import Curve, Panel, curves_figure, save_figure

__all__ = ["Crew", "TrainingReport", "crew", "digest_of", "loss_figure", "top_shares", "train_prompt_tokens"]

Report = Callable[[dict[str, object]], None]

TOPS = (1, 5, 10)
"""Accumulative accuracies that are reported: the true token is among the best 1, 5, 10 guesses."""


@dataclass(frozen=True, slots=True)
class Crew:
    """The processes that train together, one per device; usually one.

    Parameters
    ----------
    rank, size : int
        This process's number, from 0, and how many there are.
    reduce_mean : callable, optional
        Averages a tensor over all processes.
    first_goes_first : callable
        Makes a context that the first process passes through before the others enter: it makes the answers, the others
        find them in the cache.
    """

    rank: int = 0
    size: int = 1
    reduce_mean: Callable[[torch.Tensor], torch.Tensor] | None = None
    first_goes_first: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What a run came to.

    Parameters
    ----------
    tokens : PromptTokens
        The result.
    losses : tuple of float
        Loss of every step, nats.
    train_s : float
        Time in steps, seconds, interruptions left out.
    num_trainable, num_model : int
        Parameters that learnt, and parameters of the model.
    num_bytes, num_model_bytes : int
        Memory that the prompt tokens add when the model runs, and the model's own.
    top : tuple of tuple of float, or None
        Per distance the accumulative accuracies of `TOPS` on the held-out texts.
    """

    tokens: PromptTokens
    losses: tuple[float, ...]
    train_s: float
    num_trainable: int
    num_model: int
    num_bytes: int
    num_model_bytes: int
    top: tuple[tuple[float, ...], ...] | None


def crew(device: str = "auto") -> Crew:
    """Join the other processes when started by ``accelerate launch`` or ``torchrun``; be alone otherwise.

    Call it before the model is loaded: every process of a crew makes its own GPU the current one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Crew()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu" or not torch.cuda.is_available())
    return Crew(
        accelerator.process_index,
        accelerator.num_processes,
        lambda tensor: accelerator.reduce(tensor, reduction="mean"),
        accelerator.main_process_first,
    )


def train_prompt_tokens(
    loaded: LoadedModel,
    plan: TrainingPlan,
    texts: Sequence[Text],
    folder: str | Path,
    *,
    given: PromptTokens | None = None,
    held_out: Sequence[Text] = (),
    record: dict[str, object] | None = None,
    save_every: int = 20,
    evaluate_every: int = 200,
    team: Crew | None = None,
    report: Report | None = None,
) -> TrainingReport:
    """Train to the end of the plan, going on from the folder's checkpoint if there is one.

    Parameters
    ----------
    loaded : LoadedModel
        The model; its weights are not touched.
    plan : TrainingPlan
        What to do.
    texts : sequence of Text
        What to train on.
    folder : path
        Where results and checkpoints go.
    given : PromptTokens, optional
        What to start from when the plan says so.
    held_out : sequence of Text
        Texts to evaluate on.
    record : dict, optional
        What else the training record of the result should say, such as the command.
    save_every, evaluate_every : int
        Steps between checkpoints, and between evaluations.
    team : Crew, optional
        The processes that train together.
    report : callable, optional
        Gets every entry of the log.

    Returns
    -------
    TrainingReport

    Raises
    ------
    TrainingError
        When there is nothing to train on, or the loss is not finite; the last good checkpoint stays.
    DocumentError
        When a file cannot be written, or the checkpoint is of another run.
    """
    team = team or Crew()
    folder = Path(folder)
    texts = usable_texts(texts, loaded.context_limit, plan.num_distances)
    data_digest = digest_of(texts)
    path = folder / "checkpoint.safetensors"
    at = Checkpoint(initial_state(loaded, plan, given), [], 0.0)
    _make_folder(folder)
    if path.exists():
        at = load_checkpoint(path, plan, model_digest=loaded.digest, data_digest=data_digest)
    log = _Log(folder / "log.jsonl", report, is_writer=team.rank == 0)
    log.write("start", step=at.state.step, num_texts=len(texts), plan=asdict(plan))

    def checkpoint(now: Checkpoint) -> None:
        if team.rank == 0:
            save_checkpoint(path, plan, now, model_digest=loaded.digest, data_digest=data_digest)
            save_figure(loss_figure(now.losses, f"{loaded.name}, m = {plan.num_distances}"), folder / "loss.png")

    began = time.perf_counter()
    if held_out and all(text.num_new_tokens <= plan.num_distances for text in held_out):
        raise TrainingError(
            f"held-out texts: none has more than {plan.num_distances} new tokens, so no guess can be judged; raise "
            "--max-new-tokens or give others with --held-out"
        )
    top = None
    for state in train_steps(
        loaded, plan, texts, at.state, rank=team.rank, num_processes=team.size, reduce_mean=team.reduce_mean
    ):
        now = time.perf_counter()
        at = Checkpoint(state, [*at.losses, state.loss], at.train_s + now - began)
        log.write(
            "step",
            step=state.step,
            loss=state.loss,
            learning_rate=learning_rate_at(state.step - 1, plan),
            norms=[round(norm, 4) for norm in state.embeddings.norm(dim=-1).mean(dim=-1).tolist()],
            seconds=round(now - began, 3),
        )
        is_last = state.step == plan.num_steps
        if state.step % save_every == 0 or is_last:
            checkpoint(at)
        if held_out and (state.step % evaluate_every == 0 or is_last):
            top = top_shares(loaded, _tokens(loaded, plan, at, None), held_out)
            log.write("evaluation", step=state.step, top=dict(zip(map(str, TOPS), zip(*top, strict=True), strict=True)))
        began = time.perf_counter()
    if held_out and top is None:
        top = top_shares(loaded, _tokens(loaded, plan, at, None), held_out)
    notes = {**(record or {}), "num_texts": len(texts), "data_digest": data_digest}
    tokens = _tokens(loaded, plan, at, {**notes, "held_out_top": None if top is None else {"k": TOPS, "shares": top}})
    if team.rank == 0:
        save_prompt_tokens(tokens, folder)
        path.unlink(missing_ok=True)
    result = _report(loaded, tokens, at, top)
    figures = {field.name: getattr(result, field.name) for field in fields(result)}
    log.write("done", **{name: value for name, value in figures.items() if name not in ("tokens", "losses")})
    return result


def top_shares(loaded: LoadedModel, tokens: PromptTokens, texts: Sequence[Text]) -> tuple[tuple[float, ...], ...]:
    """Measure accumulative accuracies, per distance those of `TOPS`."""
    results = measure_texts(loaded, tokens, texts, max_rank=max(TOPS))
    table = acceptance_table(results, model=loaded.name, source="held-out texts", max_rank=max(TOPS))
    return tuple(tuple(round(sum(row[:k]), 4) for k in TOPS) for row in table.marginals)


def digest_of(texts: Sequence[Text]) -> str:
    """Return the SHA-256 of texts, by which a checkpoint knows its data."""
    lines = (f"{text.num_prompt_tokens}:{','.join(map(str, text.token_ids))}\n" for text in texts)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def loss_figure(losses: Sequence[float], subtitle: str, *, window: int = 25) -> Figure:
    """Draw the loss of every step and its mean over the steps before it."""
    steps = list(range(1, len(losses) + 1))
    means = [sum(losses[max(0, i - window) : i]) / min(window, i) for i in steps]
    curves = [Curve("each step", steps, losses, style=1), Curve(f"mean of {window} steps", steps, means, style=0)]
    return curves_figure("Training prompt tokens", subtitle, [Panel("loss (nats)", curves)], "step")


class _Log:
    """The log file: lines are appended, so a resumed run continues it."""

    def __init__(self, path: Path, report: Report | None, *, is_writer: bool) -> None:
        self.path, self.report, self.is_writer = path, report, is_writer

    def write(self, event: str, **entries: object) -> None:
        if not self.is_writer:
            return
        entry: dict[str, object] = {"event": event, **entries}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise DocumentError(f"{self.path}: cannot be written ({error.strerror or error}); free space") from error
        if self.report is not None:
            self.report(entry)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DocumentError(f"{folder}: cannot be made ({error.strerror or error}); choose another folder") from error


def _tokens(loaded: LoadedModel, plan: TrainingPlan, at: Checkpoint, notes: dict[str, object] | None) -> PromptTokens:
    training = {
        **(notes or {}),
        "plan": asdict(plan),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "final_loss": sum(at.losses[-25:]) / max(1, len(at.losses[-25:])),
        "train_s": round(at.train_s, 1),
        "versions": {"torch": torch.__version__},
    }
    return PromptTokens(at.state.embeddings, plan.mask, loaded.name, loaded.digest, training)


def _report(
    loaded: LoadedModel, tokens: PromptTokens, at: Checkpoint, top: tuple[tuple[float, ...], ...] | None
) -> TrainingReport:
    parameters = list(loaded.model.parameters())
    element_size = torch.empty((), dtype=loaded.dtype).element_size()
    if not parameters:
        raise TrainingError(f"model {loaded.name}: has no parameters")
    return TrainingReport(
        tokens=tokens,
        losses=tuple(at.losses),
        train_s=at.train_s,
        num_trainable=tokens.embeddings.numel(),
        num_model=sum(parameter.numel() for parameter in parameters),
        num_bytes=tokens.embeddings.numel() * element_size,
        num_model_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        top=top,
    )
