"""grpo.py: whole updates against TRL 1.16's, what changes nothing, and the shell game."""

import json
import math
from dataclasses import fields
from unittest import mock

import numpy as np
import pytest
import torch
from runs import run, watch
from safetensors.torch import load_file
from sources import ROOT
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import grpo

GOLDEN = ROOT / "tests/golden"
TRL = json.loads((GOLDEN / "trl116_grpo.json").read_text())
ARRAYS = load_file(GOLDEN / "trl116_grpo.safetensors")
TOKENIZER = AutoTokenizer.from_pretrained(GOLDEN / "digits")


# --- two steps, as TRL makes them


def close(a, b, tolerance=1e-4):
    a = torch.as_tensor(a, dtype=torch.float64)
    b = torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape
    assert (a - b).norm() <= tolerance * b.norm() + 1e-7


def golden_model(name):
    model = LlamaForCausalLM(LlamaConfig(**TRL["config"])).eval()
    weights = {key.partition("/")[2]: x for key, x in ARRAYS.items() if key.startswith(name + "/")}
    model.load_state_dict(weights)
    model.tokenizer = TOKENIZER
    return model


def golden_args(settings, **more):
    names = {field.name for field in fields(grpo.Args)}
    given = {name: x for name, x in settings.items() if name in names}
    weights = settings.get("reward_weights", (1.0,))
    parts = settings.get("steps_per_generation", 1) // settings["gradient_accumulation_steps"] or 1
    given |= dict(
        micro_batch_size=settings["per_device_train_batch_size"],
        num_mini_batches=parts,
        num_ppo_epochs=2 // parts,
        max_grad_norm=1e9,
        batch_size=len(TRL["completions"]),
        response_length=settings["max_completion_length"],
        reward_fn=("file:first", "file:second")[: len(weights)],
        reward_weights=tuple(weights),
        device="cpu",
    )
    return grpo.Args(**given | more)


def golden_rollout(args):
    """The episodes, scored by two functions."""
    prompts = [TOKENIZER(text)["input_ids"] for text in TRL["prompts"] for _ in range(args.num_generations)]
    prompts, prompt_mask = grpo.pad(prompts, TOKENIZER, args, "left")
    responses, mask = grpo.pad(TRL["completions"], TOKENIZER, args)
    ended = torch.tensor([row[-1] == 0 for row in TRL["completions"]])
    examples = [{"prompt": "", "input_ids": ids} for ids in prompts.tolist()]
    drawn = responses, mask, ended, ARRAYS["old_logprobs"]
    rollout = grpo.Rollout(prompts, prompt_mask, *drawn, examples, args.num_generations)
    table = torch.tensor(np.array(TRL["rewards"], np.float32))  # NaN for None
    functions = [lambda *_: table[0], lambda *_: table[1]]
    grpo.score_batch(rollout, dict(zip(args.reward_fn, functions)), TOKENIZER, args)
    return rollout


def advantage(rollout, scores, args):
    """Step 3, as in train."""
    rollout.advantages = grpo.group_advantages(scores, args.num_generations, args.scale_rewards)[:, None]
    rollout.loss_mask = rollout.mask
    if args.mask_truncated_completions:
        rollout.loss_mask = rollout.mask & rollout.ended[:, None]


def gradient_of(policy):
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


@pytest.mark.parametrize("case", [case for case in TRL["cases"] if case not in ("bnpo", "delta", "kl")])
def test_a_whole_update_is_trls(case, monkeypatch):
    """Advantages, and the loss, gradient, metrics and weights of two steps: on one batch, or on its halves."""
    theirs = TRL["cases"][case]
    policy = golden_model("policy")
    args = golden_args(theirs["settings"])
    rollout = golden_rollout(args)
    old = grpo.read_logprobs(policy, rollout, args)
    torch.testing.assert_close(old.masked_fill(~rollout.mask, 0.0), ARRAYS["old_logprobs"] * rollout.mask)
    advantage(rollout, rollout.scores, args)
    close(rollout.advantages.squeeze(1), ARRAYS[f"{case}/advantages"])
    if args.beta:
        rollout.ref_logprobs = grpo.read_logprobs(golden_model("reference"), rollout, args)

    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0)
    gradients = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(gradient_of(policy)))
    monkeypatch.setattr(torch, "randperm", torch.arange)
    stats = grpo.update(policy, optimizer, rollout, args)

    for number, gradient in enumerate(gradients):
        close(gradient, ARRAYS[f"{case}/gradient_{number}"])
    num_steps = len(theirs["metrics"])
    assert len(gradients) == num_steps
    assert stats["loss"] == pytest.approx(sum(theirs["losses"]) / num_steps, rel=1e-5, abs=2e-6)
    if len(theirs["losses"]) == num_steps:  # else theirs are means over micro-batches of means
        ours = stats | {"cispo_clip_ratio": stats["clip_ratio/high_mean"]}
        for name in ours.keys() & theirs["metrics"][0].keys() - {"loss"}:
            mean = sum(metrics[name] for metrics in theirs["metrics"]) / num_steps
            assert ours[name] == pytest.approx(mean, rel=1e-5, abs=1e-5), name
    close(torch.cat([p.detach().flatten() for p in policy.parameters()]), ARRAYS[f"{case}/weights"])
    ours = grpo.rollout_stats(rollout, args)
    shared = ours.keys() & theirs["metrics"][0].keys()
    assert len(shared) >= 12
    for name in shared:
        assert ours[name] == pytest.approx(theirs["metrics"][0][name], abs=1e-5), name
    assert stats["val/skipped_steps"] == 0


