"""Use case: the whole idea in a few minutes, with a small model: measure, search, decode, compare.

What takes long is kept where the next run finds it: the model and its kernel plan in the cache, the latency curve in
the database.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ppd_runtime.models import LoadedModel
from ppd_runtime.prompts import encode_prompt
from treeopt.app.bench import PLAIN, BenchInputs, BenchOptions, run_bench
from treeopt.app.bench_inputs import bench_inputs, load_for_bench, mean_context, store_runs
from treeopt.app.bench_latency import bench_latency
from treeopt.app.bench_results import BenchReport, BudgetResult, Timing
from treeopt.app.predict import pad_design
from treeopt.search import search
from treeopt.types import AcceptanceTable, TreeDesign

__all__ = ["DEMO_PROMPTS", "DemoResult", "SideBySide", "run_demo"]

DEMO_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in three sentences why the sky is blue.",
    "List the days of the week and the months of the year.",
)

BUDGET = 16
"""Most tokens per pass that the demo's search considers: on a CPU more never pays."""

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Input lengths that are timed."""

SHOWN_BUDGET = 4
"""Tree that is shown at work where the search finds that no tree pays."""

MAX_NEW_TOKENS = 40

KEEP_FLAGGED_S = 3600.0
"""A disturbed latency curve is not measured again within this time: the machine is likely as busy as it was."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """One prompt, decoded plainly and with the tree."""

    prompt: str
    text: str
    plain_tokens_per_second: float
    tree_tokens_per_second: float
    identical: bool


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo found.

    Parameters
    ----------
    report : BenchReport
        The comparison.
    chosen : TreeDesign
        What the search recommends.
    shown : TreeDesign
        What decoded: the same, or a small tree where no tree is recommended.
    table : AcceptanceTable
        What the search worked with.
    """

    report: BenchReport
    chosen: TreeDesign
    shown: TreeDesign
    table: AcceptanceTable

    @property
    def result(self) -> BudgetResult:
        """The tree's row."""
        return self.report.budgets[0]

    @property
    def tree_pays(self) -> bool:
        """Whether the search recommends speculation on this machine."""
        return _speculates(self.chosen)


def run_demo(
    *,
    db_url: str | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    fresh: bool = False,
    progress: Callable[[str], None] | None = None,
    on_text: Callable[[SideBySide], None] | None = None,
    load: Callable[..., LoadedModel] = load_for_bench,
) -> DemoResult:
    """Load the demo model, look up or measure its latency curve, search, and decode a few prompts in turns.

    Parameters
    ----------
    db_url : str, optional
        As ``--db``.
    max_new_tokens : int
        Tokens per answer.
    fresh : bool
        Measure the latency curve anew.
    progress : callable, optional
        Gets a line whenever something is done.
    on_text : callable, optional
        Gets each prompt once both ways of decoding have answered it.
    load : callable
        Loads the model; a stand-in in tests.

    Raises
    ------
    TreeOptError
        When the model cannot be fetched, or the machine cannot be measured.
    """
    say = progress or (lambda text: None)
    loaded = load("demo", dtype="float32", device="auto", progress=say)
    token_ids = [list(encode_prompt(loaded, prompt)) for prompt in DEMO_PROMPTS]
    inputs, basis = bench_inputs(loaded)
    say(basis)
    latency, line = bench_latency(
        loaded,
        "fresh" if fresh else "auto",
        SIZES,
        mean_context(token_ids, max_new_tokens),
        db_url=db_url,
        keep_flagged_s=KEEP_FLAGGED_S,
        progress=say,
    )
    say(line)
    inputs = replace(inputs, latency=latency)
    chosen, shown = _designs(inputs)
    options = BenchOptions(max_new_tokens=max_new_tokens, library=False)
    budget = max(shown.pass_tokens)
    report, timings = run_bench(
        loaded,
        token_ids,
        inputs,
        [budget],
        options,
        designs={budget: shown},
        progress=say,
        on_timing=_pairs(loaded, f"budget {budget}", on_text),
    )
    say(store_runs(report, timings, db_url))
    return DemoResult(report, chosen, shown, inputs.table)


def _designs(inputs: BenchInputs) -> tuple[TreeDesign, TreeDesign]:
    """Return the fastest design, and the one to show: a small tree where the fastest is none."""
    chosen = search(inputs.table, BUDGET, inputs.latency)
    if _speculates(chosen):
        return chosen, chosen
    return chosen, pad_design(search(inputs.table, SHOWN_BUDGET), inputs.latency)


def _speculates(design: TreeDesign) -> bool:
    return design.acceptance_length is not None and design.acceptance_length > 1 + 1e-9


def _pairs(
    loaded: LoadedModel, tree_name: str, on_text: Callable[[SideBySide], None] | None
) -> Callable[[Timing], None]:
    """Return what waits for both timings of a prompt and then tells of them together."""
    waiting: dict[int, dict[str, Timing]] = {}

    def on_timing(timing: Timing) -> None:
        pair = waiting.setdefault(timing.prompt, {})
        pair[timing.contender] = timing
        if on_text is None or timing.contender not in (PLAIN, tree_name) or not {PLAIN, tree_name} <= pair.keys():
            return
        plain, tree = pair[PLAIN], pair[tree_name]
        text = ""
        if loaded.tokenizer is not None:
            text = str(loaded.tokenizer.decode(list(tree.token_ids), skip_special_tokens=True))
        on_text(
            SideBySide(
                DEMO_PROMPTS[timing.prompt],
                text,
                plain.num_tokens / plain.seconds,
                tree.num_tokens / tree.seconds,
                plain.token_ids == tree.token_ids,
            )
        )

    return on_timing
