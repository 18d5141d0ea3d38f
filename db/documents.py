"""Acceptance tables, tree designs and decode runs, kept as their documents."""

from datetime import datetime
from typing import Any

from sqlalchemy import Engine, select

from db.engine import insert_once, reading, writing
from db.profiles import model_row
from db.tables import AcceptanceTableRow, DecodeRunRow, DeviceRow, ModelRow, TreeDesignRow
from treeopt.artifact import document_digest, from_document, to_document
from treeopt.types import AcceptanceTable, DecodeRun, TreeDesign

__all__ = [
    "add_acceptance_table",
    "add_decode_run",
    "add_tree_design",
    "list_acceptance_tables",
    "list_decode_runs",
    "list_tree_designs",
]


def add_acceptance_table(engine: Engine, table: AcceptanceTable, now: datetime) -> str:
    """Store a table once; return its digest."""
    document = to_document(table)
    key = document_digest(document)
    with writing(engine) as session:
        model = model_row(session, table.model, "", now)
        insert_once(session, AcceptanceTableRow, model_id=model.id, digest=key, document=document, created_at=now)
    return key


def list_acceptance_tables(engine: Engine, *, model: str | None = None) -> tuple[AcceptanceTable, ...]:
    """Return the tables, newest first, of one model or of all."""
    query = select(AcceptanceTableRow.document, AcceptanceTableRow.digest).join(ModelRow)
    query = query.order_by(AcceptanceTableRow.created_at.desc(), AcceptanceTableRow.id.desc())
    if model is not None:
        query = query.where(ModelRow.name == model)
    with reading(engine) as session:
        return tuple(
            from_document(document, f"acceptance table {key[:8]}", AcceptanceTable)
            for document, key in session.execute(query)
        )


def add_tree_design(engine: Engine, design: TreeDesign, now: datetime) -> str:
    """Store a design once; return its digest."""
    document = to_document(design)
    key = document_digest(document)
    with writing(engine) as session:
        insert_once(
            session,
            TreeDesignRow,
            digest=key,
            acceptance_digest=design.acceptance_digest,
            latency_digest=design.latency_digest,
            document=document,
            created_at=now,
        )
    return key


def list_tree_designs(engine: Engine) -> tuple[TreeDesign, ...]:
    """Return the designs, newest first."""
    query = select(TreeDesignRow.document, TreeDesignRow.digest)
    query = query.order_by(TreeDesignRow.created_at.desc(), TreeDesignRow.id.desc())
    with reading(engine) as session:
        return tuple(
            from_document(document, f"tree design {key[:8]}", TreeDesign) for document, key in session.execute(query)
        )


def add_decode_run(engine: Engine, run: DecodeRun, now: datetime, *, instance_digest: str | None = None) -> int:
    """Store a run, as often as it happened; return its number.

    Parameters
    ----------
    engine : Engine
        The database.
    run : DecodeRun
        The run.
    now : datetime
        Aware time.
    instance_digest : str, optional
        The device it ran on, linked when the database knows it.
    """
    document: dict[str, Any] = to_document(run)
    with writing(engine) as session:
        device_id = session.scalar(select(DeviceRow.id).where(DeviceRow.instance_digest == instance_digest))
        row = DecodeRunRow(
            model_id=model_row(session, run.model, "", now).id,
            device_id=device_id,
            tree_digest=run.tree_digest,
            document=document,
            created_at=now,
        )
        session.add(row)
        session.flush()
        return row.id


def list_decode_runs(engine: Engine) -> tuple[DecodeRun, ...]:
    """Return the runs in the order they were stored."""
    query = select(DecodeRunRow.document, DecodeRunRow.id).order_by(DecodeRunRow.id)
    with reading(engine) as session:
        return tuple(
            from_document(document, f"decode run {number}", DecodeRun) for document, number in session.execute(query)
        )
