"""A reward model as a reward function.

It reads the policy's tokens if its own tokenizer and chat template make the same tokens of the prompt; else the texts.

python rloo.py --model ./sft --dataset prompts.jsonl --reward-model ./reward_model
REWARD_MODEL=./reward_model python grpo.py --model ./sft --dataset prompts.jsonl --reward-fn rewards/model.py:score
"""

import os
import sys
from functools import cache
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

MODEL = os.environ.get("REWARD_MODEL", f"{Path(__file__).resolve().parent.parent}/toy/reward_model")  # or a hub name
BATCH_SIZE = 32  # texts in one forward pass
PLACEHOLDER = "an answer"


def check() -> None:
    """Exits if this is no causal model with one label. Loads no weights."""
    config = AutoConfig.from_pretrained(MODEL)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    if config.num_labels != 1 or not hasattr(model, "score"):
        sys.exit(f"error: {MODEL} is not a causal model with one label: see rewards/classifier.py")


@cache
def load() -> tuple:
    """Tokenizer and model, loaded at the first call."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)  # false without a GPU
    dtype = torch.bfloat16 if has_bfloat16 else torch.get_default_dtype()  # half the memory, and faster
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, dtype=dtype)
    model.score.to(torch.get_default_dtype())  # bfloat16 is too coarse for a reward
    return tokenizer, model.to("cuda" if torch.cuda.is_available() else "cpu")


@cache
def turn_end() -> tuple[str, str]:
    """What the chat template writes behind an answer, and its part that ends the answer: up to the first added token,
    such as <|im_end|>; EOS if it has none. An answer could hold these words, so a placeholder stands for it."""
    tokenizer, _ = load()
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PLACEHOLDER}]
    behind = tokenizer.apply_chat_template(talk, tokenize=False).rpartition(PLACEHOLDER)[2]
    ends = [behind.index(token) + len(token) for token in tokenizer.get_added_vocab() if token in behind]
    return behind, behind[: min(ends)] if ends else tokenizer.eos_token


@cache
def adds_eos() -> bool:
    """Whether the tokenizer writes EOS after each text, as some do."""
    tokenizer, _ = load()
    return tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id


@cache
def last_id(is_chat: bool) -> int:
    """The token that ends a completion."""
    tokenizer, _ = load()
    return tokenizer(turn_end()[1], add_special_tokens=False)["input_ids"][-1] if is_chat else tokenizer.eos_token_id


def encode(text: str) -> list[int]:
    """The tokens of a text that may go on."""
    tokenizer, _ = load()
    ids = tokenizer(text)["input_ids"]
    return ids[:-1] if adds_eos() else ids


def encode_prompt(prompt: str | list, options: dict) -> list[int]:
    """The tokens of a prompt, up to where a completion begins."""
    tokenizer, _ = load()
    if isinstance(prompt, str):
        return encode(prompt)
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_both(prompt: str | list, completion: str | list, has_end: bool, options: dict) -> list[int]:
    """The tokens of a prompt with its completion, up to the token that ends it, if it has one."""
    tokenizer, _ = load()
    if isinstance(prompt, str):
        return encode(prompt + completion) + [tokenizer.eos_token_id] * has_end
    behind, end = turn_end()
    text = tokenizer.apply_chat_template(prompt + completion, tokenize=False, **options).removesuffix(behind)
    return tokenizer(text + end * has_end, add_special_tokens=False)["input_ids"]


def are_own(
    prompt: str | list, completion: str | list, ids: list[int], new: list[int], ended: bool, options: dict
) -> bool:
    """Whether the policy's tokens of a prompt, and the new ones of its completion, are the same texts here, with the
    same end. An end that is no added token, such as a full stop, was chosen for the run, and is read."""
    tokenizer, _ = load()
    is_chat = isinstance(prompt, list)
    if ended and new[-1] != last_id(is_chat) and new[-1] in tokenizer.added_tokens_decoder:
        return False
    text = completion[0]["content"] if is_chat else completion
    is_same = tokenizer.decode(new, skip_special_tokens=True).strip() == text.strip()
    return is_same and encode_prompt(prompt, options) == ids


@torch.no_grad()
def score(prompts: list, completions: list, ended: list[bool] | None = None, **columns) -> list[float]:
    """The reward of each prompt with its completion, read at the last token: at EOS, or in a chat where the answer's
    turn ends. An answer without a stop token has no such token here either (TRL does not tell)."""
    tokenizer, model = load()
    if isinstance(prompts[0], list) and not tokenizer.chat_template:
        sys.exit(f"error: the rows are messages, but {MODEL} has no chat template: give another reward")
    bias = getattr(model.config, "reward_bias", 0.0)  # the shift that reward_model.py stores if the model has no bias
    rows = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions)):
        options = {"tools": columns["tools"][i]} if "tools" in columns else {}
        options |= (columns["chat_template_kwargs"][i] or {}) if "chat_template_kwargs" in columns else {}
        has_end = ended[i] if ended else True
        ids, new = (columns[name][i] if name in columns else [] for name in ("prompt_ids", "completion_ids"))
        if new and are_own(prompt, completion, ids, new, has_end, options):
            rows.append(ids + new)
        else:
            rows.append(encode_both(prompt, completion, has_end, options))
    longest = max(map(len, rows))
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", longest)
    if longest > limit:
        sys.exit(f"error: a prompt and its answer have {longest} tokens, but {MODEL} reads {limit}")
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # to save padding
    scores = [0.0] * len(rows)
    for start in range(0, len(rows), BATCH_SIZE):
        some = order[start : start + BATCH_SIZE]
        options = {"padding_side": "right", "return_attention_mask": True, "return_tensors": "pt"}
        batch = tokenizer.pad({"input_ids": [rows[i] for i in some]}, **options).to(model.device)
        states = model.base_model(**batch).last_hidden_state  # (b, S, D)
        last = batch["attention_mask"].sum(1) - 1  # (b,)
        heads = model.score(states[torch.arange(len(last)), last].to(model.score.weight)).squeeze(1)
        for i, reward in zip(some, (heads + bias).tolist()):
            scores[i] = reward
    return scores


check()
reward_model = score  # the name in --reward-fn of the scripts that have --reward-model
