"""Measure a model's latency curves twice on this machine, and say how well the two agree.

What a search uses is the shape L(n)/L(1); a second measurement should give the same shape. The script makes two
independent sets of curves (own databases, other visiting orders), prints a table per context, one JSON line per context
for machines, and draws the first set with its quartiles.

    python benchmarks/profile_repeatability.py --model demo --tokens 1-64 --contexts 64,512,2048 --out out/

Run it on an idle machine: a curve measured beside other work is flagged contended, and this script says so.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from treeopt.app.profile_library import open_for_reading, plot_profiles, ratios, stored

CLOSE = 0.10
"""Relative difference of L(n)/L(1) that counts as agreement."""


def measure(options: argparse.Namespace, database: Path) -> float:
    """Measure every curve into a database of its own; return the wall-clock time, seconds."""
    words = ["--model", options.model, "--tokens", options.tokens, "--contexts", options.contexts]
    if options.config:
        words += ["--config", options.config]
    words += ["--precision", str(options.precision), "--point-seconds", str(options.point_seconds)]
    program = "from treeopt.cli.profile import app; app()"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", program, "run", *words, "--db", str(database)], check=True, stdout=sys.stderr)
    return time.monotonic() - start


def main() -> None:
    """Run both measurements and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--config", help="config.json to build the model from, with random weights")
    parser.add_argument("--tokens", default="1-64")
    parser.add_argument("--contexts", default="64,512,2048")
    parser.add_argument("--precision", type=float, default=0.05)
    parser.add_argument("--point-seconds", type=float, default=1.5)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sets = []
    for name in ("first", "second"):
        database = options.out / f"{name}.db"
        wall_s = measure(options, database)
        print(f"{name} measurement: {wall_s:.0f} s", file=sys.stderr)
        engine = open_for_reading(str(database))
        sets.append({p.conditions.context_len: p for p in reversed(stored(engine)) if p.complete})
        if name == "first":
            plot_profiles(engine, [str(p.digest) for p in sets[0].values()], options.out / "latency.svg")
    print(
        f"{'context':>8} {'points':>7} {'within 10 %':>12} {'median diff':>12} {'worst diff':>11}  noisy points, flags"
    )
    for context_len in sorted(sets[0].keys() & sets[1].keys()):
        one, two = sets[0][context_len], sets[1][context_len]
        rows = ratios(one.to_profile(), two.to_profile())
        off = sorted(abs(row.relative) for row in rows)
        close = sum(value <= CLOSE for value in off)
        noisy = sorted({n for p in (one, two) for n, point in p.steps.items() if "noisy" in point.flags})
        flags = sorted({*one.flags, *two.flags})
        print(
            f"{context_len:8d} {len(rows):7d} {close / len(rows):12.1%} {off[len(off) // 2]:12.1%} {off[-1]:11.1%}  "
            f"{len(noisy)} {','.join(flags) or '-'}"
        )
        record = {
            "model": one.conditions.model,
            "context_len": context_len,
            "num_points": len(rows),
            "share_within_10_percent": close / len(rows),
            "median_relative_difference": off[len(off) // 2],
            "worst_relative_difference": off[-1],
            "noisy_tokens": noisy,
            "flags": flags,
            "digests": [one.digest, two.digest],
        }
        print(json.dumps(record))


if __name__ == "__main__":
    main()
