"""How far ahead guesses stay right: the published PPD models beside Medusa's heads, and any table of ours.

Paper: arXiv 2405.18628. The abstract (version 1) claims up to 28 % higher acceptance for long-range predictions than
other parallel guessers. Its own accuracy curves need Medusa and PPD measured on the same text, which is not possible
here without their models. What can be done honestly:

- PPD: acceptance tables recovered from the authors' published trees (they come with treeopt), as shares of positions.
- Medusa: accuracies of the heads at the end of their training runs, from the table that the Medusa authors published
  (github FasterDecoding/Medusa, commit 5d374e9, assets/medusa_acc.csv: one MLP layer, five heads), on training text, so
  they flatter or wrong Medusa by an unknown amount; the ratio below is *not* the paper's 28 %.
- ours: any ``treeopt.acceptance/1`` file, for example one written by ``treeopt measure``, given with
  ``--acceptance``.

Accuracy at r is how often the true token is among the best r guesses for a distance::

    python benchmarks/paper_accuracy.py --acceptance demo.json
"""

import argparse
import json

from treeopt.bundled import bundled_tables, load_acceptance
from treeopt.types import AcceptanceTable

# Best 1 and best 5, for distances 1 to 3; Medusa's head j guesses distance j + 1.
MEDUSA = {
    "medusa vicuna-7b (training)": ((0.5604, 0.7799), (0.3164, 0.5625), (0.2010, 0.4169)),
    "medusa vicuna-13b (training)": ((0.5939, 0.8161), (0.3397, 0.5803), (0.2161, 0.4364)),
}
PAIRS = {"vicuna-7b-m3": "medusa vicuna-7b (training)", "vicuna-13b-m3": "medusa vicuna-13b (training)"}


def accuracies(table: AcceptanceTable) -> tuple[tuple[float, float], ...]:
    """Share of positions whose true token is the best guess, and among the best five, per distance."""
    return tuple((row[0], sum(row[:5])) for row in table.marginals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acceptance", action="append", default=[], help="a table of ours: file or bundled name")
    options = parser.parse_args()
    published = {name: accuracies(load_acceptance(name)[0]) for name in bundled_tables() if "vicuna" in name}
    ours = {name: accuracies(load_acceptance(name)[0]) for name in options.acceptance}
    rows = {**{f"ppd {name} (published)": each for name, each in published.items()}, **MEDUSA, **ours}
    print(f"{'accuracy at 1 / at 5, per cent':36}" + "".join(f"{f'distance {j}':>16}" for j in (1, 2, 3)))
    for name, row in rows.items():
        print(f"{name:36}" + "".join(f"{100 * at1:8.1f} /{100 * at5:6.1f}" for at1, at5 in row[:3]))
    print()
    for name, other in PAIRS.items():
        gains = [100 * (ppd[1] / medusa[1] - 1) for ppd, medusa in zip(published[name], MEDUSA[other], strict=True)]
        print(
            f"{name}: PPD over Medusa at 5: "
            + ", ".join(f"distance {j} {gain:+.1f} %" for j, gain in enumerate(gains, start=1))
            + "; the paper claims up to +28 % at long range, on its own text"
        )
    for name, row in rows.items():
        print(json.dumps({"name": name, "at_1": [at1 for at1, _ in row], "at_5": [at5 for _, at5 in row]}))


if __name__ == "__main__":
    main()
