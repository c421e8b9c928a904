"""Compares time and memory of a PPO, RLOO or GRPO update with those of TRL, or of another revision of this project.

    python benchmarks/throughput.py --quick                           # tiny models against TRL 0.16.1, two minutes
    python benchmarks/throughput.py                                   # all settings; an hour on two CPU cores
    python benchmarks/throughput.py --baseline HEAD                   # the effect of changes in the working tree
    python benchmarks/throughput.py --baseline HEAD --both=--bf16     # the same, in bfloat16
    python benchmarks/throughput.py --baseline . --ours=--bf16        # the effect of a flag
    python benchmarks/throughput.py --settings tiny small --algorithms grpo --against 1.16
    python benchmarks/throughput.py --settings vocab --keep-memory    # also TRL with our scripts' settings of glibc

Method. Each library trains through its own entry point, in a fresh process: `train(Args(...))` of our scripts,
PPOTrainer, RLOOTrainer and GRPOTrainer of TRL. An update lasts from the last optimiser step of one update to the last
step of the next; it includes rollout, scoring, gradient steps and logging. A hook that torch calls after every
optimiser step measures the time, in the same way on all sides. The first update of a process is a warm-up and does not
count. The two sides alternate, --repeats times, so that a slow phase of the machine affects both; with --keep-memory
the third side is TRL with freed memory kept (mallopt), as in our scripts. Memory is the peak of the process (on CUDA:
of the allocator) at the last step; between revisions of ours, also without what the libraries held before there was a
model (`growth_mb` in the JSON file). CPU seconds (`cpu_seconds_per_update`) say more than the clock on a busy machine.

The sides share the weights of the models (random, from one folder), the prompts (a file of exactly one batch, so that
every update has the same ones), the number of responses and tokens, epochs, optimiser steps, learning rate and float32
weights; no dropout, no checkpoints. Responses have full length, because there is no stop token and the models cannot
sample EOS or padding; only in the setting `toy` do they end with EOS. The optimiser steps, responses and tokens of
every run are checked; in `toy`, compare the tokens per response that are printed.

The sides differ in this:
  - TRL 0.16.1 accepts max_grad_norm and never clips; ours and TRL 1.16 clip. Each library chooses its own optimiser.
  - Ours removes ended rows from the rollout. TRL does not, and TRL 0.16.1's RLOO samples all responses to full length.
  - Ours chooses the rows of a micro-batch, which changes numbers only by the rounding of float32.
  - TRL 1.16 has no PPO, and is the only version compared for GRPO, with KL in the loss. Its defaults bfloat16 and
    gradient checkpointing are turned off, so that both sides do the same work.

`update` in the JSON file is the time of the gradient steps alone, from the start of the epochs (of `update` in our
scripts) to the last optimiser step.

TRL runs in its own virtual environments, which are created in /tmp when first needed; each takes a minute and 1.5 GB.
Measure on an idle machine: if one of two threads has to wait for a core, an update can take ten times as long. `cores`
in the JSON file is CPU time per second; there is a warning if it is well below the number of threads.
"""

import argparse
import importlib
import itertools
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from common import RESULTS, ROOT, describe_machine, describe_ours, markdown, output_of, require
from run_trl import KEEP_MEMORY, TRAIN, VERSIONS, copy_toy, make_venv, write_tokenizer_config

# Only the standard library here: this file also runs in TRL's virtual environments, and the memory of the outer process
# would count in ru_maxrss of the processes that it starts.

PAD, EOS = 0, 1  # token ids of the random models


# ---------------------------------------------------------------------------------------------------------------------
# Settings and sides


