# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "diffusers==0.42.1", "datasets==5.2.0", "tyro==1.0.17",
#     "wandb==0.31.0", "pydantic==2.14.3", "tqdm==4.70.1"]
# ///
"""DDPO for diffusion models: policy + reward on images -> better policy.

The policy gradient of ppo.py, applied to images: an image is a response, a denoising step a token. In short:
lecture/ddpo.py, 290 lines.

  text     prompt  ->  y_1  ->  y_2  -> ... -> y_T     y_t ~ softmax(logits of y_<t)          score of y_1 ... y_T
  image    noise x_N -> x_{N-1} -> ...  -> x_0         x_{t-1} ~ Normal(mu(x_t, t), sigma_t)  score of x_0

For each epoch:
  1. sample     noise x_N, then N times x_{t-1} = mu + sigma_t z, where z ~ Normal(0, 1) (DDIM with eta > 0); keep every
                x_t, and log pi(x_{t-1} | x_t), the log-density of the normal distribution, as a mean over pixels
  2. score      images, prompts and metadata -> one score per image, the weighted sum of all rewards
  3. advantage  A = (score - mean) / std, over the batch; the same A for all steps
  4. loss       ratio_t = pi(x_{t-1} | x_t) / pi_old(x_{t-1} | x_t)
                mean_t max(-A ratio_t, -A clip(ratio_t, 1-eps, 1+eps)) + kl_coef * KL_t, per pixel
  5. update     `train_num_inner_epochs` passes over the batch; the steps of each image are in a random order

Shapes: B images, b in a micro-batch, N steps, C channels, H and W of the latent image, L tokens of width D in a prompt,
K reward functions. The tensors for N = 4:

  latents        x_4 --------> x_3 --------> x_2 --------> x_1 --------> x_0    (B, N+1, C, H, W)
  timesteps            751           501           251            1             (N,)
  old_logprobs, kl      *             *             *             *             (B, N)
  scores, advantages                                                      *     (B,)

The network predicts mu; sigma is fixed by the schedule. There is no critic and no discount. Some schedules end with
sigma = 0: this step is deterministic, has no density, and is not trained on. Log-probabilities are means over pixels,
not sums, so that the ratio stays near 1 for images of any size; that is why eps is 1e-4 and not 0.2. The KL of a step
to the initial model is |mu - mu_ref|^2 / (2 sigma^2), in nats; DDPO has none in the loss, DPOK has one.

Papers: DDPO 2305.13301 (sec. 4); DDIM 2010.02502 (eq. 12, 16); guidance 2207.12598; DPOK 2305.16381.

  python ddpo.py                    # shapes of 8 x 8 pixels move to the left: offline, a minute on two CPU cores
  python ddpo.py --model runwayml/stable-diffusion-v1-5 --lora-r 4 --dataset prompts.jsonl \\
      --reward-fn rewards/jpeg.py:compressibility
"""

import ctypes
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import diffusers
import numpy as np
import pydantic
import torch
import torch.distributed as dist
import tyro
from filelock import FileLock
from jinja2 import TemplateError
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributions import Normal
from tqdm import tqdm
from transformers import AutoTokenizer, get_scheduler, logging, set_seed
from transformers.activations import ACT2FN, GELUTanh

TOY = Path(__file__).resolve().parent / "toy"  # the embedded models and data

# Processes of torchrun. All read the same data and draw the same random numbers; each computes its share of a batch
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# --- Settings. A type limits the values; the comment beside a setting is its help text
Share = Annotated[float, Field(ge=0, le=1)]


def alias(*flags):
    """Other names of a flag, as TRL spells them."""
    return tyro.conf.arg(aliases=flags)


