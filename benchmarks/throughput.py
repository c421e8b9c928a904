"""Throughput: time and memory of one PPO or RLOO update, ours beside TRL's, or beside our own at another revision.

    python benchmarks/throughput.py --quick                           # tiny models against TRL 0.16.1, two minutes
    python benchmarks/throughput.py                                   # all settings; an hour on two CPU cores
    python benchmarks/throughput.py --baseline HEAD                   # what did the changes in the working tree bring?
    python benchmarks/throughput.py --baseline . --ours "--bf16"      # what does a flag bring?
    python benchmarks/throughput.py --growth                          # how do time and memory grow with the batch, ...?
    python benchmarks/throughput.py --settings tiny,vocab --algorithms ppo --against 0.16.1,0.7.11,1.16

What is measured. Each library's own entry point trains as a user would have it: `train(Args(...))` of ppo.py and
rloo.py; PPOTrainer and RLOOTrainer of TRL. Each run is a fresh process. An update lasts from the last optimiser step of
one update to the last step of the next: rollout, scoring, gradient steps, logging, all of it, on all sides by the same
clock, a hook that torch calls after every optimiser step. The first update of a process is warm-up. A run counts
updates for `--seconds`, two at least. The two sides alternate, `--repeats` times, and whoever began comes second next
time, so that a machine that slows down slows down both. Memory is the peak of the process (on CUDA: of the allocator)
when the last counted update ends; `imports` says how much of it was there before a model was loaded.

What is made equal: model weights (random, in a folder that all load), prompts (a file that holds one batch, so that
every update of every side sees the same ones), responses, their tokens, epochs, mini-batches, optimiser steps, learning
rate, float32 weights, no dropout. Responses run to full length: there is no stop token, and the models cannot draw EOS
or padding. Only in the setting `toy` responses end where the model ends them. Every run is checked for the responses,
tokens and optimiser steps of each of its updates, TRL's for the prompt tokens too, and fails if they are not what the
setting says; in `toy` the two sides must agree in their mean length, as nearly as chance lets them.

What is not equal, since it is what the libraries differ in:
  - TRL 0.16.1 accepts max_grad_norm and never clips; ours and TRL 1.16 clip.
  - the optimiser is each library's own choice; `optimizer` in the JSON says which, and whether it is fused.
  - ours takes rows that have ended out of the rollout; TRL does not, and TRL 0.16.1's RLOO draws all responses to full
    length.
  - ours may cut a micro-batch further by itself, and chooses attention and matrix kernels for the machine; the numbers
    are the same up to float32's rounding. TRL leaves that to transformers and torch.
  - under --bf16 ours and TRL 1.16 run all models under autocast. TRL 0.16.1 leaves the reference and the reward model
    in float32, and in PPO generation and the scoring critic too; TRL 0.7.11 generation and the reward model.
  - TRL 0.7.11 has a value head on the policy: there ours runs with `--critic shared`. Both at temperature 1, which it
    leaves out of its log-probabilities. Its loop is the user's to write: here it samples as many at once as the others
    (by itself it would 4), and the reward model is called once a batch.
  - TRL 1.16 has no PPO. Its own defaults, bfloat16 and gradient checkpointing, are off here, so that the work is equal.

The split into rollout, score (reference, critic, reward) and update (gradient steps) is ours from metrics.jsonl, TRL's
from the moments at which it starts and ends generation and enters the loop of epochs. What is missing from the three to
the whole update is metrics, logging and the advantage.

TRL runs in virtual environments of its own, which are made in --venvs when they are first needed: each takes a minute
and 1.5 GB. Measure on a machine with nothing else to do: two threads of torch of which one has to wait for a core can
take ten times as long. `cores` is the CPU time per second; where it is well below the number of threads, a warning says
so. In the JSON, `kernel_share` is the part of the CPU time that the operating system takes, mostly to hand out memory.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

# No package beyond the standard library up here: this file also runs inside the virtual environments of TRL, and what
# the outer process holds in memory would show in ru_maxrss of the processes that it starts.

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
PAD, EOS = 0, 1  # of the models made here
LEARNING_RATE = 3e-6  # so low that the models of all sides stay what they are
KL_COEF = 0.05
MAX_UPDATES = 20  # counted in one run
SPARE_UPDATES = 3  # that a run is planned longer than it is let to run


class BenchmarkError(Exception):
    """A mistake in the input, or two sides that did not do the same: shown as one sentence."""


def require(condition: object, sentence: str) -> None:
    """Raises BenchmarkError with the sentence unless the condition holds."""
    if not condition:
        raise BenchmarkError(sentence)


# ---------------------------------------------------------------------------------------------------------------------
# What is run: settings and sides


@dataclass(frozen=True)
class Setting:
    """A model and the geometry of an update."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    vocab: int = 1000
    positions: int | None = None  # by default as many as are needed
    architecture: str = "gpt2"
    batch: int = 64
    prompt_lengths: tuple[int, int] = (16, 48)  # shortest and longest; those of a batch are spread evenly between
    response_length: int = 53
    epochs: int = 4
    mini_batches: int = 1
    micro_batch: int | None = None  # responses in one forward and backward; by default the whole mini-batch
    rloo_k: int = 4
    temperature: float = 0.7
    bf16: bool = False
    toy: bool = False  # the models and prompts of toy/, responses end with EOS
    gpu: bool = False  # needs one

    @property
    def steps_per_update(self) -> int:
        """Optimiser steps."""
        return self.epochs * self.mini_batches

    @property
    def per_device(self) -> int:
        """Responses in one forward and backward."""
        return self.micro_batch or self.batch // self.mini_batches

    @property
    def accumulation(self) -> int:
        """Micro-batches in a mini-batch."""
        return self.batch // self.mini_batches // self.per_device

    def num_prompts(self, algorithm: str) -> int:
        """Prompts in a batch."""
        return self.batch // self.rloo_k if algorithm == "rloo" else self.batch


GPT2 = {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "positions": 1024}
PYTHIA_1B = {"layers": 16, "width": 2048, "heads": 8, "vocab": 50304, "positions": 2048, "architecture": "gpt_neox"}
GPU = {"batch": 512, "prompt_lengths": (64, 512), "bf16": True, "gpu": True}
SETTINGS = {
    "tiny": Setting(),
    "small": Setting(layers=6, width=256, heads=8, vocab=8000),
    "gpt2": Setting(**GPT2, batch=16),
    "vocab": Setting(vocab=50257, batch=32),
    "toy": Setting(toy=True, vocab=3072, layers=2, width=80),
    "gpu-gpt2": Setting(**GPT2, **GPU, micro_batch=64),
    "gpu-pythia": Setting(**PYTHIA_1B, **GPU, micro_batch=32),
}

