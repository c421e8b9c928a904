"""TRL at three versions: how each is installed, and how its trainer is put together. For throughput.py and learning.py.

The functions that train run in the virtual environment of their version, where ours are not installed. They are given
the folders of models and prompts in `spec`, and a `recorder` that watches some of TRL's functions, to learn when a
phase of an update begins and how many tokens were sampled.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# Only the standard library up here: this file is also read by a process that must stay small (see throughput.py).

ROOT = Path(__file__).resolve().parent.parent


class Version(NamedTuple):
    """Of TRL: its environment, and what it can do."""

    venv: str
    pins: str
    algorithms: tuple[str, ...] = ("ppo", "rloo")
    ours: str = ""  # flags with which our scripts do the same
    temperature: float | None = None  # where only one is possible


VERSIONS = {
    "0.16.1": Version(
        "trl016", "trl==0.16.1 transformers==4.51.3 torch==2.13.0 accelerate==1.6.0 datasets==3.5.0 numpy==2.2.6"
    ),
    "0.7.11": Version(  # pyarrow: newer ones need a NumPy that this transformers does not know
        "trl07", "trl==0.7.11 transformers==4.38.2 torch==2.13.0 accelerate==0.27.2 datasets==2.18.0 numpy==1.26.4 "
        "pyarrow==17.0.0", ("ppo",), ours="--critic shared", temperature=1.0,
    ),
    "1.16": Version(
        "trl116", "trl==1.16.0 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 datasets==5.2.0 numpy==2.4.6",
        ("rloo", "grpo"),
    ),
    "0.23": Version(  # the last one with a DDPOTrainer: trl_ddpo_parity.py, trl_ddpo_run.py
        "trl023", "trl==0.23.0 transformers==4.56.2 torch==2.13.0 diffusers==0.35.2 accelerate==1.15.0 peft==0.21.2 "
        "numpy==2.4.6", ("ddpo",),
    ),
}  # fmt: skip


def make_venv(version: str, venvs: Path) -> str:
    """The Python of the virtual environment of a version, which is made if it is not there."""
    venv, pins = venvs / VERSIONS[version].venv, VERSIONS[version].pins.split()
    if not all(any(venv.glob(f"lib/python*/site-packages/{pin.replace('==', '-')}*.dist-info")) for pin in pins):
        print(f"installing TRL {version} in {venv}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin/python", "-m", "pip", "install", "--quiet", *pins], check=True)
    return str(venv / "bin/python")


def copy_toy(folder: Path) -> None:
    """The toy world in folder/policy and folder/reward, its tokenizer as old versions of transformers can read it."""
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
    """tokenizer_config.json, with the name of a class that all versions of transformers know."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


# ---------------------------------------------------------------------------------------------------------------------
# Inside an environment


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
    """Rows, and tokens up to the first EOS of each, of responses (B, T) that are padded or run on after it."""
    is_end = ((responses == tokenizer.eos_token_id) | (responses == tokenizer.pad_token_id)).long()
    return len(responses), int((is_end.cumsum(1) - is_end == 0).sum())


