"""dpo.py: reading pairs, what its arguments promise, and whole runs by hand."""

import numpy as np
import pytest
import torch
from by_hand import SETTINGS, agree, evaluated, ids_of, read_text, saved, toy_rows, write_data, write_model
from runs import merged, run, untimed, write_rows
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


@pytest.mark.parametrize("mode, prompt", [("keep_end", [3, 4]), ("keep_start", [1, 2])])
def test_cut_to_fit(mode, prompt):
    pair = dpo.Pair(*map(np.array, ([1, 2, 3, 4], [5, 6, 7], [5, 6, 8])), 0.0)
    settings = dict(max_prompt_length=2, truncation_mode=mode)
    cut = dpo.cut_to_fit(pair, dpo.Args(max_length=4, **settings))
    assert [x.tolist() for x in (cut.prompt, cut.chosen, cut.rejected)] == [prompt, [5, 6], [5, 6]]
    whole = dpo.cut_to_fit(pair, dpo.Args(max_length=7, **settings))
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
    """Of the model that is saved; without dropout; with or without log-probabilities that are computed before."""
    tests = toy_rows("preferences", "validation", 12)
    model = write_model(tmp_path / "model", "dropout")
    data = write_data(tmp_path / "data", train=toy_rows("preferences", "train", 28), validation=tests)
    given = SETTINGS | dict(beta=0.3, label_smoothing=0.1, max_length=64, max_prompt_length=40) | more
    given |= dict(model=model, dataset=data)
    with torch.enable_grad():
        lines = run(dpo, tmp_path / "run", **given)
        again = run(dpo, tmp_path / "again", precompute_ref=True, **given)
    after = saved(merged(tmp_path / "run") if more else tmp_path / "run")
    both = [logps_and_rewards(after, saved(model), row, 64, 0.3) for row in tests]
    logps, rewards = torch.tensor(both).unbind(1)  # (12, 2)
    gap = rewards[:, 0] - rewards[:, 1]
    wanted = {"eval/loss": -(0.9 * gap.sigmoid().log() + 0.1 * (-gap).sigmoid().log()).mean()}
    for i, side in enumerate(("chosen", "rejected")):
        wanted |= {f"eval/logps/{side}": logps[:, i].mean(), f"eval/rewards/{side}": rewards[:, i].mean()}
    wanted |= {"eval/rewards/accuracies": (gap > 0).float().mean(), "eval/rewards/margins": gap.mean()}
    agree(evaluated(lines[-1]), {name: x.item() for name, x in wanted.items()})
    assert gap.abs().max() > 0.01
    for line, other in zip(untimed(again), untimed(lines), strict=True):
        agree(line, other)


@pytest.mark.parametrize("name, losses", [("hinge", [0.8, 1.6]), ("ipo", [0.36, 4.84])])
def test_other_losses_by_hand(name, losses, tokenizer):
    """Of beta Delta = .2 and -.6: max(0, 1 - beta Delta), and with means over tokens (Delta - 1 / (2 beta))^2."""
    args = dpo.Args(loss_type=name, beta=0.5, device="cpu")
    logps = torch.tensor([0.6, -0.4]), torch.tensor([0.2, 0.8])
    ours, *_ = dpo.dpo_loss(*logps, torch.zeros(2), torch.zeros(2), 0.5, name)
    assert ours.tolist() == pytest.approx(losses)
    model = saved(ROOT / "toy/sft")
    model.tokenizer = tokenizer
    pair = dpo.Pair(*map(np.array, ([5, 6], [7, 8, 9], [7])), 0.0)
    sums = [read_text(model, [5, 6, *text], 2)[0].sum().item() for text in (pair.chosen, pair.rejected)]
    sums[0] /= 3 if name == "ipo" else 1
    with torch.no_grad():
        assert torch.cat(dpo.completion_logps(model, [pair], args)).tolist() == pytest.approx(sums, rel=1e-4)


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
