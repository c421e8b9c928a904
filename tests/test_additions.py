"""Additions to PPO and RLOO: score scaling, a shared critic, pretraining texts, a moving average, routers."""

import json
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from numbers_of_others import close, golden
from tiny import tiny_model, tiny_rollout
from torch import nn

import grpo
import ppo
import rloo

# --- Score scaling


def test_scaled_scores_against_trl07():
    _, o = golden("trl0711_score_scaling")
    scaled = dict(use_score_scaling=True)
    variants = {
        "scores": {},
        "scaled_only": scaled,
        "scaled_and_normed": scaled | dict(use_score_norm=True),
        "scaled_normed_clip0p5": scaled | dict(use_score_norm=True, score_clip=0.5),
    }
    before = [0, 0.0, 0.0]
    after = None
    for step in o["sequence"]:
        for name, settings in variants.items():
            moments = list(before)
            scores = ppo.scale_scores(step["scores"], moments, ppo.Args(**settings))
            close(scores, step[name], rtol=1e-5, atol=1e-6)
            after = moments if settings else after
        before = after
    assert len(json.loads(json.dumps(before))) == 3  # however long the run


# --- Beside the algorithm


def test_ptx_loss_is_openrlhfs(monkeypatch):
    """With each text drawn once, in their order; a token that has no label is not real, there a first one, too."""
    i, o = golden("openrlhf031_losses_rewards_gae")
    x = i["lm_logits"].float().requires_grad_()
    rows = (x[n : n + 1] for n in range(len(x)))
    policy = lambda **_: SimpleNamespace(logits=next(rows))  # noqa: E731
    policy.tokenizer = None
    monkeypatch.setattr(torch, "randint", lambda high, size: torch.arange(high).expand(size))
    monkeypatch.setattr(ppo, "pad", lambda texts, *_: (torch.stack(texts).clamp(min=0), torch.stack(texts) != -100))
    args = ppo.Args(ptx_coef=3.0, micro_batch_size=1, batch_size=2 * len(x), num_mini_batches=2, device="cpu")
    value = ppo.pretrain_gradient(policy, list(i["lm_labels"].long()), args)
    close(value, o["gptlm_loss"], rtol=1e-5)
    y = i["lm_logits"].float().requires_grad_()
    nn.functional.cross_entropy(y[:, :-1].flatten(0, 1), i["lm_labels"][:, 1:].flatten().long()).backward()
    close(x.grad, 3.0 * y.grad, rtol=1e-5, atol=1e-7)


def test_moving_average_against_openrlhf():
    i, o = golden("openrlhf031_ema")
    policy = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(policy.weight)
    ema = deepcopy(policy)
    for step in o["ema_sequence"]:
        policy.weight.data = step["param"][None]
        ppo.move_average(ema, policy, i["ema_beta"])
        close(ema.weight[0].detach(), step["ema"])


def gradient_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("module", [ppo, rloo, grpo], ids=["ppo", "rloo", "grpo"])
def test_the_router_loss_is_the_librarys(module):
    """With advantages 0 nothing but it has a gradient: the coefficient times that of the model's own aux_loss."""
    policy = tiny_model("mixtral")
    rollout = tiny_rollout(policy)
    zeros = torch.zeros_like(rollout.old_logprobs)
    rollout.ref_logprobs, rollout.values, rollout.returns = rollout.old_logprobs, zeros, zeros
    rollout.advantages = zeros if module is ppo else zeros[:, :1]
    given = dict(num_ppo_epochs=1, max_grad_norm=1e9, micro_batch_size=6, temperature=0.9, device="cpu")
    args = module.Args(aux_loss_coef=0.5, **given)
    models = [policy]
    ours = {}
    if module is ppo:
        critic = ppo.Critic(deepcopy(policy.base_model), nn.Linear(16, 1))
        models.append(critic)
    optimizer = torch.optim.SGD([{"params": model.parameters()} for model in models], lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: ours.update(gradient_of(policy)))
    if module is grpo:
        rollout.loss_mask = rollout.mask
        grpo.update(policy, optimizer, rollout, args)
    else:
        module.update(*models, None, optimizer, rollout, [], args)
    policy.zero_grad()
    (0.5 * policy(**rollout.inputs(), output_router_logits=True).aux_loss).backward()
    assert any("gate" in name for name in ours)
    for name, p in policy.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(ours[name], p.grad, rtol=1e-4, atol=1e-7)
