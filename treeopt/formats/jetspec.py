"""JetSpec's ``depth_rank_accept``: one row of acceptance by rank for each depth of the draft.

Two of its collectors write the same field with different meanings:

``collect_depth_rank_stats.py``
    P(the model's pick at a node of depth d is the draft's rank r). That is an acceptance table.
``depth_rank_profile.py``
    P(a rank-r node of depth d + 1 was accepted, given that it was drafted), over all nodes, most of which hang below
    rejected ones. That is not one; its counts are, read as shares of the accepted parents.
"""

import json
from typing import Any

from treeopt.errors import InvalidValueError
from treeopt.types import AcceptanceTable

__all__ = ["profile_text", "table_from_profile"]

_META = ("model", "source", "rule", "temperature", "num_samples")
"""What an exported profile says of its table; to JetSpec ``meta`` is informational."""


def profile_text(table: AcceptanceTable) -> str:
    """Return the JSON profile of an acceptance table."""
    meta = {name: getattr(table, name) for name in _META}
    return json.dumps({"depth_rank_accept": [list(row) for row in table.marginals], "meta": meta})


def table_from_profile(value: Any) -> AcceptanceTable:
    """Read a JetSpec profile as an acceptance table without prompt tokens.

    Parameters
    ----------
    value : mapping
        ``{"depth_rank_accept": rows, "meta": {..}}``, ``meta`` optional.

    Raises
    ------
    InvalidValueError
        When a field is wrong, or the rows are no acceptance table and carry no counts to make one from.
    """
    if not isinstance(value, dict) or "depth_rank_accept" not in value:
        raise InvalidValueError("depth_rank_accept", "is missing; give a JetSpec profile")
    rows = _rows(value["depth_rank_accept"], "depth_rank_accept")
    meta = value.get("meta", {})
    if not isinstance(meta, dict):
        raise InvalidValueError("meta", "must be a JSON object")
    if "profile_definition" in meta or "accepted_counts" in meta:
        rows = _from_counts(meta)
    return AcceptanceTable(
        model=meta.get("model", "unknown"),
        source=meta.get("source", "JetSpec profile"),
        rule=meta.get("rule", "greedy"),
        temperature=meta.get("temperature", 0.0),
        num_samples=meta.get("num_samples"),
        marginals=tuple(tuple(row) for row in rows),
        tokens_per_prompt_token=0,
    )


def _rows(value: Any, place: str) -> list[list[Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(row, list) and row for row in value):
        raise InvalidValueError(place, "must be one non-empty row of numbers per depth")
    return value


def _from_counts(meta: dict[str, Any]) -> list[list[float]]:
    """Return accepted nodes of each rank as shares of the accepted parents, one level up."""
    counts, rounds = meta.get("accepted_counts"), meta.get("rounds_counted")
    if counts is None or not isinstance(rounds, int) or rounds < 1:
        raise InvalidValueError(
            "meta.profile_definition",
            "says that rows are shares of all drafted nodes, which is no acceptance table; keep accepted_counts and "
            "rounds_counted in meta, or profile with collect_depth_rank_stats.py",
        )
    shares = []
    parents = rounds
    for depth, row in enumerate(_rows(counts, "meta.accepted_counts")):
        if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in row):
            raise InvalidValueError(f"meta.accepted_counts[{depth}]", "must be counts, 0 or more")
        if sum(row) > parents:
            raise InvalidValueError(
                f"meta.accepted_counts[{depth}]", f"adds up to {sum(row)}, but only {parents} parents were accepted"
            )
        shares.append([count / parents if parents else 0.0 for count in row])
        parents = sum(row)
    return shares
