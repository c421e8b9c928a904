"""Whole runs of the scripts: they learn, they repeat, and what they leave behind is usable."""

import json
import math
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

import ppo
import reward_model
import rloo
import sft
from runs import GOLD, lines_of, run, untimed
from sources import ROOT

# --- They learn, and the same run with a sign turned does the contrary

SEEDS = [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]


def turn_the_gradient(monkeypatch, module):
    """From here on the script goes up the loss."""
    right = module.clip_gradient

    def clip_and_turn(parameters, max_norm):
        for p in parameters:
            p.grad.neg_()
        return right(parameters, max_norm)

    monkeypatch.setattr(module, "clip_gradient", clip_and_turn)


def rewards_reached(output, seed):
    """What a short PPO run comes to in the learned and the gold score, from about 0: means of the last two updates.

    Over five seeds these were 0.5 to 1.7 and 1.0 to 1.8; with the advantages' sign turned, -0.4 and -0.2 at best.
    """
    lines = run(
        ppo, output, seed=seed, batch_size=32, total_episodes=32 * 4, response_length=16, gold_reward_fn=GOLD,
        learning_rate=1e-3, dataset_test_split="none",
    )  # fmt: skip
    return [sum(line[name] for line in lines[-2:]) / 2 for name in ("objective/scores", "objective/gold_scores")]


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_learns(tmp_path, seed):
    score, gold = rewards_reached(tmp_path, seed)
    assert score > 0.5 and gold > 0.6, (score, gold)


def test_ppo_unlearns_with_the_sign_turned(tmp_path, monkeypatch):
    right = ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda *a: (-right(*a)[0], right(*a)[1]))
    score, gold = rewards_reached(tmp_path, 1)
    assert score < -0.2 and gold < 0.1, (score, gold)


