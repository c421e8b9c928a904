"""agent.py and lecture/agent.py: who speaks when, what has a loss, who gets the credit."""

import json

import pytest
import torch
from float64 import float64, in_float64, load_in_float64
from runs import lines_of, short_form, slow_but, watch
from runs import run as run_script
from sources import ROOT
from transformers import AutoModelForCausalLM

import agent

GUESS = f"{ROOT}/toy/guess"
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


def run(script, folder, until=None, **settings):
    """The names of a short file in float64 after its run, or before the cell `until`."""
    text = in_float64(f"lecture/{script}.py")
    with float64(), short_form(script, **settings, output_dir=folder / script) as names:
        exec(compile(text.split(until)[0] if until else text, script, "exec"), names)
    return names


def write_talk(folder):
    """Settings: games of several turns, with answers of several tokens, from prompts of several lengths."""
    (folder / "talk.py").write_text(TALK)
    rows = [{"prompt": " ".join(["1 to 15 :"] * (1 + i % 3))[: -(i % 2) or None], "number": i} for i in range(12)]
    (folder / "data").mkdir()
    (folder / "data/train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return dict(env=f"{folder}/talk.py:Talk", dataset=str(folder / "data"))


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
def test_an_update_by_hand(credit, tmp_path):
    """The gradient of an update, from episodes that are played again one by one, without mask and padding."""
    once = dict(batch_size=24, num_generations=4, num_ppo_epochs=1, num_mini_batches=1, temperature=1.5, epsilon=0.05)
    once |= dict(total_episodes=24, response_length=11, learning_rate=2e-3, credit=credit)
    names = run("agent", tmp_path, "# %% The trained policy", **once, **write_talk(tmp_path))
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


def test_the_kl_of_the_loss_is_schulmans_k3(tiny, tmp_path, monkeypatch):
    """Of the second update, when the policy has moved; in its only pass the ratio is 1, within its bounds."""
    seen, bounds = [], []
    watch(monkeypatch, agent, "policy_loss", lambda _, *given: bounds.append(given[-2:]))
    watch(monkeypatch, agent, "update", lambda stats, policy, optimizer, r, args: seen.append((stats["kl"], r)))
    settings = dict(beta=0.5, learning_rate=1e-2, epsilon=0.25, epsilon_high=0.5)
    run_script(agent, tmp_path / "run", **tiny["agent"] | settings)
    assert set(bounds) == {(0.75, 1.5)}
    kl, r = seen[1]
    k1 = (r.old_logprobs - r.ref_logprobs)[r.written]
    assert kl == pytest.approx(((-k1).exp() - 1 + k1).mean().item(), rel=1e-3) and kl > 1e-3


SETTINGS = dict(batch_size=24, num_generations=4, num_ppo_epochs=2, num_mini_batches=2, temperature=1.5, epsilon=0.05)
SETTINGS |= dict(total_episodes=48, response_length=11, learning_rate=2e-3, model=f"{GUESS}/sft")
BY_TURN = dict(scale_rewards="batch", credit="turn")
CASES = slow_but([], [dict(scale_rewards="group", seed=2), BY_TURN])


@pytest.mark.parametrize("case", CASES)
def test_the_short_form_is_the_script(case, tmp_path, monkeypatch):
    """In float64, over two updates of four steps: streams token for token, and to 1e-8 all metrics and weights."""
    settings = SETTINGS | case | write_talk(tmp_path)
    rollouts, weights = [], []
    with float64():
        full = load_in_float64("agent", monkeypatch)
        full.Run.finish = lambda run: weights.extend(run.models["model"].parameters())
        full.show_samples = lambda run, rollout, tokenizer: rollouts.append(rollout)
        sizes = dict(micro_batch_size=5, local_rollout_forward_batch_size=7, num_sample_generations=3)
        full.train(full.Args(**settings, **sizes, device="cpu", output_dir=str(tmp_path / "full")))
    short = run("agent", tmp_path, "# %% The trained policy", **settings)
    names = dict(mask="mask", written="written", turn="turn", rewards="rewards", responses="stream")
    for ours, theirs in names.items():
        for i, mask in enumerate(rollouts[-1].mask):
            assert torch.equal(getattr(rollouts[-1], ours)[i][mask], short[theirs][i][short["mask"][i]]), ours
    for ours, theirs in zip(lines_of(tmp_path / "full"), short["history"], strict=True):
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-8, abs=1e-8)
    for ours, theirs in zip(weights, short["policy"].parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-8
    assert not short["written"].all() and short["history"][0]["turns"] > 2
