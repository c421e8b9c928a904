"""A scaling law on a laptop: how far can one optimise against a reward model before the true reward falls?

    python experiments/overoptimization.py                  # 80 minutes of one thread; goes on where it stopped
    python experiments/overoptimization.py --jobs 2         # 45 minutes on two CPU cores
    python experiments/overoptimization.py --redraw         # charts and tables again, from the JSON file
    python experiments/overoptimization.py --seeds 1 --pairs 300,30000 --output FILE.json    # a part; the page stays

The experiment of Gao, Schulman and Hilton (2022, arXiv 2210.10760) in the toy world. Reward models of two sizes are
trained on 300 to 30,000 pairs, and a policy is optimised against each in two ways: as the best of n responses, and by
PPO without a KL penalty. The gold score, which neither sees, is held against d, the square root of the KL divergence
from the initial policy.

  1. sft            a language model of the smaller size, from which its reward models start
  2. responses      of the initial policy, many to each prompt, with their gold scores: one set for each seed
  3. reward model   one for each size, number of pairs and seed; seeds have pairs of their own, as far as these reach
  4. best of n      every response is scored, and the best of n follows for all n at once
  5. ppo            from the same policy at the same temperature, long enough to pass the peak of the gold score

1, 3 and 5 are sft.py, reward_model.py and ppo.py, run as anybody would run them.

What comes out: results/overoptimization.json, to which each run is added as it ends, docs/overoptimization*.png, and
the tables in docs/overoptimization.md. If the policy, the data or the settings below have changed, all is run again.
"""

import argparse
import hashlib
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from common import LEARNED, ROOT, BenchmarkError, describe_machine, describe_ours, figure_of, require

PAGE = ROOT / "docs/overoptimization.md"
OUTPUT = LEARNED / "overoptimization.json"
EPOCHS = {300: 8, 1000: 5, 3000: 4, 10_000: 3, 30_000: 2}  # pairs -> passes over them, until unseen pairs gain no more
WIDTHS = {"0.41M": 80, "0.13M": 32}  # size -> width; the first is that of toy/sft
BEST_OF = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SETTINGS = {
    "epochs": EPOCHS,
    "widths": WIDTHS,
    "sft_epochs": 2,
    "prompts": 20,
    "responses": 640,
    "temperature": 0.7,
    "response_length": 53,
    "episodes": 2048,
    "penalty": 0.05,
    "penalty_pairs": 3000,
}
SECONDS = {"sft": 80, "responses": 60, "step": 0.15, "start": 10, "best of n": 20, "episode": 0.03}  # on one thread
FORMS = {"best of n": "quadratic", "ppo": "logarithmic"}  # the two ways to optimise, and the law of each
SMOOTH = 3  # updates of PPO whose mean is a point of the charts
COLOURS = dict(zip(EPOCHS, ("#c46a2b", "#d9a441", "#8f9f4f", "#4f9d8d", "#2a6fbb")))

# ---------------------------------------------------------------------------------------------------------------------
# The law


@cache
def weights(n: int, total: int) -> np.ndarray:
    """Of n drawn from `total` without replacement, the probability that the best is the one of rank 1, 2, ..., total.

    The others must then be among the ranks below: C(rank - 1, n - 1) of C(total, n) choices.
    """
    return np.array([math.comb(below, n - 1) / math.comb(total, n) for below in range(total)])


def best_of_n(proxy: np.ndarray, values: np.ndarray, n: int) -> float:
    """Mean value of the response with the highest proxy score of n, over all choices of n from these responses."""
    return float(weights(n, len(proxy)) @ values[np.argsort(proxy, kind="stable")])


def best_of_n_kl(n: int) -> float:
    """KL of the best of n from the initial policy, if no two responses are the same (else it is an upper bound)."""
    return math.log(n) - (n - 1) / n


def slowdown(form: str, d: np.ndarray) -> np.ndarray:
    """What is subtracted from alpha in R(d) = d (alpha - beta slowdown)."""
    return d if form == "best of n" else np.log(d)


