"""Two optimiser steps of TRL 1.16's GRPOTrainer for each loss type, written down for tests/test_grpo.py.

    python tests/golden/make_trl116.py     # needs a package index; makes a venv in /tmp/trl116, a minute at most

The trainer runs there, on the CPU in float32, on a tiny Llama with the tokenizer in tests/golden/digits, fixed weights,
prompts and completions: only `_generate_single_turn` is replaced, and rows are not shuffled into mini-batches. (Not a
GPT-2: TRL passes no positions, so that the learned positions of a GPT-2 count the padding on the left.) What it
computed (advantages, losses, gradients, metrics) and the weights that it left go to trl116_grpo.safetensors and .json;
the test builds the same from our functions. The same machine writes the same bytes again.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from run_trl import run_inside

GOLDEN = Path(__file__).resolve().parent
G, LONGEST = 4, 6
PROMPTS = ["sort 3 1 2 :", "sort 9 8 7 6 5 :", "sort 1 0 :"]
LENGTHS = [3, 6, 1, 5, 2, 4, 6, 6, 5, 3, 2, 4]  # of the completions; those of six tokens have no EOS
ACCUMULATE = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
CASES = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.02},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02},
    "sequence_dapo": {"importance_sampling_level": "sequence", "epsilon": 0.01},
    "clip_higher": {"epsilon": 0.02, "epsilon_high": 0.05},
    "delta": {"epsilon": 0.02, "delta": 1.03},
    "batch": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none", "loss_type": "dr_grpo"},
    "kl": {"beta": 0.5, "use_bias_correction_kl": False},
    "kl_corrected": {"beta": 0.5, "use_bias_correction_kl": True},
    "kl_grpo": {"beta": 0.5, "use_bias_correction_kl": True, "loss_type": "grpo"},
    "masked": {"mask_truncated_completions": True},
    "masked_grpo": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "parts_dapo": ACCUMULATE,
    "parts_grpo": ACCUMULATE | {"loss_type": "grpo"},
    "parts_dr_grpo": ACCUMULATE | {"loss_type": "dr_grpo"},
    "weights": {"reward_weights": [1.0, -0.5]},
    "minis_dapo": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "minis_cispo": {
        "per_device_train_batch_size": 6,
        "steps_per_generation": 2,
        "loss_type": "cispo",
        "epsilon_high": 1.02,
    },
}
COMMON = {
    "num_generations": G,
    "max_completion_length": LONGEST,
    "temperature": 0.8,
    "num_iterations": 2,
    "per_device_train_batch_size": len(LENGTHS),
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-2,
}


def write_inputs(folder: Path) -> None:
    """The policy, a reference that is not the policy, and the completions."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "digits")
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=16,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.4,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=1,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def completions() -> list[list[int]]:
    """Digits of fixed lengths, each list with EOS (0) at its end but for the longest ones."""
    rows = [[5 + (7 * i + 3 * t * t) % 10 for t in range(length)] for i, length in enumerate(LENGTHS)]
    return [row if len(row) == LONGEST else row[:-1] + [0] for row in rows]


def first(completion_ids: list[list[int]], **_) -> list[float]:
    return [0.3 * len(ids) + ids[0] % 3 for ids in completion_ids]


def second(completion_ids: list[list[int]], **_) -> list[float | None]:
    """It has nothing to say of some."""
    return [None if len(ids) % 2 else float(ids[0] % 4) for ids in completion_ids]


def run_case(case: str, folder: Path, arrays: dict) -> dict:
    """Inside the venv: trains for two steps; returns what is not an array."""
    import torch
    from datasets import Dataset
    from transformers import LlamaForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    grpo_trainer.shuffle_sequence_dict = lambda batch: batch
    settings = COMMON | CASES[case]
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=2,
        shuffle_dataset=False,
        max_grad_norm=0.0,
        logging_steps=1,
        lr_scheduler_type="constant",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        optim="adamw_torch",
        **settings,
    )
    functions = [first, second] if "reward_weights" in settings else [first]
    data = Dataset.from_dict({"prompt": PROMPTS})
    trainer = GRPOTrainer(model=str(folder / "policy"), reward_funcs=functions, args=config, train_dataset=data)
    if settings.get("beta"):
        trainer.ref_model.load_state_dict(LlamaForCausalLM.from_pretrained(folder / "reference").state_dict())
    trainer._generate_single_turn = lambda *_, **__: (completions(), None)
    scored, losses = trainer._generate_and_score_completions, []

    def keep_scored(inputs):
        """Notes what was computed from the completions."""
        output = scored(inputs)
        arrays[f"{case}/advantages"] = output["advantages"].clone()
        if output.get("old_per_token_logps") is not None:
            arrays["old_logprobs"] = output["old_per_token_logps"].clone()
        return output

    compute = trainer.compute_loss
    trainer._generate_and_score_completions = keep_scored
    trainer.compute_loss = lambda *a, **k: (losses.append(loss := compute(*a, **k)), loss)[1]

    class KeepGradients(TrainerCallback):
        """Notes the gradient before each step."""

        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            arrays[f"{case}/gradient_{state.global_step}"] = gradient

    trainer.add_callback(KeepGradients())
    trainer.train()
    arrays[f"{case}/weights"] = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    metrics = [{k: v for k, v in line.items() if "time" not in k} for line in trainer.state.log_history[:2]]
    return {"settings": settings, "losses": [x.item() for x in losses], "metrics": metrics}


def record(output: Path) -> None:
    """Inside the venv: all cases, to two files in `output`."""
    from safetensors.torch import load_file, save_file

    arrays = {}
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        write_inputs(folder)
        results = {case: run_case(case, folder, arrays) for case in CASES}
        for name in ("policy", "reference"):
            arrays |= {f"{name}/{key}": x for key, x in load_file(folder / name / "model.safetensors").items()}
        config = json.loads((folder / "policy/config.json").read_text())
    save_file({name: x.contiguous() for name, x in arrays.items()}, output / "trl116_grpo.safetensors")
    whole = {"config": config, "prompts": PROMPTS, "completions": completions(), "cases": results}
    whole["rewards"] = [first(completions()), second(completions())]
    (output / "trl116_grpo.json").write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    run_inside("1.16", record, GOLDEN)
