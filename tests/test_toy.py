"""The toy world is what it says it is: the same bytes each time, varied, with a gold score that reads English."""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import ppo
from toy import make

TOY = Path(__file__).resolve().parent.parent / "toy"


def lines(name, split):
    """The lines of a file of the toy world."""
    return (TOY / "data" / name / f"{split}.jsonl").read_text("utf-8").splitlines()


def rows(name, split, part=1):
    """Its rows, or every tenth of them."""
    return [json.loads(line) for line in lines(name, split)[::part]]


def gold_scores(texts, prompts=None):
    """The gold scores of completions, by default to empty prompts."""
    return torch.tensor(make.gold_score(prompts=prompts or [""] * len(texts), completions=texts))


def test_the_same_rows_each_time(tmp_path):
    """make.py writes the first twentieth of what is in the repository, on this machine too."""
    make.write_data(tmp_path, {name: (train // 20, 0) for name, (train, _) in make.SIZES.items()})
    for name, (size, _) in make.SIZES.items():
        written = (tmp_path / name / "train.jsonl").read_bytes()
        assert written.count(b"\n") == size // 20
        assert (TOY / "data" / name / "train.jsonl").read_bytes().startswith(written), name


@pytest.mark.slow
def test_the_same_bytes_each_time(tmp_path):
    """The whole of it, and the tokenizer."""
    make.write_data(tmp_path / "data")
    make.write_base(tmp_path / "base", tmp_path / "data")
    written = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert len(written) == 9
    assert not [str(p) for p in written if (tmp_path / p).read_bytes() != (TOY / p).read_bytes()]


@pytest.mark.parametrize(
    "better, worse",
    [
        ("The film is wonderful.", "The film is good."),
        ("The film is not bad.", "The film is bad."),
        ("The film is good.", "The film is not good."),
        ("The film is never dull.", "The film is never clever."),
        ("It is dull, but the music is lovely.", "The music is lovely, but it is dull."),
        ("Despite its dull start, it is lovely.", "It is dull. It is lovely."),
        ("It is lovely.", "It is lovely. It is lovely. It is lovely. It is lovely. It is lovely."),
        ("The story is lovely.", "lovely wonderful superb brilliant lovely wonderful superb brilliant"),
    ],
)
def test_gold_score_reads_english(better, worse):
    assert make.gold_text_score(better) > make.gold_text_score(worse) + 0.05


def test_reward_model_agrees_with_the_gold_score_and_is_fooled_by_what_it_has_not_seen():
    """On reviews they agree; by a heap of praise, which no human of this world wrote, the learned one is taken in."""
    args = ppo.Args(device="cpu")
    model = ppo.load_model(AutoModelForSequenceClassification, "toy/reward_model", args)
    tokenizer = model.tokenizer

    def learned(texts):
        rows = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
        ids, mask = ppo.pad(rows, tokenizer, args)
        with torch.no_grad():
            return ppo.read_reward(model, ids, mask.long())

    texts = [row["prompt"] + row["completion"] for row in rows("sft", "validation")]
    assert torch.corrcoef(torch.stack([learned(texts), gold_scores(texts)]))[0, 1] > 0.7
    heap = ["The film is wonderful superb delightful wonderful superb delightful wonderful superb delightful"]
    assert learned(heap)[0] > 2
    assert gold_scores(heap)[0] < 1


def shells_make():
    """toy/shells/make.py."""
    spec = importlib.util.spec_from_file_location("shells_make", TOY / "shells/make.py")
    shells = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shells)
    return shells


def test_the_shell_game_is_made_again_byte_for_byte(tmp_path):
    shells = shells_make()
    shells.write_data(tmp_path / "data")
    shells.write_base(tmp_path / "base")
    files = [path for name in ("data", "base") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert len(files) == 7
    for file in files:
        assert file.read_bytes() == (TOY / "shells" / file.relative_to(tmp_path)).read_bytes(), file
