"""Step 2: KL and rewards of responses, each read where it belongs; and what a reward function is given."""

import json
import math
import sys
import textwrap
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from families import save_family
from runs import run, script, slow_but, write_rows
from sources import ROOT, lines_of
from tiny import tiny_model, tiny_rollout
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import ppo

GROUPS = {"rloo": {"rloo_k": 4}, "grpo": {"num_generations": 4}}
NOTE = """
import json

def note(prompts, completions, completion_ids, **columns):
    with open(__file__ + "l", "a") as file:
        print(json.dumps([prompts, completions, completion_ids]), file=file)
    return [0.0] * len(prompts)
"""


@pytest.fixture
def write(tmp_path):
    """write(code, name) -> that name in a file of reward functions with this code."""
    return lambda code, name="f": (tmp_path / "r.py").write_text(textwrap.dedent(code)) and f"{tmp_path}/r.py:{name}"


def noted(tmp_path):
    """What the function of NOTE was given: prompt, completion and token ids of each row, batch by batch."""
    batches = [json.loads(line) for line in (tmp_path / "r.pyl").read_text().splitlines()]
    return [list(zip(*batch)) for batch in batches]


def train(name, folder, *rewards, **settings):
    """A run of two updates, scored by these functions."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(lines_of("toy/data/prompts/train.jsonl")[:20]))
    sizes = dict(batch_size=8, total_episodes=16, response_length=8, missing_eos_penalty=0.0)
    settings = dict(model="toy/sft", dataset=str(prompts)) | GROUPS.get(name, {}) | settings
    return run(name, folder / f"run{len(list(folder.iterdir()))}", reward_fn=rewards, **sizes | settings)


JUDGES = {  # name: settings of the policy's tokenizer, and of the reward model's
    "the padding token is EOS": (dict(pad_token="<|end|>"), dict(pad_token="<|end|>")),
    "another EOS": ({}, dict(eos_token=".")),
    "other tokens": ({}, None),
}


@pytest.mark.parametrize("judge", slow_but(["other tokens", "another EOS"], JUDGES))
def test_rewards_are_read_at_the_last_token(judge, tmp_path, write):
    """By hand, row by row: of the policy's tokens; if the tokenizers differ, of the text and the judge's EOS."""
    classes = {"sft": AutoModelForCausalLM, "reward_model": AutoModelForSequenceClassification}
    folders = [tmp_path / name for name in classes]
    for folder, auto_class, settings in zip(folders, classes.values(), JUDGES[judge]):
        if settings is not None:
            model = auto_class.from_pretrained(ROOT / "toy" / folder.name)
            model.config.reward_bias = 0.7
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(ROOT / "toy/sft", **settings).save_pretrained(folder)
    if judge == "other tokens":
        folders[1] = save_family("gemma 3", tmp_path)[1]
    tokenizer, other = map(AutoTokenizer.from_pretrained, folders)
    settings = dict(model=str(folders[0]), reward_model=str(folders[1]), micro_batch_size=3, response_length=30)
    lines = train("ppo", tmp_path, "reward_model", write(NOTE, "note"), **settings)
    model = AutoModelForSequenceClassification.from_pretrained(folders[1]).eval()
    all_ended = []
    for line, rows in zip(lines, noted(tmp_path), strict=True):
        rewards = []
        for prompt, completion, completion_ids in rows:
            all_ended.append(completion_ids[-1] == tokenizer.eos_token_id)
            ids = tokenizer(prompt)["input_ids"] + completion_ids
            if "other" in judge:
                ids = other(prompt + completion)["input_ids"] + [other.eos_token_id] * all_ended[-1]
            with torch.no_grad():
                states = model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
                rewards.append(model.score(states).item() + getattr(model.config, "reward_bias", 0.0))
        assert line["rewards/reward_model/mean"] == pytest.approx(sum(rewards) / 8, abs=1e-4)
        assert line["rewards/reward_model/std"] == pytest.approx(torch.tensor(rewards).std().item(), abs=1e-4)
    assert any(all_ended) and not all(all_ended)


@pytest.mark.parametrize("name, is_chat", [("ppo", True), ("grpo", False)])
def test_what_a_function_is_given(name, is_chat, tmp_path, write):
    """Lists by keyword: its rows' columns as they are in the file, texts without special tokens, token ids; through
    shuffling, prompts that are dropped, groups, and micro-batches. What it changes in them, it changes for itself."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    for part in (AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft"), tokenizer):
        part.save_pretrained(tmp_path / "model")
    code = f"""
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained({str(tmp_path / "model")!r})
    is_chat = {is_chat}

    def f(prompts, completions, prompts_text, prompt_ids, completion_ids, ended, prompt, n, facts, hint, **others):
        assert list(others) == ["answer"] and prompt == prompts
        assert hint == ["7" if number == 7 else None for number in n]
        for i, number in enumerate(n):
            text = f"The film {{number}}"
            assert number % 5 and prompts[i] == ([{{"role": "user", "content": text}}] if is_chat else text)
            assert prompts_text[i] == text + "<|end|>" * is_chat
            assert prompt_ids[i] == tokenizer(prompts_text[i], add_special_tokens=False)["input_ids"]
            assert facts[i] == {{"n": number}} and others["answer"][i] == (None if number % 2 else "007")
            whole = tokenizer(prompts_text[i], add_special_tokens=False)["input_ids"] + completion_ids[i]
            whole = tokenizer.decode(whole, skip_special_tokens=True)
            if is_chat:
                (message,) = completions[i]
                assert message == {{"role": "assistant", "content": whole.removeprefix(text).strip()}}
                prompt[i].clear()
            else:
                assert completions[i] == whole.removeprefix(text) and len(completions[i]) > 0
            facts[i].clear()
        return [float(len(ids)) for ids in completion_ids]
    """
    texts = [f"The film {'of a man and a woman ' * (n % 5 == 0)}{n}" for n in range(10)]
    prompts = [[{"role": "user", "content": text}] if is_chat else text for text in texts]
    answers = ["007", None] * 5
    rows = [dict(prompt=prompts[n], n=n, facts={"n": n}, answer=answers[n]) for n in range(10)]
    rows[7]["hint"] = "7"  # the others do not have this column
    limit = len(tokenizer(texts[1])["input_ids"]) + is_chat  # of the shorter prompts
    settings = dict(dataset=write_rows(tmp_path / "d.jsonl", rows), model=str(tmp_path / "model"))
    settings["max_prompt_length"] = limit
    for line in train(name, tmp_path, write(code), micro_batch_size=3, total_episodes=24, **settings):
        lengths = [x for key, x in line.items() if key in ("val/response_length", "completions/mean_length")]
        assert line["rewards/f/mean"] == pytest.approx(lengths[0])


