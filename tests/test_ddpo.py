"""DDPO: held to TRL 0.23's numbers, to diffusers' scheduler, to the mathematics, and to the world of shapes."""

import importlib.util
import json
import os
import shutil
import signal
import sys
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
    compare(case, figures, stats, norms, flat(weights), 2e-5)


# --- The mathematics --------------------------------------------------------------------------------------------------


def toy_chain(model=TOY, moved=0.0, **settings):
    """A chain from a pipeline, whose policy may have been moved away from the first model."""
    args = ddpo.Args(**dict(model=str(model), sample_num_steps=4, train_gradient_accumulation_steps=1) | settings)
    torch.manual_seed(1)
    chain = ddpo.load_chain(args)
    with torch.no_grad():
        for p in chain.policy.parameters():
            if p.requires_grad:
                p += moved * torch.randn_like(p)
    return chain


def toy_rollout(chain, images=8):
    """Images with made-up advantages."""
    torch.manual_seed(2)
    rollout = ddpo.sample(chain, [{"prompt": PROMPTS[i % 4]} for i in range(images)])
    rollout.scores = torch.linspace(-1, 1, images)
    rollout.advantages = torch.linspace(-1.5, 1, images).sin()
    return rollout


def updated(chain, rollout, rate=1e-2):
    """What update_policy returns, and the weights after it: plain steps, which follow the gradient's size."""
    optimizer = torch.optim.SGD([p for p in chain.policy.parameters() if p.requires_grad], rate)
    torch.manual_seed(3)
    return ddpo.update_policy(chain, optimizer, rollout), flat(chain.policy.parameters())


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("lora_r", [0, 2])
def test_the_ratio_is_1_before_the_first_step(guidance, lora_r):
    """So the loss is minus the mean advantage, nothing is clipped, and the policy is the reference."""
    chain = toy_chain(sample_guidance_scale=guidance, lora_r=lora_r, train_batch_size=8)
    rollout = toy_rollout(chain)
    assert rollout.kl.shape == (8, 4) and not rollout.kl.any()
    stats, _ = updated(chain, rollout)
    assert stats["steps"] == 1 and stats["approx_kl"] < 1e-9 and stats["clipfrac"] == 0
    close(stats["loss"], -rollout.advantages.mean(), atol=1e-4)


def test_a_ratio_that_is_off_is_an_error():
    """Sampling with one model and training another is not seen in the reward."""
    chain = toy_chain()
    rollout = toy_rollout(chain)
    rollout.old_logprobs += 0.01
    with pytest.raises(ddpo.UserError, match="off by 0.01 before any step was made"):
        updated(chain, rollout)


@pytest.mark.parametrize("lora_r", [0, 2])
def test_the_kl_is_that_of_normal_distributions(lora_r):
    """Summed over pixels, step by step; those of the reference are the first model's."""
    chain = toy_chain(moved=0.02, lora_r=lora_r, sample_guidance_scale=2.0, kl_coef=0.1)
    rollout, first = toy_rollout(chain), toy_chain(sample_guidance_scale=2.0)
    for i, t in enumerate(chain.timesteps):
        with torch.no_grad():
            mean, std = chain.step(rollout.latents[:, i], t.expand(8), rollout.context)
            ref_mean, _ = first.step(rollout.latents[:, i], t.expand(8), rollout.context)
        policy, reference = (Normal(x, std.expand_as(x)) for x in (mean, ref_mean))
        close(rollout.kl[:, i], kl_divergence(policy, reference).sum((1, 2, 3)), rtol=1e-3)
        close(rollout.old_logprobs[:, i], policy.log_prob(rollout.latents[:, i + 1]).mean((1, 2, 3)), atol=1e-4)
        close(rollout.ref_means[:, i], ref_mean, atol=1e-5)
    assert rollout.kl.min() > 0
    stats = ddpo.rollout_stats(rollout)
    close(stats["objective/kl"], rollout.kl.sum() / 8)


def test_drawing_from_the_reference():
    """For the pictures: the same noise leads to what the first model draws, not to the policy's."""
    chain, first = toy_chain(moved=0.05), toy_chain()
    rows, seeded = [{"prompt": x} for x in PROMPTS], lambda: torch.Generator().manual_seed(4)
    policy, reference, same = (
        ddpo.sample(c, rows, of, seeded()).images
        for c, of in ((chain, "policy"), (chain, "reference"), (first, "policy"))
    )  # fmt: skip
    assert torch.equal(reference, same) and (policy - same).abs().max() > 0.05


