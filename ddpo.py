# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.23.0",
#     "diffusers==0.42.1",
#     "datasets==5.2.0",
#     "tyro==1.0.17",
#     "wandb==0.31.0",
#     "matplotlib==3.11.2",
#     "pydantic==2.14.3",
#     "tqdm==4.70.1",
# ]
# ///
"""DDPO for diffusion models: policy + reward on images -> better policy.

The policy gradient of ppo.py, applied to images. An image is a response, a denoising step a token:

  text     prompt  ->  y_1  ->  y_2  -> ... -> y_T     y_t ~ softmax(logits of y_<t)          score of y_1 ... y_T
  image    noise x_N -> x_{N-1} -> ...  -> x_0         x_{t-1} ~ Normal(mu(x_t, t), sigma_t)  score of x_0

For each epoch:
  1. sample      noise x_N, then x_{t-1} = mu + sigma_t z for each of N steps (DDIM with eta > 0), keeping all of them
                 and log pi(x_{t-1} | x_t), the log-density of the normal distribution, as a mean over pixels
  2. score       images, prompts and metadata -> one number per image, the weighted sum of all rewards
  3. advantage   A = (score - mean) / std, over the batch or over recent scores of the prompt; the same A for all steps
  4. loss        ratio_t = pi(x_{t-1} | x_t) / pi_old(x_{t-1} | x_t);  mean max(-A ratio, -A clip(ratio, 1-eps, 1+eps))
                 + kl_coef * KL of the step to the initial model, per pixel
  5. update      `train_num_inner_epochs` passes with AdamW; the steps of each image are shuffled

The state is the noisy image; the action is the next, less noisy image. The network predicts mu; sigma is fixed by the
schedule. There is no critic and no discount, and only the last image has a score. Some schedules end with sigma = 0:
this step is deterministic, has no density, and is not trained on. Log-probabilities are means over pixels, not sums, so
that the ratio stays near 1; that is why eps is 1e-4 and not 0.2.

The KL of a step is |mu - mu_ref|^2 / (2 sigma^2), in nats; summed over pixels and steps, it measures how far the policy
is from the initial model. The paper has no KL term; DPOK has one in the loss, as here.
Papers: Black et al. 2023 (DDPO, arXiv 2305.13301, sec. 4); Song et al. 2020 (DDIM, 2010.02502, eq. 12 and 16); Ho &
Salimans 2022 (classifier-free guidance, 2207.12598); Fan et al. 2023 (DPOK, 2305.16381). docs/ddpo.md has a glossary.

  python ddpo.py                    # shapes of 8 x 8 pixels move to the left: offline, a minute on two CPU cores
  python ddpo.py --model runwayml/stable-diffusion-v1-5 --lora-r 4 --dataset D \\
      --reward-fn rewards/jpeg.py:compressibility

Shapes: B images, b in a micro-batch, N denoising steps, C channels, H and W of the latent image; an encoded prompt has
L tokens of width D.
"""

import glob
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import cache, lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Annotated

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before importing torch: limits how long idle threads spin

import datasets
import diffusers
import numpy as np
import pandas
import pydantic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
import tyro
from filelock import FileLock
from huggingface_hub import constants, get_session
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.distributions import Normal
from tqdm import tqdm
from transformers import get_scheduler, set_seed

VERSION = "2026.11"  # as in CITATION.cff

# The rank of this process and the number of processes under torchrun; otherwise 0 and 1. All processes read the same
# data and draw the same random numbers; each computes its share of every batch
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# --- Settings. A type limits the values; the comment beside or above a setting is its help text

Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0, lt=2**32)]
Name = Annotated[str, Field(min_length=1)]


@pydantic.dataclasses.dataclass  # checks the values
class Args:
    # --- Sampling. The batch of an epoch: sample_batch_size * sample_num_batches_per_epoch * processes images ---
    # denoising steps N (TRL: 50)
    sample_num_steps: Count = 10
    # scale of sigma; with 0, sampling would not explore; 1 is DDPM (TRL: 1)
    sample_eta: Annotated[float, Field(gt=0, le=1)] = 1.0
    sample_guidance_scale: NonNegative = 1.0  # classifier-free guidance in sampling and training; 1: none (TRL: 5)
    sample_batch_size: Count = 64  # images sampled at once, on each process (TRL: 1)
    sample_num_batches_per_epoch: Count = 4  # number of these batches in an epoch (TRL: 2)
    negative_prompts: Name | None = None  # the negative prompt of the guidance; by default empty (TRL)

    # --- DDPO. An optimiser step: train_batch_size * train_gradient_accumulation_steps * processes images ---
    # images in a forward and backward pass, on each process (TRL: 1)
    train_batch_size: Count = 64
    train_gradient_accumulation_steps: Count = 2  # passes per optimiser step (TRL: 1)
    train_num_inner_epochs: Count = 1  # passes over the images of an epoch (TRL: 1)
    train_clip_range: Positive = 1e-4  # eps: the ratio is clipped to 1 +- this (TRL)
    train_adv_clip_max: Positive = 5.0  # advantages are clipped to +- this (TRL)
    train_timestep_fraction: Share = 1.0  # fraction of each image's steps to train on, chosen at random (TRL)
    per_prompt_stat_tracking: bool = False  # normalise scores by the recent scores of the same prompt (TRL)
    per_prompt_stat_tracking_buffer_size: Count = 16  # number of recent scores to keep per prompt (TRL)
    per_prompt_stat_tracking_min_count: Count = 16  # with fewer scores, a prompt is normalised by the batch (TRL)
    kl_coef: NonNegative = 0.0  # weight of the KL to the initial model in the loss (DPOK; 0 in DDPO)

    # --- Optimisation ---
    # learning rate of AdamW, constant (TRL)
    train_learning_rate: Positive = 3e-4
    train_adam_beta1: Decay = 0.9  # beta1 of AdamW (TRL)
    train_adam_beta2: Decay = 0.999  # beta2 of AdamW (TRL)
    train_adam_epsilon: Positive = 1e-8  # epsilon of AdamW (TRL)
    train_adam_weight_decay: NonNegative = 1e-4  # weight decay of AdamW (TRL)
    train_max_grad_norm: Positive = 1.0  # the gradient is clipped to this norm (TRL)

    # --- Model: a folder, or a name on the hub ---
    # a Stable Diffusion pipeline; its UNet is trained, and is the reference of the KL
    model: Name = "toy/shapes/sd"
    # file.py:name of f(images, prompts, metadata), as in TRL; several are added up
    reward_fn: tuple[Name, ...] = ("toy/shapes/make.py:left_ink",)
    reward_weights: tuple[Weight, ...] = ()  # weights of these rewards; by default all 1 (TRL); 0: only logged
    lora_r: Natural = 0  # rank of LoRA adapters on the UNet's attention (Hu et al. 2021), 0 for none (TRL: 4)
    lora_alpha: Positive = 4.0  # the adapter's output is scaled by lora_alpha / lora_r
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower

    # --- Data ---
    # folder, file (jsonl, json, csv, parquet) or hub name
    dataset: Name = "toy/shapes/data"
    dataset_config: Name | None = None  # configuration of a hub dataset that has several
    dataset_train_split: Name = "train"  # split to train on
    prompt_column: Name = "prompt"  # column of the prompts; the full row is the metadata of its image
    seed: Natural = 1  # seed of the noise, the order of prompts, and the adapters

    # --- Run ---
    # folder of a run to continue. It keeps its settings, except those given on the command line
    resume: Name | None = None
    num_epochs: Count = 25  # epochs: one batch of images each (TRL: 100)
    exp_name: Name = "ddpo"  # name of this run, in its folder and on W&B
    output_dir: Name | None = None  # folder for all output; by default a new folder runs/NAME__SEED__TIME
    # cpu, cuda, mps; by default cuda if there is one
    device: Name = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    image_steps: Count = 5  # epochs between pictures in images/, which show the initial model above the policy
    save_steps: Count = 10  # epochs between checkpoints, which hold the full state of the run
    save_total_limit: Count = 2  # number of newest checkpoints to keep
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)
    wandb_project_name: Name = "rlhf"  # W&B project, with --track
    wandb_entity: Name | None = None  # W&B team, with --track


