"""What ppo.py and diffs of docs/fork.md have beyond lecture/ppo.py, written into a copy of the short file by hand.

A run of five updates is made twice in float64, by a fork of ppo.py with settings and by the short file with edits. All
metrics agree, and the weights that are saved. test_lecture.py does the same for what both files have.
"""

import sys

import pytest
import torch
from float64 import float64, in_float64, load_in_float64
from runs import lines_of, short_form, weights_of
from sources import ROOT
from sources import lines_of as lines_of_file

sys.path.insert(0, str(ROOT / "tools"))
from make_fork import fork  # noqa: E402

SETTINGS = dict(batch_size=8, total_episodes=40, response_length=8, temperature=0.9, learning_rate=2e-3, kl_coef=0.3)
SETTINGS |= dict(num_ppo_epochs=2, num_mini_batches=2, missing_eos_penalty=0.4)
DIFFS = ["Whitened rewards", "Stop tokens of one's own", "KL estimators", "Adaptive KL"]
OTHERS = dict(reward_weights=(1.0, 0.5), whiten_rewards=True, stop_token=(".",))  # that the short file does not have
OTHERS |= dict(kl_estimator="k3", kl_target=0.065, kl_horizon=40)
OTHERS |= dict(critic_learning_rate=5e-4, lr_scheduler_type="cosine", warmup_ratio=0.2)
OTHERS |= dict(weight_decay=0.1, adam_betas=(0.8, 0.95), adam_epsilon=1e-3, max_grad_norm=0.02)
OTHERS |= dict(num_sample_generations=0, num_eval_prompts=0, micro_batch_size=3, device="cpu")

# Lines of the short file, and what stands there instead
AFTER_SCORE = "    scores = torch.where(ended, scores, scores - args.missing_eos_penalty)  # (B,)"
KL = "    kl = old_logprobs - ref_logprobs  # (B, T) of the sampled tokens; its expectation is the KL"
SHAPE = "    rewards = shape_rewards(scores, kl, mask, args.kl_coef)  # (B, T)"
PARAMETERS = "    [*policy.parameters(), *critic.parameters()], lr=args.learning_rate, weight_decay=0.0"
RATE = '    optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (update - 1) / num_updates)'
CLIP_ONE = "                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
LOG = "            logs.append({name: x.detach()[mask[rows]].double() for name, x in seen.items()})"
EPOCH = "    for _ in range(args.num_ppo_epochs):"
HISTORY = "    history.append(stats)"
EDITS = [
    ("import time\n", "import math, time\n"),
    ("    P, stop = ids.shape[1], tokenizer.eos_token_id", """
    P, stop = ids.shape[1], tokenizer.convert_tokens_to_ids(".")"""),
    (AFTER_SCORE, AFTER_SCORE + """
    texts = [tokenizer.decode(x[m > 0], skip_special_tokens=True) for x, m in zip(ids, attention_mask)]
    scores += 0.5 * torch.tensor([len(text) for text in texts]) / 100
"""),
    (KL, "    kl = (ref_logprobs - old_logprobs).exp() - 1 - (ref_logprobs - old_logprobs)"),
    (SHAPE, SHAPE + """
    mean, variance = rewards[mask].mean(), rewards[mask].var()
    rewards = torch.where(mask, (rewards - mean) / (variance + 1e-8).sqrt() + mean, 0.0)
"""),
    (PARAMETERS, """
    [{"params": list(model.parameters())} for model in (policy, critic)],
    weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3,
"""),
    (RATE, """
    share = [0, *(0.5 + 0.5 * math.cos(math.pi * i / 4) for i in range(4))][update - 1]
    optimizer.param_groups[0]["lr"] = args.learning_rate * share
    optimizer.param_groups[1]["lr"] = 5e-4 * share
"""),
    (EPOCH, "    norms, ratios = [], []\n" + EPOCH),
    (CLIP_ONE, CLIP_ONE.replace("torch", "norms += [torch", 1).replace("1.0", "0.02") + "]"),
    (LOG, """
            seen |= {"policy/approxkl_avg": 0.5 * (logprobs - old_logprobs[rows]) ** 2}
            p = (logits[:, P - 1 : -1] / args.temperature).log_softmax(-1)
            seen |= {"policy/entropy_avg": -(p.exp() * p).sum(-1)}
            ratios.append(ratio.detach()[mask[rows]])
""" + LOG),
    (HISTORY, """
    per_row = lambda x: (x * mask).sum(1).mean().item()
    stats["val/ratio_var"] = torch.cat(ratios).var(correction=0).item()
    stats["policy/first_ratio_error"] = (ratios[0] - 1).abs().mean().item()
    stats["objective/entropy"] = per_row(-old_logprobs)
    stats["objective/kl_coef"], stats["episode"] = args.kl_coef, update * B
    stats["objective/non_score_reward"] = -args.kl_coef * stats["objective/kl"]
    stats["objective/rlhf_reward"] = stats["objective/scores"] - args.kl_coef * stats["objective/kl"]
    stats["objective/scores_std"] = scores.std(correction=0).item()
    stats["val/num_eos_tokens"] = ended.sum().item()
    stats["val/response_length"] = mask.sum(1).double().mean().item()
    stats["val/explained_variance"] = 1 - ((returns - old_values)[mask].var() / returns[mask].var()).item()
    stats["lr"] = optimizer.param_groups[0]["lr"]
    stats["policy/grad_norm"], stats["val/grad_norm"] = (sum(x).item() / len(x) for x in (norms[::2], norms[1::2]))
    args.kl_coef *= 1 + max(-0.2, min(0.2, stats["objective/kl"] / 0.065 - 1)) * B / 40
""" + HISTORY),
]  # fmt: skip


def test_by_hand(tmp_path, monkeypatch):
    """With prompts that do not divide into batches."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines_of_file("toy/data/prompts/train.jsonl")[:11]))
    (tmp_path / "gold.py").write_text("""
def letters(prompts, completions, **_):
    return [len(x + y) / 100 for x, y in zip(prompts, completions)]""")
    text = in_float64("lecture/ppo.py").replace(LOG.replace("double()", "float()"), LOG)
    for old, new in EDITS:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    common = SETTINGS | dict(dataset=f"{tmp_path}/prompts.jsonl")
    monkeypatch.setattr("float64.text_of", lambda file: fork(DIFFS, file))
    with float64():
        ppo = load_in_float64("ppo", monkeypatch)
        reward_fn = ("reward_model", f"{tmp_path}/gold.py:letters")
        ppo.train(ppo.Args(**common | OTHERS, reward_fn=reward_fn, output_dir=str(tmp_path / "ppo")))
        with short_form("ppo", **common, output_dir=tmp_path / "short") as names:
            exec(compile(text, "lecture/ppo.py", "exec"), names)
    for line, short in zip(lines_of(tmp_path / "ppo"), names["history"], strict=True):
        assert line["val/skipped_steps"] == 0
        assert {name: line[name] for name in short} == pytest.approx(short, rel=1e-8, abs=1e-8)
    ours, by_hand = weights_of(tmp_path / "ppo"), weights_of(tmp_path / "short")
    assert ours.keys() == by_hand.keys()
    assert all(torch.allclose(ours[name], by_hand[name], rtol=0, atol=1e-8) for name in ours)
