import gc
import weakref

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import ppd_runtime
from ppd_runtime import LookupGuesses, PromptGuesses, Settings, encode_prompt, generate, read_prompts, stream
from ppd_runtime.models import LoadedModel, wrap_model
from ppd_runtime.prompt_tokens import random_prompt_tokens
from tests.ppd_runtime.designs import DEEP, uniform_design
from tests.ppd_runtime.tiny import tiny_model
from tests.ppd_runtime.tokenizers import CHAT_TEMPLATE, VOCAB_SIZE, byte_tokenizer
from treeopt.artifact import digest
from treeopt.errors import DecodeError, DocumentError


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return wrap_model(tiny_model("llama", vocab_size=VOCAB_SIZE), byte_tokenizer(chat_template=CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def source(llama: LoadedModel) -> PromptGuesses:
    return PromptGuesses(llama, random_prompt_tokens(32, 3, std=0.3))


def test_every_public_name_is_there_and_no_other() -> None:
    assert sorted(ppd_runtime.__all__) == list(ppd_runtime.__all__)
    assert all(hasattr(ppd_runtime, name) for name in ppd_runtime.__all__)


def test_the_chat_template_is_applied_unless_raw_and_not_to_token_ids(llama: LoadedModel) -> None:
    tokenizer = llama.tokenizer
    assert encode_prompt(llama, "hi") == tuple(tokenizer("<hi>=")["input_ids"])
    assert encode_prompt(llama, "hi", raw=True) == tuple(tokenizer("hi")["input_ids"])
    assert encode_prompt(llama, [3, 4]) == (3, 4)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "is empty"), ([1, 257], "token id 257 is outside the vocabulary of 257"), ([-1], "token id -1 is outside")],
)
def test_prompts_that_cannot_be_read_are_refused(llama: LoadedModel, prompt: list[int], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        generate(llama, [prompt])


def test_text_needs_a_tokenizer_and_a_call_needs_a_prompt() -> None:
    bare = wrap_model(tiny_model("llama"))
    with pytest.raises(DecodeError, match="has no tokenizer; give token ids"):
        generate(bare, ["hi"])
    with pytest.raises(DecodeError, match=r"stop strings: .* has no tokenizer"):
        generate(bare, [[1]], settings=Settings(stop=("x",)))
    with pytest.raises(DecodeError, match="prompts: none given"):
        generate(bare, [])


def test_a_result_records_what_it_took(llama: LoadedModel, source: PromptGuesses) -> None:
    (result,) = generate(llama, ["hello"], DEEP, source, Settings(max_new_tokens=20))
    run = result.run
    assert (run.num_prompt_tokens, run.num_new_tokens) == (len(result.prompt_token_ids), 20)
    assert (run.guesses, run.tree_digest, run.finish_reason) == ("prompt", digest(DEEP), "length")
    assert run.num_steps == sum(run.steps_per_state)
    assert run.decode_s == pytest.approx(run.forward_s + run.propose_s + run.verify_s + run.commit_s)
    assert result.seconds == run.prefill_s + run.decode_s
    assert result.text == llama.tokenizer.decode(result.token_ids, skip_special_tokens=True)


def test_streams_say_the_same_as_generate(llama: LoadedModel, source: PromptGuesses) -> None:
    prompts = ["hello", "a", "stream me"]
    options = Settings(max_new_tokens=25)
    texts, tokens, ends = [""] * 3, [[], [], []], {}
    for piece in stream(llama, prompts, DEEP, source, options):
        assert piece.token_ids
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.token_ids
        if piece.generation is not None:
            ends[piece.index] = piece.generation
    for index, result in enumerate(generate(llama, prompts, DEEP, source, options)):
        assert tuple(tokens[index]) == ends[index].token_ids == result.token_ids
        assert texts[index] == ends[index].text == result.text


def test_streams_hand_out_tokens_step_by_step(llama: LoadedModel) -> None:
    pieces = list(stream(llama, ["hello"], settings=Settings(max_new_tokens=7)))
    assert [len(piece.token_ids) for piece in pieces] == [1] * 7


def test_stop_strings_end_text_and_tokens(llama: LoadedModel, source: PromptGuesses) -> None:
    (whole,) = generate(llama, ["hello"], settings=Settings(max_new_tokens=40))
    decoded = [llama.tokenizer.decode([token]) for token in whole.token_ids]
    at = next(i for i, character in enumerate(decoded) if i > 5 and "\ufffd" not in character)
    stop = decoded[at]
    first = next(i for i, character in enumerate(decoded) if stop in character)
    (cut,) = generate(llama, ["hello"], DEEP, source, Settings(max_new_tokens=40, stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: first + 1]
    assert stop not in cut.text
    assert whole.text.startswith(cut.text)


def test_prompt_files_of_every_kind(tmp_path) -> None:
    text, lines, bench = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    text.write_text("one\n\n two \n", encoding="utf-8")
    lines.write_text('{"prompt": "one"}\n{"id": 3, "prompt": "two"}\n', encoding="utf-8")
    bench.write_text('{"question_id": 1, "turns": ["one", "later"]}\n{"turns": ["two"]}\n', encoding="utf-8")
    marked, breaks = tmp_path / "d.jsonl", tmp_path / "e.jsonl"
    marked.write_text('{"prompt": "one"}\n{"prompt": "two"}\n', encoding="utf-8-sig")
    assert read_prompts(marked) == ["one", "two"]
    breaks.write_text('{"prompt": "one\u2028more"}\n', encoding="utf-8")
    assert read_prompts(breaks) == ["one\u2028more"]
    assert read_prompts(text) == read_prompts(lines) == read_prompts(bench) == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n \n", "holds no prompt"),
        ('{"prompt": "x"}\n{"turns": []}', "line 2: has no prompt"),
        ('{"prompt": "x"}\nplain', "line 2: is not JSON"),
        ('{"prompt": 3}', "line 1: has no prompt"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DocumentError, match=message):
        read_prompts(path)
    with pytest.raises(DocumentError, match="cannot be read"):
        read_prompts(tmp_path / "missing")


class AfterSeven(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), bool(input_ids[0, -7:].sum() % 5 == 0))


BATCH = torch.tensor([[0, 0, 3, 4, 5], [5, 6, 7, 8, 9]])
BATCH_MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"eos_token_id": [7, 9, 30, 44, 51]},
        {"min_new_tokens": 10, "eos_token_id": [7, 9, 30, 44, 51]},
        {"begin_suppress_tokens": list(range(50))},
        {"max_length": 16, "max_new_tokens": None},
    ],
    ids=str,
)
def test_inside_generate_every_option_keeps_its_meaning(options: dict[str, object]) -> None:
    model = tiny_model("llama")
    common = {"attention_mask": BATCH_MASK, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 2, **options}
    tokens = random_prompt_tokens(32, 3, std=0.3)
    expected = model.generate(BATCH, **common)
    for extra in (
        {"tree": DEEP, "prompt_tokens": tokens},
        {"tree": DEEP},
        {"tree": uniform_design(2, [(0,), (0, 0)], e=0)},
        {},
    ):
        written = model.generate(BATCH, custom_generate=ppd_runtime.custom_generate, **common, **extra)
        assert torch.equal(written, expected)


