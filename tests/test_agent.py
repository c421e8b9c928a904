"""lecture/agent.py: who speaks when, what has a loss, who gets the credit; and the world of its games."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch
import wandb
from float64 import float64, in_float64
from sources import ROOT
from transformers import AutoModelForCausalLM

GUESS = f"{ROOT}/toy/guess"
SETTINGS = dict(batch_size=8, num_generations=4, num_ppo_epochs=2, num_mini_batches=2, temperature=0.9)
SETTINGS |= dict(epsilon=0.05, total_episodes=24, response_length=8, learning_rate=2e-3)
TALK = """
class Talk:  # answers of none to two tokens, a reward now and then, one to four turns
    def __init__(self, example):
        self.left = 1 + example["number"] % 4

    def step(self, said):
        self.left -= 1
        number = sum(map(ord, said))
        reward = None if number % 3 == 0 else number % 5 / 5
        return " ".join(["lower", "15"][: number % 3]), reward, self.left == 0
"""


def run(script, monkeypatch, folder, until=None, **settings):
    """The names of a short file in float64 after its run, or before the cell `until`."""
    file = f"lecture/{script}.py"
    names = {"__file__": str(ROOT / file), "__name__": "__main__"}
    settings |= {"output_dir": folder / script}
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    monkeypatch.setattr(sys, "argv", [file, *flags])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(wandb, "init", lambda **_: None)
    monkeypatch.setattr(wandb, "log", lambda *_, **__: None)
    with float64():
        exec(compile(in_float64(file).split(until)[0] if until else in_float64(file), file, "exec"), names)
    return names


class Scripted:
    """A policy that writes these tokens, whatever it reads, with certainty; where it is told another it goes on."""

    def __init__(self, rows, size):
        self.rows, self.size, self.read = torch.tensor(rows), size, []

    def __call__(self, input_ids, attention_mask, position_ids, **_):
        t = len(self.read)
        self.read.append(input_ids)
        logits = torch.full((*input_ids.shape, self.size), -1e9)
        logits[:, -1].scatter_(1, self.rows[:, [t]], 0.0)
        return SimpleNamespace(logits=logits, past_key_values=None)


def test_the_end_of_a_stream(tmp_path, monkeypatch):
    """A turn that is cut off is handed over, and paid for on its last token; a cut answer is followed by no turn."""
    names = run("agent", monkeypatch, tmp_path, "# %% The loop")
    tokenizer = names["tokenizer"]
    ids = tokenizer.convert_tokens_to_ids(["8", "9", "<|end|>", "6"])
    eight, nine, end, six = ids
    policy = Scripted([[nine, eight, nine, six], [nine, eight, end, six]], len(tokenizer))
    heard = []

    class Wordy:
        def step(self, said):
            heard.append(said)
            return "lower lower", 0.25, False

    games = [Wordy(), Wordy()]
    prompts = torch.tensor([[five := 5], [five]])
    stream, _, mask, written, turn, rewards = names["play"](
        policy, tokenizer, games, prompts, torch.ones_like(prompts), torch.full((2, 4), 0.5), 1.0
    )
    assert heard == ["9 8", "9 8 9 6"]
    assert stream[1, 3] == tokenizer.convert_tokens_to_ids("lower")
    assert mask.all()
    assert written.tolist() == [[True] * 4, [True, True, True, False]]
    assert rewards.tolist() == [[0, 0, 0, 0.25], [0, 0, 0.25, 0]]
    assert turn.tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]


@pytest.fixture
def talk(tmp_path):
    """Settings: games of several turns, with answers of several tokens, from prompts of several lengths."""
    (tmp_path / "talk.py").write_text(TALK)
    rows = [{"prompt": " ".join(["1 to 15 :"] * (1 + i % 3))[: -(i % 2) or None], "number": i} for i in range(12)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    once = dict(num_ppo_epochs=1, num_mini_batches=1, total_episodes=24, batch_size=24, response_length=11)
    return SETTINGS | once | dict(env=f"{tmp_path}/talk.py:Talk", dataset=tmp_path / "data", temperature=1.5)


def own_turns(stream, game, tokenizer, T):
    """The places of the policy's tokens in a stream, turn by turn, and what each turn earned: by playing it again."""
    turns, rewards, place, over = [], [], 0, False
    while place < min(T, len(stream)) and not over:
        after = place
        while after < T and (after == place or stream[after - 1] != tokenizer.eos_token_id):
            after += 1
        answer, reward, over = game.step(tokenizer.decode(stream[place:after], skip_special_tokens=True))
        turns.append(range(place, after))
        rewards.append(reward or 0.0)
        place = after + len(tokenizer(answer, add_special_tokens=False)["input_ids"])
    return turns, rewards


