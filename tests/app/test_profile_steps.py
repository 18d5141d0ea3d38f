"""What is timed is the runtime's own step, and it leaves no trace from one step to the next."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from db.profiles import list_profiles
from db.schema import open_database
from ppd_runtime.models import wrap_model
from tests.ppd_runtime.tiny import tiny_model
from treeopt.app.profile import ProfileRequest, run_profiles
from treeopt.app.profile_steps import NUM_DISTANCES, StepBench, load, profiling_tree
from treeopt.errors import ModelError, ProfileError

CONTEXT = 24


@given(st.integers(1, 200), st.integers(1, 5))
def test_profiling_trees_have_exactly_the_asked_size(num_tokens: int, num_distances: int) -> None:
    tree = profiling_tree(num_tokens, num_distances)
    assert tree.size(1) == num_tokens
    assert tree.depth <= num_distances
    assert max(node.prompt_tokens for node in tree.nodes) <= num_distances


@pytest.fixture(scope="module")
def loaded():
    return wrap_model(tiny_model("llama", max_position_embeddings=128), name="tiny")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_context_is_the_same_before_every_step(loaded, cache: str, batch_size: int) -> None:
    bench = StepBench(loaded, cache=cache, graph_mode="eager", max_tokens=16)
    session = bench._prepared(CONTEXT, batch_size)
    keys = [session.cache.committed(0, b)[0].clone() for b in range(batch_size)]
    for build in (bench.step, bench.forward):
        for num_tokens in (16, 1, 8, 2, 3):
            step = build(num_tokens, CONTEXT, batch_size)
            for _ in range(2):
                step.restore()
                assert session.cache.lengths == [CONTEXT] * batch_size
                for b in range(batch_size):
                    assert torch.equal(session.cache.committed(0, b)[0], keys[b])
                step.run()


def test_a_step_runs_all_rows_and_compacts_the_cache(loaded) -> None:
    bench = StepBench(loaded, cache="dynamic", graph_mode="eager", max_tokens=16)
    session = bench._prepared(CONTEXT, 1)
    widths = []
    inner = session.forward
    session.forward = lambda model, **inputs: widths.append(inputs["inputs_embeds"].shape[1]) or inner(model, **inputs)
    for num_tokens, kept in ((1, 1), (2, 1), (3, 2), (16, 2)):
        step = bench.step(num_tokens, CONTEXT, 1)
        step.restore()
        step.run()
        assert session.cache.lengths == [CONTEXT + kept], "root, and one accepted candidate where there is any"
    assert widths == [1, 2, 3, 16]


def test_the_accepted_row_is_moved_to_the_end_of_the_text(loaded) -> None:
    bench = StepBench(loaded, cache="dynamic", graph_mode="eager", max_tokens=16)
    session = bench._prepared(CONTEXT, 1)
    step = bench.step(16, CONTEXT, 1)
    step.restore()
    step.run()
    tree = profiling_tree(16)
    last_child = max(row for row, node in enumerate(tree.nodes) if node.depth == 1)
    assert last_child > 1, "its row is not the place right after the root"
    layer = session.cache.layers[0]
    assert torch.equal(layer.keys[0, :, CONTEXT + 1], layer.keys[0, :, CONTEXT + last_child])


def test_one_token_is_plain_decoding(loaded) -> None:
    step = StepBench(loaded, cache="dynamic", graph_mode="eager", max_tokens=4).step(1, CONTEXT, 1)
    step.restore()
    step.run()
    assert profiling_tree(1).num_prompt_tokens == 0


@pytest.mark.parametrize(
    ("options", "context_len", "said"),
    [
        ({"cache": "dynamic", "graph_mode": "compiled"}, CONTEXT, "needs --cache static"),
        ({"cache": "static", "graph_mode": "cuda_graph"}, CONTEXT, "needs a CUDA device"),
        ({"cache": "dynamic", "graph_mode": "eager"}, 128 - NUM_DISTANCES, "--contexts 125: must be from 1 to 124"),
    ],
)
def test_what_the_runtime_cannot_run_is_refused(loaded, options: dict[str, str], context_len: int, said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        StepBench(loaded, max_tokens=4, **options).step(1, context_len, 1)


def test_the_longest_context_can_be_measured(loaded) -> None:
    bench = StepBench(loaded, cache="static", graph_mode="eager", max_tokens=8)
    for build in (bench.step, bench.forward):
        step = build(8, 128 - NUM_DISTANCES - 1, 1)
        step.restore()
        step.run()


def test_a_shape_is_profiled_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEOPT_LOCK_DIR", str(tmp_path / "locks"))
    shape = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 61,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    engine = open_database(f"sqlite:///{tmp_path / 'x.db'}", create=True)
    assert engine is not None
    request = ProfileRequest(
        "some-7b", config=str(tmp_path / "config.json"), tokens=(1, 2, 4), contexts=(8, 16), device="cpu"
    )
    outcomes = list(run_profiles(engine, request))
    assert [o.profile.conditions.context_len for o in outcomes] == [8, 16]
    assert all(o.profile.complete for o in outcomes)
    stored = list_profiles(engine, model="some-7b")
    assert len(stored) == 2
    for profile in stored:
        assert profile.conditions.versions["weights"] == "random"
        assert profile.conditions.dtype == "float32"
        assert sorted(profile.forwards) == [1, 2, 4]
        assert all(p.point.median_s > 0 for p in profile.steps.values())


def test_a_config_that_is_none_is_one_line(tmp_path: Path) -> None:
    for content in ("{", "[]", '{"model_type": "nonsense"}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match="no model can be built from it") as caught:
            load(
                "x",
                config=str(tmp_path / "config.json"),
                dtype="float32",
                device="cpu",
                attention="sdpa",
                kernels="own",
            )
        assert "\n" not in str(caught.value)
