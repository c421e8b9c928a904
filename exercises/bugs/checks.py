"""What must hold of the short files, whoever wrote them: seen in runs of a second, on the toy world.

Each property is given `run`, which trains for a step or a few and returns the names of the file; its docstring is what
is said if it does not hold. A library that had tested these would not have shipped the bug.
"""

import torch

RL = {"batch_size": 8, "total_episodes": 8, "response_length": 8, "num_ppo_epochs": 1}
TEXTS = {"num_lines": 16, "batch_size": 8, "warmup_ratio": 0.0}
SMALL = {  # settings of such a run
    "sft": TEXTS | {"micro_batch_size": 4},
    "reward_model": TEXTS,
    "ppo": RL,
    "rloo": RL,
    "grpo": RL | {"batch_size": 64, "total_episodes": 64},
    "dpo": TEXTS,
}


def of_prompt(prompts, completions, **_):
    """A reward that depends on the prompt alone, for a property of grpo.py."""
    return [float(sum(map(ord, prompt)) % 7) for prompt in prompts]


def of_first_letter(prompts, completions, **_):
    """A reward that depends on how an answer begins, for a property of grpo.py."""
    return [float(ord((completion.strip() + " ")[0])) for completion in completions]


def ratio_starts_at_1(run):
    """The ratio of the first step is not 1, although no weight has changed since the responses were drawn: sampling and
    loss take the same tokens to have different probabilities."""
    return abs(run()["history"][0]["val/ratio"] - 1) < 1e-3


def not_all_ends(run):
    """With room for one token, every response is said to have ended: stop tokens stand where none was drawn."""
    return run(response_length=1)["history"][0]["val/eos_share"] < 1


def padding_is_silent(run):
    """What the critic says of the padding behind a response changes the advantages of the response."""
    names = run()
    mask = torch.tensor([[True, True, False, False]])
    values, noise = torch.ones(1, 4), torch.tensor([[0.0, 0.0, 50.0, -50.0]])
    advantages = [names["gae"](torch.zeros(1, 4), v, mask, 1.0, 0.9)[0][mask] for v in (values, values + noise)]
    return torch.equal(*advantages)


def stop_is_trained(run):
    """The stop token that ends a response is no part of it: to stop is neither praised nor blamed."""
    return run()["response_mask"](torch.tensor([[5, 0, 7]]), 0)[0].tolist() == [[True, True, False]]


def answers_differ(run):
    """All answers to a prompt begin alike, although they are drawn: none of them can be praised for how it begins."""
    return run(reward_fn=f"{__file__}:of_first_letter")["history"][0]["frac_reward_zero_std"] < 1


def groups_share_a_prompt(run):
    """A reward that depends on the prompt alone makes some answers of a group better than others: the group mixes
    prompts."""
    return run(reward_fn=f"{__file__}:of_prompt")["history"][0]["frac_reward_zero_std"] == 1


def kl_holds_back(run):
    """The more weight KL has in the loss, the further the policy goes from the reference."""
    light, heavy = (run(beta=beta, total_episodes=640, learning_rate=2e-3)["history"] for beta in (0.01, 3.0))
    return heavy[-1]["kl"] < light[-1]["kl"]


def loss_starts_at_log_2(run):
    """Before the first step the policy is the reference, and the loss of any pair log 2, or 0.693. Here it is not."""
    return abs(run()["history"][0]["loss"] - 0.6931) < 1e-3


def last_token_is_read(run):
    """A text that ends with another token gets the same reward: it is not read at its last token."""
    names = run()
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    first, second = names["read_reward"](names["model"], ids, torch.ones_like(ids)).tolist()
    return first != second


def stop_is_taught(run):
    """The stop token at the end of a text has no loss: nothing teaches the model where a text ends."""
    names = run()
    ids, start = text = names["encode"]("A film.", " It is good.")
    return names["collate"]([text])[2].sum().item() == len(ids) - start


def parts_do_not_matter(run):
    """One step has another loss in parts of two texts than in one piece: labels of parts with few count for more."""
    losses = [run(micro_batch_size=size)["history"][0]["loss"] for size in (2, 8)]
    return abs(losses[0] - losses[1]) < 1e-3


PROPERTIES = {
    "sft": [stop_is_taught, parts_do_not_matter],
    "reward_model": [last_token_is_read],
    "ppo": [ratio_starts_at_1, not_all_ends, padding_is_silent, stop_is_trained],
    "rloo": [ratio_starts_at_1, not_all_ends, stop_is_trained],
    "grpo": [ratio_starts_at_1, stop_is_trained, groups_share_a_prompt, answers_differ, kl_holds_back],
    "dpo": [loss_starts_at_log_2],
}
