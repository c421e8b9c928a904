"""One whole update of TRL 0.16.1's PPOTrainer and RLOOTrainer, written down for tests/test_parity.py.

    python tests/golden/make_trl016.py        # needs a package index; makes a venv in /tmp/trl016, a minute at most

TRL's own trainers run there, on the CPU in float32, for one update each: tiny GPT-2 policies, reward and value models
with fixed weights, fixed prompts and fixed responses. Two functions are replaced: `batch_generation`, by the fixed
responses and the policy's logits for them, and `numpy.random.permutation`, by fixed orders. All the rest is TRL's.
What it computed (log-probabilities, values, scores, advantages), its losses, gradients and metrics, and the weights it
left go to tests/golden/trl016_update.safetensors and .json. The tests build the same update from our functions and
compare; they need no TRL. The same machine writes the same bytes again.

In the cases `full` all responses run to full length, in `eos` they end anywhere; `steps` are 2 epochs of 2
mini-batches, the others a single step, whose gradient is kept.
"""

import inspect
import json
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from run_trl import run_inside

MODEL = {
    "vocab_size": 40,
    "n_positions": 12,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "initializer_range": 0.4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
PAD, EOS = MODEL["pad_token_id"], MODEL["eos_token_id"]
PROMPT_LENGTHS = [5, 3, 2, 4, 5, 2, 4, 3]
LENGTHS = {  # of the responses; 0 runs to full length without EOS, else EOS is the last of so many tokens
    "full": [0] * 8,
    "eos": [4, 0, 6, 1, 3, 5, 2, 0],
}
RESPONSE_LENGTH = 6
ORDERS = [[3, 6, 0, 5, 1, 7, 2, 4], [2, 7, 4, 1, 6, 0, 3, 5]]  # of the rows, one for each epoch
COMMON = {"temperature": 0.7, "cliprange": 0.2, "reference": "reference"}
PPO = COMMON | {"learning_rate": 3e-3, "cliprange_value": 0.2, "vf_coef": 0.1, "lam": 0.95, "gamma": 1.0}
RLOO = COMMON | {"learning_rate": 1e-3, "rloo_k": 2, "normalize_reward": False, "normalize_advantage": False}
ONE_STEP = {"num_ppo_epochs": 1, "num_mini_batches": 1, "per_device_train_batch_size": 8, "kl_coef": 0.05}
STEPS = {"num_ppo_epochs": 2, "num_mini_batches": 2, "per_device_train_batch_size": 4, "kl_coef": 0.3}
PENALTY, NO_PENALTY = {"missing_eos_penalty": 1.0}, {"missing_eos_penalty": None}
CASES = {
    "ppo_full": PPO | ONE_STEP | NO_PENALTY | {"reference": "policy"},  # KL is 0, as in the first update of a run
    "ppo_full_steps": PPO | STEPS | PENALTY | {"gamma": 0.97, "lam": 0.9},
    "ppo_eos": PPO | ONE_STEP | PENALTY,
    "ppo_eos_steps": PPO | STEPS | NO_PENALTY | {"gamma": 0.97, "lam": 0.9},
    "rloo_full": RLOO | ONE_STEP | NO_PENALTY | {"reference": "policy"},
    "rloo_full_steps": RLOO | STEPS | PENALTY,
    "rloo_eos": RLOO | ONE_STEP | PENALTY,
    "rloo_eos_steps": RLOO | STEPS | NO_PENALTY | {"normalize_reward": True, "normalize_advantage": True},
}

# --- Inside the venv: models, prompts and responses


def make_models():
    """Policy, reference, value and reward model. Every parameter is moved off its initial 0 or 1."""
    import torch
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

    torch.manual_seed(1)
    policy, reference = (GPT2LMHeadModel(GPT2Config(**MODEL)) for _ in range(2))
    value, reward = (GPT2ForSequenceClassification(GPT2Config(**MODEL, num_labels=1)) for _ in range(2))
    with torch.no_grad():
        for model in (policy, value, reward):
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        reference.load_state_dict(policy.state_dict())
        for parameter in reference.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return {"policy": policy, "reference": reference, "value": value, "reward": reward}


def make_tokenizer():
    """A tokenizer of MODEL's vocabulary; the trainers only ask it for padding and special tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(MODEL["vocab_size"])]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=words[PAD], eos_token=words[EOS], padding_side="left"
    )


def make_prompts(count: int):
    import torch
    from datasets import Dataset

    torch.manual_seed(2)
    rows = [torch.randint(3, MODEL["vocab_size"], (n,)).tolist() for n in PROMPT_LENGTHS[:count]]
    return Dataset.from_dict({"input_ids": rows})


def make_responses(lengths: list[int], is_ppo: bool):
    """(B, T) tokens. Behind EOS stands padding for PPO, and more tokens for RLOO: so do their generations."""
    import torch

    torch.manual_seed(3)
    responses = torch.randint(3, MODEL["vocab_size"], (len(lengths), RESPONSE_LENGTH))
    for row, n in zip(responses, lengths):
        if n:
            row[n - 1] = EOS
            row[n:] = PAD if is_ppo else row[n:]
    return responses


# --- Inside the venv: run a trainer and watch it


def make_trainer(case: str, models: dict, folder: Path):
    """TRL's trainer for one update. Arguments not named in CASES keep TRL's defaults."""
    from trl import PPOConfig, PPOTrainer, RLOOConfig, RLOOTrainer

    is_ppo, settings = case.startswith("ppo"), dict(CASES[case])
    reference = deepcopy(models[settings.pop("reference")])
    arguments = dict(
        output_dir=str(folder),
        total_episodes=len(PROMPT_LENGTHS),
        response_length=RESPONSE_LENGTH,
        stop_token="eos",
        num_sample_generations=0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    prompts = make_prompts(len(PROMPT_LENGTHS) // settings.get("rloo_k", 1))
    datasets = {"train_dataset": prompts, "eval_dataset": prompts, "processing_class": make_tokenizer()}
    if is_ppo:
        return PPOTrainer(
            args=PPOConfig(**arguments),
            model=models["policy"],
            ref_model=reference,
            reward_model=models["reward"],
            value_model=models["value"],
            **datasets,
        )
    return RLOOTrainer(
        config=RLOOConfig(**arguments),
        policy=models["policy"],
        ref_policy=reference,
        reward_model=models["reward"],
        **datasets,
    )


def fixed_generation(responses):
    """Stands in for batch_generation: the given responses, and the policy's logits for them at the temperature."""
    import torch
    from trl.trainer.utils import forward

    def batch_generation(model, queries, _, pad_token_id, generation_config):
        query_responses = torch.cat([queries, responses], 1)
        logits = forward(model, query_responses, pad_token_id).logits[:, queries.shape[1] - 1 : -1]
        return query_responses, logits / generation_config.temperature

    return batch_generation


class Watch:
    """Gives the trainer its random orders, and notes what it has computed by then and the steps that follow."""

    def __init__(self, trainer):
        self.tensors, self.losses, self.gradients, self.orders = {}, [], [], list(ORDERS)
        self.trainer, self.backward = trainer, trainer.accelerator.backward
        trainer.accelerator.backward = self.note_loss
        trainer.optimizer.optimizer.register_step_pre_hook(self.note_gradients)

    def permutation(self, size: int):
        """Stands in for numpy.random.permutation; its caller is train(), whose variables are read here."""
        import numpy as np

        names = (
            "queries responses logprobs ref_logprobs values scores rewards rlhf_reward advantages returns "
            "padding_mask padding_mask_p1"
        )
        local = sys._getframe(1).f_locals
        self.tensors = {name: local[name].clone() for name in names.split() if name in local}
        assert size == len(ORDERS[0])
        return np.array(self.orders.pop(0))

    def note_loss(self, loss, **kwargs):
        """The loss as accelerate gets it."""
        self.losses.append(loss.item())
        self.backward(loss, **kwargs)

    def note_gradients(self, *_):
        """The gradient as the optimiser gets it."""
        self.gradients.append({name: p.grad.clone() for name, p in named(self.trainer).items()})


def named(trainer) -> dict:
    """The parameters in training, as policy.NAME and value.NAME."""
    parameters = dict(trainer.model.named_parameters())
    if hasattr(trainer, "value_model"):  # PPO's wrapper
        return {name.replace("value_model.", "value.", 1): p for name, p in parameters.items()}
    return {f"policy.{name}": p for name, p in parameters.items()}


def run_case(case: str, folder: Path) -> tuple[dict, dict]:
    """One update: the tensors, and what goes into the JSON file."""
    import trl
    from trl.trainer import ppo_trainer, rloo_trainer

    is_ppo = case.startswith("ppo")
    lengths = LENGTHS["eos" if "eos" in case else "full"]
    trainer = make_trainer(case, make_models(), folder)
    watch = Watch(trainer)
    generation = fixed_generation(make_responses(lengths, is_ppo))
    with (
        mock.patch.object(ppo_trainer if is_ppo else rloo_trainer, "batch_generation", generation),
        mock.patch("numpy.random.permutation", watch.permutation),
    ):
        trainer.train()
    tensors = watch.tensors | {f"new.{name}": p.detach() for name, p in named(trainer).items()}
    if len(watch.gradients) == 1:  # those of later steps show in the weights
        tensors |= {f"gradient.{name}": gradient for name, gradient in watch.gradients[0].items()}
    lines, start = inspect.getsourcelines(type(trainer).train)
    file = Path(inspect.getsourcefile(type(trainer))).relative_to(Path(trl.__file__).parent.parent)
    log = trainer.state.log_history[-1]
    metrics = {k: v for k, v in log.items() if k not in ("eps", "step") and v == v}  # NaN: a single ratio's variance
    settings = {"adam_epsilon": trainer.args.adam_epsilon, "response_length": RESPONSE_LENGTH} | CASES[case]
    return tensors, {
        "source": f"trl=={trl.__version__} {file}:{start}-{start + len(lines) - 1}",
        "settings": settings,
        "orders": ORDERS[: settings["num_ppo_epochs"]],
        "losses": watch.losses,
        "metrics": metrics,
    }


def record(output: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)  # the same bytes each time
    models = make_models().items()
    tensors = {f"weights/{name}.{key}": p.detach() for name, model in models for key, p in model.named_parameters()}
    cases = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            of_case, cases[case] = run_case(case, Path(folder))
        tensors |= {f"{case}/{name}": x for name, x in of_case.items()}
        print(f"{case}: losses {cases[case]['losses']}")
    save_file({name: x.contiguous() for name, x in tensors.items()}, output / "trl016_update.safetensors")
    (output / "trl016_update.json").write_text(json.dumps({"config": MODEL, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    run_inside("0.16.1", record, Path(__file__).parent)
