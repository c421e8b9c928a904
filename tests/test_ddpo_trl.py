"""DDPO against the numbers of TRL 0.23: statistics per prompt, and whole epochs."""

import json
from dataclasses import fields
from statistics import fmean

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from runs import run, slow_but, watch, write_rows
from safetensors.torch import load_file
from shapes import UNET, close, flat, make, step
from sources import ROOT
from test_forks import load_fork
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import ddpo

TRL = json.loads((ROOT / "tests/golden/trl023_ddpo.json").read_text())
ARRAYS = load_file(ROOT / "tests/golden/trl023_ddpo.safetensors")


def arrays_of(case):
    start = f"{case}/"
    return {name.removeprefix(start): x for name, x in ARRAYS.items() if name.startswith(start)}


# --- Statistics -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def per_prompt(tmp_path_factory):
    """ddpo.py with scores per prompt."""
    return load_fork(tmp_path_factory.mktemp("fork"), "ddpo", "Scores per prompt")


def test_statistics_per_prompt_are_trls(per_prompt):
    """Over three epochs, in which a buffer overflows, fills, and stays too short."""
    theirs = TRL["tracker"]
    sizes = theirs["buffer_size"], theirs["min_count"]
    history = {}
    for epoch, expected in zip(theirs["epochs"], theirs["advantages"], strict=True):
        prompts, rewards = zip(*epoch)
        scores = torch.tensor(rewards, dtype=torch.float64)
        close(per_prompt.prompt_advantages(scores, list(prompts), history, *sizes), expected)
    assert json.loads(json.dumps(history)) == history  # for a checkpoint


def test_a_prompt_with_the_minimum_count_has_its_own_statistics(per_prompt):
    scores = torch.tensor([1.0, 2, 5, 9])
    close(per_prompt.prompt_advantages(scores, list("aabb"), {}, buffer_size=16, min_count=2), [-1.0, 1, -1, 1])


# --- Whole epochs -----------------------------------------------------------------------------------------------------


def orders_of(figures):
    """What torch.randperm is to give: an order of the images, then one of the steps for each image.

    TRL's row i holds the steps of the image that comes i-th, ours those of image i.
    """
    for order, steps in zip(figures["order"], figures["steps"]):
        yield order
        yield from steps[order.argsort()]