def test_pass_at_k_is_by_the_first_function():
    args = golden_args(TRL["cases"]["weights"]["settings"])
    rollout = golden_rollout(args)
    first = torch.tensor([0, 1, 0, 0, 0.9, math.nan, 0, 0, 0, 0, 0, 3])
    rollout.reward_table = torch.stack([first, torch.ones(12)], 1)
    assert grpo.rollout_stats(rollout, args)["pass@4"] == pytest.approx(2 / 3)


# --- what changes nothing

SCORES = torch.tensor([1.0, 0, 0, 2, 0, 0, 0, 1, 3, 1, 1, 0])


def an_update(scores, rows=None, in_loss=True, ref_padding=0.0, old=0.0, **settings):
    """The gradient of one mini-batch of the golden episodes with other scores, and what is logged of it."""
    policy = golden_model("policy")
    given = dict(num_ppo_epochs=1, num_mini_batches=1, epsilon=0.05, epsilon_high=0.1) | settings
    args = golden_args(TRL["cases"]["dapo"]["settings"], **given)
    rollout = golden_rollout(args)
    rollout.old_logprobs = rollout.old_logprobs + torch.linspace(-0.2, 0.2, 72).view(12, 6).sin() + old
    advantage(rollout, scores, args)
    rollout.loss_mask = rollout.mask & in_loss
    rollout.ref_logprobs = (rollout.old_logprobs - 0.3).masked_fill(~rollout.mask, ref_padding)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    gradients = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(gradient_of(policy)))
    with mock.patch("torch.randperm", lambda n: torch.arange(n) if rows is None else rows):
        stats = grpo.update(policy, optimizer, rollout, args)
    return *gradients, stats


KINDS = [("dapo", "token"), ("grpo", "sequence"), ("dr_grpo", "sequence"), ("cispo", "token")]


@pytest.mark.parametrize("loss_type, level", KINDS)
def test_a_gradient_does_not_change_with_constants_order_padding_and_cuts(loss_type, level):
    """A constant added to the scores of a group; another order of rows; what the reference says of padding; how the
    batch is cut; and a micro-batch of which nothing is in the loss."""
    settings = dict(loss_type=loss_type, importance_sampling_level=level, beta=0.1)
    plain, stats = an_update(SCORES, **settings)
    assert plain.norm() > 1e-3
    shift = torch.tensor([5.0, -3, 7]).repeat_interleave(4)
    close(an_update(SCORES + shift, **settings)[0], plain)
    close(an_update(SCORES, torch.randperm(12), **settings)[0], plain)
    close(an_update(SCORES, ref_padding=1e3, **settings)[0], plain)
    cut, cut_stats = an_update(SCORES, micro_batch_size=5, **settings)
    close(cut, plain)
    assert stats == pytest.approx(cut_stats, rel=1e-4, abs=1e-6)
    settings["in_loss"] = torch.arange(12)[:, None] >= 4
    part, stats = an_update(SCORES, micro_batch_size=4, **settings)
    assert part.norm() > 1e-3 and all(map(math.isfinite, stats.values()))
    close(an_update(SCORES, micro_batch_size=12, **settings)[0], part)


def test_bounds_of_the_ratio(monkeypatch):
    """Either may be the narrower one. CISPO has an upper bound alone; TRL advises 5."""
    bounds = []
    watch(monkeypatch, grpo, "surrogate_loss", lambda _, *given: bounds.append(given[3:5]))
    for kind, high in [("cispo", None), ("cispo", 2.0), ("dapo", None), ("dapo", 0.5), ("dapo", 0.125)]:
        an_update(SCORES, loss_type=kind, epsilon=0.25, epsilon_high=high, micro_batch_size=12)
    assert bounds == [(0, 5), (0, 2), (0.75, 1.25), (0.75, 1.5), (0.75, 1.125)]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_shares_are_of_rows_in_the_loss(level):
    """Every ratio is too low, and every advantage below 0 but that of a row that is masked."""
    scores = torch.tensor([0.0, 9, 0, 0] * 3)
    in_loss = torch.tensor([True, False, True, True] * 3)[:, None]
    settings = dict(importance_sampling_level=level, loss_type="grpo", old=math.log(2))
    _, stats = an_update(scores, in_loss=in_loss, **settings)
    assert (stats["clip_ratio/low_mean"], stats["clip_ratio/high_mean"]) == (1, 0)
    assert stats["policy/approxkl_avg"] == pytest.approx(0.5 * math.log(2) ** 2, rel=0.1)


# --- learning


SHORT = dict(total_episodes=16 * 64, learning_rate=2e-3)
GSPO = dict(importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-3, total_episodes=40 * 64)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SHORT, GSPO, SHORT | dict(beta=0.01)])
def test_grpo_learns(tmp_path, settings):
    """The share of right answers in the last 4 of 16 updates or more; in the first it is 0.4.

    Over three seeds and all kinds it was 0.73 to 0.96; with the advantages' sign turned, 0.25 to 0.28.
    """
    lines = run(grpo, tmp_path, **settings)
    assert sum(line["reward"] for line in lines[-4:]) / 4 > 0.6
