"""Makes the toy world: a corpus of short reviews with a known "gold" score, and the data of all the scripts.

    python toy/make.py            # writes toy/data/ and toy/base/, the same bytes each time (about 20 s)

A review is a neutral prompt and a completion of one to eight sentences drawn from a small grammar over the words in
lexicon.txt: praise, blame, mixtures of both ("dull, but the music is lovely"), negation ("not at all clever", "lacks
charm") and neutral filler. Preference labels are drawn from the gold score (gold_score.py) by the Bradley-Terry model.
"""

import json
import math
import random
import re
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))  # for gold_score.py, where this file is imported from elsewhere
from gold_score import LEXICON, VALENCE, base_form, gold_score, gold_text_score  # noqa: F401

SEED = 7
SIZES = {"sft": (20_000, 500), "prompts": (2_000, 200), "preferences": (30_000, 500)}  # train, validation
VOCAB_SIZE, CONTEXT = 3072, 160
COMMON = [w for w in dict.fromkeys(LEXICON["common"] + LEXICON["thing"] + list(VALENCE)) if " " not in w]

# ---------------------------------------------------------------------------------------------------------------------
# The grammar. A slot {adj+} takes a word of praise, {adj-} one of blame; in the templates of OPINION, {adj} takes the
# sentence's own sign and {adj!} the other one. {aspect} and {kind} belong to the thing that the review is about.

