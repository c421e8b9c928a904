"""Models of a few thousand weights, and what they are to read."""

from copy import deepcopy
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, Qwen2Config

import ppo

VOCAB = 17
STOP = 3
PAD = 0
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    pad_token_id=PAD,
)
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=PAD),
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SMALL, num_key_value_heads=2),
    "gpt_neox": GPTNeoXConfig(**SMALL),
}


def tiny_model(kind: str, auto_class: type = AutoModelForCausalLM, **settings) -> nn.Module:
    """A random model whose weights are large enough for its distributions to be far from uniform."""
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[kind])
    for name, value in settings.items():
        setattr(config, name, value)
    model = auto_class.from_config(config).eval()
    for p in model.parameters():
        if p.dim() == 2:
            p.data.mul_(4)
    return model


def left_padded_prompts(B: int = 6, P: int = 7) -> tuple[Tensor, Tensor]:
    """(B, P) random prompts of 1 to P tokens, and their mask."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(4, VOCAB, (B, P), generator=generator)
    mask = torch.arange(P) >= torch.tensor([0, 6, 3, 5, 1, 2])[:B, None]
    return prompts.masked_fill(~mask, PAD), mask


def uniforms(B: int = 6, T: int = 12) -> Tensor:
    return torch.rand(B, T, generator=torch.Generator().manual_seed(0))


def tiny_rollout(policy: nn.Module, stop: int = STOP, pad: int = PAD) -> ppo.Rollout:
    """Responses to six prompts at temperature 0.9."""
    prompts, mask = left_padded_prompts()
    policy.stop_token_ids = [stop]
    policy.tokenizer = SimpleNamespace(pad_token_id=pad)
    drawn = ppo.sample(policy, prompts, mask, uniforms(), 0.9)
    return ppo.Rollout(prompts, mask, *drawn, examples=list("abcdef"))


def logits_of(policy: nn.Module, rollout: ppo.Rollout) -> Tensor:
    """(B, T, V) at temperature 1, without gradient."""
    with torch.no_grad():
        return ppo.response_forward(policy, rollout, 1.0)[0]