GROWTH_BASE = Setting(batch=32, response_length=32)
GROWTH = {  # axis: values, and what they set; GROWTH_BASE lies on each
    "batch": {n: {"batch": n} for n in (16, 32, 64, 128)},
    "response length": {n: {"response_length": n} for n in (16, 32, 64, 128)},
    "vocabulary": {n: {"vocab": n} for n in (1000, 8000, 32000, 64000)},
    "weights in the layers": {  # 12 squares of the width in each
        12 * n * d * d: {"layers": n, "width": d, "heads": d // 32} for n, d in ((2, 64), (4, 128), (6, 256), (8, 512))
    },
}


@dataclass(frozen=True)
class Trl:
    """A version of TRL: its environment, and what it can do."""

    venv: str
    pins: str
    algorithms: tuple[str, ...]
    ours: str = ""  # flags that make ours do the same
    temperature: float | None = None  # where only one is possible


TRL = {
    "0.16.1": Trl(
        "trl016", "trl==0.16.1 transformers==4.51.3 torch==2.13.0 accelerate==1.6.0 datasets==3.5.0 numpy==2.2.6",
        ("ppo", "rloo"),
    ),
    "0.7.11": Trl(  # pyarrow: newer ones need a NumPy that this transformers does not know
        "trl07", "trl==0.7.11 transformers==4.38.2 torch==2.13.0 accelerate==0.27.2 datasets==2.18.0 numpy==1.26.4 "
        "pyarrow==17.0.0", ("ppo",), ours="--critic shared", temperature=1.0,
    ),
    "1.16": Trl(
        "trl116", "trl==1.16.0 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 datasets==5.2.0 numpy==2.4.6",
        ("rloo",),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    name: str
    kind: str  # "ours", or a key of TRL
    python: str
    scripts: Path | None = None  # ours: the folder of ppo.py and rloo.py
    flags: tuple[str, ...] = ()  # ours: further ones


# ---------------------------------------------------------------------------------------------------------------------
# Inside a run: the clock


def peak_memory_mb() -> float:
    """Peak memory in MB: of CUDA's allocator, else of this process."""
    import resource

    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


class Recorder:
    """Takes the time of every update by a hook that torch calls after each optimiser step, and ends the process.

    The process ends at once when enough updates are counted: saving a model is no part of an update. With ours it waits
    for the last line of metrics.jsonl, which is written after the last step.
    """

    def __init__(self, spec: dict):
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.spec, self.torch, self.memory_imports = spec, torch, peak_memory_mb()
        self.steps, self.optimizer, self.marks, self.phases = 0, "", {}, []
        self.ends, self.cpu, self.kernel = [], [], []  # of each update: seconds of clock, cores and kernel
        self.rows, self.tokens, self.prompt_tokens = [], [], []  # of each rollout, where it can be seen (TRL)
        register_optimizer_step_post_hook(self.after_step)

    def now(self) -> float:
        """Seconds, when the GPU has done what was asked of it."""
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self, phase: str) -> None:
        """A phase of the update begins: rollout, score or update."""
        self.marks.setdefault(phase, self.now())

    def after_step(self, optimizer, *_) -> None:
        """The hook: at the last step of an update, notes the time."""
        self.steps += 1
        if self.steps == 1:
            group = optimizer.param_groups[0]
            self.optimizer = f"{type(optimizer).__name__}, fused={group.get('fused')}, foreach={group.get('foreach')}"
        if self.steps % self.spec["steps_per_update"]:
            return
        end = self.now()
        self.ends.append(end), self.cpu.append(time.process_time()), self.kernel.append(os.times().system)
        if len(self.marks) == 3:
            start, score, update = (self.marks[name] for name in ("rollout", "score", "update"))
            self.phases.append({"rollout": score - start, "score": update - score, "update": end - update})
        self.marks = {}
        warmup, counted = self.spec["warmup"], len(self.ends) - self.spec["warmup"]
        is_long = counted > 0 and end - self.ends[warmup - 1] >= self.spec["seconds"]
        if counted >= MAX_UPDATES or (counted >= self.spec["min_updates"] and is_long):
            self.finish()

    def finish(self) -> None:
        """Writes what was seen, and ends the process."""
        Path(self.spec["result"]).write_text(json.dumps(self.result()))
        if self.spec["kind"] != "ours":
            os._exit(0)
        threading.Thread(target=self.exit_after_metrics, daemon=True).start()

    def exit_after_metrics(self) -> None:
        """Ends the process as soon as metrics.jsonl has a line for each update."""
        lines, deadline = Path(self.spec["output"]) / "metrics.jsonl", time.monotonic() + 120
        while time.monotonic() < deadline:
            if lines.exists() and lines.read_bytes().count(b"\n") >= len(self.ends):
                os._exit(0)
            time.sleep(0.01)
        os._exit(3)

    def result(self) -> dict:
        """What the outer process gets to know."""
        import torch
        import transformers

        first = self.spec["warmup"] - 1
        wall, cpu, kernel = (x[-1] - x[first] for x in (self.ends, self.cpu, self.kernel))
        versions = {"python": platform.python_version(), "torch": torch.__version__,
                    "transformers": transformers.__version__}  # fmt: skip
        if self.spec["kind"] != "ours":
            versions["trl"] = sys.modules["trl"].__version__
        return {
            "seconds": [b - a for a, b in zip(self.ends[first:], self.ends[first + 1 :])],
            "updates": len(self.ends), "steps": self.steps, "phases": self.phases, "rows": self.rows,
            "tokens": self.tokens, "prompt_tokens": self.prompt_tokens, "memory_mb": peak_memory_mb(),
            "imports_mb": self.memory_imports, "cores": cpu / wall, "kernel_share": kernel / cpu,
            "threads": torch.get_num_threads(), "optimizer": self.optimizer,
            "matmul_precision": torch.get_float32_matmul_precision(), "versions": versions,
        }  # fmt: skip

    def count(self, queries, responses) -> None:
        """Notes the size of a rollout: prompts (B, P) left-padded, responses (B, T) with whatever follows their end."""
        is_end = ((responses == self.spec["eos"]) | (responses == self.spec["pad"])).long()
        self.rows.append(len(responses))
        self.tokens.append(int((is_end.cumsum(1) - is_end == 0).sum()))
        self.prompt_tokens.append(int((queries != self.spec["pad"]).sum()))

    def watch_permutation(self):
        """numpy.random.permutation as it is; TRL calls it where an epoch begins, and so enters the gradient steps."""
        import numpy as np

        original = np.random.permutation

        def permutation(*args):
            """The first of an update starts the phase."""
            self.begin("update")
            return original(*args)

        return mock.patch("numpy.random.permutation", permutation)


# ---------------------------------------------------------------------------------------------------------------------
# Inside a run: the training of each side


def run_ours(spec: dict) -> None:
    """train(Args(...)) of ppo.py or rloo.py."""
    import importlib.util

    module_spec = importlib.util.spec_from_file_location(spec["algorithm"], spec["script"])
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    import datasets  # noqa: F401 - the script imports it later; TRL has done so before its memory is noted
    import tyro

    args = tyro.cli(module.Args, args=spec["flags"])
    Recorder(spec)
    module.train(args)


def load_prompts(spec: dict) -> list[str]:
    """The texts of the prompts."""
    return [json.loads(line)["prompt"] for line in Path(spec["prompts"]).read_text().splitlines()]


def load_models(spec: dict) -> tuple:
    """Tokenizer, policy and reward model, from the folders that ours loads too."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    return (
        AutoTokenizer.from_pretrained(spec["policy"], padding_side="left"),
        AutoModelForCausalLM.from_pretrained(spec["policy"]),
        AutoModelForSequenceClassification.from_pretrained(spec["reward"], num_labels=1),
    )


def trl016_arguments(spec: dict) -> dict:
    """Arguments of PPOConfig and RLOOConfig; those not named here keep TRL's defaults."""
    import torch

    return {
        "output_dir": spec["output"], "total_episodes": spec["batch"] * spec["total_updates"],
        "per_device_train_batch_size": spec["per_device"], "gradient_accumulation_steps": spec["accumulation"],
        "num_mini_batches": spec["mini_batches"], "num_ppo_epochs": spec["epochs"],
        "response_length": spec["response_length"], "temperature": spec["temperature"],
        "stop_token": "eos" if spec["toy"] else None, "learning_rate": LEARNING_RATE, "kl_coef": KL_COEF,
        "num_sample_generations": 0, "bf16": spec["bf16"], "use_cpu": not torch.cuda.is_available(),
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


def run_trl016(spec: dict) -> None:
    """TRL 0.16.1, put together as its examples/scripts/ppo/ppo.py and rloo/rloo.py do."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl import PPOConfig, PPOTrainer, RLOOConfig, RLOOTrainer
    from trl.trainer import ppo_trainer, rloo_trainer

    recorder = Recorder(spec)
    tokenizer, policy, reward_model = load_models(spec)
    reference = AutoModelForCausalLM.from_pretrained(spec["policy"])
    prompts = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in load_prompts(spec)]})
    common = {"processing_class": tokenizer, "reward_model": reward_model, "train_dataset": prompts,
              "eval_dataset": prompts}  # fmt: skip
    arguments = trl016_arguments(spec)
    if spec["algorithm"] == "ppo":
        value_model = AutoModelForSequenceClassification.from_pretrained(spec["reward"], num_labels=1)
        args, module = PPOConfig(**arguments), ppo_trainer
        trainer = PPOTrainer(args=args, model=policy, ref_model=reference, value_model=value_model, **common)
    else:
        config, module = RLOOConfig(**arguments, rloo_k=spec["rloo_k"]), rloo_trainer
        trainer = RLOOTrainer(config=config, policy=policy, ref_policy=reference, **common)
    generation = module.batch_generation

    def batch_generation(model, queries, *args):
        """TRL's, with the clock around it."""
        recorder.begin("rollout")
        texts, logits = generation(model, queries, *args)
        recorder.count(queries, texts[:, queries.shape[1] :])
        recorder.begin("score")
        return texts, logits

    with mock.patch.object(module, "batch_generation", batch_generation), recorder.watch_permutation():
        trainer.train()


def run_trl07(spec: dict) -> None:
    """TRL 0.7.11: PPOTrainer with a value head on the policy, in the loop of its quickstart."""
    import torch
    from datasets import Dataset
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

    recorder = Recorder(spec)
    tokenizer, policy, reward_model = load_models(spec)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(policy, summary_dropout_prob=0.0)
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in load_prompts(spec)]
    config = PPOConfig(
        batch_size=spec["batch"], mini_batch_size=spec["per_device"], gradient_accumulation_steps=spec["accumulation"],
        ppo_epochs=spec["epochs"], learning_rate=LEARNING_RATE, adap_kl_ctrl=False, init_kl_coef=KL_COEF,
        accelerator_kwargs={"mixed_precision": "bf16" if spec["bf16"] else "no", "cpu": not torch.cuda.is_available()},
    )  # fmt: skip
    collate = lambda batch: {"input_ids": [torch.as_tensor(row["input_ids"]) for row in batch]}
    data = Dataset.from_dict({"input_ids": [row.tolist() for row in rows]})
    trainer = PPOTrainer(config, policy, tokenizer=tokenizer, dataset=data, data_collator=collate)
    device = trainer.accelerator.device
    reward_model.to(device).eval()
    generation = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "pad_token_id": spec["pad"],
                  "eos_token_id": spec["eos"], "max_new_tokens": spec["response_length"]}  # fmt: skip

    def update(batch) -> None:
        """One pass of the loop."""
        queries = [query.to(device) for query in batch["input_ids"]]
        recorder.begin("rollout")
        responses = trainer.generate(queries, batch_size=spec["rollout_batch"], return_prompt=False, **generation)
        pad = {"batch_first": True, "padding_value": spec["pad"]}
        recorder.count(*(torch.nn.utils.rnn.pad_sequence(x, **pad) for x in (queries, responses)))
        recorder.begin("score")
        with torch.no_grad():
            ids = torch.nn.utils.rnn.pad_sequence([torch.cat(text) for text in zip(queries, responses)], **pad)
            scores = reward_model(ids, attention_mask=(ids != spec["pad"]).long()).logits[:, 0]
        trainer.step(queries, responses, list(scores))

    with recorder.watch_permutation():
        for _ in range(spec["total_updates"]):
            for batch in trainer.dataloader:
                update(batch)


def run_trl116(spec: dict) -> None:
    """TRL 1.16: RLOOTrainer, with `num_iterations` for the epochs."""
    import torch
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    recorder = Recorder(spec)
    tokenizer, _, reward_model = load_models(spec)
    config = RLOOConfig(
        output_dir=spec["output"], max_steps=spec["total_updates"] * spec["steps_per_update"],
        per_device_train_batch_size=spec["per_device"], gradient_accumulation_steps=spec["accumulation"],
        steps_per_generation=spec["accumulation"] * spec["mini_batches"], num_iterations=spec["epochs"],
        num_generations=spec["rloo_k"], max_completion_length=spec["response_length"],
        temperature=spec["temperature"], learning_rate=LEARNING_RATE, beta=KL_COEF, bf16=spec["bf16"],
        gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = RLOOTrainer(
        model=spec["policy"], reward_funcs=reward_model, reward_processing_classes=tokenizer, args=config,
        processing_class=tokenizer, train_dataset=Dataset.from_dict({"prompt": load_prompts(spec)}),
    )  # fmt: skip
    generate, score = trainer._generate_single_turn, trainer._generate_and_score_completions

    def generate_single_turn(prompt_ids, *args):
        """TRL's, with the clock around it."""
        recorder.begin("rollout")
        completions = generate(prompt_ids, *args)
        recorder.rows.append(len(completions))
        recorder.tokens.append(sum(map(len, completions)))
        recorder.prompt_tokens.append(sum(map(len, prompt_ids)))
        recorder.begin("score")
        return completions

    def generate_and_score_completions(inputs):
        """TRL's; what follows are the gradient steps."""
        output = score(inputs)
        recorder.begin("update")
        return output

    trainer._generate_single_turn = generate_single_turn
    trainer._generate_and_score_completions = generate_and_score_completions
    trainer.train()


# ---------------------------------------------------------------------------------------------------------------------
# Inside a process of ours: models and prompts


def make_models(spec: dict) -> None:
    """Policy, reward model and prompts in spec["folder"], and about.json, for all sides to load."""
    import torch

    folder, setting = Path(spec["folder"]), Setting(**spec["setting"])
    about = {"cuda": torch.cuda.is_available(), "gpu": torch.cuda.is_available() and torch.cuda.get_device_name()}
    if setting.toy:
        about |= copy_toy(folder)
    else:
        require(about["cuda"] or not setting.gpu, "the gpu settings need a GPU that torch can use")
        about["parameters"] = make_random_models(folder, setting)
        for algorithm in ("ppo", "rloo"):
            about[f"{algorithm}_prompt_tokens"] = write_prompts(folder, setting, algorithm)
    (folder / "about.json").write_text(json.dumps(about))


def make_random_models(folder: Path, setting: Setting) -> int:
    """A policy that cannot draw padding or EOS, a reward model, and a tokenizer of words t2, t3, ..."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, GPTNeoXConfig
    from transformers.utils import logging

    torch.manual_seed(1)
    needed = setting.prompt_lengths[1] + setting.response_length
    tokens = {"vocab_size": setting.vocab, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": EOS,
              "num_labels": 1}  # fmt: skip
    size = setting.positions or 128 * math.ceil(needed / 128)
    if setting.architecture == "gpt2":
        config = GPT2Config(
            n_layer=setting.layers, n_embd=setting.width, n_head=setting.heads, n_positions=size, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, **tokens,
        )  # fmt: skip
    else:
        config = GPTNeoXConfig(
            num_hidden_layers=setting.layers, hidden_size=setting.width, num_attention_heads=setting.heads,
            intermediate_size=4 * setting.width, max_position_embeddings=size, hidden_dropout=0.0,
            attention_dropout=0.0, **tokens,
        )  # fmt: skip
    policy = AutoModelForCausalLM.from_config(config)
    norm = policy.transformer.ln_f if setting.architecture == "gpt2" else policy.gpt_neox.final_layer_norm
    with torch.no_grad():  # the final states sum to the width, so the logits of these two are minus the width
        norm.bias.fill_(1.0)
        policy.get_output_embeddings().weight[[PAD, EOS]] = -1.0
    reward_model = AutoModelForSequenceClassification.from_config(config)
    logging.disable_progress_bar()
    for name, model in (("policy", policy), ("reward", reward_model)):
        model.save_pretrained(folder / name)
        write_tokenizer(folder / name, setting)
    return policy.num_parameters()


def write_tokenizer(folder: Path, setting: Setting) -> None:
    """One word a token. The class is written by a name that old and new versions of transformers know."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {f"t{i}": i for i in range(setting.vocab) if i not in (PAD, EOS)} | {"<pad>": PAD, "<eos>": EOS}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def write_prompts(folder: Path, setting: Setting, algorithm: str) -> int:
    """prompts-ALGORITHM.jsonl, one batch of random prompts; returns the tokens of that batch (RLOO: k times each).

    A batch in several micro-batches is repeated for every update to come: TRL 0.16.1 steps on each micro-batch of the
    last batch of a pass over the data, and then there must be no last one.
    """
    import torch
    from transformers import AutoTokenizer

    count, (shortest, longest) = setting.num_prompts(algorithm), setting.prompt_lengths
    lengths = [round(shortest + (longest - shortest) * (i + 1) / count) for i in range(count)]
    rows = [torch.randint(2, setting.vocab, (n,)).tolist() for n in lengths]
    texts = [" ".join(f"t{i}" for i in row) + " " for row in rows]  # the blank keeps TRL 1.16's texts in whole words
    read = AutoTokenizer.from_pretrained(folder / "policy")(texts)["input_ids"]
    require(read == rows, "the tokenizer does not give back the ids of the prompts")
    times = 1 if setting.accumulation == 1 else MAX_UPDATES + SPARE_UPDATES + 1
    lines = [json.dumps({"prompt": text}) + "\n" for text in texts] * times
    (folder / f"prompts-{algorithm}.jsonl").write_text("".join(lines))
    return sum(lengths) * setting.batch // count


def copy_toy(folder: Path) -> dict:
    """The toy world, its tokenizer written so that old versions of transformers and tokenizers read it too."""
    from transformers import AutoModelForCausalLM

    for name, source in (("policy", ROOT / "toy/sft"), ("reward", ROOT / "toy/reward_model")):
        shutil.copytree(source, folder / name, dirs_exist_ok=True)
        config = json.loads((source / "tokenizer_config.json").read_text())
        (folder / name / "tokenizer_config.json").write_text(
            json.dumps({key: config[key] for key in ("eos_token", "pad_token")}
                       | {"tokenizer_class": "PreTrainedTokenizerFast"})
        )  # fmt: skip
        tokenizer = json.loads((source / "tokenizer.json").read_text())
        merges = tokenizer["model"]["merges"]
        tokenizer["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    for algorithm in ("ppo", "rloo"):
        shutil.copy(ROOT / "toy/data/prompts/train.jsonl", folder / f"prompts-{algorithm}.jsonl")
    config = json.loads((ROOT / "toy/sft/config.json").read_text())
    parameters = AutoModelForCausalLM.from_pretrained(folder / "policy").num_parameters()
    return {"parameters": parameters, "pad": config["pad_token_id"], "eos": config["eos_token_id"]}


WORKERS = {
    "ours": run_ours, "0.16.1": run_trl016, "0.7.11": run_trl07, "1.16": run_trl116, "models": make_models,
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# Outside: the sides


def output_of(command: list[str]) -> str:
    """What a command prints; raises BenchmarkError with its complaint if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    require(done.returncode == 0, f"`{shlex.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def snapshot(work: Path) -> Path:
    """A copy of our scripts, so that all runs measure one text even while somebody edits it."""
    folder = work / "tree"
    folder.mkdir(exist_ok=True)
    for name in ("ppo.py", "rloo.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def revision(name: str, work: Path) -> tuple[str, Path]:
    """Our scripts at a git revision: its short hash and their folder. They need no other file of their time."""
    commit = output_of(["git", "rev-parse", "--short", "--verify", f"{name}^{{commit}}"]).strip()
    folder = work / f"revision-{commit}"
    folder.mkdir(exist_ok=True)
    for file in ("ppo.py", "rloo.py"):
        there = output_of(["git", "ls-tree", "--name-only", commit, file]).strip()
        if there:
            (folder / file).write_text(output_of(["git", "show", f"{commit}:{file}"]))
    return commit, folder


def make_venv(version: str, args: argparse.Namespace) -> str:
    """The Python of a TRL version's virtual environment, which is made if it is not there."""
    venv, pins = args.venvs / TRL[version].venv, TRL[version].pins.split()
    python = venv / "bin/python"
    if all(any(venv.glob(f"lib/python*/site-packages/{pin.replace('==', '-')}*.dist-info")) for pin in pins):
        return str(python)
    print(f"installing TRL {version} in {venv}", flush=True)
    if not python.exists():
        output_of([sys.executable, "-m", "venv", str(venv)])
    output_of([str(python), "-m", "pip", "install", "--quiet", *pins])
    return str(python)


def make_sides(args: argparse.Namespace, work: Path) -> tuple[Side, list[Side]]:
    """Ours, and those it is compared with."""
    ours = Side("ours", "ours", sys.executable, snapshot(work), tuple(shlex.split(args.ours)))
    if args.baseline is None:
        return ours, [Side(f"TRL {version}", version, make_venv(version, args)) for version in args.against]
    name, folder = ("tree", ours.scripts) if args.baseline == "." else revision(args.baseline, work)
    flags = shlex.split(args.baseline_ours)
    return ours, [Side(" ".join([name, *flags]), "ours", sys.executable, folder, tuple(flags))]


def can_run(side: Side, algorithm: str) -> bool:
    """Whether the side has the algorithm."""
    if side.kind == "ours":
        return (side.scripts / f"{algorithm}.py").exists()
    return algorithm in TRL[side.kind].algorithms


# ---------------------------------------------------------------------------------------------------------------------
# Outside: one run


def ours_flags(spec: dict) -> list[str]:
    """Our command line for the setting."""
    flags = {
        "model": spec["policy"], "reward-model": spec["reward"], "dataset": spec["prompts"],
        "output-dir": spec["output"], "response-length": spec["response_length"], "temperature": spec["temperature"],
        "stop-token": "eos" if spec["toy"] else "none", "per-device-train-batch-size": spec["per_device"],
        "gradient-accumulation-steps": spec["accumulation"], "num-mini-batches": spec["mini_batches"],
        "num-ppo-epochs": spec["epochs"], "total-episodes": spec["batch"] * spec["total_updates"],
        "local-rollout-forward-batch-size": spec["rollout_batch"], "learning-rate": LEARNING_RATE, "kl-coef": KL_COEF,
        "num-sample-generations": 0,
    }  # fmt: skip
    if spec["algorithm"] == "rloo":
        flags["rloo-k"] = spec["rloo_k"]
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))] + ["--bf16"] * spec["bf16"]


def make_spec(side: Side, setting: Setting, algorithm: str, models: Path, output: Path, args) -> dict:
    """All that a process has to know to make one run."""
    about = json.loads((models / "about.json").read_text())
    spec = asdict(setting) | {
        "kind": side.kind, "algorithm": algorithm, "output": str(output), "result": str(output / "result.json"),
        "policy": str(models / "policy"), "reward": str(models / "reward"),
        "prompts": str(models / f"prompts-{algorithm}.jsonl"), "per_device": setting.per_device,
        "accumulation": setting.accumulation, "steps_per_update": setting.steps_per_update, "rollout_batch": 64,
        "total_updates": args.warmup + MAX_UPDATES + SPARE_UPDATES, "warmup": args.warmup, "seconds": args.seconds,
        "min_updates": 1 if args.quick else 2, "bf16": setting.bf16 or args.bf16, "pad": about.get("pad", PAD),
        "eos": about.get("eos", EOS),
    }  # fmt: skip
    if side.kind == "ours":
        spec |= {"script": str(side.scripts / f"{algorithm}.py"), "flags": [*ours_flags(spec), *side.flags]}
    return spec


def start(spec: dict, python: str, log: Path, args: argparse.Namespace) -> None:
    """Runs this file in a process of its own, until it ends by itself."""
    file = log.with_suffix(".json")
    file.write_text(json.dumps(spec))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if args.threads:
        environment |= {"OMP_NUM_THREADS": str(args.threads)}
    with open(log, "w") as out:
        try:
            done = subprocess.run([python, __file__, "--worker", str(file)], stdout=out, stderr=subprocess.STDOUT,
                                  env=environment, timeout=args.timeout, check=False)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"{log.stem} took longer than --timeout {args.timeout} s") from error
    tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-12:])
    require(done.returncode == 0, f"{log.stem} failed (exit code {done.returncode}); its last lines:\n{tail}")


