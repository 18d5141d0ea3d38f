"""Use case: measure how good a model's guesses are, and compare measurements in one picture."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from pathlib import Path

import torch
from matplotlib.figure import Figure

from ppd_runtime.acceptance import acceptance_table, rank_record
from ppd_runtime.answers import Text
from ppd_runtime.hf import embed_tokens, embedding_size, vocab_size
from ppd_runtime.measure import measure_texts
from ppd_runtime.models import LoadedModel
from ppd_runtime.prompt_tokens import PromptTokens, free_prompt_tokens
from ppd_runtime.sampling import Typical
from ppd_runtime.token_files import load_prompt_tokens
from treeopt.app.generate import SHIPPED
from treeopt.errors import TrainingError
from treeopt.plot import Curve, Panel, curves_figure
from treeopt.types import AcceptanceTable, RankRecord

__all__ = [
    "Measurement",
    "accuracy_figure",
    "choose_prompt_tokens",
    "cumulative_intervals",
    "measure",
    "shipped_prompt_tokens",
]

Progress = Callable[[str], None]

NUM_FREE = 3
"""Prompt tokens of a training-free measurement, m."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one measurement found, as the two documents it fills."""

    table: AcceptanceTable
    record: RankRecord
    texts: tuple[Text, ...]


def measure(
    loaded: LoadedModel,
    tokens: PromptTokens,
    texts: Sequence[Text],
    *,
    source: str,
    max_rank: int = 10,
    temperature: float = 0.0,
    typical: Typical | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Measurement:
    """Rank the true tokens of the model's answers among its guesses.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    tokens : PromptTokens
        Its prompt tokens.
    texts : sequence of Text
        Its answers, from `treeopt.app.texts.answers_to` with the same temperature.
    source : str
        What the texts are, for the documents.
    max_rank : int
        ``K``: ranks that are told apart.
    temperature : float
        What the answers were sampled with; 0 for greedy.
    typical : Typical, optional
        Record the best acceptable guess instead of the true token; needs a temperature.
    seed : int
        Of the bootstrap.
    progress : callable, optional
        Gets a line per text.

    Raises
    ------
    TrainingError
        When the texts are too short, or typical acceptance is asked for without a temperature.
    """
    if typical is not None and temperature == 0:
        raise TrainingError("typical: needs --temperature above 0; greedy decoding accepts one token only")
    rule = "typical" if typical is not None else "greedy" if temperature == 0 else "sample"
    say = progress or (lambda text: None)
    results = measure_texts(
        loaded,
        tokens,
        texts,
        max_rank=max_rank,
        typical=typical,
        temperature=temperature or 1.0,
        progress=lambda done, total: say(f"text {done} of {total}"),
    )
    table = acceptance_table(
        results,
        model=loaded.name,
        source=source,
        max_rank=max_rank,
        rule=rule,
        temperature=temperature,
        tokens_per_prompt_token=tokens.num_epts,
        seed=seed,
    )
    record = rank_record(
        results, model=loaded.name, source=source, max_rank=max_rank, rule=rule, temperature=temperature
    )
    return Measurement(table, record, tuple(texts))


def cumulative_intervals(table: AcceptanceTable) -> list[list[tuple[float, float, float]]] | None:
    """Return the accumulative accuracy of the best 1, 2, .. K guesses with 95 % intervals, per distance.

    Parameters
    ----------
    table : AcceptanceTable
        A table with intervals.

    Returns
    -------
    list of list of (float, float, float), shape (m, K, 3)
        Accuracy, low, high. None when the table has no intervals.

    Notes
    -----
    A table holds intervals of single ranks. Their width against that of independent positions is the *design effect*
    (L. Kish, "Survey Sampling", 1965): positions of one text are alike. A sum of ranks gets the normal interval of its
    share, widened by the design effect of its distance.
    """
    if table.intervals is None or table.num_samples is None:
        return None
    rows = []
    for shares, intervals in zip(table.marginals, table.intervals, strict=True):
        independent = sum(p * (1 - p) for p in shares) / table.num_samples
        measured = sum(((high - low) / (2 * 1.96)) ** 2 for low, high in intervals)
        design_effect = max(1.0, measured / independent) if independent > 0 else 1.0
        row = []
        for accuracy in accumulate(shares):
            half = 1.96 * math.sqrt(design_effect * max(0.0, accuracy * (1 - accuracy)) / table.num_samples)
            row.append((accuracy, max(0.0, accuracy - half), min(1.0, accuracy + half)))
        rows.append(row)
    return rows


def accuracy_figure(tables: Sequence[tuple[str, AcceptanceTable]]) -> Figure:
    """Draw accumulative accuracy per distance, as Figure 6 of the paper, several tables in one picture.

    Parameters
    ----------
    tables : sequence of (str, AcceptanceTable)
        Names for the legend and tables; at most four.

    Raises
    ------
    TrainingError
        For none or more than four tables.
    """
    if not 1 <= len(tables) <= 4:
        raise TrainingError(f"tables: one to four can be drawn together, not {len(tables)}")
    panels = []
    for j in range(max(table.num_distances for _, table in tables)):
        curves = []
        for style, (name, table) in enumerate(tables):
            if j >= table.num_distances:
                continue
            intervals = cumulative_intervals(table)
            ranks = list(range(1, table.num_ranks + 1))
            accuracy = list(accumulate(table.marginals[j]))
            low = None if intervals is None else [entry[1] for entry in intervals[j]]
            high = None if intervals is None else [entry[2] for entry in intervals[j]]
            curves.append(Curve(name, ranks, accuracy, low, high, style))
        panels.append(Panel(f"accuracy, distance {j + 1}", curves))
    subtitle = "share of positions whose true token is among the best k guesses; bands: 95 % intervals"
    return curves_figure("Accumulative accuracy of the guesses", subtitle, panels, "k, guesses looked at")


def choose_prompt_tokens(loaded: LoadedModel, wanted: str | None) -> PromptTokens:
    """Load prompt tokens from a folder, make untrained ones for ``free``, or take those shipped for the model.

    Raises
    ------
    TrainingError
        When none is named and none is shipped.
    DocumentError, ModelError
        When the folder does not load, or belongs to another model.
    """
    if wanted == "free":
        matrix = embed_tokens(loaded.model, torch.arange(vocab_size(loaded.model), device=loaded.device))
        return free_prompt_tokens(matrix, NUM_FREE, base_model=loaded.name, base_digest=loaded.digest)
    folder = wanted or shipped_prompt_tokens(loaded.name)
    if folder is None:
        raise TrainingError(
            f"model {loaded.name}: no prompt tokens are shipped for it; give --prompt-tokens FOLDER or free, or train "
            "some with treeopt train"
        )
    return load_prompt_tokens(
        folder, hidden_size=embedding_size(loaded.model), base_model=loaded.name, base_digest=loaded.digest
    )


def shipped_prompt_tokens(model: str) -> Path | None:
    """Return the folder of the prompt tokens that come with the package for a model, if any."""
    if model not in SHIPPED:
        return None
    folder = Path(str(resources.files("ppd_runtime") / "data" / SHIPPED[model]))
    return folder if (folder / "adapter_config.json").exists() else None
