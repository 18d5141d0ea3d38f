"""``treeopt show``."""

from typing import TYPE_CHECKING, Annotated

import typer

from treeopt.cli.common import PICTURES, AsJson, file_ending, note, one_of, print_json, shows_unicode

if TYPE_CHECKING:
    from treeopt.app.show import ShownDesign

__all__ = ["show"]


def _optional_model(value: str | None) -> str | None:
    return None if value is None else one_of(value, ("independent", "joint"))


def show(
    tree: Annotated[str, typer.Argument(metavar="TREE", help="A tree design, as `treeopt search --out` writes it.")],
    acceptance: Annotated[
        str | None,
        typer.Option(
            "--acceptance",
            metavar="FILE|NAME",
            help="Acceptance table, for probabilities; without it the bundled one that the tree was made with, if any.",
        ),
    ] = None,
    acceptance_model: Annotated[
        str | None,
        typer.Option(
            "--acceptance-model",
            metavar="independent|joint",
            help="The model for the probabilities; the design's own without it.",
            callback=_optional_model,
        ),
    ] = None,
    state: Annotated[int | None, typer.Option("--state", min=0, help="Show the tree of this state only.")] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write a picture (.png, .svg, .pdf) or a graph for other tools (.graphml) to this file.",
            callback=lambda value: file_ending(value, (*PICTURES, ".graphml")),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the trees of a design: in the terminal, and as a figure with --out.

    Example: treeopt show tree.json --out tree.png
    """
    from treeopt.app.show import load_design
    from treeopt.draw import describe_design, draw_design

    shown = load_design(tree, acceptance, acceptance_model)
    design, trie = shown.design, shown.trie
    if state is not None and state > design.num_distances:
        raise typer.BadParameter(f"this design has the states 0 to {design.num_distances}", param_hint="--state")
    states = None if state is None else [state]
    if out is not None:
        _write(shown, states, out)
    if as_json:
        print_json(describe_design(design, trie, states))
        return
    if shown.other_table:
        note(f"{tree} was not made with this table: its claims and these probabilities do not belong together")
    typer.echo(draw_design(design, trie, states, ascii_only=not shows_unicode()))
    if out is not None:
        note(f"written to {out}")


def _write(shown: "ShownDesign", states: list[int] | None, out: str) -> None:
    if out.lower().endswith(".graphml"):
        from treeopt.artifact import write_bytes
        from treeopt.graph import graphml

        write_bytes(graphml(shown.design, shown.trie, states), out)
        return
    from treeopt.picture import design_figure
    from treeopt.plot import check_figure_path, save_figure

    check_figure_path(out)
    save_figure(design_figure(shown.design, shown.trie, states, model=shown.model), out)