def run_once(side: Side, setting: Setting, algorithm: str, models: Path, work: Path, args) -> dict:
    """One process of one side: what it measured, checked."""
    name = f"{algorithm} of {side.name}"
    output = Path(tempfile.mkdtemp(dir=work, prefix="run-"))
    spec = make_spec(side, setting, algorithm, models, output, args)
    start(spec, side.python, output / f"{name}.log", args)
    require((output / "result.json").exists(), f"{name} ended without having made {args.warmup + 1} updates")
    run = json.loads((output / "result.json").read_text())
    if side.kind == "ours":
        read_metrics(run, output / "metrics.jsonl", setting.batch)
    check_work(name, run, setting, json.loads((models / "about.json").read_text()).get(f"{algorithm}_prompt_tokens"))
    run["phases"] = {key: statistics.fmean(p[key] for p in run["phases"][args.warmup :]) for key in run["phases"][0]}
    run["seconds_per_update"] = statistics.fmean(run["seconds"])
    run["episodes_per_second"] = setting.batch / run["seconds_per_update"]
    run["mean_tokens"] = statistics.fmean(run.pop("tokens")) / setting.batch
    run = {key: value for key, value in run.items() if key not in ("rows", "prompt_tokens")}
    shutil.rmtree(output)
    return run


def read_metrics(run: dict, file: Path, batch: int) -> None:
    """What ours says of itself: the phases, and the size of each rollout."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    run["phases"] = [{phase: line[f"time/{phase}"] for phase in ("rollout", "score", "update")} for line in lines]
    run["rows"] = [b["episode"] - a for a, b in zip([0, *(line["episode"] for line in lines)], lines)]
    run["tokens"] = [round(line["val/response_length"] * batch) for line in lines]


def check_work(name: str, run: dict, setting: Setting, prompt_tokens: int | None) -> None:
    """That the run did what the setting says, no more and no less."""
    steps, rollouts = run["steps"], len(run["rows"])
    require(
        rollouts == run["updates"],
        f"{name} made {steps} optimiser steps on {rollouts} rollouts, not {setting.steps_per_update} on each",
    )
    require(set(run["rows"]) == {setting.batch}, f"{name} sampled {set(run['rows'])} responses, not {setting.batch}")
    whole = setting.batch * setting.response_length
    require(
        setting.toy or set(run["tokens"]) == {whole},
        f"{name} drew {set(run['tokens'])} response tokens in an update, not {whole}",
    )
    seen = set(run["prompt_tokens"])
    require(
        not seen or setting.toy or setting.accumulation > 1 or seen == {prompt_tokens},
        f"{name} read {seen} prompt tokens in an update, not {prompt_tokens}",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Outside: a comparison


def matched(ours: Side, other: Side, setting: Setting) -> tuple[Side, Setting]:
    """Ours and the setting, made to do what that version of TRL does."""
    if other.kind not in TRL:
        return ours, setting
    version = TRL[other.kind]
    setting = replace(setting, temperature=version.temperature or setting.temperature)
    return replace(ours, flags=(*shlex.split(version.ours), *ours.flags)), setting


def prepare(setting: Setting, work: Path, args: argparse.Namespace) -> Path:
    """The folder of the setting's models and prompts, made if it is not there."""
    same = replace(setting, temperature=1.0, epochs=1, bf16=False)  # these make no other models
    folder = work / f"models-{hashlib.sha256(repr(same).encode()).hexdigest()[:12]}"
    if not (folder / "about.json").exists():
        folder.mkdir(exist_ok=True)
        spec = {"kind": "models", "folder": str(folder), "setting": asdict(setting)}
        start(spec, sys.executable, folder / "making the models.log", args)
    return folder