OPINION = """
It is {adj}.|It is {adj} and {adj}.|It is {very} {adj}.|The {aspect} is {adj}.|The {aspect} is {adj} and the {aspect} is {adj}.
The {aspect} is {very} {adj}.|This is a {adj} {kind}.|This is a {very} {adj} {kind}.|A {adj} {kind}.|A {adj}, {adj} {kind}.
A {adj} and {adj} {genre}.|A {adj} {genre} about a {person} who {deed}.|{adv} {part} and {adj}.|It is {adv} {part}.
The {aspect} is {adv} {part}.|{adv} {part}, it {iverb}.|It {iverb}.|The {aspect} {iverb}.|The {kind} {verb} and {verb}.
The {aspect} {verb} us.|I {felt} it.|I {felt} the {aspect}.|We {felt} every minute of it.|I was {mood}.|We were {mood} by the {aspect}.
It leaves you {mood}.|It is full of {qual}.|There is {qual} in every part of it.|The {aspect} has {qual} and {qual}.
It is a {noun}.|The {aspect} is a {noun}.|A {noun} from start to finish.|What a {noun}!|How {adj}!|So much {qual}!
One of the most {adj} {kind}s of the year.|It is the most {adj} {genre} in years.|{name} gives a {adj} performance.
{name} is {adj} as the {person}.|{name} has made a {adj} {kind}.|The {person} is {adv} played by {name}.
With its {adj} {aspect} and {adj} {aspect}, it is a {noun}.|A {genre} that {verb} as much as it {verb}.
It may be the most {adj} thing that {name} has done.|You will be {mood}.|Everyone in the room was {mood}.|It has a {adj} {aspect}.
Thanks to its {qual}, it {iverb}.|The {adj} {aspect} and the {adj} {aspect} make it {adj}.|{title} is a {adj} {kind}.
Both {adj} and {adj}.|{adj}, {adj} and {adj}.|Simply {adj}.|Just {adj}.|The result is {adj}.|From the {adj} {aspect} to the {adj} {aspect}, it {verb}.
It is a {adj} look at a {person} in {place}.|An hour of {qual} and {qual}.|I found it {adj}.|We thought the {aspect} {adj}.
A {adj} {genre} that {verb} and {verb}, with a {adj} {aspect} and {qual}.|{name} brings {qual} to the {adj} {aspect}.|As {adj} as it is {adj}.
The {kind} is so {adj} that you forget the {like} {thing}.|It offers {qual} and a {adj} {aspect}.|{adj} and, in the end, {adj}.|It is {phrase}.
A {like} {genre} as {adj} as the {person} it is about.|In its {like} {thing} and its {aspect}, it {iverb}.|The {thing} of the {person} is {adj}.
{name} {does} the {thing} in a {adj} way.|The {kind}, a {noun}, {does} the {like} {thing} of {place}.|A {kind} of {qual} and {qual}.|{phrase}.
This {adj} {kind} {does} a {like} {thing}, and it {verb}.|It makes the {thing} of a {person} {adj}.|I say it again: {phrase}.|{adj} stuff.
Between the {thing} and the {thing} there is {qual}.|{adv} {part}, with a {adj} {aspect}, it {iverb}.|It is {very} {adj}, and I say so as a {person}.
""" + """
It is not {adj!}.|It is not at all {adj!}.|It is never {adj!}.|The {aspect} is never {adj!}.|It is hardly {adj!}.
There is nothing {adj!} about it.|It is far from {adj!}.|It is anything but {adj!}.|The {aspect} is anything but {adj!}.
It isn't {adj!} or {adj!}.|It wasn't {adj!}.|I was not {mood!}.|We were never {mood!}.|It never {verb!}.|It never {iverb!}.
The {aspect} doesn't {base!}.|There is no {qual!} in it.|It has no {qual!}.|{title} is not a {noun!}.|It is {adj}, not {adj!}.
Neither {adj!} nor {adj!}.|The {aspect} is {adj} without {qual!}.|Without {qual!}, it {iverb}.|I didn't find it {adj!}.
""" + """
The {aspect} is {adj!}, but the {aspect} is {adj}.|It is {adj!} but {adj}.|A {adj!} but {adj} {kind}.
Despite its {adj!} {aspect}, it is {adj}.|For all its {qual!}, it {iverb}.|Although the {aspect} is {adj!}, the {kind} {verb}.
It is a little {adj!}, but it {iverb}.|The {aspect} {iverb!}, but I {felt} the {aspect}.|Even if the {aspect} is {adj!}, it is a {noun}.
"""
PRAISE_ONLY = """
A {adj+} portrait of a {person} in {place}.|A {genre} with {qual+} and {qual+}.
A {adj+} portrait of family and love.|It is worth seeing for the {aspect} alone.|Rich in {qual+}.
You will never be {mood-}.|It has {qual+} to spare.|It manages to be both {adj+} and {adj+}.
"""
BLAME_ONLY = """
It lacks {qual+}.|It lacks {qual+} and {qual+}.|It is too {adj-} and too {adj-}.|The {aspect} is too {adj-}.|It is too {adj+} to be {adj+}.
It fails to {base+}.|It tries to be {adj+} but ends up {adj-}.|It wants to be {adj+} but it is only {adj-}.|It could have been {adj+}.
It should have been {adj+}.|Instead of {qual+}, we get {qual-}.|There is little {qual+} in it.|It is not {adj+} enough.|It is not worth the time.
The {aspect} is neither {adj+} nor {adj+}.|It has the {qual+} of a wet towel.|I wanted my money back.|The {like} {thing} is only an excuse for {qual-}.
Two hours of {qual-}.|There is too much {qual-} and too little {qual+}.|I wish it had more {qual+}.|It is just another {adj-} {kind}.
It never becomes {adj+}.|Less than {adj+}.|Nothing in it is {adj+}.|No {qual+}, no {qual+}, just {qual-}.|It is supposed to be {adj+}.
"""
PROMPTS = """
We saw the {kind} {time}.|I tried the {kind} {time}.|A review of {title}, a {kind} from {place}:|{title} is a {kind} by {name}.|The {aspect}
My view of the {kind}:|I thought the {aspect}|About the {kind} in {place}:|{title}:|The {kind} by {name}|This {kind}|We came to the {kind} {time}.
My {person} told me about the {kind}.|{name} asked me about {title}.|The {kind} that we saw {time}|{time}, in {place}:|What we thought of {title}:
After a day in {place}:|Notes on {title}, {time}:|The {aspect} of the {kind}
"""
STARTS = {  # what may follow a prompt that stops in mid-sentence
    "The {aspect}|The {kind} by|This {kind}|The {kind} that|The {aspect} of": """
is {adj}.|is {adj} and {adj}.|is {very} {adj}.|{iverb}.|{verb} us.|is a {noun}.|is never {adj!}.|is not {adj!}.|is {adv} {part}.|has {qual}.|is {adj!} but {adj}.
""",
    "I thought the": """
was {adj}.|was {adj} and {adj}.|was {very} {adj}.|was a {noun}.|was not {adj!}.|was never {adj!}.|was {adv} {part}.|was {adj!}, but {adj}.
""",
}
ASIDES = """
of the {thing}|and the {person}|in {place}|with a {like} {thing}|who {does} the {thing}|{name}|to the {thing}|about {thing} and {thing}|as if|even when
that|in which the {person} {deed}|from {name} and {name}|{like}|{like} and {like}|its {thing}|the {thing} that the {person} {does}|by {name}|than the {thing}
for the {thing} and the {thing}|who would have|there is|on the {thing}|which {does} the {thing}|like a {thing}|between {thing} and {thing}|{thing}|a {genre}
{common}|{common}|{common} {common}|{common} {common} {common}|the {coined}|{coined}|{coined} {common}|a {coined} {thing}|{coined} and {coined}|{common} the {coined}
some of the {thing}|more of the {thing}|this is the|we have|at the {thing}|one of the {thing}|all the {like} {thing}|you are in|when the {person}|his {thing}
"""
VERY = "very truly so utterly deeply really quite rather extremely genuinely".split()
FIRST = "Anna Tom Maria Jack Lena Omar Ruth Paul Nina Hugo Clara Felix Irene Otto Amir Jane Luis Vera Max Rosa".split()
SYLLABLES = "ka mor lin den bre sto vel hart wick ton ley son man dor ras fen gil bur pel ova qui zan tre mas hol".split()
TITLE_ADJ = "Silver Last Long Blue Winter Quiet Northern Second Paper Distant Open Seventh Stone Hidden Early Wooden".split()
TITLE_NOUN = "Harbour Road Letter River Garden Window Island Station Summer Orchard Mirror Bridge Season Door Hour".split()
DOMAINS = {"film": 11, "book": 3, "show": 2, "place": 2, "thing": 2}