def test_guidance_by_hand():
    """u + g (c - u): with 1 what there is without guidance, with 0 what the negative prompt alone leads to."""
    chain = toy_chain(negative_prompts="a cross")
    x, t = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), chain.timesteps
    context = ddpo.encode(chain.pipe, PROMPTS, chain.args)
    with torch.no_grad():
        c, u = (chain.policy(x, t, y).sample for y in (context, ddpo.encode(chain.pipe, ["a cross"] * 4, chain.args)))
        for g in (1.0, 1.0 + 1e-12, 0.0, 0.5, 5.0):
            chain.args.sample_guidance_scale = g
            mean, std = ddpo.ddim_step(chain.pipe.scheduler, u + g * (c - u), t, x, 1.0)
            for ours, expected in zip(chain.step(x, t, context), (mean, std)):
                close(ours, expected, atol=1e-4)
    assert (c - u)[:3].abs().max() > 0.01


@pytest.mark.parametrize("parts", [1, 4])
def test_cutting_an_optimiser_step_changes_nothing(parts):
    """However many images a forward pass has, the step and its numbers are the same, but for rounding."""
    both = dict(moved=0.02, kl_coef=0.5, train_num_inner_epochs=2, train_timestep_fraction=0.8, train_clip_range=0.1)
    results = []
    for n in (2, parts):
        chain = toy_chain(train_batch_size=8 // n, train_gradient_accumulation_steps=n, **both)
        results.append(updated(chain, toy_rollout(chain, 16)))
    (stats, weights), (others, same) = results
    assert stats["steps"] == 4 and stats["approx_kl"] > 1e-7
    close(list(stats.values()), list(others.values()), rtol=1e-3, atol=1e-5)
    close(weights, same, atol=1e-6)


def loss_at(chain, rollout, rows, step):
    """The sum of the losses of some images at a step, and the gradient of their mean."""
    chain.policy.zero_grad()
    loss = ddpo.step_gradient(chain, rollout, rows, step, len(rows))[0]
    return loss.item(), torch.cat([p.grad.flatten() for p in chain.policy.parameters()])


def test_the_kl_in_the_loss():
    """Without advantages it is all there is: kl_coef times the KL, per pixel; and its gradient is the numerical one."""
    chain = toy_chain(moved=0.02, kl_coef=0.3)
    rollout, rows, step = toy_rollout(chain), torch.arange(8), torch.arange(8) % 4
    rollout.advantages = torch.zeros(8)
    loss, gradient = loss_at(chain, rollout, rows, step)
    close(loss, 0.3 * rollout.kl[rows, step].sum() / 64, rtol=1e-4)
    direction, losses = gradient / gradient.norm(), []
    for sign in (1, -1):
        start = 0
        for p in chain.policy.parameters():
            p.data += sign * (1e-3 if sign > 0 else 2e-3) * direction[start : start + p.numel()].view_as(p)
            start += p.numel()
        losses.append(loss_at(chain, rollout, rows, step)[0])
    close((losses[0] - losses[1]) / 8 / 2e-3, gradient.norm(), rtol=0.02)


def test_the_gradient_is_that_of_the_probability():
    """At ratio 1: minus the mean over images of advantage times the gradient of the log-probability."""
    chain = toy_chain()
    rollout, rows, step = toy_rollout(chain), torch.arange(8), torch.arange(8) % 4
    _, gradient = loss_at(chain, rollout, rows, step)
    chain.policy.zero_grad()
    for row in range(8):
        x, t = rollout.latents[row, step[row]][None], chain.timesteps[step[row]][None]
        mean, std = chain.step(x, t, rollout.context[row : row + 1])
        logprob = Normal(mean, std.expand_as(mean)).log_prob(rollout.latents[row, step[row] + 1]).mean()
        (-rollout.advantages[row] * logprob / 8).backward()
    close(gradient, torch.cat([p.grad.flatten() for p in chain.policy.parameters()]), rtol=1e-2, atol=1e-4)


def other_schedule(folder, **config):
    """The toy with another schedule."""
    shutil.copytree(TOY, folder)
    file = folder / "scheduler/scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_last_step_without_noise_is_left_out(spacing, kl_coef, tmp_path, monkeypatch, capsys):
    """It has no probability; all others are trained on, and no number is NaN."""
    steps, gradient = [], ddpo.step_gradient
    monkeypatch.setattr(ddpo, "step_gradient", lambda *a: (steps.extend(a[3].tolist()), gradient(*a))[1])
    model = other_schedule(tmp_path / "sd", set_alpha_to_one=True, timestep_spacing=spacing)
    lines = run(ddpo, tmp_path / "out", model=str(model), **TINY | dict(kl_coef=kl_coef))
    assert sorted(steps) == sorted([0, 1] * 32) and "the last step has a deviation of 0" in capsys.readouterr().out
    numbers = [x for line in lines for x in line.values()]
    assert torch.tensor(numbers).isfinite().all() and lines[1]["objective/kl"] > 0
    trained, first = load_file(tmp_path / "out" / UNET), load_file(TOY / UNET)
    assert all(x.isfinite().all() for x in trained.values()) and any((trained[n] != first[n]).any() for n in first)


def test_advantages_belong_to_images():
    """In another order they are the same numbers in that order; scores of other prompts do not matter."""
    args, generator = ddpo.Args(per_prompt_stat_tracking_min_count=2), torch.Generator().manual_seed(0)
    scores, prompts = torch.randn(12, generator=generator), [PROMPTS[i % 3] for i in range(12)]
    advantages, order = ddpo.prompt_advantages(scores, prompts, {}, args), torch.randperm(12, generator=generator)
    close(ddpo.prompt_advantages(scores[order], [prompts[i] for i in order], {}, args), advantages[order])
    scores[0::3] += 100
    others = [i for i in range(12) if i % 3]
    close(ddpo.prompt_advantages(scores, prompts, {}, args)[others], advantages[others])
    for first in range(3):
        mine = scores[first::3]
        close(advantages[first::3], (mine - mine.mean()) / mine.std(correction=0), atol=1e-4)


def test_parts_are_joined_in_order():
    """Rows of lists and tensors go on belonging together; what there is not stays away."""
    chain = toy_chain()
    parts = [toy_rollout(chain, 4), toy_rollout(chain, 8)]
    whole = ddpo.join(parts)
    assert whole.prompts == parts[0].prompts + parts[1].prompts and whole.rows == parts[0].rows + parts[1].rows
    assert whole.ref_means is None and whole.gold_scores is None
    for name in ("context", "latents", "old_logprobs", "kl", "images", "scores"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts])), name