NUMBERS = [0.0, 1.0, 2.0]
READ = [np.arange(3), torch.arange(3), [torch.tensor(0), np.float32(1), 2]]
COLUMNS = [[[x] for x in NUMBERS], np.arange(3.0)[:, None], torch.arange(3)[:, None]]  # may be read or refused
REFUSED = [None, "012", 1.0, dict.fromkeys(NUMBERS), set(NUMBERS), [NUMBERS] * 3, NUMBERS[:2], NUMBERS * 2]
REFUSED += [np.zeros((3, 2)), [math.nan] * 3, *([0.0, x, 2.0] for x in (math.nan, "1", {}, []))]


@pytest.mark.parametrize("returned", [*READ, *COLUMNS, *REFUSED], ids=repr)
def test_what_a_function_may_return(returned):
    """One number or None for each row; all else ends the run, by a sentence with the function's name or by torch."""
    is_in = lambda cases: any(returned is x for x in cases)  # noqa: E731
    ids = torch.arange(3)[:, None]
    rows = [{"prompt": "A", "input_ids": np.array([5])}] * 3
    rollout = ppo.Rollout(ids, ids > -1, ids, ids > -1, ids[:, 0] > -1, ids / 8, rows)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")

    def judge(**_):
        return returned

    try:
        rewards = ppo.function_reward(judge, rollout, tokenizer, ppo.Args(device="cpu"))
    except SystemExit as error:
        assert not is_in(READ) and str(error).startswith("error: ") and "judge" in str(error)
    except (TypeError, ValueError):
        assert is_in(COLUMNS) or isinstance(returned, (list, np.ndarray))  # of what may be no number
    else:
        assert not is_in(REFUSED) and rewards.tolist() == NUMBERS