def compare(name: str, setting: Setting, algorithm: str, ours: Side, other: Side, work: Path, args) -> dict:
    """Runs the two sides in turn; what was measured, and its summary."""
    ours, setting = matched(ours, other, setting)
    models = prepare(setting, work, args)
    about = json.loads((models / "about.json").read_text())
    pairs = []
    for repeat in range(args.repeats):
        sides = {"ours": ours, "other": other}
        pair = {}
        for key in sorted(sides, reverse=repeat % 2 == 0):  # first ours, other; then other, ours; and so on
            pair[key] = run_once(sides[key], setting, algorithm, models, work, args)
            seconds, memory = pair[key]["seconds_per_update"], pair[key]["memory_mb"]
            print(f"{name} {algorithm}, pair {repeat + 1} of {args.repeats}, {sides[key].name}: "
                  f"{seconds:.2f} s an update, {memory:.0f} MB", flush=True)  # fmt: skip
            if (cores := pair[key]["cores"]) < 0.8 * pair[key]["threads"] and not about["cuda"]:
                print(f"warning: it had {cores:.1f} cores for {pair[key]['threads']} threads; is something else "
                      "running on this machine? then its time says nothing", file=sys.stderr, flush=True)  # fmt: skip
        pairs.append(pair)
        check_equal(name, pair, setting, other)
    return {
        "setting": name, "algorithm": algorithm, "other": other.name, "ours_flags": list(ours.flags),
        "parameters": about["parameters"], "geometry": asdict(setting) | {"bf16": setting.bf16 or args.bf16},
        "gpu": about["gpu"], "summary": summarize(pairs), "pairs": pairs,
    }  # fmt: skip


