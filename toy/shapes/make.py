"""Makes the world of shapes: a very small Stable Diffusion that draws four shapes in 8 x 8 pixels, and its rewards.

    python toy/shapes/make.py     # writes toy/shapes/data/ and trains toy/shapes/sd/ (two minutes on one CPU core)

An image has one shape, white ink on black: `ink` is the brightness of a pixel, from 0 to 1. The place and the
brightness of the shape are random. The prompt names the shape, and reaches the UNet as in Stable Diffusion: through a
tokenizer, a text encoder and cross-attention. The autoencoder is the identity: the diffusion is in 2 * ink - 1.
"""

import json
import string
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

HERE = Path(__file__).resolve().parent
SIZE = 8  # pixels per side
FAINTEST = 0.4  # ink of the faintest shape; the brightest has 1
BATCHES, BATCH_SIZE, LEARNING_RATE = 1_500, 128, 2e-3
NO_PROMPT = 0.1  # fraction of the training images without a prompt, for classifier-free guidance

# ---------------------------------------------------------------------------------------------------------------------
# The shapes


def everywhere(shape: Tensor) -> Tensor:
    """Images (n, 8, 8) of a shape (h, w) at all of its places."""
    down, right = SIZE - shape.shape[0], SIZE - shape.shape[1]
    return torch.stack([F.pad(shape, (x, right - x, y, down - y)) for y in range(down + 1) for x in range(right + 1)])


PLUS = torch.zeros(5, 5)
PLUS[2, :] = PLUS[:, 2] = 1
TEMPLATES = {
    "a vertical bar": everywhere(torch.ones(6, 2)),
    "a horizontal bar": everywhere(torch.ones(2, 6)),
    "a square": everywhere(torch.ones(4, 4)),
    "a cross": everywhere(PLUS),
}


def draw(prompts: list[str], rng: torch.Generator) -> Tensor:
    """Images (B, 1, 8, 8) of the shapes in the prompts, as ink in [0, 1]."""
    places = [TEMPLATES[prompt] for prompt in prompts]
    images = torch.stack([place[torch.randint(len(place), (), generator=rng)] for place in places])
    ink = FAINTEST + (1 - FAINTEST) * torch.rand(len(prompts), 1, 1, generator=rng)
    return (ink * images)[:, None]


# ---------------------------------------------------------------------------------------------------------------------
# The rewards: images (B, C, H, W) in [0, 1], prompts and metadata -> one number per image


def left_ink(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
    """10 x (mean ink of the left half - mean ink of the right half): high for a bright shape on the left."""
    left, right = images.float().mean(1).chunk(2, dim=-1)
    return 10 * (left - right).mean((1, 2))


def little_ink(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
    """-10 x mean ink: an example of a wrong reward, since the best image is blank."""
    return -10 * images.float().mean((1, 2, 3))


def likeness(images: Tensor) -> Tensor:
    """(B, 4) similarity of each image to each shape: 1 - squared error / squared ink, but at least 0.

    It is that of the best place and ink. The ink is at least that of the faintest shape, so that a blank image is
    similar to no shape.
    """
    pixels = images.float().mean(1).flatten(1)
    energy = pixels.square().sum(1, keepdim=True)
    scores = []
    for places in TEMPLATES.values():
        masks = places.flatten(1)
        area = masks.sum(1)
        overlap = pixels @ masks.T
        ink = (overlap / area).clamp(FAINTEST, 1)
        error = energy - 2 * ink * overlap + ink.square() * area
        scores.append((1 - error / energy.clamp(min=1e-8)).amax(1))
    return torch.stack(scores, 1).clamp(min=0)


def same_shape(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
    """The gold score: the similarity of each image to the shape in its prompt, in [0, 1]."""
    names = list(TEMPLATES)
    return likeness(images)[range(len(prompts)), [names.index(prompt) for prompt in prompts]]


# ---------------------------------------------------------------------------------------------------------------------
# The model


def identity_vae():
    """An autoencoder whose decoder returns the latents in three channels. The encoder is not used.

    StableDiffusionPipeline requires one. AutoencoderTiny's decoder begins with 3 tanh(x / 3), which does not change
    small numbers; that is why there is a scaling factor. Then follow a convolution, a ReLU, and a convolution to an
    image in [0, 1].
    """
    from diffusers import AutoencoderTiny

    vae = AutoencoderTiny(
        encoder_block_out_channels=(2,),
        decoder_block_out_channels=(2,),
        num_encoder_blocks=(0,),
        num_decoder_blocks=(0,),
        latent_channels=1,
        scaling_factor=1024.0,
    ).requires_grad_(False)
    for parameter in vae.parameters():
        parameter.zero_()
    into, _, out = vae.decoder.layers
    into.weight[:, 0, 1, 1] = torch.tensor([1024.0, -1024.0])  # x = relu(x) - relu(-x)
    out.weight[:, :, 1, 1] = torch.tensor([0.5, -0.5])
    out.bias[:] = 0.5
    return vae


def make_pipeline():
    """An untrained Stable Diffusion in pixel space; the UNet has 0.18M parameters, and attention at 4 x 4 pixels."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(1)
    characters = string.ascii_lowercase + string.digits + string.punctuation
    tokens = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{c}</w>" for c in characters)]  # </w> ends a word
    tokenizer = CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=24)
    text = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=24,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    unet = UNet2DConditionModel(
        sample_size=SIZE,
        in_channels=1,
        out_channels=1,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        mid_block_type="UNetMidBlock2DCrossAttn",
        up_block_types=("UpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
    )
    scheduler = DDIMScheduler(beta_start=1e-3, beta_end=0.02, steps_offset=1, set_alpha_to_one=False, clip_sample=False)
    return StableDiffusionPipeline(
        text_encoder=CLIPTextModel(text),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        vae=identity_vae(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


@torch.no_grad()
def embed(pipeline, prompts: list[str]) -> Tensor:
    """The text encoder's output (B, 24, 32)."""
    ids = pipeline.tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    return pipeline.text_encoder(ids)[0]


def train(pipeline) -> None:
    """Trains the UNet to predict the noise in noisy images; the text encoder keeps its random weights."""
    from tqdm import trange

    rng = torch.Generator().manual_seed(1)
    names = list(TEMPLATES)
    embeddings = embed(pipeline, [*names, ""])
    optimizer = torch.optim.Adam(pipeline.unet.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BATCHES)
    bar = trange(BATCHES)
    for _ in bar:
        kinds = torch.randint(len(names), (BATCH_SIZE,), generator=rng)
        images = 2 * draw([names[kind] for kind in kinds], rng) - 1
        kinds[torch.rand(BATCH_SIZE, generator=rng) < NO_PROMPT] = len(names)
        noise = torch.randn(images.shape, generator=rng)
        t = torch.randint(pipeline.scheduler.config.num_train_timesteps, (BATCH_SIZE,), generator=rng)
        noisy = pipeline.scheduler.add_noise(images, noise, t)
        loss = F.mse_loss(pipeline.unet(noisy, t, embeddings[kinds]).sample, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.4f}")


def write_data(folder: Path = HERE / "data") -> None:
    """Writes the prompts, one per row."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in TEMPLATES)
    (folder / "train.jsonl").write_text(lines, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_data()
    pipeline = make_pipeline()
    train(pipeline)
    pipeline.save_pretrained(HERE / "sd")
