"""toy/shapes: its images, its rewards, and a Stable Diffusion that loads and draws."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

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


# --- Files


def test_prompts_are_made_again_byte_for_byte(tmp_path):
    make.write_data(tmp_path)
    assert (tmp_path / "train.jsonl").read_bytes() == (SHAPES / "data/train.jsonl").read_bytes()
    assert [json.loads(line)["prompt"] for line in open(SHAPES / "data/train.jsonl")] == PROMPTS


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
