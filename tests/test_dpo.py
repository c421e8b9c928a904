"""dpo.py: reading pairs, what its arguments promise, and whole runs by hand."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_hand import SETTINGS, agree, evaluated, ids_of, read_text, saved, toy_rows, write_data, write_model
from runs import run, untimed, watch, write_rows
from sources import ROOT
from transformers import AutoTokenizer

import dpo
import reward_model

# --- reading pairs

BOTH = pytest.mark.parametrize("module", [dpo, reward_model], ids=lambda module: module.__name__)


def load(module, file, tokenizer, **settings):
    """The pairs of a file, as a model with this tokenizer reads them."""
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=512))
    model = SimpleNamespace(tokenizer=tokenizer, config=config)
    return module.load_pairs(module.Args(dataset=file, **settings), "train", model)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "toy/sft")


def test_one_eos_is_enough(tokenizer, tmp_path):
    texts = [" is good.", " is good." + tokenizer.eos_token]
    rows = [dict(prompt="The film", chosen=text, rejected=" is bad.") for text in texts]
    pair, ended = load(dpo, write_rows(tmp_path / "d.jsonl", rows), tokenizer)
    assert ended.chosen.tolist() == pair.chosen.tolist()
    assert pair.chosen.tolist().count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("mode, prompt", [("keep_end", [3, 4]), ("keep_start", [1, 2])])
def test_cut_to_fit(mode, prompt):
    pair = dpo.Pair(*map(np.array, ([1, 2, 3, 4], [5, 6, 7], [5, 6, 8])), 0.0)
    args = dpo.Args(max_prompt_length=2, truncation_mode=mode)
    cut = dpo.cut_to_fit(pair, 4, args)
    assert [x.tolist() for x in (cut.prompt, cut.chosen, cut.rejected)] == [prompt, [5, 6], [5, 6]]
    whole = dpo.cut_to_fit(pair, 7, args)
    assert [x.tolist() for x in (whole.prompt, whole.chosen)] == [[1, 2, 3, 4], [5, 6, 7]]


TEXTS = dict(prompt="The film", chosen=" is good.", rejected=" is bad.")


@BOTH
def test_pairs_that_are_cut_are_counted(module, tokenizer, tmp_path, capsys):
    """The second has equal answers within the limit."""
    long = dict(prompt="The film", chosen=" is" * 20 + " good.", rejected=" is" * 20 + " bad.")
    far = dict(prompt="The film", chosen=" is" * 20 + " good.", rejected=" bad" * 20)
    file = write_rows(tmp_path / "d.jsonl", [TEXTS, long, far])
    settings = dict(max_prompt_length=8) if module is dpo else {}
    pairs = load(module, file, tokenizer, max_length=12, **settings)
    assert [len(pair) for pair in pairs[1:]] == [12]
    assert "2 of 3 pairs differ within 12 tokens; 2 were cut" in capsys.readouterr().out


# --- by hand

DPO = SETTINGS | dict(max_length=30, max_prompt_length=4, beta=0.3, label_smoothing=0.1, max_grad_norm=3.0)


@pytest.fixture(scope="module")
def choices(tmp_path_factory):
    """Pairs with a prompt each; those of one are the same where they are cut."""
    rows = toy_rows("preferences", "train", 28)
    tests = toy_rows("preferences", "validation", 12)
    rows[1]["rejected"] = rows[1]["chosen"] = rows[1]["chosen"] * 9
    rows[1]["rejected"] += " Bad."
    folder = tmp_path_factory.mktemp("choices")
    data = write_data(folder / "data", train=rows, validation=tests)
    return SimpleNamespace(rows=rows, tests=tests, dataset=data, model=write_model(folder / "model", "dropout"))


def cut_pairs(rows, length=30, prompt_length=4):
    """[(prompt, chosen, rejected)] of rows, within a length; those that are then equal are left out."""
    found = []
    for row in rows:
        prompt, chosen = ids_of(row["prompt"], row["chosen"])
        _, rejected = ids_of(row["prompt"], row["rejected"])
        if len(prompt) + max(len(chosen), len(rejected)) > length:
            prompt = prompt[-prompt_length:]
        room = length - len(prompt)
        if chosen[:room] != rejected[:room]:
            found.append((prompt, chosen[:room], rejected[:room]))
    return found


def logps(model, pair, args):
    """Log-probabilities of both completions, summed over their tokens, or for ipo their means."""
    prompt, *ends = pair
    for end in ends:
        logprobs, _ = read_text(model, prompt + end, len(prompt))
        yield logprobs.mean() if args.loss_type == "ipo" else logprobs.sum()


def pair_loss(args, gap):
    """The loss of a pair whose log-ratios differ by the gap."""
    if args.loss_type == "ipo":
        return (gap - 0.5 / args.beta) ** 2
    right = torch.sigmoid(args.beta * gap)
    smoothing = args.label_smoothing
    return -(1 - smoothing) * right.log() - smoothing * (1 - right).log()


def reader(args, reference):
    """A function that reads pairs with a policy: their mean loss, and what is logged beside it."""

    def read(policy, pairs):
        losses = []
        rows = []
        for pair in pairs:
            a, b = logps(policy, pair, args)
            with torch.no_grad():
                ref_a, ref_b = logps(reference, pair, args)
            losses.append(pair_loss(args, (a - ref_a) - (b - ref_b)))
            rows.append(torch.stack([a, b, args.beta * (a - ref_a), args.beta * (b - ref_b)]).detach())
        a, b, chosen, rejected = torch.stack(rows).T
        stats = {
            "logps/chosen": a.mean().item(),
            "logps/rejected": b.mean().item(),
            "rewards/chosen": chosen.mean().item(),
            "rewards/rejected": rejected.mean().item(),
            "rewards/accuracies": (chosen > rejected).float().mean().item(),
            "rewards/margins": (chosen - rejected).mean().item(),
        }
        return torch.stack(losses).mean(), stats

    return read


@torch.no_grad()
def evaluate(read, tests, policy):
    """What dpo.py should log of the pairs of the test split."""
    loss, stats = read(policy, tests)
    return {f"eval/{name}": x for name, x in stats.items()} | {"eval/loss": loss.item()}


ADAPTER = dict(lora_r=2, learning_rate=5e-2, loss_type="ipo", label_smoothing=0.0)


@pytest.mark.parametrize("more", [{}, ADAPTER], ids=["sigmoid", "an adapter, ipo"])
def test_evaluation_and_reference_by_hand(more, choices, tmp_path, monkeypatch):
    """The evaluation of the model that is saved; in each step the log-probabilities of the reference, with or without
    precomputing them. The steps themselves are held to the short form, in test_lecture.py."""
    given = DPO | dict(model=choices.model, dataset=choices.dataset, num_sample_generations=0) | more
    batches = []
    watch(monkeypatch, dpo, "length_grouped_batches", lambda found, *_: batches.extend(found[0]))
    lines = run(dpo, tmp_path / "run", **given)
    args = SimpleNamespace(**vars(dpo.Args()) | given)
    reference = saved(choices.model)
    read = reader(args, reference)
    agree(
        evaluated(lines[-1]),
        evaluate(read, cut_pairs(choices.tests), saved(tmp_path / ("run/merged" if more else "run"))),
    )
    pairs = cut_pairs(choices.rows)
    prompts = [len(pair[0]) for pair in pairs]
    assert len(pairs) == 27 and min(prompts) <= 4 < max(prompts)
    for number, line in enumerate(lines):
        _, stats = read(reference, [pairs[i] for i in batches[number]])  # its log-probabilities are the reference's
        for side in ("chosen", "rejected"):
            ours = line[f"logps/{side}"] - line[f"rewards/{side}"] / given["beta"]
            assert ours == pytest.approx(stats[f"logps/{side}"], rel=1e-3)
    assert abs(lines[-1]["rewards/margins"]) > 0.01
    again = run(dpo, tmp_path / "precomputed", precompute_ref=True, **given)
    for line, other in zip(untimed(again), untimed(lines), strict=True):
        agree(line, other)


def test_the_reference_leaves_the_memory_once_all_is_precomputed(tmp_path, tiny, monkeypatch):
    """Its memory is what the flag is for."""
    seen = []

    def look(*_):
        gc.collect()
        assert seen[0]() is None

    watch(monkeypatch, dpo, "deepcopy", lambda reference, *_: seen.append(weakref.ref(reference)))
    watch(monkeypatch, dpo, "dpo_loss", look)
    assert run(dpo, tmp_path, precompute_ref=True, **tiny["dpo"])


# --- learning


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_dpo_learns(seed, tmp_path, clear_pairs):
    """After 48 steps three seeds had a margin of 0.47 to 0.56 on unseen pairs."""
    lines = run(dpo, tmp_path / "run", seed=seed, dataset=clear_pairs, batch_size=8, learning_rate=5e-4)
    assert lines[-1]["eval/rewards/margins"] > 0.2


@BOTH
def test_batches_of_similar_length_in_random_order(module):
    """Each pass has all pairs, in an order of its own; neither rows nor batches come by length."""
    pairs = [range(n) for n in torch.randperm(200).tolist()]
    batches, n = module.length_grouped_batches(pairs, module.Args(batch_size=8, num_train_epochs=1.5))
    assert n == 25 and len(batches) == 50
    for part in (batches[:25], batches[25:]):
        assert sorted(sum(part, [])) == list(range(200))
        lengths = [[len(pairs[i]) for i in rows] for rows in part]
        assert all(max(x) - min(x) == 7 for x in lengths)
        assert lengths != sorted(lengths)
    assert batches[:25] != batches[25:]
