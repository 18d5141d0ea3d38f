"""Decoding with a tree on a real model, float32: a few prompts here, all of them in benchmarks/identity.py."""

import pytest
import torch
from transformers import DynamicCache

from ppd_runtime import LookupGuesses, PromptGuesses, Settings, encode_prompt, generate, hf, load_model
from ppd_runtime.decode import prefill, step
from ppd_runtime.generate import open_session
from ppd_runtime.models import LoadedModel
from ppd_runtime.prompt_tokens import random_prompt_tokens
from tests.ppd_runtime.designs import DEEP, WIDE, uniform_design
from tests.ppd_runtime.forged import ForgedGuesses

pytestmark = pytest.mark.demo_model

PROMPTS = ["Count from one to twenty in words.", "Repeat after me: red green blue, red green blue, red"]
LOOKUP = uniform_design(3, [(0,), (0, 0), (0, 0, 0), (1,)], e=0)


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model("demo", device="cpu", kernels="own")


def test_the_demo_model_writes_what_generate_writes(demo: LoadedModel) -> None:
    prompts = [encode_prompt(demo, prompt) for prompt in PROMPTS]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        written = demo.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        expected.append(tuple(written[0, len(prompt) :].tolist()))
    tokens = PromptGuesses(demo, random_prompt_tokens(hf.embedding_size(demo.model), 3, std=0.1))
    for design, source in ((DEEP, tokens), (WIDE, tokens), (LOOKUP, LookupGuesses(3))):
        results = generate(demo, prompts, design, source, Settings(max_new_tokens=24))
        assert [each.token_ids for each in results] == expected


def test_the_demo_models_cache_equals_a_fresh_prefill(demo: LoadedModel) -> None:
    (plain,) = generate(demo, PROMPTS[1:], settings=Settings(max_new_tokens=30))
    true = [*plain.prompt_token_ids, *plain.token_ids]
    # Rank 1 is right, rank 0 is wrong: every accepted row has to move.
    source = ForgedGuesses(
        lambda token_ids, path: (true[len(token_ids) + len(path) - 1] + path[-1] - 1) % 49152,
        3,
        hf.embedding_size(demo.model),
    )
    source.embeddings = source.embeddings.float()
    design = uniform_design(3, [(0,), (1,), (1, 0), (1, 1), (1, 1, 1)])
    session, (text,) = open_session(demo, PROMPTS[1:], design, source, Settings(max_new_tokens=30))
    prefill(session)
    for _ in range(6):
        step(session)
    assert text.new_ids == list(plain.token_ids[:25])
    ids, fresh = torch.tensor([text.token_ids[:-1]]), DynamicCache()
    hf.forward_rows(
        demo.model,
        inputs_embeds=hf.embed_tokens(demo.model, ids),
        mask=torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None],
        position_ids=torch.arange(ids.shape[1])[None],
        cache=fresh,
    )
    for layer, expected in enumerate(fresh.layers):
        for mine, other in zip(session.cache.committed(layer), (expected.keys[0], expected.values[0]), strict=True):
            assert float((mine - other).abs().max()) <= 1e-4 * float(other.abs().max())
