"""DDPO for diffusion models, in short: ../ddpo.py without what only large models and runs need.

The policy gradient of ppo.py, applied to images: an image is a response, a denoising step a token.
The state is the noisy image; the action is the next, less noisy image.

  text     prompt  ->  y_1  ->  y_2  -> ... -> y_T     y_t ~ softmax(logits of y_<t)
  image    noise x_N -> x_{N-1} -> ...  -> x_0         x_{t-1} ~ Normal(mu(x_t, t), sigma_t)

The network predicts mu; sigma is fixed by the schedule. For each epoch, a batch of B images:

  1. sample     noise x_N, then N times x_{t-1} = mu + sigma_t z, where z ~ Normal(0, 1) (DDIM);
                keep every x_t, and log pi(x_{t-1} | x_t) as a mean over pixels
  2. score      images, prompts and metadata -> one number per image
  3. advantage  A = (score - mean) / std, over the batch; the same for every step of an image
  4. loss       ratio_t = pi(x_{t-1} | x_t) / pi_old(x_{t-1} | x_t), where pi_old drew the batch
                mean_t max(-A ratio_t, -A clip(ratio_t, 1-eps, 1+eps))
  5. update     `train_num_inner_epochs` passes over the batch, one optimiser step per mini-batch

The tensors, for N = 4. Only the last image has a score. There is no critic and no discount, and,
unlike in RLHF on text, no reference model: ../ddpo.py has a KL penalty as an option.

  latents        x_4 --------> x_3 --------> x_2 --------> x_1 --------> x_0    (B, N+1, C, H, W)
  timesteps            751           501           251            1             (N,)
  old_logprobs          *             *             *             *             (B, N)
  scores                                                                  *     (B,)
  advantages            A             A             A             A             (B,)

  python lecture/ddpo.py    # 8 x 8 pixels, a minute on a CPU: shapes move left, reward 0 -> 2.0
  python lecture/ddpo.py --model runwayml/stable-diffusion-v1-5 --train-learning-rate 1e-5 \\
      --reward-fn rewards/jpeg.py:compressibility --dataset MINE.jsonl   # on a GPU; smaller batches

Papers: DDPO 2305.13301 (sec. 4), DDIM 2010.02502 (eq. 12 and 16), PPO 1707.06347 (arXiv).
"""

# %% Settings, with the names and defaults of ../ddpo.py
import runpy
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
import wandb
from datasets import load_dataset
from diffusers import DDIMScheduler, StableDiffusionPipeline
from diffusers.utils import make_image_grid
from torch.distributions import Normal
from tqdm import trange

HERE = Path(globals().get("__file__", "this.py")).resolve().parent  # in a notebook, its folder
TOY = (HERE if Path(HERE, "toy").exists() else HERE.parent) / "toy"


@dataclass
class Args:
    sample_num_steps: int = 10  # N, denoising steps
    sample_eta: float = 1.0  # scale of sigma; with 0, sampling would not explore
    sample_batch_size: int = 64  # images sampled at once
    sample_num_batches_per_epoch: int = 4  # B = 4 * 64
    train_batch_size: int = 64  # images in a forward and backward pass
    train_gradient_accumulation_steps: int = 2  # passes per optimiser step: 2 * 64 images
    train_num_inner_epochs: int = 1  # passes over the images of an epoch
    train_clip_range: float = 1e-4  # eps; small, because a log-probability is a mean over pixels
    train_adv_clip_max: float = 5.0  # advantages are clipped to +- this
    train_learning_rate: float = 3e-4
    num_epochs: int = 25
    model: str = f"{TOY}/shapes/sd"  # a Stable Diffusion pipeline; its UNet is trained
    reward_fn: str = f"{TOY}/shapes/make.py:left_ink"  # FILE:NAME of f(images, prompts, metadata)
    dataset: str = f"{TOY}/shapes/data"  # folder, .jsonl or hub name, with a column `prompt`
    output_dir: str = f"runs/lecture_ddpo__{time.strftime('%Y%m%d-%H%M%S')}"  # a new folder
    seed: int = 1  # for the order of prompts, the noise and the mini-batches
    track: bool = False  # log to Weights & Biases


