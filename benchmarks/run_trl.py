"""Installs versions of TRL, and trains with them. All training with TRL is in this file.

    VENV/bin/python benchmarks/run_trl.py ppo SETTINGS.json OUTPUT

This is one training run, with the settings that one of our runs wrote to args.json, in the environment of the version
that has the trainer (TRAINERS). experiments/trl.py uses it in the toy world; grpo takes any model, data and reward
functions. It writes a line per update to OUTPUT/metrics.jsonl, with our names; SFT, reward model and DPO write
checkpoints instead, which our own evaluation reads.

Some differences between the libraries remain. Each side has its own random numbers, and with them its own order of the
data. Of SFT, reward model and DPO, our CPU seconds include our evaluations; TRL has none. TRL 0.16.1 never clips the
gradient, and its RLOO does not end a generation at EOS. Its score, EOS share and gold score are recorded where it calls
its reward model; its KL is the one that it logs. TRL has no KL for DDPO; it is computed here, and its time does not
count.

throughput.py calls the functions of TRAIN. `spec` has the folders of models and prompts; `recorder` wraps some of TRL's
functions to record when an update begins and how many tokens were sampled.
"""

import itertools
import json
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from common import ROOT

# Only the standard library here: this file is also imported outside of TRL's environments, and by processes that must
# stay small.


class Version(NamedTuple):
    """A version of TRL: its environment, and its algorithms in throughput.py."""

    venv: str
    pins: str
    algorithms: tuple[str, ...]


VENVS = Path("/tmp")  # where the environments are
VERSIONS = {
    "0.16.1": Version(
        "trl016",
        "trl==0.16.1 transformers==4.51.3 torch==2.13.0 accelerate==1.6.0 datasets==3.5.0 numpy==2.2.6",
        ("ppo", "rloo"),
    ),
    "1.16": Version(
        "trl116",
        "trl==1.16.0 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 datasets==5.2.0 numpy==2.4.6",
        ("rloo", "grpo"),
    ),
    "0.23": Version(  # the last version with a DDPOTrainer
        "trl023",
        "trl==0.23.0 transformers==4.56.2 torch==2.13.0 diffusers==0.35.2 accelerate==1.15.0 peft==0.21.2 numpy==2.4.6",
        (),
    ),
}
TRAINERS = dict.fromkeys(("sft", "reward_model", "grpo", "dpo"), "1.16")  # the version beside each of our scripts
TRAINERS |= {"ppo": "0.16.1", "rloo": "0.16.1", "ddpo": "0.23"}
KEEP_MEMORY = (  # glibc keeps freed memory, as in our scripts: this halves the time of TRL's DPO
    f"MALLOC_MMAP_THRESHOLD_={2**32}",
    f"MALLOC_TRIM_THRESHOLD_={2**32}",
    f"MALLOC_TOP_PAD_={2**28}",
)
ONLINE = {  # settings that have the same name in TRL 0.16.1
    "ppo": "cliprange_value vf_coef gamma lam",
    "rloo": "rloo_k",
    "both": "seed learning_rate num_mini_batches num_ppo_epochs response_length temperature kl_coef cliprange "
    "weight_decay missing_eos_penalty lr_scheduler_type adam_epsilon",
}
QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
SHARED = ("learning_rate", "lr_scheduler_type", "warmup_ratio", "weight_decay", "max_grad_norm", "max_length")
EVERY = {"sft": 50, "reward_model": 100, "dpo": 50}  # steps between checkpoints, and between our evaluations


def make_venv(version: str) -> str:
    """The Python of the virtual environment of a version; creates the environment if necessary."""
    venv, pins = VENVS / VERSIONS[version].venv, VERSIONS[version].pins.split()
    if not all(any(venv.glob(f"lib/python*/site-packages/{pin.replace('==', '-')}*.dist-info")) for pin in pins):
        print(f"installing TRL {version} in {venv}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin/python", "-m", "pip", "install", "--quiet", *pins], check=True)
    return str(venv / "bin/python")


def run_inside(version: str, record: Callable[[Path], None], output: Path) -> None:
    """A program that records numbers of TRL in a folder: it starts itself again in TRL's environment."""
    if "--inside" in sys.argv:
        return record(output)
    subprocess.run([make_venv(version), sys.argv[0], "--inside"], check=True)


def load_function(spec: str):
    """The function of file.py:name."""
    file, name = spec.rsplit(":", 1)
    return runpy.run_path(str(ROOT / file))[name]