def check_equal(name: str, pair: dict, setting: Setting, other: Side) -> None:
    """That both sides of a pair drew responses of one length; in the toy world as nearly as chance lets them.

    There the deviation of a length is .6 of its mean at most, and four standard errors of the difference are allowed.
    """
    ours, theirs = pair["ours"]["mean_tokens"], pair["other"]["mean_tokens"]
    chance = 4 * 0.6 * sum(1 / (run["updates"] * setting.batch) for run in pair.values()) ** 0.5
    require(
        abs(ours / theirs - 1) <= (chance if setting.toy else 0.0),
        f"{name}: our responses have {ours:.1f} tokens, those of {other.name} {theirs:.1f}; the work is not equal",
    )


def summarize(pairs: list[dict]) -> dict:
    """Medians of both sides, and of the ratios of the pairs with their range. speed above 1: ours is faster."""
    summary = {}
    for key in ("ours", "other"):
        runs = [pair[key] for pair in pairs]
        median = lambda get, runs=runs: statistics.median(get(run) for run in runs)
        summary[key] = {
            name: median(lambda run, name=name: run[name])
            for name in ("seconds_per_update", "episodes_per_second", "memory_mb", "imports_mb", "cores", "mean_tokens")
        }
        for phase in ("rollout", "score", "update"):
            summary[key][phase] = median(lambda run, phase=phase: run["phases"][phase])
    for name, key in (("speed", "episodes_per_second"), ("memory", "memory_mb")):
        ratios = [pair["ours"][key] / pair["other"][key] for pair in pairs]
        summary[name] = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return summary


