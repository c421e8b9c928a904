"""Models of a few thousand weights, and what they are to read."""

from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ppo

VOCAB = 17
STOP = 3
PAD = 0
SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=8, num_key_value_heads=1)
SIZES |= dict(intermediate_size=16, max_position_embeddings=64, pad_token_id=PAD, bos_token_id=1, eos_token_id=1)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
WINDOW = dict(sliding_window=6)
PLAIN = "falcon gemma gpt2 gpt_neox granite llama olmo phi phi3 qwen2 qwen3 smollm3 stablelm starcoder2".split()
LINEAR = {f"linear_{name}": 2 for name in ("num_value_heads", "num_key_heads")}
LINEAR |= dict(linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, moe_intermediate_size=16)
ARCHITECTURES = dict.fromkeys(PLAIN, {}) | {  # those that the guide names
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "gpt_oss": EXPERTS | WINDOW,
    "gptj": dict(rotary_dim=4),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "mistral": WINDOW,
    "mixtral": EXPERTS,
    "qwen3_next": LINEAR | dict(layer_types=["linear_attention", "full_attention"], num_experts_per_tok=2),
    "opt": dict(ffn_dim=16, word_embed_proj_dim=8, do_layer_norm_before=False),
}


def tiny_model(kind, auto_class=AutoModelForCausalLM, **settings):
    """A random model whose weights are large enough for its distributions to be far from uniform."""
    torch.manual_seed(0)
    settings = SIZES | {"vocab_size": VOCAB} | ARCHITECTURES[kind] | settings
    if kind == "falcon":
        del settings["head_dim"]  # it computes its own
    model = auto_class.from_config(AutoConfig.for_model(kind, **settings)).eval()
    for p in model.parameters():
        if p.dim() == 2:
            p.data.mul_(4)
    return model


def left_padded_prompts(B=6, P=7):
    """(B, P) random prompts of 1 to P tokens, and their mask."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(4, VOCAB, (B, P), generator=generator)
    mask = torch.arange(P) >= torch.tensor([0, 6, 3, 5, 1, 2])[:B, None]
    return prompts.masked_fill(~mask, PAD), mask


def uniforms(B=6, T=12):
    return torch.rand(B, T, generator=torch.Generator().manual_seed(0))


def tiny_rollout(policy, stop=STOP, pad=PAD):
    """Responses to six prompts at temperature 0.9."""
    prompts, mask = left_padded_prompts()
    policy.stop_token_ids = [stop]
    policy.tokenizer = SimpleNamespace(pad_token_id=pad)
    drawn = ppo.sample(policy, prompts, mask, uniforms(), 0.9)
    return ppo.Rollout(prompts, mask, *drawn, examples=list("abcdef"))