# --- The loop, with the steps of the docstring ------------------------------------------------------------------------


def train(args: Args) -> None:
    """Trains the UNet of a pipeline. Writes the pipeline, metrics, curves and pictures to the run's folder."""
    check_args(args)
    start(args)
    asked = args

    chain = load_chain(args)

    prompts = load_prompts(args)
    batch_size, num_steps = choose_sizes(args, chain)
    print_prompts(prompts, chain.pipe.tokenizer, args)
    reward_fns = make_reward_fns(args)

    optimizer = make_optimizer(args, chain.policy)
    schedule = get_scheduler("constant", optimizer)
    # state besides the weights: the recent scores of each prompt; and the size of an epoch, which has to stay
    memory = {"scores": {}, "num_images": batch_size}
    run = Run(args, args.num_epochs, optimizer, schedule, memory, asked, model=chain.policy)
    is_same_size = memory["num_images"] == batch_size
    require(is_same_size, f"a resumed run keeps its {memory['num_images']} images per epoch: set --sample-batch-size")
    for epoch in run.steps():
        set_seed(make_seed(args.seed, epoch))
        examples = batch(prompts, epoch - 1, batch_size, args.seed)
        with run.clock("rollout"):
            parts = sample_batch(chain, examples, args)  # 1
        with run.clock("score"):
            for part in parts:
                score_images(part, reward_fns, args)  # 2
        rollout = join(parts, examples)
        if args.per_prompt_stat_tracking:  # 3
            texts = [x[args.prompt_column] for x in examples]
            advantages = prompt_advantages(rollout.scores, texts, memory["scores"], args)
        else:
            advantages = normalize(rollout.scores, rollout.scores, 1e-8)
        rollout.advantages = advantages.clamp(-args.train_adv_clip_max, args.train_adv_clip_max)
        with run.clock("update"):
            stats = update(chain, optimizer, rollout, args)  # 4 and 5
        check_first_ratio(stats["first_ratio_error"], epoch, args)
        stats |= rollout_stats(rollout)
        stats["epoch"] = epoch
        stats["step"] = epoch * num_steps
        run.log(stats, "reward_mean", "objective/kl")
        warn_about(rollout)
        if run.is_due(args.image_steps):
            draw_images(run, chain, prompts, args)
        schedule.step()
    run.finish()


# --- 1. Sample --------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """B images with the denoising steps that led to them, and their scores and advantages.

    A process samples its share of the batch in parts; `join` makes one rollout of the parts of all processes.
    """

    examples: list[dict]  # B rows of the dataset, with prompt and metadata
    context: Tensor  # (B, L, D) the text encoder's output
    latents: Tensor  # (B, N+1, C, H, W) from noise x_N to x_0
    old_logprobs: Tensor  # (B, N) of each step, under the policy that drew it
    kl: Tensor  # (B, N) KL of each step to the initial model, in nats
    ref_means: Tensor | None  # (B, N, C, H, W) mean of each step under the initial model, if the loss needs it
    images: Tensor | None  # (B, 3, height, width) in [0, 1], until they have scores
    rewards_by_name: dict[str, Tensor] = field(default_factory=dict)  # (B,) of each reward function, NaN for None
    scores: Tensor | None = None  # (B,), the weighted sum of the rewards
    advantages: Tensor | None = None  # (B,)


@dataclass
class Chain:
    """The networks and the schedule that turn noise into images."""

    pipe: "diffusers.StableDiffusionPipeline"  # its text encoder, image decoder and schedule are used
    policy: nn.Module  # its UNet, in training
    reference: nn.Module  # the initial UNet, frozen; with LoRA, the policy with its adapter off
    timesteps: Tensor  # (N,) descending, from 999 or less
    negative: Tensor  # (1, L, D) the text encoder's output for the negative prompt

    def predict(self, x: Tensor, t: Tensor, context: Tensor, args: Args, of: str = "policy") -> Tensor:
        """(b, C, H, W) prediction for x_t at times t (b,) and prompts (b, L, D), by the policy or the reference.

        With guidance, it is u + g (c - u), where u is predicted for the negative prompt and c for the prompt.
        """
        unet = getattr(self, of)
        adapter = nullcontext()
        if of == "reference" and args.lora_r:
            adapter = unet.disable_adapter()
        g = args.sample_guidance_scale
        with adapter, autocast(args):
            if g == 1:
                return unet(x, t, context).sample.float()
            prompts = torch.cat([self.negative.expand_as(context), context])
            both = unet(torch.cat([x, x]), torch.cat([t, t]), prompts).sample.float()
            u, c = both.chunk(2)
            return u + g * (c - u)

    def draw_noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, N+1, C, H, W) the noise of n images: x_N, then z of each step."""
        config = self.policy.config
        shape = (config.in_channels, config.sample_size, config.sample_size)
        return torch.randn(n, len(self.timesteps) + 1, *shape, generator=generator)


