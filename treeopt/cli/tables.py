"""``treeopt tables``."""

from treeopt.cli.common import AsJson, console, print_json

__all__ = ["tables"]


def tables(as_json: AsJson = False) -> None:
    """List the acceptance tables that come with treeopt, with their source.

    Example: treeopt tables
    """
    from treeopt.bundled import bundled_tables, load_acceptance

    loaded = {name: load_acceptance(name) for name in bundled_tables()}
    if as_json:
        for name, (table, digest) in loaded.items():
            print_json(
                {
                    "name": name,
                    "model": table.model,
                    "num_distances": table.num_distances,
                    "num_ranks": table.num_ranks,
                    "num_samples": table.num_samples,
                    "rule": table.rule,
                    "source": table.source,
                    "digest": digest,
                }
            )
        return
    screen = console()
    for name, (table, _) in loaded.items():
        samples = "samples unknown" if table.num_samples is None else f"{table.num_samples} samples"
        shape = f"{table.num_distances} distances x {table.num_ranks} ranks"
        screen.print(f"{name}  {table.model}, {shape}, {table.rule}, {samples}")
        screen.print(f"  {table.source}")