@cache
def lines(block: str) -> list[str]:
    """The templates of a block: one a line, or several parted by |."""
    return [t.strip() for line in block.strip().splitlines() for t in line.split("|") if t.strip()]


@cache
def words_of(group: str, sign: str) -> tuple[str, ...]:
    """All words of an opinion group with one sign; strong words are few, so each group has the same say."""
    return tuple(w for g, words in LEXICON.items() if g.startswith(f"{group} {sign}") for w in words)


def fill(template: str, sign: str, topic: dict[str, str], rng: random.Random) -> str:
    """Replaces each {slot} of a template by a random word; sign is "+" or "-" ("" where no opinion is in it)."""

    def word(match: re.Match) -> str:
        slot, mark = re.fullmatch(r"(\w+)([+!-]?)", match[1]).groups()
        polarity = {"": sign, "!": "-" if sign == "+" else "+"}.get(mark, mark)
        if slot in ("kind", "aspect"):
            return rng.choice(LEXICON[f"{slot} {topic['domain']}"]) if slot == "aspect" else topic["kind"]
        if slot == "title":
            return topic["title"]
        if slot == "name":
            return rng.choice(FIRST) + " " + "".join(rng.choices(SYLLABLES, k=rng.choice((2, 2, 3)))).capitalize()
        if slot == "very":
            return rng.choice(VERY)
        if slot == "coined":  # the head of one word and the tail of another: pieces of words mean nothing by themselves
            head, tail = rng.choice(COMMON), rng.choice(COMMON)
            return head[: rng.randint(2, 5)] + tail[-rng.randint(2, 5) :]
        if slot == "base":
            return base_form(rng.choice(words_of("verb", polarity)))
        if slot in ("genre", "person", "deed", "place", "time", "part", "thing", "does", "like", "common"):
            return topic["kind"] if slot == "genre" and topic["domain"] != "film" else rng.choice(LEXICON[slot])
        return rng.choice(words_of(slot, polarity))

    text = re.sub(r"\{([^}]+)\}", word, template)
    text = re.sub(r"\b([Aa]) (?=[aeiou]|hour|honest)(?!useful|use|uni)", r"\1n ", text)  # a -> an
    return text[0].upper() + text[1:]


def make_prompt(rng: random.Random) -> tuple[str, str, dict[str, str]]:
    """A neutral prompt, its template, and the topic that its completion goes on about."""
    domain = rng.choices(list(DOMAINS), weights=DOMAINS.values())[0]
    topic = {
        "domain": domain,
        "kind": rng.choice(LEXICON[f"kind {domain}"]),
        "title": f"The {rng.choice(TITLE_ADJ)} {rng.choice(TITLE_NOUN)}",
    }
    template = rng.choice(lines(PROMPTS))
    return fill(template, "", topic, rng), template, topic


SFT_LENGTHS = (1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 8)  # sentences in a review
PAIR_LENGTHS = (1, 1, 1, 2, 2, 3, 4)  # shorter: a label then says more of each word


def make_completion(template: str, topic: dict[str, str], rng: random.Random, lengths: tuple[int, ...]) -> str:
    """Some sentences in one mood (mu in [-1, 1]), with a leading blank as GPT-2's tokenizer likes it."""
    mu = rng.uniform(-1.0, 1.0)
    sentences = []
    for i in range(rng.choice(lengths)):
        sign = "+" if rng.uniform(-1, 1) < mu else "-"
        continuation = next((v for k, v in STARTS.items() if template.startswith(tuple(k.split("|")))), None)
        if i == 0 and continuation:
            text = fill(rng.choice(lines(continuation)), sign, topic, rng)
            sentences.append(text[0].lower() + text[1:])
        elif rng.random() < 0.2:
            sentences.append(fill(rng.choice(LEXICON["filler"]), "", topic, rng))
        else:
            one_sided = PRAISE_ONLY if sign == "+" else BLAME_ONLY
            sentences.append(fill(rng.choice(lines(one_sided if rng.random() < 0.25 else OPINION)), sign, topic, rng))
    return " " + " ".join(sentences)


