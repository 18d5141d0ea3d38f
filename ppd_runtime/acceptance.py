"""From measured ranks to the documents that searches and replays read."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ppd_runtime.measure import TextRanks
from treeopt.errors import TrainingError
from treeopt.types import AcceptanceTable, RankRecord

__all__ = ["acceptance_table", "bootstrap_intervals", "rank_record"]

NUM_RESAMPLES = 2000
PROBABILITY_DIGITS = 6
"""Digits of a guess's probability that a rank record keeps."""


def acceptance_table(
    results: Sequence[TextRanks],
    *,
    model: str,
    source: str,
    max_rank: int,
    rule: str = "greedy",
    temperature: float = 0.0,
    tokens_per_prompt_token: int = 1,
    seed: int = 0,
) -> AcceptanceTable:
    """Count ranks into marginals and joint counts, with intervals.

    Positions whose farthest distance is past the end of the text are left out of both, so they agree.

    Parameters
    ----------
    results : sequence of TextRanks
        From `measure_texts`.
    model, source : str
        What was measured, and on what.
    max_rank : int
        ``K`` of the measurement.
    rule : {"greedy", "sample", "typical"}
        Acceptance rule.
    temperature : float
        Of the texts; 0 for greedy.
    tokens_per_prompt_token : int
        EPTs per prompt token.
    seed : int
        Of the bootstrap.

    Returns
    -------
    AcceptanceTable

    Raises
    ------
    TrainingError
        When no position is left.
    """
    counts, totals = _counts(results, max_rank)
    if totals.sum() == 0:
        raise TrainingError("texts: all are too short to measure every distance; raise max_new_tokens")
    joint = Counter(entry for result in results for entry in result.ranks[: result.num_inside])
    return AcceptanceTable(
        model=model,
        source=source,
        rule=rule,
        temperature=temperature,
        num_samples=int(totals.sum()),
        marginals=tuple(tuple(row) for row in (counts.sum(axis=0) / totals.sum()).tolist()),
        ranks=tuple((*ranks, count) for ranks, count in sorted(joint.items())),
        tokens_per_prompt_token=tokens_per_prompt_token,
        intervals=bootstrap_intervals(counts, totals, seed=seed),
    )


def rank_record(
    results: Sequence[TextRanks],
    *,
    model: str,
    source: str,
    max_rank: int,
    rule: str = "greedy",
    temperature: float = 0.0,
    with_probabilities: bool = True,
) -> RankRecord:
    """Keep the ranks in order, for replay; parameters as `acceptance_table`.

    Texts without an entry are left out: a decoder makes no step on them.
    """
    kept = [result for result in results if result.ranks]
    probabilities = tuple(
        tuple(tuple(round(share, PROBABILITY_DIGITS) for share in entry) for entry in result.probabilities)
        for result in kept
    )
    return RankRecord(
        model=model,
        source=source,
        rule=rule,
        temperature=temperature,
        max_rank=max_rank,
        sequences=tuple(result.ranks for result in kept),
        probabilities=probabilities if with_probabilities else None,
    )


def bootstrap_intervals(
    counts: npt.NDArray[np.int64], totals: npt.NDArray[np.int64], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """95 % percentile intervals of shares, resampling whole texts: positions of one text are not independent.

    Parameters
    ----------
    counts : array of int, shape (texts, m, K)
        Hits of every rank.
    totals : array of int, shape (texts,)
        Positions of every text.
    seed : int
        Of the resampling.
    num_resamples : int
        Bootstrap samples.

    Returns
    -------
    tuple, shape (m, K, 2)

    References
    ----------
    B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
    """
    num_texts = len(totals)
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(num_texts, np.full(num_texts, 1 / num_texts), size=num_resamples)
    weights = weights[weights @ totals > 0]
    flat = counts.reshape(num_texts, -1)
    shares = (weights @ flat) / (weights @ totals)[:, None]
    low, high = np.percentile(shares, [2.5, 97.5], axis=0).reshape(2, *counts.shape[1:]).tolist()
    return tuple(
        tuple((a, b) for a, b in zip(low_row, high_row, strict=True))
        for low_row, high_row in zip(low, high, strict=True)
    )


def _counts(results: Sequence[TextRanks], max_rank: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Count hits per text, distance and rank, and positions per text."""
    num_distances = max((len(result.ranks[0]) for result in results if result.ranks), default=1)
    counts = np.zeros((len(results), num_distances, max_rank), dtype=np.int64)
    totals = np.array([min(result.num_inside, len(result.ranks)) for result in results], dtype=np.int64)
    for s, result in enumerate(results):
        for entry in result.ranks[: result.num_inside]:
            for j, rank in enumerate(entry):
                if rank < max_rank:
                    counts[s, j, rank] += 1
    return counts, totals
