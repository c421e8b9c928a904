"""The world of shapes, for the tests of ddpo.py: chains and images to begin with."""

import torch
from sources import ROOT, load
from torch import Tensor

import ddpo

make = load("toy/shapes/make.py", "make_shapes")
TOY = ROOT / "toy/shapes/sd"
UNET = "unet/diffusion_pytorch_model.safetensors"
PROMPTS = list(make.TEMPLATES)


def close(a, b, **tolerance) -> None:
    """assert_close, of any numbers in any precision."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, **{"rtol": 1e-5, "atol": 1e-6} | tolerance)


def random(*shape: int, seed: int = 0, **options) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def flat(parameters) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def trained(chain: ddpo.Chain) -> list[Tensor]:
    return [p for p in chain.policy.parameters() if p.requires_grad]


def rows(prompts: list[str]) -> list[dict]:
    return [{"prompt": prompt} for prompt in prompts]


def toy_chain(model=TOY, moved: float = 0.0, **settings) -> tuple[ddpo.Chain, ddpo.Args]:
    """A chain, whose policy may have been moved from the first model, and its settings."""
    few = dict(sample_num_steps=4, train_gradient_accumulation_steps=1)
    args = ddpo.Args(model=str(model), device="cpu", **few | settings)
    torch.manual_seed(1)
    chain = ddpo.load_chain(args)
    with torch.no_grad():
        for p in trained(chain):
            p += moved * torch.randn_like(p)
    return chain, args


def step(chain: ddpo.Chain, x: Tensor, t: Tensor, context: Tensor, args: ddpo.Args) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the images before x, all at time t, under the policy."""
    t = t.expand(len(x))
    return ddpo.ddim_step(chain.pipe.scheduler, chain.predict(x, t, context, args), t, x, args.sample_eta)


def toy_rollout(chain: ddpo.Chain, args: ddpo.Args, images: int = 8) -> ddpo.Rollout:
    """Images with made-up advantages."""
    torch.manual_seed(2)
    examples = rows([PROMPTS[i % 4] for i in range(images)])
    rollout = ddpo.sample_images(chain, examples, chain.draw_noise(images), args)
    rollout.scores = torch.linspace(-1, 1, images)
    rollout.advantages = torch.linspace(-1.5, 1, images).sin()
    return rollout
