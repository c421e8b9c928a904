"""A classifier's opinion of a text as the reward: how it rates one of its labels.

  python ppo.py --model gpt2 --bf16 --reward-fn rewards/classifier.py:score

For another classifier, copy this file and change the two names below. A causal model with a single label, such as
reward_model.py leaves, needs no file: give it as --reward-model.
"""

from functools import cache

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL = "lvwerra/distilbert-imdb"  # a folder, or a name on the hub
LABEL = "POSITIVE"  # one of the labels in its config.json; its logit is the reward
BATCH_SIZE = 32  # texts that go through it at once


@cache
def load() -> tuple:
    """Tokenizer, model and the number of the label, at the first call."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(MODEL, truncation_side="left")  # the answer stands at the end
    model = AutoModelForSequenceClassification.from_pretrained(MODEL).to(device)
    labels = model.config.label2id
    assert LABEL in labels, f"{MODEL} has no label {LABEL}; it has {', '.join(labels)}"
    return tokenizer, model, labels[LABEL]


def text_of(prompt: str | list[dict], completion: str | list[dict]) -> str:
    """Both as one text; of messages what they say."""
    if isinstance(prompt, str):
        return prompt + completion
    return "\n".join(message["content"] or "" for message in prompt + completion)


@torch.no_grad()
def score(prompts: list, completions: list, **columns) -> list[float]:
    """The label's logit, for each prompt with its completion."""
    tokenizer, model, label = load()
    texts = [text_of(prompt, completion) for prompt, completion in zip(prompts, completions)]
    scores = []
    for start in range(0, len(texts), BATCH_SIZE):
        batch = tokenizer(texts[start : start + BATCH_SIZE], padding=True, truncation=True, return_tensors="pt")
        scores += model(**batch.to(model.device)).logits[:, label].tolist()
    return scores