def sft_run(output, seed, part_of):
    """Ten steps from random weights, whose loss is that of an even draw of words: log 3072 = 8.03."""
    settings = dict(dataset_test_split="validation[:64]", batch_size=32, learning_rate=1e-2)
    lines = run(sft, output, seed=seed, dataset=part_of("sft", 320), **settings)
    assert lines[0]["loss"] == pytest.approx(8.03, abs=0.2)
    return lines[-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_sft_learns(tmp_path, seed, part_of):
    """Three seeds ended at 6.11 to 6.16, with the gradient turned at 10.8 to 11.1."""
    last = sft_run(tmp_path, seed, part_of)
    assert last["eval/loss"] < 6.6
    assert last["eval/perplexity"] == pytest.approx(math.exp(last["eval/loss"]), rel=1e-5)


def test_sft_unlearns_with_the_gradient_turned(tmp_path, monkeypatch, part_of):
    turn_the_gradient(monkeypatch, sft)
    assert sft_run(tmp_path, 1, part_of)["eval/loss"] > 9


@pytest.fixture(scope="session")
def clear_pairs(tmp_path_factory):
    """The pairs whose two texts differ most in their true reward: 384 to train on and 128 others to evaluate on."""
    rows = (ROOT / "toy/data/preferences/train.jsonl").read_text("utf-8").splitlines(keepends=True)[:3000]
    gold, pairs = ppo.load_function(GOLD), [json.loads(row) for row in rows]
    prompts = [pair["prompt"] for pair in pairs]
    good, bad = (gold(prompts, [pair[name] for pair in pairs]) for name in ("chosen", "rejected"))
    best = sorted(range(len(rows)), key=lambda i: bad[i] - good[i])[:512]
    folder = tmp_path_factory.mktemp("clear_pairs")
    for split, kept in (("validation", best[::4]), ("train", [x for i, x in enumerate(best) if i % 4])):
        (folder / f"{split}.jsonl").write_text("".join(rows[i] for i in kept), "utf-8")
    return str(folder)


@pytest.mark.parametrize("seed", SEEDS)
def test_reward_model_learns(tmp_path, seed, clear_pairs):
    """Five seeds came to accuracies of 0.64 to 0.73, losses of 0.56 to 0.69; with the gradient turned, 0.45 and 1.3."""
    last = run(reward_model, tmp_path, seed=seed, dataset=clear_pairs, learning_rate=3e-3, batch_size=32)[-1]
    assert last["eval/accuracy"] > 0.58 and last["eval/loss"] < 0.75
    assert abs(last["eval/mean_reward"]) < 0.5


def test_reward_model_unlearns_with_the_gradient_turned(tmp_path, monkeypatch, clear_pairs):
    turn_the_gradient(monkeypatch, reward_model)
    last = run(reward_model, tmp_path, dataset=clear_pairs, learning_rate=3e-3, batch_size=32)[-1]
    assert last["eval/accuracy"] < 0.55 and last["eval/loss"] > 1


# --- They repeat


MODULES = [ppo, rloo, sft, reward_model]


@pytest.fixture(scope="module")
def small(tiny):
    """Settings of a run of two updates or four steps, for each script."""
    return tiny | {name: tiny[name] | dict(total_episodes=16, num_eval_prompts=8) for name in ("ppo", "rloo")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small):
    """finished(module) -> the numbers of a run with the settings `small`, made once."""
    return cache(lambda module: run(module, tmp_path_factory.mktemp("run"), **small[module.__name__]))


@pytest.mark.parametrize("module", MODULES)
def test_same_seed_same_numbers(tmp_path, module, small, finished):
    b, c = (run(module, tmp_path / str(seed), seed=seed, **small[module.__name__]) for seed in (1, 2))
    assert untimed(finished(module)) == untimed(b) != untimed(c)


@pytest.mark.parametrize("module", MODULES)
def test_bf16(tmp_path, module, small, finished):
    """Autocast changes the numbers a little, the ratio check holds, and the saved weights are float32."""
    full, half = finished(module), run(module, tmp_path, bf16=True, **small[module.__name__])
    name = "policy/entropy_avg" if module in (ppo, rloo) else "loss"
    assert half[0][name] != full[0][name] and half[0][name] == pytest.approx(full[0][name], rel=0.3)
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


def test_cutting_a_mini_batch_changes_nothing(tmp_path):
    """One micro-batch of 16, or micro-batches of 3: the same weights after two updates, up to rounding."""
    settings = dict(total_episodes=32, response_length=8, batch_size=16, dataset_test_split="none")
    run(ppo, tmp_path / "a", micro_batch_size=16, **settings)
    run(ppo, tmp_path / "b", micro_batch_size=3, **settings)
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in "ab")
    start = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").state_dict()
    moved = sum((a[k] - start[k]).square().sum() for k in a).sqrt()
    apart = sum((a[k] - b[k]).square().sum() for k in a).sqrt()
    assert apart < 0.01 * moved


@pytest.mark.parametrize("module", [sft, reward_model])
def test_accumulation_changes_nothing(tmp_path, module, tiny):
    size = {"dataset": tiny[module.__name__]["dataset"], "dataset_test_split": "none"}
    a = run(module, tmp_path / "a", batch_size=16, **size)
    b = run(module, tmp_path / "b", per_device_train_batch_size=4, gradient_accumulation_steps=4, **size)
    assert [x["loss"] for x in a] == pytest.approx([x["loss"] for x in b], rel=1e-3)
    assert [x["grad_norm"] for x in a] == pytest.approx([x["grad_norm"] for x in b], rel=1e-2)


def test_policy_and_critic_are_clipped_apart():
    """One SGD step at rate 1 moves each of the two by exactly max_grad_norm."""
    args = ppo.Args(micro_batch_size=4, num_ppo_epochs=1, response_length=6, max_grad_norm=0.01)
    policy = ppo.load_policy(args)
    critic = ppo.make_critic(args, policy, ppo.load_reward_model(args, policy))
    prompts = [{"input_ids": ids} for ids in ([20, 30], [40], [50, 60], [70])]
    rollout = ppo.sample_batch(policy, prompts, args)
    ppo.score_reference(rollout, policy, deepcopy(policy), args)
    rollout.values = rollout.map(critic, args)
    rollout.advantages, rollout.returns = torch.randn_like(rollout.values), rollout.values + 10
    start = [[p.detach().clone() for p in model.parameters()] for model in (policy, critic)]
    groups = [{"params": model.parameters()} for model in (policy, critic)]
    ppo.optimize(policy, critic, torch.optim.SGD(groups, lr=1.0), rollout, [], args)
    for model, before in zip((policy, critic), start):
        moved = sum((p - b).square().sum() for p, b in zip(model.parameters(), before)).sqrt().item()
        assert moved == pytest.approx(0.01, rel=1e-2)


