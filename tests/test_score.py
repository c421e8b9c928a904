"""Step 2: log-probabilities, KL, values and rewards of responses, each read where it belongs."""

import json
import textwrap
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from numbers_of_others import FLOAT32, Table, close, golden, make_rollout, token_entropy
from runs import run, watch
from sources import ROOT
from tiny import STOP, tiny_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import grpo
import ppo
import rloo

# --- token_logprobs, response_forward


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_with_temperature_against_trl016(temperature):
    """Log-probabilities and entropy of logits / temperature, also as read from a model, against TRL 0.16.1."""
    i, o = golden("trl0161_logprob_temperature")
    theirs = o[str(temperature)]
    logits = i["logits"] / (temperature + 1e-7)  # TRL 0.16 adds 1e-7, which ours does not
    close(ppo.token_logprobs(logits, i["index"]), theirs["logprobs"])
    close(token_entropy(logits), theirs["entropy"])
    model = Table(F.pad(i["logits"], (0, 0, 0, 1)))  # behind a prompt of one token
    real = torch.ones_like(i["index"], dtype=torch.bool)
    rows = torch.arange(len(logits))[:, None]
    r = make_rollout(real, i["index"], prompts=rows, prompt_mask=real[:, :1], responses=i["index"])
    read = ppo.response_forward(model, r, ppo.Args(temperature=temperature, device="cpu"))[0].detach()
    close(ppo.token_logprobs(read, i["index"]), theirs["logprobs"], **FLOAT32)
    close(token_entropy(read), theirs["entropy"], **FLOAT32)


# --- kl_estimate, full_kl


def test_expectations_of_the_estimators():
    """Over the policy's own distribution, k1 and k3 average to the exact KL, the others do not."""
    logits, ref_logits = 2 * torch.randn(2, 1, 1, 11, dtype=torch.float64)
    p = logits.log_softmax(-1).flatten()
    q = ref_logits.log_softmax(-1).flatten()
    exact = ppo.full_kl(logits, ref_logits).squeeze()
    torch.testing.assert_close(exact, F.kl_div(q, p, log_target=True, reduction="sum"))
    for name in ("k1", "kl", "k3", "k2", "mse", "abs"):
        mean = (p.exp() * ppo.kl_estimate(p, q, name)).sum()
        assert torch.allclose(mean, exact) == (name in ("k1", "kl", "k3")), name


