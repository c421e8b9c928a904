"""DDPOTrainer of TRL 0.23 on the world of shapes, with the settings of a run of ddpo.py.

    python benchmarks/trl_ddpo_run.py runs/NAME/args.json OUTPUT     # with the Python of TRL's virtual environment

Writes OUTPUT/metrics.jsonl, a line per epoch, under ddpo.py's names, and beside them `seconds`: those of the processor,
from the start of this process. The KL to the first model, of which TRL knows nothing, is measured off that clock.

TRL's own pipeline is used, from a copy of the folder: the transformers of that time reads a CLIPTokenizer from
vocab.json and merges.txt, and takes a text encoder whose weights have today's names for one without weights, which it
draws at random with no more than a warning. The other defects that are worked around are in trl_ddpo_parity.py.
"""

import itertools
import json
import runpy
import shutil
import sys
import tempfile
import time
from copy import deepcopy
from pathlib import Path

# Only the standard library up here: what uses this file may run outside of TRL's environment.

ROOT = Path(__file__).resolve().parent.parent


def train_ddpo(settings: dict, output: Path) -> None:
    """Trains for settings["num_epochs"] epochs. `settings` is the args.json of a run of ddpo.py with two
    rewards, of which the second, the gold score, has no weight."""
    assert not settings["lora_r"] and not settings["bf16"] and not settings["kl_coef"], "not in this comparison"
    logged = []
    trainer = make_trainer(settings, logged)
    first_unet = deepcopy(trainer.sd_pipeline.unet).requires_grad_(False)
    kl = []
    off_clock = 0.0
    generate = trainer._generate_samples

    def generate_and_measure(**sizes) -> tuple:
        """TRL's samples. Their KL is taken at once, before the policy moves."""
        nonlocal off_clock
        samples, images = generate(**sizes)
        start = time.process_time()
        kl.append(mean_kl(samples, trainer, first_unet))
        off_clock += time.process_time() - start
        return samples, images

    trainer._generate_samples = generate_and_measure
    output.mkdir(parents=True, exist_ok=True)
    step = 0
    with open(output / "metrics.jsonl", "w") as file:
        for epoch in range(1, settings["num_epochs"] + 1):
            logged.clear()
            step = trainer.step(epoch, step)  # what trainer.train() does
            line = summary(logged) | {"objective/kl": kl[-1], "epoch": epoch, "step": step}
            line["seconds"] = time.process_time() - off_clock
            print(json.dumps(line), file=file, flush=True)


def make_trainer(settings: dict, logged: list):
    """The trainer. Whatever it logs, and the gold scores of each batch of images, are appended to `logged`."""
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
        """TRL's signature. The gold scores are noted, and never trained on."""
        logged.append({"rewards/same_shape/mean": gold_reward(images, prompts, metadata).mean()})
        return reward(images, prompts, metadata), {}

    names = [name for name in settings if name.startswith(("sample_", "train_", "per_prompt_"))]
    config = DDPOConfig(
        **{name: settings[name] for name in [*names, "negative_prompts", "num_epochs", "seed"]},
        train_cfg=settings["sample_guidance_scale"] != 1, mixed_precision="no", accelerator_kwargs={"cpu": True},
        save_freq=settings["num_epochs"] + 1,
    )  # fmt: skip
    texts = Path(ROOT, settings["dataset"], f"{settings['dataset_train_split']}.jsonl").read_text().splitlines()
    rows = itertools.cycle(json.loads(text) for text in texts)  # as often each as with ddpo.py

    def next_prompt() -> tuple[str, dict]:
        """A prompt and its metadata."""
        row = next(rows)
        return row[settings["prompt_column"]], row

    trainer = DDPOTrainer(config, score, next_prompt, pipeline)
    trainer.sd_pipeline.set_progress_bar_config(disable=True)
    trainer.accelerator.log = lambda figures, step: logged.append(figures)
    return trainer


def copy_pipeline(source: Path, folder: Path) -> None:
    """The pipeline, with a tokenizer and a text encoder that this transformers can read."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    model = json.loads((source / "tokenizer/tokenizer.json").read_text())["model"]
    (folder / "tokenizer/vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "tokenizer/merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    weights = load_file(source / "text_encoder/model.safetensors")
    weights = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in weights.items()}
    save_file(weights, folder / "text_encoder/model.safetensors", {"format": "pt"})


def load_function(spec: str):
    """The function of file.py:name."""
    file, name = spec.rsplit(":", 1)
    return runpy.run_path(str(ROOT / file))[name]


def mean_kl(samples: list[dict], trainer, first_unet) -> float:
    """ddpo.py's objective/kl: |mu - mu_ref|^2 / (2 sigma^2), summed over pixels and steps, mean over images.

    The mean and the deviation of a step are those of diffusers' scheduler, for TRL returns neither.
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


def summary(logged: list[dict]) -> dict[str, float]:
    """An epoch's means of what was logged more than once. `epoch` and each image's reward are left out."""
    names = ("loss", "approx_kl", "clipfrac", "reward_mean", "reward_std", "rewards/same_shape/mean")
    result = {}
    for name in names:
        values = [figures[name].item() for figures in logged if name in figures]
        result[name] = sum(values) / len(values)
    return result


if __name__ == "__main__":
    settings_file, output_folder = map(Path, sys.argv[1:])
    train_ddpo(json.loads(settings_file.read_text()), output_folder)
