"""What TRL 0.23, the last release with a DDPOTrainer, computes for small fixed inputs, written down for ddpo.py.

    python tests/golden/make_trl023.py     # needs a package index; makes a venv in /tmp/trl023, two minutes

It records the statistics per prompt, and in float32 an epoch of the trainer for six settings: what was sampled, the
order in which it was trained on, norms of the gradients, what was logged, and the weights at the end. So a test can put
in what was sampled and draws nothing itself. All goes to tests/golden/trl023_ddpo.safetensors and .json. The same
machine writes the same bytes again.

The model is Stable Diffusion in small: a UNet2DConditionModel, a CLIPTextModel, a CLIPTokenizer of letters,
and a DDIMScheduler. It draws 8x8 images of one channel, and the autoencoder does nothing. What had to be put in place
of TRL's own, or of its defaults:

- `StableDiffusionPipeline.from_pretrained` returns these parts, for diffusers has no autoencoder that does nothing.
- Without guidance (scale 1), TRL calls a deprecated function of diffusers that has come to return the embeddings of the
  negative prompts too, and fails. Here it returns those of the prompts alone.
- `mixed_precision` is "no": the default, fp16, makes the weights NaN on a CPU.
- `PartialState` is made first, because a trainer without an `image_samples_hook` logs before accelerate allows it.

Two things of TRL 0.23 fail and are not used: `async_reward_computation`, and an `image_samples_hook` without a tracker.
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from run_trl import run_inside

# Statistics per prompt: (prompt, reward) of three epochs. "a" outgrows its buffer at once, "d" never has enough.
EPOCHS = [
    [("a", 1.0), ("b", -0.5), ("a", 2.5), ("c", 0.25), ("a", -1.0), ("a", 0.0), ("a", 3.0)],
    [("c", 1.75), ("d", 4.0), ("b", 0.5), ("a", -2.0), ("c", -0.75), ("b", 2.25), ("b", 1.5)],
    [("c", 3.5), ("c", -1.5), ("a", 0.5), ("b", 1.0), ("b", 1.0), ("c", 2.0), ("c", 0.125)],
]

# An epoch of the trainer.
UNET = {
    "sample_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "block_out_channels": [4, 8],
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "cross_attention_dim": 8,
    "attention_head_dim": 2,
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "mid_block_type": "UNetMidBlock2DCrossAttn",
}
SCHEDULER = {
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "steps_offset": 1,
    "clip_sample": False,
    "set_alpha_to_one": False,
}
TOKENS = ["<|startoftext|>", "<|endoftext|>"] + [c + end for end in ("", "</w>") for c in "abcdefghijklmnopqrstuvwxyz"]
TEXT_ENCODER = {
    "vocab_size": len(TOKENS),
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
PROMPTS = ["a bar", "cross", "a bar", "a bar", "a box", "cross", "a bar", "a bar"]
COMMON = {
    "sample_num_steps": 4,
    "sample_batch_size": 4,
    "sample_num_batches_per_epoch": 2,
    "sample_guidance_scale": 5.0,
    "train_batch_size": 4,
    "train_learning_rate": 5e-4,
    "train_clip_range": 0.01,
    "seed": 1,
}
WITHOUT_GUIDANCE = {"sample_guidance_scale": 1.0, "train_cfg": False, "train_learning_rate": 1e-3}
CASES = {
    "plain": WITHOUT_GUIDANCE,
    "guided": {},
    "per_prompt": WITHOUT_GUIDANCE
    | {
        "per_prompt_stat_tracking": True,
        "per_prompt_stat_tracking_buffer_size": 4,
        "per_prompt_stat_tracking_min_count": 2,
    },
    "accumulate": {
        "train_batch_size": 2,
        "train_gradient_accumulation_steps": 2,
        "train_num_inner_epochs": 2,
        "train_adv_clip_max": 0.8,
        "train_max_grad_norm": 0.02,
        "train_learning_rate": 2e-4,
    },
    "fraction": WITHOUT_GUIDANCE | {"train_timestep_fraction": 0.5, "sample_eta": 0.7},
    "defaults": {"train_clip_range": 1e-4, "train_learning_rate": 3e-4},
}


# --- Inside the venv: statistics per prompt


def run_tracker() -> list[list[float]]:
    """PerPromptStatTracker.update in three epochs."""
    from trl.trainer.utils import PerPromptStatTracker

    tracker = PerPromptStatTracker(buffer_size=4, min_count=2)
    return [tracker.update(*map(list, zip(*epoch))).tolist() for epoch in EPOCHS]


# --- Inside the venv: an epoch


def make_parts(folder: Path) -> dict:
    """Stable Diffusion in small, with random weights. Those of the cross-attention are large, for prompts to matter."""
    import torch
    from diffusers import DDIMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(TOKENS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    torch.manual_seed(0)
    unet, text_encoder = UNet2DConditionModel(**UNET), CLIPTextModel(CLIPTextConfig(**TEXT_ENCODER))
    for name, parameter in unet.named_parameters():
        if "attn2" in name:
            parameter.data.mul_(5)
    vae = torch.nn.Identity()
    vae.device, vae.config = torch.device("cpu"), SimpleNamespace(block_out_channels=[1], scaling_factor=1.0)
    vae.decode = lambda x, return_dict: (x,)
    return {
        "unet": unet,
        "text_encoder": text_encoder.eval(),
        "vae": vae,
        "scheduler": DDIMScheduler(**SCHEDULER),
        "tokenizer": CLIPTokenizer(folder / "vocab.json", folder / "merges.txt", model_max_length=8),
    }


def make_trainer(parts: dict, settings: dict, reward, folder: Path):
    """The trainer on a pipeline of these parts, and nothing left of the trainer before. No file of `folder` is used."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from diffusers import StableDiffusionPipeline
    from trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState(cpu=True)
    StableDiffusionPipeline.from_pretrained = lambda *_, **__: StableDiffusionPipeline(
        **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )
    pipeline = DefaultDDPOStableDiffusionPipeline(str(folder), use_lora=False)
    if settings["sample_guidance_scale"] <= 1:
        pipeline.sd_pipeline._encode_prompt = lambda *_, prompt_embeds, **__: prompt_embeds
    prompts = itertools.cycle(enumerate(PROMPTS))
    return DDPOTrainer(
        DDPOConfig(mixed_precision="no", accelerator_kwargs={"cpu": True}, **settings),
        reward,
        lambda: next(prompts)[::-1],
        pipeline,
    )


