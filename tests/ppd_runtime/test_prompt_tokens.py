"""Prompt tokens: the masks of the paper's section 3.2 and files in PEFT's shape."""

import json
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ppd_runtime.prompt_tokens import (
    PromptTokens,
    check_base_model,
    free_prompt_tokens,
    prompt_visibility,
    random_prompt_tokens,
)
from ppd_runtime.token_files import load_prompt_tokens, push_prompt_tokens, save_prompt_tokens
from treeopt import artifact
from treeopt.errors import DocumentError, InvalidValueError, ModelError


@pytest.mark.parametrize("mask", ["ensemble", "decoder", "encoder"])
@pytest.mark.parametrize(("m", "num_epts"), [(1, 1), (3, 1), (1, 3), (3, 2), (4, 5)])
def test_visibility_follows_its_definition_pair_by_pair(m: int, num_epts: int, mask: str) -> None:
    visibility = prompt_visibility(m, num_epts, mask)
    for row in range(m * num_epts):
        for column in range(m * num_epts):
            (j, ept), (other_j, other_ept) = divmod(row, num_epts), divmod(column, num_epts)
            expected = {
                "ensemble": other_ept == ept and other_j <= j,
                "decoder": other_j < j or (other_j == j and other_ept <= ept),
                "encoder": other_j <= j,
            }[mask]
            assert bool(visibility[row, column]) is expected


def test_visibility_refuses_what_it_does_not_know() -> None:
    with pytest.raises(InvalidValueError, match="ensemble, decoder, encoder, not 'causal'"):
        prompt_visibility(2, 1, "causal")
    with pytest.raises(InvalidValueError, match="at least 1"):
        prompt_visibility(0, 1)


