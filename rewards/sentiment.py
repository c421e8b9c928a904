"""How friendly a text is, by a rule: the mean polarity of its words in TextBlob's lexicon (`pip install textblob`).

    python grpo.py --model ... --dataset things.jsonl --reward-fn rewards/sentiment.py:polarity

Good for a gold score, which is cheap, always the same, and easy to explain. Words it does not know count for nothing,
and one word is as good as ten: "wonderful" alone earns 1, so keep an eye on the answers' length.
"""

from textblob import TextBlob


def polarity(completions: list, **_) -> list[float]:
    """From -1 to 1; 0 for a text of which the lexicon knows no word."""
    texts = [x if isinstance(x, str) else "".join(message["content"] or "" for message in x) for x in completions]
    return [TextBlob(text).sentiment.polarity for text in texts]
