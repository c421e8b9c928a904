"""GRPO with an environment (a game, a tool or a user), over several turns, in short.

An environment starts from a row of the data. The policy pi (a language model) writes a turn, the
environment answers, and so on, until the episode is over. G episodes start from the same row, and
those with more reward than the others become more likely. For each batch:

  1. play       one stream of tokens per episode: the policy samples y_t ~ pi(. | all tokens
                before) up to a stop token, then the environment's answer is appended, and so on
  2. score      the sum of the rewards of all turns
  3. advantage  A_i = (score_i - mean of its group) / standard deviation of the batch
  4. loss       ratio_t = pi(y_t) / pi_old(y_t), where pi_old is the policy that drew the batch
                loss_t = max(-A_i ratio_t, -A_i clip(ratio_t, 1-eps, 1+eps))
                averaged over the tokens that the policy wrote
  5. update     `num_ppo_epochs` passes over the batch, one optimiser step per mini-batch

The tensors, for a group of two games in which the policy guesses a number, 6. E is EOS, which ends
a turn of the policy. The values at the dots do not matter: they are masked.

  input_ids  1 to 15 : | 8  E lower   4   E  higher  6   E    row 0: prompt (B, P), stream (B, T)
             1 to 15 : | 4  E higher  6   E    .     .   .    row 1: a group's rows are neighbours
  mask                 | 1  1   1     1   1    1     1   1    until the episode is over
                       | 1  1   1     1   1    0     0   0
  written              | 1  1   0     1   1    0     1   1    the policy's tokens: only these are in
                       | 1  1   0     1   1    0     0   0    the loss
  turn                 | 0  0   1     1   1    2     2   2    number of turns that are finished
                       | 0  0   1     1   1    .     .   .
  rewards              | 0  0   0     0   0    0     0  .75   on the token that ends a turn
                       | 0  0   0     0  .88   0     0   0

Three mistakes raise no error. With answers in the loss, the policy learns to imitate the
environment. Without stop tokens in the loss, it does not learn to end its turn. If each turn
decodes the stream and encodes it again, the loss may see other tokens than those sampled.

  python lecture/agent.py    # guess a number: a minute on a CPU, guesses 4.3 -> 3.5, greedy 3.3
  python lecture/agent.py --env mine.py:Tool --dataset MINE.jsonl --model Qwen/Qwen3-0.6B \\
      --learning-rate 3e-6 --response-length 2048 --num-generations 8 --batch-size 64

Papers: GRPO 2402.03300; several turns: RAGEN 2504.20073, Search-R1 2503.09516 (arXiv).
"""

# %% Settings, with the names of ../grpo.py
import runpy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
import wandb
from datasets import load_dataset
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(globals().get("__file__", "this.py")).resolve().parent  # in a notebook, its folder
TOY = (HERE if Path(HERE, "toy").exists() else HERE.parent) / "toy"


@dataclass
class Args:
    num_generations: int = 32  # G, episodes per row; more give a better baseline
    credit: Literal["episode", "turn"] = "episode"  # one advantage per episode, or per turn
    scale_rewards: Literal["group", "batch", "none"] = "batch"  # divide by the std of the scores
    epsilon: float = 0.2  # eps: the ratio is clipped to 1 +- this
    num_ppo_epochs: int = 1  # passes over each batch
    num_mini_batches: int = 1  # optimiser steps in one pass
    response_length: int = 24  # maximum number of tokens of an episode, answers included
    temperature: float = 1.0  # divides the logits, in sampling and loss; lower: less exploration
    learning_rate: float = 2e-3  # at first; it decays linearly to 0
    batch_size: int = 512  # B, episodes per update, G from each row
    total_episodes: int = 51200  # in the whole run
    model: str = f"{TOY}/guess/sft"  # the policy to start from: a folder, or a name on the hub
    env: str = f"{TOY}/guess/make.py:Game"  # FILE:CLASS, with step(text) -> answer, reward, over
    dataset: str = f"{TOY}/guess/data/prompts"  # folder, .jsonl or hub name; has a column `prompt`
    output_dir: str = f"runs/lecture_agent__{time.strftime('%Y%m%d-%H%M%S')}"  # a new folder
    seed: int = 1  # for the order of rows, sampling, and mini-batches
    track: bool = False  # log to Weights & Biases


