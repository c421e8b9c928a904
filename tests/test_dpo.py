"""dpo.py: encoding, reading, what its arguments promise, and whole runs by hand."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from replay import (
    SETTINGS,
    agree,
    evaluated,
    ids_of,
    read_text,
    saved,
    share_of_rate,
    toy_rows,
    write_data,
    write_model,
)
from runs import run, untimed, watch, write_rows
from safetensors.torch import load_file
from sources import ROOT
from transformers import AutoTokenizer

import dpo
import reward_model

# --- encoding


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "toy/sft")


def test_one_eos_is_enough(tokenizer):
    texts = (" is good.", " is good." + tokenizer.eos_token)
    pair, ended = (dpo.encode_preference("The film", text, " is bad.", tokenizer) for text in texts)
    assert ended == pair
    assert pair.chosen.count(tokenizer.eos_token_id) == 1


def test_whole_texts_share_their_beginning(tokenizer):
    pair = dpo.encode_preference("", "The film is good.", "The film is bad.", tokenizer)
    assert tokenizer.decode(pair.prompt) == "The film is"
    assert tokenizer.decode(pair.chosen) == " good." + tokenizer.eos_token
    apart = dpo.encode_preference("", "Good.", "Bad.", tokenizer)
    assert apart.prompt == [tokenizer.bos_token_id or tokenizer.eos_token_id]
    assert tokenizer.decode(apart.rejected) == "Bad." + tokenizer.eos_token


@pytest.mark.parametrize("mode, prompt", [("keep_end", [3, 4]), ("keep_start", [1, 2])])
def test_cut_to_fit(mode, prompt):
    pair = dpo.Preference([1, 2, 3, 4], [5, 6, 7], [5, 6, 8])
    assert dpo.cut_to_fit(pair, 4, 2, mode) == dpo.Preference(prompt, [5, 6], [5, 6])
    assert dpo.cut_to_fit(pair, 7, 2, mode) == pair


@pytest.mark.parametrize("module", [dpo, reward_model], ids=lambda module: module.__name__)
def test_a_micro_batch_has_room_for_prompts(module, tmp_path, monkeypatch):
    """Two texts a pair, each with its prompt."""
    rows = [dict(prompt="The film is good. " * 9, chosen="Good.", rejected="Bad.")] * 4
    sizes = []
    fit = module.rows_that_fit
    monkeypatch.setattr(module, "rows_that_fit", lambda model, n, args: sizes.append(n) or fit(model, n, args))
    run(module, tmp_path / "out", dataset=write_rows(tmp_path / "d.jsonl", rows), batch_size=4)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    assert sizes == [2 * (len(tokenizer(rows[0]["prompt"] + "Good.")["input_ids"]) + 1)]  # and EOS


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


ADAPTER = dict(lora_r=2, lora_alpha=8.0, learning_rate=5e-2, loss_type="ipo", label_smoothing=0.0)


@pytest.mark.parametrize("more", [{}, ADAPTER], ids=["sigmoid", "an adapter, ipo"])
def test_dpo_by_hand(more, choices, tmp_path):
    """The evaluation of the model that is saved; in each step the log-probabilities of the reference, with or without
    precomputing them. The steps themselves are held to the short form, in test_lecture.py."""
    given = DPO | dict(model=choices.model, dataset=choices.dataset, num_sample_generations=1) | more
    lines = run(dpo, tmp_path / "run", **given)
    after = saved(tmp_path / ("run/merged" if more else "run"))
    reference = saved(choices.model)
    args = SimpleNamespace(**vars(dpo.Args()) | given)
    read = reader(args, reference)
    agree(evaluated(lines[-1]), evaluate(read, cut_pairs(choices.tests), after))
    pairs = cut_pairs(choices.rows)
    prompts = [len(pair[0]) for pair in pairs]
    assert len(pairs) == 27 and min(prompts) <= 4 < max(prompts)
    lengths = [len(pair[0]) + max(map(len, pair[1:])) for pair in pairs]
    warmup = int(args.warmup_ratio * len(lines))
    for number, line in enumerate(lines):
        share = share_of_rate(args.lr_scheduler_type, number, len(lines), warmup)
        assert line["lr"] == pytest.approx(args.learning_rate * share)
        assert line["epoch"] == pytest.approx((number + 1) / 5)
        rows = dpo.length_grouped_batch(lengths, number, 6, 1)
        _, stats = read(reference, [pairs[i] for i in rows])  # its log-probabilities are the reference's
        for side in ("chosen", "rejected"):
            ours = line[f"logps/{side}"] - line[f"rewards/{side}"] / given["beta"]
            assert ours == pytest.approx(stats[f"logps/{side}"], rel=1e-3)
    assert abs(lines[-1]["rewards/margins"]) > 0.01
    (table,) = (tmp_path / "run/samples").iterdir()
    shown = load_file(table)
    for i, (prompt, *_) in enumerate(cut_pairs(choices.tests)[:3]):
        assert shown["prompts"][i, shown["prompt_mask"][i]].tolist() == prompt
        answer = shown["responses"][i, shown["mask"][i]].tolist()
        for name, model in {"logprobs": after, "ref_logprobs": reference}.items():
            logprobs, _ = read_text(model, prompt + answer, len(prompt))
            assert shown[name][i, : len(answer)].tolist() == pytest.approx(logprobs.tolist(), abs=1e-4)
    again = run(dpo, tmp_path / "precomputed", precompute_ref=True, **given)
    for line, other in zip(untimed(again), untimed(lines), strict=True):
        agree(line, other)


def test_the_reference_is_gone_once_all_is_precomputed(tmp_path, tiny, monkeypatch):
    """Its memory is what the flag is for."""
    seen = []

    def look(*_):
        gc.collect()
        assert seen[0]() is None

    watch(monkeypatch, dpo, "make_reference", lambda reference, *_: seen.append(weakref.ref(reference)))
    watch(monkeypatch, dpo, "dpo_loss", look)
    assert run(dpo, tmp_path, precompute_ref=True, **tiny["dpo"])


def test_without_a_reference_none_is_made(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(dpo, "make_reference", None)
    assert run(dpo, tmp_path, reference_free=True, **tiny["dpo"])


# --- learning


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_dpo_learns(seed, tmp_path, clear_pairs):
    """After 48 steps three seeds had a margin of 0.47 to 0.56 on unseen pairs."""
    lines = run(dpo, tmp_path / "run", seed=seed, dataset=clear_pairs, batch_size=8, learning_rate=5e-4)
    assert lines[-1]["eval/rewards/margins"] > 0.2


def test_rows_and_batches_have_orders_of_their_own(monkeypatch):
    """In three passes of two batches no permutation serves twice: else the batches would come in the order of rows."""
    drawn = set()
    monkeypatch.setattr(dpo, "shuffled", lambda n, seed, number: drawn.add(number) or list(range(n)))
    for number in range(6):
        dpo.length_grouped_batch([1] * 8, number, 4, seed=1)
    assert len(drawn) == 6
