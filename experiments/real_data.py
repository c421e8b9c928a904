"""docs/findings/real.md: its prompts, in runs/real/data/.

python experiments/real_data.py
"""

import random

from record import ROOT
from texts import write

DATA = ROOT / "runs/real/data"
GOLD = "rewards/sentiment.py:friendly_sentence"
LEXICON = "rewards/sentiment.py:polarity"  # the lexicon of it alone
REWARD_MODEL = "runs/real/reward-model-1"
THINGS = (
    "a river, my bicycle, the moon, a teacher, winter, a violin, bread, a storm, the desert, my neighbour, the post, "
    "a dog, the dentist, Monday, an old house, a garden, "  # those that are not trained on
    "the sea, a train, the library, a cat, coffee, rain, a mountain, the night, a bridge, my sister, a hospital, "
    "music, a market, the forest, a clock, a letter, summer, a farm, the airport, a bus, an island, school, a horse, "
    "my boss, traffic, the theatre, an apple, a war, a wedding, the bank, a bird, fog, my uncle, a hotel, a knife, "
    "homework, the kitchen, an exam, the weather, a broken window"
)
FORMS = (  # requests for an opinion
    "Write one sentence about how you feel about {}.",
    "What do you think about {}? Answer in one sentence.",
    "Tell me in one sentence how you like {}.",
    "Give your opinion of {} in one sentence.",
    "In one sentence, is {} good or bad, and why?",
    "Write a review of {} in one sentence.",
    "Tell a friend about {} in one sentence.",
    "Describe {} with feeling, in one sentence.",
)


def chat(text: str, role: str = "user") -> list[dict]:
    """A conversation of one message, which the scripts put through the model's chat template."""
    return [{"role": role, "content": text}]


def write_sums() -> None:
    """Sums of two numbers below 20; 60 of them, and the same with the numbers exchanged, are not trained on."""
    numbers = range(2, 20)
    pairs = [(a, b) for a in numbers for b in numbers if a <= b]
    random.Random(0).shuffle(pairs)
    unseen, seen = pairs[:60], pairs[60:]
    seen += [(b, a) for a, b in seen if a != b]
    for split, sums in {"train": sorted(seen), "validation": sorted(unseen)}.items():
        rows = [{"prompt": chat(f"What is {a} + {b}?"), "answer": a + b} for a, b in sums]
        write(DATA / "sums" / f"{split}.jsonl", rows)


def write_opinions() -> None:
    """Requests for an opinion of a thing."""
    things = THINGS.split(", ")
    for split, some in {"validation": things[:16], "train": things[16:]}.items():
        rows = [(thing.split()[-1], form.format(thing)) for thing in some for form in FORMS]
        rows = [{"prompt": chat(text), "thing": thing} for thing, text in rows]
        write(DATA / "opinions" / f"{split}.jsonl", rows)


def write_game() -> None:
    """An example of a complete game, and the request for another."""
    ask = "number from 1 to 15. What is it?"
    turns = [f"I think of a {ask}", "3", "Higher.", "12", "Lower.", "7", f"Right! Another {ask}"]
    shown = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    write(DATA / "game" / "train.jsonl", [{"prompt": shown, "number": number} for number in range(1, 16)])


if __name__ == "__main__":
    write_sums()
    write_opinions()
    write_game()
