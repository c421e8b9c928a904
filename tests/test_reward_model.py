"""reward_model.py: its head, lost EOS, evaluation by hand, and what other programs read of it."""

import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_hand import EOS, SETTINGS, TOKENIZER, agree, evaluated, ids_of, toy_rows, write_data, write_model
from runs import lines_of, main, merged, run, slow_but, watch, write_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

import ppo
import reward_model

# --- functions


def test_reward_head_begins_with_the_deviation_of_the_n_details():
    """1 / sqrt(80 + 1) in the toy model, which has no head yet; each seed has a head of its own."""
    heads = [reward_model.load_classifier(reward_model.Args(seed=seed)).score.weight for seed in range(20)]
    assert torch.cat(heads).std().item() == pytest.approx(1 / 9, rel=0.06)
    assert not torch.equal(heads[0], heads[1])


def pair_of(chosen, rejected, margin=0.0):
    prompt, *answers = (np.array(ids, np.int32) for ids in ([7], chosen, rejected))
    return reward_model.Pair(prompt, *answers, margin)


def cut_off(shown, pairs, *_):
    """Which of the two texts of each pair have lost an EOS."""
    return [(len(a.chosen) > len(b.chosen), len(a.rejected) > len(b.rejected)) for a, b in zip(pairs, shown)]


def test_the_end_of_a_text_says_nothing_about_its_pair():
    """Each text loses its EOS by itself, so that all four kinds of pairs occur, in their proportions."""
    pairs = [pair_of([5, EOS], [6, EOS])] * 4000
    counts = Counter(cut_off(reward_model.drop_eos(pairs, TOKENIZER, 0.25, seed=1), pairs))
    assert set(counts) == {(False, False), (False, True), (True, False), (True, True)}
    assert counts[True, True] / 4000 == pytest.approx(1 / 16, abs=0.02)
    assert counts[True, False] / 4000 == pytest.approx(3 / 16, abs=0.03)
    cut_to_length = pair_of([5, EOS], [5, 6])
    (shown,) = reward_model.drop_eos([cut_to_length], TOKENIZER, 1.0, seed=1)
    assert shown.chosen.tolist() == [5] and shown.rejected.tolist() == [5, 6]


# --- by hand


@pytest.fixture(scope="module")
def preferences(tmp_path_factory):
    rows = toy_rows("preferences", "train", 28)
    tests = toy_rows("preferences", "validation", 12)
    folder = write_data(tmp_path_factory.mktemp("pairs") / "data", train=rows, validation=tests)
    return SimpleNamespace(rows=encoded(rows), tests=encoded(tests), folder=folder)


def encoded(rows, length=36):
    """Chosen and rejected texts cut to a length."""
    return [[sum(ids_of(row["prompt"], row[side]), [])[:length] for side in ("chosen", "rejected")] for row in rows]


def reward(model, ids):
    hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
    return hidden @ model.score.weight[0] + getattr(model.config, "reward_bias", 0.0)


def rewards(model, pairs):
    return [torch.stack([reward(model, pair[side]) for pair in pairs]) for side in (0, 1)]


@torch.no_grad()
def evaluation(model, tests):
    """What reward_model.py should log of the test split."""
    chosen, rejected = rewards(model, tests)
    gap = chosen - rejected
    figures = dict(loss=(1 + (-gap).exp()).log().mean(), accuracy=(chosen > rejected).float().mean(), margin=gap.mean())
    bins = np.array_split(sorted(gap.tolist(), key=abs), 10)  # predicted and observed shares of right pairs in each
    errors = [abs((1 / (1 + np.exp(-abs(x)))).sum() - (x > 0).sum()) for x in bins]
    figures |= dict(std_reward=torch.cat([chosen, rejected]).std(), calibration_error=sum(errors) / len(gap))
    return {f"eval/{name}": x.item() for name, x in figures.items()}


