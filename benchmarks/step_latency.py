"""Step latency of the demo model on this machine: the model's own layers against ours, in one run.

    python benchmarks/step_latency.py [--threads N] [--rows 1,4,8] [--context 200] [--repeats 15] [--compile]

``own`` is the model as transformers runs it: its own linear layers and attention, a DynamicCache, its own causal mask.
``ours`` is what decoding runs: the kernel plan, the cache that is written in
place, a tree mask. ``compiled`` is ours through torch.compile with a static cache (70 to 120 s per row count, once).
All are visited in turns, the row counts in shuffled order, so that a change of the machine's speed meets all alike; the
cache is put back outside the timed part. Prints a table for people and one JSON line for machines; times are medians.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from ppd_runtime import hf
from ppd_runtime.cache import TreeCache
from ppd_runtime.compiled import compiled_forward, rounded_capacity
from ppd_runtime.demo_model import demo_model_folder
from ppd_runtime.models import load_model

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def own_step(model, context_len: int, rows: tuple[int, ...]) -> Callable[[int], Callable[[], None]]:
    """Plain forward passes behind a fixed context."""
    cache = DynamicCache()
    keep = {hf.cache_argument(model): cache, "use_cache": True}
    model(torch.arange(1, context_len + 1)[None], logits_to_keep=1, **keep)
    ids = {n: torch.arange(n)[None] + 5 for n in rows}

    def prepare(num_rows: int) -> Callable[[], None]:
        if cache.get_seq_length() > context_len:
            cache.crop(context_len - cache.get_seq_length())
        return lambda: model(ids[num_rows], **keep)

    return prepare


def our_step(
    model, context_len: int, rows: tuple[int, ...], *, static: bool, compiled: bool
) -> Callable[[int], Callable[[], None]]:
    """Tree passes through `hf.forward_rows`: a root with a fan of candidates below it."""
    capacity = context_len + max(rows)
    cache = TreeCache(
        model.config.num_hidden_layers, 1, rounded_capacity(capacity) if compiled else capacity, static=static
    )
    forward = compiled_forward() if compiled else hf.forward_rows
    cache.open(context_len, start=0)
    hf.forward_rows(
        model,
        inputs_embeds=hf.embed_tokens(model, torch.arange(1, context_len + 1)[None]),
        mask=cache.pass_mask(torch.ones(1, context_len, context_len, dtype=torch.bool).tril()),
        position_ids=torch.arange(context_len)[None],
        cache=cache,
        rows=slice(-1, None),
    )
    cache.settle([context_len])
    allowed, positions, ids = {}, {}, {}
    for n in rows:
        allowed[n] = torch.eye(n, dtype=torch.bool)[None]
        allowed[n][:, :, 0] = True
        positions[n] = (context_len + (torch.arange(n) > 0).long())[None]
        ids[n] = torch.arange(n)[None] + 5

    def prepare(num_rows: int) -> Callable[[], None]:
        cache.settle([context_len])

        def step() -> None:
            cache.open(num_rows)
            forward(
                model,
                inputs_embeds=hf.embed_tokens(model, ids[num_rows]),
                mask=cache.pass_mask(allowed[num_rows]),
                position_ids=positions[num_rows],
                cache=cache,
            )

        return step

    return prepare


@torch.inference_mode()
def measure(
    steps: dict[str, Callable], rows: tuple[int, ...], repeats: int, warmup: int
) -> dict[str, dict[int, list[float]]]:
    seconds: dict[str, dict[int, list[float]]] = {name: {n: [] for n in rows} for name in steps}
    for prepare in steps.values():
        for n in rows:
            for _ in range(warmup):
                prepare(n)()
    order = [(name, n) for name in steps for n in rows]
    for _ in range(repeats):
        random.shuffle(order)
        for name, n in order:
            step = steps[name](n)
            start = time.perf_counter_ns()
            step()
            seconds[name][n].append((time.perf_counter_ns() - start) / 1e9)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="row counts, 1 among them")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    random.seed(0)
    rows = tuple(sorted({1, *map(int, arguments.rows.split(","))}))

    loaded = load_model("demo", dtype=arguments.dtype, device="cpu", kernels=arguments.kernels)
    own = AutoModelForCausalLM.from_pretrained(demo_model_folder(), dtype=loaded.dtype).eval()
    with torch.inference_mode():
        steps = {
            "own": own_step(own, arguments.context, rows),
            "ours": our_step(loaded.model, arguments.context, rows, static=False, compiled=False),
        }
        if arguments.compile:
            steps["compiled"] = our_step(loaded.model, arguments.context, rows, static=True, compiled=True)
    seconds = measure(steps, rows, arguments.repeats, warmup=3)

    median = {name: {n: statistics.median(times) for n, times in of.items()} for name, of in seconds.items()}
    print(
        f"SmolLM2-135M-Instruct, {arguments.dtype}, context {arguments.context}, {arguments.threads} threads, "
        f"kernels {loaded.kernels}, attention {hf.attention_backend(loaded.model)}"
    )
    names = list(steps)
    columns = [f"{name} ms" for name in names]
    columns += [f"{name}(n)/own(1)" for name in names] + [f"{name}(n)/{name}(1)" for name in names[1:]]
    print("rows  " + "  ".join(f"{column:>18}" for column in columns))
    for n in rows:
        cells = [f"{1e3 * median[name][n]:.1f}" for name in names]
        cells += [f"{median[name][n] / median['own'][1]:.2f}" for name in names]
        cells += [f"{median[name][n] / median[name][1]:.2f}" for name in names[1:]]
        print(f"{n:4d}  " + "  ".join(f"{cell:>18}" for cell in cells))
    result = {
        "dtype": arguments.dtype,
        "context_len": arguments.context,
        "threads": arguments.threads,
        "kernels": loaded.kernels,
        "attention": hf.attention_backend(loaded.model),
        "median_s": median,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
