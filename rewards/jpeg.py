"""Two rewards for ddpo.py: how small or how large an image is as a JPEG (Black et al. 2023, sec. 5.1).

  python ddpo.py --model runwayml/stable-diffusion-v1-5 --reward-fn rewards/jpeg.py:compressibility

Such images have no use, but the reward is exact, fast, and easy to see: compressible images lose their background,
incompressible images fill with detail.
"""

from io import BytesIO

from PIL import Image
from torch import Tensor


def incompressibility(images: Tensor, prompts: list[str], metadata: list[dict]) -> list[float]:
    """Kilobytes of each image (B, 3, H, W) in [0, 1] as a JPEG of quality 95."""
    pixels = (255 * images).round().byte().permute(0, 2, 3, 1).cpu().numpy()  # (B, H, W, 3)
    sizes = []
    for image in pixels:
        file = BytesIO()
        Image.fromarray(image).save(file, format="JPEG", quality=95)
        sizes.append(file.tell() / 1000)
    return sizes


def compressibility(images: Tensor, prompts: list[str], metadata: list[dict]) -> list[float]:
    """Minus the kilobytes of each image (B, 3, H, W) as a JPEG."""
    return [-size for size in incompressibility(images, prompts, metadata)]
