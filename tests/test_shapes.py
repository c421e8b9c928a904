"""toy/shapes: its rewards."""

import pytest
import torch
from shapes import PROMPTS, make


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