def test_a_row_without_a_reward():
    assert ppo.read_rewards([1, None, 2.0], 3, "judge").isnan().tolist() == [False, True, False]


def test_what_a_file_imports(tmp_path, monkeypatch):
    """What PYTHONPATH and the script's folder have. The files beside it count for nobody: helpers of one name are not
    mixed, and a file may have the name of a library."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    functions = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        code = f"import random, rewards.verifiers\nf = lambda: ('{folder}', random)"
        (tmp_path / folder / "random.py").write_text(code)
        (tmp_path / folder / "datasets.py").write_text("raise RuntimeError('this is run')")
        (tmp_path / folder / "helped.py").write_text("import helper, datasets\nf = lambda: helper.name")
        (tmp_path / folder / "helper.py").write_text(f"name = '{folder}'")
        functions.append(ppo.load_function(f"{tmp_path}/{folder}/random.py:f", "--reward-fn"))
        with pytest.raises(ModuleNotFoundError, match="helper"):
            ppo.load_function(f"{tmp_path}/{folder}/helped.py:f", "--reward-fn")
    assert [function()[0] for function in functions] == ["a", "b"] and hasattr(functions[0]()[1], "shuffle")
    (tmp_path / "of_both").mkdir()
    (tmp_path / "of_both/helper.py").write_text("name = 'of both'")
    monkeypatch.syspath_prepend(tmp_path / "of_both")
    assert ppo.load_function(f"{tmp_path}/b/helped.py:f", "--reward-fn")() == "of both"
    del sys.modules["helper"]


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_several_functions_add_up_with_their_weights(name):
    """A None counts as 0; a row of which all functions say None has the mean score of the others. The last row has no
    end; its penalty has no weight."""
    module, nan = script(name), math.nan
    ids = torch.arange(4)[:, None]
    group = [4] if name == "grpo" else []
    rollout = module.Rollout(ids, ids > -1, ids, ids > -1, ids[:, 0] < 3, ids / 8, [{}] * 4, *group)
    rewards = {"even": [2.0, nan, 2.0, nan], "three": [3.0] * 4, "none": [nan] * 4}
    for names, weights, scores in (
        (["even", "three"], (2.0, 0.5), [5.5, 1.5, 5.5, 0.5]),
        (["even"], (), [2.0] * 4),
        (["even", "three"], (1.0, 0.0), [2.0] * 4),
        (["none"], (), [0.0] * 4),
    ):
        functions = {name: lambda *_, x=rewards[name]: torch.tensor(x) for name in names}
        args = module.Args(reward_weights=weights, missing_eos_penalty=1.0, device="cpu")
        module.score_batch(rollout, functions, None, args)
        assert rollout.scores.tolist() == scores


def test_episodes_are_selected_with_all_that_belongs_to_them():
    """What a fork adds need not have a column for each token."""

    @dataclass
    class Fork(ppo.Rollout):
        features: torch.Tensor | None = None

    rollout = Fork(**vars(tiny_rollout(tiny_model("gpt2"))), features=torch.arange(6 * 99).view(6, 99))
    assert torch.equal(rollout.select(torch.tensor([4, 1])).features, rollout.features[[4, 1]])