def copy_toy(folder: Path) -> None:
    """Copies the toy world to folder/policy and folder/reward, with a tokenizer for old versions of transformers."""
    for name, source in (("policy", ROOT / "toy/sft"), ("reward", ROOT / "toy/reward_model")):
        shutil.copytree(source, folder / name, dirs_exist_ok=True)
        config = json.loads((source / "tokenizer_config.json").read_text())
        write_tokenizer_config(folder / name, config["pad_token"], config["eos_token"])
        tokenizer = json.loads((source / "tokenizer.json").read_text())
        merges = tokenizer["model"]["merges"]
        tokenizer["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    for algorithm in ("ppo", "rloo", "grpo"):
        shutil.copy(ROOT / "toy/data/prompts/train.jsonl", folder / f"prompts-{algorithm}.jsonl")


def write_tokenizer_config(folder: Path, pad: str, eos: str) -> None:
    """Writes tokenizer_config.json with a class that all versions of transformers have."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


# ---------------------------------------------------------------------------------------------------------------------
# Inside an environment: an update for throughput.py


def load_prompts(spec: dict) -> list[str]:
    """The texts of the prompts."""
    return [json.loads(line)["prompt"] for line in Path(spec["prompts"]).read_text().splitlines()]


def load_models(spec: dict) -> tuple:
    """Tokenizer, policy and reward model."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    return (
        AutoTokenizer.from_pretrained(spec["policy"], padding_side="left"),
        AutoModelForCausalLM.from_pretrained(spec["policy"]),
        AutoModelForSequenceClassification.from_pretrained(spec["reward"], num_labels=1),
    )


def tokenized_prompts(spec: dict, tokenizer):
    """A dataset with a column input_ids."""
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in load_prompts(spec)]})


def tokens_in(responses, tokenizer) -> tuple[int, int]:
    """Number of rows of responses (B, T), and of their tokens up to the first EOS or padding."""
    is_end = ((responses == tokenizer.eos_token_id) | (responses == tokenizer.pad_token_id)).long()
    return len(responses), int((is_end.cumsum(1) - is_end == 0).sum())


def trainer_016(spec: dict, arguments: dict) -> tuple:
    """PPOTrainer or RLOOTrainer of TRL 0.16.1, built as in its examples, and its module."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl import PPOConfig, PPOTrainer, RLOOConfig, RLOOTrainer

    tokenizer, policy, reward_model = load_models(spec)
    reference, prompts = AutoModelForCausalLM.from_pretrained(spec["policy"]), tokenized_prompts(spec, tokenizer)
    common = {"processing_class": tokenizer, "reward_model": reward_model}
    common |= {"train_dataset": prompts, "eval_dataset": prompts}
    arguments |= {"output_dir": str(spec["output"]), "num_sample_generations": 0, **QUIET}
    arguments["use_cpu"] = not torch.cuda.is_available()
    if spec["algorithm"] == "ppo":
        value_model = AutoModelForSequenceClassification.from_pretrained(spec["reward"], num_labels=1)
        args = PPOConfig(**arguments)
        trainer = PPOTrainer(args, model=policy, ref_model=reference, value_model=value_model, **common)
    else:
        trainer = RLOOTrainer(RLOOConfig(**arguments), policy=policy, ref_policy=reference, **common)
    return trainer, sys.modules[type(trainer).__module__]


def train_016(spec: dict, s, recorder) -> None:
    """TRL 0.16.1. `s` is the Setting of throughput.py."""
    import numpy as np

    arguments = {"total_episodes": s.batch * (s.updates + 1), "num_mini_batches": 1, "num_ppo_epochs": s.epochs}
    arguments |= {"per_device_train_batch_size": s.batch // s.micro_batches}
    arguments |= {"gradient_accumulation_steps": s.micro_batches, "local_rollout_forward_batch_size": s.rollout_batch}
    arguments |= {"response_length": s.response_length, "stop_token": "eos" if s.toy else None, "bf16": False}
    arguments |= {"temperature": s.temperature, "learning_rate": s.learning_rate, "kl_coef": s.kl_coef}
    arguments |= {"rloo_k": s.rloo_k} if spec["algorithm"] == "rloo" else {}
    trainer, module = trainer_016(spec, arguments)

    def size(result, model, queries, *_) -> tuple[int, int]:
        """Number of rows and tokens of the responses."""
        return tokens_in(result[0][:, queries.shape[1] :], trainer.processing_class)

    recorder.watch(module, "batch_generation", size)
    recorder.watch(np.random, "permutation")  # called at the start of an epoch
    trainer.train()


def train_116(spec: dict, s, recorder) -> None:
    """TRL 1.16: RLOOTrainer or GRPOTrainer; `num_iterations` is the number of epochs."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    tokenizer, _, reward_model = load_models(spec)
    is_grpo = spec["algorithm"] == "grpo"
    config = (GRPOConfig if is_grpo else RLOOConfig)(
        output_dir=spec["output"],
        max_steps=(s.updates + 1) * s.epochs,
        num_iterations=s.epochs,
        per_device_train_batch_size=s.batch // s.micro_batches,
        gradient_accumulation_steps=s.micro_batches,
        steps_per_generation=s.micro_batches,
        num_generations=s.rloo_k,
        max_completion_length=s.response_length,
        temperature=s.temperature,
        learning_rate=s.learning_rate,
        beta=s.kl_coef,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        **QUIET,
    )
    trainer = (GRPOTrainer if is_grpo else RLOOTrainer)(
        model=spec["policy"],
        reward_funcs=reward_model,
        reward_processing_classes=tokenizer,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": load_prompts(spec)}),
    )

    def size(result, *_) -> tuple[int, int]:
        """Number of rows and tokens of the completions."""
        completions = result[0] if is_grpo else result
        return len(completions), sum(map(len, completions))

    recorder.watch(trainer, "_generate_single_turn", size)
    recorder.watch(trainer, "_generate_and_score_completions")
    trainer.train()