def test_saved_prompt_tokens_come_back_the_same(tmp_path: Path) -> None:
    embeddings = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))
    tokens = PromptTokens(embeddings, "encoder", "someone/model", "ab" * 32, {"steps": 7, "data": ["a", "b"]})
    again = load_prompt_tokens(save_prompt_tokens(tokens, tmp_path / "new" / "folder"))
    assert torch.equal(again.embeddings, tokens.embeddings)
    assert (again.mask, again.base_model, again.base_digest) == ("encoder", "someone/model", "ab" * 32)
    assert again.training == {"steps": 7, "data": ["a", "b"]}
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_files_have_the_shape_that_peft_expects(tmp_path: Path) -> None:
    save_prompt_tokens(random_prompt_tokens(8, 3, 2), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "PROMPT_TUNING"
    assert (config["num_virtual_tokens"], config["token_dim"]) == (6, 8)
    tensors = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {"prompt_embeddings": (6, 8)}


def authors_folder(folder: Path, **fields: object) -> Path:
    """Write a folder as hmarkc/parallel-prompt-decoding does: PEFT's fields beside those of its PromptConfig."""
    config = {
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "num_special_tokens": 3,
        "virtual_tokens_per_special_token": 2,
        "vt_attention_type": "ensemble",
        "aggregation_type": "mean",
        "num_exits": 1,
        "use_custom_lm_head": False,
        "use_prefix_tuning": False,
        "peft_type": "PROMPT_TUNING",
        **fields,
    }
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    flat = torch.arange(6.0)[:, None].expand(6, 4).contiguous().half()
    safetensors.torch.save_file({"prompt_embeddings": flat}, folder / "adapter_model.safetensors")
    return folder


def test_the_authors_layout_loads(tmp_path: Path) -> None:
    tokens = load_prompt_tokens(authors_folder(tmp_path))
    assert (tokens.num_distances, tokens.num_epts, tokens.hidden_size, tokens.mask) == (3, 2, 4, "ensemble")
    # Prompt token by prompt token: EPT i of prompt token j is row (j - 1) * n + i.
    assert tokens.embeddings[:, :, 0].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert tokens.base_digest is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_custom_lm_head": True}, "use_custom_lm_head: is True; only plain prompt tokens can be loaded"),
        ({"num_exits": 2}, "num_exits: is 2"),
        ({"aggregation_type": "weighted"}, "aggregation_type: is 'weighted'; only mean"),
        ({"num_special_tokens": 4}, "prompt_embeddings: has 6 rows; 4 prompt tokens of 2 EPTs need 8"),
        ({"vt_attention_type": "odd"}, "mask: must be one of"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path: must name the base model"),
        ({"num_special_tokens": True}, "num_special_tokens: must be a whole number"),
    ],
)
def test_an_authors_folder_that_means_something_else_is_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(DocumentError, match=message):
        load_prompt_tokens(authors_folder(tmp_path, **fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "ppd/9"}, "ppd.format: is 'ppd/9'; this version reads ppd/1"),
        ({"colour": 1}, "ppd.colour: is not a field"),
        ({"hidden_size": 9}, "ppd.hidden_size: is 9 but prompt_embeddings has width 8"),
        ({"num_distances": 2}, "has 3 rows; 2 prompt tokens of 1 EPTs need 2"),
        ({"num_epts": 0}, "ppd.num_epts: must be a whole number from 1, not 0"),
        ({"training": []}, "ppd.training: must be an object"),
        ({"base_digest": 5}, "ppd.base_digest: must be a text or null"),
    ],
)
def test_a_broken_ppd_section_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    save_prompt_tokens(random_prompt_tokens(8, 3), tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    config["ppd"].update(change)
    path.write_text(json.dumps(config))
    with pytest.raises(DocumentError, match=message):
        load_prompt_tokens(tmp_path)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    save_prompt_tokens(random_prompt_tokens(8, 3), tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (pytest.fail, ("a pickle was opened",))

    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DocumentError, match="pickled and is never opened; convert it to safetensors"):
        load_prompt_tokens(tmp_path)


def test_missing_and_torn_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"adapter_config\.json: is missing"):
        load_prompt_tokens(tmp_path)
    save_prompt_tokens(random_prompt_tokens(8, 3), tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:40])
    with pytest.raises(DocumentError, match=r"adapter_model\.safetensors: is not a safetensors file"):
        load_prompt_tokens(tmp_path)
    safetensors.torch.save_file({"other": torch.zeros(3, 8)}, weights)
    with pytest.raises(DocumentError, match=r"holds \['other'\]; prompt tokens have the one key prompt_embeddings"):
        load_prompt_tokens(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[1]")
    with pytest.raises(DocumentError, match="must hold a JSON object"):
        load_prompt_tokens(tmp_path)


def test_prompt_tokens_of_another_model_are_refused(tmp_path: Path) -> None:
    tokens = PromptTokens(torch.zeros(3, 1, 8), "ensemble", "right/model", "a" * 64)
    save_prompt_tokens(tokens, tmp_path)
    with pytest.raises(ModelError, match="trained for right/model with hidden size 8, other/model has 16"):
        load_prompt_tokens(tmp_path, hidden_size=16, base_model="other/model")
    with pytest.raises(ModelError, match=r"digest aaaaaaaaaaaa.*other/model has digest bbbbbbbbbbbb"):
        load_prompt_tokens(tmp_path, hidden_size=8, base_model="other/model", base_digest="b" * 64)
    load_prompt_tokens(tmp_path, hidden_size=8, base_digest="a" * 64)
    check_base_model(PromptTokens(torch.zeros(3, 1, 8), "ensemble", "unknown"), hidden_size=8, base_digest="b" * 64)


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (torch.zeros(3, 8), "must have the shape"),
        (torch.zeros(9, 1, 8), "has 9 prompt tokens; at most 8"),
        (torch.zeros(3, 1, 8, dtype=torch.float64), "must be float32"),
        (torch.full((3, 1, 8), float("nan")), "not finite"),
    ],
)
def test_embeddings_that_cannot_be_used_are_refused(embeddings: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        PromptTokens(embeddings, "ensemble", "model")


def test_training_free_prompt_tokens_are_the_mean_of_the_tokens_they_are_given() -> None:
    matrix = torch.arange(12.0).reshape(4, 3)
    tokens = free_prompt_tokens(matrix, 2, torch.tensor([1, 1, 3]))
    assert tokens.embeddings[:, 0].tolist() == [[5.0, 6.0, 7.0]] * 2
    assert free_prompt_tokens(matrix, 1).embeddings[0, 0].tolist() == [4.5, 5.5, 6.5]
    with pytest.raises(InvalidValueError, match="token_ids: is empty"):
        free_prompt_tokens(matrix, 2, torch.tensor([], dtype=torch.long))


def test_a_full_disk_keeps_the_files_that_were_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = random_prompt_tokens(8, 3, seed=1)
    save_prompt_tokens(good, tmp_path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact.os, "fsync", full)
    with pytest.raises(DocumentError, match="No space left on device"):
        save_prompt_tokens(random_prompt_tokens(8, 3, seed=2), tmp_path)
    assert torch.equal(load_prompt_tokens(tmp_path).embeddings, good.embeddings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_folder_that_does_not_load_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="is missing"):
        push_prompt_tokens(tmp_path, "someone/prompt-tokens")
