"""rewards/jpeg.py."""

from io import BytesIO

import torch
from PIL import Image

from rewards import jpeg


def test_kilobytes_of_a_jpeg():
    """A plain image is smaller than a smooth one, that than noise; compressibility is the same with the other sign."""
    noise = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    smooth = torch.linspace(0, 1, 64).expand(3, 64, 64)
    plain = torch.full((3, 64, 64), 0.5)
    images = torch.stack([noise, smooth, plain])
    prompts = [""] * 3
    sizes = jpeg.incompressibility(images, prompts, prompts)
    assert len(sizes) == 3
    assert sizes[0] > 2 * sizes[1] > 2 * sizes[2]
    assert jpeg.compressibility(images, prompts, prompts) == [-size for size in sizes]

    file = BytesIO()
    pixels = (255 * noise).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    assert sizes[0] == len(file.getvalue()) / 1000
