"""A reward model as a reward function. ppo.py needs it only for a model with another tokenizer than the policy's.

python rloo.py --model ./sft --dataset prompts.jsonl --reward-model ./reward_model
REWARD_MODEL=./reward_model python grpo.py --model ./sft --dataset prompts.jsonl --reward-fn rewards/model.py:score
"""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL = os.environ.get("REWARD_MODEL", f"{Path(__file__).resolve().parent.parent}/toy/reward_model")  # or a hub name
BATCH_SIZE = 32  # texts in one forward pass

tokenizer = AutoTokenizer.from_pretrained(MODEL)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
ADDS_EOS = tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id  # some tokenizers write it after each text
model = AutoModelForSequenceClassification.from_pretrained(MODEL, dtype=torch.float32)
if model.config.num_labels != 1 or not hasattr(model, "score"):
    sys.exit(f"error: {MODEL} is not a causal model with one label: see rewards/classifier.py")
model.to("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def score(prompts: list, completions: list, ended: list[bool] | None = None, **columns) -> list[float]:
    """The reward of each prompt with its completion, read at the last token: at EOS, or in a chat where the answer's
    turn ends. An answer without a stop token has no such token here either (TRL does not tell)."""
    bias = getattr(model.config, "reward_bias", 0.0)  # the shift that reward_model.py stores if the model has no bias
    rows = []
    for prompt, completion, has_end in zip(prompts, completions, ended or [True] * len(prompts)):
        if isinstance(prompt, list):
            text = tokenizer.apply_chat_template(prompt + completion, tokenize=False)
            ids = tokenizer(text.rstrip(), add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(prompt + completion)["input_ids"]
            ids = ids if ADDS_EOS else [*ids, tokenizer.eos_token_id]
        rows.append(ids if has_end else ids[:-1])
    scores = []
    for start in range(0, len(rows), BATCH_SIZE):
        part = {"input_ids": rows[start : start + BATCH_SIZE]}
        batch = tokenizer.pad(part, padding_side="right", return_tensors="pt").to(model.device)
        states = model.base_model(**batch).last_hidden_state  # (b, S, D)
        last = batch["attention_mask"].sum(1) - 1  # (b,)
        heads = model.score(states[torch.arange(len(last)), last]).squeeze(1)
        scores += (heads + bias).tolist()
    return scores