def test_inside_generate_stopping_criteria_are_asked_after_every_token() -> None:
    model = tiny_model("llama")
    ids = torch.tensor([[3, 4, 5]])
    common = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 2, "attention_mask": torch.ones_like(ids)}
    criteria = StoppingCriteriaList([AfterSeven()])
    expected = model.generate(ids, stopping_criteria=criteria, **common)
    written = model.generate(
        ids, stopping_criteria=criteria, custom_generate=ppd_runtime.custom_generate, tree=DEEP, **common
    )
    assert torch.equal(written, expected)
    assert expected.shape[1] < 43


def test_inside_generate_sampling_follows_the_global_seed() -> None:
    model = tiny_model("llama")
    ids = torch.tensor([[3, 4, 5]])

    def text(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return model.generate(
            ids, do_sample=True, max_new_tokens=20, custom_generate=ppd_runtime.custom_generate, tree=DEEP
        ).tolist()

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 3}, "generation mode beam_search: cannot be decoded with a tree"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores: is not recorded"),
        ({"guidance_scale": 2.0}, "logits processor UnbatchedClassifierFreeGuidance"),
        ({"guesses": "magic"}, "must be prompt, free or lookup"),
    ],
)
def test_inside_generate_what_cannot_be_honoured_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        tiny_model("llama").generate(
            torch.tensor([[3, 4]]), max_new_tokens=4, custom_generate=ppd_runtime.custom_generate, tree=DEEP, **options
        )


def test_inside_generate_results_come_as_a_dictionary_when_asked() -> None:
    out = tiny_model("llama").generate(
        torch.tensor([[3, 4]]),
        max_new_tokens=4,
        return_dict_in_generate=True,
        custom_generate=ppd_runtime.custom_generate,
        guesses=LookupGuesses(3),
    )
    assert out.sequences.shape == (1, 6)


def test_custom_generate_leaves_the_model_to_its_owner() -> None:
    model = tiny_model("gpt2")  # has dropout
    model.train()
    first, second = list(model.parameters())[:2]
    first.requires_grad_(True)
    ids = torch.tensor([[3, 1, 4]])
    found = model.generate(ids, max_new_tokens=6, custom_generate=ppd_runtime.custom_generate, tree=DEEP)
    assert all(module.training for module in model.modules())
    assert first.requires_grad
    assert not second.requires_grad
    model.eval()
    assert torch.equal(found, model.generate(ids, max_new_tokens=6, do_sample=False))


def test_custom_generate_frees_models_and_checks_them_again_when_they_change() -> None:
    model = tiny_model("llama")
    ids = torch.tensor([[3, 1, 4]])
    common = {"max_new_tokens": 4, "custom_generate": ppd_runtime.custom_generate, "tree": DEEP}
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, **common), expected)
    assert model.float().generate(ids, **common).shape == expected.shape  # another dtype than it was checked in
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "attention_mask: must be"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "attention_mask: must be"),
        ({"inputs_embeds": torch.zeros(1, 3, 32, dtype=torch.float64)}, "inputs_embeds: cannot be decoded"),
    ],
)
def test_inside_generate_only_whole_texts_padded_on_the_left(inputs: dict[str, torch.Tensor], message: str) -> None:
    common = {"max_new_tokens": 4, "custom_generate": ppd_runtime.custom_generate, "tree": DEEP}
    with pytest.raises(DecodeError, match=message):
        tiny_model("llama").generate(torch.tensor([[3, 1, 4]]), **inputs, **common)


def test_stop_strings_that_no_text_shows_are_refused(llama: LoadedModel) -> None:
    special = llama.tokenizer.all_special_tokens[0]
    with pytest.raises(DecodeError, match="is a special token, which texts leave out"):
        generate(llama, ["hello"], settings=Settings(max_new_tokens=4, stop=("x", special)))
