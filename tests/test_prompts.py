"""Prompts that several rows share are read once, and that changes no number."""

import pytest
import torch
from runs import GOLD, run, slow_but
from tiny import ARCHITECTURES, tiny_model, tiny_rollout

import grpo
import rloo

SCRIPTS = {"rloo": rloo, "grpo": grpo}
WITHOUT = {"lfm2", "qwen3_next"}  # have layers that are no attention
COMMON = {"gpt2", "llama", "gemma3_text", "gpt_oss"}  # positions learned and rotary, windows, experts


def read_rows_whole(monkeypatch):
    """Lets both scripts read the prompt of each row."""
    for script in SCRIPTS.values():
        monkeypatch.setattr(script, "can_share_prompts", lambda *_: False)


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
def test_shared_prompts_change_nothing(kind, bf16, monkeypatch):
    """With left padding, windows and experts: log-probabilities and their gradient."""
    policy = tiny_model(kind)
    rollout = groups(policy)
    args = grpo.Args(temperature=0.9, bf16=bf16, device="cpu")
    shared, gradient, sizes = read(policy, rollout, args)
    read_rows_whole(monkeypatch)
    whole, whole_gradient, whole_sizes = read(policy, rollout, args)
    torch.testing.assert_close(shared, whole, rtol=0, atol=5e-2 if bf16 else 1e-5)
    assert (gradient - whole_gradient).norm() < (3e-2 if bf16 else 1e-5) * whole_gradient.norm()
    P, T = rollout.prompts.shape[1], rollout.mask.shape[1]
    assert whole_sizes == [6 * (P + T)]
    assert sizes == (whole_sizes if kind in WITHOUT else [4 * P, 6 * T])


CASES = {"groups cut by mini-batches": dict(num_mini_batches=2, micro_batch_size=3), "adapter": dict(lora_r=2)}
VOWEL = """
def starts_with_a_vowel(completions, **columns):
    return [float(text.strip()[:1].lower() in "aeiou") for text in completions]
"""


@pytest.mark.parametrize("name, case", [("rloo", "groups cut by mini-batches"), ("grpo", "adapter")])
@pytest.mark.filterwarnings("ignore")
def test_a_run_with_shared_prompts_is_the_one_without(name, case, tiny, tmp_path, monkeypatch):
    """Responses, rewards and updates, with groups whose scores are equal and groups whose scores differ."""
    settings = tiny[name] | dict(model="toy/sft", dataset="toy/data/prompts")
    settings |= dict(batch_size=12, total_episodes=24, num_ppo_epochs=2, response_length=8) | CASES[case]
    settings["adam_epsilon"] = 1e-3  # else a gradient that is 0 but for rounding makes a whole step
    settings |= dict(num_generations=3, beta=0.1) if name == "grpo" else dict(rloo_k=3, kl_coef=0.0)
    (tmp_path / "r.py").write_text(VOWEL)
    settings |= dict(reward_fn=(f"{tmp_path}/r.py:starts_with_a_vowel", GOLD))
    shared = run(SCRIPTS[name], tmp_path / "shared", **settings)
    read_rows_whole(monkeypatch)
    whole = run(SCRIPTS[name], tmp_path / "whole", **settings)
    for ours, theirs in zip(shared, whole, strict=True):
        for metric in [name for name in ours if not name.startswith(("perf/", "eps"))]:
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-3, abs=1e-4), metric
