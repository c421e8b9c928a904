"""docs/ppo.md: how well do other starts of PPO's critic predict the returns? The policy is not trained, so that all see
the same six batches of responses. Writes a line for each update to results/critic-smollm2.jsonl: half an hour.

python experiments/run.py real --only "reward model" --seeds 1     # makes model, prompts and reward model
python experiments/critic.py 1                                     # the seed
"""

import json
import os
import sys
from copy import copy, deepcopy

import torch
from record import ROOT
import ppo

STARTS = {  # does the head start at 0? the critic's rate, the clip range of values
    "as it is": (False, 5e-5, 0.2),
    "head 0": (True, 5e-5, 0.2),
    "no value clip": (False, 5e-5, 1e3),
    "rate 2e-4": (False, 2e-4, 0.2),
    "rate 2e-4, no value clip": (False, 2e-4, 1e3),
    "head 0, rate 2e-4, no value clip": (True, 2e-4, 1e3),
}
UPDATES = 6


def explained_variance(returns, values, mask):
    returns, values = returns[mask], values[mask]
    return (1 - (returns - values).var() / returns.var()).item()


def sample_batches(args, policy, reward_fns):
    """Six batches of responses with their scores. The policy is the reference, so there is no KL."""
    prompts = ppo.load_prompts(args, policy.tokenizer, args.dataset_train_split)
    ppo.set_stop_tokens(policy, isinstance(prompts[0]["prompt"], list), args.temperature)
    args = ppo.choose_sizes(args, policy, prompts, [])
    order = [i for number in range(2) for i in ppo.shuffled(len(prompts), args.seed, number)]
    for step in range(1, UPDATES + 1):
        ppo.set_seed(ppo.make_seed(args.seed, step))
        rows = [prompts[i] for i in order[(step - 1) * args.batch_size : step * args.batch_size]]
        rollout = ppo.sample_batch(policy, rows, args)
        rollout.kl = torch.zeros_like(rollout.old_logprobs)
        ppo.score_batch(rollout, reward_fns, policy.tokenizer, args)
        yield rollout


def train_critic(critic, rollout, optimizer, clip, args):
    """The critic's part of ppo.update."""
    for _ in range(args.num_ppo_epochs):
        optimizer.zero_grad()
        for index in rollout.micro_batches(torch.randperm(args.batch_size), args):
            r = rollout.select(index)
            loss, _ = ppo.value_loss(ppo.critic_values(critic, r), r.values, r.returns, r.mask, clip)
            (args.vf_coef * ppo.masked_sum(loss, r.mask) / rollout.mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(critic.parameters(), args.max_grad_norm)
        optimizer.step()


def main(seed):
    sizes = dict(response_length=32, temperature=0.8, batch_size=64, micro_batch_size=16, num_ppo_epochs=2)
    models = dict(model="models/smollm2", reward_model="runs/real/reward-model-1", dataset="runs/real/data/opinions")
    args = ppo.Args(**models, **sizes, seed=seed, total_episodes=64 * UPDATES, kl_coef=0.02, device="cpu")
    ppo.start(args)
    policy, _ = ppo.load_models(args)
    first_critic = ppo.load_critic(args, policy)
    os.environ["REWARD_MODEL"] = args.reward_model
    reward_fns = ppo.load_reward_fns(args)
    batches = list(sample_batches(args, policy, reward_fns))
    for name, (is_zero, rate, clip) in STARTS.items():
        ppo.set_seed(seed)
        critic = deepcopy(first_critic)
        if is_zero:
            critic.score.weight.data.zero_()
            critic.score.bias.data.zero_()
        optimizer = torch.optim.AdamW(critic.parameters(), rate, weight_decay=0.0, fused=True)
        for step, rollout in enumerate(batches, 1):
            r = copy(rollout)
            r.values = r.in_micro_batches(lambda part, critic=critic: ppo.critic_values(critic, part), args)
            rewards = ppo.shape_rewards(r.scores, r.kl, r.mask, args.kl_coef)
            _, r.returns = ppo.gae(rewards, r.values, r.mask, args.gamma, args.lam)
            line = {"seed": seed, "start": name, "update": step}
            line["explained variance"] = round(explained_variance(r.returns, r.values, r.mask), 4)
            scores = r.scores[:, None].expand_as(r.values)
            line["of the score"] = round(explained_variance(scores, r.values, r.mask), 4)
            with open(ROOT / "experiments/results/critic-smollm2.jsonl", "a") as file:
                print(json.dumps(line), file=file)
            train_critic(critic, r, optimizer, clip, args)


if __name__ == "__main__":
    main(int(sys.argv[1]))
