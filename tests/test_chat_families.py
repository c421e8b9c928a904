"""Ten families of chat models: all scripts and tools read one conversation alike, and end its turns where it ends."""

import json
import re
import sys
import warnings

import pytest
import torch
from families import FAMILIES, make_tokenizer, save_family
from runs import run
from test_compare import compare
from test_evaluate import evaluate
from test_xray import xray
from transformers import AutoModelForSequenceClassification, GenerationConfig

import chat
import dpo
import grpo
import ppo
import reward_model
import rloo
import sft

TALK = [
    {"role": "user", "content": "The film?"},
    {"role": "assistant", "content": "It is good."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "It sings."},
]
REWRITE = {"qwen 3", "gpt-oss"}  # what they write for a turn depends on what follows it


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(family):
    return make_tokenizer(family)


@pytest.mark.parametrize("prompt", [TALK[:1], TALK[:3]], ids=["one turn", "two turns"])
def test_all_scripts_read_one_text(tokenizer, prompt):
    """That of a rollout: the prompt up to where the assistant speaks, its words, the token that ends its turn. No line
    break behind it is taught, or read by a reward model."""
    head = ppo.encode_prompt(prompt, tokenizer)
    ids, labels = sft.encode_pair(prompt, "It sings.", tokenizer, True)
    end, _ = ppo.turn_end(tokenizer)
    assert ids[: len(head)] == head and labels == [sft.IGNORE] * len(head) + ids[len(head) :]
    assert tokenizer.decode(ids[len(head) :]).endswith(f"It sings.{end}")
    assert reward_model.encode_whole(prompt, "It sings.", tokenizer) == ids
    pair = dpo.encode_preference(prompt, "It sings.", "No.", tokenizer)
    assert pair.prompt + pair.chosen == ids and pair.rejected[-1] == pair.chosen[-1] == ids[-1]
    (cut,) = reward_model.drop_eos([reward_model.Pair(ids, ids)], tokenizer, 1.0)
    assert cut.chosen == ids[:-1]


