"""``treeopt db``: look after the database of profiles."""

from pathlib import Path
from typing import Annotated

import typer

from treeopt.cli.common import Database, note, print_json

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Look after the database that keeps profiles, tables, designs, runs and jobs.",
)


@app.command("upgrade")
def upgrade(db: Database = None) -> None:
    """Bring the database to this version's schema, or make it; a SQLite file is backed up first.

    Example: treeopt db upgrade
    """
    from treeopt.app.database import run_upgrade

    name, revision = run_upgrade(db)
    typer.echo(f"{name}: schema {revision}")


@app.command("current")
def current(
    db: Database = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False
) -> None:
    """Say where the database is and which schema it has.

    Example: treeopt db current
    """
    from treeopt.app.database import current as current_schema

    facts = current_schema(db)
    if as_json:
        print_json(facts)
        return
    typer.echo(
        f"{facts['database']}: {facts['state']}, schema {facts['revision'] or 'none'} (newest {facts['newest']})"
    )


@app.command("backup")
def backup(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="New file to write.")], db: Database = None
) -> None:
    """Copy the database while it is in use: SQLite's online backup, or pg_dump.

    Example: treeopt db backup copy.db
    """
    from treeopt.app.database import backup as back_up

    note(f"wrote {back_up(db, target)}")


@app.command("check")
def check(db: Database = None) -> None:
    """Look for damage; exit code 1 when there is any.

    Example: treeopt db check
    """
    from treeopt.app.database import check as find_problems

    found = find_problems(db)
    for line in found:
        typer.echo(line)
    if found:
        raise typer.Exit(1)
    note("no problems")


@app.command("vacuum")
def vacuum(db: Database = None) -> None:
    """Give the room of deleted rows back.

    Example: treeopt db vacuum
    """
    from treeopt.app.database import run_vacuum

    run_vacuum(db)
    note("done")
