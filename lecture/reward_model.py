"""Reward modelling in short: ../reward_model.py without what only large models and long runs need.

It is hard to rate a text, but easy to say which of two texts is better. From such pairs a language
model with a new head learns to give any text a number, its reward r. For each batch of B pairs
(chosen, rejected) with the same prompt:

  1. encode     both texts: prompt tokens, completion tokens, EOS (end of sequence)
  2. read       r = w . h, with h the last hidden state at the last real token, and w the head
  3. loss       -log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2
  4. update     one AdamW step; the learning rate is warmed up, then annealed

The loss is the negative log-likelihood of Bradley and Terry's model, in which the first text is
preferred with probability sigmoid(r_1 - r_2). If c = 0, a constant added to all rewards does not
change it. At the end, such a constant makes the mean reward of training texts 0.

The layout of the tensors, for a pair of 6 and 5 tokens with a prompt of 2:

  input_ids     p1  p2  w1  w2  w3  EOS      texts (2B, S), right-padded: all chosen ones,
                p1  p2  l1  l2  EOS PAD      then all rejected ones
  reward                             *       one per text, at its last real token: only there
                                 *           has a causal model read the whole text

  python lecture/reward_model.py    # the toy world: 80 seconds on a CPU, accuracy .5 -> .75
  python lecture/reward_model.py --model gpt2 --learning-rate 1e-4 --batch-size 8 \\
      --dataset MINE.jsonl

Papers: Christiano 1706.03741, InstructGPT 2203.02155 (eq. 1), Llama 2 2307.09288 (margin), the N+
implementation details 2403.17031 (the head's initial weights, mean 0; all arXiv).
"""

# %% Settings, with the names and defaults of ../reward_model.py
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
import wandb
from datasets import load_dataset
from tqdm import trange
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_scheduler

HERE = Path(globals().get("__file__", "this.py")).resolve().parent  # in a notebook: where it runs
TOY = (HERE if Path(HERE, "toy").exists() else HERE.parent) / "toy"


@dataclass
class Args:
    center_rewards_coefficient: float = 0.0  # c: pulls the sum of a pair's rewards towards 0
    max_length: int = 512  # longer texts lose their end
    learning_rate: float = 7.2e-4  # its maximum. For GPT-2: 1e-4
    lr_scheduler_type: str = "cosine"  # any name in transformers.get_scheduler
    warmup_ratio: float = 0.03  # share of the run in which the rate rises from 0
    batch_size: int = 64  # B, the pairs of a step, all in one pass: fewer if memory is short
    num_train_epochs: float = 1.0  # passes over the pairs; large models overfit with more
    model: str = f"{TOY}/sft"  # the model to start from: a folder, or a name on the hub
    dataset: str = f"{TOY}/data/preferences"  # columns prompt, chosen, rejected [, margin]
    output_dir: str = f"runs/lecture_reward_model__{time.strftime('%Y%m%d-%H%M%S')}"  # a new folder
    seed: int = 1  # of the head, the order of pairs, and dropout
    track: bool = False  # log to Weights & Biases


# %% 1. Encode
def encode(prompt, completion):
    """Token ids of a whole text, with its EOS."""
    ids = tokenizer(prompt + completion)["input_ids"]
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids = ids + [tokenizer.eos_token_id]
    return ids[: args.max_length]


# %% 2. Read
def read_reward(model, input_ids, attention_mask):
    """(B,) output of the head at the last real token of each text (B, S).

    The library's classifiers look for the last token that is not the pad token. Where the pad token
    is EOS (GPT-2), this is the token before EOS.
    """
    states = model.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    last = attention_mask.sum(1) - 1  # (B,)
    states = states[torch.arange(len(last), device=last.device), last]  # (B, S, D) -> (B, D)
    return model.score(states).squeeze(1) + model.config.reward_bias


def pair_rewards(model, pairs):
    """(B,) rewards of the chosen and of the rejected texts, from one forward pass over all."""
    texts = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
    batch = tokenizer.pad({"input_ids": texts}, return_tensors="pt").to(device)  # (2B, S)
    return read_reward(model, batch["input_ids"], batch["attention_mask"]).split(len(pairs))


