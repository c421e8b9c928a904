"""DDPO: held to TRL 0.23's numbers, to diffusers' scheduler, to the mathematics, and to the world of shapes."""

import importlib.util
import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from safetensors.torch import load_file
from test_errors import error_of
from test_train import ROOT, lines_of, run, untimed
from torch.distributions import Normal, kl_divergence
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import ddpo
import jpeg

TRL = json.loads((ROOT / "tests/golden/trl023_ddpo.json").read_text())
ARRAYS = load_file(ROOT / "tests/golden/trl023_ddpo.safetensors")
STEP = {name.removeprefix("step/"): x for name, x in ARRAYS.items() if name.startswith("step/")}
PROMPTS = ["a vertical bar", "a horizontal bar", "a square", "a cross"]
TOY = ROOT / "toy/shapes/sd"
UNET = "unet/diffusion_pytorch_model.safetensors"


def toy_make():
    """toy/shapes/make.py as a module."""
    spec = importlib.util.spec_from_file_location("shapes_make", ROOT / "toy/shapes/make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def close(a, b, **tolerance):
    """assert_close, of any numbers in any precision."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, **{"rtol": 1e-5, "atol": 1e-6} | tolerance)


def flat(parameters):
    """All of them as one vector."""
    return torch.cat([p.detach().flatten() for p in parameters])


# --- TRL 0.23: one denoising step -------------------------------------------------------------------------------------


def scheduler_of(number):
    """The schedule of a recorded step, in float64."""
    case = TRL["steps"][number]
    start, end = TRL["betas"][case["beta_schedule"]]
    config = {key: value for key, value in case.items() if key not in ("eta", "num_inference_steps")}
    scheduler = DDIMScheduler(beta_start=start, beta_end=end, set_alpha_to_one=False, **config)
    scheduler.alphas_cumprod = ARRAYS[f"alphas_cumprod/{case['beta_schedule']}"].double()
    scheduler.final_alpha_cumprod = scheduler.alphas_cumprod[0]
    scheduler.set_timesteps(case["num_inference_steps"])
    return scheduler, case["eta"]


@pytest.mark.parametrize("number", range(len(TRL["steps"])))
def test_a_step_is_trls(number):
    """Mean, deviation, draw, log-probability and its gradient, of three images at three times."""
    scheduler, eta = scheduler_of(number)
    theirs = {name: x[number] if len(x) == len(TRL["steps"]) else x for name, x in STEP.items()}
    prediction = theirs["prediction"].clone().requires_grad_()
    mean, std = ddpo.ddim_step(scheduler, prediction, theirs["timesteps"], theirs["x"], eta)
    exact = dict(rtol=1e-9, atol=1e-9, equal_nan=True)
    close(mean, theirs["mean"], **exact)
    close(std.flatten(), theirs["std"], **exact)
    drawn = mean + std * theirs["noise"]
    close(drawn, theirs["drawn"], **exact)
    close(ddpo.gaussian_logprobs(drawn, mean, std), theirs["drawn_logprob"], **exact)
    logprobs = ddpo.gaussian_logprobs(theirs["given"], mean, std)
    close(logprobs, theirs["given_logprob"], **exact)
    (gradient,) = torch.autograd.grad(logprobs.sum(), prediction)
    close(gradient, theirs["gradient"], **exact)


@pytest.mark.parametrize("config", [{}, {"set_alpha_to_one": True}, {"clip_sample": True, "clip_sample_range": 0.5}])
@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
def test_a_step_is_that_of_diffusers(kind, config):
    """At every time of a schedule; where this ends is the schedule's own choice, which TRL does not read."""
    generator = torch.Generator().manual_seed(0)
    x, prediction = (torch.randn(7, 1, 4, 4, generator=generator) for _ in range(2))
    config = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1} | config
    scheduler = DDIMScheduler(beta_schedule="scaled_linear", prediction_type=kind, **config)
    scheduler.set_timesteps(7)
    mean, std = ddpo.ddim_step(scheduler, prediction, scheduler.timesteps, x, 0.6)
    for i, t in enumerate(scheduler.timesteps):
        with suppress(ValueError):  # it takes no noise of 0 for granted
            step = scheduler.step(prediction[i], t, x[i], eta=0.6, variance_noise=torch.zeros(1))
            close(mean[i], step.prev_sample, rtol=1e-4, atol=1e-5)
        close(std[i].item(), 0.6 * scheduler._get_variance(t, t - 1000 // 7) ** 0.5, rtol=1e-4)


def test_predictions_of_all_kinds_are_one():
    """What is predicted, noise, image or velocity, is converted, and the step stays the same."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(5, 1, 4, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    steps = []
    for kind in ("epsilon", "sample", "v_prediction"):
        scheduler = DDIMScheduler(prediction_type=kind, clip_sample=False, steps_offset=1)
        scheduler.set_timesteps(5)
        a = scheduler.alphas_cumprod[scheduler.timesteps].double().view(-1, 1, 1, 1)
        image = (x - (1 - a).sqrt() * noise) / a.sqrt()
        prediction = {"epsilon": noise, "sample": image, "v_prediction": a.sqrt() * noise - (1 - a).sqrt() * image}
        steps.append(ddpo.ddim_step(scheduler, prediction[kind], scheduler.timesteps, x, 1.0))
    for mean, std in steps[1:]:
        close(mean, steps[0][0], rtol=1e-9), close(std, steps[0][1], rtol=0, atol=0)


# --- TRL 0.23: loss and statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TRL["loss"]["cases"])
def test_the_loss_is_trls(case):
    old, changes, advantages = (torch.tensor(TRL["loss"][x]).double() for x in ("old_logprobs", "changes", "advantages"))
    new = (old + changes).requires_grad_()
    advantages = advantages.clamp(-case["adv_clip_max"], case["adv_clip_max"])
    loss, ratio, _ = ddpo.policy_loss(new, old, advantages, torch.ones(10, dtype=torch.bool), case["clip_range"])
    close(loss.mean(), case["loss"])
    close(0.5 * ((new - old) ** 2).mean(), case["approx_kl"])
    close(((ratio - 1).abs() > case["clip_range"]).double().mean(), case["clipfrac"])
    close(torch.autograd.grad(loss.mean(), new)[0], case["gradient"])


def test_statistics_per_prompt_are_trls():
    """Over three epochs, in which a buffer overflows, fills, and stays too short."""
    theirs, history = TRL["tracker"], {}
    sizes = dict(per_prompt_stat_tracking_buffer_size=theirs["buffer_size"])
    args = ddpo.Args(per_prompt_stat_tracking_min_count=theirs["min_count"], **sizes)
    for epoch, expected in zip(theirs["epochs"], theirs["advantages"], strict=True):
        prompts, rewards = zip(*epoch)
        scores = torch.tensor(rewards, dtype=torch.float64)
        close(ddpo.prompt_advantages(scores, list(prompts), history, args), expected)
    assert json.loads(json.dumps(history)) == history  # for a checkpoint


# --- TRL 0.23: whole epochs -------------------------------------------------------------------------------------------


def of_case(case):
    """The arrays of one of the six recorded epochs."""
    return {name.partition("/")[2]: x for name, x in ARRAYS.items() if name.startswith(case + "/")}


def golden_settings(case):
    """TRL's settings under our names; the defaults that differ are TRL's."""
    names = {field.name for field in ddpo.fields(ddpo.Args)}
    given = {name: value for name, value in TRL["cases"][case]["settings"].items() if name in names}
    return {"train_gradient_accumulation_steps": 1, "num_epochs": 1} | given


def golden_unet():
    """The UNet as it was at the start."""
    unet = UNet2DConditionModel(**TRL["models"]["unet"])
    unet.load_state_dict({name[5:]: x for name, x in ARRAYS.items() if name.startswith("unet/")})
    assert [name for name, _ in unet.named_parameters()] == TRL["parameters"]
    return unet.eval()


def orders_of(figures):
    """What torch.randperm is to give: an order of the images, then one of the steps for each image.

    TRL's row i holds the steps of the image that comes i-th, ours those of image i.
    """
    for order, steps in zip(figures["order"], figures["steps"]):
        yield order
        yield from steps[order.argsort()]


def compare(case, figures, stats, norms, weights, tolerance):
    """Metrics of an epoch, norm of each gradient, and weights at the end."""
    logged = TRL["cases"][case]["logged"][1:]
    for name in ("loss", "approx_kl", "clipfrac"):
        close(stats[name], sum(line[name] for line in logged) / len(logged), rtol=tolerance, atol=tolerance)
    close(torch.stack(norms), figures["grad_norms"], rtol=10 * tolerance)
    close(stats["grad_norm"], figures["grad_norms"].mean(), rtol=10 * tolerance)
    close(weights, figures["weights"], rtol=0, atol=tolerance)


@pytest.fixture
def norms(monkeypatch):
    """The norms of the gradients, and before them in `.gradients` the gradients, of all optimiser steps."""

    class Kept(list):
        gradients = []

    kept, clip = Kept(), ddpo.clip_gradient

    def clip_and_keep(parameters, max_norm):
        kept.gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
        kept.append(clip(parameters, max_norm))
        return kept[-1]

    kept.gradients = []
    monkeypatch.setattr(ddpo, "clip_gradient", clip_and_keep)
    return kept


@pytest.mark.parametrize("case", TRL["cases"])
def test_an_update_is_trls(case, monkeypatch, norms):
    """Given what TRL has sampled: each log-probability, gradients, metrics, and weights."""
    figures, args = of_case(case), ddpo.Args(**golden_settings(case))
    unet, scheduler = golden_unet(), DDIMScheduler(**TRL["models"]["scheduler"])
    scheduler.set_timesteps(args.sample_num_steps)
    assert torch.equal(scheduler.timesteps, figures["timesteps"])
    pipe = SimpleNamespace(scheduler=scheduler)
    chain = ddpo.Chain(pipe, unet, None, figures["timesteps"], figures["negative_prompt_embeds"], args)
    advantages = figures["advantages"].clamp(-args.train_adv_clip_max, args.train_adv_clip_max)
    rollout = ddpo.Rollout(
        TRL["prompts"], TRL["prompts"], figures["prompt_embeds"], figures["latents"], figures["old_logprobs"], None,
        None, figures["images"], figures["rewards"], None, advantages,
    )  # fmt: skip
    settings = dict(betas=(args.train_adam_beta1, args.train_adam_beta2), eps=args.train_adam_epsilon)
    settings["weight_decay"] = args.train_adam_weight_decay
    optimizer = torch.optim.AdamW(unet.parameters(), args.train_learning_rate, **settings)
    logprobs, compute, orders = [], ddpo.gaussian_logprobs, orders_of(figures)
    monkeypatch.setattr(ddpo, "gaussian_logprobs", lambda *a: (logprobs.append(x := compute(*a)), x)[1])
    monkeypatch.setattr(torch, "randperm", lambda n: next(orders))
    stats = ddpo.update_policy(chain, optimizer, rollout)
    tolerance = 1e-6 if args.sample_guidance_scale == 1 else 1e-5
    close(torch.stack(logprobs), figures["new_logprobs"], atol=10 * tolerance)
    if "gradients" in figures:
        close(torch.stack(norms.gradients), figures["gradients"], rtol=1e-4, atol=tolerance)
    compare(case, figures, stats, norms, flat(unet.parameters()), tolerance)
    assert stats["steps"] == len(norms) == len(TRL["cases"][case]["logged"]) - 1 and not list(orders)


@pytest.fixture(scope="module")
def golden_world(tmp_path_factory):
    """TRL's models as a pipeline in a folder, its prompts, and its reward."""
    folder, models = tmp_path_factory.mktemp("golden"), TRL["models"]
    text_encoder = CLIPTextModel(CLIPTextConfig(**models["text_encoder"]))
    named = {name.split("/text_model.")[1]: x for name, x in ARRAYS.items() if name.startswith("text_encoder/")}
    text_encoder.load_state_dict({name: named[name.removeprefix("text_model.")] for name in text_encoder.state_dict()})
    vocab = {token: i for i, token in enumerate(models["tokens"])}
    StableDiffusionPipeline(
        unet=golden_unet(), text_encoder=text_encoder, tokenizer=CLIPTokenizer(vocab, [], model_max_length=8),
        scheduler=DDIMScheduler(**models["scheduler"]), vae=toy_make().identity_vae(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder / "sd")  # fmt: skip
    rows = [json.dumps({"prompt": prompt, "index": i}) + "\n" for i, prompt in enumerate(TRL["prompts"])]
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "reward.py").write_text(
        "import torch\n\n\ndef reward(images, prompts, metadata):\n"
        "    sides = images[..., :4].mean((1, 2, 3)) - images[..., 4:].mean((1, 2, 3))\n"
        "    return 10 * sides + torch.tensor([0.2 * (row['index'] % 3) for row in metadata]), {}\n"
    )
    return folder




@pytest.mark.parametrize("case", TRL["cases"])
def test_an_epoch_is_trls(case, golden_world, tmp_path, monkeypatch, norms):
    """`train` itself, on TRL's models: what it samples from TRL's noise, scores, advantages, metrics, and weights.

    The noise is what leads from each of TRL's latents to the next one; the first step's comes after x_N, in batches.
    """
    figures, settings = of_case(case), golden_settings(case)
    args = ddpo.Args(model=str(golden_world / "sd"), **settings)
    seen, update, batches = [], ddpo.update_policy, figures["latents"].split(4)
    torch.manual_seed(0)
    chain = ddpo.load_chain(args)
    close(chain.negative, figures["negative_prompt_embeds"]), close(chain.timesteps, figures["timesteps"])
    noise = []
    for latents, context in zip(batches, figures["prompt_embeds"].split(4)):
        noise.append(latents[:, 0])
        for i, t in enumerate(chain.timesteps):
            with torch.no_grad():
                mean, std = chain.step(latents[:, i], t.expand(4), context)
            noise.append((latents[:, i + 1] - mean) / std)
    draw, orders, noise = torch.randn, iter([torch.arange(8), *orders_of(figures)]), iter(noise)
    monkeypatch.setattr(ddpo, "update_policy", lambda *a: (seen.append(a), update(*a))[1])
    monkeypatch.setattr(torch, "randperm", lambda n: next(orders))
    monkeypatch.setattr(torch, "randn", lambda *a, generator=None: draw(*a, generator=generator) if generator else next(noise))
    (stats,) = run(
        ddpo, tmp_path / "out", model=args.model, dataset=str(golden_world / "prompts.jsonl"),
        reward_fn=f"{golden_world}/reward.py:reward", **settings,
    )  # fmt: skip
    assert not list(noise) and not list(orders)
    rollout, limit = seen[0][2], args.train_adv_clip_max
    assert rollout.prompts == TRL["prompts"] and [row["index"] for row in rollout.rows] == list(range(8))
    close(rollout.context, figures["prompt_embeds"], atol=1e-5)
    close(rollout.latents, figures["latents"], atol=1e-5)
    close(rollout.old_logprobs, figures["old_logprobs"], atol=1e-4)
    close(rollout.images, figures["images"].expand(-1, 3, -1, -1), atol=1e-4)
    close(rollout.scores, figures["rewards"], atol=1e-4)
    close(rollout.advantages, figures["advantages"].clamp(-limit, limit), atol=1e-3)
    for name in ("reward_mean", "reward_std"):
        close(stats[name], TRL["cases"][case]["logged"][0][name], atol=1e-4)
    weights = [load_file(tmp_path / "out" / UNET)[name] for name in TRL["parameters"]]
    compare(case, figures, stats, norms, flat(weights), 1e-4)
