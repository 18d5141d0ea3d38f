"""The benchmark on a machine whose time is declared: every figure has one right value."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.forged_speedup import ForgedGuesses, known_texts
from ppd_runtime.models import LoadedModel, wrap_model
from tests.ppd_runtime.tiny import tiny_model
from treeopt import AcceptanceTable, LatencyProfile
from treeopt.app.baselines import Contender
from treeopt.app.bench import PLAIN, BenchInputs, BenchOptions, _warm_up, designs_for, run_bench
from treeopt.app.bench_document import baseline_object, budget_object, report_document
from treeopt.app.bench_inputs import store_runs
from treeopt.app.bench_results import BenchReport, Timing, count_identical, ratio_of_totals, step_split, tokens_per_step
from treeopt.errors import DecodeError
from treeopt.types import DecodeRun

TABLE = AcceptanceTable.from_marginals([[0.6, 0.2, 0.1], [0.5, 0.2, 0.05], [0.4, 0.2, 0.05]], model="tiny")
COSTS = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.5, 16: 2.5}
PROFILE = LatencyProfile.from_medians(COSTS, model="tiny")
PROMPTS = [[1, 2, 3, 4], [5, 6, 7], [8, 9, 1, 2, 3], [4, 4]]
OPTIONS = BenchOptions(max_new_tokens=40, library=False, ignore_eos=True)


class DeclaredClock:
    """Time goes on when the model runs, by the cost of the pass, and never else."""

    def __init__(self, loaded: LoadedModel, cost: Callable[[int], float]) -> None:
        self.now_s = 0.0
        self.cost = cost
        loaded.model.register_forward_pre_hook(self._pass, with_kwargs=True)

    def _pass(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = kwargs.get("inputs_embeds")
        if rows is None:
            rows = kwargs["input_ids"]
        self.now_s += self.cost(rows.shape[1])

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def loaded() -> LoadedModel:
    return wrap_model(tiny_model(max_position_embeddings=256), name="tiny")


def forged(loaded: LoadedModel, table: AcceptanceTable = TABLE) -> ForgedGuesses:
    return ForgedGuesses(loaded, table, known_texts(loaded, PROMPTS, OPTIONS.max_new_tokens + 3))


def measured(
    loaded: LoadedModel,
    *,
    table: AcceptanceTable = TABLE,
    latency: LatencyProfile = PROFILE,
    cost: Callable[[int], float] = lambda n: COSTS.get(n, 99.0),
    options: BenchOptions = OPTIONS,
    budgets: tuple[int, ...] = (1, 4, 8, 16),
) -> tuple[BenchReport, tuple[Timing, ...]]:
    """Decode with guesses that follow TABLE, and predict from whatever table and curve are given."""
    inputs = BenchInputs(forged(loaded), table, latency=latency)
    return run_bench(loaded, PROMPTS, inputs, budgets, options, clock=DeclaredClock(loaded, cost))


def test_the_measured_speedup_is_the_ratio_of_declared_times(loaded: LoadedModel) -> None:
    report, timings = measured(loaded)
    for result in report.budgets:
        ours = [timing for timing in timings if timing.contender == f"budget {result.budget}"]
        steps = [sum(timing.run.steps_per_state[k] for timing in ours) for k in range(4)]
        seconds = sum(count * COSTS[n] for count, n in zip(steps, result.design.pass_tokens, strict=True) if count)
        tokens = len(PROMPTS) * (OPTIONS.max_new_tokens - 1)
        assert result.acceptance_length.value == pytest.approx(tokens / sum(steps))
        assert result.speedup.value == pytest.approx(tokens / seconds)  # a plain token takes 1 s
        assert result.tokens_per_second == pytest.approx(tokens / seconds)
        assert result.occupancy == pytest.approx([count / sum(steps) for count in steps])
        assert result.split.step_s == pytest.approx(seconds / sum(steps))
        assert result.num_tokens == len(PROMPTS) * OPTIONS.max_new_tokens
        assert result.identical == result.num_prompts == len(PROMPTS)
    assert report.baselines[0].name == PLAIN
    assert report.baselines[0].tokens_per_second == pytest.approx(1.0)


def test_prediction_and_measurement_agree_when_the_inputs_are_right(loaded: LoadedModel) -> None:
    report, _ = measured(loaded)
    for result in report.budgets:
        assert result.prediction is not None
        assert result.speedup.value == pytest.approx(result.prediction.speedup, rel=0.05)
    assert report.findings == ()


def test_a_wrong_latency_curve_is_named_and_nothing_else(loaded: LoadedModel) -> None:
    wrong = LatencyProfile.from_medians({n: cost if n < 8 else cost * 0.7 for n, cost in COSTS.items()}, model="tiny")
    report, _ = measured(loaded, latency=wrong)
    (finding,) = report.findings
    assert finding.startswith("latency curve: is off at budget 8, 16: ")
    assert "43% more than the curve says" in finding


def test_a_machine_that_is_evenly_slower_is_told_apart(loaded: LoadedModel) -> None:
    report, _ = measured(loaded, cost=lambda n: 2 * COSTS.get(n, 99.0))
    (finding,) = report.findings
    assert finding.startswith("latency curve: a plain step took 2000.0 ms, the curve says 1000.0 ms")
    assert report.budgets[1].speedup.value == pytest.approx(report.budgets[1].prediction.speedup, rel=0.05)


def test_a_stale_acceptance_table_is_named_and_nothing_else(loaded: LoadedModel) -> None:
    stale = AcceptanceTable.from_marginals([[0.9, 0.05, 0.01]] * 3, model="tiny")
    report, _ = measured(loaded, table=stale)
    (finding,) = report.findings
    assert finding.startswith("acceptance table: is off at budget 4, 8, 16: ")


def test_padding_alone_is_its_own_baseline(loaded: LoadedModel) -> None:
    falling = {1: 1.0, 2: 1.1, 4: 0.8, 8: 1.5, 16: 2.5}
    profile = LatencyProfile.from_medians(falling, model="tiny")
    report, _ = measured(loaded, latency=profile, cost=lambda n: falling.get(n, 99.0))
    padded = next(baseline for baseline in report.baselines if baseline.name == "padded")
    assert padded.pass_tokens == 4
    assert padded.acceptance_length == 1.0
    assert padded.speedup.value == pytest.approx(1 / 0.8)
    assert padded.identical == len(PROMPTS)
    best = report.budgets[1]
    assert best.over["padded"].value == pytest.approx(best.speedup.value * 0.8)


def test_padding_that_changes_nothing_repeats_the_plain_row(loaded: LoadedModel) -> None:
    report, timings = measured(loaded)
    plain, padded = report.baselines
    assert padded == replace(plain, name="padded")
    assert {timing.contender for timing in timings} == {"none", "budget 1", "budget 4", "budget 8", "budget 16"}


@pytest.mark.parametrize("objective", ["tau", "speed"])
def test_designs_keep_their_budgets_and_promise_measured_sizes(loaded: LoadedModel, objective: str) -> None:
    inputs = BenchInputs(forged(loaded), TABLE, latency=PROFILE)
    designs = designs_for(inputs, [1, 4, 8, 16], replace(OPTIONS, objective=objective))
    for budget, design in designs.items():
        assert max(design.pass_tokens) <= budget
        assert set(design.pass_tokens) <= set(COSTS)
    sizes = [max(design.pass_tokens) for design in designs.values()]
    assert sizes == ([1, 4, 8, 16] if objective == "tau" else sizes)
    if objective == "speed":
        assert sizes[-1] <= 8  # sixteen tokens cost more than they bring here


def test_transformers_takes_part_after_prefill_and_says_the_same(loaded: LoadedModel) -> None:
    assistant = wrap_model(tiny_model(max_position_embeddings=256, seed=3), name="assistant")
    inputs = BenchInputs(forged(loaded), TABLE, latency=PROFILE)
    clock = DeclaredClock(loaded, lambda n: 1.0)
    report, timings = run_bench(
        loaded, PROMPTS, inputs, [4], replace(OPTIONS, library=True), assistant=assistant, clock=clock
    )
    rows = {baseline.name: baseline for baseline in report.baselines}
    assert list(rows) == ["none", "padded", "generate", "prompt_lookup", "assisted"]
    assert {baseline.identical for baseline in rows.values()} == {len(PROMPTS)}
    assert {baseline.num_tokens for baseline in rows.values()} == {len(PROMPTS) * OPTIONS.max_new_tokens}
    # Every pass of the model costs one second, so speed is tokens per pass; the assistant's passes cost nothing here.
    assert rows["generate"].tokens_per_second == pytest.approx(1.0)
    for name in ("prompt_lookup", "assisted"):
        assert rows[name].tokens_per_second == pytest.approx(rows[name].acceptance_length)
        theirs = [timing for timing in timings if timing.contender == name]
        # What the first pass wrote is left out, like the first token of plain decoding.
        assert all(timing.num_tokens <= OPTIONS.max_new_tokens - 1 for timing in theirs)
    assert rows["prompt_lookup"].acceptance_length > 1.0


def test_turns_are_taken_prompt_by_prompt(loaded: LoadedModel) -> None:
    seen: list[tuple[int, str]] = []
    inputs = BenchInputs(forged(loaded), TABLE, latency=PROFILE)
    run_bench(
        loaded, PROMPTS, inputs, [1, 4], replace(OPTIONS, rounds=2, max_new_tokens=4),
        on_timing=lambda timing: seen.append((timing.prompt, timing.contender)),
    )  # fmt: skip
    names = ["none", "budget 1", "budget 4"]
    for start in range(0, len(seen), 3):
        turn = seen[start : start + 3]
        assert len({prompt for prompt, _ in turn}) == 1
        assert sorted(name for _, name in turn) == sorted(names)
    assert {seen[start][1] for start in range(0, len(seen), 3)} == set(names)


def test_fixed_shapes_share_one_cache_and_write_the_same(loaded: LoadedModel) -> None:
    report, timings = measured(loaded, options=replace(OPTIONS, cache="static"), budgets=(1, 16))
    growing, others = measured(loaded, budgets=(1, 16))
    assert [result.identical for result in report.budgets] == [len(PROMPTS)] * 2
    by_prompt = {timing.prompt: timing.token_ids for timing in others}
    assert all(timing.token_ids == by_prompt[timing.prompt] for timing in timings)
    assert report.budgets[0].speedup == growing.budgets[0].speedup


def test_modes_that_cannot_run_are_refused(loaded: LoadedModel) -> None:
    for changes, message in (
        ({"graph_mode": "compiled"}, "needs --cache static"),
        ({"graph_mode": "cuda_graph", "cache": "static"}, "needs a CUDA device"),
        ({"graph_mode": "fast"}, "must be one of eager"),
    ):
        with pytest.raises(DecodeError, match=message):
            measured(loaded, options=replace(OPTIONS, **changes), budgets=(4,))
    with pytest.raises(DecodeError, match="at least one of each"):
        run_bench(loaded, [], BenchInputs(forged(loaded), TABLE), [4], OPTIONS)


def test_few_steps_prove_no_table_stale(loaded: LoadedModel) -> None:
    few = replace(OPTIONS, max_new_tokens=3)
    stale = AcceptanceTable.from_marginals([[0.9, 0.05, 0.01]] * 3, model="tiny")
    report, _ = measured(loaded, table=stale, options=few)
    assert not [finding for finding in report.findings if finding.startswith("acceptance")]


def test_lines_have_the_promised_fields_and_the_document_has_all(loaded: LoadedModel) -> None:
    report, _ = measured(loaded)
    assert list(budget_object(report.budgets[1])) == [
        "budget", "state_sizes", "predicted_tau", "measured_tau", "predicted_speedup", "predicted_low",
        "predicted_high", "measured_speedup", "measured_low", "measured_high", "identical", "num_prompts",
        "num_tokens",
    ]  # fmt: skip
    assert baseline_object(report.baselines[0])["baseline"] == "none"
    document = report_document(report)
    assert document["format"] == "treeopt.bench/1"
    assert [entry["budget"] for entry in document["budgets"]] == [1, 4, 8, 16]
    assert document["budgets"][1]["tau_by_model"].keys() == {"independent"}


def test_runs_are_stored_with_their_designs(loaded: LoadedModel, tmp_path: Path) -> None:
    from db.documents import list_decode_runs, list_tree_designs
    from db.schema import open_database

    report, timings = measured(loaded)
    url = f"sqlite:///{tmp_path / 'bench.db'}"
    assert store_runs(report, timings, url) == f"{len(timings)} decode runs stored"
    engine = open_database(url)
    assert engine is not None
    assert list_decode_runs(engine) == tuple(timing.run for timing in timings)
    assert set(list_tree_designs(engine)) == {result.design for result in report.budgets}
    engine.dispose()


def timing(prompt: int, tokens: int, seconds: float, *, steps: int = 10, ids: tuple[int, ...] = (1,)) -> Timing:
    run = DecodeRun(
        "toy", "none", None, 3, tokens + 1, steps, (steps,), 0.1, seconds, "length",
        forward_s=seconds / 2, propose_s=seconds / 8, verify_s=seconds / 8, commit_s=seconds / 8,
    )  # fmt: skip
    return Timing("x", prompt, ids, tokens, seconds, run)


def test_ratios_are_of_totals_with_both_sides_of_a_prompt_kept_together() -> None:
    ours = [timing(0, 10, 1.0), timing(1, 30, 6.0)]
    theirs = [timing(0, 10, 2.0), timing(1, 30, 6.0)]
    ratio = ratio_of_totals(ours, theirs)
    assert ratio.value == pytest.approx((40 / 7) / (40 / 8))
    # Resampling draws prompt 0 twice, 1 twice, or both: the ends are the ratios of each prompt alone.
    assert (ratio.low, ratio.high) == pytest.approx((1.0, 2.0))
    assert ratio_of_totals(ours[:1], theirs[:1]).low is None
    assert tokens_per_step(ours).value == pytest.approx(40 / 20)
    with pytest.raises(DecodeError, match="different ones"):
        ratio_of_totals(ours[:1], theirs)
    with pytest.raises(DecodeError, match="raise --max-new-tokens"):
        ratio_of_totals([timing(0, 0, 0.0, steps=0)], [timing(0, 0, 0.0, steps=0)])


def test_identity_is_counted_per_prompt_over_all_rounds() -> None:
    plain = [timing(0, 1, 1.0, ids=(5, 6)), timing(1, 1, 1.0, ids=(7, 8))]
    other = [*plain, timing(1, 1, 1.0, ids=(7, 9))]
    assert count_identical(plain, plain) == 2
    assert count_identical(other, plain) == 1


def test_the_parts_of_a_step_add_up() -> None:
    split = step_split([timing(0, 10, 1.0), timing(1, 10, 3.0)])
    assert split.step_s == pytest.approx(4.0 / 20)
    assert split.forward_s == pytest.approx(0.1)
    parts = (split.forward_s, split.propose_s, split.verify_s, split.commit_s, split.other_s)
    assert sum(parts) == pytest.approx(split.step_s)


def decoded(limits: list[int | None], steps: list[tuple[int, ...]]) -> Callable[[int, Any, int | None], Timing]:
    """A contender's decode that notes its limits and has visited the given states."""

    def decode(prompt: int, ids: object, limit: int | None) -> Timing:
        limits.append(limit)
        run = DecodeRun("tiny", "prompt", None, 3, 7, sum(steps[0]), steps[0], 0.0, 1.0, "length")
        return Timing("budget 4", prompt, (0,) * 7, 6, 1.0, replace(run, steps_per_state=steps.pop(0)))

    return decode


@pytest.mark.parametrize(
    ("sizes", "fixed", "steps", "limits"),
    [
        ((2, 4), False, [(0, 3), (1, 2)], [6]),
        ((4, 4), True, [(0, 3), (1, 2)], [6]),  # one shape: a few tokens meet it
        ((2, 4, 8), True, [(0, 0, 5), (3, 0, 2), (1, 1, 0), (1, 1, 1)], [None, None, None]),
        ((2, 4), True, [(0, 5), (0, 5), (0, 5), (0, 5)], [None, None, None, None]),  # state 0 never comes up
    ],
)
def test_every_size_of_pass_is_met_before_anything_is_timed(
    sizes: tuple[int, ...], fixed: bool, steps: list[tuple[int, ...]], limits: list[int | None]
) -> None:
    found: list[int | None] = []
    _warm_up(Contender("budget 4", decoded(found, steps), sizes), PROMPTS, fixed_shapes=fixed)
    assert found == limits