# %% 1. Play
def forward(model, input_ids, attention_mask, **options):
    """Output for texts (B, S), or with a cache for their new tokens. Padding has no position."""
    options["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    return model(input_ids=input_ids, attention_mask=attention_mask, **options)


def sample_categorical(logits, uniforms):
    """One token per row of logits (B, V), and its log-probability, from uniform numbers (B,).

    The token is the first whose cumulative probability exceeds the number. With probabilities
    .2 .5 .3, cumulative .2 .7 1, the number .6 gives the second token.
    """
    logprobs = logits.log_softmax(1)
    cdf = logprobs.exp().cumsum(1)
    threshold = uniforms[:, None] * cdf[:, -1:]  # (B, 1) rounding lets the sum end slightly off 1
    tokens = torch.searchsorted(cdf, threshold, right=True).clamp(max=logits.shape[1] - 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


@torch.no_grad()
def play(policy, tokenizer, games, prompts, prompt_mask, uniforms, temperature):
    """Streams (B, T) after prompts (B, P), one per game, from uniforms (B, response_length).

    Also returns logprobs, mask, written, turn and rewards, all (B, T). In each step, the next token
    of a row comes from the environment's answer, if some of it is left, and else from the policy.
    Tokens after the end of an episode do not count. Sampled tokens are never encoded again: only
    the answer is encoded. A turn that the end of the stream cuts off goes to the game as it is.
    """
    B, T = uniforms.shape
    device = prompts.device
    answers = [[] for _ in games]  # tokens of each row's answer that are still to be added
    starts = [0] * B  # where the current turn of each row begins
    over = torch.zeros(B, dtype=torch.bool)  # whether the episode is over
    turn = torch.zeros(B, dtype=torch.long)  # number of turns that the policy has finished
    stream = torch.zeros(B, T, dtype=torch.long)
    rewards = torch.zeros(B, T)
    columns = []  # of logprobs, mask, written and turn, (B,) each
    tokens = prompts  # (B, P), then (B, 1): the cache keeps the rest
    attention_mask = prompt_mask  # (B, P), one column more after each pass
    cache = None
    for t in range(T):
        output = forward(policy, tokens, attention_mask, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        drawn, logprob = sample_categorical(output.logits[:, -1] / temperature, uniforms[:, t])
        writes = ~over & torch.tensor([not answer for answer in answers])  # (B,)
        columns.append((logprob.cpu(), ~over, writes, turn.clone()))
        pairs = zip(answers, drawn.tolist())
        stream[:, t] = torch.tensor([answer.pop(0) if answer else token for answer, token in pairs])
        tokens = stream[:, [t]].to(device)  # (B, 1)

        turn_ends = writes & ((stream[:, t] == tokenizer.eos_token_id) | (t == T - 1))  # (B,)
        turn += turn_ends
        for i in turn_ends.nonzero().flatten().tolist():
            text = tokenizer.decode(stream[i, starts[i] : t + 1], skip_special_tokens=True)
            answer, reward, over[i] = games[i].step(text)
            rewards[i, t] = reward or 0.0  # None counts as 0
            if not over[i]:
                answers[i] = tokenizer(answer, add_special_tokens=False)["input_ids"]
            starts[i] = t + 1 + len(answers[i])
        if over.all():
            break
        attention_mask = F.pad(attention_mask, (0, 1), value=1)
    columns = [torch.stack(column, 1) for column in zip(*columns)]  # (B, T) each
    return [x.to(device) for x in (stream[:, : t + 1], *columns, rewards[:, : t + 1])]


# %% 3. Advantage
def group_advantages(scores, G, scale):
    """(B,) scores minus the mean of their group, divided by the std of the group or of the batch.

    With G = 4, the scores [1, 0, 0, 0] give [.75, -.25, -.25, -.25] without a scale; divided by
    their std, .5, this is [1.5, -.5, -.5, -.5]: rare successes and rare failures have more weight.
    """
    groups = scores.view(-1, G)  # (B/G, G): the rows of a group are neighbours
    groups = groups - groups[:, :1]  # so that equal scores give exactly 0: a mean may be rounded
    advantages = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    if scale == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    return advantages.flatten()


def turn_advantages(rewards, turn, written, G):
    """(B, T) reward from each turn on, minus the mean of the group, divided by the scores' std.

    A turn is not credited with the rewards before it, and is compared only with the episodes of its
    group that reach this turn.
    """
    K = turn.max().item() + 1
    by_turn = rewards.new_zeros(len(turn), K).scatter_add(1, turn, rewards)  # (B, K)
    from_turn_on = by_turn.flip(1).cumsum(1).flip(1)  # (B, K)
    lengths = rewards.new_zeros(len(turn), K).scatter_add(1, turn, written.to(rewards))  # (B, K)
    groups = from_turn_on.masked_fill(lengths == 0, torch.nan).view(-1, G, K)
    advantages = (groups - groups.nanmean(1, keepdim=True)).view(-1, K).nan_to_num()
    return advantages.gather(1, turn) / (rewards.sum(1).std() + 1e-4)


# %% 4. Loss
def token_logprobs(logits, tokens):
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def response_logprobs(logits, tokens, prompt_length, temperature):
    """(B, T) log-probabilities of the responses, from logits (B, P+T, V) and tokens (B, P+T). The
    logits at a position predict the next token: those of the responses begin at P-1."""
    logits = logits[:, prompt_length - 1 : -1] / temperature
    return token_logprobs(logits, tokens[:, prompt_length:])


def policy_loss(logprobs, old_logprobs, advantages, mask, cliprange):
    """Clipped losses (B, T) (PPO, eq. 7), the ratio, and where the clipped branch was the larger.

    The gradient is 0 where the ratio has left the clip range in the direction that A favours. In
    the other direction it is not clipped, and moves the ratio back.
    """
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


# %% Models and data
args = Args() if "get_ipython" in globals() else tyro.cli(Args)  # a notebook has no command line
assert not Path(args.output_dir).exists(), f"output_dir: {args.output_dir} exists already"
assert args.num_generations > 1 and args.batch_size % args.num_generations == 0, "groups: 2 or more"
device = "cuda" if torch.cuda.is_available() else "cpu"
# from_pretrained turns dropout off: it would change the ratio
policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")  # streams start at P
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
file, _, name = args.env.rpartition(":")
Environment = runpy.run_path(file)[name]
optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)
files = args.dataset if args.dataset.endswith(".jsonl") else None  # or a folder, or a hub name
data = load_dataset("json" if files else args.dataset, data_files=files, split="train")
examples = data.to_list()
prompts = tokenizer(list(data["prompt"]))["input_ids"]


def make_seed(*numbers):
    """One seed from several numbers: the random numbers of a step depend on no other step."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def shuffled(n, seed, number):
    """The numbers 0 to n-1 in a random order, determined by the seed and the number of the pass."""
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


def start_games(drawn):
    """Environments for these row numbers of the data, and their prompts (B, P) with a mask."""
    batch = tokenizer.pad({"input_ids": [prompts[i] for i in drawn]}, return_tensors="pt")
    games = [Environment(examples[i]) for i in drawn]
    return games, batch["input_ids"].to(device), batch["attention_mask"].to(device)


passes = range(1 + args.total_episodes // len(prompts))
order = [i for number in passes for i in shuffled(len(prompts), args.seed, number)]

# %% The loop, with the steps of the docstring
wandb.init(project="rlhf", config=vars(args), mode=None if args.track else "disabled")
B, G = args.batch_size, args.num_generations
num_updates = args.total_episodes // B
assert num_updates, "total_episodes: at least batch_size"
history = []  # metrics, one dict per update
for update in (bar := trange(1, num_updates + 1)):
    torch.manual_seed(make_seed(args.seed, update))
    optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (update - 1) / num_updates)

    # 1. Play
    drawn = [i for i in order[(update - 1) * B // G : update * B // G] for _ in range(G)]  # (B,)
    games, ids, attention_mask = start_games(drawn)  # ids and mask (B, P)
    P = ids.shape[1]
    uniforms = torch.rand(B, args.response_length).to(device)  # drawn on the CPU: alike anywhere
    stream, old_logprobs, mask, written, turn, rewards = play(
        policy, tokenizer, games, ids, attention_mask, uniforms, args.temperature
    )
    ids = torch.cat([ids, stream], 1)  # (B, P+T)
    attention_mask = torch.cat([attention_mask, mask], 1)  # (B, P+T): answers are read, too

    # 2. Score
    scores = rewards.sum(1)  # (B,)

    # 3. Advantage
    advantages = group_advantages(scores, G, args.scale_rewards)[:, None]  # (B, 1)
    if args.credit == "turn":
        advantages = turn_advantages(rewards, turn, written, G)  # (B, T)

    # 4. Loss, and 5. update
    num_tokens = written.sum() / args.num_mini_batches  # in a mini-batch, on average
    logs = []  # one per optimiser step: means over tokens
    for _ in range(args.num_ppo_epochs):
        for rows in torch.randperm(B).to(device).tensor_split(args.num_mini_batches):  # (b,)
            logits = forward(policy, ids[rows], attention_mask[rows]).logits  # (b, P+T, V)
            logprobs = response_logprobs(logits, ids[rows], P, args.temperature)  # (b, T)
            losses, ratio, clipped = policy_loss(
                logprobs, old_logprobs[rows], advantages[rows], written[rows], args.epsilon
            )
            loss = (losses * written[rows]).sum() / num_tokens
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            seen = {"clip_ratio/region_mean": clipped, "val/ratio": ratio}  # (b, T) each
            real = written[rows]
            logs.append({name: x.detach()[real].float().mean() for name, x in seen.items()})

    stats = {name: torch.stack([log[name] for log in logs]).mean().item() for name in seen}
    stats["reward"] = scores.mean().item()
    is_equal = scores.view(-1, G) == scores[::G, None]  # (B/G, G)
    stats["frac_reward_zero_std"] = is_equal.all(1).float().mean().item()
    stats["completions/mean_length"] = written.sum(1).float().mean().item()
    stats["turns"] = (turn * written).amax(1).add(1).float().mean().item()
    history.append(stats)
    wandb.log(stats, step=update)
    bar.set_postfix_str(f"reward {stats['reward']:.2f}, turns {stats['turns']:.2f}")

# %% The trained policy, and its greedy play
policy.save_pretrained(args.output_dir)
tokenizer.save_pretrained(args.output_dir)
games, ids, attention_mask = start_games(range(len(prompts))[:B])
uniforms = torch.full((len(games), args.response_length), 0.5).to(device)  # any number
stream, _, mask, written, turn, rewards = play(
    policy, tokenizer, games, ids, attention_mask, uniforms, 1e-6
)
for i in range(3):
    print(f"{rewards[i].sum():.2f}  {tokenizer.decode(stream[i][mask[i]])}")
for name, first in history[0].items():
    print(f"{name:23s} {first:9.3g} -> {history[-1][name]:9.3g}")
print(f"turns of greedy play: {(turn * written).amax(1).add(1).float().mean():.2f}")
