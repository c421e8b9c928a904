"""Step 1: the tokens that are drawn for prompts, their mask, and the micro-batches of a rollout."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from tiny import PAD, STOP, VOCAB, tiny_model, tiny_rollout, uniforms

import ppo


@pytest.fixture(params=["gpt2", "llama"], scope="module")
def policy(request):
    """Positions learned and rotary; test_models.py has the other architectures."""
    return tiny_model(request.param)


def test_response_mask():
    rows = list(itertools.product(range(3), repeat=5))
    mask, ended = ppo.response_mask(torch.tensor(rows), [2])
    for row, m, e in zip(rows, mask.tolist(), ended.tolist()):
        end = row.index(2) if 2 in row else len(row) - 1
        assert m == [t <= end for t in range(5)]
        assert e == (2 in row)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    """Of 10,000 even steps from 0 to 1, each token gets its share to within a step at both of its ends."""
    logits = torch.randn(1, 7, dtype=torch.float64).expand(10_000, -1)
    tokens, logprobs = ppo.sample_categorical(logits, (torch.arange(10_000).double() + 0.5) / 10_000)
    p = logits[0].softmax(0)
    assert (tokens.bincount(minlength=7) / 10_000 - p).abs().max() <= 2e-4
    torch.testing.assert_close(logprobs, p.log()[tokens])


@pytest.mark.parametrize("uniform, forbidden", [(0.0, slice(10)), (1 - 2**-24, slice(40, None))])
def test_draws_at_the_ends_of_the_distribution(uniform, forbidden):
    """The smallest and the largest uniform, in 2,000 distributions whose first or last tokens have probability 0."""
    logits = torch.randn(2000, 50)
    logits[:, forbidden] = -1e9
    tokens, logprobs = ppo.sample_categorical(logits, torch.full((2000,), uniform))
    assert (logprobs > -20).all()


def test_padding_of_prompts_may_hold_any_token(policy):
    r = tiny_rollout(policy)
    garbage = torch.where(r.prompt_mask, r.prompts, torch.randint(VOCAB, r.prompts.shape))
    other = ppo.sample(policy, garbage, r.prompt_mask, uniforms(), 0.9)
    assert not torch.equal(garbage, r.prompts)
    for ours, expected in zip(other, (r.responses, r.mask, r.ended, r.old_logprobs)):
        assert torch.equal(ours, expected)


def test_a_response_ends_with_the_first_of_several_stop_tokens(policy):
    r = tiny_rollout(policy)
    policy.stop_token_ids = [STOP, 5]
    responses, masks, ended, logprobs = ppo.sample(policy, r.prompts, r.prompt_mask, uniforms(), 0.9)
    for full, real, response, mask, is_over in zip(r.responses, r.mask, responses, masks, ended):
        row = full[real].tolist()
        end = min([row.index(stop) + 1 for stop in (STOP, 5) if stop in row] or [len(row)])
        assert response[mask].tolist() == row[:end] and is_over == (row[end - 1] in (STOP, 5))
    assert (responses == 5).any() and (responses == STOP).any()
    assert (responses[~masks] == PAD).all() and (logprobs[~masks] == 0).all()


@pytest.mark.parametrize("size", [1, 4, 6])
def test_micro_batches_give_results_in_the_order_of_the_rows(policy, size):
    """Rows of similar length are computed together, at most `size` of them, without columns that none of them needs."""
    r = tiny_rollout(policy)
    r.prompts, r.prompt_mask = (F.pad(x, (9, 0)) for x in (r.prompts, r.prompt_mask))
    args = ppo.Args(micro_batch_size=size, temperature=0.9, device="cpu")
    sizes = []

    def logprobs(part):
        assert part.prompt_mask.sum(1).max() == part.prompts.shape[1] < r.prompts.shape[1]
        assert len(part.examples) == len(part.mask)
        sizes.append(len(part.mask))
        return ppo.logprobs_under(policy, part, args)[0]

    joined = r.in_micro_batches(logprobs, args)
    torch.testing.assert_close(joined[r.mask], r.old_logprobs[r.mask], rtol=1e-4, atol=1e-4)
    assert max(sizes) <= size and len(sizes) == math.ceil(6 / size)
    lengths = r.prompt_mask.sum(1) + r.mask.sum(1)
    counted = r.in_micro_batches(lambda part: part.joined()[1].sum(1, keepdim=True).float(), args)[:, 0]
    assert torch.equal(counted, lengths.float())
    parts = torch.cat(r.micro_batches(torch.arange(6), args))
    assert lengths[parts].diff().ge(0).all() and sorted(parts.tolist()) == list(range(6))