# ---------------------------------------------------------------------------------------------------------------------
# Outside: tables, charts, JSON


def ratio_text(ratio: dict, pairs: int) -> str:
    """1.52 (1.48-1.55), and of a single pair 1.52."""
    return f"{ratio['median']:.2f}" + f" ({ratio['least']:.2f}-{ratio['most']:.2f})" * (pairs > 1)


def print_table(comparisons: list[dict]) -> None:
    """All comparisons on the terminal, two lines each."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="one update, medians over the runs; ratios are ours / other, with their range over the pairs")
    names = "setting,side,s,episodes/s,rollout,score,update,MB,imports,cores,speed,memory"
    for name in names.split(","):
        table.add_column(name, justify="left" if name in ("setting", "side") else "right", no_wrap=True)
    for c in comparisons:
        for key, side in (("ours", "ours"), ("other", c["other"])):
            s = c["summary"][key]
            ratios = [ratio_text(c["summary"][n], len(c["pairs"])) * (key == "ours") for n in ("speed", "memory")]
            label = f"{c['setting']} {c['algorithm']}" if key == "ours" else ""
            table.add_row(
                label, side, f"{s['seconds_per_update']:.2f}", f"{s['episodes_per_second']:.3g}",
                *(f"{s[phase]:.2f}" for phase in ("rollout", "score", "update")), f"{s['memory_mb']:.0f}",
                f"{s['imports_mb']:.0f}", f"{s['cores']:.2f}", *ratios, end_section=key == "other",
            )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def figure_of(rows: int, columns: int, width: float, height: float):
    """matplotlib's pyplot, and a figure with its axes (rows, columns)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return plt, figure, axes


