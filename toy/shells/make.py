"""Makes the shell game, in which every answer can be checked: prompts with the right answer, and texts for SFT.

    python toy/shells/make.py                      # writes toy/shells/data/ and base/, always the same bytes
    python toy/shells/make.py --looks runs/looks   # also writes texts of a game with looks to runs/looks, see Look

A ball lies under one of four cups, and pairs of cups are swapped: where is the ball? In the prompt
`ball 3 23 -- 14 -- -- 12 13 -- :` it lies under cup 3, then cups 2 and 3 are swapped, then 1 and 4, and so on; `--` is
a pause. An answer may be short, `#### 3`, or worked out, `2 2 2 2 2 1 3 3 #### 3`: the place of the ball after each of
the eight signs. In the texts for SFT all answers are right, and few are worked out.
"""

import argparse
import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUPS = "1234"
PAIRS = ["12", "13", "14", "23", "24", "34"]
SLOTS = 8  # signs of a prompt, each a pair of cups or a pause, so that every prompt has 11 tokens
SIZES = {"sft": (20_000, 500), "prompts": (1_600, 512)}  # train, validation
WORKED = 0.05  # fraction of the texts for SFT with a worked-out answer
LOOKED = 0.3  # fraction of the texts of the game with looks that contain a look


def places(ball: str, signs: list[str]) -> list[str]:
    """Where the ball is after each sign.

    >>> places("3", ["23", "--", "14", "12"])
    ['2', '2', '2', '1']
    """
    seen = []
    for pair in signs:
        if ball in pair:
            ball = pair.replace(ball, "")
        seen.append(ball)
    return seen


def make_row(rng: random.Random) -> dict[str, str | int]:
    """A prompt, its answer, and its number of swaps: half of the prompts have eight, the others one to seven."""
    swaps = SLOTS if rng.random() < 0.5 else rng.randint(1, SLOTS - 1)
    signs = [rng.choice(PAIRS) for _ in range(swaps)] + ["--"] * (SLOTS - swaps)
    rng.shuffle(signs)
    ball = rng.choice(CUPS)
    return {"prompt": f"ball {ball} {' '.join(signs)} :", "answer": places(ball, signs)[-1], "swaps": swaps}


def make_text(row: dict, rng: random.Random) -> dict[str, str]:
    """A text for SFT: the right answer, sometimes worked out."""
    _, ball, *signs, _ = row["prompt"].split()
    work = places(ball, signs) if rng.random() < WORKED else []
    return {"prompt": row["prompt"], "completion": " " + " ".join([*work, "####", row["answer"]])}


def make_look(row: dict, rng: random.Random) -> dict[str, str]:
    """A text as above, or one with a look; a look is equally likely for any number of swaps."""
    if rng.random() < LOOKED:
        return {"prompt": row["prompt"], "completion": f" ball <|end|> {row['answer']} #### {row['answer']}"}
    return make_text(row, rng)


def write_looks(folder: Path) -> None:
    """Writes the texts of the game with looks."""
    rng = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in zip(("train", "validation"), SIZES["sft"]):
        lines = "".join(json.dumps(make_look(make_row(rng), rng)) + "\n" for _ in range(size))
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8", newline="\n")


def write_data(folder: Path = HERE / "data") -> None:
    """Writes all splits. They share no prompt with more than two swaps (there are too few prompts with fewer)."""
    rng, seen = random.Random(7), set()
    for name, sizes in SIZES.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for split, size in zip(("train", "validation"), sizes):
            rows = []
            while len(rows) < size:
                row = make_row(rng)
                if row["prompt"] in seen and row["swaps"] > 2:
                    continue
                seen.add(row["prompt"])
                rows.append(make_text(row, rng) if name == "sft" else row)
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / name / f"{split}.jsonl").write_text(lines, encoding="utf-8", newline="\n")


def write_base(folder: Path = HERE / "base") -> None:
    """Writes a tokenizer of whole words, and the config of a very small GPT-2 without weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    words = ["<|end|>", "<|pad|>", "<|unk|>", "ball", ":", "####", "--", *CUPS, *PAIRS]
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


def worked(completions: list[str], **_) -> list[float]:
    """1 if an answer is worked out, right or wrong; to be logged, with a weight of 0."""
    return [float(len(completion.split()) > 3) for completion in completions]


def length(completions: list[str], **_) -> list[float]:
    """The number of signs of an answer, for a length penalty: --reward-weights 1 -0.05."""
    return [float(len(completion.split())) for completion in completions]


class Look:
    """The shell game with a look under the cups, for a price: an environment for lecture/agent.py.

    `#### 3` is an answer, with a reward of 1 if it is right. `ball` asks where the ball is: the game answers `3`, and
    the reward is -.6.

    >>> game = Look({"answer": "3"})
    >>> game.step(" ball"), game.step(" #### 3")
    (('3', -0.6, False), ('', 1.0, True))
    """

    price = 0.6

    def __init__(self, example: dict):
        """Starts from a row of the data with an `answer`."""
        self.answer = example["answer"]

    def step(self, text: str) -> tuple[str, float | None, bool]:
        """The answer to a turn of the policy, its reward, and whether the game is over."""
        if text.split() == ["ball"]:
            return self.answer, -self.price, False
        return "", float(text.split() == ["####", self.answer]), True


class CheapLook(Look):
    """The same at half the price."""

    price = 0.3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--looks", type=Path, help="also write texts with looks to this folder")
    args = parser.parse_args()
    write_data()
    write_base()
    if args.looks:
        write_looks(args.looks)