def test_first_update_has_ratio_1(tmp_path, tiny):
    """One epoch, one mini-batch: nothing has moved when the ratio is taken (N+ details)."""
    lines = run(ppo, tmp_path, num_ppo_epochs=1, dataset_test_split="none", **tiny["ppo"])
    for line in lines:
        assert line["val/ratio"] == pytest.approx(1, abs=1e-4) and line["policy/clipfrac_avg"] == 0
        assert line["policy/approxkl_avg"] < 1e-6
    assert lines[0]["objective/kl"] == pytest.approx(0, abs=1e-4)


# --- What they leave behind is usable


def test_what_a_run_leaves_behind(tmp_path, tiny, pictures):
    """The policy loads as anybody would load it, and the card has arguments and metrics."""
    run(ppo, tmp_path, **tiny["ppo"])
    text = pipeline("text-generation", model=str(tmp_path))("The film", max_new_tokens=5)[0]["generated_text"]
    assert text.startswith("The film")
    assert (tmp_path / "model.safetensors").exists() and not list(tmp_path.glob("*.bin"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    card = (tmp_path / "README.md").read_text()
    assert '"response_length": 8' in card and "`objective/scores`" in card and "toy/sft" in card
    assert json.loads((tmp_path / "args.json").read_text())["learning_rate"] > 0


def test_the_card_names_what_is_on_the_hub(tmp_path):
    """The hub's own parser reads base model and data; folders of this machine stay out of what the hub would link to."""
    local = str(ROOT / "toy/sft")
    for name, data, expected in (
        ("gpt2", "someone/prompts", ("gpt2", "someone/prompts")), ("toy/sft", local, (None, None)),
    ):  # fmt: skip
        ppo.write_card(tmp_path, ppo.Args(model=name, dataset=data), [{"eps": 1.0}])
        card = ModelCard.load(tmp_path / "README.md").data
        assert (card.base_model, card.datasets) == expected and card.tags == ["ppo"]


def test_the_shift_of_a_reward_model_is_seen_by_every_program(tmp_path, part_of):
    """The library's own class and pooling give the shifted reward, without a word from us."""
    run(reward_model, tmp_path, dataset=part_of("preferences", 64), dataset_test_split="none", batch_size=32)
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    rows = list(ppo.load_split(part_of("preferences", 64), None, "train"))
    texts = [row["prompt"] + row[k] + tokenizer.eos_token for row in rows for k in ("chosen", "rejected")]
    with torch.no_grad():
        rewards = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits
    assert abs(rewards.mean()) < 1e-4 < 0.1 < rewards.std()


@pytest.mark.parametrize("norm_has_bias", [True, False])
def test_shift_rewards(norm_has_bias):
    from test_rollout import tiny_model

    model = tiny_model("gpt_neox" if norm_has_bias else "llama", AutoModelForSequenceClassification, num_labels=1)
    model.config.reward_bias = 0.0  # as load_reward_model leaves it
    ids = torch.randint(4, 17, (3, 6))
    before = ppo.read_reward(model, ids, torch.ones_like(ids))
    reward_model.shift_rewards(model, 2.5)
    torch.testing.assert_close(ppo.read_reward(model, ids, torch.ones_like(ids)), before + 2.5, rtol=1e-4, atol=1e-4)
    assert model.config.reward_bias == (0.0 if norm_has_bias else 2.5)


def test_a_crash_loses_nothing(tmp_path, monkeypatch, tiny):
    """The reward function, which is tried first, dies in the second update: the policy of the first is on disk."""
    (tmp_path / "r.py").write_text(
        "calls = []\ndef reward(completions, **_):\n    calls.append(1)\n    assert len(calls) < 3\n"
        "    return list(map(len, completions))\n"
    )
    with pytest.raises(ppo.UserError, match="AssertionError"):
        run(ppo, tmp_path / "out", reward_fn=(f"{tmp_path}/r.py:reward",), **tiny["ppo"])
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


# --- Models and data of other kinds


def other_ids(folder):
    """The toy reward model with its token ids moved by 100: the same model of the same texts, in other tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(ROOT / "toy/reward_model")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/reward_model")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    V = len(state["model"]["vocab"])
    state["model"]["vocab"] = {token: (i + 100) % V for token, i in state["model"]["vocab"].items()}
    for token in state["added_tokens"]:
        token["id"] = (token["id"] + 100) % V
    model.base_model.wte.weight.data = model.base_model.wte.weight.data.roll(100, 0)
    model.config.pad_token_id = (tokenizer.pad_token_id + 100) % V
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return str(folder)


def test_other_tokenizer_of_the_reward_model(tmp_path, capsys, tiny):
    """Text is decoded and encoded again, so that the same texts get the same scores; and a run goes through."""
    args = ppo.Args(micro_batch_size=7)
    policy = ppo.load_policy(args)
    same, ours = ppo.load_reward_model(args, policy), policy.tokenizer
    args.reward_model = other_ids(tmp_path / "rm")
    other = ppo.load_reward_model(args, policy)
    assert other.tokenizer.get_vocab() != ours.get_vocab()
    rows = list(ppo.load_split("toy/data/sft", None, "validation"))[:20]
    prompts = ppo.pad([ours(r["prompt"])["input_ids"] for r in rows], ours.pad_token_id, args, left=True)
    ended = torch.arange(20) % 2 == 0
    ids = [ours(r["completion"])["input_ids"] + [ours.eos_token_id] * e for r, e in zip(rows, ended.tolist())]
    responses, mask = ppo.pad(ids, ours.pad_token_id, args)
    rollout = ppo.Rollout(*prompts, responses, mask, ended, torch.zeros(mask.shape))
    a, b = (ppo.model_reward(model, policy, args)(rollout) for model in (same, other))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    run(ppo, tmp_path / "out", reward_model=args.reward_model, **tiny["ppo"] | {"total_episodes": 8})
    assert "starts from the policy" in capsys.readouterr().out


def test_classifier_with_labels(tmp_path, tiny):
    """--reward-label reads that label: NEGATIVE is the mirror of POSITIVE here, so the scores are too."""
    model = AutoModelForSequenceClassification.from_pretrained(ROOT / "toy/reward_model")
    model.score.weight = torch.nn.Parameter(torch.cat([-model.score.weight, model.score.weight]))
    model.config.id2label, model.config.label2id = {0: "NEGATIVE", 1: "POSITIVE"}, {"NEGATIVE": 0, "POSITIVE": 1}
    model.save_pretrained(tmp_path / "c")
    AutoTokenizer.from_pretrained(ROOT / "toy/reward_model").save_pretrained(tmp_path / "c")
    bad, good = (
        run(ppo, tmp_path / x, reward_model=str(tmp_path / "c"), reward_label=x, **tiny["ppo"] | {"total_episodes": 8})
        for x in ("NEGATIVE", "POSITIVE")
    )
    assert bad[0]["objective/scores"] == pytest.approx(-good[0]["objective/scores"], abs=1e-4)


def test_classifier_of_another_family(tmp_path, tiny):
    """A DistilBERT pools at its first token: its own logits are the reward."""
    from transformers import BertTokenizer, DistilBertConfig

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "is", "good", "bad", "it", "was", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    config = DistilBertConfig(vocab_size=13, dim=16, n_layers=1, n_heads=2, hidden_dim=16, num_labels=2,
                              id2label={0: "NEGATIVE", 1: "POSITIVE"}, max_position_embeddings=256)  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "c")
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "c")
    settings = tiny["ppo"] | {"total_episodes": 8}
    assert len(run(ppo, tmp_path / "out", reward_model=str(tmp_path / "c"), reward_label="POSITIVE", **settings)) == 1


def test_offline_wandb_carries_the_same_names(tmp_path, monkeypatch, tiny):
    """A real offline run, its settings as on the command line; what is logged is what metrics.jsonl has."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # it remembers the mode of whichever test came before
    logged, init = [], wandb.init

    def spy(**settings):
        logged.append(settings)
        session = init(**settings)
        log = session.log
        session.log = lambda data, **k: (logged.append(data), log(data, **k))
        return session

    monkeypatch.setattr(wandb, "init", spy)
    lines = run(ppo, tmp_path, track=True, wandb_project_name="p", wandb_entity="e", **tiny["ppo"])
    assert logged[0]["project"] == "p" and logged[0]["entity"] == "e" and logged[1:] == lines
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_messages_and_packing(tmp_path):
    """A chat template: the assistant's words and the end of its turn carry the loss, nothing else does."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/base")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    turns = [{"role": r, "content": c} for r, c in
             (("user", "The film"), ("assistant", "is good."), ("user", "Why"), ("assistant", "It sings."))]  # fmt: skip
    ids, labels = sft.encode_messages(turns, tokenizer, True)
    said = tokenizer.decode([x for x in labels if x != sft.IGNORE])
    assert said == "is good.<|end|>It sings.<|end|>"
    text = "user:\nThe film<|end|>assistant:\nis good.<|end|>user:\nWhy<|end|>assistant:\nIt sings.<|end|>"
    assert tokenizer.decode(ids) == text
    assert sft.encode_messages(turns, tokenizer, False)[1] == ids
    tokenizer.save_pretrained(tmp_path / "m")
    AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    rows = "".join(
        json.dumps({"messages": turns, "chosen": turns, "rejected": turns[:3] + turns[1:2]}) + "\n" for _ in range(16)
    )
    (tmp_path / "d.jsonl").write_text(rows)
    paths = dict(model=str(tmp_path / "m"), dataset=str(tmp_path / "d.jsonl"))
    data = paths | dict(dataset_test_split="none", batch_size=4)
    assert run(sft, tmp_path / "sft", packing=True, max_length=16, **data)[-1]["loss"] > 0
    assert run(reward_model, tmp_path / "rm", **data)[-1]["loss"] > 0


def test_margin_and_whole_texts(tmp_path):
    """Pairs without a prompt column; a margin column enters the loss."""
    rows = [{"chosen": f"The film is good {i}.", "rejected": f"The film is bad {i}."} for i in range(8)]
    for name, extra in (("a", {}), ("b", {"margin": 2.0})):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row | extra) + "\n" for row in rows))
    a, b = (
        run(reward_model, tmp_path / n, dataset=str(tmp_path / f"{n}.jsonl"), dataset_test_split="none") for n in "ab"
    )
    assert b[0]["loss"] > a[0]["loss"] + 0.5 and b[0]["margin"] == pytest.approx(a[0]["margin"])


def test_a_half_precision_checkpoint_is_loaded_as_float32(tmp_path):
    AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").half().save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(ROOT / "toy/sft").save_pretrained(tmp_path / "m")
    args = ppo.Args(model=str(tmp_path / "m"))
    assert ppo.load_policy(args).dtype == torch.float32


def test_hyphens_underscores_and_other_trainers_names(tmp_path, monkeypatch, capsys):
    """TRL's spellings on a command line, with `=` too; the table of samples and the final files appear."""
    flags = (
        "--sft_model_path=toy/sft --reward_model_path toy/reward_model --dataset_name=toy/data/prompts "
        "--dataset_train_split validation --per_device_train_batch_size=4 --total_episodes 8 --response-length=6 "
        "--missing_eos_penalty 1.0 --stop_token=eos --init_kl_coef=0.03 --ppo_epochs 2 --num-mini-batches 1"
    )
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["ppo.py", *flags.split(), f"--output_dir={tmp_path}/out", "--device=cpu"])
    ppo.main()
    out = capsys.readouterr().out
    assert "update 1 of 2" in out and "score" in out and "batch: 4 responses" in out
    args = json.loads((tmp_path / "out/args.json").read_text())
    given = dict(model="toy/sft", dataset_train_split="validation", missing_eos_penalty=1.0, kl_coef=0.03)
    assert (given | dict(num_ppo_epochs=2, batch_size=4, micro_batch_size=4)).items() <= args.items()