def test_a_gradient_that_is_not_finite_makes_no_step(monkeypatch):
    chain = toy_chain(train_batch_size=4)
    rollout, before = toy_rollout(chain), flat(chain.policy.parameters())
    rollout.advantages[:] = torch.inf
    stats, weights = updated(chain, rollout)
    assert torch.equal(weights, before) and not torch.tensor(stats["grad_norm"]).isfinite() and stats["steps"] == 2


# --- The loop ---------------------------------------------------------------------------------------------------------

TINY = dict(
    sample_num_steps=3, sample_batch_size=8, sample_num_batches_per_epoch=2, train_batch_size=8,
    train_gradient_accumulation_steps=1, num_epochs=2,
)  # fmt: skip


@pytest.fixture
def rollouts(monkeypatch):
    """The rollouts of all epochs, as they come to the update."""
    kept, update = [], ddpo.update_policy
    monkeypatch.setattr(ddpo, "update_policy", lambda *a: (kept.append(a[2]), update(*a))[1])
    return kept


def an_epoch_by_hand(args, state):
    """The first epoch with diffusers' own step, torch's normal distribution and optimiser, and plain loops.

    Returns images, scores, KL of each image, the mean of the losses and the weights.
    """
    pipe = StableDiffusionPipeline.from_pretrained(TOY, safety_checker=None)
    scheduler, unet, N, B, g = pipe.scheduler, pipe.unet.train(), args.sample_num_steps, 8, args.sample_guidance_scale
    scheduler.set_timesteps(N)
    times, zero = scheduler.timesteps, torch.zeros(1, 1, 1, 1)
    embed = lambda texts: pipe.text_encoder(  # noqa: E731
        pipe.tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    )[0].detach()  # fmt: skip
    negative = embed([args.negative_prompts])

    def step(x, t, context):
        """The normal distribution of an image at a time."""
        u, c = unet(x, t, negative).sample, unet(x, t, context).sample
        mean = scheduler.step(u + g * (c - u), t, x, eta=args.sample_eta, variance_noise=zero).prev_sample
        std = args.sample_eta * scheduler._get_variance(t, t - 1000 // N) ** 0.5
        return Normal(mean, std.expand_as(mean))

    torch.set_rng_state(state)
    queue, prompts, chains, old = [], [], [[] for _ in range(B)], torch.zeros(B, N)
    for first in range(0, B, 4):
        queue = torch.randperm(4).tolist() + queue
        prompts += [PROMPTS[i] for i in queue[:4]]
        queue, draws = queue[4:], [torch.randn(4, 1, 8, 8) for _ in range(1 + N)]
        for i in range(4):
            chains[first + i].append(draws[0][i : i + 1])
            for n, t in enumerate(times):
                with torch.no_grad():
                    normal = step(chains[first + i][-1], t, embed([prompts[first + i]]))
                x = normal.mean + normal.stddev * draws[1 + n][i]
                chains[first + i].append(x)
                old[first + i, n] = normal.log_prob(x).mean()
    images = torch.cat([chain[-1] for chain in chains]) / 2 + 0.5
    scores = toy_make().left_ink(images.clamp(0, 1), prompts, None)
    advantages = (scores - scores.mean()) / scores.std(correction=0)
    limit, eps = args.train_adv_clip_max, args.train_clip_range
    optimizer = torch.optim.AdamW(
        unet.parameters(), args.train_learning_rate, (args.train_adam_beta1, args.train_adam_beta2),
        args.train_adam_epsilon, args.train_adam_weight_decay,
    )  # fmt: skip
    first_unet, total, norms = pipe.components["unet"].state_dict(), [], []
    del first_unet
    S = int(N * args.train_timestep_fraction)
    for _ in range(args.train_num_inner_epochs):
        order, steps = torch.randperm(B), [torch.randperm(N)[:S] for _ in range(B)]
        for rows in order.split(4):
            losses = []
            for row in rows:
                A = advantages[row].clamp(-limit, limit)
                for n in steps[row]:
                    normal = step(chains[row][n], times[n], embed([prompts[row]]))
                    ratio = (normal.log_prob(chains[row][n + 1]).mean() - old[row, n]).exp()
                    losses.append(-torch.minimum(A * ratio, A * ratio.clamp(1 - eps, 1 + eps)))
            loss = torch.stack(losses).mean()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(unet.parameters(), args.train_max_grad_norm).item())
            optimizer.step(), optimizer.zero_grad()
            total.append(loss.item())
    return images, scores, sum(total) / len(total), sum(norms) / len(norms), flat(unet.parameters())