@pydantic.dataclasses.dataclass(config={"allow_inf_nan": False})  # checks the values
class Args:
    # --- Sampling. The batch of an epoch: sample_batch_size * sample_num_batches_per_epoch * processes images ---
    sample_num_steps: PositiveInt = 10  # denoising steps N (TRL: 50)
    sample_eta: Annotated[float, Field(gt=0, le=1)] = 1.0  # scale of sigma; 1 is DDPM (TRL: 1); 0 would not explore
    sample_guidance_scale: NonNegativeFloat = 1.0  # classifier-free guidance in sampling and training; 1: none (TRL: 5)
    sample_batch_size: PositiveInt = 64  # images sampled at once, on each process (TRL: 1)
    sample_num_batches_per_epoch: PositiveInt = 4  # number of these batches in an epoch (TRL: 2)
    negative_prompts: str = ""  # the negative prompt of the guidance (TRL)
    # --- DDPO. An optimiser step: train_batch_size * train_gradient_accumulation_steps * processes images ---
    train_batch_size: PositiveInt = 64  # images in a forward and backward pass, on each process (TRL: 1)
    train_gradient_accumulation_steps: PositiveInt = 2  # passes per optimiser step (TRL: 1)
    train_num_inner_epochs: PositiveInt = 1  # passes over the images of an epoch (TRL: 1)
    train_clip_range: PositiveFloat = 1e-4  # eps: the ratio is clipped to 1 +- this (TRL)
    train_adv_clip_max: PositiveFloat = 5.0  # advantages are clipped to +- this (TRL)
    train_timestep_fraction: Share = 1.0  # fraction of each image's steps to train on, chosen at random (TRL)
    kl_coef: NonNegativeFloat = 0.0  # weight of the KL to the initial model in the loss (DPOK; 0 in DDPO: no KL)
    # --- Optimisation ---
    train_learning_rate: PositiveFloat = 3e-4  # learning rate of AdamW, constant (TRL)
    train_adam_beta1: Share = 0.9  # beta1 of AdamW (TRL)
    train_adam_beta2: Share = 0.999  # beta2 of AdamW (TRL)
    train_adam_epsilon: PositiveFloat = 1e-8  # epsilon of AdamW (TRL)
    train_adam_weight_decay: NonNegativeFloat = 1e-4  # weight decay of AdamW (TRL)
    train_max_grad_norm: PositiveFloat = 1.0  # the gradient is clipped to this norm (TRL)
    # --- Model: a folder, or a name on the hub ---
    model: str = f"{TOY}/shapes/sd"  # a Stable Diffusion pipeline
    reward_fn: tuple[str, ...] = (f"{TOY}/shapes/make.py:left_ink",)  # file.py:name of f(images, prompts, metadata)
    reward_weights: tuple[float, ...] = ()  # weights of the rewards; by default 1 (TRL); 0: only logged
    lora_r: NonNegativeInt = 0  # rank of LoRA adapters on the UNet's attention (Hu et al. 2021), 0 for none (TRL: 4)
    bf16: bool = False  # models run in bfloat16 (autocast), trained weights stay in float32. Slow on most CPUs
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    # --- Data. A row has `prompt`, a text; the whole row is the metadata of its image ---
    dataset: str = f"{TOY}/shapes/data"  # folder of train.jsonl, one such file, or a name on the hub
    # --- Run ---
    seed: NonNegativeInt = 1  # seed of the noise, the order of prompts, mini-batches and steps, and adapters
    num_epochs: PositiveInt = 25  # epochs: one batch of images each (TRL: 100)
    output_dir: str | None = None  # folder for all output; by default a new folder runs/SCRIPT__SEED__TIME
    resume: Annotated[str | None, alias("--resume-from")] = None  # folder of a run to continue
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, mps; by default cuda if there is one
    image_steps: PositiveInt = 5  # epochs between pictures in images/, which show the initial model above the policy
    save_steps: Annotated[PositiveInt, alias("--save-freq")] = 10  # epochs between checkpoints with the full state
    save_total_limit: Annotated[PositiveInt, alias("--num-checkpoint-limit")] = 1  # checkpoints to keep
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)


