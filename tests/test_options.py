"""An old name, until test_rewards.py does without it."""

from transformers import AutoTokenizer

from sources import ROOT


def chat_tokenizer():
    """The toy tokenizer with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer
