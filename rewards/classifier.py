"""A classifier as a reward: its logit of one label.

  python ppo.py --model gpt2 --bf16 --reward-fn rewards/classifier.py:score

For another classifier, copy this file and change the two names below. A causal model with a single label, such as one
from reward_model.py, needs no file: pass it as --reward-model.
"""

from functools import cache

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL = "lvwerra/distilbert-imdb"  # a folder, or a name on the hub
LABEL = "POSITIVE"  # one of the labels in its config.json; its logit is the reward
BATCH_SIZE = 32  # texts in one forward pass


@cache
def load() -> tuple:
    """Tokenizer, model and the index of the label; loaded at the first call."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(MODEL, truncation_side="left")  # the answer is at the end
    model = AutoModelForSequenceClassification.from_pretrained(MODEL).to(device)
    labels = model.config.label2id
    assert LABEL in labels, f"{MODEL} has no label {LABEL}; it has {', '.join(labels)}"
    return tokenizer, model, labels[LABEL]


def text_of(prompt: str | list[dict], completion: str | list[dict]) -> str:
    """Prompt and completion as one text; of messages, their contents."""
    if isinstance(prompt, str):
        return prompt + completion
    return "\n".join(message["content"] or "" for message in prompt + completion)


@torch.no_grad()
def score(prompts: list, completions: list, **columns) -> list[float]:
    """The logit of the label for each prompt with its completion."""
    tokenizer, model, label = load()
    texts = [text_of(prompt, completion) for prompt, completion in zip(prompts, completions)]
    scores = []
    for start in range(0, len(texts), BATCH_SIZE):
        batch = tokenizer(texts[start : start + BATCH_SIZE], padding=True, truncation=True, return_tensors="pt")
        scores += model(**batch.to(model.device)).logits[:, label].tolist()
    return scores
