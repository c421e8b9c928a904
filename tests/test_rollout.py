"""The rollout and every forward pass: padding, caching, stopping, and nothing but softmax(logits / temperature)."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen2Config,
)  # fmt: skip

import ppo

VOCAB, STOP, PAD = 17, 3, 0
SMALL = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=PAD),
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PAD),
    "qwen2": Qwen2Config(**SMALL, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PAD),
    "gpt_neox": GPTNeoXConfig(**SMALL, max_position_embeddings=64, pad_token_id=PAD),
}


def tiny_model(kind, auto_class=AutoModelForCausalLM, **kwargs):
    """A random model whose weights are large enough for its distributions to be far from uniform."""
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[kind])
    for name, value in kwargs.items():
        setattr(config, name, value)
    model = auto_class.from_config(config).eval()
    for p in model.parameters():
        if p.dim() == 2:
            p.data.mul_(4)
    return model


@pytest.fixture(params=["gpt2", "llama"], scope="module")
def policy(request):
    """Positions learned and rotary; test_models.py has the other architectures."""
    return tiny_model(request.param)


def left_padded_prompts(B=6, P=7):
    """(B, P) random prompts of 1 to P tokens, and their mask."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(4, VOCAB, (B, P), generator=generator)
    mask = torch.arange(P) >= torch.tensor([0, 6, 3, 5, 1, 2])[:B, None]
    return prompts.masked_fill(~mask, PAD), mask


def uniforms(B=6, T=12):
    return torch.rand(B, T, generator=torch.Generator().manual_seed(0))


def rollout(policy, stop=STOP, pad=PAD):
    """Responses to six prompts at temperature 0.9."""
    prompts, mask = left_padded_prompts()
    policy.stop_token_id, policy.tokenizer = stop, SimpleNamespace(pad_token_id=pad)
    return ppo.Rollout(prompts, mask, *ppo.sample(policy, prompts, mask, uniforms(), 0.9))


def logits_of(policy, r):
    with torch.no_grad():
        return ppo.response_forward(policy, r, 1.0)[0]


def test_kept_logprobs_equal_a_fresh_forward(policy):
    """What PPO divides by is what it recomputes: without this the first ratio is not 1."""
    r = rollout(policy)
    fresh = ppo.token_logprobs(logits_of(policy, r) / 0.9, r.responses)
    assert r.ended.any() and not r.ended.all()  # rows left the batch on the way
    torch.testing.assert_close(fresh[r.mask], r.old_logprobs[r.mask], rtol=1e-4, atol=1e-4)


def test_cached_rollout_equals_a_plain_loop(policy):
    """One row at a time, no padding, no cache, numpy's float64 for the draw: the same tokens from the same uniforms."""
    r, numbers = rollout(policy), uniforms().double().numpy()
    for i in range(len(r.prompts)):
        ids, drawn = r.prompts[i][r.prompt_mask[i]].tolist(), []
        for t in range(12):
            with torch.no_grad():
                logits = policy(torch.tensor([ids + drawn])).logits[0, -1].double().numpy() / 0.9
            p = np.exp(logits - logits.max())
            drawn.append(int(np.searchsorted(np.cumsum(p / p.sum()), numbers[i, t], side="right")))
            if drawn[-1] == STOP:
                break
        assert r.responses[i][r.mask[i]].tolist() == drawn
        assert r.ended[i].item() == (drawn[-1] == STOP)


