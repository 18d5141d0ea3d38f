"""``treeopt evaluate``."""

from typing import Annotated

import typer

from treeopt.cli.common import AsJson, Latency, Seed, console, print_json

__all__ = ["evaluate"]


def evaluate(
    tree: Annotated[str, typer.Argument(metavar="TREE", help="A tree design, as `treeopt search --out` writes it.")],
    acceptance: Annotated[
        str | None,
        typer.Option(
            "--acceptance",
            metavar="FILE|NAME",
            help="Acceptance table; without it the bundled one that the tree was made with.",
        ),
    ] = None,
    latency: Latency = None,
    replay: Annotated[
        str | None, typer.Option("--replay", metavar="RANKS", help="Rank record: replay its sequences exactly.")
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Say what a tree is worth: by independence, by joint counts, and by replay of recorded text.

    Example: treeopt evaluate tree.json --acceptance acceptance.json --replay ranks.json
    """
    from treeopt.app.evaluate import assessment_document, evaluate_tree

    design, assessment = evaluate_tree(tree, acceptance, latency, replay, seed)
    if as_json:
        print_json(assessment_document(design, assessment))
        return
    from treeopt.cli.report import print_assessment, print_replay_counts, print_states

    screen = console()
    print_states(design, assessment, screen)
    print_assessment(assessment, screen, always=True)
    print_replay_counts(assessment, screen)
