"""Decoding takes a switching table wherever it takes a tree."""

from pathlib import Path

import pytest

from ppd_runtime import Settings, wrap_model
from tests.ppd_runtime.tiny import tiny_model
from treeopt import AcceptanceTable, SwitchEntry, SwitchTable, search, write_document
from treeopt.app.generate import plan_decoding, statistics, stream_prompts
from treeopt.errors import DocumentError

TABLE = AcceptanceTable.from_marginals([[0.5, 0.2], [0.4, 0.1]])
SWITCH = SwitchTable((SwitchEntry(1, 10, search(TABLE, 9)), SwitchEntry(1, 100, search(TABLE, 3))))


def test_a_switching_table_decodes_and_its_expectation_is_unknown(tmp_path: Path) -> None:
    loaded = wrap_model(tiny_model("llama"))
    write_document(SWITCH, tmp_path / "switch.json")
    plan = plan_decoding(loaded, tree=str(tmp_path / "switch.json"), guesses="free")
    assert plan.design == SWITCH
    settings = Settings(max_new_tokens=20)
    prompts = [[3, 4, 5, 6, 7]]
    switched = [piece.generation for piece in stream_prompts(loaded, prompts, plan, settings) if piece.generation]
    plain_plan = plan_decoding(loaded, tree="none")
    plain = [piece.generation for piece in stream_prompts(loaded, prompts, plain_plan, settings) if piece.generation]
    assert switched[0].token_ids == plain[0].token_ids
    stats = statistics([switched[0].run], plan.design)
    assert stats.expected_tokens_per_step is None
    assert stats.num_new_tokens == 20
    assert len(stats.occupancy) == 3


def test_another_kind_of_document_is_refused(tmp_path: Path) -> None:
    write_document(TABLE, tmp_path / "table.json")
    with pytest.raises(
        DocumentError, match="holds a treeopt document of another kind; give a tree design or a switching table"
    ):
        plan_decoding(wrap_model(tiny_model("llama")), tree=str(tmp_path / "table.json"), guesses="free")
