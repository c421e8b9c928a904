"""What ppo.py has beyond lecture/ppo.py, written into a copy of the short file by hand: both compute the same numbers.

A run of three updates is made twice in float64, by ppo.py with settings and by the short file with edits. All metrics
agree, and the weights that are saved. test_lecture.py does the same for what both files have.
"""

import json
from contextlib import nullcontext

import pytest
import torch
from float64 import float64, in_float64, load_in_float64
from runs import lines_of, short_form, weights_of, write_rows
from sources import ROOT, lines_of as lines_of_file, text_of
from tiny import tiny_model
from transformers import AutoTokenizer

import ppo

BASE = dict(batch_size=8, total_episodes=24, response_length=8, temperature=0.9, learning_rate=2e-3, kl_coef=0.3)
BASE |= dict(num_ppo_epochs=2, num_mini_batches=2, missing_eos_penalty=0.4)

# More metrics. `after(line, code)` puts code behind a line of the short file; `instead` replaces a line by code
AFTER_SCORE = "    scores = torch.where(ended, scores, scores - args.missing_eos_penalty)  # (B,)"
KL = "    kl = old_logprobs - ref_logprobs  # (B, T) of the sampled tokens; its expectation is the KL"
SHAPE = "    rewards = shape_rewards(scores, kl, mask, args.kl_coef)  # (B, T)"
CRITIC = "critic = deepcopy(reward_model)  # a start that knows the rewards; rloo.py has no critic"
PARAMETERS = "    [*policy.parameters(), *critic.parameters()], lr=args.learning_rate, weight_decay=0.0"
RATE = '    optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (update - 1) / num_updates)'
LOGITS = "            logits = forward(policy, ids[rows], attention_mask[rows]).logits  # (b, P+T, V)"
CLIP = "            for model in (policy, critic):  # apart, or one large gradient would shrink both"
CLIP_ONE = "                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
STEP = "            optimizer.step()"
LOG = "            logs.append({name: x.detach()[mask[rows]].double() for name, x in seen.items()})"
EPOCH = "    for _ in range(args.num_ppo_epochs):"
HISTORY = "    history.append(stats)"
MORE_METRICS = [
    (EPOCH, "    norms, ratios = [], []\n" + EPOCH),
    (CLIP_ONE, CLIP_ONE.replace("torch", "norms += [torch", 1) + "]"),
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
    stats["objective/kl_k3"] = per_row((ref_logprobs - old_logprobs).exp() - 1 - (ref_logprobs - old_logprobs))
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
""" + HISTORY),
]  # fmt: skip

CASES = {  # name: settings of ppo.py, and edits of the short file: a line of it, and what stands there instead
    "rewards: two functions, whitened; KL: exact, adapted": (
        dict(reward_fn=("reward_model", "FOLDER/gold.py:letters"), reward_weights=(1.0, 0.5), whiten_rewards=True)
        | dict(kl_estimator="full", kl_target=0.7, kl_horizon=40),
        [
            (AFTER_SCORE, AFTER_SCORE + """
    texts = [tokenizer.decode(x[m > 0], skip_special_tokens=True) for x, m in zip(ids, attention_mask)]
    scores += 0.5 * torch.tensor([len(text) for text in texts]) / 100
"""),
            (KL, """
    with torch.no_grad():
        both = [forward(model, ids, attention_mask).logits[:, P - 1 : -1] for model in (policy, reference)]
    p, q = ((logits / args.temperature).log_softmax(-1) for logits in both)
    kl = (p.exp() * (p - q)).sum(-1)
"""),
            (SHAPE, SHAPE + """
    mean, variance = rewards[mask].mean(), rewards[mask].var()
    rewards = torch.where(mask, (rewards - mean) / (variance + 1e-8).sqrt() + mean, 0.0)
"""),
            (HISTORY, HISTORY + """
    args.kl_coef *= 1 + max(-0.2, min(0.2, stats["objective/kl"] / 0.7 - 1)) * B / 40
"""),
        ],
    ),
    "shared critic; scores scaled and clipped; steps skipped; random lengths": (
        dict(critic="shared", score_scaling="norm", score_clip=0.8, ratio_threshold=1.02, target_kl=0.02)
        | dict(response_length_min=5, stop_token=(".",)),
        [
            (CRITIC, """
critic = torch.nn.Module()
critic.base_model, critic.score = policy.base_model, torch.nn.Linear(policy.config.hidden_size, 1)
torch.nn.init.zeros_(critic.score.weight)
torch.nn.init.zeros_(critic.score.bias)
all_scores = []
"""),
            (PARAMETERS, "[*policy.parameters(), *critic.score.parameters()], lr=args.learning_rate, weight_decay=0.0"),
            ("    uniforms = torch.rand(B, args.response_length)", """
    args.response_length = torch.randint(5, 9, ()).item()
    uniforms = torch.rand(B, args.response_length)"""),
            ("    P, stop = ids.shape[1], tokenizer.eos_token_id", """
    P, stop = ids.shape[1], tokenizer.convert_tokens_to_ids(".")"""),
            (SHAPE, """
    all_scores += scores.tolist()
    so_far = torch.tensor(all_scores)
    scaled = ((scores - so_far.mean()) / so_far.std()).clamp(-0.8, 0.8)
""" + SHAPE.replace("(scores", "(scaled")),
            ("(policy, critic):", "(policy, critic.score):"),
            (STEP, """
            approxkl = (0.5 * (logprobs - old_logprobs[rows]) ** 2)[mask[rows]].mean()
            is_over = approxkl > 1.5 * 0.02
            if is_over or ratio[mask[rows]].mean() > 1.02:
                del norms[-2:]
            else:
                optimizer.step()
"""),
            (LOG, LOG + """
            if is_over:
                break
        if is_over:
            break
"""),
        ],
    ),
    "rates; pretraining texts; moving average": (
        dict(critic_learning_rate=5e-4, critic_warmup_updates=1, lr_scheduler_type="cosine", warmup_ratio=0.4)
        | dict(weight_decay=0.1, adam_betas=(0.8, 0.95), adam_epsilon=1e-3, max_grad_norm=0.02)
        | dict(pretrain_data="FOLDER/texts.jsonl", ptx_coef=0.3, ema_decay=0.9),
        [
            (PARAMETERS, """
    [{"params": list(model.parameters())} for model in (policy, critic)],
    weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3,
"""),
            ("# %% The loop", """
ema = deepcopy(policy)
pretraining = [json.loads(line)["text"] for line in open("FOLDER/texts.jsonl")]
pretraining = [tokenizer(x)["input_ids"] + [tokenizer.eos_token_id] for x in pretraining]
# %% The loop"""),
            (RATE, """
    share = [0, 1, 0.5 + 0.5 * math.cos(math.pi / 2)][update - 1]  # one update of warm-up, then half a cosine
    optimizer.param_groups[0]["lr"] = args.learning_rate * share
    optimizer.param_groups[1]["lr"] = 5e-4 * share
"""),
            (CLIP, """
            drawn = torch.randint(len(pretraining), (B // args.num_mini_batches,)).tolist()
            drawn = [torch.tensor([pretraining[i]]) for i in drawn]
            losses = [-token_logprobs(policy(x).logits[:, :-1], x[:, 1:]) for x in drawn]
            (0.3 * torch.cat(losses, 1).mean()).backward()
""" + CLIP),
            ("parameters(), 1.0)", "parameters(), 0.02)"),
            (STEP, STEP + """
            for kept, p in zip(ema.parameters(), policy.parameters()):
                kept.data = 0.9 * kept + 0.1 * p.data
"""),
            ("policy.save_pretrained(args.output_dir)", """
policy.save_pretrained(args.output_dir)
ema.save_pretrained(args.output_dir + "/ema")
"""),
        ],
    ),
    "mixture of experts": (
        dict(model="FOLDER/mixtral", aux_loss_coef=0.5, micro_batch_size=8, num_mini_batches=1),
        [
            (LOGITS, """
            output = forward(policy, ids[rows], attention_mask[rows], output_router_logits=True)
            logits = output.logits
"""),
            ("            loss = masked_mean(pg_loss", "            loss = 0.5 * output.aux_loss + masked_mean(pg_loss"),
        ],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts that do not divide into batches, texts, a reward function, and a policy with experts."""
    folder = tmp_path_factory.mktemp("additions")
    (folder / "prompts.jsonl").write_text("\n".join(lines_of_file("toy/data/prompts/train.jsonl")[:11]))
    rows = [json.loads(line) for line in lines_of_file("toy/data/sft/train.jsonl")[:9]]
    texts = [f"{row['prompt']}{row['completion']}".split()[: 5 + i] for i, row in enumerate(rows)]
    write_rows(folder / "texts.jsonl", [{"text": " ".join(words)} for words in texts])
    code = (
        "def letters(prompts, completions, **_):\n    return [len(x + y) / 100 for x, y in zip(prompts, completions)]"
    )
    (folder / "gold.py").write_text(code)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    tokenizer.save_pretrained(folder / "mixtral")
    tiny_model("mixtral", vocab_size=len(tokenizer)).save_pretrained(folder / "mixtral")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case, folder, tmp_path, monkeypatch):
    settings, edits = json.loads(json.dumps(CASES[case]).replace("FOLDER", str(folder)))
    settings = BASE | {name: tuple(x) if isinstance(x, list) else x for name, x in settings.items()}
    settings |= dict(dataset=f"{folder}/prompts.jsonl")
    is_exact = "experts" not in case  # whose products have no float64
    text = in_float64("lecture/ppo.py") if is_exact else text_of("lecture/ppo.py")
    text = text.replace("import time\n", "import json, math, time\n")
    text = text.replace(LOG.replace("double()", "float()"), LOG)
    for old, new in [*MORE_METRICS, *edits]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    fields = text.partition("class Args:")[2].partition("# %%")[0]
    common = {name: x for name, x in settings.items() if f"    {name}:" in fields}
    with float64() if is_exact else nullcontext():
        module = load_in_float64("ppo", monkeypatch) if is_exact else ppo
        sizes = dict(dataset_test_split=None, num_sample_generations=0, micro_batch_size=3, device="cpu")
        module.train(module.Args(**{"ratio_threshold": 1e9} | sizes | settings, output_dir=str(tmp_path / "ppo")))
        with short_form("ppo", **common, output_dir=tmp_path / "short") as names:
            exec(compile(text, "lecture/ppo.py", "exec"), names)
    lines = lines_of(tmp_path / "ppo")
    skipped = sum(line["val/skipped_steps"] for line in lines)
    assert 0 < skipped < 12 if "skipped" in case else skipped == 0
    rel = 1e-8 if is_exact else 1e-3
    for line, short in zip(lines, names["history"], strict=True):
        assert {name: line[name] for name in short} == pytest.approx(short, rel=rel, abs=rel)
    ours, by_hand = weights_of(tmp_path / "ppo"), weights_of(tmp_path / "short")
    assert ours.keys() == by_hand.keys()
    assert all(torch.allclose(ours[name], by_hand[name], rtol=0, atol=rel) for name in ours)
