"""docs/findings/real.md: answers of SmolLM2 with their gold scores, and the data that is made of them.

python experiments/real_pairs.py pairs                # preference pairs by the gold score
python experiments/real_pairs.py pairs-by-polarity    # by the lexicon alone
python experiments/real_pairs.py best                 # the best of four answers by the reward model, for sft.py
"""

import math
import random
import statistics
import sys
from itertools import combinations
from pathlib import Path

import torch
from real_data import DATA, GOLD, LEXICON, REWARD_MODEL, chat
from record import ROOT
import evaluate as tool
import ppo
from scripts import evaluate, read_lines, short
from texts import write

MODEL = "models/smollm2"
EACH = 8  # answers to a prompt
SCORED = f"--response-length 32 --temperature 0.8 --bf16 --reward-fn {GOLD} {LEXICON}"


def answers_of(split: str) -> list[dict]:
    """Answers of the model to the prompts of a split, with their scores; sampled once."""
    where = ROOT / f"runs/real/answers-{split}"
    if not (where / "answers.jsonl").exists():
        flags = f"--dataset {DATA}/opinions --split {split} {SCORED} --num-generations {EACH}"
        evaluate(MODEL, where, *flags.split())
    return read_lines(where / "answers.jsonl")


def write_pairs(name: str, score: str) -> None:
    """Answers to the same prompt are compared: with the next one for training (each answer is in two pairs), or two by
    two for validation. The higher score is preferred with the odds exp(20 d) to 1, where d is the difference (Bradley
    and Terry). Equal and empty answers are left out."""
    draw = random.Random(0)
    for split, step in {"train": 1, "validation": 2}.items():
        answers = answers_of(split)
        groups = [answers[i : i + EACH] for i in range(0, len(answers), EACH)]
        pairs = []
        for a, b in [(group[i], group[(i + 1) % EACH]) for group in groups for i in range(0, EACH, step)]:
            if draw.random() > 1 / (1 + math.exp(-20 * (a[score] - b[score]))):
                a, b = b, a
            texts = {side: chat(x["response"], "assistant") for side, x in [("chosen", a), ("rejected", b)]}
            if len({"", a["response"].strip(), b["response"].strip()}) == 3:
                pairs.append({"prompt": a["prompt"]} | texts)
        draw.shuffle(pairs)
        write(DATA / name / f"{split}.jsonl", pairs)
        if split == "train":
            write(DATA / name / "first-320.jsonl", pairs[:320])
            write(DATA / name / "first-1280.jsonl", pairs[:1280])


def rewards_of(reward_model: Path | str, answers: list[dict]) -> list[float]:
    """The reward of each answer, which ends with its stop token if it ended by itself."""
    args = tool.settings_of(tool.Args(MODEL))
    policy = tool.load_policy(MODEL, args)
    tokenizer = policy.tokenizer
    prompts = [ppo.render(row["prompt"], row, tokenizer, add_generation_prompt=True) for row in answers]
    ended = [bool(row["eos_share"]) for row in answers]
    responses = [row["response"] + tokenizer.eos_token * end for row, end in zip(answers, ended)]
    columns = [ppo.encode(texts, tokenizer, is_chat=True) for texts in (prompts, responses)]
    prompts, prompt_mask = ppo.pad(columns[0], tokenizer, args, "left")  # (B, P)
    responses, mask = ppo.pad(columns[1], tokenizer, args)  # (B, T)
    ended = torch.tensor(ended, device=args.device)
    rollout = ppo.Rollout(prompts, prompt_mask, responses, mask, ended, old_logprobs=None, examples=answers)
    return tool.load_reward(str(reward_model), policy, answers, args)(rollout).tolist()


def write_best() -> None:
    """The best of four answers to each prompt."""
    for split in ("train", "validation"):
        answers = [answer for i, answer in enumerate(answers_of(split)) if i % EACH < 4]
        rewards = rewards_of(REWARD_MODEL, answers)
        best = [answers[max(range(i, i + 4), key=rewards.__getitem__)] for i in range(0, len(answers), 4)]
        best = [answer for answer in best if answer["response"].strip()]  # nobody learns from an empty one
        rows = [{"prompt": x["prompt"], "completion": chat(x["response"], "assistant")} for x in best]
        write(DATA / "best" / f"{split}.jsonl", rows)


def examine(reward_model: Path) -> dict:
    """What a reward model makes of answers to unseen prompts: how often the one with the higher gold score gets the
    higher reward, among all answers to a prompt; how much more those get that ended by themselves; and the means of
    the best of n answers by the reward."""
    answers = answers_of("validation")
    rewards = rewards_of(reward_model, answers)
    are_right = []
    best = {}
    for i in range(0, len(answers), EACH):
        for j, k in combinations(range(i, i + EACH), 2):
            gain = answers[j][GOLD] - answers[k][GOLD]
            are_right += [gain * (rewards[j] - rewards[k]) > 0] if gain else []
        for size in (1, 2, 4, 8):
            for start in range(i, i + EACH, size):
                one = max(range(start, start + size), key=rewards.__getitem__)
                best.setdefault(size, []).append((answers[one][GOLD], answers[one][LEXICON], rewards[one]))
    ended, cut_off = (
        statistics.fmean(x for x, answer in zip(rewards, answers) if answer["eos_share"] == end) for end in (1, 0)
    )
    means = {size: [short(statistics.fmean(column)) for column in zip(*some)] for size, some in best.items()}
    return {"right": short(statistics.fmean(are_right)), "ended": short(ended - cut_off), "best of": means}


if __name__ == "__main__":
    if sys.argv[1] == "best":
        write_best()
    else:
        write_pairs(sys.argv[1], LEXICON if sys.argv[1] == "pairs-by-polarity" else GOLD)
