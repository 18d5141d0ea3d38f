"""Small controlled training runs: what each choice of the recipe is worth, one choice changed at a time.

Every run trains prompt tokens for the demo model on the shipped prompts with the same number of inserted groups, and
is judged on the shipped held-out prompts. Runs are kept in a JSON-lines file, and a second call makes only what is
missing, so a long table can be made in pieces.

The comparisons follow the paper's ablations (arXiv 2405.18628, tables 6 and 7): distillation against hard labels,
random insertion against the end only, ensembles of several EPTs, several epochs against one; learning rates, starts
and the weights of the distances are ours.

    python benchmarks/training_recipes.py --out recipes.jsonl                     # everything
    python benchmarks/training_recipes.py --out recipes.jsonl --only lr=0.02,labels
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from ppd_runtime.answers import Text
from ppd_runtime.models import LoadedModel, load_model
from ppd_runtime.prompt_tokens import PromptTokens
from ppd_runtime.train import TrainingPlan, initial_state, train_steps, usable_texts
from treeopt.app.texts import held_out_texts, training_texts
from treeopt.app.train import TOPS, top_shares

BASE = TrainingPlan(num_steps=60, texts_per_step=1, groups_per_text=96, learning_rate=0.02, start="vocabulary")


def recipes(num_steps: int, num_texts: int) -> dict[str, tuple[TrainingPlan, int]]:
    """Return the plans by name, each with the number of texts it trains on."""
    base = replace(BASE, num_steps=num_steps)
    few = max(1, min(num_texts, num_steps) // 4)
    return {
        "base": (base, num_texts),
        "lr=0.005": (replace(base, learning_rate=0.005), num_texts),
        "lr=0.01": (replace(base, learning_rate=0.01), num_texts),
        "lr=0.05": (replace(base, learning_rate=0.05), num_texts),
        "start=text": (replace(base, start="text"), num_texts),
        "start=random": (replace(base, start="random"), num_texts),
        "decay=1": (replace(base, decay=1.0), num_texts),
        "decay=0.5": (replace(base, decay=0.5), num_texts),
        "labels": (replace(base, loss="labels"), num_texts),
        # One group per text at its end: as many groups need as many texts per step.
        "end-only": (replace(base, insertion="end", texts_per_step=24), num_texts),
        "random-1-per-text": (replace(base, groups_per_text=1, texts_per_step=24), num_texts),
        "epts=5": (replace(base, num_epts=5, groups_per_text=20), num_texts),
        "epts=20": (replace(base, num_epts=20, groups_per_text=5), num_texts),
        "epts=5-decoder": (replace(base, num_epts=5, groups_per_text=20, mask="decoder"), num_texts),
        "epts=5-encoder": (replace(base, num_epts=5, groups_per_text=20, mask="encoder"), num_texts),
        "epochs=4": (base, few),
        "groups=24x4": (replace(base, groups_per_text=24, texts_per_step=4), num_texts),
    }


def run(loaded: LoadedModel, plan: TrainingPlan, texts: list[Text], held_out: list[Text]) -> dict[str, object]:
    """Train once and judge."""
    began = time.perf_counter()
    processor = time.process_time()
    states = list(train_steps(loaded, plan, texts, initial_state(loaded, plan)))
    losses = [state.loss for state in states]
    tokens = PromptTokens(states[-1].embeddings, plan.mask, loaded.name)
    quarter = max(1, len(losses) // 4)
    return {
        "cpu_s": round(time.process_time() - processor, 1),
        "wall_s": round(time.perf_counter() - began, 1),
        "num_texts": len(texts),
        "first_loss": round(sum(losses[:quarter]) / quarter, 4),
        "last_loss": round(sum(losses[-quarter:]) / quarter, 4),
        "norms": [round(norm, 3) for norm in states[-1].embeddings.norm(dim=-1).mean(dim=-1).tolist()],
        "top": top_shares(loaded, tokens, held_out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one a run; runs in it are not made again")
    parser.add_argument("--only", help="names of runs, separated by commas")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--held-out", type=int, default=24, help="held-out prompts to judge on")
    arguments = parser.parse_args()

    loaded = load_model(arguments.model, dtype=arguments.dtype)
    texts = training_texts(loaded, prompts=None, data=None, max_new_tokens=192, temperature=0.0, seed=0)
    texts = usable_texts(texts, loaded.context_limit, BASE.num_distances)
    held_out = held_out_texts(loaded, None, max_new_tokens=128)
    held_out = held_out[:: max(1, len(held_out) // arguments.held_out)]
    done = {}
    if arguments.out.exists():
        done = {entry["name"]: entry for entry in map(json.loads, arguments.out.read_text().splitlines())}
    plans = recipes(arguments.steps, len(texts))
    for name in arguments.only.split(",") if arguments.only else plans:
        if name in done:
            continue
        plan, num_texts = plans[name]
        done[name] = {"name": name, **run(loaded, plan, texts[:num_texts], held_out), "plan": asdict(plan)}
        with arguments.out.open("a") as file:
            file.write(json.dumps(done[name]) + "\n")
        print(json.dumps(done[name]), flush=True)
    heads = " ".join(f"d{j + 1}t{k:<2}" for j in range(BASE.num_distances) for k in TOPS)
    print(f"{'run':<20} {'cpu_s':>6} {'loss':>6}  {heads}")
    for name, entry in done.items():
        shares = " ".join(f".{round(share * 1000):03d} " for row in entry["top"] for share in row)
        print(f"{name:<20} {entry['cpu_s']:>6.0f} {entry['last_loss']:>6.3f}  {shares}")


if __name__ == "__main__":
    main()
