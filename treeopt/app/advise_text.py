"""Advice in words: the same sentences in the terminal and in the report."""

from treeopt.advice import BreakEven, Contender, Verdict
from treeopt.app.advise import Advice, samples_needed
from treeopt.draw import counted
from treeopt.marginal import Addition

__all__ = [
    "against_best",
    "break_even_line",
    "doubt_line",
    "headline",
    "interval",
    "reason",
    "tied_line",
    "wider_or_deeper",
]

_BASIS = {
    "replay": "replay of recorded text",
    "independent": "the acceptance table, distances taken as independent",
    "joint": "the table's joint counts",
}


def interval(contender: Contender) -> str:
    """Return the 95 % interval of a speedup, or that it is unknown."""
    return "unknown" if contender.low is None else f"{contender.low:.3f}x to {contender.high:.3f}x"


def headline(advice: Advice) -> str:
    """Return the advice in one line."""
    verdict = advice.verdict
    best = verdict.best
    if verdict.use == "none":
        return "Use no speculation: decode one token a pass."
    sure = "interval unknown" if best.low is None else f"95 %: {interval(best)}"
    return f"Use a {verdict.use}: {best.speedup:.3f}x plain decoding ({sure})."


def reason(advice: Advice) -> str:
    """Return why."""
    verdict = advice.verdict
    best = verdict.best
    if best.kind == "none":
        runner = next((each for each in verdict.contenders if each.kind != "none"), None)
        if runner is None:
            return "No guess is ever right, so every tree is slower."
        return f"The fastest speculation, {runner.name}, is {runner.speedup:.3f}x plain decoding ({_known(runner)})."
    if verdict.use == "none":
        plain = next(each for each in verdict.contenders if each.kind == "none")
        return (
            f"The fastest speculation, {best.name}, looks like {best.speedup:.3f}x ({interval(best)}), which the data "
            f"cannot tell from 1{_until(plain, verdict)}."
        )
    passes = ", ".join(str(tokens) for tokens in best.design.pass_tokens)
    return f"The fastest design is the {best.name}: {best.acceptance_length:.3f} tokens per step; pass tokens {passes}."


def _known(contender: Contender) -> str:
    return "interval unknown" if contender.low is None else f"95 %: {interval(contender)}"


def against_best(contender: Contender, verdict: Verdict) -> str:
    """Return how a contender stands against the best one."""
    if contender is verdict.best:
        return "best"
    if contender.tied is None:
        return ""
    return "tied" if contender.tied else "slower"


def tied_line(advice: Advice) -> str:
    """Return which designs the data cannot tell from the best one, and what would."""
    verdict = advice.verdict
    if not verdict.interval_known:
        return "Whether designs are tied is unknown: a rank record (--replay) and raw step times would say."
    if not advice.tied:
        return f"No other design is tied with the {verdict.best.name}."
    tied = ", ".join(f"{each.name}{_until(each, verdict)}" for each in advice.tied)
    return f"Tied with the {verdict.best.name}: {tied}."


def _until(contender: Contender, verdict: Verdict) -> str:
    needed = samples_needed(contender, verdict)
    if needed is None:
        return " (the same speed)"
    if needed[0] > 1_000_000:
        return " (no practical number of samples would tell)"
    if needed[0] <= (verdict.num_samples or 0):
        return " (on the border)"  # the resampled interval and the normal formula behind the number disagree there
    return f" (until about {needed[0]:,} {verdict.unit} and {needed[1]:,} timed steps)"


def doubt_line(advice: Advice) -> str:
    """Return what the interval rests on, and which input is the larger doubt."""
    verdict = advice.verdict
    parts = [f"Tokens per step by {_BASIS[verdict.basis]}"]
    if verdict.unit == "sequences":
        parts[0] += f", {counted(verdict.num_samples or 0, 'sequence')}"
    elif verdict.unit == "positions":
        parts[0] += f"; {verdict.num_samples:,} positions, taken as independent, which is too sure (--replay is not)"
    else:
        parts[0] += "; its sampling error is unknown"
    if verdict.num_steps is None:
        parts.append("some latency has no raw step times, so its error is unknown")
    else:
        parts.append(f"latencies are medians of at least {counted(verdict.num_steps, 'timed step')}")
    rival = advice.rival
    if rival is not None:
        against = rival if verdict.best is not rival else verdict.best
        if against.latency_share is not None:
            share = against.latency_share
            larger, part = ("latencies", share) if share > 0.5 else ("acceptance", 1 - share)
            parts.append(f"{100 * part:.0f} % of the doubt about the speedup is about {larger}")
    return "; ".join(parts) + "."


def break_even_line(rows: tuple[BreakEven, ...]) -> str:
    """Return where speculation stops paying by the acceptance table, among what was measured."""
    paying = [row for row in rows if row.kind != "none"]
    if not paying:
        return "By the acceptance table speculation pays nowhere among what was measured."
    if len(paying) == len(rows):
        return "By the acceptance table speculation pays everywhere among what was measured."
    ends = []
    for batch in sorted({row.batch_size for row in rows}):
        row_of = [row for row in rows if row.batch_size == batch]
        good = [row.context_len for row in row_of if row.kind != "none"]
        if not good:
            ends.append(f"at no context with batch {batch}")
        elif len(good) == len(row_of):
            ends.append(f"at every context with batch {batch}")
        else:
            ends.append(f"at context {', '.join(map(str, good))} with batch {batch}")
    return f"By the acceptance table, among what was measured, speculation pays {'; '.join(ends)}."


def wider_or_deeper(advice: Advice) -> list[str]:
    """Return what one thing more would bring to the best design that speculates."""
    marginal = advice.marginal
    words = {
        "wider": "Wider: one more candidate brings most per token.",
        "deeper": "Deeper: one more prompt token brings most per token.",
        "neither": "Neither wider nor deeper: nothing that could be added makes decoding faster.",
        "unknown": "Wider or deeper: unknown, no pass large enough to add anything was measured.",
    }
    lines = [words[marginal.advice]]
    if marginal.wider is not None:
        lines.append(f"one more candidate: {_addition(marginal.wider, marginal.speedup)}")
    if marginal.deeper is not None:
        lines.append(f"one more prompt token: {_addition(marginal.deeper, marginal.speedup)}")
    if marginal.last_distance_gain is not None:
        lines.append(
            f"the farthest distance ({advice.table.num_distances}) is worth {marginal.last_distance_gain:+.4f} tokens "
            f"per step at budget {advice.budget}"
        )
    return lines


def _addition(addition: Addition, now: float | None) -> str:
    speed = ""
    if addition.speedup is not None and now is not None:
        change = 100 * (addition.speedup / now - 1)
        words = "as fast" if abs(change) < 0.005 else f"{abs(change):.2f} % {'faster' if change > 0 else 'slower'}"
        speed = f", {words}"
    return f"{addition.gain:+.4f} tokens per step for {counted(addition.num_tokens, 'token')}{speed}"
