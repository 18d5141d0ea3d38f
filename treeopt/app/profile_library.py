"""Use cases around stored profiles: list, show, export, import, compare, plot, forget."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from db.location import database_url
from db.profiles import add_profile, find_profile, forget_profile, list_profiles
from db.schema import open_database
from db.values import StoredProfile, latency_document
from treeopt.artifact import canonical_json, document_digest, from_document, read_json, write_bytes, write_text
from treeopt.errors import DocumentError, ProfileError
from treeopt.types import LatencyProfile

__all__ = [
    "Ratio",
    "compare",
    "export_profile",
    "forget",
    "found",
    "import_profile",
    "open_for_reading",
    "open_for_writing",
    "plot_profiles",
    "point_rows",
    "ratios",
    "stored",
    "summary",
]


def open_for_reading(db_url: str | None) -> Engine | None:
    """Open the database; None when there is none yet."""
    return open_database(database_url(db_url))


def open_for_writing(db_url: str | None) -> Engine:
    """Open the database, made when it is not there."""
    engine = open_database(database_url(db_url), create=True)
    if engine is None:
        raise ProfileError("--db: could not be created")
    return engine


def stored(
    engine: Engine | None, *, model: str | None = None, instance_digest: str | None = None
) -> tuple[StoredProfile, ...]:
    """Return the profiles, newest first; none when there is no database."""
    return () if engine is None else list_profiles(engine, model=model, instance_digest=instance_digest)


def summary(profile: StoredProfile, now: datetime) -> dict[str, Any]:
    """Return what a list says of a profile; JSON."""
    known = profile.conditions
    first = profile.steps.get(1)
    return {
        "digest": profile.digest,
        "device": known.device.get("name"),
        "class_digest": known.device.get("class_digest"),
        "instance_digest": known.device.get("instance_digest"),
        "model": known.model,
        "dtype": known.dtype,
        "batch_size": known.batch_size,
        "context_len": known.context_len,
        "attention": known.attention,
        "graph_mode": known.graph_mode,
        "cache": known.cache,
        "kernels": known.kernels,
        "versions": dict(known.versions),
        "complete": profile.complete,
        "flags": list(profile.flags),
        "num_points": sum(point.settled for point in profile.steps.values()),
        "grid": list(profile.grid),
        "first_median_s": first.point.median_s if first is not None else None,
        "origin": profile.origin,
        "created_at": profile.created_at.isoformat(),
        "updated_at": profile.updated_at.isoformat(),
        "age_s": max(0.0, (now - profile.updated_at).total_seconds()),
    }


def point_rows(profile: StoredProfile) -> list[dict[str, Any]]:
    """Return the points of a profile with what a document has no field for; JSON."""
    first = profile.steps.get(1)
    rows = []
    for n, point in sorted(profile.steps.items()):
        forward = profile.forwards.get(n)
        rows.append(
            {
                "num_tokens": n,
                "median_s": point.point.median_s,
                "iqr_s": point.point.iqr_s,
                "num_samples": point.point.num_samples,
                "forward_s": None if forward is None else forward.point.median_s,
                "ratio": None if first is None else point.point.median_s / first.point.median_s,
                "flags": list(point.flags),
                "settled": point.settled,
            }
        )
    return rows


def export_profile(engine: Engine | None, reference: str, target: Path | None) -> str:
    """Return a profile's document as JSON text with its ``sha256``, and write it to a file if one is named."""
    document = latency_document(found(engine, reference).to_profile())
    text = canonical_json(document) + "\n"
    if target is not None:
        write_text(text, target)
    return text


def import_profile(engine: Engine, source: Path, now: datetime | None = None) -> StoredProfile:
    """Store a shared document, if it can be verified.

    Raises
    ------
    DocumentError
        When it carries no ``sha256``, was changed since, is not complete, or contradicts itself.
    """
    document = read_json(source)
    if isinstance(document, dict) and "sha256" not in document:
        raise DocumentError(
            f"{source}: sha256: missing, so it cannot be verified; write it with treeopt profile export"
        )
    profile = from_document(document, str(source), LatencyProfile)
    if not profile.complete:
        raise DocumentError(f"{source}: complete: is false; finish the measurement where it was made, then export")
    device = dict(profile.device)
    if "class_digest" in device:
        claimed = {name: device.get(name) for name in ("kind", "name", "hardware")}
        if document_digest(claimed) != device["class_digest"]:
            raise DocumentError(f"{source}: device.class_digest: does not match the hardware it names; export it again")
    return add_profile(engine, profile, now or datetime.now(UTC))