def trainer_016(spec: dict, arguments: dict) -> tuple:
    """PPOTrainer or RLOOTrainer of TRL 0.16.1, put together as its examples do, and the module that it stands in."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl import PPOConfig, PPOTrainer, RLOOConfig, RLOOTrainer

    tokenizer, policy, reward_model = load_models(spec)
    reference, prompts = AutoModelForCausalLM.from_pretrained(spec["policy"]), tokenized_prompts(spec, tokenizer)
    common = {"processing_class": tokenizer, "reward_model": reward_model, "train_dataset": prompts,
              "eval_dataset": prompts}  # fmt: skip
    arguments |= {"output_dir": str(spec["output"]), "num_sample_generations": 0, "report_to": "none",
                  "save_strategy": "no", "disable_tqdm": True, "use_cpu": not torch.cuda.is_available()}  # fmt: skip
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

    arguments = {
        "total_episodes": s.batch * (s.updates + 1), "num_mini_batches": 1, "num_ppo_epochs": s.epochs,
        "per_device_train_batch_size": s.batch // s.micro_batches, "gradient_accumulation_steps": s.micro_batches,
        "local_rollout_forward_batch_size": s.rollout_batch, "temperature": s.temperature, "bf16": s.bf16,
        "response_length": s.response_length, "stop_token": "eos" if s.toy else None, "learning_rate": s.learning_rate,
        "kl_coef": s.kl_coef,
    } | ({"rloo_k": s.rloo_k} if spec["algorithm"] == "rloo" else {})  # fmt: skip
    trainer, module = trainer_016(spec, arguments)
    size = lambda result, model, queries, *_: tokens_in(result[0][:, queries.shape[1] :], trainer.processing_class)
    recorder.watch(module, "batch_generation", "rollout", "score", size)
    recorder.watch(np.random, "permutation", "update")  # called when an epoch begins
    trainer.train()


def train_07(spec: dict, s, recorder) -> None:
    """TRL 0.7.11: PPOTrainer with a value head on the policy, in the loop of its quickstart."""
    import numpy as np
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

    tokenizer, policy, reward_model = load_models(spec)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(policy, summary_dropout_prob=0.0)
    config = PPOConfig(
        batch_size=s.batch, mini_batch_size=s.batch // s.micro_batches, gradient_accumulation_steps=s.micro_batches,
        ppo_epochs=s.epochs, learning_rate=s.learning_rate, adap_kl_ctrl=False, init_kl_coef=s.kl_coef,
        accelerator_kwargs={"mixed_precision": "bf16" if s.bf16 else "no", "cpu": not torch.cuda.is_available()},
    )  # fmt: skip
    trainer = PPOTrainer(
        config, policy, tokenizer=tokenizer, dataset=tokenized_prompts(spec, tokenizer),
        data_collator=lambda rows: [torch.as_tensor(row["input_ids"]) for row in rows],
    )  # fmt: skip
    reward_model.to(trainer.accelerator.device).eval()
    pad = lambda texts: pad_sequence(texts, batch_first=True, padding_value=tokenizer.pad_token_id)
    recorder.watch(trainer, "generate", "rollout", "score", lambda result, *_: tokens_in(pad(result), tokenizer))
    recorder.watch(np.random, "permutation", "update")
    for _ in range(s.updates + 1):
        queries = [query.to(trainer.accelerator.device) for query in next(iter(trainer.dataloader))]
        responses = trainer.generate(
            queries, batch_size=s.rollout_batch, return_prompt=False, min_length=-1, top_k=0.0, top_p=1.0,
            do_sample=True, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            max_new_tokens=s.response_length,
        )  # fmt: skip
        with torch.no_grad():
            ids = pad([torch.cat(text) for text in zip(queries, responses)])
            scores = reward_model(ids, attention_mask=(ids != tokenizer.pad_token_id).long()).logits[:, 0]
        trainer.step(queries, responses, list(scores))


def train_116(spec: dict, s, recorder) -> None:
    """TRL 1.16: RLOOTrainer or GRPOTrainer, with `num_iterations` for the epochs."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    tokenizer, _, reward_model = load_models(spec)
    is_grpo = spec["algorithm"] == "grpo"
    config = (GRPOConfig if is_grpo else RLOOConfig)(
        output_dir=spec["output"], max_steps=(s.updates + 1) * s.epochs, num_iterations=s.epochs,
        per_device_train_batch_size=s.batch // s.micro_batches, gradient_accumulation_steps=s.micro_batches,
        steps_per_generation=s.micro_batches, num_generations=s.rloo_k, max_completion_length=s.response_length,
        temperature=s.temperature, learning_rate=s.learning_rate, beta=s.kl_coef, bf16=s.bf16,
        gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = (GRPOTrainer if is_grpo else RLOOTrainer)(
        model=spec["policy"], reward_funcs=reward_model, reward_processing_classes=tokenizer, args=config,
        processing_class=tokenizer, train_dataset=Dataset.from_dict({"prompt": load_prompts(spec)}),
    )  # fmt: skip

    def size(result, *_) -> tuple[int, int]:
        """Rows and tokens of the completions, which GRPO returns with something else."""
        completions = result[0] if is_grpo else result
        return len(completions), sum(map(len, completions))

    recorder.watch(trainer, "_generate_single_turn", "rollout", "score", size)
    recorder.watch(trainer, "_generate_and_score_completions", after="update")
    trainer.train()


TRAIN = {"0.16.1": train_016, "0.7.11": train_07, "1.16": train_116}
