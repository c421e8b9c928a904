"""agent.py: conversations, limits, environments that misbehave, and the calculator of rewards/."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, PreTrainedTokenizerFast

import agent

CHATML = (  # that of Qwen2.5, as far as it is about texts
    "{% for m in messages %}<|im_start|>{% if m.role == 'tool' %}user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% else %}{{ m.role }}\n{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = [{"role": "system", "content": "You ask."}, {"role": "user", "content": "2 times 9?"}]
PROBLEM = {"prompt": ASKED, "answer": 18}


class Scripted(nn.Module):
    """A policy that writes these tokens, whatever it reads, with certainty; where it is told others it goes on."""

    def __init__(self, tokenizer, environment, *scripts):
        super().__init__()
        self.tokenizer, self.environment, self.stop_token_ids = tokenizer, environment, [tokenizer.eos_token_id]
        self.config = GPT2Config(n_layer=1, n_embd=2, n_head=1)
        self.rows = nn.utils.rnn.pad_sequence(list(map(torch.tensor, scripts)), batch_first=True)  # (B, T)
        self.read, self.positions = [], []

    def forward(self, input_ids, position_ids, **_):
        logits = torch.full((*input_ids.shape, len(self.tokenizer)), -1e9)
        logits[:, -1].scatter_(1, self.rows[:, [len(self.read)]], 0.0)
        self.read.append(input_ids)
        self.positions.append(position_ids)
        return SimpleNamespace(logits=logits)

    def play(self, examples, **settings):
        """The rollout of these rows of the data, of as many tokens as there are in the scripts."""
        rows = []
        for row in examples:
            text, is_chat = row["prompt"], isinstance(row["prompt"], list)
            if is_chat:
                text = agent.render(text, row, self.tokenizer, add_generation_prompt=True)
            rows.append(row | {"input_ids": agent.encode([text], self.tokenizer, is_chat)[0]})
        settings = dict(response_length=self.rows.shape[1], local_rollout_forward_batch_size=64) | settings
        args = agent.Args(device="cpu", **settings)
        args.num_generations = 1  # as in tools/evaluate.py
        return agent.sample_batch(self, rows, args)


def turns_of(rollout):
    return ((rollout.turn * rollout.written).amax(1) + 1).tolist()


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
    return agent.load_function("rewards/calculator.py:Calculator", "--env")


def test_a_conversation(tokenizer, calculator):
    """Its stream is the rendered conversation, but for the last line break; what the policy wrote stays as it was.

    Three problems: one asks twice, in letters that the tokenizer would join; one answers at once, wrongly; one is cut.
    """
    encode = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
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
    ids, attention_mask = r.joined()
    assert tokenizer.decode(ids[0][attention_mask[0] > 0]) + "\n" == rendered
    assert r.responses[0][r.mask[0]].tolist() == stream and r.responses[1][r.mask[1]].tolist() == wrong
    assert torch.cat(policy.read[1:], 1)[0].tolist() == stream[:-1]
    assert r.written[0][r.mask[0]].tolist() == written and torch.equal(r.written[1:], r.mask[1:])
    assert r.mask.sum(1).tolist() == [len(stream), len(wrong), len(stream)]
    assert turns_of(r) == [3, 1, 1] and r.ended.tolist() == [True, True, False]
    assert r.rewards.nonzero().tolist() == [[0, len(stream) - 1]] and r.rewards.sum() == 1
    steps = torch.cat(policy.positions[1:], 1)  # (3, T-1)
    assert torch.equal(steps, r.prompt_mask.sum(1, keepdim=True) + torch.arange(len(stream) - 1))


def test_an_episode_that_a_limit_cuts_has_not_ended(tokenizer, calculator):
    """It keeps what it has earned; the answer after it is not told."""

    class Paid(calculator):
        def step(self, said):
            answer, reward, over = super().step(said)
            return answer, 0.25 if reward is None else reward, over

    ask = tokenizer("<calc>2 * 9</calc><|im_end|>")["input_ids"]
    told = tokenizer("18")["input_ids"]
    script = ask + told + ask + told + tokenizer("#### 18<|im_end|>")["input_ids"]
    both = 2 * len(ask) + len(told)
    for settings, found in (
        ({}, (len(script), 3, 1.5, True)),
        (dict(max_turns=3), (len(script), 3, 1.5, True)),
        (dict(max_turns=2), (both, 2, 0.5, False)),
        (dict(response_length=both), (both, 2, 0.5, False)),
        (dict(response_length=both + 1), (both + 1, 2, 0.5, False)),
        (dict(response_length=both - 5), (both - 5, 2, 0.25, False)),  # "<calc>2 * 9</" is taken for an answer
    ):
        r = Scripted(tokenizer, Paid, script).play([PROBLEM | {"prompt": "2 times 9?"}], **settings)
        assert (int(r.mask.sum()), *turns_of(r), r.rewards.sum().item(), r.ended.item()) == found


def test_each_of_several_stop_tokens_ends_a_turn(tokenizer, calculator):
    """As the EOS of a text and the end of a turn are two tokens in many chat models."""
    eos, end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    ask = tokenizer("<calc>2 * 9</calc>")["input_ids"]
    told = tokenizer("18")["input_ids"]
    script = [*ask, eos, *told, *ask, end, *told, *tokenizer("#### 18")["input_ids"], eos]
    for stops in ([eos, end], [end, eos]):
        policy = Scripted(tokenizer, calculator, script)
        policy.stop_token_ids = stops
        r = policy.play([PROBLEM | {"prompt": "2 times 9?"}])
        assert turns_of(r) == [3] and r.rewards.sum() == 1 and r.ended.item()


def test_the_calculator(calculator):
    calculate = agent.load_function("rewards/calculator.py:calculate", "--env")
    assert calculate(".05 * 1,200 + 1") == calculate("61.0") == "61"
    assert calculate("1 / 3") == "0.3333333333" and calculate("-5 + 3 * -2") == "-11"
    assert calculate("1234567.25 + 0") == "1234567.25"
    for expression in ("", "1 / 0", "2 ** 9", "(" * 100, "9" * 300, "__import__('os')"):
        assert calculate(expression) == "not arithmetic"
    problem = calculator({"answer": "#### 1,200"})
    assert problem.step("<calc>1</calc><calc>3*400</calc>") == ("1200", None, False)
    assert problem.step("so #### 1200.") == ("", 1.0, True)


class Spoiler:
    def __init__(self, row):
        self.number = row["facts"].pop()

    def step(self, said):
        return "", float(self.number == 3), True


def test_an_environment_may_spoil_its_row(tokenizer):
    """All of a group find the same one."""
    policy = Scripted(tokenizer, Spoiler, [65, tokenizer.eos_token_id])
    row = PROBLEM | {"facts": [3]}
    assert policy.play([row] * 2).rewards.sum(1).tolist() == [1, 1] and row["facts"] == [3]
