"""Makes the sorting task, in which every answer can be checked: prompts with the right answer, and texts for the SFT.

    python toy/sort/make.py       # writes toy/sort/data/ and toy/sort/base/, the same bytes each time

A prompt is two to seven digits, `sort 7 2 4 :`, and the answer the same digits in order, `2 4 7`. A token is a digit or
a word. Most of the texts for the SFT have a mistake, so the policy in `toy/sort/sft` makes as many when it is sampled,
though it could do without: reinforcement teaches it to.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIZES = {"sft": (20_000, 500), "prompts": (4_000, 256)}  # train, validation
MISTAKES = 0.6  # share of the texts for the SFT with one mistake


def make_row(rng: random.Random) -> dict[str, str]:
    """A prompt and its answer."""
    digits = [str(rng.randrange(10)) for _ in range(rng.randint(2, 7))]
    return {"prompt": f"sort {' '.join(digits)} :", "answer": " ".join(sorted(digits))}


def make_mistake(digits: list[str], rng: random.Random) -> list[str]:
    """Swaps two neighbours, leaves one out, or says one up to five times more."""
    i = rng.randrange(len(digits) - 1)
    a, b = digits[i : i + 2]
    wrong = rng.choice([[b, a], [a], [a] * rng.randint(2, 6) + [b]])
    return digits[:i] + wrong + digits[i + 2 :]


def write_data(folder: Path = HERE / "data") -> None:
    """Writes all splits; no prompt stands in two of them."""
    rng, seen = random.Random(7), set()
    for name, sizes in SIZES.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for split, size in zip(("train", "validation"), sizes):
            rows = []
            while len(rows) < size:
                row = make_row(rng)
                if row["prompt"] not in seen or len(row["prompt"]) < 16:  # there are few short ones
                    seen.add(row["prompt"])
                    if name == "sft":
                        digits = row.pop("answer").split()
                        digits = make_mistake(digits, rng) if rng.random() < MISTAKES else digits
                        row["completion"] = " " + " ".join(digits)
                    rows.append(row)
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / name / f"{split}.jsonl").write_text(lines, encoding="utf-8", newline="\n")


def write_base(folder: Path = HERE / "base") -> None:
    """Writes a tokenizer of whole words, and the configuration of a very small GPT-2, no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    words = ["<|end|>", "<|pad|>", "<|unk|>", "sort", ":", *"0123456789"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=48, **special).save_pretrained(folder)
    GPT2Config(
        vocab_size=len(words), n_positions=48, n_embd=64, n_layer=2, n_head=4, activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=1,
    ).save_pretrained(folder)  # fmt: skip


def excess_when_wrong(prompts: list[str], completions: list[str], answer: list[str], **_) -> list[float | None]:
    """A number to look at (--gold-reward-fn): how many digits too long a wrong response is; None of a right one."""
    pairs = [(completion.split(), wanted.split()) for completion, wanted in zip(completions, answer, strict=True)]
    return [None if given == wanted else float(len(given) - len(wanted)) for given, wanted in pairs]


if __name__ == "__main__":
    write_data()
    write_base()
