"""Reward functions: what they are given, how several add up, and what is left of the responses in samples.jsonl.

The functions behind it are the same text in ppo.py, rloo.py and grpo.py: most tests run rloo.py alone.
"""

import json
import math
import textwrap

import pytest
import torch
from test_options import chat_tokenizer
from test_train import ROOT, run
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
import grpo
import ppo
import rloo
import sft

SCRIPTS = {"ppo": ppo, "rloo": rloo, "grpo": grpo}
SMALL = dict(batch_size=8, total_episodes=16, response_length=6, dataset_test_split="none", model="toy/sft")
REVIEWS = {  # settings with which a script writes reviews
    "ppo": {}, "rloo": {}, "grpo": dict(model="toy/sft", reward_fn=("reward_model",), num_generations=4, temperature=0.7),
}  # fmt: skip


@pytest.fixture
def data(tmp_path):
    """A dataset with columns beside the prompt; some prompts are too long, so that the rows that are left move up."""
    rows = [{"prompt": f"The film {'of a man and a woman ' * (i % 5 == 0)}{i}", "answer": f"{i}", "n": i} for i in range(30)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dict(dataset=str(tmp_path / "data.jsonl"), max_prompt_length=9)


@pytest.fixture
def write(tmp_path):
    """Writes a file of reward functions; gives the name of one in it."""

    def write_code(code, name="f"):
        (tmp_path / "r.py").write_text(textwrap.dedent(code))
        return f"{tmp_path}/r.py:{name}"

    return write_code


@pytest.mark.parametrize(
    "name, takes",
    [("ppo", "prompts, completions, answer, n, **_")] + [(name, "completions, **columns") for name in ("rloo", "grpo")],
)
def test_columns_belong_to_their_rows(name, tmp_path, data, write, takes):
    """Through shuffling, dropped prompts, the k responses of a group, and the micro-batches."""
    names = "dict(columns, completions=completions)" if "columns" in takes else "locals()"
    code = f"""
    def f({takes}):
        given = {names}
        for prompt, answer, n in zip(given["prompts"], given["answer"], given["n"], strict=True):
            assert prompt == f"The film {{answer}}" and answer == str(n) and n % 5
        assert len(given["completions"]) == len(given["n"])
        return given["n"]
    """
    group = {"rloo": {"rloo_k": 4}, "grpo": {"num_generations": 4}}.get(name, {})
    settings = data | SMALL | group | dict(num_sample_generations=2)
    lines = run(SCRIPTS[name], tmp_path / "out", reward_fn=(write(code),), **settings)
    assert all(sample["prompt"] == f"The film {sample['score']:.0f}" for sample in samples_of(tmp_path / "out"))
    assert all(1 <= line["rewards/f/mean"] <= 29 and line["rewards/f/std"] > 0 for line in lines)
    assert all(line["objective/scores"] == pytest.approx(line["rewards/f/mean"]) for line in lines)
    assert all(line.get("objective/equal_groups", 1) == line.get("frac_reward_zero_std", 1) == 1 for line in lines)


def test_a_function_gets_what_it_asks_for(tmp_path, data, write):
    """completion_ids are the response up to and including its stop token; a default is no need."""
    code = """
    def f(completions, completion_ids, missing=3, *rest, n, **_):
        assert missing == 3 and not rest
        return [len(ids) for ids in completion_ids]
    """
    for line in run(rloo, tmp_path / "out", reward_fn=(write(code),), **data, **SMALL):
        assert line["objective/scores"] == pytest.approx(line["val/response_length"])


def test_conversations_are_given_as_messages(tmp_path, write):
    AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").save_pretrained(tmp_path / "m")
    chat_tokenizer().save_pretrained(tmp_path / "m")
    prompt = [{"role": "user", "content": "The film"}]
    (tmp_path / "d.jsonl").write_text((json.dumps({"prompt": prompt}) + "\n") * 8)
    code = f"""
    def f(prompts, completions, **_):
        assert all(prompt == {prompt} for prompt in prompts)
        for (message,) in completions:
            assert message["role"] == "assistant" and set(message) == {{"role", "content"}}
        return [len(message["content"]) for (message,) in completions]
    """
    out = dict(model=str(tmp_path / "m"), dataset=str(tmp_path / "d.jsonl"), reward_fn=(write(code),))
    assert run(rloo, tmp_path / "out", **SMALL | out)[-1]["objective/scores"] > 0


def test_completions_are_without_their_prompt(tmp_path, data, write):
    code = """
    def f(prompts, completions, **_):
        assert not any(text.startswith(prompt) or "<|" in text for text, prompt in zip(completions, prompts))
        return [0.0 if text else 1.0 for text in completions]
    """
    lines = run(rloo, tmp_path / "out", reward_fn=(write(code),), **data, **SMALL | {"response_length": 24})
    assert lines[0]["val/eos_share"] > 0


def test_a_function_may_spoil_what_it_is_given(tmp_path, write):
    """The rows of a group are copies, and those of the next pass are as they were; so is torch's gradient."""
    rows = [{"prompt": f"The film {i}", "facts": {"n": i}} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = """
    import torch

    def f(prompts, facts, input_ids, **_):
        torch.set_grad_enabled(False)
        for prompt, fact, ids in zip(prompts, facts, input_ids):
            assert prompt == f"The film {fact['n']}" and ids
            fact["n"] = ids[:] = []
        prompts.clear()
        return range(len(facts))
    """
    lines = run(rloo, tmp_path / "out", reward_fn=(write(code),), dataset=str(tmp_path / "data.jsonl"), **SMALL)
    assert all(line["policy/grad_norm"] > 0 for line in lines)


def test_a_function_may_be_an_object(tmp_path, data, write):
    """With a signature of its own, such as a partial one."""
    code = "from functools import partial\ndef g(x, n, **_):\n    return [x] * len(n)\nf = partial(g, 7.0)\n"
    lines = run(rloo, tmp_path / "out", reward_fn=(write(code),), **data, **SMALL)
    assert all(line["rewards/f/mean"] == 7 for line in lines)


CODE = """
def even(n, **_):
    return [None if x % 2 else 2.0 for x in n]

def three(completions, **_):
    return [3.0] * len(completions)

def odd(n, **_):
    return [10.0 if x % 2 else None for x in n]
"""


def test_several_add_up_with_their_weights(tmp_path, data, write):
    """None is left out of the sum and of the mean; what is weighted is the score, not what is logged of each."""
    file = write(CODE, "")
    fns = dict(reward_fn=tuple(file + x for x in ("even", "three", "odd")), reward_weights=(1.0, 0.5, -1.0))
    for line in run(rloo, tmp_path / "out", **fns, **data, **SMALL):
        values = [line[f"rewards/{x}/mean"] for x in ("even", "three", "odd") if f"rewards/{x}/mean" in line]
        assert values in ([2.0, 3.0, 10.0], [2.0, 3.0], [3.0, 10.0])
        share = (line["objective/scores"] + 8.5) / 12.0  # of even rows: 2 + 1.5 there, 1.5 - 10 elsewhere
        assert 8 * share == pytest.approx(round(8 * share), abs=1e-4) and 0 <= share <= 1


def test_the_weighted_sum():
    """TRL 1.16: (rewards * weights).nansum over the functions."""
    rewards = {"a": torch.tensor([1.0, math.nan, 3.0]), "b": torch.tensor([10.0, 20.0, math.nan])}
    assert rloo.weighted_sum(rewards, ()).tolist() == [11, 20, 3]
    assert rloo.weighted_sum(rewards, (2.0, -1.0)).tolist() == [-8, -20, 6]


def test_a_reward_model_beside_a_function(tmp_path, tiny, write):
    """A function that gives 1 moves the reward model's score by its weight, and nothing else."""
    file = write("def one(completions, **_):\n    return [1.0] * len(completions)\n", "one")
    settings = tiny["rloo"] | {"total_episodes": 8}
    alone = run(rloo, tmp_path / "a", **settings)
    both = dict(reward_fn=("reward_model", file), reward_weights=(1.0, 0.25))
    beside = run(rloo, tmp_path / "b", **settings | both)
    assert beside[0]["objective/scores"] == pytest.approx(alone[0]["objective/scores"] + 0.25, abs=1e-5)
    assert beside[0]["rewards/reward_model/mean"] == pytest.approx(alone[0]["objective/scores"], abs=1e-5)
    std = alone[0]["objective/scores_std"] * (8 / 7) ** 0.5
    assert alone[0]["rewards/reward_model/std"] == pytest.approx(std, abs=1e-5)


def test_wrong_reward_functions(tmp_path, data, write):
    """Each in one sentence, before any training but for the last two, which only a response can show."""

    def sentence(*fns, **settings):
        with pytest.raises(rloo.UserError) as error:
            run(rloo, tmp_path / str(len(list(tmp_path.iterdir()))), reward_fn=fns, **settings, **data, **SMALL)
        assert "\n" not in str(error.value)
        return str(error.value)

    file = write(CODE, "")
    assert "--reward-weights: 1 numbers for 2" in sentence(file + "odd", file + "three", reward_weights=(1.0,))
    assert "two of them are called 'odd'" in sentence(file + "odd", file + "odd")
    assert "Input should be a finite number" in sentence(file + "odd", reward_weights=(math.nan,))
    assert "--reward-fn names no function" in sentence()
    wants = sentence(write("def f(completions, solution, **_):\n    return [0.0] * len(completions)\n"))
    assert "missing 1 required positional argument: 'solution'" in wants
    assert "the rewards of a response to 'The film" in (text := sentence(write(CODE, "odd"))) and "{'odd': nan}" in text
    raises = "def f(completions, **_):\n    return [1.0 if x == 'A text.' else 1 / 0 for x in completions]\n"
    assert "failed: ZeroDivisionError" in (text := sentence(write(raises))) and "r.py, line 2" in text


# --- samples.jsonl


def samples_of(folder):
    """The lines of samples.jsonl."""
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_samples_are_what_was_trained_on(name, tmp_path, tiny):
    settings = tiny["rloo"] | REVIEWS[name] | ({"beta": 0.1} if name == "grpo" else {})
    lines = run(SCRIPTS[name], tmp_path, num_sample_generations=2, missing_eos_penalty=1.0, **settings)
    samples = samples_of(tmp_path)
    assert [sample["update"] for sample in samples] == [1] * 4 + [2] * 4 + [3] * 4
    for sample in samples:
        T = len(sample["tokens"])
        assert "".join(sample["tokens"]) == sample["response"] and sample["prompt"] and T <= 8
        ended = sample["response"].endswith("<|end|>")
        assert sample["score"] == pytest.approx(sample["rewards_by_name"]["reward_model"] - (not ended), abs=1e-5)
        columns = ["old_logprobs", "ref_logprobs", "advantages"] + ["kl"] * (name != "grpo")
        columns += ["rewards", "values", "returns"] if name == "ppo" else []
        assert all(len(sample[column]) == T for column in columns)
        if name != "grpo":
            old, ref = torch.tensor(sample["old_logprobs"]), torch.tensor(sample["ref_logprobs"])
            torch.testing.assert_close(torch.tensor(sample["kl"]), old - ref)
        if name == "ppo":  # reward: the KL of each token, and the score in the last
            assert sum(sample["rewards"]) == pytest.approx(sample["score"] - 0.05 * sum(sample["kl"]), abs=1e-4)
    assert len(lines) == 3


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_samples_of_the_policy_by_hand(name, tmp_path, tiny):
    """The log-probabilities of those at the end are those of the saved model and of the one before."""
    run({"dpo": dpo, "sft": sft}[name], tmp_path, num_sample_generations=2, **tiny[name] | {"model": "toy/sft"})
    samples = samples_of(tmp_path)
    assert [sample["row"] for sample in samples] == [0, 1, 2] * 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = {tokenizer.decode(i): i for i in range(len(tokenizer))}
    models = {"logprobs": tmp_path} | ({"ref_logprobs": ROOT / "toy/sft"} if name == "dpo" else {})
    models = {column: AutoModelForCausalLM.from_pretrained(folder).eval() for column, folder in models.items()}
    for sample in samples[3:]:
        assert "".join(sample["tokens"]) == sample["response"]
        prompt, response = tokenizer(sample["prompt"])["input_ids"], [ids[token] for token in sample["tokens"]]
        for column, model in models.items():
            logits = model(torch.tensor([prompt + response])).logits.detach()[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)
            torch.testing.assert_close(torch.tensor(sample[column]), expected, rtol=0, atol=1e-4)
        if name == "dpo":
            gap = torch.tensor(sample["logprobs"]) - torch.tensor(sample["ref_logprobs"])
            torch.testing.assert_close(torch.tensor(sample["implicit_rewards"]), 0.1 * gap)
            assert gap.abs().max() > 0.01


def test_samples_of_a_resumed_run(tmp_path, tiny):
    """What came after the checkpoint is written again, the same: the last line of a step and row counts."""
    settings = dict(num_sample_generations=3, save_steps=1, save_total_limit=9) | tiny["rloo"]
    run(rloo, tmp_path, **settings)
    whole = samples_of(tmp_path)
    run(rloo, tmp_path, **settings, resume=str(tmp_path / "checkpoints/step-00000001.pt"))
    last = {(sample["update"], sample["row"]): sample for sample in samples_of(tmp_path)}
    assert list(last.values()) == whole and len(whole) == 12 < len(samples_of(tmp_path))
