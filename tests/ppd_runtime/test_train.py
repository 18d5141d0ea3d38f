"""Training moves the prompt tokens and nothing else, towards the model's own predictions, and resumes exactly."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ppd_runtime import hf
from ppd_runtime.answers import Text, generate_answers
from ppd_runtime.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ppd_runtime.groups import group_logits, text_pass
from ppd_runtime.losses import distillation_loss
from ppd_runtime.models import LoadedModel, wrap_model
from ppd_runtime.prompt_tokens import random_prompt_tokens
from ppd_runtime.train import (
    TrainingPlan,
    TrainingState,
    choose_insertions,
    initial_state,
    learning_rate_at,
    train_steps,
    usable_texts,
)
from tests.ppd_runtime.tiny import tiny_model
from treeopt.errors import DocumentError, InvalidValueError, TrainingError

PLAN = TrainingPlan(num_steps=6, texts_per_step=2, groups_per_text=4, learning_rate=0.05, start="vocabulary")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(tiny_model("llama", dtype=torch.float32))


@pytest.fixture(scope="module")
def texts(loaded: LoadedModel) -> list[Text]:
    prompts = [[3, 4, 5], [7, 9], [20, 21, 22, 23], [40]]
    return generate_answers(loaded, prompts, max_new_tokens=12)


def last(loaded: LoadedModel, plan: TrainingPlan, texts: list[Text]) -> TrainingState:
    return list(train_steps(loaded, plan, texts, initial_state(loaded, plan)))[-1]


def test_only_the_prompt_tokens_learn(loaded: LoadedModel, texts: list[Text]) -> None:
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    start = initial_state(loaded, PLAN)
    first = start.embeddings.clone()
    end = list(train_steps(loaded, PLAN, texts, start))[-1]
    assert not torch.equal(end.embeddings, first)
    assert torch.equal(start.embeddings, first)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.model.state_dict().items())
    assert all(parameter.grad is None for parameter in loaded.model.parameters())


@pytest.mark.parametrize("loss", ["distillation", "labels"])
@pytest.mark.parametrize(("num_epts", "mask"), [(1, "ensemble"), (3, "ensemble"), (2, "encoder")])
def test_the_loss_falls(loaded: LoadedModel, texts: list[Text], loss: str, num_epts: int, mask: str) -> None:
    plan = replace(PLAN, num_steps=40, groups_per_text=20, texts_per_step=4, loss=loss, num_epts=num_epts, mask=mask)
    states = list(train_steps(loaded, plan, texts, initial_state(loaded, plan)))
    assert states[-1].loss < 0.9 * states[0].loss
    assert [state.step for state in states] == list(range(1, 41))


def test_the_gradient_is_that_of_the_paper_loss() -> None:
    """One step from zero moments moves every value by the learning rate against the sign of the loss's gradient."""
    loaded = wrap_model(tiny_model("llama"))
    text = Text((3, 9, 27, 4, 11, 33, 20, 2), 2)
    plan = replace(PLAN, num_steps=1, texts_per_step=1, groups_per_text=99, warmup_share=0.0)
    start = initial_state(loaded, plan)
    embeddings = start.embeddings.clone().requires_grad_(True)
    own = loaded.model(torch.tensor([text.token_ids])).logits[0]
    total = torch.zeros((), dtype=torch.float64)
    insertions = range(1, 6)
    for insertion in insertions:
        memory, _ = text_pass(loaded.model, torch.tensor(text.token_ids[: insertion + 1]), slice(-1, None))
        guesses = group_logits(loaded.model, embeddings, memory, torch.tensor([insertion]))[0]
        for j in (1, 2, 3):
            if insertion + j + 1 < len(text.token_ids):
                kl = functional.kl_div(
                    guesses[j - 1].log_softmax(-1), own[insertion + j].log_softmax(-1), log_target=True, reduction="sum"
                )
                total = total + kl * plan.decay ** (j - 1)
    total = total / (len(insertions) * 3)
    total.backward()
    end = last(loaded, plan, [text])
    assert end.loss == pytest.approx(total.item(), rel=1e-6)
    moved = (end.embeddings - start.embeddings) / plan.learning_rate
    assert torch.allclose(moved, -embeddings.grad / (embeddings.grad.abs() + 1e-8), atol=1e-4)


