"""A reward model as a reward function. It reads the policy's tokens if they are the same texts here; else the texts.

python rloo.py --model ./sft --dataset prompts.jsonl --reward-model ./reward_model
REWARD_MODEL=./reward_model python grpo.py --model ./sft --dataset prompts.jsonl --reward-fn rewards/model.py:score
"""

import os
import sys
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL = os.environ.get("REWARD_MODEL", f"{Path(__file__).resolve().parent.parent}/toy/reward_model")  # or a hub name
BATCH_SIZE = 32  # texts in one forward pass
PLACEHOLDER = "an answer"


@cache
def load() -> tuple:
    """Tokenizer and model."""
    if not Path(MODEL).exists() and Path(MODEL.split("/")[0]).expanduser().is_dir():
        sys.exit(f"error: --reward-model: there is no folder {MODEL}")  # the library would look for it on the hub
    if Path(MODEL, "adapter_config.json").exists():
        sys.exit(f"error: {MODEL} is an adapter: see tools/merge.py")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)  # false without a GPU
    dtype = torch.bfloat16 if has_bfloat16 else torch.get_default_dtype()  # half the memory, and faster
    options = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    model, info = AutoModelForSequenceClassification.from_pretrained(MODEL, **options)
    if model.config.num_labels != 1 or not hasattr(model, "score"):
        sys.exit(f"error: {MODEL} is not a causal model with one label: see rewards/classifier.py")
    if info["missing_keys"]:  # which the library has drawn at random
        sys.exit(f"error: {MODEL} is no reward model: it has no {sorted(info['missing_keys'])[:3]}")
    model.score.to(torch.get_default_dtype())  # bfloat16 is too coarse for a reward
    print(f"the reward model: {MODEL}")
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
def last_id() -> int:
    """The token that ends an answer in a chat."""
    tokenizer, _ = load()
    return tokenizer(turn_end()[1], add_special_tokens=False)["input_ids"][-1]


def encode(text: str) -> list[int]:
    """The tokens of a text that may go on."""
    tokenizer, _ = load()
    ids = tokenizer(text)["input_ids"]
    return ids[:-1] if adds_eos() else ids


def encode_both(prompt: str | list, completion: str | list, has_end: bool, options: dict) -> list[int]:
    """The tokens of a prompt with its completion, up to the token that ends it, if it has one."""
    tokenizer, _ = load()
    if isinstance(prompt, str):
        return encode(prompt + completion) + [tokenizer.eos_token_id] * has_end
    if not tokenizer.chat_template:
        sys.exit(f"error: the rows are messages, but {MODEL} has no chat template: give another reward")
    behind, end = turn_end()
    text = tokenizer.apply_chat_template(prompt + completion, tokenize=False, **options).removesuffix(behind)
    return tokenizer(text + end * has_end, add_special_tokens=False)["input_ids"]


def is_same_prompt(prompt: str | list, ids: list[int], text: str, options: dict) -> bool:
    """Whether this model has the policy's tokens for a prompt. Without a chat template, it reads messages in that of
    the policy, which made the text."""
    tokenizer, _ = load()
    if isinstance(prompt, str):
        return encode(prompt) == ids
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"] == ids


def is_same_completion(completion: str | list, ids: list[int], has_end: bool) -> bool:
    """Whether the policy's tokens of a completion are the same text here, with the same end. An end that is no added
    token, such as a full stop, was chosen for the run."""
    tokenizer, _ = load()
    if None in tokenizer.convert_ids_to_tokens(ids):
        return False
    text, end = completion, tokenizer.eos_token_id
    if isinstance(completion, list):
        text = completion[0]["content"]
        end = last_id() if tokenizer.chat_template else ids[-1]
    if has_end and ids[-1] != end and ids[-1] in tokenizer.added_tokens_decoder:
        return False
    return tokenizer.decode(ids, skip_special_tokens=True).strip() == text.strip()


@torch.no_grad()
def score(prompts: list, completions: list, ended: list[bool] | None = None, **columns) -> list[float]:
    """The reward of each prompt with its completion, read at the last token: at EOS, or in a chat where the answer's
    turn ends. An answer without a stop token has no such token here either (TRL does not tell)."""
    tokenizer, model = load()
    bias = getattr(model.config, "reward_bias", 0.0)  # the shift that reward_model.py stores if the model has no bias
    rows = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions)):
        options = {"tools": columns["tools"][i]} if "tools" in columns else {}
        options |= (columns["chat_template_kwargs"][i] or {}) if "chat_template_kwargs" in columns else {}
        has_end = ended[i] if ended else True
        if "prompt_ids" in columns:
            ids, text, new = (columns[name][i] for name in ("prompt_ids", "prompts_text", "completion_ids"))
            if is_same_completion(completion, new, has_end) and is_same_prompt(prompt, ids, text, options):
                rows.append(ids + new)
                continue
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
        states = model.base_model(**batch, use_cache=False).last_hidden_state  # (b, S, D)
        last = batch["attention_mask"].sum(1) - 1  # (b,)
        heads = model.score(states[torch.arange(len(last)), last].to(model.score.weight)).squeeze(1)
        for i, reward in zip(some, (heads + bias).tolist()):
            scores[i] = reward
    return scores


load()  # now, before anything is sampled
reward_model = score  # the name in --reward-fn of the scripts that have --reward-model