COLOURS = {"ours": "#2a6fbb", "other": "#b0b0b0"}


def draw_chart(comparisons: list[dict], machine: dict, file: Path) -> None:
    """Two bars for each comparison: episodes a second, and memory below. The black line is the range of the runs."""
    plt, figure, axes = figure_of(2, len(comparisons), 1.0 + 1.4 * len(comparisons), 5.2)
    for row, (name, scale, ratio) in enumerate((("episodes_per_second", 1, "speed"), ("memory_mb", 1024, "memory"))):
        for axis, c in zip(axes[row], comparisons):
            for x, key in enumerate(("ours", "other")):
                values = [pair[key][name] / scale for pair in c["pairs"]]
                height = statistics.median(values)
                axis.bar(x, height, 0.75, color=COLOURS[key])
                axis.plot([x, x], [min(values), max(values)], color="black", linewidth=1)
                axis.text(x, height, f"{height:.3g}", ha="center", va="bottom", fontsize=8)
            axis.set_xticks([0, 1], ["ours", c["other"]], fontsize=7)
            axis.tick_params(axis="y", labelsize=7)
            median = c["summary"][ratio]["median"]
            axis.set_title(f"{c['setting']} {c['algorithm']}\n{ratio} x {median:.2f}", fontsize=9)
    axes[0, 0].set_ylabel("episodes a second (more is better)", fontsize=8)
    axes[1, 0].set_ylabel("peak memory, GB (less is better)", fontsize=8)
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, {machine['gpu'] or 'no GPU'}", fontsize=9)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def growth_of(point: dict, key: str) -> dict[str, float]:
    """What grows: seconds an update, and memory beyond that of the imports."""
    side = point["summary"][key]
    return {"seconds": side["seconds_per_update"], "memory": side["memory_mb"] - side["imports_mb"]}


def exponents(points: list[dict]) -> list[dict]:
    """By which power time and memory grow from the first to the last point of each axis; 1 is in proportion."""
    rows = []
    for axis, algorithm in dict.fromkeys((p["axis"], p["algorithm"]) for p in points):
        line = [p for p in points if (p["axis"], p["algorithm"]) == (axis, algorithm)]
        for key, side in (("ours", "ours"), ("other", line[0]["other"])):
            first, last = growth_of(line[0], key), growth_of(line[-1], key)
            width = math.log(line[-1]["value"] / line[0]["value"])
            rows.append({"axis": axis, "algorithm": algorithm, "side": side}
                        | {name: math.log(last[name] / first[name]) / width for name in first})  # fmt: skip
    return rows


def draw_growth(points: list[dict], file: Path) -> None:
    """Seconds an update, and memory beyond that of the imports, along each axis."""
    plt, figure, axes = figure_of(2, len(GROWTH), 3.2 * len(GROWTH), 5.6)
    for column, name in enumerate(GROWTH):
        for algorithm, style in (("ppo", "o-"), ("rloo", "s--")):
            line = [p for p in points if p["axis"] == name and p["algorithm"] == algorithm]
            for key in COLOURS if line else ():
                label = f"{algorithm}, {'ours' if key == 'ours' else line[0]['other']}"
                for row, what in enumerate(("seconds", "memory")):
                    y = [growth_of(p, key)[what] for p in line]
                    axes[row, column].plot([p["value"] for p in line], y, style, color=COLOURS[key], label=label)
                    axes[row, column].set_xscale("log"), axes[row, column].set_yscale("log")
                    axes[row, column].set_xticks([p["value"] for p in line], [p["label"] for p in line])
                    axes[row, column].minorticks_off()
        axes[1, column].set_xlabel(name)
    axes[0, 0].set_ylabel("seconds an update"), axes[1, 0].set_ylabel("MB beyond the imports")
    axes[0, 0].legend(frameon=False, fontsize=8)
    for axis in axes.flat:
        axis.yaxis.set_major_locator(plt.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def describe_machine() -> dict:
    """Name, processor, cores, memory; the GPU is filled in by a process that has torch."""
    cpu, info = platform.processor(), Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"name": platform.node(), "cpu": cpu, "cores": os.cpu_count(), "memory_gb": round(memory, 1), "gpu": None,
            "load_before": os.getloadavg()[0]}  # fmt: skip


