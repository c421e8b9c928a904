"""Makes the shell game, in which every answer can be checked: prompts with the right answer, and texts for SFT.

    python toy/shells/make.py    # writes toy/shells/data/ and base/, always the same bytes

A ball lies under one of four cups, and pairs of cups are swapped: where is the ball? In the prompt
`ball 3 23 -- 14 -- -- 12 13 -- :` it lies under cup 3, then cups 2 and 3 are swapped, then 1 and 4, and so on; `--` is
a pause. An answer may be short, `#### 3`, or worked out, `2 2 2 2 2 1 3 3 #### 3`: the place of the ball after each of
the eight signs. In the texts for SFT all answers are right, and few are worked out.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUPS = "1234"
PAIRS = ["12", "13", "14", "23", "24", "34"]
SLOTS = 8  # signs of a prompt, each a pair of cups or a pause, so that every prompt has 11 tokens
SIZES = {"sft": (20_000, 500), "prompts": (1_600, 512)}  # train, validation
WORKED = 0.05  # fraction of the texts for SFT with a worked-out answer


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


if __name__ == "__main__":
    write_data()
    write_base()