def found(engine: Engine | None, reference: str) -> StoredProfile:
    """Return the profile with this digest, or the beginning of it.

    Raises
    ------
    TreeOptError
        When there is none, or more than one.
    """
    if engine is None:
        raise ProfileError(f"profile {reference!r}: there is no database yet; make one with treeopt profile run")
    return find_profile(engine, reference)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two curves at one input length.

    Parameters
    ----------
    num_tokens : int
        Input length.
    first_s, second_s : float
        Medians, seconds.
    relative : float
        ``(second(n) / second(1)) / (first(n) / first(1)) - 1``: how far the shapes differ; what a search sees.
    """

    num_tokens: int
    first_s: float
    second_s: float
    relative: float


def compare(engine: Engine | None, first: str, second: str) -> tuple[StoredProfile, StoredProfile, tuple[Ratio, ...]]:
    """Compare two profiles at the input lengths they share."""
    one, two = found(engine, first), found(engine, second)
    return one, two, ratios(one.to_profile(), two.to_profile())


def ratios(one: LatencyProfile, two: LatencyProfile) -> tuple[Ratio, ...]:
    """Compare two curves at the input lengths they share, relative to their one-token latencies."""
    ours = {point.num_tokens: point.median_s for point in one.points}
    theirs = {point.num_tokens: point.median_s for point in two.points}
    shared = sorted(ours.keys() & theirs.keys())
    return tuple(Ratio(n, ours[n], theirs[n], (theirs[n] / theirs[1]) / (ours[n] / ours[1]) - 1) for n in shared)


def plot_profiles(engine: Engine | None, references: Sequence[str], target: Path) -> None:
    """Draw curves with error bars (quartiles), one line per profile; the format follows the file's name.

    Raises
    ------
    DocumentError
        When the file cannot be written.
    """
    from matplotlib.figure import Figure

    profiles = [found(engine, reference) for reference in references]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for profile in sorted(profiles, key=lambda p: (p.conditions.model, p.conditions.context_len)):
        _draw(axes, profile)
    axes.set(xlabel="tokens in one pass", ylabel="step latency, ms", title=_title(profiles))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    try:
        figure.savefig(picture, dpi=150, format=target.suffix.removeprefix(".") or "svg")
    except ValueError as error:
        raise DocumentError(f"{target}: is no kind of picture this can draw; name a .svg, .png or .pdf file") from error
    write_bytes(picture.getvalue(), target)


def _title(profiles: Sequence[StoredProfile]) -> str:
    return ", ".join(sorted({f"{p.conditions.model} on {p.conditions.device.get('name')}" for p in profiles}))


def _draw(axes: Any, profile: StoredProfile) -> None:
    """Draw medians with the quartiles of the raw samples; hollow markers for noisy points."""
    from profiler.summary import quantile

    points = [point for _, point in sorted(profile.steps.items()) if point.settled]
    tokens = [point.point.num_tokens for point in points]
    medians_ms = [1e3 * point.point.median_s for point in points]
    below, above = [], []
    for point in points:
        samples_s, median_s = point.point.samples_s, point.point.median_s
        half_s = (point.point.iqr_s or 0.0) / 2
        below.append(1e3 * (median_s - quantile(samples_s, 0.25) if samples_s else half_s))
        above.append(1e3 * (quantile(samples_s, 0.75) - median_s if samples_s else half_s))
    label = f"context {profile.conditions.context_len}, batch {profile.conditions.batch_size}"
    label += f", {profile.conditions.dtype}, {profile.conditions.graph_mode}"
    line = axes.errorbar(
        tokens, medians_ms, yerr=(below, above), marker="o", markersize=3, linewidth=1, capsize=2, label=label
    )
    noisy = [i for i, point in enumerate(points) if point.flags]
    if noisy:
        color = line[0].get_color()
        axes.plot(
            [tokens[i] for i in noisy], [medians_ms[i] for i in noisy], "o", mfc="white", color=color, markersize=5
        )


def forget(engine: Engine | None, reference: str) -> StoredProfile:
    """Delete a profile; return what it was."""
    profile = found(engine, reference)
    if engine is not None:
        forget_profile(engine, profile.id)
    return profile