# %% 3. Loss
def preference_loss(chosen, rejected, margin, center_rewards_coefficient):
    """(B,) losses. With rewards 1 and -1 and margin 0: sigmoid(2) = .88, and -log .88 = .13

    The margin (B,) says how much better the chosen text is, where people were asked.
    """
    centring = center_rewards_coefficient * (chosen + rejected) ** 2
    return -F.logsigmoid(chosen - rejected - margin) + centring


# %% Model and data
args = Args() if "get_ipython" in globals() else tyro.cli(Args)  # a notebook has no command line
assert not Path(args.output_dir).exists(), f"output_dir: {args.output_dir} is there already"
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(args.seed)
# The head is new: the library reports a missing weight
model = AutoModelForSequenceClassification.from_pretrained(
    args.model, num_labels=1, dtype=torch.float32
)
D = model.score.in_features
torch.nn.init.normal_(model.score.weight, std=1 / math.sqrt(D + 1))  # first rewards: deviation 1
model.to(device)  # after drawing the head, so that it is the same on a GPU
model.config.reward_bias = 0.0  # lecture/ppo.py and ../ppo.py add it to the output of the head
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="right")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

files = args.dataset if args.dataset.endswith(".jsonl") else None  # or a folder, or a hub name
data = load_dataset("json" if files else args.dataset, data_files=files, split="train")
rows = zip(data["prompt"], data["chosen"], data["rejected"])
pairs = [(encode(prompt, a), encode(prompt, b)) for prompt, a, b in rows]
margins = data["margin"] if "margin" in data.column_names else [0.0] * len(pairs)


def make_seed(*numbers):
    """One seed from several numbers. The draws of a step do not depend on the steps before it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def shuffled(n, seed, number):
    """The numbers below n, in an order that depends on the seed and the number of the pass."""
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


B = args.batch_size
passes = range(math.ceil(args.num_train_epochs))
orders = [shuffled(len(pairs), args.seed, number) for number in passes]  # the script: by length
batches = [order[i : i + B] for order in orders for i in range(0, len(pairs), B)]  # row numbers
num_steps = math.ceil(args.num_train_epochs * len(batches) / len(passes))

optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
warmup_steps = int(args.warmup_ratio * num_steps)
schedule = get_scheduler(args.lr_scheduler_type, optimizer, warmup_steps, num_steps)

# %% The loop, with the steps of the docstring
wandb.init(project="rlhf", config=vars(args), mode=None if args.track else "disabled")
history = []  # of the metrics, one dict for each step
model.train()  # with dropout, if the model's config has any
for step in (bar := trange(1, num_steps + 1)):
    torch.manual_seed(make_seed(args.seed, step))  # of dropout

    # 1. Encode, and 2. read
    rows = batches[step - 1]
    chosen, rejected = pair_rewards(model, [pairs[i] for i in rows])  # (B,) each
    margin = torch.tensor([margins[i] for i in rows], device=device)  # (B,)

    # 3. Loss
    losses = preference_loss(chosen, rejected, margin, args.center_rewards_coefficient)  # (B,)
    loss = losses.mean()

    # 4. Update
    optimizer.zero_grad()
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    stats = {"loss": loss.item(), "grad_norm": grad_norm.item()}
    stats["accuracy"] = (chosen > rejected).float().mean().item()  # of pairs not yet trained on
    stats["margin"] = (chosen - rejected).mean().item()
    stats["lr"] = optimizer.param_groups[0]["lr"]
    schedule.step()
    history.append(stats)
    wandb.log(stats, step=step)
    bar.set_postfix_str(f"loss {stats['loss']:.2f}, accuracy {stats['accuracy']:.2f}")

# %% The trained reward model, with rewards of mean 0
model.eval()  # without dropout
first = pairs[:2000]
with torch.no_grad():
    parts = [torch.cat(pair_rewards(model, first[i : i + 50])) for i in range(0, len(first), 50)]
    model.config.reward_bias = -torch.cat(parts).mean().item()
    chosen, rejected = pair_rewards(model, pairs[:3])  # (3,) each
model.save_pretrained(args.output_dir)
tokenizer.save_pretrained(args.output_dir)
for row, a, b in zip(data.select(range(3)), chosen, rejected):
    print(f"{row['prompt']}\n  {a:5.2f} {row['chosen']}\n  {b:5.2f} {row['rejected']}")
for name, first in history[0].items():
    print(f"{name:9s} {first:9.3g} -> {history[-1][name]:9.3g}")
