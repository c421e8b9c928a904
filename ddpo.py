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
#     "rich==15.0.0",
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
  python ddpo.py --model runwayml/stable-diffusion-v1-5 --lora-r 4 --dataset D --reward-fn jpeg.py:compressibility

Shapes: B images, b of a micro-batch, N denoising steps, C channels, H and W of the latent image; an encoded
prompt has L tokens of width D.
"""

import json
import math
import os
import random
import runpy
import shlex
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Annotated, get_type_hints

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: threads that wait spin for ever on a busy machine

import datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from filelock import FileLock
from huggingface_hub import ModelCard, ModelCardData, constants, get_session
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers.utils import logging

# --- Arguments. The type of a setting says which values are allowed; the comment beside or above it is its help text

Positive = Annotated[float, "above 0", lambda x: 0 < x < math.inf]
NonNegative = Annotated[float, "0 or more", lambda x: 0 <= x < math.inf]
Share = Annotated[float, "between 0 and 1", lambda x: 0 <= x <= 1]
Decay = Annotated[float, "at least 0 and below 1", lambda x: 0 <= x < 1]
Count = Annotated[int, "1 or more", lambda x: x >= 1]
Natural = Annotated[int, "0 or more, and below 2**63", lambda x: 0 <= x < 2**63]


@dataclass
class Args:
    # --- Sampling. The batch of an epoch: sample_batch_size * sample_num_batches_per_epoch * processes images
    sample_num_steps: Count = 10  # denoising steps N (TRL: 50)
    sample_eta: Positive = 1.0  # scale of sigma: 0 would be deterministic, and teach nothing (TRL: 1)
    sample_guidance_scale: NonNegative = 1.0  # weight of the prompt, in sampling and training; 1: no guidance (TRL: 5)
    sample_batch_size: Count = 64  # images sampled at once, on each process (TRL: 1)
    sample_num_batches_per_epoch: Count = 4  # such batches in an epoch (TRL: 2)
    negative_prompts: str = ""  # the prompt that guidance leads away from

    # --- DDPO. An optimiser step: train_batch_size * train_gradient_accumulation_steps * processes images
    train_batch_size: Count = 64  # images in a forward and backward pass, on each process (TRL: 1)
    train_gradient_accumulation_steps: Count = 2  # such passes for one optimiser step (TRL: 1)
    train_num_inner_epochs: Count = 1  # passes over the images of an epoch (TRL: 1)
    train_clip_range: Positive = 1e-4  # eps of the clipped ratio (TRL)
    train_adv_clip_max: Positive = 5.0  # advantages are clipped to +- this (TRL)
    train_timestep_fraction: Share = 1.0  # share of an image's steps that is trained on, drawn for each image (TRL)
    per_prompt_stat_tracking: bool = False  # compare a score with the last ones of the same prompt (TRL)
    per_prompt_stat_tracking_buffer_size: Count = 16  # how many of these are kept (TRL)
    per_prompt_stat_tracking_min_count: Count = 16  # with fewer, the batch is what is compared with (TRL)
    kl_coef: NonNegative = 0.0  # weight of the KL to the first model in the loss (DPOK; 0 in DDPO)

    # --- Optimisation
    train_learning_rate: Positive = 3e-4  # AdamW's, constant (TRL)
    train_adam_beta1: Decay = 0.9  # AdamW's (TRL)
    train_adam_beta2: Decay = 0.999  # AdamW's (TRL)
    train_adam_epsilon: Positive = 1e-8  # AdamW's (TRL)
    train_adam_weight_decay: NonNegative = 1e-4  # AdamW's (TRL)
    train_max_grad_norm: Positive = 1.0  # the gradient is clipped to this norm (TRL)

    # --- Model: a folder, or a name on the hub
    model: str = "toy/shapes/sd"  # a Stable Diffusion pipeline, whose UNet is trained; also what KL is measured against
    reward_fn: str = "toy/shapes/make.py:left_ink"  # file.py:name of f(images, prompts, metadata), as in TRL
    gold_reward_fn: str | None = None  # a second opinion, logged as objective/gold_scores and never trained on
    lora_r: Natural = 0  # rank of LoRA adapters on the UNet's attention (Hu et al. 2021), 0 for none (TRL: 4)
    lora_alpha: Positive = 4.0  # the adapter's output is scaled by lora_alpha / lora_r
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower

    # --- Data
    dataset: str = "toy/shapes/data"  # folder, file (jsonl, json, csv, parquet) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    dataset_train_split: str = "train"  # split to train on
    prompt_column: str = "prompt"  # texts; the other columns of a row are its metadata
    seed: Natural = 1  # seed of noise, order of prompts, and adapters

    # --- Run. Settings from here on may change when a run is resumed
    resume: str | None = None  # a run's folder or one of its checkpoints: continue, with the settings of that run
    num_epochs: Count = 25  # epochs: one batch of images each (TRL: 100)
    exp_name: str = "ddpo"  # name of this run, in its folder and on W&B
    output_dir: str | None = None  # where everything goes; by default a new folder runs/NAME__SEED__TIME
    device: str | None = None  # cpu, cuda, mps; by default the best there is
    image_steps: Count = 5  # epochs between pictures in images/: above, the first model's; below, the policy's
    save_steps: Count = 10  # epochs between checkpoints, each of which holds everything that a run consists of
    save_total_limit: Count = 2  # number of checkpoints to keep, the newest
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)
    wandb_project_name: str = "rlhf"  # W&B project, with --track
    wandb_entity: str | None = None  # W&B team, with --track

    # --- Computed
    torch_device: str = field(init=False, default="cpu")  # where the models are


# --- The loop: its numbers are those of the steps above ---------------------------------------------------------------


def train(args: Args) -> None:
    """Trains the UNet of the pipeline; leaves the pipeline, metrics, curves and pictures in args.output_dir."""
    begin(args)
    rows = load_rows(args)
    chain = load_chain(args)
    reward, gold = load_reward(args.reward_fn, args), args.gold_reward_fn and load_reward(args.gold_reward_fn, args)
    trained = [p for p in chain.policy.parameters() if p.requires_grad]
    settings = (args.train_adam_beta1, args.train_adam_beta2), args.train_adam_epsilon, args.train_adam_weight_decay
    optimizer = torch.optim.AdamW(trained, args.train_learning_rate, *settings, fused=True)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    state = {"rows": [], "scores": {}, "step": 0}  # what else changes during the run
    run = Run(args, {"policy": chain.policy}, optimizer, schedule, state)
    row_batches = batches(rows, state["rows"], args.sample_batch_size * WORLD_SIZE)
    try:
        for epoch in run.steps(args.num_epochs):
            with run.clock("rollout"):
                parts = [sample_images(chain, next(row_batches)) for _ in range(args.sample_num_batches_per_epoch)]  # 1
            with run.clock("score"):
                for part in parts:
                    part.scores, part.gold_scores = reward(part), gold and gold(part)  # 2
                    part.images = None  # they are large, and what follows reads the chains
            rollout = join_batches(parts)
            if args.per_prompt_stat_tracking:  # 3
                advantages = prompt_advantages(rollout.scores, rollout.prompts, state["scores"], args)
            else:
                advantages = (rollout.scores - rollout.scores.mean()) / (rollout.scores.std(correction=0) + 1e-8)
            rollout.advantages = advantages.clamp(-args.train_adv_clip_max, args.train_adv_clip_max)
            with run.clock("update"):
                stats = update_unet(chain, optimizer, rollout)  # 4 and 5
            state["step"] += stats.pop("steps")
            stats |= image_stats(rollout) | {"epoch": epoch, "step": state["step"]}
            run.write(epoch, stats, "reward_mean", "objective/kl")
            if epoch % args.image_steps == 0 or epoch == args.num_epochs:
                draw_images(run, epoch, chain, rows)
    finally:  # after an error or Ctrl-C, too: what was trained is on disk
        run.end(chain)


# --- 1. Sample --------------------------------------------------------------------------------------------------------


@dataclass
class Chain:
    """What turns noise into images: the networks and the schedule."""

    pipe: nn.Module  # the whole Stable Diffusion pipeline, whose text encoder, image decoder and schedule are used
    policy: nn.Module  # its UNet, in training
    reference: nn.Module  # the first UNet, frozen; with LoRA the policy, whose adapter is turned off
    timesteps: Tensor  # (N,) falling, of 0 ... 999
    negative: Tensor  # (1, L, D) the text encoder's output for the negative prompt
    args: Args

    def step(self, x: Tensor, t: Tensor, context: Tensor, of: str = "policy") -> tuple[Tensor, Tensor]:
        """Mean (b, C, H, W) and deviation (b, 1, 1, 1) of x_{t-1}, given images x at times t (b,) and prompts
        (b, L, D), under the network `of`, policy or reference. With guidance the prediction is u + g (c - u), from
        those with the negative prompt and with the prompt."""
        unet, g = getattr(self, of), self.args.sample_guidance_scale
        off = unet.disable_adapter() if self.args.lora_r and of == "reference" else nullcontext()
        with off, torch.autocast(x.device.type, torch.bfloat16, enabled=self.args.bf16):
            if g == 1:
                prediction = unet(x, t, context).sample.float()
            else:
                prompts = torch.cat([self.negative.expand_as(context), context])
                u, c = unet(torch.cat([x, x]), torch.cat([t, t]), prompts).sample.float().chunk(2)
                prediction = u + g * (c - u)
        return ddim_step(self.pipe.scheduler, prediction, t, x, self.args.sample_eta)


@dataclass
class ImageBatch:
    """A batch of images, and the chain of noisier ones that each came from."""

    rows: list[dict]  # B of the dataset, with prompt and metadata
    prompts: list[str]  # B
    context: Tensor  # (B, L, D) the text encoder's output
    latents: Tensor  # (B, N+1, C, H, W) from noise x_N to x_0
    old_logprobs: Tensor  # (B, N) of each step, under the policy that drew it
    kl: Tensor  # (B, N) of each step to the first model, in nats
    ref_means: Tensor | None  # (B, N, C, H, W) mean of each step under the first model, if the loss needs it
    images: Tensor | None  # (B, 3, height, width) in [0, 1], until they are judged
    scores: Tensor | None = None  # (B,)
    gold_scores: Tensor | None = None  # (B,)
    advantages: Tensor | None = None  # (B,)


def ddim_step(scheduler, prediction: Tensor, t: Tensor, x: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Mean (b, C, H, W) and standard deviation (b, 1, 1, 1) of x_{t-1}, given x_t (DDIM, eq. 12 and 16).

    a is the share of signal in the variance of x_t = sqrt(a) x_0 + sqrt(1 - a) noise. From the prediction follows a
    guess of image and noise; put together again with the a of the time before, they are the mean.
    """
    config, alphas = scheduler.config, scheduler.alphas_cumprod.to(x)
    before = t - config.num_train_timesteps // scheduler.num_inference_steps
    a_prev = torch.where(before < 0, scheduler.final_alpha_cumprod.to(x), alphas[before.clamp(min=0)])
    a, a_prev = alphas[t].view(-1, 1, 1, 1), a_prev.view(-1, 1, 1, 1)
    if config.prediction_type == "epsilon":
        image, noise = (x - (1 - a).sqrt() * prediction) / a.sqrt(), prediction
    elif config.prediction_type == "sample":
        image, noise = prediction, (x - a.sqrt() * prediction) / (1 - a).sqrt()
    else:  # v_prediction (Salimans & Ho 2022)
        image, noise = a.sqrt() * x - (1 - a).sqrt() * prediction, a.sqrt() * prediction + (1 - a).sqrt() * x
    if config.clip_sample:
        image = image.clamp(-config.clip_sample_range, config.clip_sample_range)
    std = eta * ((1 - a_prev) / (1 - a) * (1 - a / a_prev)).sqrt()
    return a_prev.sqrt() * image + (1 - a_prev - std**2).clamp(min=0).sqrt() * noise, std


