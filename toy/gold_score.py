"""The gold score: the true quality of a review, which stands for a person's judgement in the toy world.

It reads a finished text, knows nothing of how the text was made, and understands praise, blame, mixtures of both
("dull, but the music is lovely"), negation ("not at all clever", "lacks charm") and repetition. Every script takes it
as a reward function, `--reward-fn toy/gold_score.py:gold_score`. make.py draws the preference labels from it.
"""

import math
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent

# ---------------------------------------------------------------------------------------------------------------------
# The words


def read_lexicon(path: Path = HERE / "lexicon.txt") -> dict[str, list[str]]:
    """Group name -> words. Opinion groups are named with their strength: "adj +3"."""
    groups, name = {}, None
    for line in path.read_text().splitlines():
        if line.startswith("["):
            name = line.strip("[]")
            groups[name] = ""
        elif line and not line.startswith("#"):
            groups[name] += line + ("" if line.endswith("|") else " ")
    split = {k: v.split("|") if "|" in v else [w.replace("_", " ") for w in v.split()] for k, v in groups.items()}
    return {k: [w.strip() for w in words if w.strip()] for k, words in split.items()}


def base_form(verb: str) -> str:
    """bores -> bore, satisfies -> satisfy, touches -> touch; only the first word of a phrase is changed."""
    first, *rest = verb.split()
    first = re.sub(r"ies$", "y", first) if first.endswith("ies") else re.sub(r"(?<=ss|sh|ch|zz)es$|s$", "", first)
    return " ".join([first, *rest])


LEXICON = read_lexicon()
VALENCE = {
    word: int(group.split()[1])
    for group, words in LEXICON.items()
    if re.search(r" [+-]\d$", group)
    for word in words
}
VALENCE |= {base_form(w): VALENCE[w] for g in LEXICON if "verb" in g for w in LEXICON[g]}
LONGEST_PHRASE = max(len(w.split()) for w in VALENCE)

# ---------------------------------------------------------------------------------------------------------------------
# The gold score

NEGATORS = set("not never no hardly scarcely barely rarely lacks lacking without neither nor nothing nobody little fails "
               "failed cannot isn't wasn't doesn't didn't don't aren't weren't can't won't instead unlike far".split())
PHRASE_NEGATORS = ("anything but", "could have been", "should have been", "might have been", "wants to be",
                   "tries to be", "less than", "i wish", "supposed to be")  # "far from" needs only its first word
INTENSIFIERS = set("very truly so utterly deeply really extremely genuinely consistently thoroughly simply".split())
DAMPENERS = set("slightly somewhat fairly mostly partly bit".split())
CONCESSIVES = ("despite", "for all", "although", "though", "even if")


def clause_score(words: list[str], counts: dict[str, int]) -> float:
    """Gold valence of one clause: strength x negation x intensity of each opinion word that is new to the text."""
    total, opinions, others, negated, weight, i = 0.0, 0, 0, False, 1.0, 0
    for i_next in range(len(words)):
        if i_next < i:  # inside a phrase that was already read
            continue
        i, word = i_next, words[i_next]
        phrase = next((" ".join(words[i : i + n]) for n in range(LONGEST_PHRASE, 0, -1)
                       if " ".join(words[i : i + n]) in VALENCE), None)  # fmt: skip
        if phrase is None:
            rest = " ".join(words[i : i + 3])
            negated |= word in NEGATORS or rest.startswith(PHRASE_NEGATORS)
            negated |= word == "to" and "too" in words[:i]  # "too clever to be good"
            weight = 1.4 if word in INTENSIFIERS else 0.6 if word in DAMPENERS else weight
            if word == "too":  # "too clever", "too slow": the excess itself is the complaint
                total, weight = total - 1.0, 0.5
            others, i = others + 1, i + 1
            continue
        counts[phrase] = counts.get(phrase, 0) + 1
        if counts[phrase] == 1:
            total += VALENCE[phrase] * weight * (-0.7 if negated else 1.0)
        elif counts[phrase] > 2:
            total -= 0.5  # the third "wonderful" bores
        opinions, weight, i = opinions + 1, 1.0, i + len(phrase.split())
    is_heap = len(words) > 4 and opinions > 0.6 * (opinions + others)  # a heap of opinion words is no sentence
    return 0.0 if is_heap else max(-5.0, min(5.0, total))


def gold_text_score(text: str) -> float:
    """Gold score of one text, in (-9, 5): 5 tanh of the summed clause scores / 5, less up to 4 for repetition."""
    text = re.sub(r"[^a-z' .,;:!?-]", " ", text.lower().replace("’", "'"))
    counts: dict[str, int] = {}
    total = 0.0
    for sentence in re.split(r"[.!?;]+", text):
        before, contrast, after = re.sub(r"(?<!anything) but ", "|", sentence, count=1).partition("|")
        # what follows "but" is what is meant
        for part, weight in ((before, 0.6 if contrast else 1.0), (after, 1.3)):
            for clause in part.split(","):
                concessive = clause.strip().startswith(CONCESSIVES)
                total += weight * (0.3 if concessive else 1.0) * clause_score(clause.split(), counts)
    words = text.split()
    trigrams = list(zip(words, words[1:], words[2:]))
    repeated = 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0
    return 5 * math.tanh(total / 5) - 4 * repeated


def gold_score(prompts: list[str], completions: list[str], **_) -> list[float]:
    """The true reward of the toy world: one float for each text, about -5 (damning) to 5 (glowing)."""
    return [gold_text_score(prompt + completion) for prompt, completion in zip(prompts, completions, strict=True)]
