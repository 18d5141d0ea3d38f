"""``treeopt export`` and ``treeopt import``."""

import sys
from typing import Annotated

import typer

from treeopt.cli.common import note

__all__ = ["deliver", "export", "import_"]

Out = Annotated[str | None, typer.Option("--out", metavar="FILE", help="Write to this file instead of stdout.")]


def deliver(content: str | bytes, out: str | None) -> None:
    """Write another engine's text or bytes to a file, or print the text and nothing else on stdout.

    Raises
    ------
    DocumentError
        When bytes would go to a terminal, or the file cannot be written.
    """
    from treeopt.artifact import write_bytes, write_text
    from treeopt.errors import DocumentError

    if isinstance(content, bytes):
        if out is not None:
            write_bytes(content, out)
        elif sys.stdout.isatty():
            raise DocumentError("--out: is needed, the result is a binary file; name one, for example tree.pt")
        else:
            sys.stdout.buffer.write(content)
    elif out is not None:
        write_text(content + "\n" if content else "", out)
    elif content:
        print(content)  # noqa: T201


def export(
    documents: Annotated[
        list[str],
        typer.Argument(
            metavar="TREE",
            help="A tree design; for jetspec an acceptance table, for dspark and llama.cpp-costs latency profiles.",
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="Format; docs/formats.md lists them.")],
    out: Out = None,
) -> None:
    """Write a tree, table or profile in the syntax of another engine.

    Formats: dspark, eagle, jetspec, llama.cpp, llama.cpp-costs, medusa, sequoia, sglang, tensorrt-llm, umbrella, vllm.

    Example: treeopt export tree.json --to medusa
    """
    from treeopt.app.convert import EXPORT_FORMATS, export_documents

    _known("--to", to, EXPORT_FORMATS)
    deliver(export_documents(documents, to), out)


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The other engine's file. Nothing in it is run.")],
    source: Annotated[str, typer.Option("--from", metavar="FORMAT", help="Format; docs/formats.md lists them.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Which one, of a file that holds several.")
    ] = None,
    distances: Annotated[
        int | None,
        typer.Option("--distances", min=1, max=64, help="Distances guessed (heads), when the file does not say."),
    ] = None,
    out: Out = None,
) -> None:
    """Read another engine's tree or acceptance figures as a document of treeopt.

    Formats: eagle, jetspec, medusa, medusa-accuracies, ppd, ppd-accuracies, sequoia, sequoia-vector, umbrella, vllm.

    Example: treeopt import dynamic_sparse_trees_3_vicuna_7b.py --from ppd --name dynamic_sparse_trees_60
    """
    from treeopt.app.convert import IMPORT_FORMATS, import_file
    from treeopt.artifact import to_document, write_document
    from treeopt.cli.common import print_json

    _known("--from", source, IMPORT_FORMATS)
    value = import_file(file, source, name=name, num_distances=distances)
    if out is None:
        print_json(to_document(value))
    else:
        write_document(value, out)
        note(f"written to {out}")


def _known(flag: str, value: str, formats: tuple[str, ...]) -> None:
    if value not in formats:
        raise typer.BadParameter(f"must be one of {', '.join(formats)}, not {value!r}", param_hint=f"'{flag}'")
