"""One short check of the whole chain on a GPU: profile, search, decode, compare, with CUDA graphs off and on.

A model of 7B shape with random weights is as fast as a trained one, and guesses are forged to a published acceptance
table (see forged_speedup.py), so nothing has to be downloaded. Every mode prints its latency curve, the tree that the
search takes from it, predicted and measured speedup of a few budgets, and how many texts came out identical.

On an H200, in under eight minutes (from the repository's root):

    python benchmarks/gpu_check.py --config 7b --dtype bfloat16 --seconds 420

On a CPU, in small, as the tests run it:

    python benchmarks/gpu_check.py --config tiny --dtype float32 --budgets 4,8 --max-new-tokens 12
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

if not __package__:  # run as a file: its neighbours are found from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.forged_speedup import ForgedGuesses, known_texts
from ppd_runtime.models import LoadedModel, load_model, wrap_model
from profiler.device import identify
from profiler.environment import environment
from profiler.latency import StoppingRule, Visit, latency_point, measure
from treeopt.app.bench import BenchInputs, BenchOptions, run_bench
from treeopt.app.bench_document import baseline_object, budget_object
from treeopt.app.bench_latency import needed_tokens
from treeopt.app.bench_results import BenchReport
from treeopt.app.profile_steps import StepBench
from treeopt.bundled import load_acceptance
from treeopt.search import search
from treeopt.types import AcceptanceTable, LatencyProfile

SHAPES = {
    # Llama-2 and Vicuna 7B: huggingface.co/lmsys/vicuna-7b-v1.3, config.json.
    "7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
}

RULE = StoppingRule(halfwidth=0.02, max_s=1.0)


def build(shape: str, dtype: str, device: torch.device) -> LoadedModel:
    """Build a Llama of a known shape with random weights on the device itself."""
    config = LlamaConfig(**SHAPES[shape], bos_token_id=1, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return wrap_model(model, name=f"random-llama-{shape}", kernels="auto")


def modes(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the pairs of cache and graph mode that a device can run."""
    yield "dynamic", "eager"
    yield "static", "eager"
    if device.type == "cuda":
        yield "static", "cuda_graph"


def profile(
    loaded: LoadedModel, tokens: Sequence[int], context_len: int, cache: str, graph_mode: str
) -> LatencyProfile:
    """Measure a latency curve without a database."""
    bench = StepBench(loaded, cache=cache, graph_mode=graph_mode, max_tokens=max(tokens))
    samples: dict[int, tuple[float, ...]] = {}
    events = measure(bench.step, tokens, context_len=context_len, rule=RULE, synchronise=bench.synchronise)
    for event in events:
        if isinstance(event, Visit):
            samples[event.num_tokens] = event.samples_s
    device = identify(str(loaded.device))
    return LatencyProfile(
        device=device.to_document(),
        model=loaded.name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        batch_size=1,
        context_len=context_len,
        attention="sdpa",
        graph_mode=graph_mode,
        points=tuple(latency_point(n, samples[n]) for n in sorted(samples)),
        cache=cache,
        kernels=loaded.kernels,
        versions=environment(device.kind),
    )


def check_mode(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    table: AcceptanceTable,
    budgets: Sequence[int],
    cache: str,
    graph_mode: str,
    max_new_tokens: int,
) -> BenchReport:
    """Profile, search, decode and compare in one mode."""
    context_len = sum(map(len, texts)) // len(texts) - max_new_tokens // 2
    latency = profile(loaded, needed_tokens(budgets), context_len, cache, graph_mode)
    best = search(table, max(budgets), latency)
    curve = {point.num_tokens: round(1e3 * point.median_s, 3) for point in latency.points}
    _print(
        cache=cache, graph_mode=graph_mode, latency_ms=curve, best_pass_tokens=list(best.pass_tokens),
        best_tau=best.acceptance_length, best_speedup=best.speedup,
    )  # fmt: skip
    inputs = BenchInputs(ForgedGuesses(loaded, table, texts), table, latency=latency)  # type: ignore[arg-type]
    options = BenchOptions(
        max_new_tokens=max_new_tokens, cache=cache, graph_mode=graph_mode, library=cache == "dynamic", ignore_eos=True
    )
    report, _ = run_bench(loaded, prompts, inputs, budgets, options)
    for result in report.budgets:
        _print(cache=cache, graph_mode=graph_mode, tokens_per_second=result.tokens_per_second, **budget_object(result))
    for baseline in report.baselines:
        _print(cache=cache, graph_mode=graph_mode, **baseline_object(baseline))
    for finding in report.findings:
        _print(cache=cache, graph_mode=graph_mode, finding=finding)
    return report


def main(arguments: Sequence[str] | None = None) -> list[BenchReport]:
    """Print JSON lines: the device, then per mode the curve, the budgets and the baselines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=sorted(SHAPES), default="7b", help="shape of the random model")
    parser.add_argument("--model", help="a real model instead, for example demo")
    parser.add_argument("--table", default="vicuna-7b-m3")
    parser.add_argument("--budgets", default="8,16,32,64,96")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-prompts", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="length of the random prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=420.0, help="no mode is begun after this time")
    given = parser.parse_args(arguments)

    start_s = time.monotonic()
    name = ("cuda" if torch.cuda.is_available() else "cpu") if given.device == "auto" else given.device
    device = torch.device(name)
    if given.model:
        loaded = load_model(given.model, dtype=given.dtype, device=name)
    else:
        loaded = build(given.config, given.dtype, device)
    _print(
        device=identify(name).name, model=loaded.name, dtype=given.dtype, kernels=loaded.kernels,
        torch=torch.__version__, load_s=round(time.monotonic() - start_s, 1),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    size = loaded.model.get_input_embeddings().weight.shape[0]
    prompts = torch.randint(2, size, (given.num_prompts, given.prompt_tokens), generator=generator).tolist()
    table, _ = load_acceptance(given.table)
    texts = known_texts(loaded, prompts, given.max_new_tokens + table.num_distances)
    budgets = [int(budget) for budget in given.budgets.split(",")]
    reports = []
    for cache, graph_mode in modes(device):
        if time.monotonic() - start_s > given.seconds:
            _print(cache=cache, graph_mode=graph_mode, skipped=f"over {given.seconds:.0f} s have passed")
            continue
        reports.append(check_mode(loaded, prompts, texts, table, budgets, cache, graph_mode, given.max_new_tokens))
    _print(total_s=round(time.monotonic() - start_s, 1))
    return reports


def _print(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