# %% 1. Sample
def ddim_step(scheduler, prediction, t, x, eta):
    """Mean (b, C, H, W) and standard deviation (b, 1, 1, 1) of x_{t-1}, given x_t at times t (b,).

    a is the share of signal in the variance of x_t, a_prev that of x_{t-1}. The network's
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
    noise = (x - a.sqrt() * image) / (1 - a).sqrt()  # before the image is clamped, as in diffusers
    if config.clip_sample:
        image = image.clamp(-config.clip_sample_range, config.clip_sample_range)
    std = eta * ((1 - a_prev) / (1 - a) * (1 - a / a_prev)).sqrt()
    noise_variance = (1 - a_prev - std**2).clamp(min=0)
    mean = a_prev.sqrt() * image + noise_variance.sqrt() * noise
    return mean, std


def gaussian_logprobs(x, mean, std):
    """(b,) log-density of x (b, C, H, W): -(x - mean)^2 / (2 std^2) - log std - log(2 pi) / 2.

    It is a mean over pixels, not a sum, so that the ratio stays near 1 for images of any size.
    """
    return Normal(mean, std, validate_args=False).log_prob(x).mean((1, 2, 3))


@torch.no_grad()
def sample(policy, scheduler, context, noise, eta):
    """Latents (b, N+1, C, H, W) and their logprobs (b, N), for encoded prompts (b, L, D).

    The noise (b, N+1, C, H, W) is x_N, then z of each step. Nothing else is random.
    """
    x = noise[:, 0]  # (b, C, H, W)
    latents, logprobs = [x], []
    for t, z in zip(scheduler.timesteps, noise[:, 1:].unbind(1)):
        t = t.expand(len(x))  # (b,)
        prediction = policy(x, t, context).sample  # (b, C, H, W)
        mean, std = ddim_step(scheduler, prediction, t, x, eta)
        x = mean + std * z
        latents.append(x)
        logprobs.append(gaussian_logprobs(x, mean, std))
    return torch.stack(latents, 1), torch.stack(logprobs, 1)


@torch.no_grad()
def encode(pipe, texts):
    """(b, L, D) the text encoder's output for prompts; the UNet attends to it."""
    context, _ = pipe.encode_prompt(texts, pipe.device, 1, do_classifier_free_guidance=False)
    return context.float()


@torch.no_grad()
def decode(pipe, x):
    """(b, 3, height, width) images in [0, 1] from latents (b, C, H, W), eight at a time to save
    memory. The toy model's decoder is the identity."""
    parts = (x / pipe.vae.config.scaling_factor).split(8)
    images = torch.cat([pipe.vae.decode(part).sample for part in parts])  # in about [-1, 1]
    return (images.float() / 2 + 0.5).clamp(0, 1)


