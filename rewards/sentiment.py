"""How friendly a text is, by the lexicon of VADER (Hutto & Gilbert 2014; `pip install vaderSentiment==3.3.2`).

    python grpo.py --model ... --dataset things.jsonl --reward-fn rewards/sentiment.py:polarity

The lexicon is cheap, deterministic and easy to explain. A policy can exploit it: every kind word adds to the score, so
"love love love" scores near 1. `friendly_sentence` also asks for an answer that a person could use. It is the gold
score of docs/findings/real.md.
"""

import re
from unicodedata import category, normalize

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

ANALYZER = SentimentIntensityAnalyzer()


def text_of(completion: str | list[dict]) -> str:
    """A completion as a text; of messages, their contents. As a reader sees it: letters are composed (NFC), format
    characters (Cf) are left out, and `’` is the apostrophe of the lexicon."""
    texts = [completion] if isinstance(completion, str) else [message["content"] or "" for message in completion]
    text = "".join(char for char in "".join(texts) if category(char) != "Cf")
    return normalize("NFC", text).replace("’", "'")


def polarity(completions: list, **_) -> list[float]:
    """VADER's compound score of each completion: from -1, hostile, to 1, friendly; 0 if it knows none of the words."""
    return [ANALYZER.polarity_scores(text_of(completion))["compound"] for completion in completions]


def friendly_sentence(completions: list, thing: list[str], **_) -> list[float]:
    """The polarity, less the share of three rules that the answer breaks; from -2 to 1. It should be one sentence, with
    . ! or ? at its end; name the word in the column `thing`; and repeat no word of more than four letters."""
    scores = []
    for completion, polar, topic in zip(completions, polarity(completions), thing, strict=True):
        text = text_of(completion).strip().lower()
        words = re.findall(r"(?:[^\W\d_]|')+", text)
        long_words = [word for word in words if len(word) > 4]
        rules = [
            re.fullmatch(r"[^.!?\n]+[.!?]", text) is not None,
            text_of(topic).lower() in words,
            len(set(long_words)) == len(long_words),
        ]
        scores.append(polar - rules.count(False) / len(rules))
    return scores
