"""Search time and value on an acceptance vector of Sequoia, as Sequoia's own ``tree_search.py`` is configured.

    python benchmarks/sequoia_search.py acceptance-rate-vector.pt --max-depth 10 --budget 128

The vector and its configuration come with Sequoia (Infini-AI-Lab/Sequoia). ``--max-depth`` counts the root, as there,
so trees are one level less deep. Children leave no rank out. What is timed is the search alone: values of every size up
to the budget, and the best tree of that budget; reading the file and importing are not. Pin the process to one core for
figures that compare: ``taskset -c 0``. A table for people goes to stderr, one JSON line to stdout.
"""

import argparse
import json
import platform
import statistics
import sys
import time

from treeopt.acceptance import acceptance_trie
from treeopt.exact import free_guess_trees
from treeopt.formats.growmap import growmap, paths_from_growmap, table_from_vector
from treeopt.formats.reading import load_torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vector", help="acceptance vector, .pt")
    parser.add_argument("--max-depth", type=int, default=10, help="levels, the root included (default 10)")
    parser.add_argument("--budget", type=int, default=128, help="tokens, the root included (default 128)")
    parser.add_argument("--repeats", type=int, default=9, help="timed searches (default 9)")
    options = parser.parse_args()

    table = table_from_vector(load_torch(options.vector), options.max_depth - 1)
    samples_s, cpu_s = [], []
    for _ in range(options.repeats + 1):
        start, start_cpu = time.perf_counter(), time.process_time()
        trie = acceptance_trie(table, consecutive=True)
        values, tree = free_guess_trees(trie, options.budget, options.max_depth - 1)
        best = tree(options.budget)
        samples_s.append(time.perf_counter() - start)
        cpu_s.append(time.process_time() - start_cpu)
    samples_s, cpu_s = samples_s[1:], cpu_s[1:]  # the first one warms up

    # The tree is worth what the search says, added up path by path, and is a growmap.
    paths = [node.path for node in best.nodes[1:]]
    total = 1.0
    for path in paths:
        share = 1.0
        for row, rank in zip(table.marginals, path, strict=False):
            share *= row[rank]
        total += share
    assert abs(total - values[-1]) < 1e-12
    assert paths_from_growmap(growmap(paths)) == paths

    gaps_allowed, _ = free_guess_trees(acceptance_trie(table), options.budget, options.max_depth - 1)
    result = {
        "benchmark": "sequoia_search",
        "ranks": table.num_ranks,
        "max_depth": options.max_depth,
        "budget_tokens": options.budget,
        "expected_tokens": float(values[-1]),
        "expected_tokens_with_gaps": float(gaps_allowed[-1]),
        "candidates": len(paths),
        "search_median_s": statistics.median(samples_s),
        "search_least_s": min(samples_s),
        "search_most_s": max(samples_s),
        "cpu_median_s": statistics.median(cpu_s),
        "repeats": options.repeats,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    print(
        f"{table.num_ranks} ranks, {options.max_depth - 1} levels below the root, {options.budget} tokens\n"
        f"expected tokens per step   {result['expected_tokens']:.6f}\n"
        f"with ranks left out        {result['expected_tokens_with_gaps']:.6f}\n"
        f"search, median             {result['search_median_s']:.4f} s "
        f"({result['search_least_s']:.4f} to {result['search_most_s']:.4f}); CPU {result['cpu_median_s']:.4f} s",
        file=sys.stderr,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
