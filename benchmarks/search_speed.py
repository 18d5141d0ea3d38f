"""How fast the searches are, how their time grows with the budget, and what the whole command costs.

Everything is measured in one run on one core, so the ratios hold on the machine it ran on. Prints a table for people,
then one JSON line for machines, and draws the growth with ``--out``::

    python benchmarks/search_speed.py --out docs/images/search_growth.png

Times are medians over repetitions, in seconds, in a process that has everything imported. The whole command is timed
from outside against the cheapest process that has the same numerical libraries, the two in turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy starts its threads

from treeopt import AcceptanceTable
from treeopt.acceptance import AcceptanceTrie, acceptance_trie
from treeopt.bundled import load_acceptance
from treeopt.exact import exact_trees
from treeopt.greedy import greedy_trees
from treeopt.plot import Curve, Panel, curves_figure, save_figure

BARE = [sys.executable, "-c", "import numpy, scipy.optimize"]
COMMAND = [str(Path(sys.executable).with_name("treeopt")), "search", "--json", "--budget"]
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
BUDGETS = [8, 16, 32, 64, 128, 256, 512, 1024]


def median_s(work: Callable[[], object], repetitions: int) -> float:
    """Median time of the work, after one untimed call."""
    work()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def run_s(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def processes_s(repetitions: int) -> tuple[float, float]:
    """Median wall time of the bare process and of the whole command, run in turn so that both meet the same load."""
    command = [*COMMAND, "64"]
    run_s(BARE), run_s(command)
    pairs = [(run_s(BARE), run_s(command)) for _ in range(repetitions)]
    return statistics.median(bare for bare, _ in pairs), statistics.median(whole for _, whole in pairs)


def peak_mib(budget: int) -> float:
    """Largest resident memory of the whole command."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *COMMAND, str(budget)], capture_output=True, text=True, check=True
    )
    return int(done.stdout) / 1024


def five_distances() -> AcceptanceTrie:
    """m = 5 with 10 ranks: Vicuna-7B's rows, each further distance a little worse than the one before."""
    rows = [list(row) for row in load_acceptance("vicuna-7b-m3")[0].marginals]
    while len(rows) < 5:
        rows.append([0.85 * share for share in rows[-1]])
    return acceptance_trie(AcceptanceTable.from_marginals(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--out", help="picture of the growth with the budget: .png, .svg or .pdf")
    options = parser.parse_args()
    table, _ = load_acceptance("vicuna-7b-m3")
    trie, deep = acceptance_trie(table), five_distances()
    exact_s = {budget: median_s(lambda b=budget: exact_trees(trie, b), options.repetitions) for budget in BUDGETS}
    greedy_s = {budget: median_s(lambda b=budget: greedy_trees(trie, b), options.repetitions) for budget in BUDGETS}
    deep_s = median_s(lambda: exact_trees(deep, 128), options.repetitions)
    bare_s, whole_s = processes_s(options.repetitions)
    memory = peak_mib(512)

    rows = [
        ("exact, Vicuna-7B m = 3, budget 64", f"{exact_s[64]:.4f} s", f"{exact_s[64] / bare_s:.2f}"),
        ("exact, Vicuna-7B m = 3, budget 512", f"{exact_s[512]:.4f} s", f"{exact_s[512] / bare_s:.2f}"),
        ("exact, m = 5, 10 ranks, budget 128", f"{deep_s:.4f} s", f"{deep_s / bare_s:.2f}"),
        ("greedy, Vicuna-7B m = 3, budget 64", f"{greedy_s[64]:.4f} s", f"{greedy_s[64] / bare_s:.2f}"),
        ("python -c 'import numpy, scipy.optimize'", f"{bare_s:.4f} s", "1"),
        ("treeopt search --budget 64 --json", f"{whole_s:.4f} s", f"{whole_s / bare_s:.2f}"),
        ("peak memory at budget 512", f"{memory:.0f} MiB", ""),
    ]
    print(f"{'':42}{'median':>12}{'x bare process':>18}")
    for name, value, ratio in rows:
        print(f"{name:42}{value:>12}{ratio:>18}")
    print(f"time of exact from budget 512 to 1024: x {exact_s[1024] / exact_s[512]:.2f}")
    print(
        json.dumps(
            {
                "exact_s": exact_s,
                "greedy_s": greedy_s,
                "exact_m5_k10_128_s": deep_s,
                "bare_process_s": bare_s,
                "whole_process_s": whole_s,
                "whole_over_bare": whole_s / bare_s,
                "peak_memory_512_mib": memory,
                "repetitions": options.repetitions,
            }
        )
    )
    if options.out is not None:
        curves = [
            Curve("exact, with proof", BUDGETS, list(exact_s.values())),
            Curve("greedy (paper)", BUDGETS, list(greedy_s.values()), style=1),
        ]
        panel = Panel("search time (s, one core)", curves, log_y=True)
        figure = curves_figure(
            "How search time grows with the budget",
            f"{table.model}, m = 3, {table.num_ranks} ranks, median of {options.repetitions}",
            [panel],
            "budget (tokens per forward pass)",
        )
        save_figure(figure, options.out)


if __name__ == "__main__":
    main()
