"""Step 1: prompts, the tokens drawn for them, their mask, and Rollout, which holds them all."""

import math
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import PAD, STOP, logits_of, tiny_model, tiny_rollout, uniforms

import ppo


@pytest.fixture(params=["gpt2", "llama"], scope="module")
def policy(request):
    """Positions learned and rotary; test_models.py has the other architectures."""
    return tiny_model(request.param)


# --- response_mask


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=5))
def test_response_mask(rows):
    mask, ended = ppo.response_mask(torch.tensor(rows), [2])
    for row, m, e in zip(rows, mask.tolist(), ended.tolist()):
        end = row.index(2) if 2 in row else len(row) - 1
        assert m == [t <= end for t in range(len(row))]
        assert e == (2 in row)


# --- sample_categorical


@pytest.mark.parametrize("uniform, forbidden", [(0.0, slice(10)), (1 - 2**-24, slice(40, None))])
def test_draws_at_the_ends_of_the_distribution(uniform, forbidden):
    """The smallest and the largest uniform, in 2,000 distributions whose first or last tokens may not be drawn."""
    logits = torch.randn(2000, 50)
    logits[:, forbidden] = -1e9  # as good as forbidden
    tokens, logprobs = ppo.sample_categorical(logits, torch.full((2000,), uniform))
    assert (logprobs > -20).all()


# --- sample


def test_the_mask_has_a_one_for_each_token_that_was_written(policy):
    """Causality hides the rest from some kinds of attention, but flash attention knows the keys by the mask alone."""

    def look(module, args, given):
        num_tokens = given["attention_mask"].sum(1).clamp(min=1)  # a prompt of one token is read later
        assert torch.equal(num_tokens, given["position_ids"][:, -1] + 1)

    hook = policy.register_forward_pre_hook(look, with_kwargs=True)
    tiny_rollout(policy)
    hook.remove()


def test_of_equal_prompts_one_is_read(policy):
    """What each draws is what it would draw alone; the same tokens behind another mask are another prompt."""
    r = tiny_rollout(policy)
    ids, mask = r.prompts[[5, 5, 4, 5]], r.prompt_mask[[5, 5, 4, 5]]
    mask[1, :4] = False
    passes = []
    hook = policy.register_forward_pre_hook(lambda *x: passes.append(len(x[2]["input_ids"])), with_kwargs=True)
    together = ppo.sample(policy, ids, mask, uniforms()[:4], 0.9)
    hook.remove()
    assert passes[:2] == [3, 4]
    alone = [ppo.sample(policy, ids[[i]], mask[[i]], uniforms()[[i]], 0.9) for i in range(4)]
    assert torch.equal(together[0], torch.cat([responses for responses, *_ in alone]))


def test_prompts_of_one_token(policy):
    """Are as good as the same ones with padding."""
    r = tiny_rollout(policy)
    r.prompt_mask[:, :-1] = False
    padded = ppo.sample(policy, r.prompts, r.prompt_mask, uniforms(), 0.9)
    assert torch.equal(ppo.sample(policy, r.prompts[:, -1:], r.prompt_mask[:, -1:], uniforms(), 0.9)[0], padded[0])


def test_a_response_ends_with_the_first_of_several_stop_tokens(policy):
    r = tiny_rollout(policy)
    policy.stop_token_ids = [STOP, 5]
    drawn = ppo.sample(policy, r.prompts, r.prompt_mask, uniforms(), 0.9)
    for full, real, response, mask in zip(r.responses, r.mask, *drawn[:2]):
        row = full[real].tolist()
        end = min([row.index(stop) + 1 for stop in (STOP, 5) if stop in row] or [len(row)])
        assert response[mask].tolist() == row[:end]
    assert (drawn[0] == 5).any() and (drawn[0] == STOP).any()