@dataclass(frozen=True)
class Setting:
    """A model and the shape of an update."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    vocab: int = 1000
    batch: int = 64
    micro_batches: int = 1  # micro-batches of TRL per optimiser step
    prompt_lengths: tuple[int, int] = (16, 48)  # shortest and longest; the lengths of a batch are evenly spaced
    response_length: int = 53
    epochs: int = 4
    rloo_k: int = 4
    rollout_batch: int = 64  # responses sampled at once
    temperature: float = 0.7
    learning_rate: float = 3e-6  # so low that the models hardly change
    kl_coef: float = 0.05
    toy: bool = False  # models and prompts of toy/; responses end with EOS
    reward_layers: int | None = None  # of the reward model; by default as many as the policy has
    updates: int = 4  # measured updates of a run


GPT2 = {"layers": 12, "width": 768, "heads": 12, "vocab": 50257}
GROUPS = {"layers": 30, "width": 576, "heads": 9, "vocab": 49152, "reward_layers": 1}
GROUPS |= {"response_length": 24, "epochs": 1, "rloo_k": 8, "kl_coef": 0.0, "temperature": 1.0, "updates": 1}
SETTINGS = {
    "tiny": Setting(),
    "small": Setting(layers=6, width=256, heads=8, vocab=8000, updates=2),
    "gpt2": Setting(**GPT2, batch=16, updates=2),
    "vocab": Setting(vocab=50257, batch=32),
    "vocab-152k": Setting(vocab=151936, batch=32, epochs=2, updates=1),  # Qwen's vocabulary
    "toy": Setting(toy=True, vocab=3072, layers=2, width=80, updates=10),
    "prompt-40": Setting(**GROUPS, prompt_lengths=(40, 40), micro_batches=2),
    "prompt-200": Setting(**GROUPS, prompt_lengths=(200, 200), micro_batches=4),
    "prompt-800": Setting(**GROUPS, prompt_lengths=(800, 800), batch=16, micro_batches=4),
}


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    name: str
    kind: str  # "ours", or a version of TRL
    python: str
    scripts: Path | None = None  # ours: the folder of the scripts
    flags: str = ""  # ours: further flags
    variables: tuple[str, ...] = ()  # environment variables


# ---------------------------------------------------------------------------------------------------------------------
# Inside a run


def peak_memory_mb() -> float:
    """Peak memory in MB: of CUDA's allocator, else of this process."""
    import resource

    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


