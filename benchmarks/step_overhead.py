"""What a step costs besides the model's forward, and what memory it takes beyond plain decoding.

One run, one model, three ways side by side: the library's own `generate`, our plain decoding, and a tree of the given
budget with random prompt tokens (nothing is accepted, so every pass is a full tree: the worst case per token).

    python benchmarks/step_overhead.py --budget 32 --max-new-tokens 64
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ppd_runtime import (
    Generation,
    LoadedModel,
    PromptGuesses,
    Settings,
    encode_prompt,
    generate,
    hf,
    load_model,
    random_prompt_tokens,
)
from treeopt import search
from treeopt.types import AcceptanceTable

MARGINALS = ((0.25, 0.09, 0.05, 0.04, 0.03), (0.13, 0.06, 0.04, 0.03, 0.02), (0.10, 0.05, 0.03, 0.02, 0.02))
PROMPT = "Describe how a bicycle works, part by part, for someone who has never seen one."


def lowest_peak_bytes(device: torch.device, call: Callable[[], object], num_runs: int) -> int:
    """Return the lowest of several peaks: what the allocator leaves scattered only ever adds."""
    return min(peak_bytes(device, call) for _ in range(num_runs))


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """Return how far memory rises above its start while a call runs.

    On CUDA the allocator says; on Linux the kernel's high-water mark of resident memory is reset first, and memory that
    the C library keeps for later is handed back, so that the call has to ask for its own.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    call()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def figures(result: Generation) -> dict[str, float]:
    run = result.run
    steps = run.num_steps
    parts = {
        f"{name}_ms_per_step": 1e3 * getattr(run, f"{name}_s") / steps
        for name in ("forward", "propose", "verify", "commit")
    }
    return {
        "num_steps": steps,
        "ms_per_step": 1e3 * run.decode_s / steps,
        **parts,
        "outside_share": 1 - run.forward_s / run.decode_s,
        "tokens_per_second": (run.num_new_tokens - 1) / run.decode_s,
    }


def library(loaded: LoadedModel, prompt_ids: tuple[int, ...], num_tokens: int) -> dict[str, float]:
    """Time the library's generate; the time of one new token, prefill included, is taken off."""
    ids = torch.tensor([prompt_ids], device=loaded.device)

    def timed(count: int) -> float:
        start = time.perf_counter()
        loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        return time.perf_counter() - start

    first_s = timed(1)
    return {"ms_per_step": 1e3 * (timed(num_tokens) - first_s) / (num_tokens - 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--memory-runs", type=int, default=3, help="the lowest peak of so many runs is printed")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--cache", default="dynamic", choices=["dynamic", "static", "graph"])
    arguments = parser.parse_args()

    loaded = load_model(arguments.model, dtype=arguments.dtype, device=arguments.device, kernels=arguments.kernels)
    model_bytes = sum(each.numel() * each.element_size() for each in loaded.model.parameters())
    prompt_ids = encode_prompt(loaded, PROMPT)
    design = search(AcceptanceTable.from_marginals(MARGINALS), arguments.budget)
    source = PromptGuesses(loaded, random_prompt_tokens(hf.embedding_size(loaded.model), len(MARGINALS)))
    # No end of text: every way writes the same number of tokens.
    settings = Settings(max_new_tokens=arguments.max_new_tokens, cache=arguments.cache, eos_token_ids=frozenset())

    def plain() -> Generation:
        return generate(loaded, [prompt_ids], settings=settings)[0]

    def tree() -> Generation:
        return generate(loaded, [prompt_ids], design, source, settings)[0]

    def own() -> dict[str, float]:
        return library(loaded, prompt_ids, arguments.max_new_tokens)

    ways: dict[str, Callable[[], object]] = {"generate": own, "plain": plain, "tree": tree}
    rows: dict[str, dict[str, float]] = {}
    for name, way in ways.items():
        way()  # warm up: allocator, kernels chosen on first use
        rise = lowest_peak_bytes(loaded.device, way, arguments.memory_runs)
        outcome = way()
        rows[name] = (figures(outcome) if isinstance(outcome, Generation) else outcome) | {"peak_bytes": rise}

    print(
        f"{loaded.name}, {arguments.dtype}, {loaded.device}, kernels {loaded.kernels}, budget {arguments.budget}, "
        f"cache {arguments.cache}, {torch.get_num_threads()} threads"
    )
    print(f"{'':<10}{'ms/step':>9}{'forward':>9}{'propose':>9}{'verify':>9}{'commit':>9}{'outside':>9}{'peak MiB':>10}")
    for name, row in rows.items():
        cells = [row.get(f"{part}ms_per_step") for part in ("", "forward_", "propose_", "verify_", "commit_")]
        outside = f"{row['outside_share']:9.2%}" if "outside_share" in row else f"{'-':>9}"
        print(
            f"{name:<10}"
            + "".join(f"{'-':>9}" if cell is None else f"{cell:9.3f}" for cell in cells)
            + outside
            + f"{row['peak_bytes'] / 2**20:10.1f}"
        )
    beyond = (rows["tree"]["peak_bytes"] - rows["generate"]["peak_bytes"]) / model_bytes
    print(f"memory beyond plain generate: {beyond:.2%} of the model's {model_bytes / 2**20:.0f} MiB")
    print(
        json.dumps(
            {
                "rows": rows,
                "model_bytes": model_bytes,
                "memory_beyond_generate_share": beyond,
                "budget": arguments.budget,
                "dtype": arguments.dtype,
                "kernels": loaded.kernels,
                "cache": arguments.cache,
                "num_threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
