"""Theoretical and measured speedup over tree sizes (Figures 8b, 8c), beside the paper's headline figures.

Paper: arXiv 2405.18628; abstract: up to 2.49 times the speed of plain decoding (MobileLLaMA to Vicuna-13B, on A100 and
RTX 4090 GPUs), up to 1.22 times on top of speculative decoding with a draft model, 0.0002 % trainable parameters,
0.0004 % memory at run time. The single cells of its Tables 1 to 3 and 13 and the heights of Figures 6 to 8 could not be
looked up when this was written, so none is quoted: the maximum of the abstract stands for all of them.

Our side is another model on another machine, so the figures are *not* a contest; what should agree is the shape: tokens
per step grow with the tree, the speedup has an optimum, and theory and measurement share it.

- ``--latency FILE`` (of a machine of yours): theoretical speedup of the published models' tables on that machine, which
  is what Figure 8b shows for its GPUs. The profile should be of a model of that size; the output says which it is.
- ``--bench FILE``, from ``treeopt bench --out``: measured beside predicted, which is Figure 8c.

::

    python benchmarks/paper_speedup.py --latency latency.json --bench bench.json
"""

import argparse
import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy starts its threads

from treeopt.app.sweep import best_point, sweep_budgets, sweep_document
from treeopt.artifact import read_document
from treeopt.bundled import load_acceptance
from treeopt.speedup_plot import best_measured, best_predicted, read_bench
from treeopt.types import LatencyProfile

PAPER_MAXIMUM = 2.49
TABLES = ("mobilellama-1.4b-m3", "vicuna-7b-m3", "vicuna-13b-m3")

# Prompt tokens of the paper (m = 3, one embedding each), hidden size and parameters of the published models' configs.
SHAPES = {"lmsys/vicuna-7b-v1.3": (4096, 6_738_415_616), "lmsys/vicuna-13b-v1.3": (5120, 13_015_864_320)}


def print_theory(path: str, max_budget: int) -> None:
    """Figure 8b on the machine of a profile."""
    latency = read_document(path, LatencyProfile)
    budgets = [point.num_tokens for point in latency.points if point.num_tokens <= max_budget]
    print(
        f"theoretical speedup (Figure 8b) with the latencies of {latency.model} on {latency.device['name']}, "
        f"{latency.dtype}, batch {latency.batch_size}, context {latency.context_len}"
    )
    for name in TABLES:
        points = sweep_budgets(load_acceptance(name)[0], budgets, latency)
        best = best_point(points)
        verdict = "no speculation" if best.no_speculation else f"{best.speedup:.3f}x at {best.budget} tokens"
        print(f"  {name:22} best {verdict:28} tau there {best.speedup_acceptance_length:.3f}")
        for point in points:
            print(json.dumps({"figure": "8b", "table": name, **sweep_document(point, best)}))


def print_measured(path: str) -> None:
    """Figure 8c from a benchmark."""
    bench = read_bench(path)
    measured, predicted = best_measured(bench.points), best_predicted(bench.points)
    print(f"measured speedup (Figure 8c): {bench.model} on {bench.device}, {bench.dtype}, {bench.graph_mode}")
    print(f"  best measured  {measured.measured:.3f}x at budget {measured.budget}, tau {measured.tau:.3f}")
    if predicted is not None:
        print(f"  best predicted {predicted.predicted:.3f}x at budget {predicted.budget}")
    print(f"  paper          up to {PAPER_MAXIMUM}x (abstract; other models, A100 and RTX 4090)")
    for point in bench.points:
        row = {"budget": point.budget, "tau": point.tau, "measured": point.measured, "predicted": point.predicted}
        print(json.dumps({"figure": "8c", **row}))


def print_overhead() -> None:
    """Share of trained parameters: the one headline figure that arithmetic settles."""
    for model, (hidden, parameters) in SHAPES.items():
        share = 100 * 3 * hidden / parameters
        print(f"trained parameters, {model}: 3 x {hidden} of {parameters:,} = {share:.4f} % (paper: 0.0002 %)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", help="treeopt.latency/1 file: theoretical speedup")
    parser.add_argument("--bench", help="file of `treeopt bench --out`: measured speedup")
    parser.add_argument("--max-budget", type=int, default=256)
    options = parser.parse_args()
    print_overhead()
    if options.latency is not None:
        print_theory(options.latency, options.max_budget)
    if options.bench is not None:
        print_measured(options.bench)


if __name__ == "__main__":
    main()
