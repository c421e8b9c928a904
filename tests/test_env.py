"""grpo.py --env: it computes what lecture/agent.py does; conversations, limits, and the calculator of rewards/."""

import re
from types import SimpleNamespace

import pytest
import torch
from float64 import float64, load_in_float64
from runs import lines_of, run
from safetensors.torch import load_file
from sources import ROOT
from test_agent import run as run_lecture
from test_agent import write_talk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, PreTrainedTokenizerFast

import grpo

GUESS = dict(model="toy/guess/sft", env="toy/guess/make.py:Game", dataset="toy/guess/data/prompts")
SETTINGS = dict(batch_size=24, num_generations=4, num_ppo_epochs=2, num_mini_batches=2, temperature=1.5, epsilon=0.05)
SETTINGS |= dict(total_episodes=72, response_length=11, learning_rate=2e-3, scale_rewards="batch")
FULL = dict(dataset_test_split="none", micro_batch_size=5, local_rollout_forward_batch_size=7)
CHATML = (  # that of Qwen2.5, as far as it is about texts
    "{% for m in messages %}<|im_start|>{% if m.role == 'tool' %}user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% else %}{{ m.role }}\n{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROBLEM = {
    "prompt": [{"role": "system", "content": "You ask."}, {"role": "user", "content": "2 times 9?"}],
    "answer": 18,
}


