"""How the progress and the result of a measurement are told."""

import json
from collections.abc import Callable
from datetime import UTC, datetime

from profiler.latency import StoppingRule, Visit
from profiler.summary import median
from treeopt.app.profile_library import summary
from treeopt.app.profile_measure import Outcome
from treeopt.errors import ProfileError

__all__ = ["outcome_lines", "progress_line", "stopping_rule"]


def progress_line(say: Callable[[str], None]) -> Callable[[int, Visit], None]:
    """Return what is told of every settled point."""
    told: set[tuple[int, int]] = set()

    def on_point(profile_id: int, visit: Visit) -> None:
        key = (profile_id, visit.num_tokens)
        if visit.settled and key not in told:
            told.add(key)
            say(
                f"profile {profile_id}: {visit.num_tokens} tokens {1e3 * median(visit.samples_s):.2f} ms "
                f"({len(visit.samples_s)} steps)"
            )

    return on_point


def outcome_lines(outcome: Outcome, *, as_json: bool) -> str:
    """Return the line that says how a curve ended, for people or as JSON."""
    facts = summary(outcome.profile, datetime.now(UTC))
    if as_json:
        return json.dumps({**facts, "stopped": outcome.stopped}, allow_nan=False)
    state = "complete" if outcome.profile.complete else "not complete"
    flags = f", flagged {', '.join(outcome.profile.flags)}" if outcome.profile.flags else ""
    why = f" ({outcome.stopped})" if outcome.stopped else ""
    return (
        f"{facts['digest'] or '-'}  {facts['model']} on {facts['device']}, {facts['dtype']}, batch "
        f"{facts['batch_size']}, context {facts['context_len']}: {facts['num_points']} points, {state}{flags}{why}"
    )


def stopping_rule(precision: float, point_seconds: float) -> StoppingRule:
    """Return the stopping rule of two flags."""
    try:
        return StoppingRule(halfwidth=precision, max_s=point_seconds)
    except ProfileError as error:
        raise ProfileError(f"--precision or --point-seconds: {error}") from error
