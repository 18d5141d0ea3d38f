"""Predicted and measured speedup with guesses forged to published acceptance, on real forward passes of this machine.

Nobody can run Vicuna-7B on a laptop, but its published acceptance table can be run there: a model that fits writes a
text plainly, and then decodes it again with a guesser that knows the text and is right exactly as often as the table
says. Trees, masks, prompt tokens, passes, verification and compaction are all real; only the guesses are forged. So
predicted and measured speedup must agree, and where they do not, the latency curve leaves something out.

Run from the repository's root:

    python benchmarks/forged_speedup.py --model demo --budgets 4,8,16,32,64
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ppd_runtime.buffers import StateBuffers
from ppd_runtime.generate import generate
from ppd_runtime.guesses import NO_GUESS
from ppd_runtime.hf import embedding_size
from ppd_runtime.models import LoadedModel
from ppd_runtime.settings import Settings
from treeopt.app.bench import BenchInputs, BenchOptions, run_bench
from treeopt.app.bench_document import budget_object
from treeopt.app.bench_inputs import bench_prompts, load_for_bench, mean_context
from treeopt.app.bench_latency import bench_latency
from treeopt.bundled import load_acceptance
from treeopt.types import AcceptanceTable, LatencyProfile

TABLES = ("vicuna-7b-m3", "vicuna-13b-m3", "mobilellama-1.4b-m3")
"""Published tables: Vicuna 7B and 13B, MobileLLaMA 1.4B, three prompt tokens each."""

AGREEMENT = 0.05
"""Relative difference of predicted and measured speedup that counts as agreement."""


class ForgedGuesses:
    """Guesses that are right as often as a table says, distance by distance, independently.

    In every step the true token of distance j stands at a rank drawn from row j of the table, or at none. Draws are
    stratified per state (a Kronecker sequence with a random start), so that achieved shares follow the table closely
    after a few dozen steps instead of a few thousand.

    Parameters
    ----------
    loaded : LoadedModel
        The model that decodes.
    table : AcceptanceTable
        How often guesses are right.
    texts : sequence of sequence of int
        Prompts and what the model writes after them, longer than what will be decoded by m tokens.
    seed : int
        Of the random starts.
    """

    name = "forged"
    visibility = None

    def __init__(
        self, loaded: LoadedModel, table: AcceptanceTable, texts: Sequence[Sequence[int]], seed: int = 0
    ) -> None:
        self.num_distances = table.num_distances
        self.num_epts = table.tokens_per_prompt_token
        self.table = table
        self.texts = [tuple(text) for text in texts]
        self.device = loaded.device
        random = torch.Generator().manual_seed(seed)
        self.starts = torch.rand(table.num_distances + 1, table.num_distances, generator=random, dtype=torch.float64)
        self.steps = [0] * (table.num_distances + 1)
        rows = (table.num_distances * self.num_epts, embedding_size(loaded.model))
        self.embeddings = (torch.randn(rows, generator=random) * 0.02).to(loaded.device, loaded.dtype)

    def begin(self, token_ids: Sequence[int]) -> "_ForgedGuesser":
        """Find the text that a prompt belongs to."""
        prompt = tuple(token_ids)
        text = next(text for text in self.texts if text[: len(prompt)] == prompt)
        return _ForgedGuesser(self, text, len(prompt))

    def draw(self, state: int) -> list[int]:
        """Return the rank of the true token at each distance; the number of ranks where it is not among them."""
        self.steps[state] += 1
        m = self.num_distances
        # The generalised golden ratio: its powers' fractional parts fill the cube evenly (M. Roberts, 2018).
        root = 2.0
        for _ in range(64):
            root = (1 + root) ** (1 / (m + 1))
        ranks = []
        for j, row in enumerate(self.table.marginals):
            point = (float(self.starts[state, j]) + self.steps[state] * root ** -(j + 1)) % 1.0
            rank = 0
            while rank < len(row) and point >= row[rank]:
                point -= row[rank]
                rank += 1
            ranks.append(rank)
        return ranks


class _ForgedGuesser:
    """Forged guesses for one text."""

    def __init__(self, source: ForgedGuesses, text: tuple[int, ...], length: int) -> None:
        self._source = source
        self._text = text
        self._length = length
        self.embeddings = source.embeddings

    def extend(self, token_ids: Sequence[int]) -> None:
        """Move on along the known text."""
        self._length += len(token_ids)

    def guess(self, tree: StateBuffers, logits: Tensor | None) -> Tensor:
        """Put the true token at the drawn rank of every distance, and nothing that is right anywhere else."""
        ranks = self._source.draw(tree.state)
        guesses = [NO_GUESS] * tree.num_nodes
        for row, path in enumerate(tree.paths):
            place = self._length + len(path) - 1
            if path and place < len(self._text) and path[-1] == ranks[len(path) - 1]:
                guesses[row] = self._text[place]
        return torch.tensor(guesses, device=self._source.device)


def known_texts(loaded: LoadedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Return prompts with their plain continuations, written past their ends."""
    settings = Settings(max_new_tokens=num_tokens, eos_token_ids=frozenset())
    return [[*ids, *generate(loaded, [ids], settings=settings)[0].token_ids] for ids in prompts]


def compare(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    table: AcceptanceTable,
    latency: LatencyProfile,
    budgets: Sequence[int],
    options: BenchOptions,
    say: object = None,
) -> list[dict[str, object]]:
    """Decode with forged guesses at every budget; return one JSON object per budget."""
    texts = known_texts(loaded, prompts, options.max_new_tokens + table.num_distances)
    inputs = BenchInputs(ForgedGuesses(loaded, table, texts), table, latency=latency)  # type: ignore[arg-type]
    options = replace(options, ignore_eos=True, library=False)
    report, _ = run_bench(loaded, prompts, inputs, budgets, options, progress=say)  # type: ignore[arg-type]
    rows = []
    for result in report.budgets:
        row = budget_object(result)
        predicted = row["predicted_speedup"]
        row["difference"] = None if predicted is None else row["measured_speedup"] / predicted - 1
        row["tau_difference"] = row["measured_tau"] / row["predicted_tau"] - 1
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Print one JSON line per table and budget, and how many agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--budgets", default="4,8,16,32,64")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--latency", default="auto", help="auto, a file, or the digest of a stored profile")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--db", default=None)
    given = parser.parse_args(arguments)
    budgets = [int(budget) for budget in given.budgets.split(",")]

    loaded = load_for_bench(given.model, dtype=given.dtype, device=given.device)
    prompts = bench_prompts(loaded, None, limit=given.num_prompts)
    context_len = mean_context(prompts, given.max_new_tokens)
    latency, line = bench_latency(loaded, given.latency, budgets, context_len, db_url=given.db, progress=_say)
    _say(line)
    if latency is None:
        parser.error("--latency: a curve is needed to predict with; give auto or a file")
    options = BenchOptions(max_new_tokens=given.max_new_tokens, rounds=given.rounds)
    rows = []
    for name in given.tables.split(","):
        table, _ = load_acceptance(name)
        for row in compare(loaded, prompts, table, latency, budgets, options, _say):
            rows.append({"table": name, **row})
            print(json.dumps(rows[-1]))
    differences = [float(row["difference"]) for row in rows if row["difference"] is not None]  # type: ignore[arg-type]
    agreeing = sum(abs(difference) <= AGREEMENT for difference in differences)
    worst = max((abs(difference) for difference in differences), default=math.nan)
    _say(f"predicted and measured speedup agree within {AGREEMENT:.0%}: {agreeing} of {len(differences)}")
    _say(f"largest difference: {worst:.1%}")
    return rows


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