class Recorder:
    """Records the time at the end of each update, and for TRL also when it begins and the size of each rollout."""

    def __init__(self, setting: Setting):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.setting, self.steps, self.memory_mb = setting, 0, 0.0
        self.libraries_mb = peak_memory_mb()
        self.ends, self.cpu = [], []  # of each update: the clock, and CPU seconds
        self.began, self.updates = None, []  # the start of the gradient steps of this update; seconds of those of each
        self.rollouts = []  # (rows, tokens) of each
        register_optimizer_step_post_hook(self.end_step)

    def now(self) -> float:
        """The time in seconds, after the GPU has finished its work."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def watch(self, owner, name: str, size: Callable | None = None) -> None:
        """Wraps owner.name: with size(result, *args) a call is a rollout, else gradient steps begin after the first."""
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            result = original(*args, **kwargs)
            if size:
                self.rollouts.append(size(result, *args))
            else:
                self.began = self.began or self.now()
            return result

        setattr(owner, name, watched)

    def end_step(self, *_) -> None:
        """Records an update after its last optimiser step."""
        self.steps += 1
        if self.steps % self.setting.epochs == 0:
            self.ends.append(self.now()), self.cpu.append(time.process_time())
            self.updates.append(self.ends[-1] - (self.began or math.nan))
            self.began, self.memory_mb = None, peak_memory_mb()

    def result(self, kind: str) -> dict:
        """The measurements. It ends with an error if the run did not have the sizes of the setting."""
        import torch

        s, count, (rows, tokens) = self.setting, len(self.ends), map(list, zip(*self.rollouts))
        is_right = count == s.updates + 1 and rows == [s.batch] * count
        require(is_right, f"expected {s.updates + 1} updates of {s.batch} responses, got {count} with {rows}")
        require(s.toy or set(tokens) == {s.batch * s.response_length}, f"some responses ended early: {tokens} tokens")
        seconds, packages = self.ends[-1] - self.ends[0], ["torch", "transformers", *["trl"] * (kind != "ours")]
        return {
            "seconds_per_update": seconds / s.updates,
            "episodes_per_second": s.batch * s.updates / seconds,
            "update": statistics.fmean(self.updates[1:]),
            "memory_mb": self.memory_mb,
            "growth_mb": self.memory_mb - self.libraries_mb,
            "cpu_seconds_per_update": (self.cpu[-1] - self.cpu[0]) / s.updates,
            "cores": (self.cpu[-1] - self.cpu[0]) / seconds,
            "mean_tokens": statistics.fmean(tokens) / s.batch,
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "versions": {name: metadata.version(name) for name in packages},
        }


def train_ours(spec: dict, setting: Setting, recorder: Recorder) -> None:
    """train(Args(...)) of one of our scripts. Reads the sizes of the rollouts from metrics.jsonl."""
    import tyro

    script = importlib.import_module(spec["algorithm"])
    recorder.libraries_mb = peak_memory_mb()
    update = script.update

    def watched(*args):
        """Notes when the gradient steps begin."""
        recorder.began = recorder.now()
        return update(*args)

    script.update = watched
    script.train(tyro.cli(script.Args, args=spec["flags"]))
    lines = [json.loads(line) for line in Path(spec["output"], "run/metrics.jsonl").read_text().splitlines()]
    rows = [b - a for a, b in itertools.pairwise([0, *(line["episode"] for line in lines)])]
    length = "completions/mean_length" if spec["algorithm"] == "grpo" else "val/response_length"
    recorder.rollouts = [(n, round(n * line[length])) for n, line in zip(rows, lines)]


def work(spec: dict) -> None:
    """The work of a child process: makes models, or trains and writes the measurements."""
    setting, kind = Setting(**spec["setting"]), spec["kind"]
    if kind == "models":
        return make_models(Path(spec["output"]), setting)
    sys.path.insert(0, spec.get("scripts", ""))
    recorder = Recorder(setting)
    (TRAIN | {"ours": train_ours})[kind](spec, setting, recorder)
    Path(spec["output"], "result.json").write_text(json.dumps(recorder.result(kind)))


def make_models(folder: Path, setting: Setting) -> None:
    """Writes policy, reward model, a tokenizer with the words t2, t3, ..., and prompts; or copies the toy world."""
    if setting.toy:
        return copy_toy(folder)
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

    torch.manual_seed(1)
    longest = 2 * setting.prompt_lengths[1] + setting.response_length  # earlier revisions try a prompt as a response
    size = {"n_layer": setting.layers, "n_embd": setting.width, "n_head": setting.heads, "vocab_size": setting.vocab}
    size |= {"n_positions": 128 * math.ceil(longest / 128), "num_labels": 1}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**size, **no_dropout, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=EOS)
    policy = GPT2LMHeadModel(config)
    with torch.no_grad():  # never sample PAD or EOS: the final states sum to the width, so their logits are -width
        policy.transformer.ln_f.bias.fill_(1.0)
        policy.lm_head.weight[[PAD, EOS]] = -1.0
    words = {f"t{i}": i for i in range(setting.vocab) if i not in (PAD, EOS)} | {"<pad>": PAD, "<eos>": EOS}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    judge = GPT2Config(**config.to_dict() | {"n_layer": setting.reward_layers or setting.layers})
    for name, model in (("policy", policy), ("reward", GPT2ForSequenceClassification(judge))):
        model.save_pretrained(folder / name)
        tokenizer.save(str(folder / name / "tokenizer.json"))
        write_tokenizer_config(folder / name, "<pad>", "<eos>")
    for algorithm in ("ppo", "rloo", "grpo"):
        write_prompts(folder, setting, algorithm)


def write_prompts(folder: Path, setting: Setting, algorithm: str) -> None:
    """Writes prompts-ALGORITHM.jsonl: one batch of random prompts.

    With several micro-batches it is repeated for every update, so that no run reaches the last batch of the data, in
    which TRL 0.16.1 takes an optimiser step on each micro-batch.
    """
    import torch

    count = setting.batch if algorithm == "ppo" else setting.batch // setting.rloo_k
    shortest, longest = setting.prompt_lengths
    lengths = [round(shortest + (longest - shortest) * (i + 1) / count) for i in range(count)]
    rows = [torch.randint(2, setting.vocab, (n,)).tolist() for n in lengths]
    texts = [" ".join(f"t{i}" for i in row) + " " for row in rows]  # with the space, TRL 1.16's texts have whole words
    lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
    times = 1 if setting.micro_batches == 1 else setting.updates + 3
    (folder / f"prompts-{algorithm}.jsonl").write_text("".join(lines * times))


# ---------------------------------------------------------------------------------------------------------------------
# The sides, their runs, and the comparison


def our_side(revision: str, flags: str, algorithms: list[str], folder: Path) -> Side:
    """Our scripts at a git revision or of the working tree (.), copied so that the tree may change meanwhile."""
    name = "tree" if revision == "." else output_of(["git", "rev-parse", "--short", revision]).strip()
    scripts = folder / name
    scripts.mkdir(exist_ok=True)
    shutil.copytree(ROOT / "rewards", scripts / "rewards", dirs_exist_ok=True)  # rloo.py looks there for its reward
    for file in (f"{algorithm}.py" for algorithm in algorithms):
        text = (ROOT / file).read_text() if revision == "." else output_of(["git", "show", f"{name}:{file}"])
        (scripts / file).write_text(text)
    return Side(f"{name} {flags}".strip(), "ours", sys.executable, scripts, flags)


def ours_flags(setting: Setting, algorithm: str, models: Path, output: Path) -> list[str]:
    """The flags of our script for the setting."""
    s = setting
    own = {
        "ppo": f"--kl-coef {s.kl_coef}",
        "rloo": f"--kl-coef {s.kl_coef} --rloo-k {s.rloo_k}",
        "grpo": f"--beta {s.kl_coef} --num-generations {s.rloo_k} --reward-fn {ROOT}/rewards/model.py:score",
    }[algorithm]
    if algorithm != "grpo":
        own += f" --reward-model {models}/reward --local-rollout-forward-batch-size {s.rollout_batch}"
    return (
        f"--model {models}/policy --dataset {models}/prompts-{algorithm}.jsonl "
        f"--max-prompt-length {max(512, s.prompt_lengths[1])} --response-length {s.response_length} "
        f"--temperature {s.temperature} --batch-size {s.batch} "
        f"--num-mini-batches 1 --num-ppo-epochs {s.epochs} --total-episodes {s.batch * (s.updates + 1)} "
        f"--learning-rate {s.learning_rate} --output-dir {output} --num-sample-generations 0 --save-steps 1000 {own}"
    ).split()


def start(spec: dict, python: str, variables: tuple[str, ...] = ()) -> None:
    """Runs work(spec) in its own process."""
    file, output = Path(spec["output"], "spec.json"), Path(spec["output"], "output.txt")
    file.write_text(json.dumps(spec, default=str))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"REWARD_MODEL": str(spec.get("reward", ""))}  # which rewards/model.py reads
    environment |= dict(variable.split("=") for variable in variables)
    with output.open("w") as out:
        done = subprocess.run([python, __file__, "--work", file], stdout=out, stderr=out, env=environment, check=False)
    tail = "\n".join(output.read_text(errors="replace").strip().splitlines()[-12:])
    require(done.returncode == 0, f"it failed (exit code {done.returncode}); its last lines:\n{tail}")


def run(side: Side, setting: Setting, algorithm: str, models: Path) -> dict:
    """Runs one process of one side; returns its measurements."""
    with tempfile.TemporaryDirectory(dir=models, prefix="run-") as output:
        spec = {"kind": side.kind, "algorithm": algorithm, "setting": asdict(setting), "output": output}
        spec |= {"policy": models / "policy", "reward": models / "reward"}
        spec |= {"prompts": models / f"prompts-{algorithm}.jsonl"}
        if side.kind == "ours":
            flags = ours_flags(setting, algorithm, models, Path(output, "run")) + shlex.split(side.flags)
            spec |= {"scripts": side.scripts, "flags": flags}
        start(spec, side.python, side.variables)
        result = json.loads(Path(output, "result.json").read_text())
    numbers = f"{result['seconds_per_update']:.2f} s per update, {result['memory_mb']:.0f} MB"
    print(f"  {side.name}: {numbers}, {result['mean_tokens']:.1f} tokens per response", flush=True)
    if result["cores"] < 0.8 * result["threads"]:
        print(f"  warning: it had {result['cores']:.1f} cores for {result['threads']} threads. Is the machine busy?")
    return result


def compare(name: str, setting: Setting, algorithm: str, ours: Side, other: Side, folder: Path, args) -> dict:
    """Runs the sides in turn; returns measurements, medians, and the ratios of ours to the other and to `kept`."""
    models, sides, pairs = folder / name, {"ours": ours, "other": other}, []
    if args.keep_memory:
        sides["kept"] = replace(other, name=f"{other.name}, freed memory kept", variables=KEEP_MEMORY)
    if not models.exists():
        models.mkdir()
        start({"kind": "models", "setting": asdict(setting), "output": models}, sys.executable)
    for repeat in range(args.repeats):
        print(f"{name} {algorithm}, pair {repeat + 1} of {args.repeats}", flush=True)
        order = list(sides)[:: -1 if repeat % 2 else 1]
        pairs.append({key: run(sides[key], setting, algorithm, models) for key in order})
    numbers = [key for key, value in pairs[0]["ours"].items() if isinstance(value, float)]
    summary = {side: {key: statistics.median(pair[side][key] for pair in pairs) for key in numbers} for side in sides}
    measures = {"speed": ("episodes_per_second", "other"), "speed_kept": ("episodes_per_second", "kept")}
    measures |= {"memory": ("memory_mb", "other"), "cpu": ("cpu_seconds_per_update", "other")}
    if other.kind == "ours":  # TRL imports its libraries later
        measures["growth"] = "growth_mb", "other"
    for key, (measure, side) in measures.items():
        if side in sides:
            ratios = [pair["ours"][measure] / pair[side][measure] for pair in pairs]
            summary[key] = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    found = {"setting": name, "algorithm": algorithm, "other": other.name, "our_flags": ours.flags}
    return found | {"geometry": asdict(setting), "summary": summary, "pairs": pairs}


# ---------------------------------------------------------------------------------------------------------------------
# Results, and the command line


def table(comparisons: list[dict]) -> str:
    """All comparisons, in Markdown."""
    head = ["setting", "against", "theirs as installed, episodes/s", "theirs, freed memory kept", "ours"]
    head += ["**ratio to installed**", "**to kept**", "theirs as installed, GB", "theirs, kept", "ours"]
    lines = [[*head, "ratio to installed", "without libraries", "CPU seconds, ours to theirs"]]
    for c in comparisons:
        sides = [c["summary"].get(name) for name in ("other", "kept", "ours")]
        ratios = {}
        for name, r in c["summary"].items():
            if "median" in r:
                ratios[name] = f"{r['median']:.2f}" + f" ({r['least']:.2f}–{r['most']:.2f})" * (len(c["pairs"]) > 1)
        flags = f", `{c['our_flags']}`" if c["our_flags"] else ""
        line = [f"{c['setting']} {c['algorithm']}{flags}", c["other"]]
        line += [f"{side['episodes_per_second']:.3g}" if side else "–" for side in sides]
        line += [f"**{ratios[name]}**" if name in ratios else "–" for name in ("speed", "speed_kept")]
        line += [f"{side['memory_mb'] / 1024:.2f}" if side else "–" for side in sides]
        lines.append([*line, ratios["memory"], ratios.get("growth", "–"), ratios["cpu"]])
    return markdown(lines, "llrrrrrrrrrrr")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--settings", nargs="+", choices=SETTINGS, help="by default tiny to toy")
    add("--algorithms", nargs="+", choices=("ppo", "rloo", "grpo"), default=["ppo", "rloo"])
    add("--against", nargs="+", choices=TRAIN, default=["0.16.1"], help="versions of TRL")
    add("--baseline", metavar="REV", help="compare with our own scripts at a git revision, or in this tree (.)")
    add("--ours", metavar="FLAGS", default="", help='further flags for our side: --ours="--bf16"')
    add("--both", metavar="FLAGS", default="", help="further flags for both sides, if --baseline is the other one")
    add("--keep-memory", action="store_true", help="run TRL a second time in each pair, with freed memory kept (glibc)")
    add("--repeats", type=int, default=1, help="pairs of runs")
    add("--quick", action="store_true", help="the setting tiny, one measured update: two minutes")
    add("--output", type=Path, default=RESULTS / "throughput.json", help="JSON file")
    args = parser.parse_args()
    if args.both and not args.baseline:
        parser.error("--both is for --baseline: TRL does not have our flags")
    if args.keep_memory and args.baseline:
        parser.error("--keep-memory is for TRL; our scripts always keep freed memory")
    return args


def main() -> None:
    """Measures all settings, and writes the results after each."""
    args = parse_arguments()
    names = args.settings or (["tiny"] if args.quick else [name for name in SETTINGS if not name.startswith("prompt")])
    results = {"machine": describe_machine(), "date": time.strftime("%Y-%m-%d %H:%M")}
    results |= {"command": shlex.join(sys.argv[1:]), "ours": describe_ours(ROOT), "comparisons": []}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        flags = f"{args.both} {args.ours}".strip()
        ours = replace(our_side(".", flags, args.algorithms, Path(folder)), name="ours")
        if args.baseline:
            others = [our_side(args.baseline, args.both, args.algorithms, Path(folder))]
        else:
            others = [Side(f"TRL {version}", version, make_venv(version)) for version in args.against]
        for name, algorithm, other in itertools.product(names, args.algorithms, others):
            if other.kind in VERSIONS and algorithm not in VERSIONS[other.kind].algorithms:
                continue
            setting = replace(SETTINGS[name], updates=1) if args.quick else SETTINGS[name]
            result = compare(name, setting, algorithm, ours, other, Path(folder), args)
            results["comparisons"].append(result)
            results["machine"]["gpu"] = result["pairs"][0]["ours"]["gpu"]
            args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{table(results['comparisons'])}\n\nwritten: {args.output}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(json.loads(Path(sys.argv[2]).read_text()))
    else:
        main()