def gaussian_logprobs(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(b,) log-density of x (b, C, H, W), as a mean over pixels (TRL); NaN if the deviation is 0: that is no choice."""
    return (-((x - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)).mean((1, 2, 3))


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """(b,) KL in nats between normal distributions of one deviation, a sum over pixels; 0 if the deviation is 0."""
    return ((mean - ref_mean) ** 2 / (2 * std**2)).masked_fill(std == 0, 0.0).sum((1, 2, 3))


@torch.no_grad()
def sample_images(chain: Chain, rows: list[dict], of: str = "policy", rng: torch.Generator | None = None) -> ImageBatch:
    """Draws an image for each row, and keeps what the later steps need to know of its way.

    All processes draw the noise of all rows, and each denoises its share: how many there are changes no image.
    """
    args, config = chain.args, chain.policy.config
    shape = len(rows), config.in_channels, config.sample_size, config.sample_size
    noise = lambda: torch.randn(shape, generator=rng)[RANK::WORLD_SIZE].to(args.torch_device)  # noqa: E731
    rows = rows[RANK::WORLD_SIZE]
    prompts = [row[args.prompt_column] for row in rows]
    context, x = encode(chain.pipe, prompts, args), noise()
    latents, logprobs, kl, ref_means = [x], [], [], []
    for t in chain.timesteps:
        mean, std = chain.step(x, t.expand(len(x)), context, of)
        ref_mean, _ = chain.step(x, t.expand(len(x)), context, "reference")
        x = mean + std * noise()
        latents.append(x)
        logprobs.append(gaussian_logprobs(x, mean, std))
        kl.append(gaussian_kl(mean, ref_mean, std))
        ref_means.append(ref_mean)
    require(x.isfinite().all(), "the policy's images are not finite (NaN or inf): the model is broken, or a "
            "--train-learning-rate that is too high has broken it")  # fmt: skip
    images = decode_latents(chain.pipe, x, args)
    columns = [torch.stack(column, 1) for column in (latents, logprobs, kl)]
    return ImageBatch(rows, prompts, context, *columns, torch.stack(ref_means, 1) if args.kl_coef else None, images)


def join_batches(parts: list[ImageBatch]) -> ImageBatch:
    """The sampling batches of an epoch as one, with the rows of all processes."""
    whole = {}
    for name, x in vars(parts[0]).items():
        if isinstance(x, list):
            whole[name] = all_gather_list([row for part in parts for row in getattr(part, name)])
        else:
            whole[name] = x if x is None else all_gather(torch.cat([getattr(part, name) for part in parts]))
    return ImageBatch(**whole)


# --- 3. Advantage -----------------------------------------------------------------------------------------------------


def prompt_advantages(scores: Tensor, prompts: list[str], history: dict[str, list[float]], args: Args) -> Tensor:
    """(B,) scores, shifted and scaled by the mean and deviation of the last scores of the same prompt, these included.

    A prompt with fewer than `per_prompt_stat_tracking_min_count` of them is compared with the whole batch (TRL).
    """
    advantages = torch.empty_like(scores)
    for prompt in dict.fromkeys(prompts):
        rows = [i for i, other in enumerate(prompts) if other == prompt]
        kept = history.get(prompt, []) + scores[rows].tolist()
        history[prompt] = kept[-args.per_prompt_stat_tracking_buffer_size :]
        enough = len(history[prompt]) >= args.per_prompt_stat_tracking_min_count
        others = torch.tensor(history[prompt]).to(scores) if enough else scores
        advantages[rows] = (scores[rows] - others.mean()) / (others.std(correction=0) + 1e-6)
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
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


# --- 5. Update --------------------------------------------------------------------------------------------------------


def step_gradient(chain: Chain, rollout: ImageBatch, rows: Tensor, step: Tensor, count: int) -> Tensor:
    """Adds up the gradient of one denoising step of each of some images (b,); `step` (b,) says which one.

    The loss of an optimiser step is a mean over its `count` pairs of image and step, so each part is divided by that
    number. Returns sums: loss, half the squared log-ratio, ratios beyond the clip range, distance of the ratio from 1.
    """
    args, x, x_prev = chain.args, rollout.latents[rows, step], rollout.latents[rows, step + 1]
    mean, std = chain.step(x, chain.timesteps[step], rollout.context[rows])
    logprobs, old_logprobs = gaussian_logprobs(x_prev, mean, std), rollout.old_logprobs[rows, step]  # (b,)
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    loss, ratio, _ = policy_loss(logprobs, old_logprobs, rollout.advantages[rows], mask, args.train_clip_range)
    if args.kl_coef:  # per pixel, as the log-probabilities are
        loss = loss + args.kl_coef * gaussian_kl(mean, rollout.ref_means[rows, step], std) / x[0].numel()
    (WORLD_SIZE * loss.sum() / count).backward()  # gradients become means over processes
    with torch.no_grad():
        away, log_ratio = (ratio - 1).abs(), logprobs - old_logprobs
        return torch.stack([loss.sum(), 0.5 * (log_ratio**2).sum(), (away > args.train_clip_range).sum(), away.sum()])


def update_unet(chain: Chain, optimizer: torch.optim.Optimizer, rollout: ImageBatch) -> dict[str, float]:
    """`train_num_inner_epochs` passes over the images; means over all steps of images that were trained on."""
    args, B = chain.args, len(rollout.scores)
    N = int(rollout.old_logprobs[0].isfinite().sum())  # steps with a deviation of 0 come last, if there are any
    S = max(1, int(N * args.train_timestep_fraction))
    parameters, total, norms, num_steps = optimizer.param_groups[0]["params"], 0.0, 0.0, 0
    chain.policy.train()
    for _ in range(args.train_num_inner_epochs):
        order = torch.randperm(B).to(args.torch_device)
        steps = torch.stack([torch.randperm(N)[:S] for _ in range(B)]).to(args.torch_device)  # (B, S)
        for batch in order.split(step_size(args)):
            sums = torch.zeros(4, device=args.torch_device)
            for rows in batch[RANK::WORLD_SIZE].split(args.train_batch_size):
                for step in steps[rows].unbind(1):  # each image's own
                    sums += step_gradient(chain, rollout, rows, step, len(batch) * S)
            means = all_reduce(sums) / (len(batch) * S)
            if not num_steps:
                check_unmoved(means[3].item(), args)  # the ratio is 1: nothing has moved yet
            norm = clip_gradient(parameters, args.train_max_grad_norm)
            if norm.isfinite():  # else the weights would be NaN for good
                optimizer.step()
            optimizer.zero_grad()
            total, norms, num_steps = total + means, norms + norm.item(), num_steps + 1
    chain.policy.eval()
    stats = dict(zip(("loss", "approx_kl", "clipfrac"), (total / num_steps).tolist()))
    return stats | {"grad_norm": norms / num_steps, "steps": num_steps}


# === The algorithm ends here. What follows is needed by every program of this kind ====================================


def image_stats(rollout: ImageBatch) -> dict[str, float]:
    """The metrics that describe an epoch's images, before the update."""
    stats = {"reward_mean": rollout.scores.mean(), "reward_std": rollout.scores.std(correction=0)}
    stats["objective/kl"] = rollout.kl.sum(1).mean()
    if rollout.gold_scores is not None:
        stats["objective/gold_scores"] = rollout.gold_scores.mean()
    return {name: x.item() for name, x in stats.items()}


def draw_images(run: "Run", epoch: int, chain: Chain, rows: list[dict]) -> None:
    """images/epoch-N.png: eight images of the first model, and below them those of the policy, from the same noise."""
    from diffusers.utils import make_image_grid
    from PIL import Image

    rows = [rows[i // WORLD_SIZE % len(rows)] for i in range(8 * WORLD_SIZE)]  # eight on each process
    seeded = lambda: torch.Generator().manual_seed(run.args.seed)  # noqa: E731
    images = torch.cat([sample_images(chain, rows, of, seeded()).images for of in ("reference", "policy")])
    images, scale = F.pad(images, (1, 1, 1, 1), value=0.5), max(1, 64 // images.shape[-1])  # framed; small ones larger
    pixels = (255 * images).round().byte().permute(0, 2, 3, 1).cpu()  # (16, height, width, 3)
    pixels = pixels.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    if not RANK:
        with suppress(OSError):  # a disk that is full: the run itself goes on
            (run.output / "images").mkdir(exist_ok=True)
            pictures = [Image.fromarray(image.numpy()) for image in pixels]
            make_image_grid(pictures, 2, 8).save(run.output / f"images/epoch-{epoch:04d}.png")


# --- Settings and checks ----------------------------------------------------------------------------------------------

ALIASES = {  # TRL's spellings
    "--sample-num-inference-steps": "--sample-num-steps", "--save-freq": "--save-steps",
    "--num-checkpoint-limit": "--save-total-limit", "--resume-from": "--resume",
}  # fmt: skip
CURVES = [["reward_mean", "objective/gold_scores"], ["objective/kl"], ["approx_kl", "clipfrac"]]


def begin(args: Args) -> None:
    """Checks the settings, joins the processes, seeds everything, fills in args.output_dir and args.torch_device."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name, hint in get_type_hints(Args, include_extras=True).items():
        if hasattr(hint, "__metadata__"):
            allowed, holds = hint.__metadata__
            value = getattr(args, name)
            require(holds(value), f"--{name.replace('_', '-')} {value} must be {allowed}")
    sampled = args.sample_batch_size * args.sample_num_batches_per_epoch
    trained = args.train_batch_size * args.train_gradient_accumulation_steps
    require(sampled % trained == 0, f"an epoch has --sample-batch-size * --sample-num-batches-per-epoch = {sampled} "
            "images on each process, which is no multiple of the --train-batch-size * "
            f"--train-gradient-accumulation-steps = {trained} of an optimiser step")  # fmt: skip
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
        print(f"processes: {WORLD_SIZE}")
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    args.output_dir = args.output_dir or f"runs/{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    files = [Path(args.output_dir, name) for name in ("metrics.jsonl", "model_index.json", "README.md")]
    is_used = any(file.exists() and file.stat().st_size for file in files)
    require(args.resume or RANK or not is_used, f"--output-dir {args.output_dir} already holds a run or a model; name "
            f"another, or go on with that run: --resume {shlex.quote(args.output_dir)}")  # fmt: skip
    with explain(f"--device {args.device} cannot be used on this machine"):
        device = torch.empty(0, device=args.device or torch.accelerator.current_accelerator(True) or "cpu").device
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index)))
            torch.cuda.set_device(device)
    args.torch_device = str(device)


def check_unmoved(error: float, args: Args) -> None:
    """Raises UserError if the mean of |ratio - 1| before the first step is more than rounding."""
    bound = 1e-3 if args.torch_device == "cpu" and not args.bf16 else 2e-2
    require(error <= bound, f"the ratio pi/pi_old is off by {error:.2g} before any step was made (allowed: {bound:g}): "
            "sampling and update see different distributions")  # fmt: skip


# --- Models, prompts and rewards --------------------------------------------------------------------------------------


def load_rows(args: Args) -> list[dict]:
    """The rows of the dataset, each with its prompt."""
    data = load_split(args.dataset, args.dataset_config, args.dataset_train_split)
    read_column(data, args.prompt_column, args.dataset, "--prompt-column")
    return list(data)


def load_chain(args: Args) -> Chain:
    """Policy and reference from a Stable Diffusion pipeline, with DDIM's schedule; all but the UNet is frozen."""
    try:
        import diffusers
    except ImportError:
        raise UserError("ddpo.py needs diffusers: pip install diffusers==0.42.1") from None
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    with explain(f"the pipeline {args.model!r} could not be loaded (a StableDiffusionPipeline, from safetensors)"):
        options = {"dtype": torch.float32, "use_safetensors": True, "safety_checker": None}
        pipe = diffusers.StableDiffusionPipeline.from_pretrained(
            locate(args.model), requires_safety_checker=False, **options
        )
        pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
        pipe.scheduler.set_timesteps(args.sample_num_steps)
    config, timesteps = pipe.scheduler.config, pipe.scheduler.timesteps
    require(not config.thresholding, f"{args.model}: a scheduler with thresholding has no normal distribution")
    zeros = torch.zeros(len(timesteps), 1, 1, 1)
    _, std = ddim_step(pipe.scheduler, zeros, timesteps, zeros, args.sample_eta)
    require(std.any(), f"--sample-num-steps {args.sample_num_steps}: no step has a deviation above 0; take more")
    if not std.all():
        print("the last step has a deviation of 0 and is not trained on")
    policy, reference = pipe.unet, pipe.unet if args.lora_r else deepcopy(pipe.unet)
    for model in (pipe.vae, pipe.text_encoder, reference):
        model.requires_grad_(False).eval().to(args.torch_device)
    if args.lora_r:
        with explain("--lora-r needs peft: pip install peft"):
            from peft import LoraConfig, get_peft_model

        lora = {"r": args.lora_r, "lora_alpha": args.lora_alpha, "init_lora_weights": "gaussian"}
        lora = LoraConfig(target_modules=["to_k", "to_q", "to_v", "to_out.0"], **lora)
        policy = reference = get_peft_model(policy, lora)
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the ratio must be 1 before the first step
    if args.gradient_checkpointing:
        pipe.unet.enable_gradient_checkpointing()
    policy.eval().to(args.torch_device)
    number = sum(p.numel() for p in policy.parameters() if p.requires_grad) / 1e6
    print(f"policy: {args.model}, {number:.2f}M trained parameters on {args.torch_device}")
    print(f"batch: {args.sample_batch_size * args.sample_num_batches_per_epoch * WORLD_SIZE} images per epoch, of "
          f"{len(timesteps)} steps each; {step_size(args)} per optimiser step")  # fmt: skip
    negative = encode(pipe, [args.negative_prompts], args)
    return Chain(pipe, policy, reference, timesteps.to(args.torch_device), negative, args)


def step_size(args: Args) -> int:
    """Images of an optimiser step, on all processes together."""
    return args.train_batch_size * args.train_gradient_accumulation_steps * WORLD_SIZE


@torch.no_grad()
def encode(pipe, prompts: list[str], args: Args) -> Tensor:
    """(B, L, D) what the text encoder makes of prompts, cut or padded to the greatest length it knows."""
    ids = pipe.tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    with torch.autocast(torch.device(args.torch_device).type, torch.bfloat16, enabled=args.bf16):
        return pipe.text_encoder(ids.to(args.torch_device))[0].float()


def decode_latents(pipe, latents: Tensor, args: Args) -> Tensor:
    """(B, 3, height, width) images in [0, 1], eight at a time: the decoder is large."""
    with torch.autocast(torch.device(args.torch_device).type, torch.bfloat16, enabled=args.bf16):
        parts = [pipe.vae.decode(x).sample for x in (latents / pipe.vae.config.scaling_factor).split(8)]
    return (torch.cat(parts).float() / 2 + 0.5).clamp(0, 1)


def load_reward(spec: str, args: Args) -> Callable[[ImageBatch], Tensor]:
    """A user's f(images, prompts, metadata) -> one number per image, or as in TRL a pair (numbers, more metadata)."""
    function = load_function(spec)

    def reward(r: ImageBatch) -> Tensor:
        """(B,) rewards of this process's images."""
        with explain(f"the reward function {spec} failed"):
            result = function(r.images, r.prompts, r.rows)
            scores = torch.as_tensor(result[0] if isinstance(result, tuple) else result)
        fits = scores.shape == (len(r.images),) and scores.isfinite().all()
        require(fits, f"the reward function {spec} gave {scores.tolist()} for {len(r.images)} images: it is to give "
                "one finite number for each")  # fmt: skip
        return scores.float().to(args.torch_device)

    return reward


def all_gather_list(rows: list) -> list:
    """As all_gather, of a list."""
    shares = [rows]
    if WORLD_SIZE > 1:
        shares = [None] * WORLD_SIZE
        dist.all_gather_object(shares, rows)
    return [row for rows_of_all in zip(*shares) for row in rows_of_all]


# --- The same text in every script, from here to the end: mistakes, data by name, processes, the run ------------------

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
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
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:500]  # its cause tells more
        known = (__file__, "<", os.path.dirname(os.__file__), sys.prefix)  # this file, Python and the libraries
        user = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(known)]
        where = f" ({user[-1].filename}, line {user[-1].lineno})" if user else ""
        raise UserError(f"{sentence}: {type(error).__name__}: {reason}{where}") from error


@cache
def hub_answers() -> bool:
    """Asks the hub once; if it cannot be reached, its libraries, which would retry for minutes, read their caches."""
    with suppress(Exception):
        get_session().head(constants.ENDPOINT, timeout=5)
        return True
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return False


def locate(name: str) -> str:
    """The file or folder of that name, here or beside this script; any other name is taken for one on the hub."""
    here = next((path for path in (Path(name), Path(__file__).resolve().parent / name) if path.exists()), None)
    is_path = name.startswith((".", "/", "~", "toy/")) or name.endswith(tuple(DATA_FILES)) or "\\" in name
    is_path = is_path or name.count("/") > 1
    require(here or (name and not is_path), f"{name!r}: there is no such file or folder")
    if here is None and not hub_answers():
        is_cached = any(Path(constants.HF_HUB_CACHE).glob(f"*--{name.replace('/', '--')}"))
        require(is_cached, f"{name!r} is neither a folder here nor in the cache, and the hub cannot be reached; python "
                f"{Path(__file__).name} without flags runs offline")  # fmt: skip
    return str(here or name)


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
    path, data = locate(name), []
    kind = DATA_FILES.get(Path(path).suffix)
    require(kind or not Path(path).is_file(), f"the dataset {name}: a file must be jsonl, json, csv or parquet")
    source = {"path": kind, "data_files": path} if Path(path).is_file() else {"path": path, "name": config}
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    with explain(f"the dataset {name}, split {split!r}, could not be loaded"), suppress(StopIteration):  # if empty
        data = datasets.load_dataset(**source, split=split)
    require(len(data), f"the dataset {name}, split {split!r}, is empty")
    return data


def read_column(data, column: str, name: str, flag: str, kind=str) -> list:
    """A column of a dataset; raises UserError if it is missing, or if a row holds something of another kind."""
    there = ", ".join(data.column_names)
    require(column in data.column_names, f"the dataset {name} has no column {column!r}; it has {there} (set {flag})")
    with explain(f"the dataset {name}, column {column!r}, could not be read"):
        rows = list(data[column])
    for i, row in enumerate(rows):
        require(isinstance(row, kind), f"the dataset {name}: row {i} of {column!r} holds {row!r} (set {flag})")
    return rows


def batches(rows: list, queue: list[int], batch_size: int) -> Iterator[list]:
    """Endless batches of rows; each pass over them is in a new random order.

    `queue` holds those that this pass has yet to give. It is the caller's, so that a checkpoint can hold it.
    """
    while True:
        while len(queue) < batch_size:
            queue += torch.randperm(len(rows)).tolist()
        batch, queue[:] = queue[:batch_size], queue[batch_size:]
        yield [rows[i] for i in batch]


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


class Run:
    """What a run shows and leaves: progress bar, metrics.jsonl, W&B, checkpoints; in the end pipeline and curves.

    A number is logged by putting it into the stats, under any name. A checkpoint is one dict: weights and optimiser;
    `state`, the lists and dicts that change during the run; the random state; and the length of metrics.jsonl, to which
    the file is cut when the run goes on. On a CPU a resumed run is, bit for bit, the one that was never interrupted.
    """

    def __init__(self, args: Args, models: dict, optimizer: torch.optim.Optimizer, schedule, state: dict):
        self.args, self.optimizer, self.schedule, self.state = args, optimizer, schedule, state
        self.models = nn.ModuleDict({name: model for name, model in models.items() if model is not None})
        self.output, self.metrics, self.seconds, self.warned = Path(args.output_dir), {}, {}, set()
        self.step, self.signal, self.broken, self.start = 0, None, 0, time.perf_counter()
        self.wandb, self.wandb_id, self.file = None, None, open(os.devnull, "w")
        if not RANK:
            with explain(f"--output-dir {self.output} cannot be used (is another run writing there?)"):
                (self.output / "checkpoints").mkdir(parents=True, exist_ok=True)
                self.lock = FileLock(self.output / ".lock", timeout=0).acquire()  # let go of when the process ends
                self.file = open(self.output / "metrics.jsonl", "a")
                (self.output / "args.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
        if args.resume:
            self.restore(Path(args.resume))
        if args.track and not RANK:
            with explain("W&B did not start; log in with `wandb login`, set WANDB_MODE=offline, or leave out --track"):
                import wandb

                names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": self.output.name}
                names |= {"dir": self.output, "id": self.wandb_id, "resume": "allow"}
                self.wandb = wandb.init(**names, config=asdict(args))
        print(f"output: {self.output}")

    def steps(self, num_steps: int) -> Iterator[int]:
        """The numbers of the steps that are left. Ctrl-C, SIGTERM or SIGHUP end the run after the step it is in."""
        self.bar = tqdm(total=num_steps, initial=self.step, dynamic_ncols=True)
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        before = {number: signal.signal(number, self.stop) for number in heeded}
        try:
            for step in range(self.step + 1, num_steps + 1):
                yield step
                is_asked = bool(all_reduce(torch.tensor(int(self.signal is not None))))  # in one process, so in all
                if step % self.args.save_steps == 0 or step == num_steps or is_asked:
                    self.save(step)
                if is_asked and step < num_steps:
                    raise KeyboardInterrupt(f"stopped by a signal after step {step} of {num_steps}")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self, number: int, frame) -> None:
        """The handler. A second signal does not wait for the end of the step; but torchrun passes each one on twice."""
        if self.signal and WORLD_SIZE == 1:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        print(f"\n{self.signal.name}: stopping after this step; send it again to stop at once", file=sys.stderr)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Takes the seconds of a phase of this step."""
        start = time.perf_counter()
        yield
        if self.args.torch_device != "cpu":
            torch.accelerator.synchronize()
        self.seconds[phase] = time.perf_counter() - start

    def write(self, step: int, stats: dict[str, float], *shown: str) -> None:
        """Ends a step: one line of metrics.jsonl, W&B, and the metrics named in `shown` beside the bar."""
        stats |= {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        stats["perf/peak_memory_mb"] = peak_memory_mb()
        self.metrics |= stats
        with explain(f"{self.output}/metrics.jsonl could not be written"):
            print(json.dumps(stats), file=self.file, flush=True)
        if self.wandb:
            self.wandb.log(stats, step=step)
        beside = [f"{name.split('/')[-1]} {self.metrics[name]:.2f}" for name in shown if name in self.metrics]
        self.bar.set_postfix_str(", ".join(beside), refresh=False)
        self.bar.update()
        is_finite = all(math.isfinite(x) for name, x in stats.items() if name.endswith("grad_norm"))
        self.broken = 0 if is_finite else self.broken + 1
        require(self.broken < 5, "the gradient was NaN or infinite in five steps in a row (most often the "
                "learning rate is too high); the weights from before are saved")  # fmt: skip

    def save(self, step: int) -> None:
        """Writes a checkpoint beside the others and renames it into place, so that none is ever half written."""
        models, optimizer = dcp.get_state_dict(self.models, self.optimizer, options=WHOLE)
        state = {
            "script": Path(__file__).name, "step": step, "models": models, "optimizer": optimizer, "state": self.state,
            "torch_random": torch.get_rng_state(), "python_random": random.getstate(), "bytes": self.file.tell(),
            "seconds": time.perf_counter() - self.start, "wandb_id": self.wandb and self.wandb.id,
        }  # fmt: skip
        folder = self.output / "checkpoints"
        try:
            if not RANK:
                os.fsync(self.file.fileno())
                with open(folder / "unfinished", "wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                (folder / "unfinished").replace(folder / f"step-{step:08d}.pt")
                for old in sorted(folder.glob("step-*.pt"))[: -self.args.save_total_limit]:
                    old.unlink()
        except (OSError, RuntimeError) as error:  # a disk that is full, a folder that is gone: the run itself goes on
            (folder / "unfinished").unlink(missing_ok=True)
            print(f"warning: no checkpoint after step {step} (is the disk full?): {error}", file=sys.stderr)

    def restore(self, path: Path) -> None:
        """Brings everything back to a checkpoint and removes what came after it; without any, the run starts over."""
        files = [path] if path.is_file() else sorted((self.output / "checkpoints").glob("step-*.pt"), reverse=True)
        metrics, script = self.output / "metrics.jsonl", Path(__file__).name
        for file in files:
            with suppress(Exception):  # whatever a damaged file makes of it
                if zipfile.ZipFile(file).testzip() is None:  # its checksums
                    state = torch.load(file, map_location="cpu", weights_only=True)
                    break
            print(f"warning: {file} is damaged and cannot be read", file=sys.stderr)
        else:
            require(not files, f"--resume {path}: there is no checkpoint that can be read; start a new run")
            return None if RANK else self.file.truncate(0)
        require(state["script"] == script, f"--resume {path}: that is a checkpoint of {state['script']}, not {script}")
        is_whole = metrics.stat().st_size >= state["bytes"]
        require(is_whole, f"{metrics} is shorter than when {file.name} was written; start a new run")
        with explain(f"--resume {path}: this checkpoint does not fit the model"):
            # The optimiser first: to have moments to fill in, it is made to take a step, and the average follows
            dcp.set_optimizer_state_dict(self.models, self.optimizer, state["optimizer"], options=WHOLE)
            dcp.set_model_state_dict(self.models, state["models"], options=WHOLE)
        self.state.update(state["state"])
        random.setstate(state["python_random"])
        torch.set_rng_state(state["torch_random"])
        self.step, self.start, self.wandb_id = state["step"], self.start - state["seconds"], state["wandb_id"]
        self.schedule.last_epoch = self.step - 1
        self.schedule.step()  # the rate of the next step, which is another one if the run is now longer
        if not RANK:
            self.file.truncate(state["bytes"])
            for later in (self.output / "checkpoints").glob("step-*.pt"):
                if later.name > file.name:
                    later.unlink()
        for line in metrics.read_bytes()[: state["bytes"]].splitlines():
            self.metrics |= json.loads(line)
        print(f"continues after step {self.step}, from {file}")

    def end(self, chain: Chain) -> None:
        """Closes the files; unless no step was made, saves pipeline, card and curves; an adapter in lora/."""
        self.bar.close()
        with suppress(OSError):  # what a full disk did not take was reported where it was written
            self.file.close()
        if self.metrics and not RANK:
            with explain(f"the model could not be saved in {self.output}"):
                if self.args.lora_r:
                    chain.policy.save_pretrained(self.output / "lora")
                    chain.pipe.unet = chain.policy.merge_and_unload()
                chain.pipe.save_pretrained(self.output)
            with explain(f"the model is saved in {self.output}, but its card or curves could not be made"):
                write_card(self.output, self.args, self.metrics, "diffusers")
                draw_curves(self.output, CURVES)
            print(f"saved in {self.output}: the pipeline, its card, metrics.jsonl, curves.png and images/")
        if self.wandb:
            self.wandb.finish()


def printable(text: str) -> str:
    """Text without control characters: what a model writes must not steer the reader's terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def peak_memory_mb() -> float:
    """Peak memory in MB: of the GPU on CUDA, else of this process; 0 on Windows, which keeps no such figure."""
    if torch.cuda.max_memory_allocated() or sys.platform == "win32":  # 0 if there is none, or it is not used
        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def write_card(output: Path, args: Args, metrics: dict[str, float], library: str = "transformers") -> None:
    """README.md, the model card: the last metrics and all settings, as JSON, in which no name is taken for markup."""
    names = {"base_model": args.model, "datasets": args.dataset}
    hub = {key: name for key, name in names.items() if name and not Path(locate(name)).exists()}
    data = ModelCardData(library_name=library, tags=[Path(__file__).stem], **hub)
    rows = "\n".join(f"| `{name}` | {value:.6g} |" for name, value in metrics.items())
    text = f"Made by `{Path(__file__).name}`.\n\n## Last metrics\n\n| metric | value |\n|---|---|\n{rows}\n"
    settings = f"\n## Settings\n\n```json\n{json.dumps(asdict(args), indent=2)}\n```\n"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}{settings}").save(output / "README.md")


def draw_curves(output: Path, panels: list[list[str]]) -> None:
    """curves.png: one panel for each list of metric names, from metrics.jsonl."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    x, figure = "episode" if "episode" in lines[0] else "step", Figure((5 * len(panels), 3.2), layout="constrained")
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for name in panel:
            points = [(line[x], line[name]) for line in lines if name in line]
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
    if (args := read()).resume is None:
        return args
    path, names = Path(args.resume), [f.name for f in fields(Args) if f.init]
    folder = path.parent.parent if path.is_file() else path
    with explain(f"--resume {args.resume}: its args.json cannot be read (is it a run of {Path(__file__).name}?)"):
        saved = json.loads((folder / "args.json").read_text())
        before = Args(**{name: tuple(saved[name]) if isinstance(saved[name], list) else saved[name] for name in names})
    args = read(default=before)
    for name in names[: names.index("resume")]:
        old, new, flag = getattr(before, name), getattr(args, name), f"--{name.replace('_', '-')}"
        require(old == new, f"{flag} {new} is not what the run in {folder} was made with, {old}; start a new run")
    same = args.output_dir in (before.output_dir, str(folder))
    require(same, f"--output-dir {args.output_dir}: a run that is resumed stays in its folder, {folder}")
    args.output_dir = str(folder)
    return args


def main() -> None:
    """Reads the command line and trains; a user's mistake ends in one sentence and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args, terminal, script = None, sys.stderr, Path(__file__).name
    if RANK:  # only the first process writes to the terminal
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        train(args := read_command_line())
        if dist.is_initialized():
            dist.destroy_process_group()
    except KeyboardInterrupt as stop:
        launcher = "python" if WORLD_SIZE == 1 else f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
        command = f"; to resume: {launcher} {script} --resume {shlex.quote(args.output_dir or '')}" if args else ""
        has_run = args and args.output_dir and Path(args.output_dir, "args.json").exists()
        print(f"{str(stop) or 'interrupted'}{command if has_run else ''}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        sys.stderr = terminal
        if "by peer" in str(error):
            sys.exit(f"process {RANK} stops: another one, which shows its own error, has closed the connection")
        is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        if not (is_full or isinstance(error, UserError)):
            raise
        time.sleep(2 * (RANK > 0))  # an error that all processes find is reported by the first
        full = "out of memory: lower --micro-batch-size (of images --train-batch-size); more in docs/guide.md"
        print(printable(f"{script}: error: {full if is_full else error}"), file=terminal)
        sys.exit(2)


if __name__ == "__main__":
    main()
