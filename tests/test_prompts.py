"""Prompts that several rows share are read once, and that changes no number."""

import pytest
import torch
from runs import slow_but
from tiny import ARCHITECTURES, tiny_model, tiny_rollout

import grpo

WITHOUT = {"lfm2", "qwen3_next"}  # have layers that are no attention
COMMON = {"gpt2", "llama", "gemma3_text", "gpt_oss"}  # positions learned and rotary, windows, experts


def groups(policy):
    """Six rows with four prompts: rows 0 and 2 share one, and so do 1 and 5, where it is a single token."""
    r = tiny_rollout(policy)
    for x in (r.prompts, r.prompt_mask):
        x[2] = x[0]
        x[5] = x[1]
    return grpo.Rollout(r.prompts, r.prompt_mask, r.responses, r.mask, r.ended, r.old_logprobs, r.examples, 2)


def read(policy, rollout, args):
    """Log-probabilities, the gradient of a random combination of them, and how many tokens each pass has read."""
    sizes = []
    hook = policy.register_forward_pre_hook(lambda *x: sizes.append(x[2]["input_ids"].numel()), with_kwargs=True)
    policy.zero_grad()
    logprobs, _ = grpo.logprobs_under(policy, rollout, args)
    weights = torch.rand(logprobs.shape, generator=torch.Generator().manual_seed(0))
    grpo.masked_sum(logprobs * weights, rollout.mask).backward()
    hook.remove()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return logprobs.masked_fill(~rollout.mask, 0.0).detach(), gradient, sizes


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", slow_but(["gpt2", "gemma3_text", "gpt_oss", "lfm2"], ARCHITECTURES))
def test_shared_prompts_change_nothing(kind, bf16):
    """With left padding, windows and experts: log-probabilities and their gradient."""
    policy = tiny_model(kind)
    rollout = groups(policy)
    args = grpo.Args(temperature=0.9, bf16=bf16, device="cpu")
    shared, gradient, sizes = read(policy, rollout, args)
    args.gradient_checkpointing = True  # reads each prompt for itself
    whole, whole_gradient, whole_sizes = read(policy, rollout, args)
    torch.testing.assert_close(shared, whole, rtol=0, atol=5e-2 if bf16 else 1e-5)
    assert (gradient - whole_gradient).norm() < (3e-2 if bf16 else 1e-5) * whole_gradient.norm()
    P, T = rollout.prompts.shape[1], rollout.mask.shape[1]
    assert whole_sizes == [6 * (P + T)]
    assert sizes == (whole_sizes if kind in WITHOUT else [4 * P, 6 * T])


def test_the_sampler_reads_a_prompt_once():
    """Of six rows with four prompts of P columns, at the first token."""
    policy = tiny_model("gpt2")
    policy.stop_token_ids = [2]
    rollout = groups(policy)
    sizes = []
    policy.register_forward_pre_hook(lambda *x: sizes.append(x[2]["input_ids"].shape), with_kwargs=True)
    uniforms = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    grpo.sample(policy, rollout.prompts, rollout.prompt_mask, uniforms, 1.0)
    assert sizes[0] == (4, rollout.prompts.shape[1])
