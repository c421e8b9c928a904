"""GRPO for a policy that is answered, in short: by a game, a tool or a user, over several turns.

An environment starts from a row of the data. The policy pi (a language model) writes its turn, the
environment answers, and so on: an episode. G episodes start from the same row, and those that earn
more than the others are made likelier. For each batch:

  1. play       one stream of tokens for each episode: in turn, the policy writes y_t ~ pi(. | all
                before it), up to a stop token, and is told an answer
  2. score      the sum of the rewards of its turns
  3. advantage  A_i = score_i - mean of the group's scores, divided by the batch's deviation
  4. loss       ratio_t = pi(y_t) / pi_old(y_t), where pi_old is the policy that drew the batch
                loss_t = max(-A_i ratio_t, -A_i clip(ratio_t, 1-eps, 1+eps))
                averaged over the tokens that the policy wrote
  5. update     `num_ppo_epochs` passes over the batch, one optimiser step for each mini-batch

Where everything stands, for a group of two games about one number, 6: is it higher or lower? E is
EOS, with which the policy ends its turn. A dot may be anything, until a mask takes it out.

  input_ids  1 to 15 : | 8  E lower   4   E  higher  6   E    row 0: prompt (B, P), stream (B, T)
             1 to 15 : | 4  E higher  6   E    .     .   .    row 1: a group's rows are neighbours
  mask                 | 1  1   1     1   1    1     1   1    until the episode is over
                       | 1  1   1     1   1    0     0   0
  written              | 1  1   0     1   1    0     1   1    what the policy wrote: the loss knows
                       | 1  1   0     1   1    0     0   0    nothing else
  turn                 | 0  0   1     1   1    2     2   2    how many turns were over before
                       | 0  0   1     1   1    .     .   .
  reward               | 0  0   0     0   0    0     0  .75   on the token that ends a turn
                       | 0  0   0     0  .88   0     0   0

Three mistakes make no noise. Answers in the loss: the policy learns to talk like its environment.
Stop tokens out of it: handing over is never learned. The stream decoded, and encoded again for each
turn: the loss may see other tokens than were drawn.

  python lecture/agent.py    # higher or lower: a minute on a CPU, guesses 4.3 -> 3.5, likeliest 3.3
  python lecture/agent.py --env mine.py:Tool --dataset MINE --model Qwen/Qwen3-0.6B \\
      --learning-rate 3e-6 --response-length 2048 --num-generations 8 --batch-size 64

Papers: GRPO 2402.03300; of several turns RAGEN 2504.20073, Search-R1 2503.09516 (arXiv).
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
    num_generations: int = 32  # G, the episodes from each row. More: a better baseline
    credit: Literal["episode", "turn"] = "episode"  # what a turn is judged by, see turn_advantages
    scale_rewards: Literal["group", "batch", "none"] = "batch"  # whose deviation divides advantages
    epsilon: float = 0.2  # eps: a ratio that has moved further earns nothing more
    num_ppo_epochs: int = 1  # passes over each batch
    num_mini_batches: int = 1  # optimiser steps in one pass
    response_length: int = 24  # most tokens in an episode, with the answers
    temperature: float = 1.0  # divides the logits, wherever they are used. Lower: less exploration
    learning_rate: float = 2e-3  # at first; it falls to 0
    batch_size: int = 512  # B, the episodes of an update, G from a row
    total_episodes: int = 51200  # in the whole run
    model: str = f"{TOY}/guess/sft"  # the policy to start from: a folder, or a name on the hub
    env: str = f"{TOY}/guess/make.py:Game"  # FILE:CLASS, with step(said) -> answer, reward, over
    dataset: str = f"{TOY}/guess/data/prompts"  # folder, .jsonl, hub name; has a column `prompt`
    output_dir: str = f"runs/lecture_agent__{time.strftime('%Y%m%d-%H%M%S')}"  # a new folder
    seed: int = 1  # of the order of rows, what the policy writes, and the mini-batches
    track: bool = False  # log to Weights & Biases


# %% 1. Play
def forward(model, input_ids, attention_mask, **options):
    """Output on texts (B, S), or their newest tokens. Positions skip padding; GPT-2's do not."""
    options["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    return model(input_ids=input_ids, attention_mask=attention_mask, **options)


@torch.no_grad()
def play(policy, tokenizer, games, prompts, prompt_mask, uniforms, temperature):
    """Streams (B, T) after prompts (B, P), one for each game, from uniforms (B, response_length).

    With them, likewise (B, T): logprobs, mask, written, turn, rewards. In each step a row writes,
    is told the next token of its queue, or, when its episode is over, waits: so all share one
    cache. What was drawn is never encoded again, and an answer is encoded alone. A turn that the
    end of the stream cuts off is handed over as it is.
    """
    B, T = uniforms.shape
    queues = [[] for _ in games]  # what each row is about to be told
    starts = [0] * B  # where its present turn begins
    over = torch.zeros(B, 1, dtype=torch.bool)  # whether its episode is
    turns = torch.zeros(B, 1, dtype=torch.long)  # how many of its turns are
    stream, rewards = torch.zeros(B, T, dtype=torch.long), torch.zeros(B, T)
    columns = []  # of logprobs, mask, written and turn
    tokens = prompts  # (B, P), then (B, 1): the cache keeps the rest
    attention_mask = prompt_mask  # (B, P), after each pass one wider
    cache = None
    for t in range(T):
        output = forward(policy, tokens, attention_mask, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        distribution = (output.logits[:, -1] / temperature).log_softmax(1)  # (B, vocabulary)
        cdf = distribution.exp().cumsum(1)  # of .2 .5 .3 it is .2 .7 1, or .99.. by rounding
        drawn = (cdf[:, :-1] <= uniforms[:, [t]]).sum(1, keepdim=True)  # (B, 1) u = .6: token 1
        told = torch.tensor([[queue.pop(0) if queue else -1] for queue in queues])  # (B, 1)
        tokens = torch.where(told.to(drawn) < 0, drawn, told.to(drawn))
        stream[:, [t]] = tokens.cpu()
        writes = ~over & (told < 0)
        columns.append((distribution.gather(1, tokens), ~over, writes, turns.clone()))

        ends = writes & ((stream[:, [t]] == tokenizer.eos_token_id) | (t == T - 1))  # (B, 1) a turn
        turns += ends
        for i in ends.flatten().nonzero().flatten().tolist():
            said = tokenizer.decode(stream[i, starts[i] : t + 1], skip_special_tokens=True)
            answer, reward, over[i] = games[i].step(said)
            rewards[i, t] = reward or 0.0  # None: neither good nor bad
            if not over[i]:
                queues[i] = tokenizer(answer, add_special_tokens=False)["input_ids"]
            starts[i] = t + 1 + len(queues[i])
        if over.all():
            break
        attention_mask = F.pad(attention_mask, (0, 1), value=1)
    columns = [torch.cat(column, 1) for column in zip(*columns)]  # (B, T) each
    return [x.to(prompts.device) for x in (stream[:, : t + 1], *columns, rewards[:, : t + 1])]


# %% 3. Advantage
def group_advantages(scores, G, scale):
    """(B,) each score less the mean of its group, over the deviation of the group or of the batch.

    With G = 4 and no scale: [1, 0, 0, 0] -> [.75, -.25, -.25, -.25]. By their deviation, .5, it is
    [1.5, -.5, -.5, -.5]: rare successes weigh more, and so do rare failures.
    """
    groups = scores.view(-1, G)  # (B/G, G): the rows of a group are neighbours
    groups = groups - groups[:, :1]  # so that equal scores give 0, whatever rounding does to a mean
    advantages = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    if scale == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    return advantages.flatten()


def turn_advantages(rewards, turn, written, G):
    """(B, T) what a turn and those after it earn, less the group's mean of that, over a deviation.

    What was earned before a turn is not to its credit, and episodes that had ended are no measure
    of it. The deviation is that of the batch's scores: a turn that one row has, has none.
    """
    K = turn.max().item() + 1
    earned = rewards.new_zeros(len(turn), K).scatter_add(1, turn, rewards)  # (B, K) by each turn
    to_come = earned.flip(1).cumsum(1).flip(1)  # (B, K) by it and those after it
    lengths = rewards.new_zeros(len(turn), K).scatter_add(1, turn, written.to(rewards))  # (B, K)
    groups = to_come.masked_fill(lengths == 0, torch.nan).view(-1, G, K)
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

    It is flat where the ratio has left the range on the side that A favours: an old batch says
    little about a policy so far away. On the other side the ratio is led back.
    """
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


# %% Models and data
args = Args() if "get_ipython" in globals() else tyro.cli(Args)  # a notebook has no command line
assert not Path(args.output_dir).exists(), f"output_dir: {args.output_dir} is there already"
assert args.batch_size % args.num_generations == 0, "batch_size: a multiple of num_generations"
device = "cuda" if torch.cuda.is_available() else "cpu"
# from_pretrained turns dropout off: play and loss must see one distribution
policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")  # streams begin at P
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
file, _, name = args.env.rpartition(":")
Environment = runpy.run_path(file)[name]
optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
files = args.dataset if args.dataset.endswith(".jsonl") else None  # or a folder, or a hub name
data = load_dataset("json" if files else args.dataset, data_files=files, split="train")
examples = data.to_list()
prompts = tokenizer(list(data["prompt"]))["input_ids"]


def make_seed(*numbers):
    """One seed made of several numbers: what a step draws depends on no step before it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def shuffled(n, seed, number):
    """The numbers below n in an order that follows from the seed and a number, that of a pass."""
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


def start(drawn):
    """Environments of these rows of the data, and their prompts (B, P) with a mask."""
    batch = tokenizer.pad({"input_ids": [prompts[i] for i in drawn]}, return_tensors="pt")
    games = [Environment(examples[i]) for i in drawn]
    return games, batch["input_ids"].to(device), batch["attention_mask"].to(device)


passes = range(1 + args.total_episodes // len(prompts))
order = [i for number in passes for i in shuffled(len(prompts), args.seed, number)]

# %% The loop: its numbers are those of the steps above
wandb.init(project="rlhf", config=vars(args), mode=None if args.track else "disabled")
B, G = args.batch_size, args.num_generations
num_updates = args.total_episodes // B
history = []  # of the metrics, one dict for each update
for update in (bar := trange(1, num_updates + 1)):
    torch.manual_seed(make_seed(args.seed, update))
    optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (update - 1) / num_updates)

    # 1. Play
    drawn = [i for i in order[(update - 1) * B // G : update * B // G] for _ in range(G)]  # (B,)
    games, ids, attention_mask = start(drawn)  # of the last two (B, P) each
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
    logs = []  # of the steps, each a mean over tokens
    for _ in range(args.num_ppo_epochs):
        for i in torch.randperm(B).to(device).split(B // args.num_mini_batches):  # (b,) row numbers
            logits = forward(policy, ids[i], attention_mask[i]).logits  # (b, P+T, V)
            logprobs = response_logprobs(logits, ids[i], P, args.temperature)  # (b, T)
            losses, ratio, clipped = policy_loss(
                logprobs, old_logprobs[i], advantages[i], written[i], args.epsilon
            )
            loss = (losses * written[i]).sum() / num_tokens
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            seen = {"clip_ratio/region_mean": clipped, "val/ratio": ratio}  # (b, T) each
            logs.append({name: x.detach()[written[i]].float().mean() for name, x in seen.items()})

    stats = {name: torch.stack([log[name] for log in logs]).mean().item() for name in seen}
    stats["reward"] = scores.mean().item()
    is_equal = scores.view(-1, G) == scores[::G, None]  # (B/G, G)
    stats["frac_reward_zero_std"] = is_equal.all(1).float().mean().item()
    stats["completions/mean_length"] = written.sum(1).float().mean().item()
    stats["turns"] = (turn * written).amax(1).add(1).float().mean().item()
    history.append(stats)
    wandb.log(stats, step=update)
    bar.set_postfix_str(f"reward {stats['reward']:.2f}, turns {stats['turns']:.2f}")

# %% The trained policy, and its likeliest play
policy.save_pretrained(args.output_dir)
tokenizer.save_pretrained(args.output_dir)
games, ids, attention_mask = start(range(len(prompts))[:B])
uniforms = torch.full((len(games), args.response_length), 0.5).to(device)  # any, near temperature 0
stream, _, mask, written, turn, rewards = play(
    policy, tokenizer, games, ids, attention_mask, uniforms, 1e-6
)
for i in range(3):
    print(f"{rewards[i].sum():.2f}  {tokenizer.decode(stream[i][mask[i]])}")
for name, first in history[0].items():
    print(f"{name:23s} {first:9.3g} -> {history[-1][name]:9.3g}")
print(f"turns of the likeliest play: {(turn * written).amax(1).add(1).float().mean():.2f}")
