"""The matrix products that an update cannot do without, timed alone: each prompt and each response read once.

    python benchmarks/products.py --prompt 200 --response 24      # SmolLM2's size, 64 responses in groups of 8

An update needs, for each of its tokens and each weight matrix, one product forward and two backward (for the input and
for the weight). This program times just these products, on tensors of the same shapes and of one micro-batch's length,
in the same type. Attention, norms, the optimiser, sampling, and memory traffic come on top.
"""

import argparse
import time

import torch
from torch import nn

LAYER = {"qkv": (576, 1728), "attention output": (576, 576), "MLP up": (576, 2304), "MLP down": (2304, 576)}
NUM_LAYERS = 30
HEAD = (576, 49152)


def seconds_of(shape: tuple[int, int], tokens: int, dtype: torch.dtype, repeats: int = 3) -> float:
    """The least time of the three products of a weight matrix with so many tokens."""
    layer = nn.Linear(*shape, bias=False, dtype=dtype)
    x = torch.randn(tokens, shape[0], dtype=dtype, requires_grad=True)
    gradient = torch.randn(tokens, shape[1], dtype=dtype)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        layer(x).backward(gradient)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    """Prints the seconds, with each prompt read once and once for each response."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=40, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=24, help="tokens of a response")
    parser.add_argument("--batch", type=int, default=64, help="responses of an update")
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--rows", type=int, default=16, help="responses of a micro-batch")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 in place of float32")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    parts = args.batch / args.rows
    for name, prompts in (("each prompt once", args.rows // args.group), ("each row whole", args.rows)):
        tokens = prompts * args.prompt + args.rows * args.response
        layers = NUM_LAYERS * sum(seconds_of(shape, tokens, dtype) for shape in LAYER.values())
        head = seconds_of(HEAD, args.rows * args.response, dtype)
        seconds = parts * (layers + head)
        print(f"{name}: {seconds:.2f} s for {parts * tokens:.0f} tokens on {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
