"""DDPO: held to diffusers' scheduler, to the mathematics, and to the world of shapes; test_ddpo_trl.py: to TRL."""

import json
import math
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from runs import run, watch
from safetensors.torch import load_file
from shapes import PROMPTS, TOY, UNET, close, flat, random, step, toy_chain, toy_rollout, trained
from sources import ROOT
from torch.distributions import Normal, kl_divergence

import ddpo

TINY = dict(sample_num_steps=3, sample_batch_size=4, sample_num_batches_per_epoch=2, num_epochs=2)
TINY |= dict(train_batch_size=4, train_gradient_accumulation_steps=1)
KL = TINY | dict(kl_coef=1e-9)  # without one, the KL is not computed

# --- A denoising step -------------------------------------------------------------------------------------------------


SCHEDULES = [
    {},
    {"set_alpha_to_one": True},
    {"clip_sample": True, "clip_sample_range": 0.5},
    {"beta_schedule": "linear", "steps_offset": 0, "timestep_spacing": "trailing"},
]


@pytest.mark.parametrize("config", SCHEDULES)
@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
def test_a_step_is_that_of_diffusers(kind, config):
    """At every time of a schedule; where this ends is the schedule's own choice, which TRL does not read."""
    eta = 0.6
    x, prediction = random(2, 7, 1, 4, 4)
    usual = {"beta_schedule": "scaled_linear", "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
    scheduler = DDIMScheduler(prediction_type=kind, **usual | config)
    scheduler.set_timesteps(7)
    mean, std = ddpo.ddim_step(scheduler, prediction, scheduler.timesteps, x, eta)
    for i, t in enumerate(scheduler.timesteps):
        step = scheduler.step(prediction[i], t, x[i], eta=eta, variance_noise=torch.zeros(1))
        variance = scheduler._get_variance(t, t - 1000 // 7)
        close(mean[i], step.prev_sample, rtol=1e-4, atol=1e-5)
        close(std[i].item(), eta * variance**0.5, rtol=1e-4)


def pipeline_of(folder):
    return StableDiffusionPipeline.from_pretrained(folder, safety_checker=None, requires_safety_checker=False)


# --- Ratio and KL -----------------------------------------------------------------------------------------------------


def test_a_run_whose_first_ratio_is_off_ends(tmp_path, monkeypatch):
    """Sampling with one model and training another is not seen in the reward."""
    for number, (change, cliprange) in enumerate(((2e-4, 1e-2), (2e-5, 1e-5), (math.nan, 1e-4))):
        with monkeypatch.context() as patch, pytest.raises(SystemExit, match="first_ratio_error"):
            watch(patch, ddpo, "score_batch", lambda rollout, *_: rollout.old_logprobs[1:].add_(change))
            run(ddpo, tmp_path / str(number), **TINY | dict(train_clip_range=cliprange))


@pytest.mark.parametrize("lora_r", [0, 2])
def test_the_kl_is_that_of_normal_distributions(lora_r):
    """Summed over pixels, step by step; those of the reference are the first model's."""
    chain, args = toy_chain(moved=0.02, lora_r=lora_r, sample_guidance_scale=2.0, kl_coef=0.1)
    first, first_args = toy_chain(sample_guidance_scale=2.0)
    rollout = toy_rollout(chain, args)
    for i, t in enumerate(chain.timesteps):
        x = rollout.latents[:, i]
        with torch.no_grad():
            mean, std = step(chain, x, t, rollout.context, args)
            ref_mean, _ = step(first, x, t, rollout.context, first_args)
        policy = Normal(mean, std.expand_as(mean))
        reference = Normal(ref_mean, std.expand_as(mean))
        logprobs = policy.log_prob(rollout.latents[:, i + 1])
        close(rollout.kl[:, i], kl_divergence(policy, reference).sum((1, 2, 3)), rtol=1e-3)
        close(rollout.old_logprobs[:, i], logprobs.mean((1, 2, 3)), atol=1e-4)
        close(rollout.ref_means[:, i], ref_mean, atol=1e-5)
    assert rollout.kl.min() > 0
    rollout.reward_table = rollout.scores[:, None]
    close(ddpo.rollout_stats(rollout, args)["objective/kl"], rollout.kl.sum() / 8)


# --- Loss and update --------------------------------------------------------------------------------------------------


def test_the_kl_in_the_loss():
    """With advantages of 0 the loss is kl_coef times the KL, per pixel; its gradient is the numerical one."""
    sizes = dict(train_batch_size=3, train_gradient_accumulation_steps=3, train_max_grad_norm=1e9)
    chain, args = toy_chain(moved=0.02, kl_coef=0.3, **sizes)
    rollout = toy_rollout(chain, args)
    rollout.advantages = torch.zeros(8)

    def loss_at(weights, rate=0.0):
        torch.nn.utils.vector_to_parameters(weights.clone(), chain.policy.parameters())
        return ddpo.update(chain, torch.optim.SGD(trained(chain), lr=rate), rollout, args)["loss"]

    weights = flat(chain.policy.parameters())
    close(loss_at(weights, rate=1.0), 0.3 * rollout.kl.mean() / 64, rtol=1e-4)
    gradient = weights - flat(chain.policy.parameters())
    change = 1e-3 * gradient / gradient.norm()
    close((loss_at(weights + change) - loss_at(weights - change)) / 2e-3, gradient.norm(), rtol=0.02)


def test_a_last_step_without_noise_is_left_out(tmp_path, monkeypatch):
    """It has no density; all others are trained on, and no metric is NaN."""
    times = []

    def note(_, scheduler, prediction, t, *others):
        if prediction.requires_grad:
            times.extend(t.tolist())

    watch(monkeypatch, ddpo, "ddim_step", note)
    model = shutil.copytree(TOY, tmp_path / "sd")
    file = model / "scheduler/scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(set_alpha_to_one=True)))
    lines = run(ddpo, tmp_path / "run", model=str(model), kl_coef=0.1, **TINY)
    first, second, _ = toy_chain(model, sample_num_steps=3)[0].timesteps.tolist()
    assert Counter(times) == {first: 16, second: 16}
    assert all(math.isfinite(x) for line in lines for x in line.values())
    assert lines[1]["objective/kl"] > 0
    times.clear()
    run(ddpo, tmp_path / "half", model=str(model), train_timestep_fraction=0.5, **TINY)
    assert len(times) == 16 and set(times) == {first, second}  # for each image any one of them


# --- Advantages and rewards -------------------------------------------------------------------------------------------


REWARDS = """
import torch


def shown(images, prompts, metadata):
    torch.rand(3)
    assert prompts == [row["prompt"] for row in metadata]
    assert images.shape[1:] == (3, 8, 8)
    assert 0 <= images.min() <= images.max() <= 1
    scores = [image.mean() + row["points"] for image, row in zip(images, metadata)]
    images.zero_()
    for row in metadata:
        row.clear()
    return scores


def points(images, prompts, metadata):
    return torch.tensor([row["points"] for row in metadata]), {"more": 1}
"""


def test_rewards_add_up_with_their_weights(tmp_path):
    """What a function draws moves no number of the run's; what it does to its arguments reaches no other function.
    Without a KL, the first model does not run."""
    (tmp_path / "r.py").write_text(REWARDS)
    chain, args = toy_chain(reward_fn=(f"{tmp_path}/r.py:shown", f"{tmp_path}/r.py:points"), reward_weights=(2, -3))
    chain.reference = None
    part = toy_rollout(chain, args)
    part.examples = [row | {"points": i} for i, row in enumerate(part.examples)]
    shown = part.images.mean((1, 2, 3)) + torch.arange(8)
    other = replace(part, examples=part.examples, images=part.images / 2)
    reward_fns = ddpo.load_image_rewards(args)
    before = torch.get_rng_state()
    rollout = ddpo.score_batch([part, other], part.examples * 2, reward_fns, args)
    assert torch.equal(torch.get_rng_state(), before)
    close(rollout.reward_table[:8, 0], shown)
    close(rollout.scores[:8], 2 * shown - 3 * torch.arange(8))
    stats = ddpo.rollout_stats(rollout, args)
    close(stats["rewards/shown/std"], rollout.reward_table[:, 0].std())
    close(stats["rewards/points/mean"], 3.5)
    assert "objective/kl" not in stats


def test_what_is_no_list_of_numbers_is_refused():
    """A text has letters, and a dict keys, which would count as rewards."""
    chain, args = toy_chain()
    part = toy_rollout(chain, args, images=2)
    wrong = ["12", {"1": 1, "2": 2}, [1.0], [1.0, None], np.ones((2, 1)), None, [1.0, math.nan], [1.0, "2"]]
    for returned in wrong:
        with pytest.raises((SystemExit, ValueError, TypeError)):
            ddpo.image_rewards(lambda *_, x=returned: x, part, args)


def test_what_is_refused_before_a_pipeline_is_loaded(tmp_path, monkeypatch):
    """A pipeline of another kind, such as SDXL; rows without a prompt."""
    monkeypatch.setattr(StableDiffusionPipeline, "from_pretrained", None)
    shutil.copytree(TOY, tmp_path / "sdxl")
    index = (tmp_path / "sdxl/model_index.json").read_text()
    (tmp_path / "sdxl/model_index.json").write_text(index.replace("StableDiffusionP", "StableDiffusionXLP"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n"b"\n')
    cases = [(dict(model=str(tmp_path / "sdxl")), "StableDiffusionXLPipeline")]
    cases += [(dict(dataset=str(tmp_path / "rows.jsonl")), "row 2"), (dict(dataset=str(tmp_path)), "train.jsonl")]
    for number, (settings, word) in enumerate(cases):
        with pytest.raises(SystemExit, match=f"^error: .*{word}"):
            run(ddpo, tmp_path / str(number), **settings)


# --- Other models and options -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stable_diffusion_in_small(tmp_path):
    """The classes and the layout of Stable Diffusion 1.5: four channels, half as wide as images, AutoencoderKL, PNDM;
    with guidance, an adapter, and a reward of JPEGs."""
    torch.manual_seed(0)
    attention = dict(down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=4)
    attention |= dict(up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32)
    blocks = dict(down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2)
    unet = UNet2DConditionModel(8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, **attention)
    vae = AutoencoderKL(block_out_channels=(4, 8), norm_num_groups=4, **blocks)
    pipe = pipeline_of(TOY)
    scheduler = PNDMScheduler(beta_start=8.5e-4, beta_end=0.012, skip_prk_steps=True, steps_offset=1)
    pipe.register_modules(unet=unet, vae=vae, scheduler=scheduler)
    model = str(tmp_path / "sd")
    pipe.save_pretrained(model)
    chain, args = toy_chain(model, sample_guidance_scale=5.0)
    assert chain.timesteps.tolist() == [751, 501, 251, 1]
    rollout = toy_rollout(chain, args, 4)
    decoded = vae.decode(rollout.latents[:, -1] / 0.18215).sample
    close(rollout.images, pipe.image_processor.postprocess(decoded, output_type="pt").detach(), atol=1e-5)
    reward_fn = (str(ROOT / "rewards/jpeg.py:compressibility"),)
    lines = run(ddpo, tmp_path / "run", model=model, reward_fn=reward_fn, lora_r=2, sample_guidance_scale=5.0, **KL)
    assert lines[0]["reward_std"] > 0 and lines[0]["objective/kl"] < 1e-6 < lines[1]["objective/kl"]
    left = pipeline_of(tmp_path / "run")
    assert isinstance(left.vae, AutoencoderKL) and isinstance(left.scheduler, PNDMScheduler)


@pytest.mark.slow
def test_an_adapter_alone_is_trained_and_saved(tmp_path):
    """And in checkpoints. lora/ holds it as diffusers reads it, and the pipeline its sum with the first weights."""
    settings = dict(lora_r=2, train_learning_rate=1e-2, save_steps=2, save_total_limit=1)
    lines = run(ddpo, tmp_path, **KL | settings)
    assert lines[0]["objective/kl"] == 0 < lines[1]["objective/kl"]
    (file,) = tmp_path.glob("checkpoints/*.pt")
    assert all("lora" in name for name in torch.load(file)["weights"])

    def drawn(pipe):
        options = dict(num_inference_steps=3, guidance_scale=1.0, latents=random(2, 1, 8, 8), output_type="np")
        return torch.tensor(pipe(PROMPTS[:2], **options).images)

    pipe = pipeline_of(TOY)
    without = drawn(pipe)
    pipe.load_lora_weights(tmp_path / "lora")
    assert (drawn(pipe) - without).abs().max() > 0.01
    close(drawn(pipe), drawn(pipeline_of(tmp_path)), atol=1e-4)


# --- What a run leaves ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pictures_and_a_pipeline(tmp_path):
    """Above, what the first model draws, the same in all; below, what the policy draws from this noise. Of the
    folder the UNet is trained, and all else as it was."""
    run(ddpo, tmp_path / "a", image_steps=1, **TINY)
    files = [tmp_path / f"a/images/epoch-000{i}.png" for i in (1, 2)]
    first, last = (torch.tensor(np.array(Image.open(file).convert("L"))) for file in files)
    half = len(first) // 2
    assert torch.equal(first[:half], last[:half]) and not torch.equal(first[half:], last[half:])
    for file in ("text_encoder/model.safetensors", "vae/diffusion_pytorch_model.safetensors", UNET):
        after, before = load_file(tmp_path / "a" / file), load_file(TOY / file)
        assert all(torch.equal(after[name], before[name]) for name in before) == (file != UNET)


# --- It learns --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns(tmp_path):
    """The reward rises, and shapes stay shapes: last two of three epochs less the first.

    A higher rate and a wider clip range than by default: 24 optimiser steps are few. Over three seeds the reward gained
    0.7 to 1.7, and with the advantages' sign turned it lost 0.9.
    """
    settings = TINY | dict(sample_num_steps=4, sample_batch_size=32, train_batch_size=8, num_epochs=3, image_steps=9)
    settings |= dict(train_learning_rate=1e-3, train_clip_range=1e-3, reward_weights=(1, 0), save_steps=9)
    rewards = ("toy/shapes/make.py:left_ink", "toy/shapes/make.py:same_shape")
    lines = run(ddpo, tmp_path, reward_fn=rewards, **settings)
    for name, least in (("reward_mean", 0.4), ("rewards/same_shape/mean", -0.5)):
        first, second, third = [line[name] for line in lines]
        assert (second + third) / 2 - first > least
