"""dpo.py: reading pairs, what its arguments promise, and whole runs by hand."""

import numpy as np
import pytest
import torch
from by_hand import SETTINGS, agree, evaluated, ids_of, read_text, saved, toy_rows, write_data, write_model
from runs import merged, run, write_rows
from sources import ROOT
from transformers import AutoTokenizer

import dpo
import reward_model

# --- reading pairs


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "toy/sft")


def test_one_eos_is_enough(tokenizer, tmp_path):
    texts = [" is good.", " is good." + tokenizer.eos_token]
    rows = [dict(prompt="The film", chosen=text, rejected=" is bad.") for text in texts]
    args = dpo.Args(dataset=write_rows(tmp_path / "d.jsonl", rows))
    pair, ended = dpo.load_pairs(args, tokenizer, "train")
    assert ended.chosen.tolist() == pair.chosen.tolist()
    assert pair.chosen.tolist().count(tokenizer.eos_token_id) == 1


def test_cut_to_fit():
    pair = dpo.Pair(*map(np.array, ([1, 2, 3, 4], [5, 6, 7], [5, 6, 8])), 0.0)
    cut = dpo.cut_to_fit(pair, dpo.Args(max_length=4, max_prompt_length=2))
    assert [x.tolist() for x in (cut.prompt, cut.chosen, cut.rejected)] == [[3, 4], [5, 6], [5, 6]]
    whole = dpo.cut_to_fit(pair, dpo.Args(max_length=7, max_prompt_length=2))
    assert [x.tolist() for x in (whole.prompt, whole.chosen)] == [[1, 2, 3, 4], [5, 6, 7]]


TEXTS = dict(prompt="The film", chosen=" is good.", rejected=" is bad.")


@pytest.mark.parametrize("module", [dpo, reward_model], ids=lambda module: module.__name__)
def test_pairs_that_are_cut(module, tokenizer, tmp_path):
    """The second has equal answers within the limit, and is left out."""
    long = dict(prompt="The film", chosen=" is" * 20 + " good.", rejected=" is" * 20 + " bad.")
    far = dict(prompt="The film", chosen=" is" * 20 + " good.", rejected=" bad" * 20)
    file = write_rows(tmp_path / "d.jsonl", [TEXTS, long, far])
    settings = dict(max_prompt_length=8) if module is dpo else {}
    pairs = module.load_pairs(module.Args(dataset=file, max_length=12, **settings), tokenizer, "train")
    assert [len(pair) for pair in pairs[1:]] == [12]


# --- by hand


def logps_and_rewards(model, reference, row, length, beta):
    """Of both texts of a pair, within a length: sums of log-probabilities, and rewards."""
    logps, rewards = [], []
    for side in ("chosen", "rejected"):
        prompt, text = ids_of(row["prompt"], row[side])
        ids = (prompt + text)[:length]
        ours, theirs = (read_text(x, ids, len(prompt))[0].sum().item() for x in (model, reference))
        logps.append(ours)
        rewards.append(beta * (ours - theirs))
    return logps, rewards


@pytest.mark.parametrize("more", [{}, dict(lora_r=2, learning_rate=5e-2)])
@torch.no_grad()
def test_evaluation_by_hand(more, tmp_path):
    """Of the model that is saved; without dropout."""
    tests = toy_rows("preferences", "validation", 12)
    model = write_model(tmp_path / "model", "dropout")
    data = write_data(tmp_path / "data", train=toy_rows("preferences", "train", 28), validation=tests)
    given = SETTINGS | dict(beta=0.3, max_length=64, max_prompt_length=40) | more
    given |= dict(model=model, dataset=data)
    with torch.enable_grad():
        lines = run(dpo, tmp_path / "run", **given)
    after = saved(merged(tmp_path / "run") if more else tmp_path / "run")
    both = [logps_and_rewards(after, saved(model), row, 64, 0.3) for row in tests]
    logps, rewards = torch.tensor(both).unbind(1)  # (12, 2)
    gap = rewards[:, 0] - rewards[:, 1]
    wanted = {"eval/loss": -gap.sigmoid().log().mean()}
    for i, side in enumerate(("chosen", "rejected")):
        wanted |= {f"eval/logps/{side}": logps[:, i].mean(), f"eval/rewards/{side}": rewards[:, i].mean()}
    wanted |= {"eval/rewards/accuracies": (gap > 0).float().mean(), "eval/rewards/margins": gap.mean()}
    agree(evaluated(lines[-1]), {name: x.item() for name, x in wanted.items()})
    assert gap.abs().max() > 0.01


# --- batches


def test_batches_of_similar_length_in_random_order():
    """Each pass has all pairs, in an order of its own; neither rows nor batches come by length."""
    pairs = [range(n) for n in torch.randperm(200).tolist()]
    batches, n = dpo.length_grouped_batches(pairs, dpo.Args(batch_size=8, num_train_epochs=1.5))
    assert n == 25 and len(batches) == 50
    for part in (batches[:25], batches[25:]):
        assert sorted(sum(part, [])) == list(range(200))
        lengths = [[len(pairs[i]) for i in rows] for rows in part]
        assert all(max(x) - min(x) == 7 for x in lengths)
        assert lengths != sorted(lengths)
    assert batches[:25] != batches[25:]
