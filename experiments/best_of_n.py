"""The runs of docs/findings/overoptimization.md: a reward model, and what comes of optimising against it in two ways.

  python experiments/best_of_n.py base FOLDER WIDTH          # toy/base with another width, for a smaller reward model
  python experiments/best_of_n.py responses SEED FILE        # of the initial policy, with their gold scores

1. reward model   one for each size, number of pairs and seed; seeds have pairs of their own, as far as these reach
2. best of n      each response of the initial policy gets its reward, and the best of n follows for all n at once
3. ppo            from the same policy at the same temperature, long enough to pass the peak of the gold score
"""

import json
import os
import shutil
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from overoptimization import BEST_OF, best_of_n
from record import GOLD, ROOT, Run
from scripts import call, read_lines
import ppo

PROMPTS, RESPONSES = 20, 640  # whose best of n is taken, and the responses to each
KEPT = {
    "kl": "objective/kl",
    "proxy": "objective/scores",
    "gold": GOLD,
    "eos_share": "val/eos_share",
    "length": "val/response_length",
}


def load_policy():
    """The settings of ppo.py for many responses, and the initial policy."""
    sizes = {"micro_batch_size": 256, "local_rollout_forward_batch_size": 256}
    args = ppo.Args(temperature=0.7, response_length=53, **sizes)
    policy, _ = ppo.load_models(args)
    ppo.set_stop_tokens(policy, is_chat=False, temperature=args.temperature)
    ppo.place(policy, args)
    return args, policy


def write_responses(seed: int, file: str) -> None:
    """Responses of the initial policy with their gold scores: many to each of a few prompts, then one to each of all.

    The latter show where PPO starts.
    """
    args, policy = load_policy()
    prompts = ppo.load_prompts(args, policy.tokenizer, args.dataset_train_split)
    torch.manual_seed(seed)
    few = prompts[(seed - 1) * PROMPTS : seed * PROMPTS]
    rollout = ppo.sample_batch(policy, [x for x in few for _ in range(RESPONSES)] + prompts, args)
    [gold_score] = ppo.load_reward_fns(replace(args, reward_fn=(f"{ROOT}/toy/gold_score.py:gold_score",))).values()
    gold = gold_score(rollout, policy.tokenizer, args)
    names = ("prompts", "prompt_mask", "responses", "mask", "ended", "old_logprobs")
    torch.save({name: getattr(rollout, name) for name in names} | {"gold": gold}, file)


def score_responses(reward_model: Path, responses: str) -> tuple[np.ndarray, np.ndarray]:
    """The proxy scores of these responses, and their gold scores."""
    args, policy = load_policy()
    data = torch.load(responses)
    gold = data.pop("gold").numpy().astype(float)
    prompts = [ids[real].numpy() for ids, real in zip(data["prompts"], data["prompt_mask"])]
    examples = [{"prompt": policy.tokenizer.decode(ids), "input_ids": ids} for ids in prompts]
    rollout = ppo.Rollout(**data, examples=examples)
    os.environ["REWARD_MODEL"] = str(reward_model)
    [score] = ppo.load_reward_fns(args).values()
    proxy = score(rollout, policy.tokenizer, args)
    return proxy.numpy().astype(float), gold


def write_pairs(folder: Path, seed: int, count: int) -> None:
    """Pairs of the toy world: other ones for each seed, as far as they reach, with the same ones to evaluate on."""
    folder.mkdir(parents=True)
    lines = (ROOT / "toy/data/preferences/train.jsonl").read_text("utf-8").splitlines(keepends=True)
    first = (seed - 1) * count if seed * count <= len(lines) else 0  # of the largest set there is but one
    (folder / "train.jsonl").write_text("".join(lines[first : first + count]), "utf-8")
    shutil.copy(ROOT / "toy/data/preferences/validation.jsonl", folder)


def write_base(folder: str, width: str) -> None:
    """toy/base with another width."""
    shutil.copytree(ROOT / "toy/base", folder, dirs_exist_ok=True)
    config = Path(folder, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_embd": int(width)}))


def optimise(run: Run, reward_model: Path, kl_coef: float, start: dict) -> dict[str, list[float]]:
    """One training by PPO: a list of its updates for each metric."""
    folder = run.folder / f"ppo-{kl_coef}"
    flags = ["--reward-model", reward_model, "--kl-coef", kl_coef, "--seed", run.seed, "--output-dir", folder]
    call([*run.command, *flags], run.folder / "log")
    lines = read_lines(folder / "metrics.jsonl")
    updates = {short: [line[name] for line in lines] for short, name in KEPT.items()}
    updates["proxy"] = [(score - start["mean"]) / start["deviation"] for score in updates["proxy"]]
    return {name: [round(x, 4) for x in values] for name, values in updates.items()}


def measure(run: Run) -> dict:
    """A reward model, the best of n, and PPO.

    Proxy scores are given in standard deviations of the initial policy's responses, from their mean, since the scale
    of a reward model means little: it grows with the passes over the pairs.
    """
    begin = time.perf_counter()
    shutil.rmtree(run.folder, ignore_errors=True)
    pairs, reward_model = run.options["pairs"], run.folder / "reward-model"
    write_pairs(run.folder / "pairs", run.seed, pairs)
    flags = [*run.options["reward_model"].split(), "--num-train-epochs", run.options["epochs"], "--seed", run.seed]
    flags += ["--dataset", run.folder / "pairs", "--output-dir", reward_model]
    call(["reward_model.py", "--model", run.options["start"], *flags], run.folder / "log")
    proxy, gold = score_responses(reward_model, f"{run.options['responses']}/responses-{run.seed}.pt")
    count = PROMPTS * RESPONSES  # the others are one to each prompt
    start = {"mean": float(proxy[count:].mean()), "deviation": float(proxy[count:].std())}
    few = ((proxy[:count] - proxy[:count].mean()) / start["deviation"]).reshape(PROMPTS, RESPONSES)
    best = {}
    for name, values in {"proxy": few, "gold": gold[:count].reshape(PROMPTS, RESPONSES)}.items():
        means = [statistics.fmean(best_of_n(p, v, n) for p, v in zip(few, values)) for n in BEST_OF]
        best[name] = [round(mean, 4) for mean in means]
    evaluation = read_lines(reward_model / "metrics.jsonl")[-1]
    found = {
        "size": run.options["size"],
        "pairs": pairs,
        "accuracy": round(evaluation["eval/accuracy"], 4),
        "loss": round(evaluation["eval/loss"], 4),
        "start_gold": round(float(gold[count:].mean()), 4),
        "correlation": round(float(np.corrcoef(proxy[count:], gold[count:])[0, 1]), 4),
        "best_of_n": best,
        "ppo": optimise(run, reward_model, 0.0, start),
    }
    if "penalty" in run.options:
        found["penalised"] = optimise(run, reward_model, run.options["penalty"], start)
    return found | {"seconds": round(time.perf_counter() - begin)}


if __name__ == "__main__":
    {"base": write_base, "responses": lambda seed, file: write_responses(int(seed), file)}[sys.argv[1]](*sys.argv[2:])
