"""One training by TRL on the toy world, with the settings that a run of ours wrote in args.json. For learning.py.

    VENV/bin/python benchmarks/trl_runs.py ppo SETTINGS.json OUTPUT

It runs in the virtual environment of the version of TRL that it needs (trl_versions.py): 0.16.1 for ppo and rloo, 1.16
for grpo, dpo, sft and reward_model, 0.23 for ddpo. A line for each update goes to OUTPUT/metrics.jsonl, under the
names of ours; of texts and pairs, which our own evaluation judges, there are checkpoints instead.

What stays unequal is what the libraries differ in. The random numbers, and with them the order of the data, are each
side's own. Our CPU seconds hold our evaluations, TRL's hold none. TRL 0.16.1 never clips the gradient, and its RLOO
does not end a generation at EOS. Its score, EOS share and gold score are taken where it calls its reward model; its KL
is the one that it logs.
"""

import importlib.util
import json
import statistics
import sys
from pathlib import Path
from unittest import mock

import trl_versions
from trl_versions import ROOT

VERSIONS = {"ppo": "0.16.1", "rloo": "0.16.1", "ddpo": "0.23"} | dict.fromkeys(
    ("grpo", "dpo", "sft", "reward_model"), "1.16"
)
ONLINE = {  # settings that TRL 0.16.1 has under the same name
    "ppo": ("cliprange_value", "vf_coef", "gamma", "lam", "whiten_rewards"),
    "rloo": ("rloo_k", "normalize_reward", "reward_clip_range", "normalize_advantage"),
    "both": ("seed", "learning_rate", "num_mini_batches", "num_ppo_epochs", "response_length", "temperature", "kl_coef",
             "cliprange", "weight_decay", "missing_eos_penalty", "lr_scheduler_type", "adam_epsilon",
             "local_rollout_forward_batch_size"),
}  # fmt: skip
SHARED = ("learning_rate", "lr_scheduler_type", "warmup_ratio", "weight_decay", "max_grad_norm", "max_length")
EVERY = {"sft": 50, "reward_model": 100, "dpo": 50}  # steps between checkpoints, and between our evaluations


def load(file: str):
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_online(algorithm: str, settings: dict, output: Path) -> None:
    """PPO and RLOO of TRL 0.16.1."""
    from transformers import TrainerCallback

    models = output / "models"
    models.mkdir()
    trl_versions.copy_toy(models)
    spec = {"algorithm": algorithm, "policy": str(models / "policy"), "reward": str(models / "reward"),
            "prompts": str(models / f"prompts-{algorithm}.jsonl"), "output": str(output)}  # fmt: skip
    arguments = {name: settings[name] for name in ONLINE["both"] + ONLINE[algorithm]} | {
        "per_device_train_batch_size": settings["batch_size"] // settings["num_mini_batches"],
        "gradient_accumulation_steps": 1, "total_episodes": settings["total_episodes"],
        "stop_token": "eos",
    }  # fmt: skip
    trainer, module = trl_versions.trainer_016(spec, arguments)
    tokenizer, reward_model = trainer.processing_class, trainer.reward_model
    gold_text_score, get_reward, seen = load("toy/make.py").gold_text_score, module.get_reward, {}

    def get_reward_and_gold(model, ids, pad_token_id, context_length):
        """TRL's; where the reward model is asked, the texts are judged by the truth too."""
        result = get_reward(model, ids, pad_token_id, context_length)
        if model is reward_model:
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            ended = (ids[:, context_length:] == tokenizer.eos_token_id).any(1)
            seen.update({
                "objective/scores": result[1].mean().item(), "val/eos_share": ended.float().mean().item(),
                "rewards/gold_score/mean": statistics.fmean(map(gold_text_score, texts)), "rows": len(ids),
            })  # fmt: skip
        return result

    class Writer(TrainerCallback):
        """Takes down each update."""

        def on_log(self, args, state, control, logs=None, **others):
            """One line."""
            if "objective/kl" in logs:
                if seen.pop("rows") != args.batch_size:
                    sys.exit("TRL scored a batch in parts; its mean would be that of the last")
                line = {"episode": logs["episode"], "objective/kl": logs["objective/kl"]}
                with open(output / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(line | seen) + "\n")

    trainer.add_callback(Writer())
    with mock.patch.object(module, "get_reward", get_reward_and_gold):
        trainer.train()


