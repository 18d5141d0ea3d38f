"""What a benchmark works on, by the names that users give, and keeping what it found."""

from collections.abc import Sequence
from datetime import UTC, datetime

from ppd_runtime.guesses import GuessSource
from ppd_runtime.models import LoadedModel, load_model
from ppd_runtime.prompts import encode_prompt, read_prompts
from treeopt.app.bench import BenchInputs
from treeopt.app.bench_results import BenchReport, Timing
from treeopt.app.generate import ROUGH_MARGINALS, SHIPPED, plan_decoding
from treeopt.app.search import bundled_ranks
from treeopt.app.texts import shipped_prompts
from treeopt.artifact import read_document
from treeopt.bundled import load_acceptance
from treeopt.errors import DocumentError
from treeopt.types import AcceptanceTable, RankRecord

__all__ = ["DEFAULT_NUM_PROMPTS", "bench_inputs", "bench_prompts", "load_for_bench", "mean_context", "store_runs"]

DEFAULT_NUM_PROMPTS = 8
"""Prompts taken from the file that comes with the package when none is named."""


def load_for_bench(
    name: str, *, dtype: str, device: str, kernels: str = "auto", progress: object = None
) -> LoadedModel:
    """Load a model as `ppd_runtime.load_model` does; ``progress`` gets lines."""
    tell = progress if callable(progress) else lambda text: None
    return load_model(name, dtype=dtype, device=device, kernels=kernels, progress=lambda text, share: tell(text))


def bench_prompts(
    loaded: LoadedModel, path: str | None, *, limit: int | None = None, raw: bool = False
) -> list[list[int]]:
    """Read prompts as token ids: a file's, or the first held-out ones that come with the package."""
    texts = read_prompts(shipped_prompts("prompts-held-out.jsonl") if path is None else path)
    texts = texts[: limit or (DEFAULT_NUM_PROMPTS if path is None else None)]
    return [list(encode_prompt(loaded, text, raw=raw)) for text in texts]


def mean_context(token_ids: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Return the mean number of tokens in the cache while these prompts are decoded, if no text ends early."""
    return round(sum(map(len, token_ids)) / len(token_ids) + max_new_tokens / 2)


def bench_inputs(
    loaded: LoadedModel,
    *,
    guesses: str | None = None,
    prompt_tokens: str | None = None,
    acceptance: str | None = None,
    ranks: str | None = None,
) -> tuple[BenchInputs, str]:
    """Choose guesses, the acceptance table that describes them, and the rank record beside it.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    guesses, prompt_tokens : str, optional
        As `treeopt.app.generate.plan_decoding` takes them.
    acceptance, ranks : str, optional
        A table by bundled name or file, and a ``treeopt.ranks/1`` file; those shipped with the guesses otherwise.

    Returns
    -------
    BenchInputs, str
        Without a latency profile; and a line that says what predictions rest on.

    Raises
    ------
    TreeOptError
        When a file is wrong or the parts do not fit together.
    """
    source = plan_decoding(loaded, guesses=guesses, prompt_tokens=prompt_tokens).source
    if source is None:
        raise DocumentError("guesses: a benchmark needs a source of guesses; give prompt, free or lookup")
    record = None if ranks is None else read_document(ranks, RankRecord)
    shipped = SHIPPED.get(loaded.name) if source.name == "prompt" and prompt_tokens is None else None
    name = acceptance or shipped
    if name is None:
        return BenchInputs(source, _rough_table(loaded, source), measured=False, record=record), (
            f"{source.name} guesses, whose acceptance nobody measured here: trees come from rough figures, and nothing "
            "is predicted; measure with treeopt measure and give --acceptance"
        )
    table = load_acceptance(name)[0]
    if record is None:
        record = bundled_ranks(name)
    _check(table, source, name)
    basis = "replay of its ranks" if record is not None else "its table"
    return BenchInputs(source, table, record=record), f"{source.name} guesses, acceptance of {name} by {basis}"


def _check(table: AcceptanceTable, source: GuessSource, name: str) -> None:
    if (table.num_distances, table.tokens_per_prompt_token) != (source.num_distances, source.num_epts):
        raise DocumentError(
            f"--acceptance {name}: is for m = {table.num_distances} with {table.tokens_per_prompt_token} tokens per "
            f"prompt token, the {source.name} guesses have m = {source.num_distances} with {source.num_epts}; give "
            "their own table"
        )


def _rough_table(loaded: LoadedModel, source: GuessSource) -> AcceptanceTable:
    rough = ROUGH_MARGINALS[source.name]
    rows = [rough[min(j, len(rough) - 1)] for j in range(source.num_distances)]
    return AcceptanceTable.from_marginals(rows, tokens_per_prompt_token=source.num_epts, model=loaded.name)


def store_runs(report: BenchReport, timings: tuple[Timing, ...], db_url: str | None = None) -> str:
    """Keep every timing as a decode run, and the designs, in the database; return a line that says so.

    Raises
    ------
    DatabaseError
        When the database cannot be written.
    """
    try:
        from db.documents import add_decode_run, add_tree_design
        from treeopt.app.profile_library import open_for_writing
    except ImportError:
        return "the runs were not stored: that needs treeopt[profile]"
    engine = open_for_writing(db_url)
    now = datetime.now(UTC)
    for result in report.budgets:
        add_tree_design(engine, result.design, now)
    known = {} if report.latency is None else report.latency.device
    instance = known.get("instance_digest") if known.get("name") == report.device else None  # else another machine's
    for timing in timings:
        add_decode_run(engine, timing.run, now, instance_digest=instance if isinstance(instance, str) else None)
    engine.dispose()
    return f"{len(timings)} decode runs stored"
