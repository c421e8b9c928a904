"""toy/shapes: its images, its rewards, and a Stable Diffusion that loads and draws."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SHAPES = Path(__file__).resolve().parent.parent / "toy/shapes"
spec = importlib.util.spec_from_file_location("shapes_make", SHAPES / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)
PROMPTS = list(make.TEMPLATES)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def pipeline():
    diffusers = pytest.importorskip("diffusers")
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(SHAPES / "sd", safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


# --- Images


def test_images_are_the_same_from_the_same_seed():
    first = make.draw(PROMPTS * 8, seeded(1))
    assert first.shape == (32, 1, 8, 8)
    assert torch.equal(first, make.draw(PROMPTS * 8, seeded(1)))
    assert not torch.equal(first, make.draw(PROMPTS * 8, seeded(2)))


@pytest.mark.parametrize(
    ("prompt", "area", "height", "width", "places"),
    [
        ("a vertical bar", 12, 6, 2, 21),
        ("a horizontal bar", 12, 2, 6, 21),
        ("a square", 16, 4, 4, 25),
        ("a cross", 9, 5, 5, 16),
    ],
)
def test_an_image_has_one_shape_of_one_ink_anywhere(prompt, area, height, width, places):
    seen = set()
    images = make.draw([prompt] * 400, seeded())[:, 0]
    for image in images:
        y, x = image.nonzero(as_tuple=True)
        assert len(y) == area
        assert image[y, x].unique().numel() == 1
        assert (y.max() - y.min() + 1, x.max() - x.min() + 1) == (height, width)
        seen.add((y.min().item(), x.min().item()))
    inks = images.amax((1, 2))
    assert len(seen) == places
    assert 0.4 <= inks.min() < 0.42
    assert 0.98 < inks.max() <= 1


# --- Rewards


def reward(function, images, prompt="a cross"):
    return function(images=images, prompts=[prompt] * len(images), metadata=[{}] * len(images))


@pytest.mark.parametrize("channels", [1, 3])
def test_ink(channels):
    """All ink on the left, on the right, everywhere, nowhere; one pixel in each half."""
    images = torch.zeros(6, channels, 8, 8)
    images[0, :, :, :4] = images[1, :, :, 4:] = images[2] = 1
    images[4, :, 2, 3] = images[5, :, 2, 4] = 1
    assert reward(make.left_ink, images).tolist() == [10, -10, 0, 0, 10 / 32, -10 / 32]
    assert reward(make.little_ink, images).tolist() == [-5, -5, -10, 0, -10 / 64, -10 / 64]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_perfect_shape_is_its_own_at_every_place_and_ink(prompt):
    for ink in (0.4, 0.7, 1.0):
        images = ink * make.TEMPLATES[prompt][:, None]
        torch.testing.assert_close(reward(make.same_shape, images, prompt), torch.ones(len(images)))
        for other in set(PROMPTS) - {prompt}:
            assert reward(make.same_shape, images, other).max() < 0.8


def test_what_is_no_shape():
    """Blank, full, noise, faint; and a cross less and less visible in noise."""
    noise = torch.rand(64, 1, 8, 8, generator=seeded())
    cross = make.draw(["a cross"] * 64, seeded())
    for prompt in PROMPTS:
        assert reward(make.same_shape, torch.zeros(1, 1, 8, 8), prompt) == 0
        assert reward(make.same_shape, torch.ones(1, 1, 8, 8), prompt) < 0.3
        assert reward(make.same_shape, noise, prompt).max() < 0.5
        assert reward(make.same_shape, 0.15 * make.TEMPLATES[prompt][:1, None], prompt) == 0
    scores = [reward(make.same_shape, (1 - share) * cross + share * noise).mean() for share in (0, 0.2, 0.5, 1)]
    assert scores == sorted(scores, reverse=True)


# --- Files


def test_prompts_are_made_again_byte_for_byte(tmp_path):
    make.write_data(tmp_path)
    assert (tmp_path / "train.jsonl").read_bytes() == (SHAPES / "data/train.jsonl").read_bytes()
    assert [json.loads(line)["prompt"] for line in open(SHAPES / "data/train.jsonl")] == PROMPTS


def test_the_folder_is_small_and_safe():
    files = [path for path in (SHAPES / "sd").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert sum(path.stat().st_size for path in files) < 1e6


def test_the_folder_is_what_make_py_writes_but_for_the_training(pipeline, tmp_path):
    """To the byte, but for random weights, whose last digits are the processor's."""
    untrained = make.make_pipeline()
    make.embed(untrained, [""])  # a tokenizer's file remembers how it was last called
    untrained.save_pretrained(tmp_path)
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert written == sorted(path.relative_to(SHAPES / "sd") for path in (SHAPES / "sd").rglob("*") if path.is_file())
    written.remove(Path("unet/diffusion_pytorch_model.safetensors"))
    encoder = Path("text_encoder/model.safetensors")
    written.remove(encoder)
    torch.testing.assert_close(load_file(tmp_path / encoder), load_file(SHAPES / "sd" / encoder))
    assert not [str(p) for p in written if (tmp_path / p).read_bytes() != (SHAPES / "sd" / p).read_bytes()]


def test_the_autoencoder_does_nothing(pipeline):
    latents = 3 * torch.randn(4, 1, 8, 8, generator=seeded())
    decoded = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor).sample
    torch.testing.assert_close(decoded, latents.expand(-1, 3, -1, -1), atol=1e-3, rtol=1e-5)


def test_any_prompt_can_be_read(pipeline):
    """Every character has a token, and prompts are far apart for the UNet; what is too long is cut."""
    prompts = [*PROMPTS, "", "a dog", "Two ostriches, at 7!", "x" * 99]
    ids = pipeline.tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    assert ids.shape == (len(prompts), 24)
    assert len(set(map(tuple, ids.tolist()))) == len(prompts)
    assert (ids[6] > 1).sum() == len("Twoostriches,at7!")  # 0 and 1 are the start and the end
    apart = torch.pdist(make.embed(pipeline, prompts).flatten(1))
    assert apart.min() > 1


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_it_draws_what_the_prompt_says(pipeline, guidance):
    """Ten steps with noise, as DDPO samples: nearly every image is most like the shape that was asked for."""
    prompts = PROMPTS * 16
    images = pipeline(
        prompts, num_inference_steps=10, guidance_scale=guidance, eta=1.0, output_type="pt", generator=seeded()
    ).images
    assert images.shape == (64, 3, 8, 8)
    assert images.min() >= 0
    assert images.max() <= 1
    wanted = torch.arange(4).repeat(16)
    assert (make.likeness(images).argmax(1) == wanted).float().mean() > 0.85
    assert make.same_shape(images, prompts, None).mean() > 0.8