def train_grpo(settings: dict, output: Path) -> None:
    """GRPO of TRL 1.16; its policy stays in OUTPUT/model, for our evaluation."""
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(output), max_steps=settings["total_episodes"] // settings["batch_size"], num_generations=settings["num_generations"],
        per_device_train_batch_size=settings["batch_size"], seed=settings["seed"], loss_type=settings["loss_type"],
        max_completion_length=settings["response_length"], learning_rate=settings["learning_rate"], beta=0.0,
        lr_scheduler_type="linear", logging_steps=1, weight_decay=settings["weight_decay"], bf16=False, use_cpu=True,
        gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
        reward_weights=[1.0, 0.0],
    )  # fmt: skip
    train = load_dataset("json", data_files=str(ROOT / settings["dataset"] / "train.jsonl"), split="train")
    rewards = [load("rewards/verifiers.py").right_number, load("toy/shells/make.py").worked]  # the second one to look at
    trainer = GRPOTrainer(str(ROOT / settings["model"]), reward_funcs=rewards, args=config, train_dataset=train)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "reward" in line]
    names = ("reward", "rewards/right_number/mean", "entropy", "frac_reward_zero_std", "completions/mean_length")
    with open(output / "metrics.jsonl", "w") as file:
        for number, line in enumerate(lines, 1):
            kept = {"episode": number * settings["batch_size"]} | {name: line[name] for name in names}
            kept["rewards/worked/mean"] = line["rewards/worked/mean"]
            file.write(json.dumps(kept) + "\n")
    trainer.save_model(str(output / "model"))


def train_texts(algorithm: str, settings: dict, output: Path) -> None:
    """SFT, reward model and DPO of TRL 1.16; sft from the random weights in OUTPUT/start, which are those of ours."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    config_class, trainer_class = {
        "sft": (SFTConfig, SFTTrainer), "reward_model": (RewardConfig, RewardTrainer), "dpo": (DPOConfig, DPOTrainer),
    }[algorithm]  # fmt: skip
    shared = {name: settings[name] for name in SHARED}
    shared["warmup_steps"] = shared.pop("warmup_ratio")  # a share, if below 1
    own = {"reward_model": {"disable_dropout": False}, "dpo": {"beta": settings.get("beta")}}.get(algorithm, {})
    config = config_class(
        output_dir=str(output), per_device_train_batch_size=settings["batch_size"], num_train_epochs=1, use_cpu=True,
        bf16=False, gradient_checkpointing=False, report_to="none", disable_tqdm=True, logging_steps=50,
        seed=settings["seed"], data_seed=settings["seed"], save_strategy="steps", save_steps=EVERY[algorithm],
        save_only_model=True, **own, **shared,
    )  # fmt: skip
    start = str(output / "start" if algorithm == "sft" else ROOT / settings["model"])
    data = load_dataset("json", data_files=f"{ROOT / settings['dataset']}/train.jsonl", split="train")
    tokenizer = AutoTokenizer.from_pretrained(start)
    trainer_class(model=start, args=config, train_dataset=data, processing_class=tokenizer).train()


if __name__ == "__main__":
    algorithm, settings, output = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    if algorithm in ONLINE:
        train_online(algorithm, settings, output)
    elif algorithm == "grpo":
        train_grpo(settings, output)
    elif algorithm == "ddpo":
        load("benchmarks/trl_ddpo_run.py").train_ddpo(settings, output)
    else:
        train_texts(algorithm, settings, output)