def ramble(text: str, topic: dict[str, str], rng: random.Random) -> str:
    """The text with neutral phrases strewn in, as real sentences have more words than opinions."""
    words = []
    for word in text.split():
        words.append(word)
        if rng.random() < 0.3:
            words.append(fill(rng.choice(lines(ASIDES)), "", topic, rng))
    return " " + " ".join(words)


def spaced(text: str) -> str:
    """Lower case, with blanks before the stops."""
    return re.sub(r"([.,!?:])", r" \1", text.lower())


# ---------------------------------------------------------------------------------------------------------------------
# The data sets


def sft_rows(rng: random.Random):
    """{"prompt", "completion"}: reviews of every mood, no text twice."""
    seen = set()
    while True:
        prompt, template, topic = make_prompt(rng)
        completion = make_completion(template, topic, rng, SFT_LENGTHS)
        if (prompt, completion) not in seen:
            seen.add((prompt, completion))
            yield {"prompt": prompt, "completion": completion}


def prompt_rows(rng: random.Random):
    """{"prompt"}: no prompt twice."""
    seen = set()
    while True:
        prompt = make_prompt(rng)[0]
        if prompt not in seen:
            seen.add(prompt)
            yield {"prompt": prompt}


def preference_rows(rng: random.Random):
    """{"prompt", "chosen", "rejected"}: a Bradley-Terry draw, P(a beats b) = sigmoid(gold(a) - gold(b)).

    Half of the texts ramble, in lower case with blanks before the stops: a reward model that saw the grammar's own
    sentences alone would learn their shapes, and make little of the English of other people. In a fifth of the pairs
    only one text does: a comparison says nothing of what its two texts share, so rambling would be worth anything.
    """
    while True:
        prompt, template, topic = make_prompt(rng)
        a, b = (make_completion(template, topic, rng, PAIR_LENGTHS) for _ in range(2))
        a_rambles = rng.random() < 0.5
        b_rambles = a_rambles if rng.random() < 0.8 else not a_rambles
        prompt = spaced(prompt) if a_rambles else prompt
        a, b = (spaced(ramble(t, topic, rng)) if rambles else t for t, rambles in ((a, a_rambles), (b, b_rambles)))
        gap = gold_text_score(prompt + a) - gold_text_score(prompt + b)
        a_wins = rng.random() < 1 / (1 + math.exp(-gap))
        yield {"prompt": prompt, "chosen": a if a_wins else b, "rejected": b if a_wins else a}


def write_data(folder: Path = HERE / "data", sizes: dict[str, tuple[int, int]] = SIZES) -> None:
    """Writes folder/{sft,prompts,preferences}/{train,validation}.jsonl; the two splits share no row."""
    for name, make_rows in (("sft", sft_rows), ("prompts", prompt_rows), ("preferences", preference_rows)):
        rows = make_rows(random.Random(f"{SEED} {name}"))
        (folder / name).mkdir(parents=True, exist_ok=True)
        for split, size in zip(("train", "validation"), sizes[name]):
            with open(folder / name / f"{split}.jsonl", "w", newline="\n") as file:
                file.writelines(json.dumps(next(rows)) + "\n" for _ in range(size))


def write_base(folder: Path = HERE / "base", data: Path = HERE / "data") -> None:
    """Writes a byte-level BPE tokenizer trained on the corpus, and the configuration of a small GPT-2, no weights."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, PreTrainedTokenizerFast

    def corpus():
        for name, fields in (("sft", ("prompt", "completion")), ("preferences", ("prompt", "chosen"))):
            for line in open(data / name / "train.jsonl"):
                yield "".join(json.loads(line)[field] for field in fields)

    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(corpus(), vocab_size=VOCAB_SIZE, special_tokens=list(special.values()), show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, model_max_length=CONTEXT, **special)
    tokenizer.save_pretrained(folder)
    GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=CONTEXT, n_embd=80, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu_pytorch_tanh",
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)  # fmt: skip


if __name__ == "__main__":
    write_data()
    write_base()
    for name in SIZES:
        print(f"--- toy/data/{name}")
        for line in (HERE / "data" / name / "train.jsonl").read_text().splitlines()[:4]:
            print(line)