def ddim_step(
    scheduler: "diffusers.DDIMScheduler", prediction: Tensor, t: Tensor, x: Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    """Mean (b, C, H, W) and standard deviation (b, 1, 1, 1) of x_{t-1}, given x_t at times t (b,).

    a and a_prev are the shares of signal in the variances of x_t and x_{t-1} (DDIM, eq. 12 and 16). The network's
    prediction gives an estimate of image and noise in x_t, and these give the mean of x_{t-1}:
        x_t     = sqrt(a) image + sqrt(1 - a) noise
        x_{t-1} = sqrt(a_prev) image + sqrt(1 - a_prev - sigma^2) noise + sigma z
    """
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
    noise = (x - a.sqrt() * image) / (1 - a).sqrt()
    if config.clip_sample:
        image = image.clamp(-config.clip_sample_range, config.clip_sample_range)
    std = eta * ((1 - a_prev) / (1 - a) * (1 - a / a_prev)).sqrt()
    noise_variance = (1 - a_prev - std**2).clamp(min=0)
    mean = a_prev.sqrt() * image + noise_variance.sqrt() * noise
    return mean, std


def gaussian_logprobs(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(b,) log-density of x (b, C, H, W), as a mean over pixels (TRL). It is NaN if std is 0."""
    return Normal(mean, std, validate_args=False).log_prob(x).mean((1, 2, 3))


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """(b,) KL in nats between two normal distributions of the same std, as a sum over pixels. It is 0 if std is 0."""
    kl = (mean - ref_mean) ** 2 / (2 * std**2)
    return kl.masked_fill(std == 0, 0.0).sum((1, 2, 3))


@torch.no_grad()
def sample_images(chain: Chain, examples: list[dict], noise: Tensor, args: Args, of: str = "policy") -> Rollout:
    """Draws an image per example from its noise (b, N+1, C, H, W), with the policy or the reference."""
    scheduler = chain.pipe.scheduler
    with autocast(args):
        context = encode(chain.pipe, [x[args.prompt_column] for x in examples])
    noise = noise.to(args.device)
    x = noise[:, 0]  # (b, C, H, W)
    latents, logprobs, kl, ref_means = [x], [], [], []
    for t, z in zip(chain.timesteps, noise[:, 1:].unbind(1)):
        t = t.expand(len(x))  # (b,)
        prediction = chain.predict(x, t, context, args, of)  # (b, C, H, W)
        mean, std = ddim_step(scheduler, prediction, t, x, args.sample_eta)
        ref_prediction = chain.predict(x, t, context, args, "reference")
        ref_mean, _ = ddim_step(scheduler, ref_prediction, t, x, args.sample_eta)
        x = mean + std * z
        latents.append(x)
        logprobs.append(gaussian_logprobs(x, mean, std))
        kl.append(gaussian_kl(mean, ref_mean, std))
        ref_means.append(ref_mean)
    require(x.isfinite().all(), "the policy's images are not finite: the learning rate may be too high")
    with autocast(args):
        images = decode(chain.pipe, x)
    return Rollout(
        examples,
        context,
        latents=torch.stack(latents, 1),
        old_logprobs=torch.stack(logprobs, 1),
        kl=torch.stack(kl, 1),
        ref_means=torch.stack(ref_means, 1) if args.kl_coef else None,
        images=images,
    )


def sample_batch(chain: Chain, examples: list[dict], args: Args) -> list[Rollout]:
    """Step 1 for an epoch: this process's share of the images, in parts of `sample_batch_size`.

    Each process draws the noise of all images and denoises its share, so that the images do not depend on the number
    of processes.
    """
    parts = []
    size = args.sample_batch_size * WORLD_SIZE
    for first in range(0, len(examples), size):
        noise = chain.draw_noise(size)
        share = examples[first : first + size][RANK::WORLD_SIZE]
        parts.append(sample_images(chain, share, noise[RANK::WORLD_SIZE], args))
    return parts


def join(parts: list[Rollout], examples: list[dict]) -> Rollout:
    """One rollout from the parts of all processes, in the order of the examples."""
    joined = copy(parts[0])
    joined.examples = examples
    for name, x in vars(parts[0]).items():
        if isinstance(x, Tensor):
            share = torch.cat([getattr(part, name) for part in parts])
            setattr(joined, name, all_gather(share))
    joined.rewards_by_name = {}
    for name in parts[0].rewards_by_name:
        share = torch.cat([part.rewards_by_name[name] for part in parts])
        joined.rewards_by_name[name] = all_gather(share)
    return joined


# --- 2. Score ---------------------------------------------------------------------------------------------------------


def score_images(part: Rollout, reward_fns: dict[str, Callable[[Rollout], Tensor]], args: Args) -> None:
    """Step 2 for a part: sets rewards_by_name and scores (b,)."""
    part.rewards_by_name = {name: function(part) for name, function in reward_fns.items()}
    table = torch.stack(list(part.rewards_by_name.values()))  # (K, b)
    if args.reward_weights:
        table = table[table.new_tensor(args.reward_weights) != 0]
    has_reward = ~table.isnan().all(0)
    require(has_reward.all(), "an image has no reward: all functions of --reward-fn returned None or NaN")
    part.scores = weighted_sum(part.rewards_by_name, args.reward_weights)
    require(part.scores.isfinite().all(), "a function of --reward-fn returned an infinite reward")
    part.images = None  # frees memory: the update needs only the latents


def weighted_sum(rewards: dict[str, Tensor], weights: tuple[float, ...]) -> Tensor:
    """Returns the weighted sum (B,) of several rewards (B,). By default all weights are 1. NaN counts as 0."""
    table = torch.stack(list(rewards.values()))  # (K, B)
    if weights:
        table = table * table.new_tensor(weights)[:, None]
    return table.nansum(0)


# --- 3. Advantage -----------------------------------------------------------------------------------------------------


def normalize(scores: Tensor, others: Tensor, eps: float) -> Tensor:
    """(b,) scores minus the mean of others, divided by their standard deviation; 0 if all are equal."""
    first = scores[0]  # subtracted from all, so that equal scores give exactly 0: their mean may be rounded
    return (scores - first - (others - first).mean()) / (others.std(correction=0) + eps)


def prompt_advantages(scores: Tensor, prompts: list[str], history: dict[str, list[float]], args: Args) -> Tensor:
    """(B,) scores, normalised by the recent scores of the same prompt, including these.

    A prompt with fewer than `per_prompt_stat_tracking_min_count` recent scores is normalised by the batch (TRL).
    """
    advantages = torch.empty_like(scores)
    for prompt in dict.fromkeys(prompts):
        rows = [i for i, other in enumerate(prompts) if other == prompt]
        kept = history.get(prompt, []) + scores[rows].tolist()
        history[prompt] = kept[-args.per_prompt_stat_tracking_buffer_size :]
        others = scores
        if len(history[prompt]) >= args.per_prompt_stat_tracking_min_count:
            others = torch.tensor(history[prompt]).to(scores)
        advantages[rows] = normalize(scores[rows], others, 1e-6)
    return advantages


# --- 4. Loss ----------------------------------------------------------------------------------------------------------


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """Clipped losses (b,) (PPO, eq. 7), and the ratio.

    The gradient is 0 where the ratio has left the clip range in the direction that the advantage favours. In the other
    direction it is not clipped, and moves the ratio back.
    """
    ratio = (logprobs - old_logprobs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio


# --- 5. Update --------------------------------------------------------------------------------------------------------


def update(chain: Chain, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> dict[str, float]:
    """Steps 4 and 5: `train_num_inner_epochs` passes over the images. Returns means of the metrics.

    The loss of a mini-batch is the mean over its pairs of image and step, however it is split into parts. Each process
    takes the mean over its share of the pairs, and clip_gradient averages the gradients.
    """
    B = len(rollout.scores)
    N = int(rollout.old_logprobs[0].isfinite().sum())  # leaves out a last step with sigma = 0
    require(N, "the only denoising step has sigma = 0: increase --sample-num-steps")
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
            sums = defaultdict(float)
            for rows in mini_batch[RANK::WORLD_SIZE].split(args.train_batch_size):  # (b,) numbers of images
                for k in steps[rows].T:  # (b,) number of a step, different for each image
                    t = chain.timesteps[k]  # (b,)
                    x, x_prev = rollout.latents[rows, k], rollout.latents[rows, k + 1]  # (b, C, H, W) each
                    prediction = chain.predict(x, t, rollout.context[rows], args)  # (b, C, H, W)
                    mean, std = ddim_step(chain.pipe.scheduler, prediction, t, x, args.sample_eta)
                    logprobs = gaussian_logprobs(x_prev, mean, std)  # (b,)
                    old_logprobs = rollout.old_logprobs[rows, k]
                    loss, ratio = policy_loss(logprobs, old_logprobs, rollout.advantages[rows], args.train_clip_range)
                    if args.kl_coef:
                        kl = gaussian_kl(mean, rollout.ref_means[rows, k], std)
                        loss = loss + args.kl_coef * kl / x[0].numel()  # per pixel, like the log-probabilities
                    (loss.sum() / num_pairs).backward()  # adds to the gradient
                    distance = (ratio - 1).abs()
                    seen = {
                        "loss": loss,
                        "approx_kl": 0.5 * (logprobs - old_logprobs) ** 2,
                        "clipfrac": (distance > args.train_clip_range).float(),
                        "ratio_error": distance,
                    }
                    for name, values in seen.items():
                        sums[name] += values.detach().sum()
            means = all_reduce(torch.stack(list(sums.values()))) / (WORLD_SIZE * num_pairs)
            norm = clip_gradient(optimizer.param_groups[0]["params"], args.train_max_grad_norm)
            if norm.isfinite():  # otherwise the weights would become NaN
                optimizer.step()
            logs.append(dict(zip(sums, means.tolist())) | {"grad_norm": norm.item()})
    optimizer.zero_grad()
    stats = {name: sum(log[name] for log in logs) / len(logs) for name in logs[0]}
    del stats["ratio_error"]
    return stats | {"first_ratio_error": logs[0]["ratio_error"]}  # before any step, where the ratio should be 1


# === End of the algorithm. Next: its metrics and options, then the code that every training script needs ============


def rollout_stats(rollout: Rollout) -> dict[str, float]:
    """Metrics of an epoch's images, from before the update."""
    stats = {
        "reward_mean": rollout.scores.mean().item(),
        "reward_std": rollout.scores.std(correction=0).item(),
        "objective/kl": rollout.kl.sum(1).mean().item(),
    }
    return stats | reward_stats(rollout)


def reward_stats(rollout: Rollout) -> dict[str, float]:
    """Computes mean and standard deviation (with Bessel's correction, as in TRL) of each reward function's rewards;
    ignores None."""
    stats = {}
    for name, rewards in rollout.rewards_by_name.items():
        known = rewards[~rewards.isnan()]
        stats[f"rewards/{name}/mean"] = known.mean().item()
        stats[f"rewards/{name}/std"] = known.std().item()
    return stats


def warn_about(rollout: Rollout) -> None:
    """Warns, once, if all advantages are 0."""
    if not rollout.advantages.any():
        warnings.warn(
            "all rewards of an epoch, or of each of its prompts, are equal, so there is nothing to learn from: check "
            "the reward"
        )


def draw_images(run: "Run", chain: Chain, prompts: list[dict], args: Args) -> None:
    """images/epoch-N.png: eight images of the initial model above eight of the policy, from the same noise."""
    if RANK:
        return
    examples = [prompts[i % len(prompts)] for i in range(8)]
    noise = chain.draw_noise(8, torch.Generator().manual_seed(args.seed))  # the same in each epoch
    rows = [sample_images(chain, examples, noise, args, of).images for of in ("reference", "policy")]
    images = F.pad(torch.cat(rows), (1, 1, 1, 1), value=0.5)  # (16, 3, height, width) with a frame
    images = F.interpolate(images, scale_factor=max(1, 64 // images.shape[-1]))  # enlarges small images
    pictures = chain.pipe.numpy_to_pil(images.permute(0, 2, 3, 1).cpu().numpy())
    folder = run.output / "images"
    folder.mkdir(exist_ok=True)
    diffusers.utils.make_image_grid(pictures, 2, 8).save(folder / f"epoch-{run.step:04d}.png")


# --- Models and rewards -----------------------------------------------------------------------------------------------


def load_chain(args: Args) -> Chain:
    """Policy and reference from a Stable Diffusion pipeline, with DDIM's schedule. Only the UNet is trained.

    It stays in evaluation mode: with dropout, sampling and update would use different distributions.
    """
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(
        locate(args.model),
        dtype=torch.float32,
        use_safetensors=True,
        safety_checker=None,
        requires_safety_checker=False,
    )
    pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    pipe.scheduler.set_timesteps(args.sample_num_steps)
    config = pipe.scheduler.config
    is_known = config.prediction_type in ("epsilon", "sample", "v_prediction") and not config.thresholding
    require(is_known, f"{args.model}: its scheduler has a prediction_type or thresholding that is not supported")
    policy = pipe.unet.eval()
    if args.gradient_checkpointing:
        policy.enable_gradient_checkpointing()
    if args.lora_r:
        policy = add_adapter(policy, args)
    reference = make_reference(args, policy).to(args.device)
    policy.pipe = pipe.to(args.device)  # for save_model
    with autocast(args):
        negative = encode(pipe, [args.negative_prompts or ""])
    return Chain(pipe, policy, reference, pipe.scheduler.timesteps.to(args.device), negative)


def add_adapter(unet: nn.Module, args: Args) -> nn.Module:
    """Freezes the UNet and adds trainable LoRA adapters to its attention (Hu et al. 2021)."""
    from peft import LoraConfig, get_peft_model

    layers = ["to_k", "to_q", "to_v", "to_out.0"]
    shape = {"r": args.lora_r, "lora_alpha": args.lora_alpha, "target_modules": layers}
    return get_peft_model(unet, LoraConfig(**shape, init_lora_weights="gaussian"))


def make_optimizer(args: Args, policy: nn.Module) -> torch.optim.Optimizer:
    """AdamW for the UNet's trainable weights."""
    return torch.optim.AdamW(
        [p for p in policy.parameters() if p.requires_grad],
        lr=args.train_learning_rate,
        betas=(args.train_adam_beta1, args.train_adam_beta2),
        eps=args.train_adam_epsilon,
        weight_decay=args.train_adam_weight_decay,
        fused=True,
    )


def make_reference(args: Args, policy: nn.Module) -> nn.Module:
    """A frozen copy of the policy; with LoRA the policy itself, which is the reference while its adapter is off."""
    return policy if args.lora_r else deepcopy(policy).requires_grad_(False)


@torch.no_grad()
def encode(pipe: "diffusers.StableDiffusionPipeline", texts: list[str]) -> Tensor:
    """(b, L, D) the text encoder's output for prompts, padded or truncated to its maximum length."""
    context, _ = pipe.encode_prompt(texts, pipe.device, 1, do_classifier_free_guidance=False)
    return context.float()


def decode(pipe: "diffusers.StableDiffusionPipeline", x: Tensor) -> Tensor:
    """(b, 3, height, width) images in [0, 1] from latents (b, C, H, W), eight at a time to save memory."""
    parts = (x / pipe.vae.config.scaling_factor).split(8)
    images = torch.cat([pipe.vae.decode(part).sample for part in parts])  # in about [-1, 1]
    return (images.float() / 2 + 0.5).clamp(0, 1)


def make_reward_fns(args: Args) -> dict[str, Callable[[Rollout], Tensor]]:
    """The reward functions of --reward-fn, by name. Each maps a part of an epoch to rewards (b,), NaN for None."""
    reward_fns = {}
    for spec in args.reward_fn:
        name = spec.rpartition(":")[2]
        require(name not in reward_fns, f"--reward-fn: two functions have the name {name!r}; rename one")
        reward_fns[name] = function_reward(spec, args)
    return reward_fns


def function_reward(spec: str, args: Args) -> Callable[[Rollout], Tensor]:
    """A user's function, with TRL's signature: f(images, prompts, metadata) -> a number or None per image.

    The metadata of an image is its row of the dataset. As in TRL, the function may also return a pair, the numbers and
    more metadata, which is ignored. It gets copies of its arguments, so it may change them.
    """
    function = load_function(spec)

    def reward(part: Rollout) -> Tensor:
        """(b,) rewards of the images (b, 3, height, width) of this process; NaN for None."""
        rows = deepcopy(part.examples)
        with torch.random.fork_rng(devices=[]):  # the function's random numbers do not change the run's
            rewards = function(part.images.clone(), [row[args.prompt_column] for row in rows], rows)
        if isinstance(rewards, tuple):
            rewards = rewards[0]
        is_list = hasattr(rewards, "__len__") and len(rewards) == len(rows)
        require(is_list, f"{spec} should return a list of {len(rows)} rewards, not {rewards!r:.80}")
        return torch.tensor([math.nan if x is None else float(x) for x in rewards], device=args.device)

    return reward


# --- Data and settings ------------------------------------------------------------------------------------------------

ALIASES = {  # TRL's spellings
    "--sample-num-inference-steps": "--sample-num-steps",
    "--save-freq": "--save-steps",
    "--num-checkpoint-limit": "--save-total-limit",
    "--resume-from": "--resume",
}
CURVES = {  # title of a panel: pattern of the metrics in it
    "reward": "reward_mean|/mean$",
    "KL, nats": "objective/kl$",
    "update": "approx_kl|clipfrac",
}


def load_prompts(args: Args) -> list[dict]:
    """The rows of the dataset, each with its prompt."""
    data = load_split(args.dataset, args.dataset_config, args.dataset_train_split)
    column = args.prompt_column
    require(column in data.column_names, f"no column {column!r}, but {data.column_names}: set --prompt-column")
    rows = with_numbers(data, column).to_list()
    require(all(isinstance(row[column], str) for row in rows), f"the column {column!r} has values that are not texts")
    return rows


def print_prompts(prompts: list[dict], tokenizer: transformers.CLIPTokenizer, args: Args) -> None:
    """Prints the number and the lengths of the prompts, and the first prompt as the text encoder reads it."""
    limit = tokenizer.model_max_length
    ids = tokenizer([row[args.prompt_column] for row in prompts])["input_ids"]
    lengths = [len(x) for x in ids]
    sizes = f"{min(lengths)} to {max(lengths)} tokens, median {int(np.median(lengths))}"
    num_cut = sum(length > limit for length in lengths)
    print(f"prompts: {len(ids)}, of {sizes}; {num_cut} truncated to {limit}")
    print(f"the first, as the text encoder reads it: {tokenizer.decode(ids[0][:limit])}")


def check_args(args: Args) -> None:
    """Exits if settings contradict each other, or if a setting has no effect."""
    fits = len(args.reward_weights) in (0, len(args.reward_fn))
    require(
        fits, f"--reward-weights has {len(args.reward_weights)} numbers, --reward-fn {len(args.reward_fn)} functions"
    )
    is_guided = args.sample_guidance_scale != 1
    refuse_unused(args, "negative_prompts", is_guided, "with --sample-guidance-scale 1")
    kept = args.per_prompt_stat_tracking_buffer_size
    of_tracking = "per_prompt_stat_tracking_buffer_size per_prompt_stat_tracking_min_count"
    refuse_unused(args, of_tracking, args.per_prompt_stat_tracking, "without --per-prompt-stat-tracking")
    fits = args.per_prompt_stat_tracking_min_count <= kept or not args.per_prompt_stat_tracking
    require(fits, f"--per-prompt-stat-tracking-min-count exceeds --per-prompt-stat-tracking-buffer-size, {kept}")
    refuse_unused(args, "lora_alpha", args.lora_r, "without --lora-r")
    refuse_unused(args, "dataset_config", not Path(args.dataset).is_file(), "if --dataset is a file")
    refuse_unused(args, "wandb_project_name wandb_entity", args.track, "without --track")
    refuse_unused(args, "exp_name", not args.output_dir, "with --output-dir, which names the folder")
    sampled = args.sample_batch_size * args.sample_num_batches_per_epoch
    trained = args.train_batch_size * args.train_gradient_accumulation_steps
    require(
        sampled % trained == 0,
        f"--sample-batch-size * --sample-num-batches-per-epoch = {sampled} images of an epoch must be a multiple of "
        f"--train-batch-size * --train-gradient-accumulation-steps = {trained} images of an optimiser step",
    )


def choose_sizes(args: Args, chain: Chain) -> tuple[int, int]:
    """The number of images of an epoch, over all processes, and of its optimiser steps. Prints the sizes."""
    images = args.sample_batch_size * args.sample_num_batches_per_epoch * WORLD_SIZE
    mini_batch = args.train_batch_size * args.train_gradient_accumulation_steps * WORLD_SIZE
    size = sum(p.numel() for p in chain.policy.parameters() if p.requires_grad)
    print(f"policy: {args.model}, {size / 1e6:.2f}M trained parameters on {args.device}")
    print(f"batch: {images} images per epoch, of {len(chain.timesteps)} steps each; {mini_batch} per optimiser step")
    return images, args.train_num_inner_epochs * images // mini_batch


def check_first_ratio(error: float, epoch: int, args: Args) -> None:
    """Checks the mean of |ratio - 1| before any step of an epoch. If it is more than rounding, update and sampling use
    different distributions. Exits in the first epoch of a run; later, only warns.

    Rounding in float32 changes the ratio by 1e-7, with --sample-eta 0.01 by 5e-6 (measured on a CPU); bfloat16 has only
    8 bits. 1e-4 is TRL's clip range."""
    bound = 1e-4
    if args.bf16:
        bound = 2e-2
    if error <= bound:
        return
    require(
        epoch > 1,
        f"the ratio pi/pi_old differs from 1 by {error:.2g} before any step (allowed: {bound:g}): sampling and update "
        "use different distributions. Usual causes: dropout is on, or weights are not finite",
    )
    warnings.warn("sampling and update use different distributions: see first_ratio_error among the metrics")


# --- From here on, a function is identical in all scripts that have it: models, data, processes, the run --------------


def require(condition: object, message: str) -> None:
    """Exits with the message unless the condition holds. It is for errors that no library reports clearly."""
    if not condition:
        sys.exit(f"error: {message}")


def refuse_unused(args: Args, names: str, is_used: object, where: str) -> None:
    """Exits if one of these settings was changed but has no effect. A setting that is off (0, none, False) passes."""
    for name in names.split():
        value = getattr(args, name)
        is_default_or_off = value in (getattr(Args, name), "none") or not value
        require(is_used or is_default_or_off, f"--{name.replace('_', '-')} has no effect {where}")


@cache
def ask_hub() -> None:
    """Tries once to reach the hub. If that fails, the libraries use their caches instead of retrying for minutes."""
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # its type depends on the HTTP library
        print(f"{constants.ENDPOINT} does not answer: using models and data downloaded earlier")
        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True


def locate(name: str) -> str:
    """Finds a file or folder in the working directory or beside this script. Returns any other name unchanged: it may
    be on the hub."""
    for folder in (Path(), Path(__file__).resolve().parent):
        if (folder / name).exists():
            return str(folder / name)
    is_file = Path(name).suffix in (".jsonl", ".json", ".csv", ".parquet", ".py")
    is_path = is_file or name.startswith(".") or name.count("/") > 1  # names on the hub are NAME or OWNER/NAME
    require(not is_path, f"there is no {name}")
    ask_hub()
    return name


def load_function(spec: str) -> Callable:
    """Imports the function that `file.py:name` names."""
    file, _, name = spec.rpartition(":")
    require(file, f"{spec!r} should be file.py:name")
    module = import_file(str(Path(locate(file)).resolve()))
    require(hasattr(module, name), f"{file} has no {name!r}")
    return getattr(module, name)


@cache
def import_file(path: str) -> ModuleType:
    """Imports a Python file under its own name, so that worker processes can unpickle what it defines."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    sys.path.insert(0, str(Path(path).parent))  # so that the file can import its neighbours
    spec.loader.exec_module(module)
    return module


def load_split(name: str, config: str | None, split: str) -> datasets.Dataset:
    """Loads one split of a dataset: a folder, a jsonl/json/csv/parquet file (its split is train), or a hub name.

    Values stay as they are in the file, if all values of a column have one type. By default, the library reads the JSON
    text "2024-01-05" as a date, and 72 as 72.0 if another row has 3.5. All values of a csv file are texts.
    """
    for module in (datasets.features.features, datasets.packaged_modules.json, datasets.utils.json):
        module.ujson_dumps = json.dumps  # the library's own keeps ten decimals
        module.ujson_loads = partial(json.loads, parse_constant=lambda _: None)  # NaN is None
    formats = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    path = Path(locate(name))
    options = {"path": str(path), "name": config, "split": split}
    if path.is_file():
        kinds = [formats[suffix] for suffix in path.suffixes if suffix in formats]
        require(kinds, f"{name} is not a {', '.join(formats)} file")
        require(path.stat().st_size, f"{name} is empty")
        options = {"path": kinds[-1], "data_files": glob.escape(str(path.resolve())), "split": split}
    else:
        has_no_pattern = not path.exists() or glob.escape(str(path.resolve())) == str(path.resolve())
        require(has_no_pattern, f"rename {name}: the library reads [, ] and * in the path of a folder as a pattern")
    files = [file for file in [path, *path.rglob("*")] if file.is_file() and formats.keys() & set(file.suffixes)]
    csv_files = [file for file in files if ".csv" in file.suffixes]
    for file in csv_files:
        has_names = isinstance(pandas.read_csv(file, nrows=1).index, pandas.RangeIndex)
        require(has_names, f"{file} has more cells in a row than names: put texts that have a comma in quotes")
    if csv_files and csv_files == files:
        options |= csv_options(pandas.read_csv(csv_files[0], nrows=0).columns)
    try:
        data = datasets.load_dataset(**options)
        if data.info.builder_name == "csv" and "features" not in options:
            data = datasets.load_dataset(**options, **csv_options(data.column_names))
    except datasets.exceptions.DatasetGenerationError as error:
        sys.exit(f"error: {name} cannot be read: {error.__cause__ or error}")
    if data.info.builder_name == "json" and "Json(" in str(data.features):
        warnings.warn(
            f"{name} has values of several types in one place. The library reads a text there that is valid JSON, such "
            'as "72" or "true", as a number or a truth value: give all values one type'
        )
    is_exact = lambda kind: not re.search("time|date|float", str(kind))  # noqa: E731
    if data.info.builder_name != "json" or all(map(is_exact, data.features.values())):
        return data
    features = {column: kind if is_exact(kind) else datasets.Json() for column, kind in data.features.items()}
    return datasets.load_dataset(**options, features=datasets.Features(features))


def csv_options(columns: Sequence[str]) -> dict:
    """Returns the library's options for reading these csv columns as texts. Empty cells are None; the words NA and None
    are texts."""
    features = datasets.Features(dict.fromkeys(columns, datasets.Value("string")))
    return {"features": features, "keep_default_na": False, "na_values": [""]}


def with_numbers(data: datasets.Dataset, text_column: str) -> datasets.Dataset:
    """Converts columns of a csv file, except the text column, to numbers if Python prints them exactly as they are
    written: 007 and 1.50 stay texts."""
    if data.info.builder_name != "csv":
        return data
    for kind, number in (("int64", int), ("float64", float)):
        for column, feature in data.features.items():
            texts = data[column] if feature.dtype == "string" and column != text_column else []
            with suppress(ValueError, TypeError):  # a text that is not a number, or an empty cell
                if texts and all(str(number(x)) == x and abs(number(x)) < 2**63 for x in texts):
                    data = data.cast_column(column, datasets.Value(kind))
    return data


def batch(rows: list, number: int, size: int, seed: int) -> list:
    """Returns batch `number` (0, 1, ...) of an endless sequence of passes over the rows, each in a new order."""
    positions = range(number * size, (number + 1) * size)
    n = len(rows)
    order = [shuffled(n, seed, i // n)[i % n] for i in positions]
    return [rows[i] for i in order]


@lru_cache(maxsize=2)
def shuffled(n: int, seed: int, number: int) -> list[int]:
    """The numbers from 0 to n-1 in a random order, which depends on the seed and the number, for example of a pass."""
    # The 1 makes this seed differ from that of a step
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


def make_seed(*numbers: int) -> int:
    """Combines numbers into one seed. Random numbers depend on --seed and the number of a step or pass (dropout also on
    the process), not on earlier steps."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def autocast(args: Args) -> torch.autocast:
    """Autocast to bfloat16 with --bf16. Trained weights, losses and everything after the logits stay in float32.

    Within the context, autocast keeps a bfloat16 copy of all trained weights, but not with --gradient-checkpointing,
    which saves memory.
    """
    keeps_copies = not args.gradient_checkpointing
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, args.bf16, keeps_copies)


# --- Processes


def start(args: Args) -> None:
    """Joins the processes of torchrun, if it started this one, and configures the libraries."""
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # when one process saves a checkpoint
    is_new = not args.resume and not RANK  # process 0 creates the folder, perhaps before another gets here
    is_taken = is_new and args.output_dir and Path(args.output_dir).exists()
    require(not is_taken, f"{args.output_dir} exists: choose another --output-dir, or continue with --resume")
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", device.index or 0)))
    torch.backends.cudnn.allow_tf32 = False  # on by default in convolutions; it would move ratios out of the clip range
    if "RANK" in os.environ and not dist.is_initialized():
        backends = {kind: dist.get_default_backend_for_device(kind) for kind in ("cpu", device.type)}
        timeout = timedelta(hours=2)  # one process may load a large model, or wait for a slow reward function
        dist.init_process_group(",".join(f"{kind}:{name}" for kind, name in backends.items()), timeout=timeout)
    set_seed(args.seed)


def all_reduce(x: Tensor) -> Tensor:
    """Sums x over all processes, in place."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
    return x


def all_gather(x: Tensor) -> Tensor:
    """Returns all rows (B, ...). Each process passes its own, RANK, RANK + WORLD_SIZE, ..., as x (B/WORLD_SIZE,
    ...)."""
    shares = [x.clone() for _ in range(WORLD_SIZE)]
    if WORLD_SIZE > 1:
        dist.all_gather(shares, x.contiguous())
    return torch.stack(shares, 1).flatten(0, 1)


def clip_gradient(parameters: list[Tensor], max_norm: float) -> Tensor:
    """Clips the gradient to max_norm. Returns its norm before clipping.

    Gradients are first averaged over processes, unless FSDP2 has already averaged them.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if WORLD_SIZE > 1 and not isinstance(gradients[0], DTensor):
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= WORLD_SIZE
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# --- The run


class Run:
    """The output of a run: progress bar, metrics.jsonl, W&B, checkpoints, and at the end pipeline and curves.

    A step is one epoch. To log a number, put it into the stats, under any name; names that end in grad_norm are checked
    for NaN and infinity. A checkpoint is a folder: each process writes its shards of weights and moments, as
    safetensors; then process 0 adds state.json and renames the folder. On a CPU, a resumed run equals an uninterrupted
    run bit for bit.
    """

    def __init__(
        self,
        args: Args,
        num_steps: int,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        memory: dict,
        asked: Args,
        **models: nn.Module | None,
    ):
        """`memory` holds what one step passes to the next, besides weights and moments, as JSON values. `asked` are the
        settings before sizes were chosen. At the end, `model` is saved, and `ema` beside it."""
        self.args = args
        self.asked = asked
        self.num_steps = num_steps
        self.optimizer = optimizer
        self.schedule = schedule
        self.memory = memory
        self.models = nn.ModuleDict({name: model for name, model in models.items() if model is not None})
        self.step = 0
        self.seconds = {}  # of each phase of this step
        self.num_broken = 0  # updates in a row with a non-finite gradient
        self.stop_requested = False
        self.is_logged = False  # whether any step was logged
        self.saved_step = 0  # the step of the newest checkpoint
        now = datetime.now().strftime("%Y%m%d-%H%M%S-%f")  # many runs may start in one second
        self.output = Path(args.resume or args.output_dir or f"runs/{args.exp_name}__{args.seed}__{now}")
        if not RANK:
            self.open_folder()
        if WORLD_SIZE > 1:
            received = [self.output]
            dist.broadcast_object_list(received)  # takes the folder of process 0, since clocks may differ
            self.output = received[0]
            require(self.output.exists(), f"process {RANK} finds no {self.output}: all nodes must share this folder")
        if args.resume:
            self.restore()
        if not RANK:
            settings = code_version() | {"chosen_here": chosen_here(self.asked)} | asdict(args)
            (self.output / "args.new").write_text(json.dumps(settings, indent=2) + "\n")
            (self.output / "args.new").replace(self.output / "args.json")  # a crash leaves the old file or the new one
        self.wandb = None
        if args.track and not RANK:
            self.start_wandb()
        print(f"output: {self.output}")
        self.bar = tqdm(total=num_steps, initial=self.step, dynamic_ncols=True, disable=RANK > 0)

    def open_folder(self) -> None:
        """Creates the run's folder, or opens it again with --resume. Two runs cannot have the same folder."""
        if not self.args.resume:
            self.output.mkdir(parents=True)
        self.lock = FileLock(self.output / ".lock", timeout=0).acquire()  # released when the process ends
        self.file = open(self.output / "metrics.jsonl", "a")
        shutil.rmtree(self.output / "checkpoints/unfinished", ignore_errors=True)

    def start_wandb(self) -> None:
        """Starts the W&B run, or continues it in a resumed run."""
        import wandb

        self.wandb = wandb.init(
            project=self.args.wandb_project_name,
            entity=self.args.wandb_entity,
            name=self.output.name,
            config=asdict(self.args),
            dir=self.output,
            id=self.memory.get("wandb_id"),
            resume="allow",
        )
        self.memory["wandb_id"] = self.wandb.id

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the remaining steps, and saves a checkpoint after a step if one is due. Ctrl-C and
        SIGTERM end the loop after the current step, unless they are ignored, as Ctrl-C is in background jobs of a shell
        script."""
        handlers = {
            number: signal.signal(number, self.request_stop)
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) != signal.SIG_IGN
        }
        hook = self.optimizer.register_step_post_hook(lambda *_: setattr(self, "state", "changing"))
        try:
            while self.step < self.num_steps:
                self.step += 1
                self.state = "unchanged"  # the weights; "changing" in the update, then "updated"
                self.memory_before = deepcopy(self.memory)
                yield self.step
                must_stop = self.must_stop()
                if must_stop or self.is_due(self.args.save_steps):
                    self.save()
                if must_stop:
                    break
        except BaseException:  # an error in the body of the loop arrives here as GeneratorExit
            self.rescue()
            raise
        finally:
            hook.remove()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def rescue(self) -> None:
        """Saves a checkpoint when an error ends the loop, and prints how to resume. After a complete update, it saves
        this step; before the update, the previous one. It saves nothing if the error came during the update, or before
        the first step was logged."""
        if self.saved_step == self.step or (self.step == 1 and not self.is_logged):
            return
        prints_message = not RANK
        try:
            if self.state == "unchanged":
                self.step -= 1
                self.memory = self.memory_before
            if self.state != "changing" and self.saved_step != self.step:
                self.wait_for_all()
                self.save()
        except BaseException as error:  # torch has an error that is not an Exception
            print(f"no checkpoint was written: {error!r:.500}", file=sys.stderr)
            prints_message = True  # process 0 may never get here
        if self.saved_step and prints_message:
            print(f"\nto continue from step {self.saved_step}: --resume {self.output}", file=sys.stderr)

    def wait_for_all(self) -> None:
        """Waits up to 20 seconds for all processes: after an error in one of them, the others may never get here."""
        if WORLD_SIZE > 1:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"ended {RANK}", "")
            store.wait([f"ended {rank}" for rank in range(WORLD_SIZE)], timedelta(seconds=20))

    def request_stop(self, number: int, frame) -> None:
        """Handles Ctrl-C and SIGTERM. (torchrun gives the step 30 seconds to end: see its --shutdown-timeout.)"""
        self.stop_requested = True
        print("\nstopping after this step (Ctrl-\\ stops at once)", file=sys.stderr)

    def must_stop(self) -> bool:
        """Whether any process was asked to stop. Then all processes stop after this step."""
        return bool(all_reduce(torch.tensor(int(self.stop_requested))))

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Times one phase of the step."""
        start = time.perf_counter()
        yield
        if self.args.device != "cpu":
            torch.accelerator.synchronize()
        self.seconds[phase] = time.perf_counter() - start
        if self.state == "changing":
            self.state = "updated"

    def log(self, stats: dict[str, float], *shown: str) -> None:
        """Logs to metrics.jsonl and W&B, and shows the metrics named in `shown` beside the bar. Exits after five
        updates in a row with non-finite gradients."""
        norms = [x for name, x in stats.items() if name.endswith("grad_norm")]
        self.num_broken = 0 if all(map(math.isfinite, norms)) else self.num_broken + 1
        stats |= {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        stats["perf/peak_memory_mb"] = peak_memory_mb()
        self.bar.set_postfix({name.split("/")[-1]: stats[name] for name in shown}, refresh=False)
        self.bar.update()
        if not RANK:
            line = {name: x if math.isfinite(x) else None for name, x in stats.items()}  # JSON has no NaN
            print(json.dumps(line), file=self.file, flush=True)
        self.is_logged = True
        self.state = "updated"
        if self.wandb:
            self.wandb.log(stats, step=self.step)
        require(
            self.num_broken < 5,
            "the gradient was NaN or infinite in five updates in a row, and their optimiser steps were skipped: "
            "the learning rate may be too high",
        )

    def is_due(self, every: int) -> bool:
        """Whether this step is a multiple of `every`, or the last one."""
        return self.step % every == 0 or self.step == self.num_steps

    def tensors(self, create_moments: bool = False) -> dict[str, Tensor]:
        """Returns all trainable weights and the optimiser's moments by name; if sharded, this process's shards. The
        optimiser has no moments before its first step; `create_moments` creates them, so that a checkpoint can be
        loaded into them."""
        weights = {name: p for name, p in self.models.named_parameters() if p.requires_grad}
        if not self.optimizer.state and not create_moments:
            return weights
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        moments = get_optimizer_state_dict(self.models, self.optimizer, options=options)
        return weights | {name: x for name, x in moments.items() if isinstance(x, Tensor)}

    def save(self) -> None:
        """Writes a checkpoint, under another name until it is complete, and removes old ones."""
        folder = self.output / "checkpoints"
        unfinished = folder / "unfinished"
        tensors = self.tensors()
        files, size = {}, 0
        for name, x in tensors.items():
            size += x.nbytes
            files[name] = 1 + size // 2**28  # a new file for each 256 MB, since the writer keeps a file in memory
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(unfinished, files, save_distributed=True))
        if RANK:
            self.saved_step = self.step
            return
        num_files = len(list(unfinished.iterdir()))
        state = {"step": self.step, "files": num_files, "bytes_of_metrics": self.file.tell(), "memory": self.memory}
        (unfinished / "state.json").write_text(json.dumps(state))
        unfinished.rename(folder / f"step-{self.step:08d}")
        self.saved_step = self.step
        for old in sorted(folder.glob("step-*"))[: -self.args.save_total_limit]:
            shutil.rmtree(old)

    def restore(self) -> None:
        """Restores the newest checkpoint, or starts from scratch if there is none."""
        state = {"step": 0, "bytes_of_metrics": 0, "memory": {}}
        for folder in sorted((self.output / "checkpoints").glob("step-*"))[-1:]:
            print(f"reading {folder} (if it is damaged, remove it)")
            state = self.load(folder)
        self.memory.update(state["memory"])
        self.step = state["step"]
        for _ in range(self.step):
            self.schedule.step()
        self.saved_step = self.step
        if not RANK:
            lines = (self.output / "metrics.jsonl").read_bytes()
            if len(lines) < state["bytes_of_metrics"]:
                warnings.warn("metrics.jsonl lacks lines: was the folder copied during the run?")
            self.file.truncate(lines.rfind(b"\n", 0, state["bytes_of_metrics"]) + 1)
            self.file.seek(0, os.SEEK_END)  # truncate does not move the position
        print(f"continues after step {self.step}")

    def load(self, folder: Path) -> dict:
        """Reads a checkpoint into weights and moments, in place; returns its state.json.

        Raises if the checkpoint is incomplete. All weights must be there, but unused weights have no moments.
        """
        state = json.loads((folder / "state.json").read_text())
        files = len(list(folder.glob("*.safetensors")))
        if files != state["files"]:
            raise OSError(f"{folder} has {files} of its {state['files']} files of weights")
        reader = HuggingFaceStorageReader(folder)
        stored = reader.read_metadata().state_dict_metadata
        tensors = self.tensors(create_moments=True)
        unknown = sorted(set(stored) - set(tensors))
        require(
            not unknown,
            f"{folder} has weights that this run does not train, such as {unknown[:2]}: resume with the same settings",
        )
        tensors = {name: x for name, x in tensors.items() if name in stored or not name.startswith("state.")}
        dcp.load(tensors, storage_reader=reader)
        for name, p in self.models.named_parameters():
            if f"state.{name}.step" not in stored:
                self.optimizer.state.pop(p, None)
        return state

    def finish(self) -> None:
        """Saves the model, its moving average in ema/, the model card and the curves."""
        self.bar.close()
        save_model(self.models["model"], self.output, self.args)
        if "ema" in self.models:
            save_model(self.models["ema"], self.output / "ema", self.args)
        if RANK:
            return
        self.file.close()
        self.write_card()
        draw_curves(self.output)
        if self.wandb:
            self.wandb.finish()
        print(f"saved in {self.output}: the model, its card, metrics.jsonl and curves.png")
        if self.step < self.num_steps:
            print(f"to continue from step {self.step}: --resume {self.output}")

    def write_card(self) -> None:
        """Writes README.md: base model, data, settings that are not the default, last metrics. Its header, for Hugging
        Face, has the script, and the base model if it is on the hub."""
        made = code_version()
        base = self.args.model
        is_on_hub = base and locate(base) == base and not Path(base).exists()
        defaults = asdict(Args())
        changed = [f"{name}={x!r}" for name, x in asdict(self.asked).items() if x != defaults[name]]
        lines = pandas.read_json(self.output / "metrics.jsonl", lines=True)
        last = lines.filter(regex="|".join(CURVES.values())).ffill().iloc[-1]  # not every line has an evaluation
        metrics = [f"{name} {x:.4g}" for name, x in last.items()]
        card = [
            f"---\ntags: [{Path(__file__).stem}]",
            f"base_model: {base}\n---" if is_on_hub else "---",
            f"Made by {made['script']}, version {made['version']} (revision {made['revision']}).\n",
            f"Base model: {base or 'none'}. Data: {self.args.dataset}.\n",
            f"Settings that are not the default: {', '.join(changed) or 'none'} (args.json has all).\n",
            f"After {self.step} of {self.num_steps} steps: {', '.join(metrics)} (metrics.jsonl has all).\n",
        ]
        (self.output / "README.md").write_text("\n".join(card))


def peak_memory_mb() -> float:
    """Peak memory in MB: of the GPU with CUDA, otherwise of this process; 0 on Windows, which does not report it."""
    if torch.cuda.max_memory_allocated() or sys.platform == "win32":  # 0 without a GPU, or if it is not used
        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def save_model(model: nn.Module, folder: Path, args: Args) -> None:
    """Saves the pipeline with the trained UNet; with LoRA also the adapter, in lora/."""
    if RANK:
        return
    pipe = model.pipe
    if args.lora_r:
        model.save_pretrained(folder / "lora")
        pipe.unet = model.merge_and_unload()
    pipe.save_pretrained(folder)


def code_version() -> dict[str, str]:
    """The name of this script, its version, and the git revision of its folder, if it has one."""
    command = "git describe --always --dirty"  # dirty: with uncommitted changes
    git = subprocess.run(command, shell=True, cwd=Path(__file__).parent, capture_output=True, text=True)
    return {"script": Path(__file__).name, "version": VERSION, "revision": git.stdout.strip()}


def chosen_here(asked: Args) -> list[str]:
    """Names of settings that the user did not set and that depend on the machine. A resumed run, which may be on
    another machine, chooses them again."""
    sizes = ("micro_batch_size", "local_rollout_forward_batch_size")
    names = [name for name, x in asdict(asked).items() if name in sizes and x is None]
    if asked.device == Args().device:
        names.append("device")
    return names


def draw_curves(folder: Path) -> None:
    """Draws curves.png: for each title in CURVES, a panel of the metrics that match its pattern. Evaluations are
    points."""
    figure = Figure((5 * len(CURVES), 3.2), layout="constrained")
    lines = pandas.read_json(folder / "metrics.jsonl", lines=True)
    lines.index += 1
    for axis, (title, pattern) in zip(figure.subplots(1, len(CURVES)), CURVES.items()):
        shown = lines.filter(regex=pattern)
        styles = ["o" if name.startswith("eval") else "-" for name in shown]
        shown.plot(ax=axis, style=styles, title=title, xlabel="step")
        axis.legend(fontsize=7)
    figure.savefig(folder / "curves.png", dpi=120)


def read_command_line() -> Args:
    """Reads the settings from the command line; with --resume, the others come from that run."""
    flags = [word.partition("=") for word in sys.argv[1:]]
    words = [ALIASES.get(flag.replace("_", "-"), flag) + equals + value for flag, equals, value in flags]
    read = partial(tyro.cli, Args, args=words, description=__doc__.splitlines()[0])
    args = read()
    if args.resume is None:
        return args
    settings = json.loads(Path(args.resume, "args.json").read_text())
    script = settings.get("script", Path(__file__).name)
    require(script == Path(__file__).name, f"{args.resume} is a run of {script}: resume it with that script")
    dropped = ["script", "version", "revision", "chosen_here", *settings.get("chosen_here", [])]
    args = read(default=Args(**{name: x for name, x in settings.items() if name not in dropped}))
    require(args.output_dir == settings["output_dir"], "a resumed run stays in its folder: remove --output-dir")
    is_same_size = getattr(args, "batch_size", None) == settings.get("batch_size")
    require(is_same_size, "a resumed run keeps its --batch-size; to save memory, set --micro-batch-size")
    return args


def main() -> None:
    """Trains with the settings of the command line. Under torchrun, only process 0 prints to standard output."""
    if RANK:
        sys.stdout = open(os.devnull, "w")
    train(read_command_line())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
