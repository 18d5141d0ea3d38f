"""Answers are those of plain decoding, made in batches, cached as they come; files of text are read or refused."""

import json
from pathlib import Path

import pytest
import torch

from ppd_runtime.answers import Text, answer_cache_path, generate_answers, read_texts
from ppd_runtime.models import LoadedModel, wrap_model
from tests.ppd_runtime.letters import letters
from tests.ppd_runtime.tiny import tiny_model
from treeopt.errors import TrainingError

PROMPTS = [[3, 4, 5, 6], [7], [9, 10, 11, 12, 13, 14, 15, 3, 3], [8, 8]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(tiny_model("llama"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_batched_answers_are_the_models_greedy_text(family: str, batch_size: int) -> None:
    loaded = wrap_model(tiny_model(family))
    texts = generate_answers(loaded, PROMPTS, max_new_tokens=9, batch_size=batch_size)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        plain = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, pad_token_id=0)
        assert text == Text(tuple(plain[0].tolist()), len(prompt))


def test_an_end_of_text_token_ends_an_answer_and_is_part_of_it() -> None:
    loaded = wrap_model(tiny_model("llama"))
    free = generate_answers(loaded, PROMPTS, max_new_tokens=9)
    end = free[0].token_ids[len(PROMPTS[0]) + 3]
    loaded.model.generation_config.eos_token_id = [60, end]
    for before, after in zip(free, generate_answers(loaded, PROMPTS, max_new_tokens=9), strict=True):
        new_ids = before.token_ids[before.num_prompt_tokens :]
        kept = new_ids[: new_ids.index(end) + 1] if end in new_ids else new_ids
        assert after.token_ids[after.num_prompt_tokens :] == kept


def test_an_interrupted_run_makes_only_what_is_missing(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = answer_cache_path(tmp_path / "answers", loaded, max_new_tokens=6, temperature=0.0, seed=0)
    whole = generate_answers(loaded, PROMPTS, max_new_tokens=6, batch_size=2, cache_path=path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:2]) + "\n" + lines[2][:20])  # killed while writing the third answer
    asked: list[int] = []
    again = generate_answers(
        loaded, PROMPTS, max_new_tokens=6, batch_size=2, cache_path=path, progress=lambda done, _: asked.append(done)
    )
    assert again == whole
    assert asked == [4]
    monkeypatch.setattr(
        "ppd_runtime.answers.hf.forward_rows", lambda *_, **__: pytest.fail("the model was asked again")
    )
    assert generate_answers(loaded, PROMPTS, max_new_tokens=6, cache_path=path) == whole


def test_sampled_answers_depend_on_the_seed_only(loaded: LoadedModel) -> None:
    options = {"max_new_tokens": 12, "temperature": 1.0, "batch_size": 2}
    first = generate_answers(loaded, PROMPTS, seed=1, **options)
    assert generate_answers(loaded, PROMPTS, seed=1, **options) == first
    assert generate_answers(loaded, PROMPTS, seed=2, **options) != first


def test_sampled_tokens_follow_the_models_distribution() -> None:
    loaded = wrap_model(tiny_model("llama", vocab_size=5))
    texts = [
        generate_answers(loaded, [[3, 1, 2]], max_new_tokens=1, temperature=0.8, seed=seed)[0] for seed in range(600)
    ]
    counts = torch.bincount(torch.tensor([text.token_ids[-1] for text in texts]), minlength=5)
    expected = (loaded.model(torch.tensor([[3, 1, 2]])).logits[0, -1] / 0.8).softmax(-1) * 600
    chi_square = ((counts - expected).square() / expected).sum().item()
    assert chi_square < 18.47  # 99.9 % of four degrees of freedom; the seeds are fixed


def test_settings_do_not_share_a_cache(loaded: LoadedModel, tmp_path: Path) -> None:
    names = {
        answer_cache_path(tmp_path, loaded, max_new_tokens=n, temperature=t, seed=s).name
        for n, t, s in [(8, 0.0, 0), (9, 0.0, 0), (8, 0.5, 0), (8, 0.5, 1)]
    }
    assert len(names) == 4
    greedy = {answer_cache_path(tmp_path, loaded, max_new_tokens=8, temperature=0.0, seed=s) for s in (0, 1)}
    assert len(greedy) == 1


@pytest.mark.parametrize(
    ("prompts", "max_new_tokens", "message"),
    [
        ([], 5, "prompts: there are none"),
        ([[1], []], 5, r"prompts\[1\]: has no tokens"),
        ([[1], [2] * 120], 20, r"prompts\[1\]: has 120 tokens; with 20 new ones that is past the context of 128"),
        ([[1]], 0, "max_new_tokens: must be at least 1"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(
    loaded: LoadedModel, prompts: list[list[int]], max_new_tokens: int, message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        generate_answers(loaded, prompts, max_new_tokens=max_new_tokens)


def test_a_cache_that_cannot_be_written_is_named(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"answers\.jsonl: answers cannot be kept"):
        generate_answers(loaded, [[1]], max_new_tokens=2, cache_path=tmp_path / "file" / "answers.jsonl")


def test_texts_are_read_from_every_format(tmp_path: Path) -> None:
    loaded = wrap_model(tiny_model("llama"), letters())
    plain = tmp_path / "text.txt"
    plain.write_text("abcdefgh")
    assert read_texts(plain, loaded, max_tokens=5) == [Text((1, 2, 3, 4, 5), 1), Text((6, 7, 8), 1)]
    lines = tmp_path / "text.jsonl"
    lines.write_text('{"text": "abcd"}\n\n{"text": "xy"}\n{"text": "wxyz"}\n')
    assert [text.token_ids for text in read_texts(lines, loaded, max_tokens=9)] == [(1, 2, 3, 4), (23, 24, 25, 26)]
    chats = tmp_path / "chats.json"
    chats.write_text(
        json.dumps([{"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]}])
    )
    assert read_texts(chats, loaded, max_tokens=99)[0].token_ids[:2] == (1, 2)
    loaded.tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
    assert read_texts(chats, loaded, max_tokens=99) == [Text((21, 1, 2, 1, 3, 4), 1)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "holds no text of more than two tokens"),
        ("a.jsonl", '{"text": "abc"}\n{"body": "x"}\n', r"a\.jsonl line 2: holds no text"),
        ("a.jsonl", "{broken\n", r"a\.jsonl line 1: is not JSON"),
        ("a.json", '{"text": "abc"}', "must hold a JSON list"),
        ("a.json", "[", r"a\.json: is not JSON"),
    ],
)
def test_files_without_text_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    loaded = wrap_model(tiny_model("llama"), letters())
    (tmp_path / name).write_text(content)
    with pytest.raises(TrainingError, match=message):
        read_texts(tmp_path / name, loaded, max_tokens=9)


def test_a_missing_file_and_a_model_without_a_tokenizer_are_named(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="comes without a tokenizer"):
        read_texts(tmp_path / "a.txt", loaded, max_tokens=9)
    with pytest.raises(TrainingError, match=r"a\.txt: cannot be read"):
        read_texts(tmp_path / "a.txt", wrap_model(tiny_model("llama"), letters()), max_tokens=9)