def describe_ours(folder: Path) -> dict:
    """The commit, and what the measured scripts were, whether or not they were committed."""
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16] for name in ("ppo.py", "rloo.py")}
    changed = output_of(["git", "status", "--porcelain", "ppo.py", "rloo.py"]).split()
    return {"commit": output_of(["git", "rev-parse", "--short", "HEAD"]).strip(), "sha256": hashes,
            "changed_since": [name for name in hashes if name in changed]}  # fmt: skip


def write_json(file: Path, head: dict, comparisons: list[dict]) -> None:
    """The results so far."""
    if comparisons:
        head["machine"]["gpu"] = comparisons[0]["gpu"] or None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(head | {"comparisons": comparisons}, indent=1) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Outside: the programme


def run_settings(args: argparse.Namespace, work: Path, head: dict, ours: Side, others: list[Side]) -> int:
    """All comparisons; one that fails is named, and the others go on. Returns how many failed."""
    comparisons, failed = [], []
    for name in args.settings:
        for algorithm in args.algorithms:
            for other in others:
                if not can_run(other, algorithm):
                    print(f"{other.name} has no {algorithm}: left out")
                    continue
                try:
                    comparisons.append(compare(name, SETTINGS[name], algorithm, ours, other, work, args))
                except BenchmarkError as error:
                    failed.append({"setting": name, "algorithm": algorithm, "other": other.name, "error": str(error)})
                    print(f"{name} {algorithm} against {other.name}: {error}", file=sys.stderr, flush=True)
                write_json(args.output, head | {"failed": failed}, comparisons)
    if comparisons:
        print_table(comparisons)
        chart = args.output.with_suffix(".png")
        draw_chart(comparisons, head["machine"], chart)
        print(f"written: {args.output} and {chart}")
    return len(failed)


def run_growth(args: argparse.Namespace, work: Path, head: dict, ours: Side, other: Side) -> int:
    """The points of all axes; GROWTH_BASE, which lies on each, is measured once. Returns 0."""
    points, measured = [], {}
    for algorithm in (name for name in args.algorithms if can_run(other, name)):
        for axis, values in GROWTH.items():
            for value, changes in values.items():
                setting = replace(GROWTH_BASE, **changes)
                label = f"{setting.layers}x{setting.width}" if "layers" in changes else str(value).replace("000", "k")
                if (key := (setting, algorithm)) not in measured:
                    measured[key] = compare(f"{axis} {label}", setting, algorithm, ours, other, work, args)
                points.append({"axis": axis, "value": value, "label": label} | measured[key])
                write_json(args.output, head, points)
    head["exponents"] = exponents(points)
    write_json(args.output, head, points)
    print_table(list(measured.values()))
    for row in head["exponents"]:
        print(f"{row['algorithm']} of {row['side']}, along {row['axis']}: time grows by the power "
              f"{row['seconds']:.2f}, memory by {row['memory']:.2f}")  # fmt: skip
    chart = args.output.with_suffix(".png")
    draw_growth(points, chart)
    print(f"written: {args.output} and {chart}")
    return 0


def a_list(known) -> Callable[[str], list[str]]:
    """For argparse: names with commas between them, each one that is known."""

    def parse(text: str) -> list[str]:
        """The names."""
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    for flag in ("--ours", "--baseline-ours"):  # their values begin with hyphens, which argparse takes with "=" only
        if flag in argv[:-1]:
            i = argv.index(flag)
            argv[i : i + 2] = [f"{flag}={argv[i + 1]}"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--settings", type=a_list(SETTINGS), help=f"of {','.join(SETTINGS)}; by default all that need no GPU")
    add("--algorithms", type=a_list(("ppo", "rloo")), default=["ppo", "rloo"], help="of ppo,rloo")
    add("--against", type=a_list(TRL), default=["0.16.1"], help=f"versions of TRL, of {','.join(TRL)}")
    add("--baseline", metavar="REV", help="compare with our own scripts at a git revision instead, or with the "
        "working tree itself: .")  # fmt: skip
    add("--ours", metavar="FLAGS", default="", help='further flags for our side, such as "--bf16"')
    add("--baseline-ours", metavar="FLAGS", default="", help="further flags for the baseline")
    add("--bf16", action="store_true", help="bfloat16 on both sides")
    add("--repeats", type=int, help="pairs of runs; 3, with --quick and --growth 1")
    add("--seconds", type=float, help="of updates counted in a run; 12, with --quick and --growth 4")
    add("--warmup", type=int, default=1, help="first updates of a process that are not counted, at least 1")
    add("--threads", type=int, help="of torch on both sides; by default torch's choice")
    add("--quick", action="store_true", help="tiny settings, one pair, one counted update at least: two minutes")
    add("--growth", action="store_true", help="how time and memory grow, instead of the settings")
    add("--output", type=Path, help="JSON file; the chart stands beside it as .png")
    add("--venvs", type=Path, default=Path("/tmp"), help="where TRL's virtual environments are, or are made")
    add("--work", type=Path, help="folder for models and logs, which then stay there")
    add("--timeout", type=float, default=3600.0, help="seconds that one process may take")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    brief = args.quick or args.growth
    cpu_settings = [name for name, setting in SETTINGS.items() if not setting.gpu]
    args.settings = args.settings or (["tiny"] if args.quick else cpu_settings)
    args.repeats = args.repeats or (1 if brief else 3)
    args.seconds = args.seconds or (4.0 if brief else 12.0)
    args.warmup = max(1, args.warmup)
    args.output = args.output or RESULTS / ("growth.json" if args.growth else "throughput.json")
    return args


def main(argv: list[str]) -> int:
    """Measures, or does what the outer process asks of a worker. Returns the exit code."""
    args = parse_arguments(argv)
    if args.worker:
        spec = json.loads(args.worker.read_text())
        WORKERS[spec["kind"]](spec)
        return 0
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        work = (args.work or Path(folder)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        ours, others = make_sides(args, work)
        head = {
            "machine": describe_machine(), "date": time.strftime("%Y-%m-%d %H:%M"), "command": shlex.join(argv),
            "ours": describe_ours(ours.scripts), "flags": args.ours, "warmup": args.warmup, "seconds": args.seconds,
            "repeats": args.repeats, "bf16": args.bf16,
        }  # fmt: skip
        if args.growth:
            require(len(others) == 1, "--growth compares with one version of TRL; name one in --against")
            return run_growth(args, work, head, ours, others[0])
        return min(1, run_settings(args, work, head, ours, others))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BenchmarkError as problem:
        print(f"{Path(__file__).name}: error: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the comparisons that were done are in the JSON file", file=sys.stderr)
        sys.exit(130)
