"""Tables, designs and runs come back as the values they were."""

from datetime import datetime

from sqlalchemy import Engine

from db.documents import (
    add_acceptance_table,
    add_decode_run,
    add_tree_design,
    list_acceptance_tables,
    list_decode_runs,
    list_tree_designs,
)
from treeopt.artifact import digest
from treeopt.types import AcceptanceTable, DecodeRun, SparseTree, TreeDesign

TABLE = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]], model="toy")
DESIGN = TreeDesign(
    trees=(
        SparseTree.from_prompt_tokens({(): 2}),
        SparseTree.from_prompt_tokens({(): 2, (0,): 1}),
        SparseTree.from_prompt_tokens({(): 2, (0,): 1, (0, 0): 1}),
    ),
    budget=8,
    method="exact",
    objective="tau",
    acceptance_model="independent",
    tokens_per_prompt_token=1,
    pass_tokens=(3, 5, 7),
    acceptance_length=1.5,
    upper_bound=1.5,
    acceptance_digest=digest(TABLE),
)
RUN = DecodeRun(
    model="toy",
    guesses="prompt",
    tree_digest=digest(DESIGN),
    num_prompt_tokens=5,
    num_new_tokens=9,
    num_steps=4,
    steps_per_state=(1, 1, 2),
    prefill_s=0.5,
    decode_s=1.5,
    finish_reason="length",
)


def test_tables_and_designs_are_stored_once(engine: Engine, now: datetime) -> None:
    for _ in range(2):
        assert add_acceptance_table(engine, TABLE, now) == digest(TABLE)
        assert add_tree_design(engine, DESIGN, now) == digest(DESIGN)
    assert list_acceptance_tables(engine) == (TABLE,)
    assert list_acceptance_tables(engine, model="toy") == (TABLE,)
    assert list_acceptance_tables(engine, model="other") == ()
    assert list_tree_designs(engine) == (DESIGN,)


def test_equal_runs_are_stored_as_often_as_they_happened(engine: Engine, now: datetime) -> None:
    first = add_decode_run(engine, RUN, now)
    assert add_decode_run(engine, RUN, now, instance_digest="unknown") > first
    assert list_decode_runs(engine) == (RUN, RUN)