def test_it_is_the_short_file(tmp_path, monkeypatch):
    """In float64, over three updates of four steps: streams and what is true of them, metrics, and all weights."""
    settings = SETTINGS | write_talk(tmp_path) | dict(model=f"{ROOT}/toy/guess/sft")
    rollouts, weights = [], []
    with float64():
        full = load_in_float64("grpo", monkeypatch)
        full.Run.finish = lambda run: weights.extend(run.models["model"].parameters())
        full.show_samples = lambda run, rollout, tokenizer: rollouts.append(rollout)
        settings_of_full = settings | FULL | dict(device="cpu", output_dir=str(tmp_path / "full"))
        full.train(full.Args(**settings_of_full, num_sample_generations=3))
    short = run_lecture("agent", tmp_path, "# %% The trained policy", **settings)
    for name, theirs in dict(mask="mask", written="written", rewards="rewards", responses="stream").items():
        for i, mask in enumerate(rollouts[-1].mask):
            assert torch.equal(getattr(rollouts[-1], name)[i][mask], short[theirs][i][short["mask"][i]]), name
    for ours, theirs in zip(lines_of(tmp_path / "full"), short["history"], strict=True):
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-8, abs=1e-8)
    for ours, theirs in zip(weights, short["policy"].parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-8
    assert not short["written"].all() and short["history"][0]["turns"] > 2


# --- What is said


class Scripted(nn.Module):
    """A policy that writes these tokens, whatever it reads, with certainty; where it is told others it goes on."""

    def __init__(self, tokenizer, environment, *scripts):
        super().__init__()
        self.tokenizer, self.environment, self.stop_token_ids = tokenizer, environment, [tokenizer.eos_token_id]
        self.config = GPT2Config(n_layer=1, n_embd=2, n_head=1)
        longest = max(map(len, scripts))
        self.rows = torch.tensor([[*row, *[0] * (longest - len(row))] for row in scripts])  # (B, T)
        self.read, self.positions = [], []

    def forward(self, input_ids, position_ids, **_):
        logits = torch.full((*input_ids.shape, len(self.tokenizer)), -1e9)
        if self.read:  # the prompts come first, and nothing is drawn behind them
            logits[:, -1].scatter_(1, self.rows[:, [len(self.read) - 1]], 0.0)
        self.read.append(input_ids)
        self.positions.append(position_ids)
        return SimpleNamespace(logits=logits)

    def play(self, examples, **settings):
        """The rollout of these rows of the data, of as many tokens as there are in the scripts."""
        rows = [x | {"input_ids": grpo.encode_prompt(x["prompt"], self.tokenizer)} for x in examples]
        settings = dict(response_length=self.rows.shape[1], local_rollout_forward_batch_size=64) | settings
        return grpo.play_batch(self, rows, grpo.Args(env="FILE:CLASS", device="cpu", **settings))


@pytest.fixture
def tokenizer():
    """Of bytes, and of `ask`, which is one token; with Qwen's special tokens and chat template."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "as", "ask"]
    bpe = models.BPE({word: i for i, word in enumerate(words)}, [("a", "s"), ("as", "k")])
    bytes_ = Tokenizer(bpe)
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_, additional_special_tokens=["<|im_start|>"], **special)
    made.chat_template = CHATML
    return made


@pytest.fixture
def calculator():
    return grpo.load_function("rewards/calculator.py:Calculator")


def test_a_conversation(tokenizer, calculator):
    """Its stream is the rendered conversation, but for the last line break; what the policy wrote stays as it was.

    Three problems: one asks twice, in letters that the tokenizer would join; one answers at once, wrongly; one is cut.
    """

    def encode(text):
        return tokenizer(text)["input_ids"]

    turns = ["I ask <calc>2 * 9</calc>", "or <calc>1.5 * 12 =</calc>", "#### 18"]
    said = [{"role": "assistant", "content": text} for text in turns]
    told = {"role": "tool", "content": "18"}
    between = "\n<|im_start|>user\n<tool_response>\n18\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    letters = [token for letter in turns[0] for token in encode(letter)]
    assert letters != encode(turns[0])
    stop = [tokenizer.eos_token_id]
    pieces = [letters + stop, encode(between), encode(turns[1]) + stop, encode(between), encode(turns[2]) + stop]
    stream = sum(pieces, [])
    written = [bool(i % 2 == 0) for i, piece in enumerate(pieces) for _ in piece]
    wrong = encode("#### 7") + stop
    policy = Scripted(tokenizer, calculator, stream, wrong, encode("?") * len(stream))
    longer = PROBLEM | {"prompt": [*PROBLEM["prompt"], said[2], PROBLEM["prompt"][1]]}
    r = policy.play([PROBLEM, longer, PROBLEM])

    conversation = [*PROBLEM["prompt"], said[0], told, said[1], told, said[2]]
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert tokenizer.decode(r.inputs()["input_ids"][0][r.inputs()["attention_mask"][0] > 0]) + "\n" == rendered
    assert r.responses[0][r.mask[0]].tolist() == stream and r.responses[1][r.mask[1]].tolist() == wrong
    assert torch.cat(policy.read[2:], 1)[0].tolist() == stream[:-1]
    assert r.written[0][r.mask[0]].tolist() == written and torch.equal(r.written[1:], r.mask[1:])
    assert r.mask.sum(1).tolist() == [len(stream), len(wrong), len(stream)]
    assert r.num_turns.tolist() == [3, 1, 1] and r.ended.tolist() == [True, True, False]
    assert r.rewards.nonzero().tolist() == [[0, len(stream) - 1]] and r.rewards.sum() == 1
    steps = torch.cat(policy.positions[2:], 1)  # (3, T-1)
    assert torch.equal(steps, r.prompt_mask.sum(1, keepdim=True) + torch.arange(len(stream) - 1))


def test_limits(tokenizer, calculator):
    """An episode that they cut has not ended, and keeps what it has earned; the answer after it is not told."""

    class Paid(calculator):
        def step(self, said):
            answer, reward, over = super().step(said)
            return answer, 0.25 if reward is None else reward, over

    ask = tokenizer("<calc>2 * 9</calc><|im_end|>")["input_ids"]
    told = tokenizer("18")["input_ids"]
    script = ask + told + ask + told + tokenizer("#### 18<|im_end|>")["input_ids"]
    texts = [PROBLEM | {"prompt": "2 times 9?"}]

    def play(**settings):
        r = Scripted(tokenizer, Paid, script).play(texts, **settings)
        return int(r.mask.sum()), r.num_turns.item(), r.rewards.sum().item(), r.ended.item()

    both = 2 * len(ask) + len(told)
    assert play() == (len(script), 3, 1.5, True)
    assert play(max_turns=3) == (len(script), 3, 1.5, True)
    assert play(max_turns=2) == (both, 2, 0.5, False)
    assert play(response_length=both) == (both, 2, 0.5, False)
    assert play(response_length=both + 1) == (both + 1, 2, 0.5, False)
    assert play(response_length=both - 5) == (both - 5, 2, 0.25, False)  # "<calc>2 * 9</" is taken for an answer


def test_each_of_several_stop_tokens_ends_a_turn(tokenizer, calculator):
    """As the EOS of a text and the end of a turn are two tokens in many chat models."""
    eos, end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    ask = tokenizer("<calc>2 * 9</calc>")["input_ids"]
    told = tokenizer("18")["input_ids"]
    for stops in ([eos, end], [end, eos]):
        policy = Scripted(
            tokenizer, calculator, [*ask, eos, *told, *ask, end, *told, *tokenizer("#### 18")["input_ids"], eos]
        )
        policy.stop_token_ids = stops
        r = policy.play([PROBLEM | {"prompt": "2 times 9?"}])
        assert r.num_turns.item() == 3 and r.rewards.sum() == 1 and r.ended.item()


MISFITS = [
    CHATML.replace("{{ m.content }}{% endif %}", "{{ m.content.split('</think>')[-1] }}{% endif %}"),
    CHATML.replace("<|im_end|>", "</s>"),
    CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
]


@pytest.mark.parametrize("template", MISFITS)
def test_templates_that_do_not_fit(tokenizer, calculator, template):
    """One that deletes thoughts, one with another stop token, one without a place for answers."""
    tokenizer.chat_template = template
    policy = Scripted(tokenizer, calculator, tokenizer("<calc>1</calc><|im_end|>???")["input_ids"])
    with pytest.raises(SystemExit, match="chat template"):
        policy.play([PROBLEM])


def test_the_calculator(calculator):
    calculate = grpo.load_function("rewards/calculator.py:calculate")
    assert calculate(".05 * 1,200 + 1") == calculate("61.0") == "61"
    assert calculate("1 / 3") == "0.3333333333" and calculate("-5 + 3 * -2") == "-11"
    assert calculate("1234567.25 + 0") == "1234567.25"
    for expression in ("", "1 / 0", "x", "2 ** 9", "1.2.3", "(" * 100, "9" * 300, "__import__('os')"):
        assert calculate(expression) == "not arithmetic"
    problem = calculator({"answer": "#### 1,200"})
    assert problem.step("<calc>1</calc><calc>3*400</calc>") == ("1200", None, False)
    assert problem.step("so #### 1200.") == ("", 1.0, True)


def test_higher_or_lower():
    """The second of eight guesses earns 7/8, and after the eighth it is over; what is no number is a guess, too."""
    play = grpo.load_function("rewards/higher_or_lower.py:Game")
    game = play({"number": 6})
    assert game.step("7, or rather 5?") == ("Higher.", None, False)
    assert game.step("It is 6.") == ("", 7 / 8, True)
    game = play({"number": 6})
    answers = [game.step(said) for said in ("six", "9" * 5000, *["7"] * 6)]
    assert answers[0] == ("Say a number.", None, False)
    assert answers[1] == ("Lower.", None, False)
    assert [is_over for *_, is_over in answers] == [False] * 7 + [True]


# --- Runs


def test_a_run(tmp_path, capsys):
    """With KL, LoRA, further batches, evaluations and tables; a limit of two turns cuts most games."""
    settings = GUESS | dict(batch_size=8, num_generations=4, total_episodes=16, response_length=8, max_turns=2)
    settings |= dict(lora_r=2, beta=0.1, dynamic_sampling=1, temperature=2.0)
    lines = run(grpo, tmp_path, **settings, dataset_test_split="train[:3]", eval_steps=1, num_sample_generations=2)
    assert lines[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    for line in lines:
        assert line["rewards/env/mean"] == line["reward"] == line["objective/scores"]
        assert 1 < line["turns"] <= 2 and 1 <= line["eval/turns"] <= 2
        assert line["ended"] == pytest.approx(1 - line["completions/clipped_ratio"]) and line["ended"] < 1
        assert 0 <= line["eval/ended"] <= 1
    assert re.search("«(higher|lower)»", capsys.readouterr().out)
    samples = load_file(tmp_path / "samples/step-00000001.safetensors")
    assert torch.equal(samples["loss_mask"], samples["written"])
    assert (samples["mask"] & ~samples["written"]).any() and not (samples["written"] & ~samples["mask"]).any()


SPOILER = """
import torch

class Spoiler:
    def __init__(self, row):
        self.number = row["facts"].pop()  # of a list that the group must not share
        torch.rand(1)

    def step(self, said):
        torch.rand(1)
        return "", float(self.number == 3), True
"""


def test_an_environment_may_spoil_its_row_and_draw_numbers(tokenizer, tmp_path):
    """All of a group find the same row, and what is drawn afterwards is what it would have been."""
    (tmp_path / "e.py").write_text(SPOILER)
    policy = Scripted(tokenizer, grpo.load_function(f"{tmp_path}/e.py:Spoiler"), [65, tokenizer.eos_token_id])
    row = PROBLEM | {"facts": [3]}
    torch.rand(2, 2)  # the uniform numbers of two streams
    after = torch.rand(1)
    torch.manual_seed(0)
    rollout = policy.play([row] * 2)
    assert rollout.rewards.sum(1).tolist() == [1, 1] and row["facts"] == [3]
    assert torch.rand(1) == after


@pytest.mark.slow
def test_it_discovers_binary_search(tmp_path):
    """In two thirds of the run of docs/agent.md."""
    settings = GUESS | dict(num_generations=32, batch_size=512, total_episodes=512 * 66, learning_rate=2e-3)
    settings |= dict(scale_rewards="batch", response_length=24, local_rollout_forward_batch_size=512)
    first, *_, last = run(grpo, tmp_path, **settings, dataset_test_split="train", eval_steps=66)
    assert first["turns"] > 4
    assert last["turns"] < 3.8
    assert last["eval/turns"] <= 3.5 and last["eval/ended"] == 1
