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

The policy gradient of ppo.py on another chain. An image is a response, a denoising step is a token:

  text     prompt  ->  y_1  ->  y_2  -> ... -> y_T     y_t ~ softmax(logits of y_<t)          score of y_1 ... y_T
  image    noise x_N -> x_{N-1} -> ...  -> x_0         x_{t-1} ~ Normal(mu(x_t, t), sigma_t)  score of x_0

For each epoch:
  1. sample      noise x_N, then x_{t-1} = mu + sigma_t z for each of N steps (DDIM with eta > 0), keeping all of them
                 and log pi(x_{t-1} | x_t), the log-density of the normal distribution, as a mean over pixels
  2. score       images, prompts and metadata -> one number per image
  3. advantage   A = (score - mean) / std, over the batch or over the last scores of the same prompt; A for every step
  4. loss        ratio_t = pi(x_{t-1} | x_t) / pi_old(x_{t-1} | x_t);  mean max(-A ratio, -A clip(ratio, 1-eps, 1+eps))
                 + kl_coef * KL of the step to the first model, per pixel, if asked
  5. update      `train_num_inner_epochs` passes, each sample's steps in an order of its own; AdamW

The state is the noisy image, the action the next, less noisy one; the network's weights move mu, and sigma is fixed by
the schedule. There is no critic and no discount, and only the last image is judged. The last step of some schedules has
sigma = 0: it is no choice, has no probability, and is left out. The ratio is that of a mean over pixels, not of a sum,
so it stays near 1, which is why eps is 1e-4 and not 0.2.

The KL of a step is |mu - mu_ref|^2 / (2 sigma^2), in nats; summed over pixels and steps it is what the policy has paid
in closeness to the first model. The paper has no such term; DPOK has it in the loss, as here.
Papers: Black et al. 2023 (DDPO, arXiv 2305.13301, sec. 4); Song et al. 2020 (DDIM, 2010.02502, eq. 12 and 16); Ho &
Salimans 2022 (classifier-free guidance, 2207.12598); Fan et al. 2023 (DPOK, 2305.16381). docs/ddpo.md has a glossary.

  python ddpo.py                    # shapes of 8 x 8 pixels move to the left: offline, a minute on two CPU cores
  python ddpo.py --model runwayml/stable-diffusion-v1-5 --lora-r 4 --dataset D \\
      --reward-fn rewards/jpeg.py:compressibility