def fit(form: str, d: np.ndarray, gain: np.ndarray) -> dict[str, float]:
    """alpha and beta by least squares, and the share of the variance that they explain."""
    d, gain = np.array(d), np.array(gain)
    d, gain = d[d > 0], gain[d > 0]  # where d is 0 the law says 0
    terms = np.stack([d, -d * slowdown(form, d)], 1)
    (alpha, beta), *_ = np.linalg.lstsq(terms, gain, rcond=None)
    residual = gain - terms @ [alpha, beta]
    return {
        "alpha": float(alpha),
        "beta": float(beta),
        "r2": float(1 - np.mean(residual**2) / gain.var()),
        "error": float(np.sqrt(np.mean(residual**2))),
    }


def law(form: str, d: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """The gold score, less its start."""
    return d * (alpha - beta * slowdown(form, d))


def peak(form: str, alpha: float, beta: float) -> float:
    """The d at which the law is highest; infinite if it only rises, or begins by falling."""
    if alpha <= 0 or beta <= 0:
        return math.inf
    return alpha / (2 * beta) if form == "best of n" else math.exp(min(alpha / beta - 1, 700))


# ---------------------------------------------------------------------------------------------------------------------
# A worker: what the project's scripts do not do


def load_policy():
    """The module ppo.py, its settings for many responses, the initial policy, and all prompts."""
    sys.path.append(str(ROOT))
    import ppo

    args = ppo.Args(
        temperature=SETTINGS["temperature"],
        response_length=SETTINGS["response_length"],
        micro_batch_size=256,
        local_rollout_forward_batch_size=256,
    )
    policy = ppo.load_policy(args)
    return ppo, args, policy, ppo.load_prompts(args, policy, None)[0]


def sample_responses(seed: int, file: Path) -> None:
    """Responses of the initial policy, with their gold scores: many to each of a few prompts, then one to each of all.

    The latter show where PPO starts.
    """
    import torch

    ppo, args, policy, prompts = load_policy()
    torch.manual_seed(seed)
    count = SETTINGS["prompts"]
    few = prompts[(seed - 1) * count : seed * count]
    rollout = ppo.sample_batch(policy, [x for x in few for _ in range(SETTINGS["responses"])] + prompts, args)
    gold = ppo.function_reward("toy/make.py:gold_score", policy, args)(rollout)
    names = ("prompts", "prompt_mask", "responses", "mask", "ended", "old_logprobs")
    data = {name: getattr(rollout, name) for name in names} | {"gold": gold}
    write_whole(file, lambda out: torch.save(data, out))


def score_responses(reward_model: Path, responses: Path, file: Path) -> None:
    """The proxy scores of these responses, beside their gold scores."""
    import torch

    ppo, args, policy, _ = load_policy()
    data = torch.load(responses)
    gold = data.pop("gold").numpy()
    rollout = ppo.Rollout(**data, examples=[{}] * len(gold))
    model = ppo.load_reward_model(replace(args, reward_model=str(reward_model)), policy)
    proxy = ppo.model_reward(model, policy, args)(rollout).numpy()
    write_whole(file, lambda out: np.savez(out, proxy=proxy, gold=gold))


def write_whole(file: Path, write) -> None:
    """A file that is there is whole."""
    with open(f"{file}.part", "wb") as out:
        write(out)
    Path(f"{file}.part").replace(file)


# ---------------------------------------------------------------------------------------------------------------------
# The runs


def run_process(words: list, log: Path) -> None:
    """Runs a program of the project on one thread; raises BenchmarkError with its last lines if it fails."""
    command = [sys.executable, *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(log, "w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, check=False)
    tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-12:])
    require(done.returncode == 0, f"`{shlex.join(command)}` failed; its last lines:\n{tail}")


def train(folder: Path, *words) -> Path:
    """The folder of a training by one of the scripts, which is made unless it is there, whole."""
    if not (folder / "curves.png").exists():  # the last that a run writes
        shutil.rmtree(folder, ignore_errors=True)
        run_process([*words, "--output-dir", folder, "--save-steps", 10**6], folder.parent / f"{folder.name}.log")
    return folder


def start_of(size: str, work: Path) -> Path:
    """The language model from which reward models of this size start."""
    return ROOT / "toy/sft" if WIDTHS[size] == 80 else work / f"sft-{size}"


def make_sft(size: str, work: Path) -> None:
    """A language model like toy/sft of another width, made like it."""
    base = work / f"base-{size}"
    shutil.copytree(ROOT / "toy/base", base, dirs_exist_ok=True)
    config = json.loads((base / "config.json").read_text()) | {"n_embd": WIDTHS[size]}
    (base / "config.json").write_text(json.dumps(config))
    train(
        work / f"sft-{size}",
        "sft.py",
        "--from-scratch",
        base,
        "--num-train-epochs",
        SETTINGS["sft_epochs"],
        "--num-sample-generations",
        0,
        "--eval-steps",
        10**6,
    )


def make_responses(seed: int, work: Path) -> None:
    """responses-SEED.pt."""
    file = work / f"responses-{seed}.pt"
    if not file.exists():
        run_process([__file__, "--worker", "sample", seed, file], file.with_suffix(".log"))


def make_reward_model(size: str, pairs: int, seed: int, work: Path) -> Path:
    """Each seed has pairs of its own; of the largest set there is but one."""
    first = (seed - 1) * pairs if seed * pairs <= 30_000 else 0
    return train(
        work / f"rm-{size}-{pairs}-{seed}",
        "reward_model.py",
        "--model",
        start_of(size, work),
        "--seed",
        seed,
        "--dataset-train-split",
        f"train[{first}:{first + pairs}]",
        "--num-train-epochs",
        EPOCHS[pairs],
        "--learning-rate",
        1e-3,
        "--eos-dropout",
        0.5,
        "--num-sample-generations",
        0,
        "--eval-steps",
        10**6,
    )


def read_lines(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def optimise(reward_model: Path, seed: int, kl_coef: float, start: dict, folder: Path) -> dict[str, list[float]]:
    """One training by PPO: a list of its updates for each metric."""
    train(
        folder,
        "ppo.py",
        "--reward-model",
        reward_model,
        "--reward-fn",
        "reward_model",
        "toy/make.py:gold_score",
        "--reward-weights",
        1,
        0,
        "--seed",
        seed,
        "--kl-coef",
        kl_coef,
        "--total-episodes",
        SETTINGS["episodes"],
        "--temperature",
        SETTINGS["temperature"],
        "--response-length",
        SETTINGS["response_length"],
        "--missing-eos-penalty",
        0,
        "--dataset-test-split",
        "none",
        "--num-sample-generations",
        0,
        "--lr-scheduler-type",
        "constant",  # a rate that falls to 0 slows down KL
    )
    names = {
        "kl": "objective/kl",
        "proxy": "objective/scores",
        "gold": "rewards/gold_score/mean",
        "eos_share": "val/eos_share",
        "length": "val/response_length",
    }
    updates = {short: [line[name] for line in read_lines(folder)] for short, name in names.items()}
    updates["proxy"] = [(score - start["mean"]) / start["deviation"] for score in updates["proxy"]]
    return {name: [round(x, 4) for x in values] for name, values in updates.items()}


def run(size: str, pairs: int, seed: int, work: Path) -> dict:
    """A reward model, and what comes of optimising against it.

    Proxy scores are given in standard deviations of the initial policy's responses, from their mean, since the scale
    of a reward model means little: it grows with the passes over the pairs.
    """
    reward_model = make_reward_model(size, pairs, seed, work)
    name = reward_model.name.removeprefix("rm-")
    scores = work / f"scores-{name}.npz"
    responses = work / f"responses-{seed}.pt"
    if not scores.exists():
        run_process([__file__, "--worker", "score", reward_model, responses, scores], scores.with_suffix(".log"))
    proxy, gold = (np.load(scores)[key].astype(float) for key in ("proxy", "gold"))
    count = SETTINGS["prompts"] * SETTINGS["responses"]  # the others are one to each prompt
    start = {"mean": float(proxy[count:].mean()), "deviation": float(proxy[count:].std())}
    shape = SETTINGS["prompts"], SETTINGS["responses"]
    few = ((proxy[:count] - proxy[:count].mean()) / start["deviation"]).reshape(shape)
    few_gold = gold[:count].reshape(shape)
    mean = lambda values, n: round(statistics.fmean(best_of_n(p, v, n) for p, v in zip(few, values)), 4)
    evaluation = read_lines(reward_model)[-1]
    result = {
        "size": size,
        "pairs": pairs,
        "seed": seed,
        "accuracy": round(evaluation["eval/accuracy"], 4),
        "loss": round(evaluation["eval/loss"], 4),
        "start_gold": round(float(gold[count:].mean()), 4),
        "correlation": round(float(np.corrcoef(proxy[count:], gold[count:])[0, 1]), 4),
        "best_of_n": {"proxy": [mean(few, n) for n in BEST_OF], "gold": [mean(few_gold, n) for n in BEST_OF]},
        "ppo": optimise(reward_model, seed, 0.0, start, work / f"ppo-{name}"),
    }
    if has_penalty(size, pairs):
        result["penalised"] = optimise(reward_model, seed, SETTINGS["penalty"], start, work / f"penalised-{name}")
    return result


def has_penalty(size: str, pairs: int) -> bool:
    """Whether PPO is run with a KL penalty, too."""
    return size == list(WIDTHS)[0] and pairs == SETTINGS["penalty_pairs"]


def seconds_of(size: str, pairs: int) -> float:
    """What a run takes on one thread, roughly."""
    is_small = WIDTHS[size] < 80
    steps = pairs * EPOCHS[pairs] / 64 * SECONDS["step"] * (0.6 if is_small else 1)
    ppo = SECONDS["start"] + SETTINGS["episodes"] * SECONDS["episode"] * (0.8 if is_small else 1)
    return SECONDS["start"] + steps + SECONDS["best of n"] + ppo * (1 + has_penalty(size, pairs))


def fingerprint() -> str:
    """Of all that the results depend on, but for the scripts."""
    data = [f"data/{name}/train.jsonl" for name in ("sft", "preferences", "prompts")]
    files = ["make.py", "base/config.json", "sft/model.safetensors", *data]
    content = b"".join((ROOT / "toy" / file).read_bytes() for file in files) + json.dumps([SETTINGS, BEST_OF]).encode()
    return hashlib.sha256(content).hexdigest()[:12]


def run_all(args: argparse.Namespace) -> None:
    """Runs what is missing; the results are written after each run."""
    work = (args.work / fingerprint()).resolve()
    old = json.loads(args.output.read_text()) if args.output.exists() else {}
    runs = old["runs"] if old.get("fingerprint") == work.name else []
    results = {
        "command": shlex.join(["python", *sys.argv]),
        **describe_ours(ROOT),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "fingerprint": work.name,
        "seeds": args.seeds,
        "settings": SETTINGS,
        "n": BEST_OF,
        "runs": runs,
    }
    done = {(r["size"], r["pairs"], r["seed"]) for r in runs}
    wanted = [(size, pairs, seed) for seed in args.seeds for pairs in args.pairs for size in WIDTHS]
    todo = [key for key in wanted if key not in done]
    if not todo:
        return print("all runs are there")
    small = [size for size in WIDTHS if WIDTHS[size] < 80 and not (start_of(size, work) / "curves.png").exists()]
    seeds = [seed for seed in args.seeds if not (work / f"responses-{seed}.pt").exists()]
    seconds = sum(seconds_of(*key[:2]) for key in todo)
    seconds += SECONDS["sft"] * len(small) + SECONDS["responses"] * len(seeds)
    print(
        f"{len(todo)} of {len(wanted)} runs are to be made, with {len(small)} language model and {len(seeds)} sets of "
        f"responses: about {seconds / 60:.0f} minutes of one thread, {seconds / args.jobs / 60:.0f} with "
        f"--jobs {args.jobs}; intermediate results in {work}",
        flush=True,
    )
    if args.list:
        return None
    work.mkdir(parents=True, exist_ok=True)
    lock, begin = threading.Lock(), time.perf_counter()

    def work_on(key: tuple[str, int, int]) -> None:
        """One run, when what it needs is there."""
        size, pairs, seed = key
        starts[size].result()
        start = time.perf_counter()
        make_reward_model(*key, work)
        responses[seed].result()
        result = run(*key, work)
        with lock:
            runs.append(result | {"seconds": round(time.perf_counter() - start)})
            runs.sort(key=lambda r: (list(WIDTHS).index(r["size"]), r["pairs"], r["seed"]))
            write_results(args.output, results)
            left = len(todo) - sum(1 for r in runs if (r["size"], r["pairs"], r["seed"]) in todo)
            print(
                f"{time.perf_counter() - begin:5.0f} s: {size}, {pairs} pairs, seed {seed}: {result['accuracy']:.2f} "
                f"of unseen pairs right; gold score {result['best_of_n']['gold'][-1]:.2f} as best of {BEST_OF[-1]}, "
                f"{max(smooth(result['ppo']['gold'])):.2f} at PPO's peak, {smooth(result['ppo']['gold'])[-1]:.2f} at "
                f"its end, KL {smooth(result['ppo']['kl'])[-1]:.0f}; {left} runs left",
                flush=True,
            )

    with ThreadPoolExecutor(args.jobs) as pool:
        responses = {seed: pool.submit(make_responses, seed, work) for seed in args.seeds}
        starts = {size: pool.submit(make_sft, size, work) if size in small else pool.submit(int) for size in WIDTHS}
        futures = [pool.submit(work_on, key) for key in todo]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def write_results(file: Path, results: dict) -> None:
    """The JSON file, one run a line."""
    head = json.dumps({name: value for name, value in results.items() if name != "runs"}, indent=1)
    runs = ",\n".join(json.dumps(run) for run in results["runs"])
    part = file.with_suffix(".part")
    part.write_text(f'{head[:-2]},\n "runs": [\n{runs}\n]}}\n')
    part.replace(file)


# ---------------------------------------------------------------------------------------------------------------------
# What came out


def smooth(values: list[float], count: int = SMOOTH) -> np.ndarray:
    """Means of so many neighbours."""
    return np.convolve(values, np.ones(min(count, len(values))) / min(count, len(values)), "valid")


def start_gold(results: dict) -> float:
    """The gold score of the initial policy, over all prompts."""
    return statistics.fmean(run["start_gold"] for run in results["runs"])


def points(results: dict, run: dict, method: str) -> tuple[np.ndarray, np.ndarray]:
    """d, and the gold score less its start, of one run; best of n starts at its own prompts' mean."""
    if method == "best of n":
        gold = np.array(run["best_of_n"]["gold"])
        return np.sqrt([best_of_n_kl(n) for n in results["n"]]), gold - gold[0]
    kl = np.clip(run["ppo"]["kl"], 0, None)  # an estimate, which may be negative at first
    return np.sqrt(kl), np.array(run["ppo"]["gold"]) - start_gold(results)


def groups_of(results: dict) -> dict[tuple[str, int], list[dict]]:
    """(size, pairs) -> the runs, one for each seed."""
    groups = {}
    for run in results["runs"]:
        groups.setdefault((run["size"], run["pairs"]), []).append(run)
    return groups


def cell(values: list[float], digits: int = 2) -> str:
    """mean ± standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def markdown(lines: list[list[str]], names: int = 2) -> str:
    """A table, whose first columns are names."""
    rule = ["---"] * names + ["---:"] * (len(lines[0]) - names)
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def first_at(run: dict, along: str, level: float, want: str) -> float:
    """Where a smoothed metric of PPO first reaches a level: another metric there; NaN if it never does."""
    reached = smooth(run[along]) >= level
    return float(smooth(run[want])[reached.argmax()]) if reached.any() else math.nan


def best_of_n_table(results: dict) -> str:
    """What reward models know, and the law of best of n."""
    most = results["n"][-1]
    lines = [["parameters", "pairs", "unseen pairs right", f"gold score, best of {most}", "α", "R²", "peak at d"]]
    for (size, pairs), runs in groups_of(results).items():
        fits = [fit("best of n", *points(results, run, "best of n")) for run in runs]
        pooled = pooled_fit(results, runs, "best of n", "best of n")
        lines.append(
            [
                size,
                f"{pairs:,}",
                cell([run["accuracy"] for run in runs]),
                cell([run["best_of_n"]["gold"][-1] for run in runs]),
                cell([f["alpha"] for f in fits]),
                f"{pooled['r2']:.2f}",
                show_peak("best of n", pooled),
            ]
        )
    return markdown(lines)


def ppo_table(results: dict) -> str:
    """The law of PPO, and the peak that was seen."""
    lines = [["parameters", "pairs", "R²", "R², quadratic", "highest gold score", "at d", "gold score at the end"]]
    for (size, pairs), runs in groups_of(results).items():
        r2 = {form: pooled_fit(results, runs, "ppo", form)["r2"] for form in FORMS}
        gold = [smooth(run["ppo"]["gold"]) for run in runs]
        d = [np.sqrt(smooth(run["ppo"]["kl"]).clip(0)) for run in runs]
        lines.append(
            [
                size,
                f"{pairs:,}",
                f"{r2['ppo']:.2f}",
                f"{r2['best of n']:.2f}",
                cell([g.max() for g in gold]),
                cell([x[g.argmax()] for x, g in zip(d, gold)], 1),
                cell([g[-1] for g in gold]),
            ]
        )
    return markdown(lines)


def show_peak(form: str, f: dict) -> str:
    """Where the law is highest, unless that is nowhere near what was seen."""
    d = peak(form, f["alpha"], f["beta"])
    return f"{d:.1f}" if d < 20 else "none"


def pooled_fit(results: dict, runs: list[dict], method: str, form: str) -> dict[str, float]:
    """The law through the points of all seeds."""
    return fit(form, *(np.concatenate(x) for x in zip(*(points(results, run, method) for run in runs))))


def check_table(results: dict) -> str:
    """The paper's other findings, by number of pairs; both sizes together. A gain is a gold score less its start."""
    most, few = results["n"][-1], 32
    kl = best_of_n_kl(most)
    lines = [
        [
            "pairs",
            f"gain of the best of {most}",
            f"predicted from n ≤ {few}",
            f"KL at which PPO is as good ({kl:.1f} for best of n)",
            "gain of PPO at its proxy score",
        ]
    ]
    for pairs in sorted({run["pairs"] for run in results["runs"]}):
        columns = {name: [] for name in ("gain", "foretold", "as good", "at proxy")}
        for run in results["runs"]:
            if run["pairs"] != pairs:
                continue
            d, gains = points(results, run, "best of n")
            start, ppo = start_gold(results), run["ppo"]
            f = fit("best of n", *(x[np.array(results["n"]) <= few] for x in (d, gains)))
            columns["gain"].append(gains[-1])
            columns["foretold"].append(law("best of n", d[-1], f["alpha"], f["beta"]))
            columns["as good"].append(first_at(ppo, "gold", gains[-1] + start, "kl"))
            columns["at proxy"].append(first_at(ppo, "proxy", run["best_of_n"]["proxy"][-1], "gold") - start)
        cells = [where_reached(values, 1 if name == "as good" else 2) for name, values in columns.items()]
        lines.append([f"{pairs:,}", *cells])
    return markdown(lines, names=1)


def where_reached(values: list[float], digits: int) -> str:
    """mean ± deviation of those that are there, and how many they are."""
    there = [value for value in values if not math.isnan(value)]
    count = f" ({len(there)} of {len(values)})" if len(there) < len(values) else ""
    return cell(there, digits) + count if there else "never"


def setup_text(results: dict) -> str:
    """How it was done, in figures."""
    s, machine = results["settings"], results["machine"]
    epochs = ", ".join(f"{number} for {int(pairs):,}" for pairs, number in s["epochs"].items())
    minutes = sum(run["seconds"] for run in results["runs"]) / 60
    text = (
        f"Seeds: {len(results['seeds'])}. Passes over the pairs: {epochs}. Best of n: {s['responses']} responses to "
        f"each of {s['prompts']} prompts per seed, n up to {results['n'][-1]}. PPO: {s['episodes']:,} episodes in "
        f"{s['episodes'] // 64} updates. Temperature: {s['temperature']:g}. Gold score of the initial policy: "
        f"{start_gold(results):.2f}. Recorded on {results['date']} at revision {results['commit']}, on "
        f"{machine['cores']} cores of {machine['cpu']}; all runs together took {minutes:.0f} minutes."
    )
    return textwrap.fill(text, 120)


TEXTS = {"setup": setup_text, "best of n": best_of_n_table, "ppo": ppo_table, "checks": check_table}


def filled_in(page: str, results: dict) -> str:
    """The page with what the results say between its markers."""
    for name, text in TEXTS.items():
        before, _, rest = page.partition(f"<!-- {name} -->\n")
        require(f"<!-- /{name} -->" in rest, f"{PAGE.name} lacks the markers of {name!r}")
        after = rest[rest.index(f"<!-- /{name} -->") :]
        page = f"{before}<!-- {name} -->\n{text(results)}\n{after}"
    return page


def draw_curves(results: dict, file: Path) -> None:
    """Gold and proxy score against d, of the first size: the seeds' mean as points, the laws as lines."""
    size = results["runs"][0]["size"]
    figure, axes = figure_of(2, 2, 11, 7.5)
    for (its_size, pairs), runs in groups_of(results).items():
        if its_size != size:
            continue
        for column, method in enumerate(FORMS):
            mean = lambda name: np.mean([run[method.replace(" ", "_")][name] for run in runs], 0)
            d, gold, proxy = points(results, runs[0], method)[0], mean("gold"), mean("proxy")
            start = gold[0]
            if method == "ppo":
                d, gold, proxy, start = np.sqrt(smooth(mean("kl"))), smooth(gold), smooth(proxy), start_gold(results)
            style = {"color": COLOURS[pairs], "linewidth": 1}
            axes[0, column].plot(d, gold, "o", markersize=3, color=COLOURS[pairs], label=f"{pairs:,} pairs")
            x = np.linspace(0.01, d.max(), 200)
            for form in {"best of n": ("best of n",), "ppo": tuple(FORMS)}[method]:
                f = pooled_fit(results, runs, method, form)
                line = "-" if form == method else ":"
                axes[0, column].plot(x, start + law(form, x, f["alpha"], f["beta"]), line, **style)
            axes[1, column].plot(d, proxy, "o-", markersize=3, **style)
    for column, title in enumerate(("best of n", "PPO without KL penalty; dotted: the law of best of n")):
        axes[0, column].set_title(title, fontsize=10)
        axes[1, column].set_xlabel("d = √KL")
    axes[0, 0].set_ylabel("gold score"), axes[1, 0].set_ylabel("proxy score, deviations of the initial policy")
    axes[0, 0].legend(frameon=False, fontsize=8), figure.suptitle(f"reward models of {size}", fontsize=10)
    figure.savefig(file, dpi=110)


def draw_sizes(results: dict, file: Path) -> None:
    """Best of n beside PPO, on one axis, in a panel for each size; the mean over the seeds."""
    sizes = list(dict.fromkeys(run["size"] for run in results["runs"]))
    figure, axes = figure_of(1, len(sizes), 5.5 * len(sizes), 3.8)
    for (size, pairs), runs in groups_of(results).items():
        panel = axes[0, sizes.index(size)]
        d = np.sqrt([best_of_n_kl(n) for n in results["n"]])
        panel.plot(d, np.mean([run["best_of_n"]["gold"] for run in runs], 0), "--", color=COLOURS[pairs])
        kl, gold = (smooth(np.mean([run["ppo"][name] for run in runs], 0)) for name in ("kl", "gold"))
        panel.plot(np.sqrt(kl.clip(0)), gold, color=COLOURS[pairs], label=f"{pairs:,} pairs")
        panel.set_title(f"reward model of {size}; best of n dashed, PPO solid", fontsize=10)
        panel.set_xlabel("d = √KL"), panel.set_ylabel("gold score")
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)


def show(results: dict, output: Path) -> None:
    """Charts and tables; those of the page only from the results of the page."""
    stem = PAGE.with_suffix("") if output.resolve() == OUTPUT else output.with_suffix("")
    draw_curves(results, Path(f"{stem}.png"))
    draw_sizes(results, Path(f"{stem}-both.png"))
    if output.resolve() == OUTPUT:
        PAGE.write_text(filled_in(PAGE.read_text("utf-8"), results), "utf-8")
    for text in TEXTS.values():
        print(f"\n{text(results)}")
    print(f"written: {output}, {stem}.png, {stem}-both.png")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = lambda text: [int(part) for part in text.split(",")]
    numbers.__name__ = "list of numbers"  # for argparse's message
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, of one thread each")
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3], help="with commas between them")
    parser.add_argument("--pairs", type=numbers, default=list(EPOCHS), help="with commas between them")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/overoptimization", help="folder of what is between")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON file")
    parser.add_argument("--list", action="store_true", help="only say what is missing, and how long it will take")
    parser.add_argument("--redraw", action="store_true", help="run nothing, draw what the JSON file holds")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    unknown = set(args.pairs) - set(EPOCHS)
    require(not unknown, f"--pairs: {sorted(unknown)} are not among {', '.join(map(str, EPOCHS))}")
    return args


def main(argv: list[str]) -> None:
    """Runs, or draws, or does what the outer process asks of a worker."""
    args = parse_arguments(argv)
    if args.worker and args.worker[0] == "sample":
        sample_responses(int(args.worker[1]), Path(args.worker[2]))
        return
    if args.worker:
        score_responses(*map(Path, args.worker[1:]))
        return
    require(args.output.exists() or not args.redraw, f"--redraw reads {args.output}; run without it first")
    if not args.redraw:
        run_all(args)
    if args.list:
        return
    show(json.loads(args.output.read_text()), args.output)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BenchmarkError as problem:
        print(f"{Path(__file__).name}: error: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # started again, it goes on
