"""Properties that every version of the short files must have, tested in runs of a second in the toy world.

A property gets `run`, which trains for a few steps and returns the file's variables. Its docstring is printed if it
fails. Each would have caught a bug before a library shipped it.
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
    """The ratio of the first step is not 1, although no weight has changed since the responses were sampled: sampling
    and loss compute different probabilities for the same tokens."""
    return abs(run()["history"][0]["val/ratio"] - 1) < 1e-3


def not_all_ends(run):
    """With a length of one token, every response counts as ended: there are stop tokens that were not sampled."""
    return run(response_length=1)["history"][0]["val/eos_share"] < 1


def padding_is_silent(run):
    """The critic's values on the padding after a response change the advantages of the response."""
    names = run()
    mask = torch.tensor([[True, True, False, False]])
    values, noise = torch.ones(1, 4), torch.tensor([[0.0, 0.0, 50.0, -50.0]])
    advantages = [names["gae"](torch.zeros(1, 4), v, mask, 1.0, 0.9)[0][mask] for v in (values, values + noise)]
    return torch.equal(*advantages)


def stop_is_trained(run):
    """The stop token that ends a response is not in the mask: the policy does not learn when to stop."""
    return run()["response_mask"](torch.tensor([[5, 0, 7]]), 0)[0].tolist() == [[True, True, False]]


def answers_differ(run):
    """All answers to a prompt begin with the same token, although they are sampled: that token has no advantage."""
    return run(reward_fn=f"{__file__}:of_first_letter")["history"][0]["frac_reward_zero_std"] < 1


def groups_share_a_prompt(run):
    """With a reward that depends on the prompt alone, answers of a group have different rewards: the group contains
    several prompts."""
    return run(reward_fn=f"{__file__}:of_prompt")["history"][0]["frac_reward_zero_std"] == 1


def kl_holds_back(run):
    """The more weight KL has in the loss, the further the policy moves from the reference."""
    light, heavy = (run(beta=beta, total_episodes=640, learning_rate=2e-3)["history"] for beta in (0.01, 3.0))
    return heavy[-1]["kl"] < light[-1]["kl"]


def loss_starts_at_log_2(run):
    """Before the first step the policy is the reference, so the loss of each pair is log 2 = 0.693. Here it is not."""
    return abs(run()["history"][0]["loss"] - 0.6931) < 1e-3


def last_token_is_read(run):
    """A text with another last token gets the same reward: the reward is not read at the last token."""
    names = run()
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]], device=names["device"])
    first, second = names["read_reward"](names["model"], ids, torch.ones_like(ids)).tolist()
    return abs(first - second) > 1e-4  # equal rows may differ by rounding


def stop_is_taught(run):
    """The stop token at the end of a text has no loss: the model does not learn where a text ends."""
    names = run()
    ids, start = text = names["encode"]("A film.", " It is good.")
    return names["collate"]([text])[2].sum().item() == len(ids) - start


def parts_do_not_matter(run):
    """The loss of a step depends on the size of its micro-batches: labels in short micro-batches have more weight."""
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