TRAIN = {"0.16.1": train_016, "1.16": train_116}


# ---------------------------------------------------------------------------------------------------------------------
# Inside an environment: a training for experiments/trl.py


def write_line(output: Path, line: dict) -> None:
    """Adds an update to OUTPUT/metrics.jsonl."""
    with open(output / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def train_online(algorithm: str, settings: dict, output: Path) -> None:
    """PPO and RLOO of TRL 0.16.1."""
    from transformers import TrainerCallback

    models = output / "models"
    models.mkdir()
    copy_toy(models)
    spec = {"algorithm": algorithm, "policy": str(models / "policy"), "reward": str(models / "reward")}
    spec |= {"prompts": str(models / f"prompts-{algorithm}.jsonl"), "output": str(output)}
    arguments = {name: settings[name] for name in f"{ONLINE['both']} {ONLINE[algorithm]}".split()}
    arguments |= {"per_device_train_batch_size": settings["batch_size"] // settings["num_mini_batches"]}
    arguments |= {"gradient_accumulation_steps": 1, "total_episodes": settings["total_episodes"], "stop_token": "eos"}
    arguments["local_rollout_forward_batch_size"] = settings["batch_size"]  # sampled at once, as ours is by default
    trainer, module = trainer_016(spec, arguments)
    tokenizer, reward_model = trainer.processing_class, trainer.reward_model
    gold_text_score, get_reward, seen = load_function("toy/gold_score.py:gold_text_score"), module.get_reward, {}

    def get_reward_and_gold(model, ids, pad_token_id, context_length):
        """TRL's get_reward; for the reward model, it also records the gold score of the texts."""
        result = get_reward(model, ids, pad_token_id, context_length)
        if model is reward_model:
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            ended = (ids[:, context_length:] == tokenizer.eos_token_id).any(1)
            seen.update({"objective/scores": result[1].mean().item(), "val/eos_share": ended.float().mean().item()})
            seen.update({"rewards/gold_score/mean": statistics.fmean(map(gold_text_score, texts)), "rows": len(ids)})
        return result

    class Writer(TrainerCallback):
        """Writes a line per update."""

        def on_log(self, args, state, control, logs=None, **others):
            """Writes the line."""
            if "objective/kl" in logs:
                if seen.pop("rows") != args.batch_size:
                    sys.exit("error: TRL scored a batch in parts; the mean would be that of the last part")
                write_line(output, {"episode": logs["episode"], "objective/kl": logs["objective/kl"]} | seen)

    trainer.add_callback(Writer())
    with mock.patch.object(module, "get_reward", get_reward_and_gold):
        trainer.train()


def train_grpo(settings: dict, output: Path) -> None:
    """GRPO of TRL 1.16; saves the policy in OUTPUT/model, for our evaluation."""
    import resource

    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    same = "num_generations seed loss_type epsilon temperature learning_rate beta bf16 lr_scheduler_type weight_decay"
    config = GRPOConfig(
        output_dir=str(output),
        max_steps=settings["total_episodes"] // settings["batch_size"],
        per_device_train_batch_size=settings["batch_size"],
        max_completion_length=settings["response_length"],
        reward_weights=settings["reward_weights"] or None,
        logging_steps=1,
        use_cpu=True,
        gradient_checkpointing=False,
        **QUIET,
        **{name: settings[name] for name in same.split()},
    )
    names = ("reward", "entropy", "frac_reward_zero_std", "completions/mean_length")

    class Writer(TrainerCallback):
        """Writes a line per update."""

        def on_step_begin(self, *_, **others):
            """Starts the clock of an update, which includes sampling and the optimiser step."""
            self.began = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **others):
            """Writes the line."""
            if "reward" in logs:
                line = {"episode": state.global_step * settings["batch_size"]}
                line |= {name: x for name, x in logs.items() if name in names or name.endswith("/mean")}
                line["seconds"] = time.perf_counter() - self.began
                line["perf/peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
                write_line(output, line)

    train = load_dataset("json", data_files=str(ROOT / settings["dataset"] / "train.jsonl"), split="train")
    rewards = [load_function(spec) for spec in settings["reward_fn"]]
    trainer = GRPOTrainer(str(ROOT / settings["model"]), reward_funcs=rewards, args=config, train_dataset=train)
    trainer.add_callback(Writer())
    trainer.train()
    trainer.save_model(str(output / "model"))


def train_texts(algorithm: str, settings: dict, output: Path) -> None:
    """SFT, reward model and DPO of TRL 1.16; SFT starts from our random weights in OUTPUT/start."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    trainers = {"sft": (SFTConfig, SFTTrainer), "reward_model": (RewardConfig, RewardTrainer)}
    config_class, trainer_class = (trainers | {"dpo": (DPOConfig, DPOTrainer)})[algorithm]
    shared = {name: settings[name] for name in SHARED}
    shared["warmup_steps"] = shared.pop("warmup_ratio")  # a ratio, if below 1
    own = {"reward_model": {"disable_dropout": False}, "dpo": {"beta": settings.get("beta")}}.get(algorithm, {})
    saving = {"save_strategy": "steps", "save_steps": EVERY[algorithm], "save_only_model": True}
    config = config_class(
        output_dir=str(output),
        per_device_train_batch_size=settings["batch_size"],
        num_train_epochs=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=50,
        seed=settings["seed"],
        data_seed=settings["seed"],
        **QUIET | saving | own | shared,
    )
    start = str(output / "start" if algorithm == "sft" else ROOT / settings["model"])
    data = load_dataset("json", data_files=f"{ROOT / settings['dataset']}/train.jsonl", split="train")
    tokenizer = AutoTokenizer.from_pretrained(start)
    trainer_class(model=start, args=config, train_dataset=data, processing_class=tokenizer).train()


def train_ddpo(settings: dict, output: Path) -> None:
    """DDPO of TRL 0.23. `settings` is the args.json of a run of ddpo.py with two rewards; the second, the gold score,
    has weight 0."""
    assert not settings["lora_r"] and not settings["bf16"] and not settings["kl_coef"], "not in this comparison"
    logged, kl = [], []
    off_clock = 0.0
    trainer = trainer_023(settings, logged)
    first_unet = deepcopy(trainer.sd_pipeline.unet).requires_grad_(False)
    generate = trainer._generate_samples

    def generate_and_measure(**sizes) -> tuple:
        """TRL's samples. Computes their KL before the update."""
        nonlocal off_clock
        samples, images = generate(**sizes)
        start = time.process_time()
        kl.append(mean_kl(samples, trainer, first_unet))
        off_clock += time.process_time() - start
        return samples, images

    trainer._generate_samples = generate_and_measure
    step = 0
    for epoch in range(1, settings["num_epochs"] + 1):
        logged.clear()
        step = trainer.step(epoch, step)  # as in trainer.train()
        line = means_of(logged) | {"objective/kl": kl[-1], "epoch": epoch, "step": step}
        write_line(output, line | {"seconds": time.process_time() - off_clock})


def trainer_023(settings: dict, logged: list):
    """The trainer. Appends its metrics and the gold scores of each batch of images to `logged`."""
    from accelerate.state import PartialState
    from trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline

    PartialState(cpu=True)
    with tempfile.TemporaryDirectory() as folder:
        copy_pipeline(ROOT / settings["model"], Path(folder))
        pipeline = DefaultDDPOStableDiffusionPipeline(folder, use_lora=False)
    if settings["sample_guidance_scale"] == 1:
        pipeline.sd_pipeline._encode_prompt = lambda *_, prompt_embeds, **__: prompt_embeds

    reward, gold_reward = map(load_function, settings["reward_fn"])

    def score(images, prompts: tuple[str], metadata: tuple) -> tuple:
        """A reward function with TRL's signature; records the gold scores."""
        logged.append({"rewards/same_shape/mean": gold_reward(images, prompts, metadata).mean()})
        return reward(images, prompts, metadata), {}

    names = [name for name in settings if name.startswith(("sample_", "train_", "per_prompt_"))]
    config = DDPOConfig(
        **{name: settings[name] for name in [*names, "negative_prompts", "num_epochs", "seed"]},
        train_cfg=settings["sample_guidance_scale"] != 1,
        mixed_precision="no",
        accelerator_kwargs={"cpu": True},
        save_freq=settings["num_epochs"] + 1,
    )
    texts = Path(ROOT, settings["dataset"], "train.jsonl").read_text().splitlines()
    rows = itertools.cycle(json.loads(text) for text in texts)  # each as often as in ddpo.py

    def next_prompt() -> tuple[str, dict]:
        """A prompt and its metadata."""
        row = next(rows)
        return row["prompt"], row

    trainer = DDPOTrainer(config, score, next_prompt, pipeline)
    trainer.sd_pipeline.set_progress_bar_config(disable=True)
    trainer.accelerator.log = lambda figures, step: logged.append(figures)
    return trainer


def copy_pipeline(source: Path, folder: Path) -> None:
    """Copies the pipeline, with a tokenizer and a text encoder for the transformers of TRL 0.23.

    That version reads a CLIPTokenizer from vocab.json and merges.txt. If the weights of the text encoder have today's
    names, it initialises them at random, with only a warning. tests/golden/make_trl023.py lists the other workarounds.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    model = json.loads((source / "tokenizer/tokenizer.json").read_text())["model"]
    (folder / "tokenizer/vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "tokenizer/merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    weights = load_file(source / "text_encoder/model.safetensors")
    weights = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in weights.items()}
    save_file(weights, folder / "text_encoder/model.safetensors", {"format": "pt"})


def mean_kl(samples: list[dict], trainer, first_unet) -> float:
    """ddpo.py's objective/kl: |mu - mu_ref|^2 / (2 sigma^2), summed over pixels and steps, mean over images.

    The mean and the standard deviation of a step come from diffusers' scheduler, since TRL returns neither.
    """
    import torch

    scheduler = trainer.sd_pipeline.scheduler
    stride = scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    eta = trainer.config.sample_eta
    total = 0.0
    images = 0
    for batch in samples:
        for i, t in enumerate(scheduler.timesteps):
            x = batch["latents"][:, i]
            means = []
            for unet in (trainer.sd_pipeline.unet, first_unet):
                with torch.no_grad():
                    prediction = unet(x, t, batch["prompt_embeds"]).sample
                zero = torch.zeros_like(x)
                means.append(scheduler.step(prediction, t, x, eta=eta, variance_noise=zero).prev_sample)
            variance = eta**2 * scheduler._get_variance(t, t - stride)
            total += ((means[0] - means[1]) ** 2 / (2 * variance)).sum().item()
        images += len(batch["latents"])
    return total / images


def means_of(logged: list[dict]) -> dict[str, float]:
    """Means over an epoch of the metrics, without `epoch` and the rewards of single images."""
    names = ("loss", "approx_kl", "clipfrac", "reward_mean", "reward_std", "rewards/same_shape/mean")
    values = {name: [figures[name].item() for figures in logged if name in figures] for name in names}
    return {name: sum(some) / len(some) for name, some in values.items()}


if __name__ == "__main__":
    algorithm, settings, output = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    output.mkdir(parents=True, exist_ok=True)
    if algorithm in ONLINE:
        train_online(algorithm, settings, output)
    elif algorithm == "grpo":
        train_grpo(settings, output)
    elif algorithm == "ddpo":
        train_ddpo(settings, output)
    else:
        train_texts(algorithm, settings, output)