# %% 4. Loss
def policy_loss(logprobs, old_logprobs, advantages, cliprange):
    """Clipped losses (b,) (PPO, eq. 7), and the ratio.

    The gradient is 0 where the ratio has left the clip range in the direction that A favours. In
    the other direction it is not clipped, and moves the ratio back.
    """
    ratio = (logprobs - old_logprobs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio


# %% Models and data
args = Args() if "get_ipython" in globals() else tyro.cli(Args)  # a notebook has no command line
assert not Path(args.output_dir).exists(), f"output_dir: {args.output_dir} exists already"
device = "cuda" if torch.cuda.is_available() else "cpu"
pipe = StableDiffusionPipeline.from_pretrained(
    args.model, dtype=torch.float32, safety_checker=None, requires_safety_checker=False
).to(device)
policy = pipe.unet  # in evaluation mode: dropout would change the ratio
scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
scheduler.set_timesteps(args.sample_num_steps, device=device)
is_supported = not (scheduler.config.set_alpha_to_one or scheduler.config.thresholding)
assert is_supported, "set_alpha_to_one (see ../ddpo.py) and thresholding are not supported"
optimizer = torch.optim.AdamW(policy.parameters(), lr=args.train_learning_rate, weight_decay=1e-4)
files = args.dataset if args.dataset.endswith(".jsonl") else None  # or a folder, or a hub name
data = load_dataset("json" if files else args.dataset, data_files=files, split="train")
prompts = data.to_list()  # rows: `prompt`, and metadata
file, name = args.reward_fn.rsplit(":", 1)
reward_fn = runpy.run_path(file)[name]


def make_seed(*numbers):
    """One seed from several numbers: the random numbers of a step depend on no other step."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def shuffled(n, seed, number):
    """The numbers 0 to n-1 in a random order, determined by the seed and the number of the pass."""
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


N, b = args.sample_num_steps, args.sample_batch_size
B = b * args.sample_num_batches_per_epoch
mini_batch_size = args.train_batch_size * args.train_gradient_accumulation_steps
passes = range(1 + args.num_epochs * B // len(prompts))
order = [i for number in passes for i in shuffled(len(prompts), args.seed, number)]


def draw_noise(n, generator=None):
    """(n, N+1, C, H, W) the noise of n images: x_N, then z of each step."""
    net = policy.config
    shape = (n, N + 1, net.in_channels, net.sample_size, net.sample_size)
    return torch.randn(shape, generator=generator).to(device)


def draw_examples():
    """(8, 3, height, width) images of the current policy, always from the same noise."""
    noise = draw_noise(8, torch.Generator().manual_seed(args.seed))
    context = encode(pipe, [x["prompt"] for x in (prompts * 8)[:8]])
    latents, _ = sample(policy, scheduler, context, noise, args.sample_eta)
    return decode(pipe, latents[:, -1])


# %% The loop, with the steps of the docstring
wandb.init(project="rlhf", config=vars(args), mode=None if args.track else "disabled")
history = []  # metrics, one dict per epoch
first_examples = draw_examples()
for epoch in (bar := trange(1, args.num_epochs + 1)):
    torch.manual_seed(make_seed(args.seed, epoch))
    parts = []
    for start in range((epoch - 1) * B, epoch * B, b):
        # 1. Sample
        examples = [prompts[i] for i in order[start : start + b]]
        texts = [x["prompt"] for x in examples]
        context = encode(pipe, texts)  # (b, L, D)
        noise = draw_noise(b)  # (b, N+1, C, H, W)
        latents, logprobs = sample(policy, scheduler, context, noise, args.sample_eta)

        # 2. Score
        images = decode(pipe, latents[:, -1])  # (b, 3, height, width)
        scores = reward_fn(images, texts, examples)
        scores = torch.as_tensor(scores).float().to(device)  # (b,)
        parts.append([context, latents, logprobs, scores])
    context, latents, old_logprobs, scores = map(torch.cat, zip(*parts))  # (B, ...) each

    # 3. Advantage
    advantages = (scores - scores.mean()) / (scores.std(correction=0) + 1e-8)  # (B,)
    advantages = advantages.clamp(-args.train_adv_clip_max, args.train_adv_clip_max)

    # 4. Loss, and 5. update
    logs, norms = [], []  # one per forward pass, and one per optimiser step
    for _ in range(args.train_num_inner_epochs):
        batch = torch.randperm(B)
        steps = torch.stack([torch.randperm(N) for _ in range(B)])  # (B, N) an order for each image
        for mini_batch in batch.split(mini_batch_size):
            optimizer.zero_grad()
            for rows in mini_batch.split(args.train_batch_size):  # (b,) numbers of images
                for k in steps[rows].T:  # (b,) number of a step, another one for each image
                    t = scheduler.timesteps[k]  # (b,)
                    x, x_prev = latents[rows, k], latents[rows, k + 1]  # (b, C, H, W) each
                    prediction = policy(x, t, context[rows]).sample  # (b, C, H, W)
                    mean, std = ddim_step(scheduler, prediction, t, x, args.sample_eta)
                    logprobs = gaussian_logprobs(x_prev, mean, std)  # (b,)
                    loss, ratio = policy_loss(
                        logprobs, old_logprobs[rows, k], advantages[rows], args.train_clip_range
                    )
                    (loss.sum() / (len(mini_batch) * N)).backward()  # adds to the gradient
                    approx_kl = 0.5 * (logprobs - old_logprobs[rows, k]) ** 2
                    outside = (ratio - 1).abs() > args.train_clip_range
                    seen = {"loss": loss, "approx_kl": approx_kl, "clipfrac": outside}  # (b,) each
                    logs.append({name: x.detach().float() for name, x in seen.items()})
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            norms.append(norm)
            optimizer.step()

    stats = {name: torch.cat([log[name] for log in logs]).mean().item() for name in seen}
    stats["grad_norm"] = torch.stack(norms).mean().item()
    stats["reward_mean"] = scores.mean().item()
    stats["reward_std"] = scores.std(correction=0).item()
    history.append(stats)
    wandb.log(stats, step=epoch)
    bar.set_postfix_str(f"reward {stats['reward_mean']:.2f}")

# %% The trained pipeline, and eight of its images below eight of the first model's
pipe.save_pretrained(args.output_dir)
images = torch.cat([first_examples, draw_examples()])  # (16, 3, height, width)
images = F.interpolate(images, 128)
images = F.pad(images, (2, 2, 2, 2), value=0.5)  # a frame
pictures = pipe.numpy_to_pil(images.permute(0, 2, 3, 1).cpu().numpy())
file = Path(args.output_dir, "images.png")
make_image_grid(pictures, 2, 8).save(file)
print(file)
for name, first in history[0].items():
    print(f"{name:11s} {first:9.3g} -> {history[-1][name]:9.3g}")
