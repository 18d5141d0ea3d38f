"""What the store of profiles takes and gives: plain frozen values, no rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from treeopt.artifact import document_digest, to_document
from treeopt.types import LatencyPoint, LatencyProfile

__all__ = ["Conditions", "Lease", "StoredPoint", "StoredProfile", "latency_document"]


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything that makes a curve this one and not another.

    Parameters
    ----------
    device : mapping
        ``device`` object of a latency document, with ``name``, ``class_digest`` and ``instance_digest``.
    model, fingerprint : str
        Name, and what changes with the model's configuration or weights.
    dtype, attention, graph_mode, cache, kernels : str
        As in `LatencyProfile`.
    batch_size, context_len : int
        As in `LatencyProfile`.
    versions : mapping of str to str
        Driver and libraries.
    """

    device: Mapping[str, Any]
    model: str
    fingerprint: str
    dtype: str
    batch_size: int
    context_len: int
    attention: str
    graph_mode: str
    cache: str | None
    kernels: str | None
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Lease:
    """Proof that a job is still this worker's; writes under a lost lease are refused."""

    job_id: int
    owner: str


@dataclass(frozen=True, slots=True)
class StoredPoint:
    """A point with what the document format has no field for."""

    point: LatencyPoint
    flags: tuple[str, ...] = ()
    settled: bool = True


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A profile as it is stored, complete or not.

    Parameters
    ----------
    id : int
        Row; digests are what users see, but a profile without its first point has none yet.
    digest : str or None
        SHA-256 of the latency document.
    conditions : Conditions
        What was measured.
    grid : tuple of int
        Input lengths it is to have.
    complete : bool
        Every length of the grid is settled.
    flags : tuple of str
        What was odd.
    origin : {"measured", "imported"}
        Where it comes from.
    created_at, updated_at : datetime
        UTC.
    steps, forwards : mapping of int to StoredPoint
        Points of the whole step, and of the bare forward pass beside it, by num_tokens.
    """

    id: int
    digest: str | None
    conditions: Conditions
    grid: tuple[int, ...]
    complete: bool
    flags: tuple[str, ...]
    origin: str
    created_at: datetime
    updated_at: datetime
    steps: Mapping[int, StoredPoint]
    forwards: Mapping[int, StoredPoint]

    def to_profile(self) -> LatencyProfile:
        """Return the curve of the whole step.

        Raises
        ------
        InvalidValueError
            When the point of one token is not measured yet.
        """
        known = self.conditions
        settled = [stored.point for _, stored in sorted(self.steps.items()) if stored.settled]
        return LatencyProfile(
            device=dict(known.device),
            model=known.model,
            dtype=known.dtype,
            batch_size=known.batch_size,
            context_len=known.context_len,
            attention=known.attention,
            graph_mode=known.graph_mode,
            points=tuple(settled),
            cache=known.cache,
            kernels=known.kernels,
            versions=dict(known.versions) or None,
            flags=self.flags or None,
            complete=self.complete,
        )


def latency_document(profile: LatencyProfile) -> dict[str, Any]:
    """Return the document to share, with its ``sha256``."""
    document = to_document(profile)
    return {**document, "sha256": document_digest(document)}
