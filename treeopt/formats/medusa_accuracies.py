"""Accuracies of Medusa's heads, from the CSV of its training runs.

Columns ``train/medusa0_top1``, ``train/medusa0_top2``, .. are cumulative: how often the true token is among the best r.
Head j guesses distance j + 1; the model's own head gives the root.
"""

import csv
import io
import math
import re
from collections.abc import Sequence

from treeopt.errors import InvalidValueError
from treeopt.types import AcceptanceTable

__all__ = ["tables_from_csv"]

_COLUMN = re.compile(r"(?:.*/)?medusa(\d{1,3})_top(\d{1,3})")


def tables_from_csv(text: str) -> dict[str, AcceptanceTable]:
    """Read one acceptance table per row that has all accuracies.

    Parameters
    ----------
    text : str
        The CSV, with a ``Name`` column. Of rows with the same name the first counts as ``name``, the next ones as
        ``name-2``, ``name-3``, ..

    Raises
    ------
    InvalidValueError
        When a column is missing, or an accuracy is no number or falls as more guesses are allowed.
    """
    try:
        reader = csv.DictReader(io.StringIO(text), strict=True)
        columns = _columns(reader.fieldnames or [])
        rows = list(reader)
    except csv.Error as error:
        raise InvalidValueError("csv", f"cannot be parsed ({error}); save it as comma-separated text") from error
    tables: dict[str, AcceptanceTable] = {}
    for line, row in enumerate(rows, start=2):
        if any(not row.get(column) for head in columns for column in head):
            continue  # a run that ended before its first evaluation
        given = row.get("Name") or f"line-{line}"
        name, count = given, 1
        while name in tables:
            count += 1
            name = f"{given}-{count}"
        tables[name] = AcceptanceTable(
            model=name,
            source="Medusa heads, training accuracies",
            rule="greedy",
            temperature=0.0,
            num_samples=None,
            marginals=tuple(_shares(row, head, line) for head in columns),
            tokens_per_prompt_token=0,
        )
    if not tables:
        raise InvalidValueError("csv", "has no row with all accuracies")
    return tables


def _columns(names: Sequence[str]) -> list[list[str]]:
    """Return the columns of each head, best guess first."""
    found = {(int(match[1]), int(match[2])): name for name in names if (match := _COLUMN.fullmatch(name))}
    if not found:
        raise InvalidValueError("csv", "has no columns like medusa0_top1; give the accuracies of Medusa heads")
    heads, ranks = 1 + max(head for head, _ in found), max(top for _, top in found)
    wanted = [[(head, top) for top in range(1, ranks + 1)] for head in range(heads)]
    for head, top in (pair for row in wanted for pair in row):
        if (head, top) not in found:
            raise InvalidValueError(
                "csv", f"lacks the column medusa{head}_top{top}; every head needs top1 to top{ranks}"
            )
    return [[found[pair] for pair in row] for row in wanted]


def _shares(row: dict[str, str], columns: list[str], line: int) -> tuple[float, ...]:
    """Return the differences of cumulative accuracies."""
    shares, before = [], 0.0
    for column in columns:
        try:
            total = float(row[column])
        except ValueError as error:
            raise InvalidValueError(f"line {line}, {column}", f"is {row[column]!r:.40}; give a number") from error
        if not math.isfinite(total) or total < before:
            raise InvalidValueError(
                f"line {line}, {column}", f"is {total}, below the column before; accuracies are cumulative"
            )
        shares.append(total - before)
        before = total
    return tuple(shares)