def test_an_epoch_by_hand(tmp_path, monkeypatch, rollouts):
    """Sampling, scores, advantages and two passes of two optimiser steps each, from the same random state."""
    settings = dict(
        sample_num_steps=3, sample_batch_size=4, sample_num_batches_per_epoch=2, sample_eta=0.8, train_batch_size=2,
        train_gradient_accumulation_steps=2, train_num_inner_epochs=2, train_clip_range=0.05, train_adv_clip_max=1.2,
        train_timestep_fraction=0.7, train_learning_rate=1e-3, train_adam_beta1=0.5, train_adam_beta2=0.8, num_epochs=1,
        train_adam_epsilon=1e-4, train_adam_weight_decay=0.1, train_max_grad_norm=0.5, sample_guidance_scale=2.0,
        negative_prompts="a cross",
    )  # fmt: skip
    states, batches = [], ddpo.batches
    monkeypatch.setattr(ddpo, "batches", lambda *a: (states.append(torch.get_rng_state()), batches(*a))[1])
    (line,) = run(ddpo, tmp_path, **settings)
    images, scores, loss, norm, weights = an_epoch_by_hand(ddpo.Args(**settings), states[0])
    close(rollouts[0].images, images.clamp(0, 1).expand(-1, 3, -1, -1), atol=1e-3)
    close(rollouts[0].scores, scores, atol=1e-3)
    close([line["reward_mean"], line["reward_std"]], [scores.mean(), scores.std(correction=0)], atol=1e-3)
    close([line["loss"], line["grad_norm"]], [loss, norm], rtol=2e-2, atol=1e-3)
    trained, first = load_file(tmp_path / UNET), load_file(TOY / UNET)
    unet = UNet2DConditionModel.from_pretrained(tmp_path / "unet")
    moved = flat(unet.parameters()) - flat(UNet2DConditionModel.from_pretrained(TOY / "unet").parameters())
    assert trained.keys() == first.keys() and moved.abs().max() > 1e-3
    close(flat(unet.parameters()), weights, rtol=0, atol=1e-4)
    print((flat(unet.parameters()) - weights).abs().max(), moved.abs().max(), line, loss, norm)