Shapes: B images, b of a micro-batch, N denoising steps, C channels, H and W of the latent image; an encoded
prompt has L tokens of width D.
"""

import json
import math
import os
import runpy
import shlex
import signal
import sys
import time
import traceback
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field, fields
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Annotated

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: waiting threads would spin, and starve a busy machine
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # Ctrl-C while the libraries load: no traceback

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from datasets.fingerprint import Hasher
from filelock import FileLock
from huggingface_hub import ModelCard, ModelCardData, constants, get_session
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.tensor import DTensor
from torch.distributions import Normal
from tqdm import tqdm
from transformers import set_seed
from transformers.utils import logging

# Under torchrun, the number of this process and how many there are; one alone is number 0 of 1. All read the same data
# and draw the same random numbers; of every batch, each computes its share
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# --- Arguments. The type of a setting says which values are allowed; the comment beside or above it is its help text

Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(min_length=1)]


@dataclass
class Args:
    # --- Sampling. The batch of an epoch: sample_batch_size * sample_num_batches_per_epoch * processes images ---
    # denoising steps N (TRL: 50)
    sample_num_steps: Count = 10
    sample_eta: Share = 1.0  # scale of sigma: 0 would be deterministic, and teach nothing; at 1, DDPM's (TRL: 1)
    sample_guidance_scale: NonNegative = 1.0  # weight of the prompt, in sampling and training; 1: no guidance (TRL: 5)
    sample_batch_size: Count = 64  # images sampled at once, on each process (TRL: 1)
    sample_num_batches_per_epoch: Count = 4  # such batches in an epoch (TRL: 2)
    negative_prompts: Name | None = None  # the prompt that guidance leads away from; by default an empty one (TRL)

    # --- DDPO. An optimiser step: train_batch_size * train_gradient_accumulation_steps * processes images ---
    # images in a forward and backward pass, on each process (TRL: 1)
    train_batch_size: Count = 64
    train_gradient_accumulation_steps: Count = 2  # such passes for one optimiser step (TRL: 1)
    train_num_inner_epochs: Count = 1  # passes over the images of an epoch (TRL: 1)
    train_clip_range: Positive = 1e-4  # eps of the clipped ratio (TRL)
    train_adv_clip_max: Positive = 5.0  # advantages are clipped to +- this (TRL)
    train_timestep_fraction: Share = 1.0  # share of an image's steps that is trained on, drawn for each image (TRL)
    per_prompt_stat_tracking: bool = False  # compare a score with the last ones of the same prompt (TRL)
    per_prompt_stat_tracking_buffer_size: Count = 16  # how many of these are kept (TRL)
    per_prompt_stat_tracking_min_count: Count = 16  # with fewer, the batch is what is compared with (TRL)
    kl_coef: NonNegative = 0.0  # weight of the KL to the first model in the loss (DPOK; 0 in DDPO)

    # --- Optimisation ---
    # AdamW's, constant (TRL)
    train_learning_rate: Positive = 3e-4
    train_adam_beta1: Decay = 0.9  # AdamW's (TRL)
    train_adam_beta2: Decay = 0.999  # AdamW's (TRL)
    train_adam_epsilon: Positive = 1e-8  # AdamW's (TRL)
    train_adam_weight_decay: NonNegative = 1e-4  # AdamW's (TRL)
    train_max_grad_norm: Positive = 1.0  # the gradient is clipped to this norm (TRL)

    # --- Model: a folder, or a name on the hub ---
    # a Stable Diffusion pipeline; its UNet is trained, and KL is measured against it
    model: Name = "toy/shapes/sd"
    reward_fn: Name = "toy/shapes/make.py:left_ink"  # file.py:name of f(images, prompts, metadata), as in TRL
    gold_reward_fn: Name | None = None  # a second opinion, logged as objective/gold_scores and never trained on
    lora_r: Natural = 0  # rank of LoRA adapters on the UNet's attention (Hu et al. 2021), 0 for none (TRL: 4)
    lora_alpha: Positive = 4.0  # the adapter's output is scaled by lora_alpha / lora_r
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower

    # --- Data ---
    # folder, file (jsonl, json, csv, parquet) or hub name
    dataset: Name = "toy/shapes/data"
    dataset_config: Name | None = None  # configuration of a hub dataset that has several
    dataset_train_split: Name = "train"  # split to train on
    prompt_column: Name = "prompt"  # texts; the other columns of a row are its metadata
    seed: Natural = 1  # seed of noise, order of prompts, and adapters

    # --- Run. Settings from here on may change when a run is resumed ---
    # a run's folder or one of its checkpoints: continue, with the settings of that run
    resume: Name | None = None
    num_epochs: Count = 25  # epochs: one batch of images each (TRL: 100)
    exp_name: Name = "ddpo"  # name of this run, in its folder and on W&B
    output_dir: Name | None = None  # where everything goes; by default a new folder runs/NAME__SEED__TIME
    device: Name | None = None  # cpu, cuda, mps; by default the best there is
    image_steps: Count = 5  # epochs between pictures in images/: above, the first model's; below, the policy's
    save_steps: Count = 10  # epochs between checkpoints, each of which holds everything that a run consists of
    save_total_limit: Count = 2  # number of checkpoints to keep, the newest
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)
    wandb_project_name: Name = "rlhf"  # W&B project, with --track
    wandb_entity: Name | None = None  # W&B team, with --track

    # --- Computed
    batch_size: int = field(init=False, default=0)  # images of an epoch, on all processes together
    mini_batch_size: int = field(init=False, default=0)  # images of an optimiser step, likewise
    torch_device: str = field(init=False, default="cpu")  # where the models are


# --- The loop: its numbers are those of the steps above ---------------------------------------------------------------


def train(args: Args) -> None:
    """Trains the UNet of the pipeline; leaves the pipeline, metrics, curves and pictures in args.output_dir."""
    with setting_up():
        args = start_run(args)

        chain = load_chain(args)

        prompts = load_prompts(args, chain)
        args = choose_sizes(args, chain)
        reward = function_reward(args.reward_fn, prompts, chain, args)
        gold_reward = args.gold_reward_fn and function_reward(args.gold_reward_fn, prompts, chain, args)

        optimizer = make_optimizer(args, chain.policy)
        state = {"data": Hasher.hash(prompts), "scores": {}}  # also in a checkpoint
        run = Run(args, args.num_epochs, chain.policy, optimizer, state)
    with run:
        for epoch in run.steps():
            examples = batch(prompts, epoch - 1, args.batch_size, args.seed)
            with run.clock("rollout"):
                parts = sample_batch(chain, examples, args)  # 1
            with run.clock("score"):
                for part in parts:
                    part.scores = reward(part)  # 2
                    if gold_reward:
                        part.gold_scores = gold_reward(part)
                    part.images = None  # they are large, and what follows reads the chains
            rollout = join(parts, examples)
            if args.per_prompt_stat_tracking:  # 3
                texts = [x[args.prompt_column] for x in examples]
                advantages = prompt_advantages(rollout.scores, texts, state["scores"], args)
            else:
                advantages = normalize(rollout.scores, rollout.scores, 1e-8)
            rollout.advantages = advantages.clamp(-args.train_adv_clip_max, args.train_adv_clip_max)
            warn_about(run, rollout)
            with run.clock("update"):
                stats = optimize(chain, optimizer, rollout, args)  # 4 and 5
            stats |= rollout_stats(rollout)
            stats["epoch"] = epoch
            stats["step"] = epoch * args.train_num_inner_epochs * args.batch_size // args.mini_batch_size
            run.write(stats, "reward_mean", "objective/kl")
            if run.is_due(args.image_steps):
                draw_images(run, chain, prompts, args)
            run.save()
            run.stop()


# --- 1. Sample --------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """A batch of images, the chain of noisier ones that each came from, and what the later steps find out about them.

    B images of a batch, or the share of them that this process samples; all of them, once they are joined.
    """

    examples: list[dict]  # B rows of the dataset, with prompt and metadata
    context: Tensor  # (B, L, D) the text encoder's output
    latents: Tensor  # (B, N+1, C, H, W) from noise x_N to x_0
    old_logprobs: Tensor  # (B, N) of each step, under the policy that drew it
    kl: Tensor  # (B, N) of each step to the first model, in nats
    ref_means: Tensor | None  # (B, N, C, H, W) mean of each step under the first model, if the loss needs it
    images: Tensor | None  # (B, 3, height, width) in [0, 1], until they are judged
    scores: Tensor | None = None  # (B,)
    gold_scores: Tensor | None = None  # (B,)
    advantages: Tensor | None = None  # (B,)


@dataclass
class Chain:
    """What turns noise into images: the networks and the schedule."""

    pipe: object  # the whole Stable Diffusion pipeline, whose text encoder, image decoder and schedule are used
    policy: nn.Module  # its UNet, in training
    reference: nn.Module  # the first UNet, frozen; with LoRA the policy, whose adapter is turned off
    timesteps: Tensor  # (N,) falling, of 0 ... 999
    negative: Tensor  # (1, L, D) the text encoder's output for the negative prompt

    def step(self, x: Tensor, t: Tensor, context: Tensor, args: Args, of: str = "policy") -> tuple[Tensor, Tensor]:
        """Mean (b, C, H, W) and deviation (b, 1, 1, 1) of x_{t-1}, given images x at times t (b,) and prompts
        (b, L, D), under the network `of`, policy or reference.

        With guidance the prediction is u + g (c - u), from those with the negative prompt and with the prompt.
        """
        unet = getattr(self, of)
        adapter = nullcontext()
        if of == "reference" and args.lora_r:
            adapter = unet.disable_adapter()
        g = args.sample_guidance_scale
        with adapter, autocast(args):
            if g == 1:
                prediction = unet(x, t, context).sample.float()
            else:
                prompts = torch.cat([self.negative.expand_as(context), context])
                both = unet(torch.cat([x, x]), torch.cat([t, t]), prompts).sample.float()
                u, c = both.chunk(2)
                prediction = u + g * (c - u)
        return ddim_step(self.pipe.scheduler, prediction, t, x, args.sample_eta)

    def draw_noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, N+1, C, H, W) all the randomness of n images: x_N, then what each of the N steps adds."""
        config = self.policy.config
        shape = (config.in_channels, config.sample_size, config.sample_size)
        return torch.randn(n, len(self.timesteps) + 1, *shape, generator=generator)