def watch(owner, name: str, note) -> None:
    """Lets `note(result, *arguments)` see each call of a method."""
    method = getattr(owner, name)

    def noted(*args, **kwargs):
        """The method, then the note."""
        result = method(*args, **kwargs)
        note(result, *args)
        return result

    setattr(owner, name, noted)


def rewards_of(images, metadata: tuple[int]):
    """The left half brighter than the right one, and something that is not to be seen in the image."""
    import torch

    sides = images[..., :4].mean((1, 2, 3)) - images[..., 4:].mean((1, 2, 3))
    return 10 * sides + torch.tensor([0.2 * (i % 3) for i in metadata])


def orders(draws: list, samples: int) -> tuple:
    """From what randperm drew, the samples (epochs, B) and their time steps (epochs, B, N) as they were counted first.

    The trainer shuffles in each inner epoch what the one before it has left.
    """
    import torch

    sample, step, result = torch.arange(samples), torch.arange(len(draws[1])).repeat(samples, 1), []
    for first in range(0, len(draws), samples + 1):
        sample, step = sample[draws[first]], step[draws[first]]
        step = step.gather(1, torch.stack(draws[first + 1 : first + 1 + samples]))
        result.append((sample, step))
    return tuple(map(torch.stack, zip(*result)))


def run_case(case: str, folder: Path, arrays: dict) -> dict:
    """An epoch; returns what is not an array."""
    import torch

    parts, settings = make_parts(folder), COMMON | CASES[case]
    kept, logged, draws = {}, [], []
    keep = lambda name, tensor: kept.setdefault(name, []).append(tensor.detach().clone())

    def reward(images, prompts, metadata):
        """TRL's signature. The images have the shape (B, 1, 8, 8) and values from 0 to 1."""
        keep("images", images)
        return rewards_of(images, metadata), {}

    trainer = make_trainer(parts, settings, reward, folder)
    sampled = []
    watch(trainer, "_generate_samples", lambda result: sampled.extend(result[0]))
    watch(trainer, "calculate_loss", lambda result, *inputs: keep("advantages", inputs[4]))
    watch(trainer.accelerator, "clip_grad_norm_", lambda norm, *_: keep("grad_norms", norm))
    trainer.accelerator.log = lambda figures, step: logged.append({"step": step} | figures)
    randperm = torch.randperm
    watch(torch, "randperm", lambda permutation, *_: draws.append(permutation))
    trainer.step(0, 0)
    torch.randperm = randperm

    samples = {key: torch.cat([batch[key] for batch in sampled]) for key in sampled[0]}
    order, steps = orders(draws, len(PROMPTS))
    trained = torch.cat(kept["advantages"][:: trainer.num_train_timesteps])[: len(PROMPTS)]
    figures = {
        "prompt_embeds": samples["prompt_embeds"],
        "negative_prompt_embeds": trainer.neg_prompt_embed,
        "timesteps": samples["timesteps"][0],
        "latents": torch.cat([samples["latents"], samples["next_latents"][:, -1:]], 1),
        "old_logprobs": samples["log_probs"],
        "images": torch.cat(kept["images"]),
        "rewards": torch.as_tensor(logged[0].pop("reward")),
        "advantages": trained[order[0].argsort()],
        "order": order,
        "steps": steps,
        "grad_norms": torch.stack(kept["grad_norms"]),
        "weights": torch.cat([p.detach().flatten() for p in parts["unet"].parameters()]),
    }
    arrays |= {f"{case}/{name}": tensor for name, tensor in figures.items()}
    number = lambda x: x if isinstance(x, int) else x.item()
    return {"settings": settings, "logged": [{k: number(v) for k, v in line.items()} for line in logged]}


def record(output: Path) -> None:
    """Inside the venv: everything, to two files in `output`."""
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    arrays = {}
    with tempfile.TemporaryDirectory() as tmp:
        parts = make_parts(Path(tmp))
        results = {case: run_case(case, Path(tmp), arrays) for case in CASES}
    for name in ("unet", "text_encoder"):
        arrays |= {f"{name}/{key}": tensor for key, tensor in parts[name].state_dict().items()}
    names = [name for name, _ in parts["unet"].named_parameters()]
    models = {"unet": UNET, "scheduler": SCHEDULER, "text_encoder": TEXT_ENCODER, "tokens": TOKENS}
    tracker = {"buffer_size": 4, "min_count": 2, "epochs": EPOCHS, "advantages": run_tracker()}
    save_file({name: x.detach().contiguous() for name, x in arrays.items()}, output / "trl023_ddpo.safetensors")
    whole = {
        "source": "TRL 0.23.0, diffusers 0.35.2",
        "models": models,
        "parameters": names,
        "prompts": PROMPTS,
        "cases": results,
        "tracker": tracker,
    }
    (output / "trl023_ddpo.json").write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    run_inside("0.23", record, Path(__file__).parent)
