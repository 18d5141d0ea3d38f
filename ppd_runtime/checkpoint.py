"""Checkpoints of a training run: one safetensors file that holds all the next step depends on."""

import json
import os
from dataclasses import asdict, dataclass

import safetensors.torch
from safetensors import SafetensorError, safe_open

from ppd_runtime.train import TrainingPlan, TrainingState
from treeopt.artifact import write_bytes
from treeopt.errors import DocumentError, InvalidValueError

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint"]

FORMAT = "ppd-checkpoint/1"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Where a run stands and how it got there.

    Parameters
    ----------
    state : TrainingState
        What the next step starts from.
    losses : list of float
        Loss of every step so far, nats.
    train_s : float
        Time spent in steps so far, seconds.
    """

    state: TrainingState
    losses: list[float]
    train_s: float = 0.0


def save_checkpoint(
    path: str | os.PathLike[str],
    plan: TrainingPlan,
    now: Checkpoint,
    *,
    model_digest: str,
    data_digest: str,
) -> None:
    """Write a checkpoint; the one before it stays until the new one is whole.

    Parameters
    ----------
    path : path
        A ``.safetensors`` file.
    plan : TrainingPlan
        What is being done.
    now : Checkpoint
        Where the run stands.
    model_digest, data_digest : str
        What the run trains on; another model or other texts would not continue the same run.

    Raises
    ------
    DocumentError
        When it cannot be written.
    """
    state = now.state
    tensors = {"embeddings": state.embeddings, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    record = {
        "format": FORMAT,
        "step": state.step,
        "plan": asdict(plan),
        "losses": now.losses,
        "train_s": now.train_s,
        "model_digest": model_digest,
        "data_digest": data_digest,
    }
    content = safetensors.torch.save(tensors, metadata={"ppd": json.dumps(record)})
    write_bytes(content, path)


def load_checkpoint(
    path: str | os.PathLike[str], plan: TrainingPlan, *, model_digest: str, data_digest: str
) -> Checkpoint:
    """Read a checkpoint of exactly this run.

    Parameters
    ----------
    path : path
        What `save_checkpoint` wrote.
    plan : TrainingPlan
        The plan of the run that wants to go on.
    model_digest, data_digest : str
        Its model and texts.

    Returns
    -------
    Checkpoint
        Where to go on from.

    Raises
    ------
    DocumentError
        When the file is not a checkpoint, or belongs to another run; the message names what differs.
    """
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {}).get("ppd", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise DocumentError(f"{path}: is not a checkpoint ({error}); remove it to start again") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise DocumentError(f"{path}: is not a checkpoint of this version; remove it to start again")
    try:
        saved = TrainingPlan(**record["plan"])
    except (TypeError, InvalidValueError) as error:
        raise DocumentError(f"{path}: holds a plan of another version ({error}); remove it to start again") from error
    differences = [name for name, value in asdict(plan).items() if asdict(saved)[name] != value]
    differences += [
        name
        for name, value in (("model_digest", model_digest), ("data_digest", data_digest))
        if record.get(name) != value
    ]
    if differences:
        raise DocumentError(
            f"{path}: belongs to a run with another {differences[0]}; give its options, or remove it to start again"
        )
    last_loss = record["losses"][-1] if record["losses"] else float("nan")
    state = TrainingState(
        int(record["step"]), tensors["embeddings"], tensors["exp_avg"], tensors["exp_avg_sq"], last_loss
    )
    return Checkpoint(state, list(record["losses"]), float(record.get("train_s", 0.0)))