# --- The loop, with the steps of the docstring ------------------------------------------------------------------------
def train(args):
    """Trains the UNet of a pipeline. Saves the pipeline in the run's folder, with metrics and pictures."""
    args = start(args)
    prompts = load_rows(args)
    reward_fns = load_image_rewards(args)
    chain = load_chain(args)
    B = args.sample_batch_size * args.sample_num_batches_per_epoch * WORLD_SIZE  # images of an epoch
    print(f"{args.num_epochs} epochs on {args.device}, each of {B} images, drawn in {args.sample_num_steps} steps")
    passes = range(1 + args.num_epochs * B // len(prompts))
    order = [i for number in passes for i in shuffled(len(prompts), args.seed, number)]

    parameters = [p for p in chain.policy.parameters() if p.requires_grad]
    options = {"betas": (args.train_adam_beta1, args.train_adam_beta2), "eps": args.train_adam_epsilon}
    options |= {"lr": args.train_learning_rate, "weight_decay": args.train_adam_weight_decay}
    optimizer = torch.optim.AdamW(parameters, fused=True, **options)
    schedule = get_scheduler("constant", optimizer)
    run = Run(args, args.num_epochs, optimizer, schedule, {}, model=chain.policy)
    for epoch in run.steps():
        set_seed(make_seed(args.seed, epoch))

        # 1. Sample
        examples = [prompts[i] for i in order[(epoch - 1) * B : epoch * B]]
        parts = sample_batch(chain, examples, args)

        # 2. Score
        rollout = score_batch(parts, examples, reward_fns, args)

        # 3. Advantage
        limit = args.train_adv_clip_max
        rollout.advantages = normalize(rollout.scores).clamp(-limit, limit)

        # 4. Loss, and 5. update
        stats = update(chain, optimizer, rollout, args)
        is_one = epoch > 1 or stats["first_ratio_error"] < min(1e-4, args.train_clip_range / 2)  # or rounding clips
        require(is_one, "first_ratio_error: sampling and update differ, perhaps by rounding: give both one batch size")
        stats |= rollout_stats(rollout, args)
        run.log(stats | {"epoch": epoch, "step": epoch * stats["step"]}, "reward_mean", "objective/kl")
        if (epoch % max(1, args.image_steps) == 0 or epoch == args.num_epochs) and not RANK:
            draw_images(run, chain, prompts, args)
        schedule.step()
    run.finish()


# --- 1. Sample --------------------------------------------------------------------------------------------------------
@dataclass
class Rollout:
    """B images, or a part of them, with the denoising steps that led to them. A field is None until its step has run.
    Those of the KL need --kl-coef."""

    examples: list[dict]  # the B rows of the dataset: prompts, and metadata
    context: Tensor  # (B, L, D) the text encoder's output
    latents: Tensor  # (B, N+1, C, H, W) from noise x_N to x_0
    old_logprobs: Tensor  # (B, N) of each step, under the policy that drew it
    kl: Tensor | None = None  # (B, N) KL of each step to the initial model, in nats
    ref_means: Tensor | None = None  # (B, N, C, H, W) mean of each step under the initial model
    images: Tensor | None = None  # (B, 3, height, width) in [0, 1], until they have rewards
    reward_table: Tensor | None = None  # (B, K) of K reward functions
    scores: Tensor | None = None  # (B,), the weighted sum of the rewards
    advantages: Tensor | None = None  # (B,)


@dataclass
class Chain:
    """The networks and the schedule that turn noise into images."""

    pipe: "diffusers.StableDiffusionPipeline"  # its text encoder, image decoder and schedule are used
    policy: nn.Module  # its UNet, in training
    reference: nn.Module | partial  # the initial UNet, frozen; with LoRA, the policy without its adapters
    timesteps: Tensor  # (N,) descending, from 999 or less
    negative: Tensor | None = None  # (1, L, D) the text encoder's output for the negative prompt

    @torch.no_grad()
    def encode(self, texts, args):
        """(b, L, D) the text encoder's output for prompts, padded or truncated to its maximum length."""
        with autocast(args):
            context, _ = self.pipe.encode_prompt(texts, self.pipe.device, 1, do_classifier_free_guidance=False)
        return context.float()

    def decode(self, x, args):
        """(b, 3, height, width) images in [0, 1] from latents (b, C, H, W), eight at a time to save memory."""
        parts = (x / self.pipe.vae.config.scaling_factor).split(8)
        with autocast(args):
            images = torch.cat([self.pipe.vae.decode(part).sample for part in parts])  # in about [-1, 1]
        return (images.float() / 2 + 0.5).clamp(0, 1)

    def predict(self, x, t, context, args, of="policy"):
        """(b, C, H, W) prediction for x_t at times t (b,) and prompts (b, L, D), by the policy or the reference. With
        guidance, it is u + g (c - u), where u is predicted for the negative prompt and c for the prompt."""
        g = args.sample_guidance_scale
        if g != 1:
            x, t = torch.cat([x, x]), torch.cat([t, t])
            context = torch.cat([self.negative.expand_as(context), context])
        model = getattr(self, of)
        with autocast(args):
            prediction = model(sample=x, timestep=t, encoder_hidden_states=context).sample.float()
        if g == 1:
            return prediction
        u, c = prediction.chunk(2)
        return u + g * (c - u)

    def draw_noise(self, n, generator=None):
        """(n, N+1, C, H, W) the noise of n images: x_N, then z of each step."""
        net = self.policy.config
        shape = (n, len(self.timesteps) + 1, net.in_channels, net.sample_size, net.sample_size)
        return torch.randn(shape, generator=generator)


def ddim_step(scheduler, prediction, t, x, eta):
    """Mean (b, C, H, W) and standard deviation (b, 1, 1, 1) of x_{t-1}, given x_t at times t (b,).

    a and a_prev are the shares of signal in the variances of x_t and x_{t-1} (DDIM, eq. 12 and 16). The network's
    prediction gives an estimate of image and noise in x_t, and these give the mean of x_{t-1}:
        x_t     = sqrt(a) image + sqrt(1 - a) noise
        x_{t-1} = sqrt(a_prev) image + sqrt(1 - a_prev - sigma^2) noise + sigma z"""
    config = scheduler.config
    t = t.view(-1, 1, 1, 1)
    t_prev = t - config.num_train_timesteps // scheduler.num_inference_steps
    alphas = scheduler.alphas_cumprod.to(x)  # (1000,) falling, from nearly 1 to nearly 0
    a = alphas[t]
    final = scheduler.final_alpha_cumprod.to(x)  # of x_0
    a_prev = torch.where(t_prev < 0, final, alphas[t_prev.clamp(min=0)])
    if config.prediction_type == "epsilon":  # the noise
        image = (x - (1 - a).sqrt() * prediction) / a.sqrt()
    elif config.prediction_type == "sample":  # the image
        image = prediction
    else:  # v_prediction, a mixture of both (Salimans & Ho 2022)
        image = a.sqrt() * x - (1 - a).sqrt() * prediction
    noise = (x - a.sqrt() * image) / (1 - a).sqrt()  # before the image is clamped, as in diffusers
    if config.clip_sample:
        image = image.clamp(-config.clip_sample_range, config.clip_sample_range)
    std = eta * ((1 - a_prev) / (1 - a) * (1 - a / a_prev)).sqrt()
    noise_variance = (1 - a_prev - std**2).clamp(min=0)
    mean = a_prev.sqrt() * image + noise_variance.sqrt() * noise
    return mean, std


def gaussian_logprobs(x, mean, std):
    """(b,) log-density of x (b, C, H, W), as a mean over pixels (TRL). It is NaN if std is 0."""
    return Normal(mean, std, validate_args=False).log_prob(x).mean((1, 2, 3))


def gaussian_kl(mean, ref_mean, std):
    """(b,) KL in nats between two normal distributions of the same std, as a sum over pixels. It is 0 if std is 0."""
    kl = (mean - ref_mean) ** 2 / (2 * std**2)
    return kl.masked_fill(std == 0, 0.0).sum((1, 2, 3))


@torch.no_grad()
def sample_images(chain, examples, noise, args, of="policy"):
    """Draws an image per example from its noise (b, N+1, C, H, W), with the policy or the reference."""
    context = chain.encode([example["prompt"] for example in examples], args)  # (b, L, D)
    noise = noise.to(args.device)
    x = noise[:, 0]  # (b, C, H, W)
    latents = [x]
    logprobs = []
    kl = []
    ref_means = []
    for t, z in zip(chain.timesteps, noise[:, 1:].unbind(1)):
        t = t.expand(len(x))  # (b,)
        prediction = chain.predict(x, t, context, args, of)  # (b, C, H, W)
        mean, std = ddim_step(chain.pipe.scheduler, prediction, t, x, args.sample_eta)
        if args.kl_coef:
            prediction = chain.predict(x, t, context, args, "reference")
            ref_mean, _ = ddim_step(chain.pipe.scheduler, prediction, t, x, args.sample_eta)
            kl.append(gaussian_kl(mean, ref_mean, std))
            ref_means.append(ref_mean)
        x = mean + std * z
        latents.append(x)
        logprobs.append(gaussian_logprobs(x, mean, std))
    rollout = Rollout(examples, context, torch.stack(latents, 1), torch.stack(logprobs, 1))
    if args.kl_coef:
        rollout.kl = torch.stack(kl, 1)
        rollout.ref_means = torch.stack(ref_means, 1)
    rollout.images = chain.decode(x, args)
    return rollout


def sample_batch(chain, examples, args):
    """Step 1: this process's share of the images, in parts of `sample_batch_size`. Each process draws the noise of all
    images, so that they do not depend on the number of processes."""
    parts = []
    size = args.sample_batch_size * WORLD_SIZE
    for first in range(0, len(examples), size):
        noise = chain.draw_noise(size)  # on the CPU, for any device
        share = torch.arange(size).tensor_split(WORLD_SIZE)[RANK]
        parts.append(sample_images(chain, [examples[first + i] for i in share], noise[share], args))
    return parts


# --- 2. Score ---------------------------------------------------------------------------------------------------------
def image_rewards(function, part, args):
    """(b,) rewards of a user's function, with TRL's signature: f(images, prompts, metadata) -> numbers.

    The metadata of an image is its row of the dataset. As in TRL, the function may also return a pair, the numbers and
    more metadata, which is ignored. Each process calls it for its images."""
    rows = deepcopy(part.examples)
    with torch.random.fork_rng(devices=[]):  # the function's random numbers do not change the run's
        returned = function(part.images.clone(), [row["prompt"] for row in rows], rows)
    if isinstance(returned, tuple):
        returned = returned[0]
    rewards = read_rewards(returned, len(rows), function.__name__)
    require(rewards.isfinite().all(), f"{function.__name__} should return a number for each image, but returned None")
    return rewards.to(args.device)


def score_batch(parts, examples, reward_fns, args):
    """Step 2: scores the images, and makes one rollout of the parts of all processes, in the order of the examples."""
    for part in parts:
        part.reward_table = torch.stack([image_rewards(f, part, args) for f in reward_fns.values()], 1)  # (b, K)
        part.images = None  # nothing needs them any more
    rollout = copy(parts[0])
    rollout.examples = examples
    for name, x in vars(parts[0]).items():
        if isinstance(x, Tensor):
            setattr(rollout, name, torch.cat([all_gather(getattr(part, name)) for part in parts]))
    weights = rollout.reward_table.new_tensor(args.reward_weights or [1.0] * len(reward_fns))
    rollout.scores = (rollout.reward_table * weights).sum(1)
    return rollout


# --- 3. Advantage -----------------------------------------------------------------------------------------------------
def normalize(scores):
    """(B,) scores minus their mean, divided by their standard deviation; 0 if all are equal."""
    moved = scores - scores[0]  # so that equal scores give exactly 0: their mean may be rounded
    return (moved - moved.mean()) / (scores.std(correction=0) + 1e-8)


# --- 4. Loss ----------------------------------------------------------------------------------------------------------
def policy_loss(logprobs, old_logprobs, advantages, cliprange):
    """Clipped losses (b,) (PPO, eq. 7), and the ratio. The gradient is 0 where the ratio has left the clip range in the
    direction that the advantage favours; in the other direction it is not clipped, and moves the ratio back."""
    ratio = (logprobs - old_logprobs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio


# --- 5. Update --------------------------------------------------------------------------------------------------------
def update(chain, optimizer, rollout, args):
    """Steps 4 and 5: `train_num_inner_epochs` passes over the images. Returns means of the metrics.

    The gradient of a mini-batch is that of the mean loss over its pairs of image and step, however it is split among
    processes: gradients are averaged over them, so each divides its sum by the number of pairs / WORLD_SIZE."""
    weights = optimizer.param_groups[0]["params"]
    B = len(rollout.scores)
    N = int(rollout.old_logprobs[0].isfinite().sum())  # leaves out a last step with sigma = 0
    require(N, "no step has a density: increase --sample-num-steps, or lower the learning rate if images are NaN")
    S = max(1, int(N * args.train_timestep_fraction))
    mini_batch_size = args.train_batch_size * args.train_gradient_accumulation_steps * WORLD_SIZE
    logs = []  # one per optimiser step
    for _ in range(args.train_num_inner_epochs):
        order = torch.randperm(B).to(args.device)
        steps = torch.stack([torch.randperm(N)[:S] for _ in range(B)])  # (B, S) an order for each image
        steps = steps.to(args.device)
        for mini_batch in order.split(mini_batch_size):
            optimizer.zero_grad()
            num_pairs = len(mini_batch) * S / WORLD_SIZE
            sums = Counter()
            for index in mini_batch[RANK::WORLD_SIZE].split(args.train_batch_size):  # (b,) numbers of images
                context = rollout.context[index]
                for k in steps[index].T:  # (b,) number of a step, another one for each image
                    t = chain.timesteps[k]  # (b,)
                    x = rollout.latents[index, k]  # (b, C, H, W)
                    x_prev = rollout.latents[index, k + 1]  # (b, C, H, W)
                    prediction = chain.predict(x, t, context, args)  # (b, C, H, W)
                    mean, std = ddim_step(chain.pipe.scheduler, prediction, t, x, args.sample_eta)
                    logprobs = gaussian_logprobs(x_prev, mean, std)  # (b,)
                    old_logprobs = rollout.old_logprobs[index, k]
                    advantages = rollout.advantages[index]
                    loss, ratio = policy_loss(logprobs, old_logprobs, advantages, args.train_clip_range)
                    if args.kl_coef:
                        kl = gaussian_kl(mean, rollout.ref_means[index, k], std)
                        loss = loss + args.kl_coef * kl / x[0].numel()  # per pixel, like the log-probabilities
                    (loss.sum() / num_pairs).backward()  # adds to the gradient
                    distance = (ratio - 1).abs()
                    metrics = {
                        "loss": loss,
                        "approx_kl": 0.5 * (logprobs - old_logprobs) ** 2,
                        "clipfrac": (distance > args.train_clip_range).float(),
                        "first_ratio_error": distance,
                    }
                    sums.update({name: values.detach().sum() for name, values in metrics.items()})  # a Counter adds
            means = all_reduce(torch.stack(list(sums.values()))) / (WORLD_SIZE * num_pairs)
            for p in weights:
                all_reduce(p.grad).div_(WORLD_SIZE)  # the mean over processes
            norm = nn.utils.clip_grad_norm_(weights, args.train_max_grad_norm)
            if norm.isfinite():  # otherwise the step would turn the weights into NaN
                optimizer.step()
            logs.append(dict(zip(sums, means.tolist())) | {"grad_norm": norm.item()})
    optimizer.zero_grad()
    stats = {name: sum(log[name] for log in logs) / len(logs) for name in logs[0]}
    stats["first_ratio_error"] = logs[0]["first_ratio_error"]  # before any step, where the ratio should be 1
    return stats | {"step": len(logs)}


# === End of the algorithm. Next: its metrics, then what every program of this kind needs =============================
def rollout_stats(rollout, args):
    """Metrics of an epoch's images, from before the update."""
    stats = {"reward_mean": rollout.scores.mean().item()}
    stats["reward_std"] = rollout.scores.std(correction=0).item()
    if args.kl_coef:
        stats["objective/kl"] = rollout.kl.sum(1).mean().item()
    for spec, rewards in zip(args.reward_fn, rollout.reward_table.T):
        name = spec.rpartition(":")[2]
        stats[f"rewards/{name}/mean"] = rewards.mean().item()
        stats[f"rewards/{name}/std"] = rewards.std().item()  # with Bessel's correction, as in TRL
    return stats


def draw_images(run, chain, prompts, args):
    """images/epoch-N.png: eight images of the initial model above eight of the policy, from the same noise."""
    args = replace(args, kl_coef=0.0)  # pictures need no KL
    examples = (prompts * 8)[:8]
    noise = chain.draw_noise(8, torch.Generator().manual_seed(args.seed))  # the same in each epoch
    rows = [sample_images(chain, examples, noise, args, of).images for of in ("reference", "policy")]
    images = nn.functional.pad(torch.cat(rows), (1, 1, 1, 1), value=0.5)  # (16, 3, height, width) with a frame
    images = nn.functional.interpolate(images, scale_factor=max(1, 64 // images.shape[-1]))  # enlarges small images
    pictures = chain.pipe.numpy_to_pil(images.permute(0, 2, 3, 1).cpu().numpy())
    (run.output / "images").mkdir(exist_ok=True)
    diffusers.utils.make_image_grid(pictures, 2, 8).save(run.output / f"images/epoch-{run.step:04d}.png")


# --- Models and data --------------------------------------------------------------------------------------------------
def load_chain(args):
    """Policy and reference, the UNet of a Stable Diffusion pipeline, in evaluation mode: dropout would move the ratio.

    The schedule is DDIM's in even steps, with the noise of the pipeline's own. Latents are not clipped, as in
    StableDiffusionPipeline."""
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")  # TF32 would move ratios out of the clip range
    torch.backends.cudnn.allow_tf32 = False  # in convolutions
    kind = diffusers.DiffusionPipeline.load_config(args.model)["_class_name"]
    require(kind == "StableDiffusionPipeline", f"--model {args.model} is a {kind}, not a StableDiffusionPipeline")
    options = {"use_safetensors": True, "safety_checker": None, "requires_safety_checker": False}
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(args.model, dtype=torch.float32, **options)
    policy = pipe.unet.eval()
    if args.gradient_checkpointing:
        policy.enable_gradient_checkpointing()
    if args.lora_r:  # adapters on its attention, with lora_alpha = r, as load_lora_weights assumes
        from peft import LoraConfig

        reference = partial(without_adapters, policy)
        layers = ["to_k", "to_q", "to_v", "to_out.0"]
        lora = LoraConfig(r=args.lora_r, lora_alpha=args.lora_r, target_modules=layers, init_lora_weights="gaussian")
        policy.requires_grad_(False).add_adapter(lora)
    else:
        reference = deepcopy(policy).requires_grad_(False).to(args.device)
    own = pipe.scheduler
    config = dict(own.config, _use_default_values=[])  # otherwise DDIM's defaults would replace those of the scheduler
    if config.get("timestep_spacing") != "trailing":
        config["timestep_spacing"] = "leading"  # the steps of "linspace" do not lead from one time to the next
    ddim = diffusers.DDIMScheduler.from_config(config, clip_sample=False)
    is_known = ddim.config.prediction_type in ("epsilon", "sample", "v_prediction") and not ddim.config.thresholding
    require(is_known, f"{args.model}: its scheduler has a prediction_type or thresholding that is not supported")
    ddim.set_timesteps(args.sample_num_steps)
    policy.pipe = pipe.to(args.device)  # both for save_pipeline
    policy.scheduler = own
    pipe.scheduler = ddim
    chain = Chain(pipe, policy, reference, ddim.timesteps.to(args.device))
    chain.negative = chain.encode([args.negative_prompts], args)
    return chain


def save_pipeline(unet, folder):
    """Saves the pipeline with the trained UNet and its own scheduler; with LoRA also the adapter, in lora/, for
    `pipe.load_lora_weights`."""
    if RANK:
        return
    pipe = unet.pipe
    pipe.scheduler = unet.scheduler
    if getattr(unet, "peft_config", None):
        from peft import get_peft_model_state_dict

        layers = diffusers.utils.convert_state_dict_to_diffusers(get_peft_model_state_dict(unet))
        pipe.save_lora_weights(folder / "lora", layers)
        unet.fuse_lora()
        unet.unload_lora()
    pipe.save_pretrained(folder)


save_model = save_pipeline  # Run calls it by this name


def load_image_rewards(args):
    """The functions of --reward-fn by name."""
    reward_fns = {spec.rpartition(":")[2]: load_function(spec, "--reward-fn") for spec in args.reward_fn}
    require(len(reward_fns) == len(args.reward_fn), "--reward-fn: two functions have the same name")
    has_weights = len(args.reward_weights) in (0, len(reward_fns))
    require(has_weights, "--reward-weights needs one number for each function of --reward-fn")
    return reward_fns


def load_rows(args):
    """The rows of the dataset, each with its prompt. Prints the first prompt as the text encoder reads it."""
    for name in (args.model, args.dataset):
        is_path = Path(name.split("/")[0]).is_dir()  # the library would look for a wrong path on the hub
        require(Path(name).exists() or not is_path, f"{name}: there is no such file or folder")
    path = Path(args.dataset)
    if path.exists():
        file = path / "train.jsonl" if path.is_dir() else path
        require(file.exists(), f"there is no {file}: recipes/data.py converts other files")
        lines = file.read_bytes().splitlines()
        rows = parse(lines, lambda line: {**json.loads(line)}, file)
    else:
        import datasets

        rows = datasets.load_dataset(args.dataset, split="train").to_list()
    require(rows, f"--dataset {path} has no prompts")
    for number, row in enumerate(rows, 1):
        require(isinstance(row.get("prompt"), str), f"row {number} of {path}: 'prompt' is not a text")
    tokenizer = AutoTokenizer.from_pretrained(args.model, subfolder="tokenizer")
    ids = tokenizer([row["prompt"] for row in rows])["input_ids"]
    limit = tokenizer.model_max_length
    num_cut = sum(len(x) > limit for x in ids)
    print(f"train: {len(rows)} rows of {path}; {num_cut} prompts are truncated to {limit} tokens")
    print(f"the first one, as the text encoder reads it: {tokenizer.decode(ids[0][:limit])!r}")
    return rows


# === From here on, a function has the same text in all scripts that have it ==========================================
# --- Rewards ----------------------------------------------------------------------------------------------------------
def load_function(spec, flag):
    """The function or class that file.py:name stands for. The file imports from this folder and from PYTHONPATH."""
    file, _, name = spec.rpartition(":")
    require(Path(file).is_file(), f"{flag} {spec}: should be file.py:name, of a file that exists")
    members = run_file(file)
    require(name in members, f"{flag} {spec}: {file} has no {name}, only {[x for x in members if x[0] != '_']}")
    return members[name]


run_file = cache(runpy.run_path)  # once for all functions of a file: a judge is loaded once


def read_rewards(returned, n, name):
    """(n,) the rewards that a function returned: finite numbers, or None, which becomes NaN."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    values = values if isinstance(values, (list, tuple)) else []
    rewards = torch.tensor([0.0 if x is None else x for x in values], dtype=torch.float32)
    is_right = rewards.shape == (n,) and rewards.isfinite().all()
    require(is_right, f"{name} should return {n} numbers or None, one per row, not {len(values)}: {returned!r:.60}")
    return rewards.masked_fill(torch.tensor([x is None for x in values]), math.nan)


# --- Rows -------------------------------------------------------------------------------------------------------------
def require(condition, message):
    """Exits with the message unless the condition holds. It is for errors that no library reports clearly."""
    if not condition:
        sys.exit(f"error: {message}")


def parse(rows, function, where):
    """Applies a function to each row. An error ends the run and names the row."""
    parsed = []
    for number, row in enumerate(rows, 1):
        try:
            parsed.append(function(row))
        except (SystemExit, TypeError, ValueError, TemplateError) as error:
            reason = str(error).removeprefix("error: ")
            sys.exit(f"error: row {number} of {where}: {reason} (recipes/data.py converts other forms)")
    return parsed


def shuffled(n, seed, number):
    """The numbers below n, in an order that depends on the seed and the number of the pass."""
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


def make_seed(*numbers):
    """One seed from several numbers; zeros at the end do not count. The draws of a step depend on no other step."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


# --- Models -----------------------------------------------------------------------------------------------------------
def without_adapters(model, **inputs):
    """The output of a model with LoRA as it was before training, without a copy: its adapters are scaled by 0."""
    from peft.helpers import rescale_adapter_scale

    with rescale_adapter_scale(model, 0.0):
        return model(**inputs)


def autocast(args):
    """Autocast to bfloat16 with --bf16. Trained weights, losses and everything after the logits stay in float32. It
    keeps a bfloat16 copy of the weights until the context ends, but not with --gradient-checkpointing."""
    device_type = torch.device(args.device).type
    return torch.autocast(device_type, torch.bfloat16, args.bf16, cache_enabled=not args.gradient_checkpointing)


# --- Processes
def start(args):
    """Makes the run's folder, joins torchrun's processes, and configures the libraries. Returns the settings."""
    name = f"runs/{Path(__file__).stem}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder = Path(args.resume or args.output_dir or name)
    if not RANK and not args.resume:
        folder.mkdir(parents=True, exist_ok=True)
        others = {file.name for file in folder.iterdir()} - {"args.json", ".lock", "wandb"}  # of a run without a step
        require(not others, f"--output-dir {folder} has files: {sorted(others)[:3]}")
    device_type = torch.device(args.device).type
    if "RANK" in os.environ and not dist.is_initialized():
        if device_type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "gloo"  # Run.steps sums on the CPU
        if device_type != "cpu":
            backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
        dist.init_process_group(backend, timeout=timedelta(hours=2))  # a process may wait for a slow reward function
    ACT2FN["gelu_new"] = GELUTanh  # GPT-2's activation, in one operator instead of eight
    set_seed(args.seed)  # all processes draw the same new weights
    logging.set_verbosity_error()  # transformers would report each new head
    if device_type != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32; plain float32 does not use the tensor cores
    if sys.platform == "linux":  # glibc keeps freed memory; asking for it again would take a tenth of a run
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    return replace(args, output_dir=str(folder))


def all_reduce(x):
    """Sums x over all processes, in place."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
    return x


def all_gather(x):
    """Joins the rows x (B/WORLD_SIZE, ...) of all processes, in the order of the processes, to (B, ...)."""
    if WORLD_SIZE == 1:
        return x
    shares = [torch.empty_like(x) for _ in range(WORLD_SIZE)]
    dist.all_gather(shares, x.contiguous())
    return torch.cat(shares)


def shards(model):
    """The parts of a model that are divided among processes."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# --- The run
class Run:
    """The output of a run: progress bar, metrics.jsonl, W&B, checkpoints, and at the end the model.
    `state` is what one step hands to the next. On a CPU, a resumed run equals an uninterrupted one bit for bit."""

    def __init__(self, args, num_steps, optimizer, schedule, state, **models):
        self.args = args
        self.num_steps = num_steps
        self.optimizer = optimizer
        self.state = state
        self.models = nn.ModuleDict(models)
        self.step = 0
        self.stop_requested = False
        self.lines = []  # of metrics.jsonl; that of step 0 waits for step 1
        self.output = Path(args.output_dir)  # only process 0 writes to it
        self.lock = FileLock(self.output / ".lock")  # until the process ends
        if not RANK:
            self.lock.acquire(timeout=0)  # or another run writes to the folder
        if args.resume:
            self.restore()
        for _ in range(self.step):
            schedule.step()
        # after an optimiser step, gathered weights are out of date
        optimizer.register_step_post_hook(lambda *_: [part.reshard() for part in shards(self.models)])
        self.bar = tqdm(total=num_steps, initial=self.step, dynamic_ncols=True, disable=RANK > 0)
        self.wandb = None
        if RANK:
            return
        revision = subprocess.getoutput(f"git -C '{TOY.parent}' describe --always --dirty")  # or git's error
        (self.output / "args.json").write_text(json.dumps(asdict(args) | {"revision": revision}, indent=2))
        if args.track:
            import wandb

            self.wandb = wandb.init(id=self.output.name, resume="allow", dir=self.output, config=asdict(args))

    def steps(self):
        """Yields the remaining steps, and saves checkpoints. Ctrl-C, SIGTERM and SIGHUP end the loop after a step."""
        numbers = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")]
        numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # which nohup sets
        handlers = {number: signal.signal(number, self.on_signal) for number in numbers}
        while self.step < self.num_steps and not self.stop_requested:
            self.step += 1
            self.step_started = time.perf_counter()
            yield self.step
            self.stop_requested = all_reduce(torch.tensor(int(self.stop_requested))).item() > 0  # in any process
            if self.stop_requested or self.step % self.args.save_steps == 0:
                self.save()
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def on_signal(self, number, _):
        """Ends the run after this step; a second signal of the kind ends it at once."""
        self.stop_requested = True
        signal.signal(number, signal.SIG_DFL)
        self.bar.write(f"{signal.Signals(number).name}: ends after this step, with a checkpoint. Once more: ends now")

    def log(self, stats, *shown):
        """Logs to metrics.jsonl and W&B, and shows the metrics named in `shown` beside the bar."""
        stats["perf/peak_memory_mb"] = torch.cuda.max_memory_allocated() / 2**20  # 0 on a CPU
        self.bar.set_postfix({name: stats[name] for name in shown if name in stats}, refresh=False)
        self.bar.update(self.step - self.bar.n)
        line = {name: x if math.isfinite(x) else None for name, x in stats.items()}  # JSON has no NaN
        self.lines.append(json.dumps(line) + "\n")
        if self.step and not RANK:
            with open(self.output / "metrics.jsonl", "a") as file:
                file.writelines(self.lines)
            self.lines.clear()
        if self.wandb:
            self.wandb.log(stats, step=self.step)

    def save(self):
        """Writes a checkpoint, under another name until it is complete, and removes old ones."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights, optimizer = get_state_dict(self.models, self.optimizer, options=options)
        if RANK:
            return
        num_bytes = (self.output / "metrics.jsonl").stat().st_size
        weights = {name: weights[name] for name, p in self.models.named_parameters() if p.requires_grad}  # tied: once
        saved = {"step": self.step, "state": self.state, "num_bytes": num_bytes}
        saved |= {"weights": weights, "moments": optimizer["state"]}
        folder = self.output / "checkpoints"
        folder.mkdir(exist_ok=True)
        unfinished = folder / "unfinished.pt"
        try:
            torch.save(saved, unfinished)
            unfinished.rename(folder / f"step-{self.step:08d}.pt")
        finally:
            unfinished.unlink(missing_ok=True)  # if the disk is full
        for old in sorted(folder.glob("step-*.pt"))[: -self.args.save_total_limit]:
            old.unlink()

    def restore(self):
        """Continues from the newest checkpoint, with the settings of this run."""
        found = sorted(self.output.glob("checkpoints/step-*.pt"))
        require(found, f"{self.output} has no checkpoint")
        saved = torch.load(found[-1], map_location="cpu", weights_only=True)
        options = StateDictOptions(full_state_dict=True, strict=False)  # it has the trained weights alone
        _, optimizer = get_state_dict(self.models, self.optimizer, options=options)
        optimizer["state"] = saved["moments"]
        both = {"model_state_dict": saved["weights"], "optim_state_dict": optimizer}
        wrong = set_state_dict(self.models, self.optimizer, **both, options=options).unexpected_keys
        require(not wrong, f"the model has no weights of these names, which the checkpoint has: {wrong[:3]}")
        self.step = saved["step"]
        self.state.update(saved["state"])
        if not RANK:
            os.truncate(self.output / "metrics.jsonl", saved["num_bytes"])  # without what came after the checkpoint

    def finish(self):
        """Saves the model."""
        self.bar.close()
        save_model(self.models["model"], self.output)
        print(f"saved in {self.output}: the model, and metrics.jsonl (tools/card.py draws it)")
        if self.step < self.num_steps:
            print(f"to continue from step {self.step}: --resume {self.output}")
        self.lock.release()


def read_command_line():
    """Reads the settings from the command line. A resumed run keeps its settings, except those on the command line. Its
    files of code run only if the command line names them again: someone else may have written the folder."""
    read = partial(tyro.cli, Args, description=__doc__.splitlines()[0])
    given = read()
    if not given.resume:
        return given
    saved = json.loads(Path(given.resume, "args.json").read_text())
    args = read(default=Args(**saved))
    for name in {"reward_fn", "env"} & saved.keys():
        is_named = getattr(args, name) == getattr(given, name)
        require(is_named, f"--resume: give the option that names code again: {name} {getattr(args, name)}")
    return args


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a letter that the terminal lacks ends no run
    if RANK:
        sys.stdout = open(os.devnull, "w")  # only process 0 prints
    args = read_command_line()
    try:
        train(args)
    finally:
        print(file=sys.stderr)  # ends the line of the progress bar
    if dist.is_initialized():
        dist.destroy_process_group()