def test_sampling_ends_with_the_last_response(policy):
    """Later tokens would be masked."""
    r = tiny_rollout(policy)
    policy.stop_token_ids = list(range(policy.config.vocab_size))
    passes = []
    hook = policy.register_forward_pre_hook(lambda *_: passes.append(1))
    responses, mask, *_ = ppo.sample(policy, r.prompts, r.prompt_mask, uniforms(), 0.9)
    hook.remove()
    assert len(passes) == 2 and mask.sum() == len(responses)  # prompts, and one token


# --- sample_batch


def test_batches_are_pieces_of_passes():
    """Of one endless sequence, in whichever order and of whatever size they are asked for; each seed has its own."""
    rows = list("abcdefg")
    sequences = {seed: [ppo.batch(rows, n, 1, seed)[0] for n in range(42)] for seed in (5, 6)}
    passes = [tuple(x[i : i + 7]) for x in sequences.values() for i in range(0, 42, 7)]
    assert all(sorted(order) == rows for order in passes)
    assert len(set(passes)) == 12
    for size in (2, 5, 7, 16):
        for n in reversed(range(42 // size)):
            assert ppo.batch(rows, n, size, 5) == sequences[5][n * size : (n + 1) * size]


def test_the_limit_of_a_response_includes_both_ends(monkeypatch):
    drawn = set()

    def sample(policy, prompts, prompt_mask, uniforms, temperature):
        drawn.add(uniforms.shape[1])
        return prompts, prompt_mask, prompt_mask.any(1), uniforms

    monkeypatch.setattr(ppo, "sample", sample)
    monkeypatch.setattr(ppo, "pad", lambda rows, *_: (torch.tensor(rows), torch.ones(1, 2).bool()))
    policy = torch.nn.Module()
    policy.tokenizer = None
    args = ppo.Args(response_length=8, response_length_min=7, local_rollout_forward_batch_size=64)
    for _ in range(40):
        ppo.sample_batch(policy, [{"input_ids": [5, 6]}], args)
    assert drawn == {7, 8}


def test_a_batch_may_be_sampled_in_parts(policy, monkeypatch):
    """Each row has random numbers of its own."""
    monkeypatch.setattr(ppo, "pad", lambda rows, *_: (torch.tensor(rows), torch.ones(6, 2).bool()))
    policy = deepcopy(policy)
    policy.tokenizer, policy.stop_token_ids = SimpleNamespace(pad_token_id=PAD), [STOP]
    responses = []
    for n in (6, 4):
        torch.manual_seed(1)
        args = ppo.Args(response_length=8, local_rollout_forward_batch_size=n, device="cpu")
        responses.append(ppo.sample_batch(policy, [{"input_ids": [5, 6 + i]} for i in range(6)], args).responses)
    assert torch.equal(*responses)


# --- Rollout


@pytest.mark.parametrize("size", [1, 4, 6])
def test_map_puts_each_part_in_its_rows(policy, size):
    """Rows of similar length are computed together, no more than asked for; the result has the rows' own order.

    Of padding that none of them needs, a multiple of 8 is cut off.
    """
    r = tiny_rollout(policy)
    r = replace(r, prompts=F.pad(r.prompts, (9, 0)), prompt_mask=F.pad(r.prompt_mask, (9, 0)))
    sizes = []

    def logprobs(part):
        assert part.prompts.shape[1] == 8 < r.prompts.shape[1]
        sizes.append(len(part.mask))
        return ppo.token_logprobs(logits_of(policy, part) / 0.9, part.responses)

    args = ppo.Args(micro_batch_size=size)
    mapped = r.in_micro_batches(logprobs, args)
    torch.testing.assert_close(mapped[r.mask], r.old_logprobs[r.mask], rtol=1e-4, atol=1e-4)
    assert max(sizes) <= size and sum(sizes) == 6 and len(sizes) == math.ceil(6 / size)
    lengths = r.prompt_mask.sum(1) + r.mask.sum(1)
    assert (
        r.in_micro_batches(lambda part: part.prompt_mask.sum(1) + part.mask.sum(1), args).tolist() == lengths.tolist()
    )
    assert lengths[r.by_length(torch.arange(6))].diff().ge(0).all()