@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_an_update_by_hand(credit, talk, tmp_path, monkeypatch):
    """The gradient of an update, from episodes that are played again one by one, without mask and padding."""
    names = run("agent", monkeypatch, tmp_path, "# %% The trained policy", credit=credit, **talk)
    tokenizer, G, T, P = names["tokenizer"], names["G"], names["args"].response_length, names["P"]
    policy = AutoModelForCausalLM.from_pretrained(f"{GUESS}/sft", dtype=torch.float64)
    episodes = []
    for i, row in zip(names["drawn"], names["stream"].tolist()):
        game = names["Environment"](names["examples"][i])
        episodes.append(own_turns(row, game, tokenizer, T))
    scores = [sum(rewards) for _, rewards in episodes]
    deviation = torch.tensor(scores, dtype=torch.float64).std().item() + 1e-4
    losses, count = [], 0
    for i, (turns, rewards) in enumerate(episodes):
        group = episodes[i // G * G :][:G]
        prompt = names["prompts"][names["drawn"][i]]
        ids = torch.tensor([prompt + names["stream"][i].tolist()])
        logprobs = (policy(ids).logits[0] / 1.5).log_softmax(1)
        for k, places in enumerate(turns):
            first = k if credit == "turn" else 0
            others = [sum(rewards[first:]) for _, rewards in group if len(rewards) > first]
            advantage = (sum(rewards[first:]) - sum(others) / len(others)) / deviation
            for place in places:
                at = len(prompt) + place
                logprob = logprobs[at - 1, ids[0, at]]
                assert abs(logprob - names["old_logprobs"][i, place]) < 1e-9
                losses.append(-advantage * logprob)
                count += 1
    assert {len(turns) for turns, _ in episodes} == {1, 2, 3, 4}
    assert P > min(map(len, names["prompts"]))
    assert count == names["written"].sum()
    (sum(losses) / count).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    for ours, theirs in zip(names["policy"].parameters(), policy.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-9
    assert max(p.grad.abs().max() for p in policy.parameters()) > 1e-3


@pytest.mark.slow
def test_it_discovers_binary_search(tmp_path, monkeypatch):
    """Five seeds of the whole run ended at the numbers in experiments/results/agent.json; this is two thirds of one."""
    names = run("agent", monkeypatch, tmp_path, total_episodes=512 * 66)
    assert names["history"][0]["turns"] > 4
    assert names["history"][-1]["turns"] < 3.8
    assert (names["turn"] * names["written"]).amax(1).add(1).double().mean() <= 3.5
    said = {names["tokenizer"].decode(row[0]) for row in names["stream"]}
    assert said <= {"7", "8", "9"}


# --- The world


def guess_make():
    """toy/guess/make.py."""
    spec = importlib.util.spec_from_file_location("guess_make", f"{GUESS}/make.py")
    guess = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(guess)
    return guess


def test_the_guessing_game_is_made_again_byte_for_byte(tmp_path):
    guess = guess_make()
    guess.write_prompts(tmp_path / "data")
    guess.write_base(tmp_path / "base")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    for file in files:
        assert file.read_bytes() == (ROOT / "toy/guess" / file.relative_to(tmp_path)).read_bytes(), file