def ddim_step(scheduler, prediction: Tensor, t: Tensor, x: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Mean (b, C, H, W) and standard deviation (b, 1, 1, 1) of x_{t-1}, given x_t (DDIM, eq. 12 and 16).

    a is the share of signal in the variance of x_t = sqrt(a) x_0 + sqrt(1 - a) noise. From the prediction follows a
    guess of image and noise; put together again with the a of the time before, they are the mean.
    """
    config = scheduler.config
    alphas = scheduler.alphas_cumprod.to(x)
    t = t.view(-1, 1, 1, 1)
    before = t - config.num_train_timesteps // scheduler.num_inference_steps
    a = alphas[t]
    a_prev = torch.where(before < 0, scheduler.final_alpha_cumprod.to(x), alphas[before.clamp(min=0)])
    if config.prediction_type == "epsilon":
        image = (x - (1 - a).sqrt() * prediction) / a.sqrt()
    elif config.prediction_type == "sample":
        image = prediction
    else:  # Salimans & Ho 2022
        kind = config.prediction_type
        require(kind == "v_prediction", f"scheduler_config.json: the prediction_type {kind!r} is unknown")
        image = a.sqrt() * x - (1 - a).sqrt() * prediction
    noise = (x - a.sqrt() * image) / (1 - a).sqrt()  # what else there is in x
    if config.clip_sample:
        image = image.clamp(-config.clip_sample_range, config.clip_sample_range)
    std = eta * ((1 - a_prev) / (1 - a) * (1 - a / a_prev)).sqrt()
    noise_variance = (1 - a_prev - std**2).clamp(min=0)
    return a_prev.sqrt() * image + noise_variance.sqrt() * noise, std


def gaussian_logprobs(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(b,) log-density of x (b, C, H, W), as a mean over pixels (TRL); NaN if the deviation is 0: that is no choice."""
    return Normal(mean, std, validate_args=False).log_prob(x).mean((1, 2, 3))


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """(b,) KL in nats between normal distributions of one deviation, a sum over pixels; 0 if the deviation is 0."""
    kl = (mean - ref_mean) ** 2 / (2 * std**2)
    return kl.masked_fill(std == 0, 0.0).sum((1, 2, 3))


@torch.no_grad()
def sample_images(chain: Chain, examples: list[dict], noise: Tensor, args: Args, of: str = "policy") -> Rollout:
    """Draws an image for each of some rows from its noise (b, N+1, C, H, W), and keeps what the later steps need."""
    context = encode(chain.pipe, [x[args.prompt_column] for x in examples], args)
    noise = noise.to(args.torch_device)
    x = noise[:, 0]
    latents = [x]
    logprobs = []
    kl = []
    ref_means = []
    for t, z in zip(chain.timesteps, noise[:, 1:].unbind(1)):
        times = t.expand(len(x))
        mean, std = chain.step(x, times, context, args, of)
        ref_mean, _ = chain.step(x, times, context, args, "reference")
        x = mean + std * z
        latents.append(x)
        logprobs.append(gaussian_logprobs(x, mean, std))
        kl.append(gaussian_kl(mean, ref_mean, std))
        ref_means.append(ref_mean)
    require(x.isfinite().all(), "the policy's images are not finite (NaN or inf): the model is broken, or a "
            "--train-learning-rate that is too high has broken it")  # fmt: skip
    return Rollout(
        examples, context, torch.stack(latents, 1), torch.stack(logprobs, 1), torch.stack(kl, 1),
        ref_means=torch.stack(ref_means, 1) if args.kl_coef else None, images=decode_latents(chain.pipe, x, args),
    )  # fmt: skip


def sample_batch(chain: Chain, examples: list[dict], args: Args) -> list[Rollout]:
    """Step 1 for an epoch: parts of `sample_batch_size` images, those of this process.

    All processes draw the noise of all images, and each denoises its share: how many there are changes no image.
    """
    parts = []
    size = args.sample_batch_size * WORLD_SIZE
    for first in range(0, len(examples), size):
        noise = chain.draw_noise(size)
        share = examples[first : first + size][RANK::WORLD_SIZE]
        parts.append(sample_images(chain, share, noise[RANK::WORLD_SIZE], args))
    return parts


def join(parts: list[Rollout], examples: list[dict]) -> Rollout:
    """The parts of an epoch as one, with the images of all processes, in the order of the examples."""
    whole = copy(parts[0])
    whole.examples = examples
    for name, x in vars(parts[0]).items():
        if isinstance(x, Tensor):
            share = torch.cat([getattr(part, name) for part in parts])
            setattr(whole, name, all_gather(share))
    return whole


# --- 3. Advantage -----------------------------------------------------------------------------------------------------


def normalize(scores: Tensor, others: Tensor, eps: float) -> Tensor:
    """(b,) scores less the mean of others, over their deviation: 0 if all are equal."""
    first = scores[0]  # subtracted from all: a mean of equal numbers is not always that number, a mean of zeros is 0
    return (scores - first - (others - first).mean()) / (others.std(correction=0) + eps)


def prompt_advantages(scores: Tensor, prompts: list[str], history: dict[str, list[float]], args: Args) -> Tensor:
    """(B,) scores, shifted and scaled by the mean and deviation of the last scores of the same prompt, these included.

    A prompt with fewer than `per_prompt_stat_tracking_min_count` of them is compared with the whole batch (TRL).
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


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate (PPO, eq. 7), negated: losses (B, T), the ratio, and where the clipped branch was the larger.

    The larger loss is taken, so that moving beyond cliprange never lowers the loss, but can still raise it.
    """
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    advantages = advantages.masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


# --- 5. Update --------------------------------------------------------------------------------------------------------


def mini_batches(rollout: Rollout, args: Args) -> Iterator[tuple[Tensor, Tensor]]:
    """For each optimiser step the rows (b,) of the images, and which of its denoising steps each is trained on (b, S).

    Each image has an order of its own, and its steps with a deviation of 0, which come last, are left out. The images
    of a pass are in a random order. Each process gets its share.
    """
    B = len(rollout.scores)
    N = int(rollout.old_logprobs[0].isfinite().sum())
    S = max(1, int(N * args.train_timestep_fraction))
    for _ in range(args.train_num_inner_epochs):
        order = torch.randperm(B)
        steps = torch.stack([torch.randperm(N)[:S] for _ in range(B)])  # (B, S)
        for mini_batch in order.split(args.mini_batch_size):
            rows = mini_batch[RANK::WORLD_SIZE]
            yield rows.to(args.torch_device), steps[rows].to(args.torch_device)


def mini_batch_gradient(chain: Chain, rollout: Rollout, rows: Tensor, steps: Tensor, args: Args) -> dict[str, float]:
    """Adds up the gradient of a mini-batch; returns means over it of what is logged.

    The loss is a mean over pairs of image and step. So each part divides by the number of pairs in the whole
    mini-batch, and how it is cut changes nothing. If several processes share it, that is the number of each, because
    gradients become means over processes.
    """
    sums = defaultdict(float)
    for index, columns in zip(rows.split(args.train_batch_size), steps.split(args.train_batch_size)):
        for step in columns.unbind(1):  # (b,), for each image another
            x = rollout.latents[index, step]  # (b, C, H, W)
            x_prev = rollout.latents[index, step + 1]
            old_logprobs = rollout.old_logprobs[index, step]  # (b,)
            advantages = rollout.advantages[index]
            mean, std = chain.step(x, chain.timesteps[step], rollout.context[index], args)
            logprobs = gaussian_logprobs(x_prev, mean, std)
            mask = torch.ones_like(logprobs, dtype=torch.bool)
            loss, ratio, _ = policy_loss(logprobs, old_logprobs, advantages, mask, args.train_clip_range)  # (b,)
            if args.kl_coef:
                kl = gaussian_kl(mean, rollout.ref_means[index, step], std)
                loss = loss + args.kl_coef * kl / x[0].numel()  # per pixel, as the log-probabilities are
            (loss.sum() / steps.numel()).backward()
            distance = (ratio - 1).abs()
            stats = {
                "loss": loss,
                "approx_kl": 0.5 * (logprobs - old_logprobs) ** 2,
                "clipfrac": (distance > args.train_clip_range).float(),
                "ratio_error": distance,
            }
            for name, values in stats.items():
                sums[name] += values.detach().sum()
    totals = all_reduce(torch.stack(list(sums.values())))
    means = totals / (WORLD_SIZE * steps.numel())
    return dict(zip(sums, means.tolist()))


def optimize(chain: Chain, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> dict[str, float]:
    """`train_num_inner_epochs` passes over the images; means over all steps of images that were trained on."""
    sums = Counter()
    num_steps = 0
    for rows, steps in mini_batches(rollout, args):
        optimizer.zero_grad()
        means = mini_batch_gradient(chain, rollout, rows, steps, args)
        if num_steps == 0:
            check_first_ratio(means["ratio_error"], args)  # it is 1: nothing has moved yet
        norm = clip_gradient(optimizer.param_groups[0]["params"], args.train_max_grad_norm)
        if norm.isfinite():  # else the weights would be NaN for good
            optimizer.step()
        sums.update(means | {"grad_norm": norm.item()})
        num_steps += 1
    optimizer.zero_grad()
    del sums["ratio_error"]
    return {name: x / num_steps for name, x in sums.items()}


# === The algorithm ends here. Next: its metrics and options, then what every program of this kind needs =============


def rollout_stats(rollout: Rollout) -> dict[str, float]:
    """The metrics that describe an epoch's images, before the update."""
    stats = {
        "reward_mean": rollout.scores.mean().item(),
        "reward_std": rollout.scores.std(correction=0).item(),
        "objective/kl": rollout.kl.sum(1).mean().item(),
    }
    if rollout.gold_scores is not None:
        stats["objective/gold_scores"] = rollout.gold_scores.mean().item()
    return stats


def warn_about(run: "Run", rollout: Rollout) -> None:
    """Says, once per run, that no image of an epoch did better than another."""
    if not rollout.advantages.any() and not run.warned:
        run.warned.add("equal rewards")
        run.bar.write("warning: all rewards of an epoch, or of each of its prompts, are equal, so there is nothing to "
                      "learn from: look at the reward.", file=sys.stderr)  # fmt: skip


def draw_images(run: "Run", chain: Chain, prompts: list[dict], args: Args) -> None:
    """images/epoch-N.png: eight images of the first model, and below them those of the policy, from the same noise."""
    from diffusers.utils import make_image_grid

    if RANK:
        return
    examples = [prompts[i % len(prompts)] for i in range(8)]
    noise = chain.draw_noise(8, torch.Generator().manual_seed(args.seed))  # the same in each epoch
    rows = [sample_images(chain, examples, noise, args, of).images for of in ("reference", "policy")]
    images = F.pad(torch.cat(rows), (1, 1, 1, 1), value=0.5)  # (16, 3, height, width), framed
    images = F.interpolate(images, scale_factor=max(1, 64 // images.shape[-1]))  # small ones larger
    pictures = chain.pipe.numpy_to_pil(images.permute(0, 2, 3, 1).cpu().numpy())
    with suppress(OSError):  # a disk that is full: the run itself goes on
        (run.output / "images").mkdir(exist_ok=True)
        make_image_grid(pictures, 2, 8).save(run.output / f"images/epoch-{run.step:04d}.png")


# --- Models and rewards -----------------------------------------------------------------------------------------------


def load_chain(args: Args) -> Chain:
    """Policy and reference from a Stable Diffusion pipeline, with DDIM's schedule; the UNet alone is trained."""
    with explain("ddpo.py needs diffusers: pip install diffusers==0.42.1"):
        import diffusers
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    with explain(f"the pipeline {args.model!r} could not be loaded (a StableDiffusionPipeline, from safetensors)"):
        pipe = diffusers.StableDiffusionPipeline.from_pretrained(
            locate(args.model), dtype=torch.float32, use_safetensors=True, safety_checker=None,
            requires_safety_checker=False,
        )  # fmt: skip
    words = pipe.tokenizer
    is_whole = len(words) > len(words.all_special_ids) and words.model_max_length < 1e6
    require(is_whole, f"{args.model}: files of the tokenizer are missing, without which it knows no word, or no limit")
    pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    pipe.scheduler.set_timesteps(args.sample_num_steps)
    check_schedule(pipe.scheduler, args)
    policy = pipe.unet.eval()  # and so it stays: without dropout, sampling and update see one distribution
    if args.gradient_checkpointing:
        policy.enable_gradient_checkpointing()
    if args.lora_r:
        policy = add_adapter(policy, args)
    reference = make_reference(args, policy).to(args.torch_device)
    policy.pipe = pipe.to(args.torch_device)  # what it is saved in
    negative = encode(pipe, [args.negative_prompts or ""], args)
    return Chain(pipe, policy, reference, pipe.scheduler.timesteps.to(args.torch_device), negative)


def check_schedule(scheduler, args: Args) -> None:
    """Raises UserError unless there is a normal distribution to draw from."""
    is_normal = not scheduler.config.thresholding
    require(is_normal, f"{args.model}: a scheduler with thresholding has no normal distribution")
    zeros = torch.zeros(len(scheduler.timesteps), 1, 1, 1)
    steps = f"--sample-num-steps {args.sample_num_steps}"
    with explain(f"{args.model}: its scheduler cannot be used with {steps}"):
        _, std = ddim_step(scheduler, zeros, scheduler.timesteps, zeros, args.sample_eta)
    drawn = std[std != 0]
    require(len(drawn) and drawn.min() > 1e-5, f"{steps} and --sample-eta {args.sample_eta}: the deviations of steps "
            "are 0, or too small for float32; take more steps, or a higher eta")  # fmt: skip
    if len(drawn) < len(std):
        print("the last step has a deviation of 0 and is not trained on")


def add_adapter(unet: nn.Module, args: Args) -> nn.Module:
    """The UNet, frozen, with LoRA adapters to train on its attention."""
    with explain("--lora-r needs peft: pip install peft"):
        from peft import LoraConfig, get_peft_model

    layers = ["to_k", "to_q", "to_v", "to_out.0"]
    config = LoraConfig(
        r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=layers, init_lora_weights="gaussian"
    )  # fmt: skip
    return get_peft_model(unet, config)


def make_reference(args: Args, policy: nn.Module) -> nn.Module:
    """A frozen copy of the policy; with LoRA the policy itself, whose adapter is off while it serves as that."""
    return policy if args.lora_r else deepcopy(policy).requires_grad_(False)


def make_optimizer(args: Args, policy: nn.Module) -> torch.optim.Optimizer:
    """AdamW for what is trained of the UNet; its learning rate is constant."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        parameters, args.train_learning_rate, (args.train_adam_beta1, args.train_adam_beta2), args.train_adam_epsilon,
        args.train_adam_weight_decay, fused=True,
    )  # fmt: skip


@torch.no_grad()
def encode(pipe, prompts: list[str], args: Args) -> Tensor:
    """(B, L, D) what the text encoder makes of prompts, cut or padded to the greatest length it knows."""
    with autocast(args):
        context, _ = pipe.encode_prompt(prompts, args.torch_device, 1, do_classifier_free_guidance=False)
    return context.float()


def decode_latents(pipe, latents: Tensor, args: Args) -> Tensor:
    """(B, 3, height, width) images in [0, 1], eight at a time: the decoder is large."""
    with autocast(args):
        parts = [pipe.vae.decode(x).sample for x in (latents / pipe.vae.config.scaling_factor).split(8)]
    return (torch.cat(parts).float() / 2 + 0.5).clamp(0, 1)


def function_reward(spec: str, prompts: list[dict], chain: Chain, args: Args) -> Callable[[Rollout], Tensor]:
    """A user's f(images, prompts, metadata) -> one number per image, or as in TRL a pair (numbers, more metadata).

    The metadata of an image is its row of the dataset. The function may change what it is given.
    """
    function = load_function(spec)

    def reward(part: Rollout) -> Tensor:
        """(b,) rewards of the images (b, 3, height, width) of this process."""
        texts = [x[args.prompt_column] for x in part.examples]
        with explain(f"the reward function {spec} failed"), torch.set_grad_enabled(True):  # whatever it switches
            result = function(part.images.clone(), texts, deepcopy(part.examples))
            if isinstance(result, tuple):
                result = result[0]
            scores = torch.as_tensor(result).detach().to(args.torch_device, torch.float32, copy=True)
        is_bad = ~(scores.abs() < 1e15)  # the sum of their squares could be infinite
        fits = scores.shape == (len(texts),)
        require(fits and not is_bad.any(), f"the reward function {spec} gave numbers of shape {tuple(scores.shape)} "
                f"for {len(texts)} images, {is_bad.sum()} of them NaN, infinite or above 1e15: it is to give one for "
                "each")  # fmt: skip
        return scores

    noise = chain.draw_noise(2, torch.Generator())
    reward(sample_images(chain, (prompts * 2)[:2], noise, args))  # a wrong function, or a broken model, fails now
    return reward


# --- Data -------------------------------------------------------------------------------------------------------------


def load_prompts(args: Args, chain: Chain) -> list[dict]:
    """The rows of the dataset, each with its prompt; counts those that are cut."""
    data = load_split(args.dataset, args.dataset_config, args.dataset_train_split)
    prompts = read_column(data, args.prompt_column, args.dataset, "--prompt-column")
    tokenizer = chain.pipe.tokenizer
    limit = tokenizer.model_max_length
    texts = tokenizer([*prompts, args.negative_prompts or ""])["input_ids"]
    num_cut = sum(len(ids) > limit for ids in texts)
    if num_cut:
        print(f"cut {num_cut} of {len(texts)} prompts, the negative one among them, to the {limit} tokens that are "
              "read")  # fmt: skip
    return data.to_list()


# --- Settings and checks ----------------------------------------------------------------------------------------------

ALIASES = {  # TRL's spellings
    "--sample-num-inference-steps": "--sample-num-steps", "--save-freq": "--save-steps",
    "--num-checkpoint-limit": "--save-total-limit", "--resume-from": "--resume",
}  # fmt: skip
LENGTH = "num_epochs"  # the setting that says how long a run is
CURVES = [["reward_mean", "objective/gold_scores"], ["objective/kl"], ["approx_kl", "clipfrac"]]


def choose_sizes(args: Args, chain: Chain) -> Args:
    """The settings with the batch sizes of all processes together filled in; prints them in words."""
    args = copy(args)
    sampled = args.sample_batch_size * args.sample_num_batches_per_epoch
    trained = args.train_batch_size * args.train_gradient_accumulation_steps
    require(sampled % trained == 0, f"an epoch has --sample-batch-size * --sample-num-batches-per-epoch = {sampled} "
            "images on each process, which is no multiple of the --train-batch-size * "
            f"--train-gradient-accumulation-steps = {trained} of an optimiser step")  # fmt: skip
    args.batch_size = sampled * WORLD_SIZE
    args.mini_batch_size = trained * WORLD_SIZE
    size = sum(p.numel() for p in chain.policy.parameters() if p.requires_grad)
    print(f"policy: {args.model}, {size / 1e6:.2f}M trained parameters on {args.torch_device}")
    print(f"batch: {args.batch_size} images per epoch, of {len(chain.timesteps)} steps each; {args.mini_batch_size} "
          "per optimiser step")  # fmt: skip
    return args


def check_first_ratio(error: float, args: Args) -> None:
    """Raises UserError if the mean of |ratio - 1| before the first step is more than rounding."""
    bound = 2e-2
    if args.torch_device == "cpu" and not args.bf16:
        bound = 1e-3
    require(error <= bound, f"the ratio pi/pi_old is off by {error:.2g} before any step was made (allowed: {bound:g}): "
            "sampling and update see different distributions")  # fmt: skip


# --- The same text in every script, from here to the end: mistakes, data by name, processes, the run ------------------

DATA_FILES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # and what datasets calls them
WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)  # the state of a model, put together from shards


class UserError(Exception):
    """A mistake in the input: shown as one sentence, exit code 2, no traceback."""


def require(condition: object, sentence: str) -> None:
    """Raises UserError with the sentence unless the condition holds."""
    if not condition:
        raise UserError(sentence)


@contextmanager
def explain(sentence: str) -> Iterator[None]:
    """Runs other people's code: an error in it ends in one sentence, ours followed by the error's own."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        reason = " ".join(str(error.__cause__ or error).split())[:500]  # its cause tells more
        known = (__file__, "<", os.path.dirname(os.__file__), sys.prefix)  # this file, Python and the libraries
        frames = traceback.extract_tb(error.__traceback__)
        user = [frame for frame in frames if not frame.filename.startswith(known)]
        where = f" ({user[-1].filename}, line {user[-1].lineno})" if user else ""
        raise UserError(f"{sentence}: {type(error).__name__}: {reason}{where}") from error


@contextmanager
def setting_up() -> Iterator[None]:
    """A library's complaint about the settings becomes one sentence. An error in a line of this script is a bug, or a
    fork's, and keeps its traceback."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename == __file__:
            raise
        with explain("the run could not start"):
            raise


@cache
def hub_answers() -> bool:
    """Asks the hub once; if it cannot be reached, its libraries, which would retry for minutes, read their caches."""
    with suppress(Exception):
        if not get_session().head(constants.ENDPOINT, timeout=5).is_error:
            return True
    constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
    return False


def on_disk(name: str) -> Path | None:
    """The file or folder of that name, here or beside this script."""
    for folder in (Path(), Path(__file__).resolve().parent):
        if name and (folder / name).exists():
            return folder / name
    return None


def locate(name: str) -> str:
    """The file or folder of that name, here or beside this script; any other name is taken for one on the hub."""
    if on_disk(name):
        return str(on_disk(name))
    is_path = name.startswith((".", "/", "~", "toy/")) or name.endswith((".py", *DATA_FILES)) or "\\" in name
    require(name and not is_path and name.count("/") < 2, f"{name!r}: there is no such file or folder")
    if not hub_answers():
        is_cached = any(Path(constants.HF_HUB_CACHE).glob(f"*--{name.replace('/', '--')}"))
        require(is_cached, f"{name!r} is neither a folder here nor in the cache, and the hub cannot be reached; python "
                f"{Path(__file__).name} without flags runs offline")  # fmt: skip
    return name


def load_function(spec: str) -> Callable:
    """file.py:name -> the function."""
    file, _, name = spec.rpartition(":")
    require(file.endswith(".py") and name, f"{spec!r} should be file.py:name")
    print(f"runs the code in {locate(file)}")  # which may be somebody else's, with --resume
    with explain(f"{file} could not be imported"):
        names = runpy.run_path(locate(file))
    require(callable(names.get(name)), f"{file} defines no function {name!r}")
    return names[name]


def load_split(name: str, config: str | None, split: str):
    """One split of a dataset: a folder, a jsonl/json/csv/parquet file (which is its split train), or a hub name."""
    path = locate(name)
    source = {"path": path, "name": config}
    if Path(path).is_file():
        kind = DATA_FILES.get(Path(path).suffix)
        require(kind, f"the dataset {name}: a file must be jsonl, json, csv or parquet")
        source = {"path": kind, "data_files": path}
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    data = []
    with explain(f"the dataset {name}, split {split!r}, could not be loaded"), suppress(StopIteration):  # if empty
        data = datasets.load_dataset(**source, split=split)
    require(len(data), f"the dataset {name}, split {split!r}, is empty")
    return data


def read_column(data, column: str, name: str, flag: str, kind=str) -> list:
    """A column of a dataset; raises UserError if it is missing, or if a row holds something of another kind."""
    there = ", ".join(data.column_names)
    require(column in data.column_names, f"the dataset {name} has no column {column!r}; it has {there} (set {flag})")
    rows = list(data[column])
    for i, row in enumerate(rows):
        require(isinstance(row, kind), f"the dataset {name}: row {i} of {column!r} holds {row!r} (set {flag})")
    return rows


def batch(rows: list, number: int, size: int, seed: int) -> list:
    """Batch `number` (0, 1, ...) of an endless sequence: pass after pass over the rows, each in its own order."""
    picked = []
    for position in range(number * size, (number + 1) * size):
        pass_number, place = divmod(position, len(rows))
        order = shuffled(len(rows), seed, pass_number)
        picked.append(rows[order[place]])
    return picked


@lru_cache(maxsize=2)
def shuffled(n: int, seed: int, number: int) -> list[int]:
    """The numbers below n in a random order, which follows from the seed and the number of the pass."""
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


def make_seed(*numbers: int) -> int:
    """One seed made of several numbers. All randomness is a function of --seed and the number of a step or a pass: what
    a step draws depends on no step before it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def autocast(args: Args) -> torch.autocast:
    """bfloat16 if --bf16 asks for it; weights, losses and everything after the logits stay float32."""
    return torch.autocast(torch.device(args.torch_device).type, torch.bfloat16, enabled=args.bf16)


def all_reduce(x: Tensor) -> Tensor:
    """The sum of x over all processes."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
    return x


def all_gather(x: Tensor) -> Tensor:
    """(B, ...) all rows, of which each process has the rows RANK, RANK + WORLD_SIZE, ... as x (B/WORLD_SIZE, ...)."""
    shares = [x.clone() for _ in range(WORLD_SIZE)]
    if WORLD_SIZE > 1:
        dist.all_gather(shares, x.contiguous())
    return torch.stack(shares, 1).flatten(0, 1)


def clip_gradient(parameters: list[Tensor], max_norm: float) -> Tensor:
    """Scales the gradient down to a norm of max_norm; returns the norm that it had.

    Whole gradients are first averaged over the processes, as those of shards already are.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if WORLD_SIZE > 1 and not isinstance(gradients[0], DTensor):
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            work.wait()
        torch._foreach_div_(gradients, WORLD_SIZE)
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def start_run(args: Args) -> Args:
    """Checks the settings and joins the processes; returns the settings with output_dir and torch_device filled in."""
    args = copy(args)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    check_values(args)
    args.output_dir = args.output_dir or f"runs/{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    check_unused(args)
    with explain(f"--device {args.device} cannot be used on this machine"):
        device = torch.empty(0, device=args.device or torch.accelerator.current_accelerator(True) or "cpu").device
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index)))
            torch.cuda.set_device(device)
    args.torch_device = str(device)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
        print(f"processes: {WORLD_SIZE}")
    set_seed(args.seed % 2**32)  # of adapters; each epoch has its own
    return args


def check_unused(args: Args) -> None:
    """Raises UserError if the output folder holds something, and this is not the run that goes on with it."""
    files = [Path(args.output_dir, name) for name in ("metrics.jsonl", "model_index.json", "README.md")]
    is_used = any(file.exists() and file.stat().st_size for file in files)
    require(args.resume or RANK or not is_used, f"--output-dir {args.output_dir} already holds a run or a model; name "
            f"another, or go on with that run: --resume {shlex.quote(args.output_dir)}")  # fmt: skip


def check_values(args: Args) -> None:
    """Raises UserError for a value that its type in Args does not allow."""
    values = {f.name: getattr(args, f.name) for f in fields(Args) if f.init}
    try:
        TypeAdapter(Args).validate_python(values)
    except ValidationError as error:
        wrong = error.errors()[0]  # for instance "Input should be greater than 0"
        raise UserError(f"--{wrong['loc'][0].replace('_', '-')} {wrong['input']}: {wrong['msg']}") from error


class Run:
    """What a run shows and leaves: progress bar, metrics.jsonl, W&B, checkpoints; in the end pipeline and curves.

    A number is logged by putting it into the stats, under any name. A checkpoint is one dict: weights and optimiser;
    `state`, the dict of what else changes during the run; and the length of metrics.jsonl, to which the file is cut
    when the run goes on. On a CPU a resumed run is, bit for bit, the one that was never interrupted. `with run:` saves
    what was trained, also after an error or Ctrl-C.
    """

    def __init__(
        self, args: Args, num_steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict, **others
    ):
        self.args = args
        self.num_steps = num_steps
        models = {"model": model, **others}  # others: a critic, a moving average
        self.models = nn.ModuleDict({name: model for name, model in models.items() if model is not None})
        self.optimizer = optimizer
        self.state = state
        self.output = Path(args.output_dir)
        self.step = 0  # the one that is being made
        self.written = 0  # steps that are done
        self.start = time.perf_counter()
        self.seconds = {}  # of each phase of this step
        self.broken = 0  # steps in a row without a finite gradient
        self.warned = set()
        self.signal = None
        self.must_stop = False
        self.wandb = None
        self.wandb_id = None
        self.file = open(os.devnull, "w")
        if not RANK:
            self.open_folder()
        if args.resume:
            self.restore(Path(args.resume))
        if args.track and not RANK:
            self.start_wandb()
        print(f"output: {self.output}")
        self.bar = tqdm(total=num_steps, initial=self.step, dynamic_ncols=True)

    def open_folder(self) -> None:
        """Makes the folder, with its lock, metrics.jsonl and args.json."""
        with explain(f"--output-dir {self.output} cannot be used (is another run writing there?)"):
            (self.output / "checkpoints").mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.output / ".lock", timeout=0).acquire()  # let go of when the process ends
            check_unused(self.args)  # another run may have ended here while this one was loading
            self.file = open(self.output / "metrics.jsonl", "a")
            (self.output / "args.json").write_text(json.dumps(asdict(self.args), indent=2) + "\n")

    def start_wandb(self) -> None:
        """Opens the W&B run; one that is resumed is continued."""
        names = {"project": self.args.wandb_project_name, "entity": self.args.wandb_entity, "name": self.output.name}
        os.environ.setdefault("WANDB_INIT_TIMEOUT", "15")  # W&B's own 90 seconds are long for a wrong address
        with explain("W&B did not start; log in with `wandb login`, set WANDB_MODE=offline (`wandb sync` uploads it "
                     "later) or, for a slow server, WANDB_INIT_TIMEOUT=90, or leave out --track"):  # fmt: skip
            import wandb

            config = asdict(self.args)
            self.wandb = wandb.init(**names, config=config, dir=self.output, id=self.wandb_id, resume="allow")
            self.wandb_id = self.wandb.id

    def __enter__(self) -> "Run":
        """Ctrl-C, SIGTERM and SIGHUP end the run after the step it is in, unless they are ignored, as by nohup."""
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        self.handlers = {number: signal.signal(number, self.heed) for number in heeded}
        return self

    def heed(self, number: int, frame) -> None:
        """The handler. A second signal does not wait for the end of the step; but torchrun passes each one on twice."""
        if self.signal and WORLD_SIZE == 1:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        print(f"\n{self.signal.name}: stopping after this step; send it again to stop at once", file=sys.stderr)

    def __exit__(self, kind: type | None, error: BaseException | None, trace) -> None:
        """Saves what was trained, if a step was made. An error in saving does not hide the one from before.

        Nothing is saved if another process has failed: the model cannot be put together without it.
        """
        if kind is KeyboardInterrupt:
            error.add_note(f"to resume: {self.resume_command()}")
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.bar.close()
        with suppress(OSError):  # what a full disk did not take was reported where it was written
            self.file.close()
        try:
            if self.written and (WORLD_SIZE == 1 or kind in (None, KeyboardInterrupt)):
                self.finish()
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"then: {str(second) or type(second).__name__}")
        if self.wandb:
            self.wandb.finish()
        if error is None:
            self.show_commands()

    def resume_command(self) -> str:
        """The command line that continues this run."""
        launcher = "python" if WORLD_SIZE == 1 else f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
        return f"{launcher} {Path(__file__).name} --resume {shlex.quote(str(self.output))}"

    def show_commands(self) -> None:
        """The command lines that look at a run that has ended, and that make one of twice the length out of it."""
        files = Path(__file__).with_name("docs") / "xray.py", self.output / "samples.jsonl"
        if all(file.exists() for file in files):
            print(f"to look at its tokens: python docs/xray.py {shlex.quote(str(self.output))}")
        length = getattr(self.args, LENGTH) or self.num_steps * self.args.batch_size
        print(f"to go on for as long again: {self.resume_command()} --{LENGTH.replace('_', '-')} {2 * length}")

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left, each begun with its own seed."""
        for step in range(self.step + 1, self.num_steps + 1):
            self.step = step
            set_seed(make_seed(self.args.seed, step))
            yield step

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Takes the seconds of a phase of this step."""
        start = time.perf_counter()
        yield
        if self.args.torch_device != "cpu":
            torch.accelerator.synchronize()
        self.seconds[phase] = time.perf_counter() - start

    def write(self, stats: dict[str, float], *shown: str) -> None:
        """Ends a step: one line of metrics.jsonl, W&B, and the metrics named in `shown` beside the bar."""
        stats |= {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        stats["perf/peak_memory_mb"] = peak_memory_mb()
        line = {name: x if math.isfinite(x) else None for name, x in stats.items()}  # JSON has no NaN
        with explain(f"{self.output}/metrics.jsonl could not be written"):
            print(json.dumps(line), file=self.file, flush=True)
        if self.wandb:
            self.wandb.log(stats, step=self.step)
        beside = [f"{name.split('/')[-1]} {stats[name]:.2f}" for name in shown if name in stats]
        self.bar.set_postfix_str(", ".join(beside), refresh=False)
        self.bar.update()
        self.written += 1
        is_finite = all(math.isfinite(x) for name, x in stats.items() if name.endswith("grad_norm"))
        self.broken = 0 if is_finite else self.broken + 1
        require(self.broken < 5, "the gradient was NaN or infinite five times in a row (most often the "
                "--learning-rate is too high; ddpo.py: --train-learning-rate); no such step was made")  # fmt: skip

    def is_due(self, every: int) -> bool:
        """True after every so many steps, and after the last one."""
        return self.step % every == 0 or self.step == self.num_steps

    def save(self) -> None:
        """Writes a checkpoint, if it is time or a signal came; it is renamed into place when it is whole."""
        self.must_stop = bool(all_reduce(torch.tensor(int(self.signal is not None))))  # in one process, so in all
        if not self.must_stop and not self.is_due(self.args.save_steps):
            return
        models, optimizer = dcp.get_state_dict(self.models, self.optimizer, options=WHOLE)
        if RANK:
            return
        state = {
            "script": Path(__file__).name, "step": self.step, "models": models, "optimizer": optimizer,
            "state": self.state, "bytes": self.file.tell(), "seconds": time.perf_counter() - self.start,
            "machine": machine(), "wandb_id": self.wandb_id,
        }  # fmt: skip
        folder = self.output / "checkpoints"
        try:
            os.fsync(self.file.fileno())
            with open(folder / "unfinished", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            (folder / "unfinished").replace(folder / f"step-{self.step:08d}.pt")
            for old in sorted(folder.glob("step-*.pt"))[: -self.args.save_total_limit]:
                old.unlink()
        except (OSError, RuntimeError) as error:  # a disk that is full, a folder that is gone: the run itself goes on
            (folder / "unfinished").unlink(missing_ok=True)
            print(f"warning: no checkpoint after step {self.step} (is the disk full?): {error}", file=sys.stderr)

    def stop(self) -> None:
        """Ends the run if a signal has asked for it."""
        if self.must_stop and self.step < self.num_steps:
            raise KeyboardInterrupt(f"stopped by a signal after step {self.step} of {self.num_steps}")

    def restore(self, path: Path) -> None:
        """Brings everything back to a checkpoint and removes what came after it; without any, the run starts over."""
        files = [path] if path.is_file() else sorted((self.output / "checkpoints").glob("step-*.pt"), reverse=True)
        file, state = read_checkpoint(files)
        if not files:
            if not RANK:
                self.file.truncate(0)
            return
        require(state, f"--resume {path}: there is no checkpoint that can be read; start a new run")
        script = Path(__file__).name
        require(state["script"] == script, f"--resume {path}: that is a checkpoint of {state['script']}, not {script}")
        metrics = self.output / "metrics.jsonl"
        is_whole = metrics.stat().st_size >= state["bytes"]
        require(is_whole, f"{metrics} is shorter than when {file.name} was written; start a new run")
        with explain(f"--resume {path}: this checkpoint does not fit the model"):
            # The optimiser first: to have moments to fill in, it is made to take a step, and the average follows
            dcp.set_optimizer_state_dict(self.models, self.optimizer, state["optimizer"], options=WHOLE)
            dcp.set_model_state_dict(self.models, state["models"], options=WHOLE)
        same = state["state"].get("data") == self.state.get("data")
        require(same, f"--resume {path}: the dataset is not the one that the run began with; start a new run")
        if state["machine"] != machine():
            print(f"continues on {machine()}, after {state['machine']}: the numbers will differ in their last bits")
        self.state.update(state["state"])
        self.step = self.written = state["step"]
        self.start -= state["seconds"]
        self.wandb_id = state["wandb_id"]
        if not RANK:
            self.file.truncate(state["bytes"])
            for later in (self.output / "checkpoints").glob("step-*.pt"):
                if later.name > file.name:
                    later.unlink()
        print(f"continues after step {self.step}, from {file}")

    def finish(self) -> None:
        """Saves the pipeline; beside it the card and the curves."""
        with explain(f"the pipeline could not be saved in {self.output}"):
            save_model(self.models["model"], self.output, self.args)
        if not RANK:
            with explain(f"the pipeline is saved in {self.output}, but its card or curves could not be made"):
                lines = [json.loads(line) for line in open(self.output / "metrics.jsonl")]
                write_card(self.output, self.args, lines, "diffusers")
                draw_curves(self.output, lines)
            print(f"saved in {self.output}: the pipeline, its card, metrics.jsonl, curves.png and images/")


def read_checkpoint(files: list[Path]) -> tuple[Path | None, dict | None]:
    """The first of the files that is whole and a checkpoint, and what it holds."""
    for file in files:
        with suppress(Exception):  # whatever a damaged file, or somebody else's, makes of it
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            if zipfile.ZipFile(file).testzip() is None and "wandb_id" in state:  # right checksums, the last key
                return file, state
        print(f"warning: {file} is damaged, or no checkpoint, and cannot be read", file=sys.stderr)
    return None, None


def machine() -> str:
    """What the last bits of a sum depend on."""
    return f"{WORLD_SIZE} process(es) of {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def printable(text: str) -> str:
    """Text without control characters: what a model writes must not steer the reader's terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def peak_memory_mb() -> float:
    """Peak memory in MB: of the GPU on CUDA, else of this process; 0 on Windows, which keeps no such figure."""
    if torch.cuda.max_memory_allocated() or sys.platform == "win32":  # 0 if there is none, or it is not used
        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def save_model(policy: nn.Module, folder: Path, args: Args) -> None:
    """The pipeline with the trained UNet; the adapter alone in lora/."""
    if RANK:
        return
    pipe = policy.pipe
    if args.lora_r:
        policy.save_pretrained(folder / "lora")
        pipe.unet = policy.merge_and_unload()
    pipe.save_pretrained(folder)


def write_card(output: Path, args: Args, lines: list[dict[str, float]], library: str = "transformers") -> None:
    """README.md, the model card: the last metrics and all settings, as JSON, in which no name is taken for markup."""
    data = ModelCardData(library_name=library, tags=[Path(__file__).stem])
    if args.model and not on_disk(args.model):  # a name on the hub, to which the card then links
        data.base_model = args.model
    if args.dataset and not on_disk(args.dataset):
        data.datasets = args.dataset
    last = {}
    for line in lines:
        last |= {name: value for name, value in line.items() if value is not None}
    rows = "\n".join(f"| `{name}` | {value:.6g} |" for name, value in last.items())
    text = f"Made by `{Path(__file__).name}`.\n\n## Last metrics\n\n| metric | value |\n|---|---|\n{rows}\n"
    settings = f"\n## Settings\n\n```json\n{json.dumps(asdict(args), indent=2)}\n```\n"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}{settings}").save(output / "README.md")


def draw_curves(output: Path, lines: list[dict[str, float]]) -> None:
    """curves.png: one panel for each list of metrics in CURVES."""
    from matplotlib.figure import Figure

    x = "episode" if "episode" in lines[0] else "step"
    figure = Figure((5 * len(CURVES), 3.2), layout="constrained")
    axes = figure.subplots(1, len(CURVES), squeeze=False)[0]
    for axis, names in zip(axes, CURVES):
        for name in names:
            points = [(line[x], line[name]) for line in lines if line.get(name) is not None]
            if points:
                axis.plot(*zip(*points), label=name)
        axis.set_xlabel(x)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(frameon=False)
    figure.savefig(output / "curves.png", dpi=120)


def read_command_line() -> Args:
    """The settings. With --resume, those of that run, except for what may differ (in Args, from `resume` on)."""
    flags = [word.partition("=") for word in sys.argv[1:]]
    words = [ALIASES.get(flag.replace("_", "-"), flag) + equals + value for flag, equals, value in flags]
    read = partial(tyro.cli, Args, args=words, description=__doc__.splitlines()[0])
    args = read()
    if args.resume is None:
        return args
    path = Path(args.resume)
    folder = path.parent.parent if path.is_file() else path
    names = [f.name for f in fields(Args) if f.init]
    with explain(f"--resume {args.resume}: its args.json cannot be read (is it a run of {Path(__file__).name}?)"):
        saved = json.loads((folder / "args.json").read_text())
        before = TypeAdapter(Args).validate_python({name: saved[name] for name in names})
    args = read(default=before)
    for name in names[: names.index("resume")]:
        old = getattr(before, name)
        new = getattr(args, name)
        flag = f"--{name.replace('_', '-')}"
        require(old == new, f"{flag} {new} is not what the run in {folder} was made with, {old}; start a new run")
    same = args.output_dir in (before.output_dir, str(folder))
    require(same, f"--output-dir {args.output_dir}: a run that is resumed stays in its folder, {folder}")
    args.output_dir = str(folder)
    return args


class Terminal:
    """A stream that may end before the run does, as behind `| head`: what it no longer takes is dropped."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        """Writes at once, so that an error comes here."""
        with suppress(OSError):
            self.stream.write(text)
            self.stream.flush()


def main() -> None:
    """Reads the command line and trains; a user's mistake ends in one sentence and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = Terminal(sys.stdout)
    sys.stderr = terminal = Terminal(sys.stderr)
    if RANK:  # only the first process writes to the terminal
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        train(read_command_line())
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another still waits for what it sent
            dist.destroy_process_group()
    except KeyboardInterrupt as stop:
        print("; ".join([str(stop) or "interrupted", *getattr(stop, "__notes__", [])]), file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        sys.stderr = terminal
        if "by peer" in str(error):
            sys.exit(f"process {RANK} stops: another one, which shows its own error, has closed the connection")
        sentence = "; ".join([str(error), *getattr(error, "__notes__", [])])
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in sentence:
            sentence = "out of memory: lower --micro-batch-size (ddpo.py: --train-batch-size); more in docs/guide.md"
        elif not isinstance(error, UserError):
            raise
        time.sleep(5 * (RANK > 0))  # an error that all processes find is reported by the first
        print(printable(f"{Path(__file__).name}: error: {sentence}"), file=terminal)
        sys.exit(2)


if __name__ == "__main__":
    main()
