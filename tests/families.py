"""Ten families of chat models, tiny and random: their architectures, special tokens and chat templates.

The templates say in few words what those of the models write for conversations of texts. The first six were compared
with the files that TRL has; those of Mistral, SmolLM 3, OLMo 2 and Granite are written after the models'
documentation, with shorter system messages.
"""

from collections import namedtuple
from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
Family = namedtuple("Family", "kind bos eos stops special template")  # as in the table below
LLAMA_3 = """
{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ '\n\n' }}
{{- m.content | trim }}<|eot_id|>{% endfor %}
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}
"""
QWEN_2_5 = """
{% if messages[0].role != 'system' %}
<|im_start|>system{{ '\n' }}You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>{{ '\n' }}
{%- endif %}
{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>{{ '\n' }}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}
"""
QWEN_3 = """
{% set asked = messages | map(attribute='role') | list %}
{% for m in messages %}<|im_start|>{{ m.role + '\n' }}
{%- if m.role == 'assistant' %}
{%- set thoughts = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}
{%- if 'user' not in asked[loop.index0:] and (loop.last or thoughts) %}
{{- '<think>\n' + thoughts + '\n</think>\n\n' }}{% endif %}
{{- m.content.split('</think>')[-1].lstrip('\n') }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>{{ '\n' }}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}
"""
GEMMA_3 = """
{{ bos_token }}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if system else messages) %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (system if loop.first else '') }}
{{- m.content | trim }}<end_of_turn>{{ '\n' }}{% endfor %}
{% if add_generation_prompt %}<start_of_turn>model{{ '\n' }}{% endif %}
"""
PHI_3_5 = """
{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}
"""
GPT_OSS = """
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.{{ '\n' }}
{{- 'Knowledge cutoff: 2024-06\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: medium\n\n' }}
{{- '# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}<|start|>developer<|message|>{{ '# Instructions\n\n' + m.content + '\n\n' }}<|end|>
{%- elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}<|start|>assistant{% endif %}
"""
MISTRAL = """
{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- else %} {{ m.content + eos_token }}{% endif %}{% endfor %}
"""
SMOLLM_3 = """
<|im_start|>system{{ '\n## Metadata\n\nToday Date: ' + strftime_now('%d %B %Y') + '\nReasoning Mode: /think\n' }}
{{- '\n## Custom Instructions\n\n' + (messages[0].content if messages[0].role == 'system' else 'Think first.') }}
{{- '\n\n<|im_end|>\n' }}{% for m in messages if m.role != 'system' %}
<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>{{ '\n' }}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}
"""
OLMO_2 = """
{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}
{{- eos_token if m.role == 'assistant' }}{{ '\n' if m.role != 'assistant' or not loop.last }}{% endfor %}
{% if add_generation_prompt %}<|assistant|>{{ '\n' }}{% endif %}
"""
GRANITE = """
{% if messages[0].role != 'system' %}
<|start_of_role|>system<|end_of_role|>You are Granite, developed by IBM.<|end_of_text|>{{ '\n' }}{% endif %}
{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>{{ '\n' }}{% endfor %}
{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}
"""
TEMPLATES = [LLAMA_3, QWEN_2_5, QWEN_3, GEMMA_3, PHI_3_5, GPT_OSS, MISTRAL, SMOLLM_3, OLMO_2, GRANITE]
# The kind of model; BOS, with a + if every text begins with it; EOS; what the generation config names; other tokens
TABLE = """
llama 3  | llama   | <|begin_of_text|>+ | <|eot_id|>      | <|eot_id|> <|end_of_text|> | <|start_header_id|> <|end_header_id|>
qwen 2.5 | qwen2   |                    | <|im_end|>      | <|im_end|> <|endoftext|>   | <|im_start|>
qwen 3   | qwen3   |                    | <|im_end|>      | <|im_end|> <|endoftext|>   | <|im_start|>
gemma 3  | gemma3_text | <bos>+         | <eos>           | <eos> <end_of_turn>        | <start_of_turn>
phi 3.5  | phi3    | <s>                | <|endoftext|>   | <|end|> <|assistant|> <|endoftext|> | <|system|> <|user|>
gpt-oss  | gpt_oss | <|startoftext|>    | <|return|>      | <|return|> <|endoftext|> <|call|> | <|start|> <|channel|> <|message|> <|end|>
mistral  | mistral | <s>+               | </s>            | </s>                       | [INST] [/INST]
smollm 3 | smollm3 |                    | <|im_end|>      | <|im_end|>                 | <|im_start|> <|end_of_text|>
olmo 2   | olmo2   | <|endoftext|>      | <|endoftext|>   | <|endoftext|>              | <|system|> <|user|> <|assistant|>
granite  | granite | <|end_of_text|>    | <|end_of_text|> | <|end_of_text|>            | <|start_of_role|> <|end_of_role|>
"""
ROWS = [[cell.strip() for cell in line.split(" | ")] for line in TABLE.strip().splitlines()]
FAMILIES = {name: Family(*row, template.strip()) for (name, *row), template in zip(ROWS, TEMPLATES, strict=True)}
SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=8, num_key_value_heads=1)
SIZES |= dict(intermediate_size=16, max_position_embeddings=512, num_local_experts=2, num_experts_per_tok=1)


def make_tokenizer(name: str) -> AutoTokenizer:
    """The toy world's, with the special tokens and the chat template of a family."""
    family = FAMILIES[name]
    bos = family.bos.removesuffix("+")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft", bos_token=bos or None, eos_token=family.eos)
    others = f"{family.stops} {family.special}".split()
    tokenizer.add_special_tokens({"additional_special_tokens": others})
    tokenizer.chat_template = family.template
    if bos != family.bos:
        pair = (bos, tokenizer.convert_tokens_to_ids(bos))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[pair])
    return tokenizer


def save_family(name: str, folder: Path) -> tuple[str, str | None]:
    """The folders of a policy and of a reward model, if the library has one of this kind."""
    family = FAMILIES[name]
    tokenizer = make_tokenizer(name)
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id, "pad_token_id": 1}
    config = AutoConfig.for_model(family.kind, vocab_size=len(tokenizer), **ids, **SIZES)
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(config)
    policy.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(family.stops.split())
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    if family.kind == "granite":
        return str(folder / "policy"), None
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    for p in model.parameters():
        if p.dim() == 2:
            p.data.mul_(4)  # so that rewards differ
    model.save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    return str(folder / "policy"), str(folder / "reward")