def test_the_turns_that_are_trained(family, tokenizer):
    """All of the assistant's, each with its end; where a template rewrites earlier ones, the last, and it is said."""
    end, behind = ppo.turn_end(tokenizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ids, labels = sft.encode_messages(TALK, tokenizer, True)
        assert sft.encode_messages(TALK, tokenizer, False) == (ids, ids)
    text = "".join("|" if label == sft.IGNORE else tokenizer.decode(label) for label in labels)
    turns = [turn.partition("It")[2] for turn in re.split(r"\|{2,}", text) if turn]
    assert turns == [f" is good.{end}", f" sings.{end}"][family in REWRITE :]
    assert said or family not in REWRITE
    assert tokenizer.decode(ids) + behind == tokenizer.apply_chat_template(TALK, tokenize=False)


QUICK = ["llama 3", "gemma 3", "phi 3.5"]
OTHERS = [name for name in FAMILIES if name not in QUICK]


@pytest.mark.parametrize("name", QUICK + [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS])
@pytest.mark.parametrize("judge", ["its own", "gemma 3"])
def test_rewards_of_tools_and_training(name, judge, tmp_path):
    """Both read what the reward model was trained on: the policy's tokens, or its own template of the messages."""
    policy, own = save_family(name, tmp_path / "policy")
    folder = save_family(judge, tmp_path / "judge")[1] if judge in FAMILIES else own
    if folder is None:
        pytest.skip("the library has no reward model of this family")
    args = ppo.Args(model=policy, reward_model=folder, device="cpu", micro_batch_size=2)
    policy = ppo.load_policy(args)
    model = ppo.load_reward_model(args, policy)
    rows = [{"prompt": TALK[:1]}, {"prompt": TALK[:3]}, {"prompt": TALK[:1]}]
    ids = [ppo.encode_prompt(row["prompt"], policy.tokenizer) for row in rows]
    whole = [sft.encode_pair(row["prompt"], "It sings.", policy.tokenizer, True)[0] for row in rows]
    written = [both[len(prompt) :] for both, prompt in zip(whole, ids)]
    written[2] = written[2][:-1]
    text = policy.tokenizer.decode(written[2], skip_special_tokens=True)
    letters = [token for x in "It sings." for token in policy.tokenizer(x, add_special_tokens=False)["input_ids"]]
    written[1] = letters + written[1][-1:]  # as a policy may spell it, and no tokenizer
    ended = torch.tensor([True, True, False])
    prompts = ppo.pad(ids, policy.tokenizer, args, "left")
    responses, mask = ppo.pad(written, policy.tokenizer, args)
    rollout = ppo.Rollout(*prompts, responses, mask, ended, torch.zeros(mask.shape), rows)
    trained = ppo.model_reward(model, policy, args)(rollout)
    settings = evaluate.Args(folder, device="cpu")
    answers = [
        evaluate.Answer(*x, policy.tokenizer)
        for x in zip(rows, [""] * 3, ids, [text, "It sings.", text], written, ended.tolist())
    ]
    loaded = evaluate.load_model(AutoModelForSequenceClassification, folder, settings)
    assert evaluate.model_reward(loaded, settings)(answers) == pytest.approx(trained.tolist(), abs=1e-5)
    text = "It sings." if folder == own or judge == name else text
    texts = [reward_model.encode_whole(row["prompt"], text, model.tokenizer) for row in rows]
    texts[2] = texts[2][:-1]
    ids, mask = ppo.pad(texts, model.tokenizer, args)
    with torch.no_grad():
        rewards = ppo.read_reward(model, ids, mask.long())[::2]
    assert rewards.tolist() == pytest.approx(trained[::2].tolist(), abs=1e-5)


def test_the_stop_tokens(family, tokenizer, tmp_path):
    """Those that the makers name, with the tokenizer's."""
    policy, _ = save_family(family, tmp_path)
    names = {*FAMILIES[family].stops.split(), FAMILIES[family].eos}
    assert set(ppo.load_policy(ppo.Args(model=policy)).stop_token_ids) == set(tokenizer.convert_tokens_to_ids([*names]))


@pytest.mark.slow
def test_everything_runs(tmp_path, monkeypatch, capsys):
    """Six scripts and four tools on all ten families."""
    (tmp_path / "r.py").write_text("def f(completion_ids, **_):\n    return [sum(ids) for ids in completion_ids]\n")
    for name in FAMILIES:
        folder = tmp_path / name.replace(" ", "-")
        policy, reward = save_family(name, folder)
        rows = [{"prompt": TALK[:3], "chosen": TALK[3:], "rejected": "No.", "messages": TALK}] * 8
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = dict(dataset=f"{folder}/data.jsonl", num_sample_generations=1)
        rewards = (reward,) if reward else (f"{tmp_path}/r.py:f",)
        judged = dict(reward_model=reward) if reward else dict(reward_fn=rewards)
        rollouts = dict(batch_size=4, total_episodes=4, response_length=8, num_ppo_epochs=1) | judged
        for script in (sft, dpo, ppo, rloo, grpo, *([reward_model] if reward else [])):
            settings = data | (rollouts if script in (ppo, rloo, grpo) else dict(batch_size=8))
            if script is grpo:
                settings |= dict(num_generations=2, reward_fn=("reward_model",) if reward else rewards)
            run(script, folder / script.__name__, model=policy, **settings)
            if script is not reward_model:
                left = GenerationConfig.from_pretrained(folder / script.__name__).eos_token_id
                assert set(left) == set(ppo.load_policy(ppo.Args(model=policy)).stop_token_ids)
        sizes = dict(dataset=data["dataset"], device="cpu", response_length=8)
        args = evaluate.Args(f"{folder}/ppo", reference=policy, reward_fn=rewards, **sizes)
        summary, _ = evaluate.evaluate(args)
        assert summary["mean"].notna().all()
        sides = dict(model=f"{folder}/ppo", other=policy, reward_fn=rewards[0], output_dir=f"{folder}/compare")
        assert compare.compare(compare.Args(**sides, **sizes))["unjudged"] == 0
        assert xray.make_page(folder / "grpo")
        monkeypatch.setattr(sys, "argv", ["chat.py", policy, "--response-length", "8"])
        lines = iter(["The film?", "why " * 600, "Why?"])
        monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or (_ for _ in ()).throw(EOFError))
        chat.main()
    assert capsys.readouterr().out.count("that is too long") == len(FAMILIES)
