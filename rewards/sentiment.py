"""How friendly a text is, by a rule: the mean polarity of its words in TextBlob's lexicon (`pip install textblob`).

    python grpo.py --model ... --dataset things.jsonl --reward-fn rewards/sentiment.py:polarity

It makes a good gold score: cheap, deterministic, and easy to explain. Unknown words count for nothing, and one word is
as good as ten: "wonderful" alone earns 1, so watch the length of the answers.
"""

from textblob import TextBlob


def polarity(completions: list, **_) -> list[float]:
    """The polarity of each completion, from -1 to 1; 0 if none of its words is in the lexicon."""
    texts = [x if isinstance(x, str) else "".join(message["content"] or "" for message in x) for x in completions]
    return [TextBlob(text).sentiment.polarity for text in texts]