REWARD = """
import torch


def reward(images, prompts, metadata):
    sides = images[..., :4].mean((1, 2, 3)) - images[..., 4:].mean((1, 2, 3))
    return 10 * sides + torch.tensor([0.2 * (row["index"] % 3) for row in metadata]), {}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """TRL's models as a pipeline in a folder, its prompts, and its reward, as settings."""
    folder = tmp_path_factory.mktemp("golden")
    models = TRL["models"]
    unet = UNet2DConditionModel(**models["unet"])
    unet.load_state_dict(arrays_of("unet"))
    assert [name for name, _ in unet.named_parameters()] == TRL["parameters"]
    text_encoder = CLIPTextModel(CLIPTextConfig(**models["text_encoder"]))
    weights = {name.split("text_model.")[1]: x for name, x in arrays_of("text_encoder").items()}
    names = text_encoder.state_dict().keys()
    text_encoder.load_state_dict({name: weights[name.removeprefix("text_model.")] for name in names})
    vocab = {token: i for i, token in enumerate(models["tokens"])}
    parts = dict(unet=unet, text_encoder=text_encoder, tokenizer=CLIPTokenizer(vocab, [], model_max_length=8))
    parts |= dict(scheduler=DDIMScheduler(**models["scheduler"]), vae=make.identity_vae())
    none = dict(safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    StableDiffusionPipeline(**parts, **none).save_pretrained(folder / "sd")
    rows = [{"prompt": prompt, "index": i} for i, prompt in enumerate(TRL["prompts"])]
    dataset = write_rows(folder / "prompts.jsonl", rows)
    (folder / "reward.py").write_text(REWARD)
    return dict(model=str(folder / "sd"), dataset=dataset, reward_fn=(f"{folder}/reward.py:reward",))


def noise_of(figures, chain, args):
    """What torch.randn is to give: x_N, and what leads from each of TRL's latents to the next one, in batches."""
    for latents, context in zip(figures["latents"].split(4), figures["prompt_embeds"].split(4)):
        draws = [latents[:, 0]]
        for i, t in enumerate(chain.timesteps):
            with torch.no_grad():
                mean, std = step(chain, latents[:, i], t, context, args)
            draws.append((latents[:, i + 1] - mean) / std)
        yield torch.stack(draws, 1)


@pytest.mark.parametrize("case", slow_but(["accumulate"], TRL["cases"]))
def test_an_epoch_is_trls(case, world, per_prompt, tmp_path, monkeypatch):
    """`train` itself, on TRL's models: what it samples from TRL's noise, scores, advantages, metrics, and weights."""
    figures = arrays_of(case)
    module = per_prompt if case == "per_prompt" else ddpo
    names = {field.name for field in fields(module.Args)}
    settings = {"train_gradient_accumulation_steps": 1, "num_epochs": 1, "device": "cpu"} | world  # TRL's defaults
    settings |= {name: value for name, value in TRL["cases"][case]["settings"].items() if name in names}
    args = module.Args(**settings)
    chain = module.load_chain(args)
    close(chain.negative, figures["negative_prompt_embeds"])
    close(chain.timesteps, figures["timesteps"])
    noise = iter(list(noise_of(figures, chain, args)))
    orders = orders_of(figures)
    randn = torch.randn

    def draw(*shape, generator=None):
        return randn(*shape, generator=generator) if generator else next(noise)  # a generator draws for the pictures

    norms, images, rollouts = [], [], []
    watch(monkeypatch, torch.nn.utils, "clip_grad_norm_", lambda norm, *_: norms.append(norm))
    watch(monkeypatch, module, "sample_batch", lambda parts, *_: images.extend(part.images for part in parts))
    watch(monkeypatch, module, "update", lambda _, chain, optimizer, rollout, args: rollouts.append(rollout))
    monkeypatch.setattr(module, "shuffled", lambda n, *_: list(range(n)))
    monkeypatch.setattr(torch, "randperm", lambda n: next(orders))
    monkeypatch.setattr(torch, "randn", draw)
    (stats,) = run(module, tmp_path, **settings)
    assert not list(noise) and not list(orders)
    (rollout,) = rollouts
    assert rollout.images is None  # once they are judged nothing needs them, and they are large
    assert [row["prompt"] for row in rollout.examples] == TRL["prompts"]
    assert [row["index"] for row in rollout.examples] == list(range(8))
    close(rollout.context, figures["prompt_embeds"], atol=1e-5)
    close(rollout.latents, figures["latents"], atol=1e-4)
    close(rollout.old_logprobs, figures["old_logprobs"], atol=1e-4)
    close(torch.cat(images), figures["images"].expand(-1, 3, -1, -1), atol=1e-4)
    close(rollout.scores, figures["rewards"], atol=1e-4)
    advantages = figures["advantages"].clamp(-args.train_adv_clip_max, args.train_adv_clip_max)
    close(rollout.advantages, advantages, atol=1e-3)
    of_epoch, *of_steps = TRL["cases"][case]["logged"]
    assert of_epoch.keys() <= stats.keys()
    for name in ("reward_mean", "reward_std"):
        close(stats[name], of_epoch[name], atol=1e-4)
    for name in ("loss", "approx_kl", "clipfrac"):
        close(stats[name], fmean(line[name] for line in of_steps), rtol=2e-5, atol=2e-5)
    assert len(norms) == len(of_steps)
    close(torch.stack(norms), figures["grad_norms"], rtol=2e-4)
    close(stats["grad_norm"], figures["grad_norms"].mean(), rtol=2e-4)
    weights = load_file(tmp_path / UNET)
    away = (flat(weights[name] for name in TRL["parameters"]) - figures["weights"]).abs()
    assert (away > 2e-5).sum() <= 10  # where a gradient is near 0, Adam's first steps go by its rounding
    assert away.max() < 1e-3 and away.mean() < 2e-6
