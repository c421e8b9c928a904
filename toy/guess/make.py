"""Makes the guessing game, an environment of several turns: the game, its prompts, a tokenizer, and texts for SFT.

    python toy/guess/make.py                                # writes toy/guess/data/ and base/, always the same bytes
    python toy/guess/make.py --output runs/guess --texts    # and texts for SFT: data/legal, data/sloppy, data/deaf
    python toy/guess/make.py --output runs/guess31 --texts --size 31                     # the same for another size

The game hides a number from 1 to 15. The policy guesses, and the game answers whether the hidden number is higher or
lower, until the policy has found it. As one stream of tokens, in which the policy ends each turn with `<|end|>`:

    1 to 15 : 8 <|end|> lower 4 <|end|> higher 6 <|end|>

Binary search takes 49/15 = 3.27 guesses on average, which is optimal. The texts do not contain it: their guesses are
random, in three ways (`PLAYS`).
"""

import argparse
import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
TURNS = 8  # maximum number of guesses in a game
SIZES = {"train": 20_000, "validation": 500}  # texts of each kind of play
PLAYS = {  # kind -> fraction of the guesses that use the answers
    "legal": 1.0,  # a random number among those that the answers allow
    "sloppy": 0.5,  # half of the guesses are any number
    "deaf": 0.0,  # a random number among those not guessed yet
}


class Game:
    """One game of higher or lower: an environment for lecture/agent.py and grpo.py --env.

    If the n-th guess is right, its reward is 1 − (n − 1) / 8; there are no other rewards.

    >>> game = Game({"number": 6})
    >>> game.step("8"), game.step("eight"), game.step("6")
    (('lower', None, False), ('what?', None, False), ('', 0.75, True))
    """

    def __init__(self, example: dict):
        """Hides the `number` of a row of the data."""
        self.number = example["number"]
        self.guesses = 0

    def step(self, text: str) -> tuple[str, float | None, bool]:
        """The answer to a turn of the policy, its reward, and whether the game is over."""
        self.guesses += 1
        is_last = self.guesses == TURNS
        guess = text.strip()
        if guess == str(self.number):
            return "", 1 - (self.guesses - 1) / TURNS, True
        if not guess.isdecimal():
            return "what?", None, is_last
        return ("higher" if int(guess) < self.number else "lower"), None, is_last


def make_prompt(size: int) -> str:
    """The prompt of every game."""
    return f"1 to {size} :"


def make_text(size: int, legal: float, rng: random.Random) -> dict[str, str]:
    """A game as a text for SFT. A fraction of its guesses, `legal`, agrees with all answers so far."""
    game = Game({"number": rng.randint(1, size)})
    low, high, left = 1, size, list(range(1, size + 1))
    words, over = [], False
    while not over:
        if rng.random() < legal:
            guess = rng.randint(low, high)
        else:
            guess = rng.choice(left if legal == 0 else range(1, size + 1))
        if guess in left:
            left.remove(guess)
        answer, _, over = game.step(str(guess))
        if answer == "higher":
            low = max(low, guess + 1)
        if answer == "lower":
            high = min(high, guess - 1)
        words += [str(guess), "<|end|>", answer]
    return {"prompt": make_prompt(size), "completion": " " + " ".join(words[:-2])}  # sft.py adds the last <|end|>


def write_rows(file: Path, rows: list[dict]) -> None:
    """Writes a file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")


def write_prompts(folder: Path = HERE / "data", size: int = 15) -> None:
    """Writes one row per hidden number; each row is the start of a game."""
    rows = [{"prompt": make_prompt(size), "number": number} for number in range(1, size + 1)]
    write_rows(folder / "prompts/train.jsonl", rows)


def write_texts(folder: Path, size: int = 15) -> None:
    """Writes the texts of each kind of play."""
    for kind, legal in PLAYS.items():
        rng = random.Random(7)
        for split, count in SIZES.items():
            write_rows(folder / kind / f"{split}.jsonl", [make_text(size, legal, rng) for _ in range(count)])


def write_base(folder: Path = HERE / "base", size: int = 15) -> None:
    """Writes a tokenizer of whole words, and the config of a very small GPT-2 without weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    words = ["<|end|>", "<|pad|>", "<|unk|>", "to", ":", "higher", "lower", "what?", *map(str, range(1, size + 1))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=48, **special).save_pretrained(folder)
    GPT2Config(
        vocab_size=len(words),
        n_positions=48,
        n_embd=64,
        n_layer=2,
        n_head=4,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    ).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE, help="the folder to write to")
    parser.add_argument("--size", type=int, default=15, help="the hidden numbers are 1 to this")
    parser.add_argument("--texts", action="store_true", help="also write the texts for SFT")
    args = parser.parse_args()
    write_prompts(args.output / "data", args.size)
    write_base(args.output / "base", args.size)
    if args.texts:
        write_texts(args.output / "data", args.size)