def classifier(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()


KINDS = [("plain", {}), ("llama", {}), ("plain", {"lora_r": 2})]


@pytest.mark.parametrize("kind, more", slow_but(KINDS[:1], KINDS))
def test_evaluation_and_centred_rewards_by_hand(kind, more, preferences, tmp_path, monkeypatch):
    """Half of the texts without EOS, others in each step. Further training begins with the shift of the model that is
    saved. The Llama has dropout, which is off in evaluations."""
    drawn = []
    watch(monkeypatch, reward_model, "drop_eos", lambda *given: drawn.append(cut_off(*given)))
    settings = SETTINGS | more | dict(eos_dropout=0.5, max_grad_norm=4.0, model=write_model(tmp_path / "model", kind))
    lines = run(reward_model, tmp_path / "run", **settings | dict(dataset=preferences.folder))
    assert 20 < sum(sum(map(sum, some)) for some in drawn) < 76
    assert torch.tensor([some for some in drawn if len(some) == 6]).any(0).float().mean() > 0.8
    folder = merged(tmp_path / "run") if more else tmp_path / "run"
    after = classifier(folder)
    agree(evaluated(lines[-1]), evaluation(after, preferences.tests))
    assert torch.cat(rewards(after, preferences.rows)).mean().item() == pytest.approx(0, abs=1e-4)
    again = settings | dict(model=str(folder), dataset=preferences.folder, eos_dropout=0.0, batch_size=28)
    line, *_ = run(reward_model, tmp_path / "again", **again, center_rewards_coefficient=1.0)
    chosen, rejected = rewards(after, preferences.rows)
    losses = (chosen + rejected) ** 2 - (chosen - rejected).sigmoid().log()
    assert kind == "llama" or line["loss"] == pytest.approx(losses.mean().item(), rel=1e-3)


def test_a_longer_run_is_one_that_goes_on(preferences, tmp_path):
    """The shift of its first end leaves the rewards before it goes on."""
    settings = SETTINGS | dict(lr_scheduler_type="constant", warmup_ratio=0.0, save_total_limit=1, eval_steps=5)
    settings |= dict(model=write_model(tmp_path / "plain", "plain"), dataset=preferences.folder, num_train_epochs=2)
    settings |= dict(center_rewards_coefficient=0.1, save_steps=5)
    run(reward_model, tmp_path / "whole", **settings)
    run(reward_model, tmp_path / "halves", **settings | dict(num_train_epochs=1))
    copy = shutil.copytree(tmp_path / "halves", tmp_path / "copy")  # this process holds the lock of the other
    main(reward_model, "--resume", copy, "--num-train-epochs", 2)
    whole, halves = ([line["loss"] for line in lines_of(folder)] for folder in (tmp_path / "whole", copy))
    assert halves == pytest.approx(whole, rel=1e-5)
    bias = classifier(copy).config.reward_bias
    main(reward_model, "--resume", shutil.copytree(copy, tmp_path / "complete"))  # it has no step left
    assert classifier(tmp_path / "complete").config.reward_bias == bias


# --- in other programs


@pytest.mark.parametrize("kind, free", [("plain", "<|free|>"), ("llama", None)])
def test_other_programs_read_the_same_reward(kind, free, preferences, tmp_path):
    """Also if pad token and EOS are one: they look for the last token that is not the pad token. They miss a constant,
    which the config has."""
    model = write_model(tmp_path / "model", kind)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(model)
    settings = SETTINGS | dict(model=model, dataset=preferences.folder, max_length=64)
    if free is None:  # all special tokens are in a text
        rows = toy_rows("preferences", "train", 28)
        rows[0]["chosen"] += "".join(map(str, tokenizer.added_tokens_decoder.values()))
        settings["dataset"] = write_rows(tmp_path / "rows.jsonl", rows)
    run(reward_model, tmp_path / "run", **settings)
    after = classifier(tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert tokenizer.pad_token_id == after.config.pad_token_id != EOS
    assert (tokenizer.pad_token_id in tokenizer.added_tokens_decoder) or free is None
    bias = after.config.reward_bias
    assert bias != 0
    texts = [row["prompt"] + row["chosen"] + tokenizer.eos_token for row in toy_rows("preferences", "validation", 12)]
    texts = [text for text in texts if len(text) < 150]  # the model reads 64 tokens
    expected = [reward(after, TOKENIZER(text)["input_ids"]).item() - bias for text in texts]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        assert after(**batch).logits[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    read = pipeline("text-classification", model=str(tmp_path / "run"), device="cpu")
    assert [x["score"] for x in read(texts, batch_size=4)] == pytest.approx(expected, abs=1e-5)
    policy = SimpleNamespace(tokenizer=TOKENIZER)
    critic = ppo.load_critic(ppo.Args(reward_model=str(tmp_path / "run")), policy)
    assert critic["score"].bias.item() == pytest.approx(bias)
