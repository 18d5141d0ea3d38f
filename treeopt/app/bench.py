"""Use case: measure what designs are worth against plain decoding and against what transformers offers, in one process.

Contenders take turns on every prompt (A B A B), warm, so that a machine that grows faster or slower meanwhile does so
for all of them; speedups are ratios of totals, with an interval over prompts; every text is compared with plain
decoding's, token by token.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ppd_runtime.guesses import GuessSource
from ppd_runtime.models import LoadedModel
from ppd_runtime.settings import Settings
from profiler.device import identify
from treeopt.app.baselines import Contender, Engine, library_contender, padded_design, tree_contender
from treeopt.app.bench_findings import findings
from treeopt.app.bench_results import (
    BaselineResult,
    BenchReport,
    BudgetResult,
    Timing,
    count_identical,
    ratio_of_totals,
    step_split,
    tokens_per_step,
)
from treeopt.app.predict import pad_design, predict
from treeopt.errors import DecodeError
from treeopt.replay import replay_sequences
from treeopt.search import search
from treeopt.types import AcceptanceTable, LatencyProfile, RankRecord, TreeDesign

__all__ = ["PLAIN", "BenchInputs", "BenchOptions", "designs_for", "run_bench"]

PLAIN = "none"
"""Name of the reference: our runtime, exactly one token a pass."""

WARM_UP_TOKENS = 6
"""Tokens that every contender writes before anything is timed."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How a benchmark runs.

    Parameters
    ----------
    max_new_tokens : int
        Tokens per prompt at most.
    rounds : int
        Times every prompt is decoded by every contender.
    objective : {"tau", "speed"}
        What designs are searched for: most tokens per step within each budget (the paper's Figure 8b), or most tokens
        per second.
    acceptance_model : {"independent", "joint"}
        The model that designs are searched under.
    cache, graph_mode : str
        How our runtime runs its passes.
    lookup_tokens : int
        Candidates per step of transformers' prompt lookup; 0 leaves that baseline out.
    library : bool
        Whether transformers' own ``generate`` takes part.
    ignore_eos : bool
        Write exactly ``max_new_tokens``.
    """

    max_new_tokens: int = 64
    rounds: int = 1
    objective: str = "tau"
    acceptance_model: str = "independent"
    cache: str = "dynamic"
    graph_mode: str = "eager"
    lookup_tokens: int = 3
    library: bool = True
    ignore_eos: bool = False

    @property
    def settings(self) -> Settings:
        """As the runtime takes it."""
        eos = frozenset[int]() if self.ignore_eos else None
        return Settings(max_new_tokens=self.max_new_tokens, cache=self.cache, eos_token_ids=eos)


@dataclass(frozen=True, slots=True)
class BenchInputs:
    """What predictions and designs come from.

    Parameters
    ----------
    source : GuessSource
        Where guesses come from.
    table : AcceptanceTable
        How often they are right.
    measured : bool
        Whether somebody measured that table; rough figures choose trees but promise nothing.
    record : RankRecord or None
        Ranks in order, for replay.
    latency : LatencyProfile or None
        The machine.
    """

    source: GuessSource
    table: AcceptanceTable
    measured: bool = True
    record: RankRecord | None = None
    latency: LatencyProfile | None = None


def designs_for(inputs: BenchInputs, budgets: Sequence[int], options: BenchOptions) -> dict[int, TreeDesign]:
    """Search one design per budget, each state padded to the cheapest measured size within it."""
    latency = inputs.latency if options.objective == "speed" else None
    return {
        budget: pad_design(
            search(inputs.table, budget, latency, acceptance_model=options.acceptance_model), inputs.latency
        )
        for budget in budgets
    }


def run_bench(
    loaded: LoadedModel,
    token_ids: Sequence[Sequence[int]],
    inputs: BenchInputs,
    budgets: Sequence[int],
    options: BenchOptions,
    *,
    assistant: LoadedModel | None = None,
    designs: dict[int, TreeDesign] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
    on_timing: Callable[[Timing], None] | None = None,
) -> tuple[BenchReport, tuple[Timing, ...]]:
    """Decode every prompt with every contender and compare.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    token_ids : sequence of sequence of int
        The prompts.
    inputs : BenchInputs
        Guesses, and what is known of them and of the machine.
    budgets : sequence of int
        One design is decoded for each.
    options : BenchOptions
        How.
    assistant : LoadedModel, optional
        Adds assisted generation as a baseline.
    designs : dict of int to TreeDesign, optional
        The designs, by budget; searched without it.
    clock : callable
        Seconds.
    progress : callable, optional
        Gets a line per decoded text.
    on_timing : callable, optional
        Gets every timing as it comes.

    Returns
    -------
    BenchReport, tuple of Timing
        The comparison, and all it was made of.

    Raises
    ------
    DecodeError
        When nothing can be timed, or the parts do not fit together.
    """
    if not token_ids or not budgets:
        raise DecodeError("prompts, budgets: at least one of each is needed")
    designs = designs_for(inputs, budgets, options) if designs is None else designs
    if inputs.measured and inputs.record is not None:
        for design in designs.values():  # a record that does not fit is better known before an hour of decoding
            replay_sequences(design, inputs.record)
    contenders = _contenders(loaded, token_ids, inputs, designs, options, assistant, clock)
    timings: dict[str, list[Timing]] = {contender.name: [] for contender in contenders}
    total = options.rounds * len(token_ids) * len(contenders)
    say = progress or (lambda text: None)
    for contender in contenders:
        say(f"warming up {contender.name}")
        _warm_up(contender, token_ids, fixed_shapes=options.graph_mode != "eager")
    done = 0
    for round_index in range(options.rounds):
        for prompt, ids in enumerate(token_ids):
            # Each takes every place in the order, so what the one before leaves behind is nobody's advantage.
            first = (prompt + round_index) % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                timing = contender.decode(prompt, ids, None)
                timings[contender.name].append(timing)
                if on_timing is not None:
                    on_timing(timing)
                done += 1
                say(f"{contender.name}, prompt {prompt + 1} of {len(token_ids)} ({done} of {total} texts)")
    report = _report(loaded, token_ids, inputs, designs, options, timings)
    return report, tuple(timing for each in timings.values() for timing in each)


def _warm_up(contender: Contender, token_ids: Sequence[Sequence[int]], *, fixed_shapes: bool) -> None:
    """Write a few tokens: allocating is no part of a speed. Compiling even less, so every size of pass is met once."""
    waiting = set(contender.pass_tokens) if fixed_shapes else set[int]()
    limit = None if len(waiting) > 1 else WARM_UP_TOKENS  # rare states may come late in a text
    for ids in token_ids:
        timing = contender.decode(0, ids, limit)
        visits = zip(contender.pass_tokens, timing.run.steps_per_state, strict=False)
        waiting -= {size for size, steps in visits if steps}
        if not waiting:
            return


def _contenders(
    loaded: LoadedModel,
    token_ids: Sequence[Sequence[int]],
    inputs: BenchInputs,
    designs: dict[int, TreeDesign],
    options: BenchOptions,
    assistant: LoadedModel | None,
    clock: Callable[[], float],
) -> list[Contender]:
    padded = None if inputs.latency is None else padded_design(inputs.latency)
    settings = options.settings
    largest = max(max(design.pass_tokens) for design in (*designs.values(), *((padded[0],) if padded else ())))
    num_prompt_rows = inputs.source.num_distances * inputs.source.num_epts
    capacity = max(map(len, token_ids)) + options.max_new_tokens + max(largest, num_prompt_rows) + 1
    engine = Engine(loaded, settings, graph_mode=options.graph_mode, capacity=capacity, clock=clock)
    found = [tree_contender(engine, PLAIN, None, None)]
    found += [tree_contender(engine, f"budget {n}", design, inputs.source) for n, design in designs.items()]
    if padded is not None:
        found.append(tree_contender(engine, "padded", *padded))
    if options.library:
        found.append(library_contender(loaded, settings, clock=clock))
        if options.lookup_tokens:
            found.append(
                library_contender(loaded, settings, "prompt_lookup", lookup_tokens=options.lookup_tokens, clock=clock)
            )
        if assistant is not None:
            found.append(library_contender(loaded, settings, "assisted", assistant=assistant, clock=clock))
    return found


def _report(
    loaded: LoadedModel,
    token_ids: Sequence[Sequence[int]],
    inputs: BenchInputs,
    designs: dict[int, TreeDesign],
    options: BenchOptions,
    timings: dict[str, list[Timing]],
) -> BenchReport:
    latency, plain = inputs.latency, timings[PLAIN]
    rivals = [name for name in timings if not name.startswith("budget ")]
    baselines = [_baseline(name, timings[name], plain, latency) for name in rivals]
    if latency is not None and "padded" not in timings:
        # The cheapest measured size is one token: padding changes nothing, and there is nothing to run again.
        baselines.insert(1, replace(baselines[0], name="padded"))
    results = tuple(
        _budget(budget, design, inputs, timings[f"budget {budget}"], {name: timings[name] for name in rivals})
        for budget, design in sorted(designs.items())
    )
    num_written = sum(len(timing.token_ids) for timing in plain) / len(plain)
    return BenchReport(
        model=loaded.name,
        guesses=inputs.source.name,
        device=identify(str(loaded.device)).name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        kernels=loaded.kernels,
        cache=options.cache,
        graph_mode=options.graph_mode,
        context_len=round(sum(map(len, token_ids)) / len(token_ids) + num_written / 2),
        budgets=results,
        baselines=tuple(baselines),
        findings=findings(results, baselines[0].step_s, latency),
        latency=latency,
    )


def _budget(
    budget: int, design: TreeDesign, inputs: BenchInputs, ours: list[Timing], rivals: dict[str, list[Timing]]
) -> BudgetResult:
    num_steps = sum(timing.run.num_steps for timing in ours)
    per_state = [timing.run.steps_per_state for timing in ours]
    occupancy = tuple(sum(steps[k] for steps in per_state) / num_steps for k in range(len(design.trees)))
    known = None
    if inputs.measured:
        known = predict(design, inputs.table, inputs.latency, inputs.record)
    return BudgetResult(
        budget=budget,
        design=design,
        prediction=known,
        acceptance_length=tokens_per_step(ours),
        speedup=ratio_of_totals(ours, rivals[PLAIN]),
        over={name: ratio_of_totals(ours, theirs) for name, theirs in rivals.items()},
        tokens_per_second=_speed(ours),
        identical=count_identical(ours, rivals[PLAIN]),
        num_prompts=len({timing.prompt for timing in ours}),
        num_tokens=sum(len(timing.token_ids) for timing in ours),
        num_steps=num_steps,
        rounds=len(ours) // len({timing.prompt for timing in ours}),
        occupancy=occupancy,
        split=step_split(ours),
    )


def _baseline(name: str, theirs: list[Timing], plain: list[Timing], latency: LatencyProfile | None) -> BaselineResult:
    pass_tokens = None
    if name == PLAIN:
        pass_tokens = 1
    elif name == "padded" and latency is not None:
        cheapest = latency.cheapest(1, latency.points[-1].num_tokens)
        pass_tokens = None if cheapest is None else cheapest.num_tokens
    return BaselineResult(
        name=name,
        tokens_per_second=_speed(theirs),
        acceptance_length=tokens_per_step(theirs).value,
        speedup=ratio_of_totals(theirs, plain),
        identical=count_identical(theirs, plain),
        num_prompts=len({timing.prompt for timing in theirs}),
        num_tokens=sum(len(timing.token_ids) for timing in theirs),
        pass_tokens=pass_tokens,
        step_s=step_split(theirs).step_s,
    )


def _speed(timings: Sequence[Timing]) -> float:
    return sum(timing.num_tokens for timing in timings) / sum(timing.seconds for timing in timings)