def test_padding_and_its_content_change_nothing(policy):
    """More padding on the left, and random tokens in place of all padding: same logits, values and reward."""
    r, noise = rollout(policy), torch.randint(0, VOCAB, (6, 12))
    mask = F.pad(r.prompt_mask, (5, 0), value=False)
    garbage = replace(
        r, prompts=torch.where(mask, F.pad(r.prompts, (5, 0)), noise), prompt_mask=mask,
        responses=torch.where(r.mask, r.responses, noise),
    )  # fmt: skip
    critic = ppo.Critic(policy.base_model, torch.nn.Linear(32, 1))
    for function in (partial(logits_of, policy), critic):
        torch.testing.assert_close(function(garbage)[r.mask], function(r)[r.mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_reward_is_read_at_the_last_real_token(kind):
    """Against the library's own pooling where that is right: a single text without padding."""
    model = tiny_model(kind, AutoModelForSequenceClassification)
    ids = torch.randint(4, VOCAB, (3, 9))
    mask = torch.tensor([[0] * a + [1] * (9 - a - b) + [0] * b for a, b in ((0, 0), (2, 3), (4, 1))])
    with torch.no_grad():
        rewards = ppo.read_reward(model, ids, mask)
        for i in range(3):
            library = model(input_ids=ids[i][mask[i].bool()][None]).logits[0]
            torch.testing.assert_close(rewards[i], library, rtol=1e-4, atol=1e-4)


def test_pad_equal_to_eos(policy):
    """GPT-2's usual setup: the stop token belongs to the response, and its twins behind it do not."""
    r, other = rollout(policy, pad=STOP), rollout(policy, pad=PAD)
    assert r.ended.any()
    assert torch.equal(r.mask, other.mask) and torch.equal(r.old_logprobs, other.old_logprobs)
    last = r.mask.sum(1) - 1
    assert (r.responses[r.ended, last[r.ended]] == STOP).all()


def test_reward_with_pad_equal_to_eos_reads_eos(policy):
    """The library's pooling takes the token before EOS there; ours takes EOS."""
    model = tiny_model("gpt2", AutoModelForSequenceClassification)
    model.config.pad_token_id = STOP
    ids, mask = torch.tensor([[5, 6, 7, STOP, STOP]]), torch.tensor([[1, 1, 1, 1, 0]])
    with torch.no_grad():
        hidden = model.base_model(ids[:, :4]).last_hidden_state
        torch.testing.assert_close(ppo.read_reward(model, ids, mask), model.score(hidden[:, 3]), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(ids, attention_mask=mask).logits, model.score(hidden[:, 3]), atol=1e-3)


def test_without_stop_token_every_response_is_full(policy):
    r = rollout(policy, stop=None)
    assert r.mask.all() and not r.ended.any()


def test_generation_config_does_not_leak(policy):
    """A checkpoint's repetition penalty, top-k or sampling temperature are not the distribution that is trained."""
    policy, before = deepcopy(policy), rollout(policy).responses
    policy.generation_config.update(repetition_penalty=9.0, top_k=1, temperature=0.01, eos_token_id=5, max_length=3)
    assert torch.equal(before, rollout(policy).responses)


def test_selected_rows_give_the_same_numbers(policy, monkeypatch):
    """Padding that none of them needs is cut off, to multiples of 8; what stands on real tokens stays, and in place."""
    r, index = rollout(policy), torch.tensor([4, 1])
    monkeypatch.setitem(ppo.Rollout.__annotations__, "states", torch.Tensor)  # a fork's field, (B, D), is not cut
    r.states, r.scores, r.examples = torch.rand(6, 40), torch.rand(6), list("abcdef")
    r.rewards_by_name = {"length": torch.rand(6)}
    r.prompts, r.prompt_mask = F.pad(r.prompts, (9, 0), value=PAD), F.pad(r.prompt_mask, (9, 0), value=False)
    r.advantages = torch.arange(6)[:, None]  # (B, 1), as RLOO has them
    part = r.select(index)
    assert part.prompts.shape[1] == 8 < r.prompts.shape[1] == 16
    assert torch.equal(part.states, r.states[index]) and torch.equal(part.scores, r.scores[index])
    assert torch.equal(part.rewards_by_name["length"], r.rewards_by_name["length"][index])
    assert part.examples == ["e", "b"] and r.examples == list("abcdef")
    T = 8 if r.mask[index].sum(1).max() <= 8 else 12
    assert part.mask.shape[1] == part.old_logprobs.shape[1] == T and part.advantages.tolist() == [[4], [1]]
    assert torch.equal(part.old_logprobs, r.old_logprobs[index, :T]) and torch.equal(part.ended, r.ended[index])
    whole, trimmed = logits_of(policy, r)[index, :T], logits_of(policy, part)
    torch.testing.assert_close(trimmed[part.mask], whole[part.mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 4, 6])
def test_map_puts_each_part_in_its_rows(policy, size):
    """Rows of similar length are computed together, no more than asked for; the result has the rows' own order."""
    r, sizes = rollout(policy), []

    def logprobs(part):
        sizes.append(len(part.mask))
        return ppo.token_logprobs(logits_of(policy, part) / 0.9, part.responses)

    mapped = r.map(logprobs, ppo.Args(micro_batch_size=size))
    torch.testing.assert_close(mapped[r.mask], r.old_logprobs[r.mask], rtol=1e-4, atol=1e-4)
    assert max(sizes) == size and sum(sizes) == 6
    lengths = r.prompt_mask.sum(1) + r.mask.sum(1)
    assert lengths[r.by_length(torch.arange(6))].diff().ge(0).all()


def test_draws_follow_the_distribution():
    """40,000 draws: each frequency within five standard errors; logprobs are log-softmax's."""
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -2.0, 3.0, float("-inf"), 0.5])
    tokens, logprobs = ppo.sample_categorical(logits.expand(40_000, 6), torch.rand(40_000))
    p = logits.softmax(0)
    error = (torch.bincount(tokens, minlength=6) / 40_000 - p).abs()
    assert (error <= 5 * (p * (1 - p) / 40_000).sqrt()).all()
    torch.testing.assert_close(logprobs, p.log()[tokens])


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 1, exclude_max=True, width=32), st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40))
def test_no_draw_ever_takes_an_impossible_token(u, logits):
    """Whatever the uniform, also at the ends of its range, the token has a positive probability."""
    row = torch.tensor([[float("-inf"), *logits, float("-inf")]])
    token, logprob = ppo.sample_categorical(row, torch.tensor([u]))
    assert logprob.isfinite().all() and 0 < token.item() <= len(logits)


def test_draws_at_the_end_of_the_distribution():
    """The largest uniform there is, in 2,000 distributions whose last tokens may not be drawn."""
    logits = torch.randn(2000, 50, generator=torch.Generator().manual_seed(0))
    logits[:, 40:] = -1e9  # as good as forbidden
    tokens, logprobs = ppo.sample_categorical(logits, torch.full((2000,), 1 - 2**-24))
    assert (tokens < 40).all() and (logprobs > -20).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=5))
def test_response_mask(rows):
    """Against the definition, row by row."""
    mask, ended = ppo.response_mask(torch.tensor(rows), 2)
    for row, m, e in zip(rows, mask.tolist(), ended.tolist()):
        end = row.index(2) if 2 in row else len(row) - 1
        assert m == [t <= end for t in range(len(row))] and e == (2 in row)