def test_the_distillation_loss_equals_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    guesses = torch.randn(37, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    own = torch.randn(9, 11, generator=generator, dtype=torch.float64)
    rows = torch.randint(0, 9, (37,), generator=generator)
    weights = torch.rand(37, generator=generator, dtype=torch.float64)
    expected = functional.kl_div(
        guesses.log_softmax(-1), own[rows].log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    expected = (expected * weights).sum()
    (slow,) = torch.autograd.grad(3 * expected, guesses)
    loss = distillation_loss(guesses, own, rows, weights)
    (fast,) = torch.autograd.grad(3 * loss, guesses)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(fast, slow)


def test_steps_are_those_of_torchs_adam(loaded: LoadedModel, texts: list[Text]) -> None:
    plan = replace(PLAN, num_steps=5)
    state = initial_state(loaded, plan)
    parameter = state.embeddings.clone().requires_grad_(True)
    adam = torch.optim.Adam([parameter], lr=1.0)
    for after in train_steps(loaded, plan, texts, state):
        # The gradient is what moved the first moment.
        gradient = (after.exp_avg - 0.9 * state.exp_avg) / (1 - 0.9)
        parameter.grad = gradient.clone()
        adam.param_groups[0]["lr"] = learning_rate_at(state.step, plan)
        adam.step()
        torch.testing.assert_close(after.embeddings, parameter.detach(), rtol=1e-5, atol=1e-6)
        state = after


def test_a_killed_run_resumes_to_the_same_bits(loaded: LoadedModel, texts: list[Text], tmp_path: Path) -> None:
    plan = replace(PLAN, num_epts=2)
    whole = last(loaded, plan, texts)
    path = tmp_path / "run.safetensors"
    losses: list[float] = []
    for state in train_steps(loaded, plan, texts, initial_state(loaded, plan)):
        losses.append(state.loss)
        if state.step == 3:
            save_checkpoint(path, plan, Checkpoint(state, losses, 1.5), model_digest="m", data_digest="d")
        if state.step == 4:
            break  # killed after the checkpoint
    at = load_checkpoint(path, plan, model_digest="m", data_digest="d")
    assert (at.state.step, at.losses, at.train_s) == (3, losses[:3], 1.5)
    resumed = list(train_steps(loaded, plan, texts, at.state))[-1]
    assert torch.equal(resumed.embeddings, whole.embeddings)
    assert torch.equal(resumed.exp_avg_sq, whole.exp_avg_sq)
    assert resumed.loss == whole.loss


def test_shares_of_several_processes_add_up_to_one_run(loaded: LoadedModel, texts: list[Text]) -> None:
    plan = replace(PLAN, num_steps=1)
    alone = last(loaded, plan, texts)
    gradients: list[torch.Tensor] = []

    def collect(gradient: torch.Tensor) -> torch.Tensor:
        gradients.append(gradient)
        return gradient

    for rank in range(2):
        list(
            train_steps(
                loaded, plan, texts, initial_state(loaded, plan), rank=rank, num_processes=2, reduce_mean=collect
            )
        )
    with pytest.raises(TrainingError, match="3 processes need a multiple"):
        next(train_steps(loaded, plan, texts, initial_state(loaded, plan), num_processes=3))
    mean = (gradients[0] + gradients[1]) / 2
    torch.testing.assert_close(0.1 * mean, alone.exp_avg, rtol=1e-5, atol=1e-8)


def test_a_loss_that_is_not_finite_stops_the_run_before_it_spoils_the_state(texts: list[Text]) -> None:
    loaded = wrap_model(tiny_model("llama", dtype=torch.float32))
    run = train_steps(loaded, PLAN, texts, initial_state(loaded, PLAN))
    states = [next(run), next(run)]
    loaded.model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"step 3: the loss is nan.*lower --learning-rate"):
        next(run)
    assert bool(torch.isfinite(states[-1].embeddings).all())


def test_insertions_cover_exactly_what_decoding_visits() -> None:
    text = Text(tuple(range(10)), 4)
    generator = torch.Generator().manual_seed(0)
    every = choose_insertions(text, replace(PLAN, groups_per_text=50), generator)
    assert every.tolist() == [3, 4, 5, 6, 7]  # from the prompt's last token; the last one guesses token 9
    some = choose_insertions(text, replace(PLAN, groups_per_text=2), generator)
    assert len(set(some.tolist())) == 2
    assert set(some.tolist()) <= set(every.tolist())
    assert choose_insertions(text, replace(PLAN, insertion="end"), generator).tolist() == [5]
    seen = {int(choose_insertions(text, replace(PLAN, groups_per_text=1), generator)) for _ in range(200)}
    assert seen == set(every.tolist())


def test_the_learning_rate_warms_up_and_falls_along_half_a_cosine() -> None:
    plan = replace(PLAN, num_steps=100, learning_rate=1.0, warmup_share=0.1)
    rates = [learning_rate_at(step, plan) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.5 * (1 + math.cos(math.pi * 89 / 90)))
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_starts_come_from_text_token_embeddings(loaded: LoadedModel) -> None:
    mean = hf.embed_tokens(loaded.model, torch.arange(61)).mean(dim=0)
    state = initial_state(loaded, replace(PLAN, start="vocabulary"))
    torch.testing.assert_close(state.embeddings, mean.expand(3, 1, -1).clone())
    ensembles = initial_state(loaded, replace(PLAN, start="vocabulary", num_epts=4)).embeddings
    assert not torch.equal(ensembles[:, 0], ensembles[:, 1])
    before = random_prompt_tokens(32, 3)
    assert torch.equal(initial_state(loaded, replace(PLAN, start="given"), before).embeddings, before.embeddings)
    for wrong in (None, random_prompt_tokens(32, 2)):
        with pytest.raises(TrainingError, match=r"start: prompt tokens of the shape \(3, 1, 32\) are needed"):
            initial_state(loaded, replace(PLAN, start="given"), wrong)
    with pytest.raises(TrainingError, match="start: text needs a tokenizer"):
        initial_state(loaded, replace(PLAN, start="text"))


def test_texts_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(TrainingError, match="none has two new tokens"):
        usable_texts([Text((1, 2, 3), 2), Text((1,), 1)], 100, 3)
    with pytest.raises(TrainingError, match="none has two new tokens"):
        usable_texts([], 100, 3)
    with pytest.raises(TrainingError, match=r"texts\[1\]: has 99 tokens; with 3 prompt tokens.*context of 100"):
        usable_texts([Text((1, 2, 3), 1), Text((1,) * 99, 1)], 100, 3)
    assert usable_texts([Text((1, 2, 3), 1), Text((1, 2), 1)], None, 3) == [Text((1, 2, 3), 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_distances": 9}, "num_distances: must be a whole number from 1 to 8, not 9"),
        ({"num_steps": 0}, "num_steps: must be a whole number from 1, not 0"),
        ({"learning_rate": math.nan}, "learning_rate: must be above 0"),
        ({"decay": 1.5}, "decay: must be above 0 and at most 1"),
        ({"loss": "mse"}, "loss: must be one of distillation, labels"),
        ({"warmup_share": 1.0}, "warmup_share: must be from 0 to below 1"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        replace(PLAN, **change)


def test_checkpoints_of_other_runs_and_torn_ones_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, PLAN, Checkpoint(initial_state(loaded, PLAN), []), model_digest="m", data_digest="d")
    with pytest.raises(DocumentError, match="belongs to a run with another learning_rate"):
        load_checkpoint(path, replace(PLAN, learning_rate=1.0), model_digest="m", data_digest="d")
    with pytest.raises(DocumentError, match="belongs to a run with another data_digest"):
        load_checkpoint(path, PLAN, model_digest="m", data_digest="other")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DocumentError, match="is not a checkpoint"):
        load_checkpoint(path, PLAN, model_digest="m", data_digest="d")