def test_kl_estimators_against_trl():
    """k1 and k3 against TRL 0.17, k2 against the mse penalty of TRL 0.7.11, under both of our names for them."""
    i, o = golden("trl0711_kl_penalty_modes")
    for ours, theirs in {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3"}.items():
        close(ppo.kl_estimate(i["logprobs"], i["ref_logprobs"], ours), o[theirs])


# --- read_reward, Critic


@torch.no_grad()
def test_reward_with_pad_equal_to_eos_reads_eos():
    """The library's pooling takes the token before EOS there; ours takes EOS."""
    model = tiny_model("gpt2", AutoModelForSequenceClassification, pad_token_id=STOP, num_labels=1)
    ids = torch.tensor([[5, 6, 7, STOP, STOP]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    expected = model.score(model.base_model(ids[:, :4]).last_hidden_state[0, 3])
    torch.testing.assert_close(ppo.read_reward(model, ids, mask), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(ids, attention_mask=mask).logits[0], expected, atol=1e-3)


# --- reward functions


@pytest.fixture(scope="module")
def policy():
    return SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(ROOT / "toy/sft"))


@pytest.fixture
def write(tmp_path):
    """Writes a file of reward functions; gives the name of one in it."""

    def write_code(code, name="f"):
        (tmp_path / "r.py").write_text(textwrap.dedent(code))
        return f"{tmp_path}/r.py:{name}"

    return write_code


def answered(policy, rows, completions):
    """A rollout in which these completions, EOS behind the first of them, answer the prompts of rows."""
    end = [policy.tokenizer.eos_token_id]
    ids = [policy.tokenizer(text)["input_ids"] for text in completions]
    ids[0] += end
    prompts, prompt_mask = ppo.pad([[5, 6]] * len(rows), policy.tokenizer, ppo.Args(device="cpu"), "left")
    responses, mask = ppo.pad(ids, policy.tokenizer, ppo.Args(device="cpu"))
    ended = torch.arange(len(rows)) == 0
    examples = [row | {"input_ids": [5, 6]} for row in rows]
    return ppo.Rollout(prompts, prompt_mask, responses, mask, ended, torch.zeros(mask.shape), examples)


ROWS = [{"prompt": f"The film {n}", "answer": str(n), "facts": {"n": n}} for n in range(4)]
TEXTS = [" is good", " is bad", " a b c d", " of a man and a woman"]


def ask(policy, *specs, rows=ROWS, **settings):
    """The rewards by name, and the scores, that functions give the four completions."""
    args = ppo.Args(reward_fn=specs, device="cpu", missing_eos_penalty=0.0, **settings)
    ppo.check_args(args)
    rollout = answered(policy, rows, TEXTS)
    return ppo.score_responses(rollout, ppo.make_reward_fns(args, policy, None), args)


def test_what_a_function_is_given(policy, write):
    """Lists by keyword: columns row by row, texts without prompt or stop token, token ids up to the stop token."""
    code = """
    def f(prompts, completions, completion_ids, answer, missing=3, **columns):
        assert prompts == [f"The film {n}" for n in range(4)] and missing == 3
        assert completions == [" is good", " is bad", " a b c d", " of a man and a woman"]
        assert answer == ["0", "1", "2", "3"] and columns["facts"][2] == {"n": 2}
        return [len(ids) for ids in completion_ids]
    """
    rewards, scores = ask(policy, write(code))
    lengths = [len(policy.tokenizer(text)["input_ids"]) for text in TEXTS]
    lengths[0] += 1
    assert scores.tolist() == rewards["f"].tolist() == lengths


def test_conversations_are_given_as_messages(policy, write):
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    code = """
    def f(prompts, completions, **_):
        assert prompts[1] == [{"role": "user", "content": "The film 1"}]
        assert all(message["role"] == "assistant" for (message,) in completions)
        return [len(message["content"]) for (message,) in completions]
    """
    assert ask(policy, write(code), rows=rows)[1].tolist() == [len(text) for text in TEXTS]


def test_a_function_may_spoil_what_it_is_given(policy, write):
    """The rows of a prompt are separate objects; the dataset's stay as they were, and so do the run's random numbers."""
    code = """
    import torch
    def f(prompts, facts, **_):
        torch.rand(3)
        prompts.clear()
        return [fact.pop("n") for fact in facts]
    """
    before = torch.get_rng_state()
    assert ask(policy, write(code), rows=[ROWS[3]] * 4)[1].tolist() == [3] * 4
    assert ROWS[3]["facts"] == {"n": 3}
    assert torch.equal(torch.get_rng_state(), before)


SEVERAL = """
def even(answer, **_):
    return [None if int(x) % 2 else 2.0 for x in answer]

def three(completions, **_):
    return [3.0] * len(completions)
"""


def test_several_add_up_with_their_weights(policy, write):
    """None is left out of the sum; each is kept under its name."""
    file = write(SEVERAL, "")
    specs = [file + name for name in ("even", "three")]
    rewards, scores = ask(policy, *specs, reward_weights=(1.0, 0.5))
    assert scores.tolist() == [3.5, 1.5, 3.5, 1.5]
    assert rewards["even"].isnan().tolist() == [False, True, False, True]
    stats = ppo.reward_stats(SimpleNamespace(rewards_by_name=rewards))
    expected = {"rewards/even/mean": 2, "rewards/even/std": 0, "rewards/three/mean": 3, "rewards/three/std": 0}
    assert stats == expected


def test_a_response_of_which_no_function_says_anything(policy, write):
    """It has the mean score of the others of its group, or of the batch."""
    spec = write(SEVERAL, "") + "even"
    rewards, scores = ask(policy, spec)
    assert rewards["even"].isnan().tolist() == [False, True, False, True]
    assert scores.tolist() == [2, 2, 2, 2]
    _, scores = ask(policy, spec, spec.replace("even", "three"), reward_weights=(1.0, 0.0))  # which is only logged
    assert scores.tolist() == [2, 2, 2, 2]


SCRIPTS = {"ppo": ppo, "rloo": rloo, "grpo": grpo}
GROUPS = {"ppo": {}, "rloo": {"rloo_k": 4}, "grpo": {"num_generations": 4}}


@pytest.mark.parametrize("name", SCRIPTS)
def test_responses_without_a_reward_are_counted(name, tmp_path, write, tiny):
    """The run goes on, even if no response of a batch has one."""
    code = """
    def some(completions, **_):
        return [None if i % 4 == 1 else float(len(text)) for i, text in enumerate(completions)]

    def none(completions, **_):
        return [None] * len(completions)
    """
    file = write(code, "")
    settings = tiny[name] | dict(model="toy/sft", missing_eos_penalty=0.0) | GROUPS[name]
    some = dict(reward_fn=(file + "some", "toy/gold_score.py:gold_score"), reward_weights=(1.0, 0.0))
    lines = run(SCRIPTS[name], tmp_path / "out", **settings, **some)
    assert [line["rewards/unscored"] for line in lines] == [2, 2, 2]
    assert all(line["objective/scores"] > 0 for line in lines)
    with pytest.warns(UserWarning, match="None"):
        lines = run(SCRIPTS[name], tmp_path / "none", **settings, reward_fn=(file + "none",))
    assert [(line["rewards/unscored"], line["objective/scores"]) for line in lines] == [(8, 0)] * 3


def test_without_a_baseline_a_response_without_a_reward_pushes_nothing(tmp_path, write, tiny, monkeypatch):
    file = write(
        SEVERAL.replace("int(x) % 2 else 2.0 for x in answer", "i % 4 == 1 else 2.0 for i, _ in enumerate(answer)"), ""
    )
    rollouts = []
    watch(monkeypatch, grpo, "update", lambda _, policy, optimizer, rollout, args: rollouts.append(rollout))
    run(grpo, tmp_path / "out", **tiny["grpo"] | GROUPS["grpo"], baseline="none", reward_fn=(file + "even",))
    for rollout in rollouts:
        assert ((rollout.advantages.squeeze(1) != 0) == (torch.arange(8) % 4 != 1)).all()


@pytest.mark.parametrize("script", [rloo, grpo], ids=lambda script: script.__name__)
def test_equal_texts_have_equal_rewards(script):
    """Though a reward model reads them in micro-batches of other lengths, where it rounds differently."""
    models = dict(model="toy/sft", reward_model="toy/reward_model", reward_fn=("reward_model",))
    args = script.Args(**models, device="cpu", micro_batch_size=3)
    policy = script.load_policy(args)
    model = script.load_reward_model(args, policy)
    texts = [" It is good.", " It is bad and dull, and it is very long."]
    rows = [policy.tokenizer(texts[i % 2])["input_ids"] for i in range(16)]
    responses, mask = script.pad(rows, policy.tokenizer, args)
    prompts, prompt_mask = script.pad([[5, 6, 7]] * 16, policy.tokenizer, args)
    examples = [{"prompt": "The film"}] * 16
    rollout = script.Rollout(prompts, prompt_mask, responses, mask, mask[:, 0], torch.zeros(mask.shape), examples)
    rewards = script.model_reward(model, policy, args)(rollout)
    assert len(rewards[::2].unique()) == len(rewards[1::2].unique()) == 1 and len(rewards.unique()) == 2


@pytest.mark.parametrize("name", SCRIPTS)
def test_columns_belong_to_their_rows(name, tmp_path, write):
    """Through shuffling, dropped prompts, the k responses of a group, and the micro-batches."""
    prompts = [f"The film {'of a man and a woman ' * (n % 5 == 0)}{n}" for n in range(30)]
    rows = [{"prompt": prompt, "n": n} for n, prompt in enumerate(prompts)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code = """
    def f(prompts, n, completions, **_):
        for prompt, number in zip(prompts, n, strict=True):
            assert prompt == f"The film {number}" and number % 5
        return n
    """
    settings = dict(
        model="toy/sft",
        dataset=str(tmp_path / "data.jsonl"),
        max_prompt_length=9,
        batch_size=8,
        total_episodes=16,
        response_length=6,
        reward_fn=(write(code),),
        missing_eos_penalty=0.0,
    )
    for line in run(SCRIPTS[name], tmp_path / "out", **settings, **GROUPS[name]):
        assert line["objective/scores"] == pytest.approx(line["rewards/f/mean"])
        assert line.get("objective/equal_groups", 1) == line.get("frac_reward_zero_std", 1) == 1
        assert line["rewards/f/std"] > 0
