"""Reward modelling in short: ../reward_model.py without what only large models and long runs need.

People find it hard to give a text a mark, and easy to say which of two is better. From such pairs a
language model with a new head learns to give any text one number, r. For each batch of B pairs
(chosen, rejected) with the same prompt:

  1. encode     both texts: prompt tokens, completion tokens, EOS (end of sequence)
  2. read       r = w . h, with h the last layer at the last real token, and w the head
  3. loss       -log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2
  4. update     AdamW, with the learning rate warmed up and annealed

The loss is the likelihood of Bradley and Terry's model, in which the first text is preferred to the
second with probability sigmoid(r_1 - r_2). It leaves the zero of the rewards open: a constant added
to all of them changes nothing. So at the end they are shifted to a mean of 0 over training texts.

Where everything stands, for a pair of 6 and 5 tokens whose prompt has 2:

  input_ids     p1  p2  w1  w2  w3  EOS      texts (2B, S), right-padded: all chosen ones,
                p1  p2  l1  l2  EOS PAD      then all rejected ones
  reward                             *       one per text, on its last real token: only there
                                 *           has a causal model read the whole text

  python lecture/reward_model.py    # the toy world: 80 seconds on a CPU, accuracy .5 -> .75
  python lecture/reward_model.py --model gpt2 --learning-rate 1e-5 --batch-size 8 --dataset MINE

Papers: Christiano 1706.03741, InstructGPT 2203.02155 (eq. 1), Llama 2 2307.09288 (margin), the N+
implementation details 2403.17031 (the head's first weights, mean 0; all arXiv).
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

HERE = Path(globals().get("__file__", "this.py")).resolve().parent  # in a notebook, its folder
TOY = (HERE if Path(HERE, "toy").exists() else HERE.parent) / "toy"


@dataclass
class Args:
    center_rewards_coefficient: float = 0.0  # c: pulls the rewards of each pair towards a sum of 0
    max_length: int = 512  # longer texts lose their end
    learning_rate: float = 7.2e-4  # the highest. For GPT-2: 1e-5
    lr_scheduler_type: str = "cosine"  # how it falls to 0: any name that transformers knows
    warmup_ratio: float = 0.03  # share of the run in which it rises, while Adam's averages are new
    batch_size: int = 64  # B, the pairs of a step (8 for GPT-2 on a CPU)
    num_train_epochs: float = 1.0  # passes over the pairs. Large models overfit with more
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
    """(B,) what the head says at the last real token of each text (B, S).

    The library's classifiers look for it themselves, by the first pad token: where EOS is also the
    padding, as with GPT-2, they read one token too early.
    """
    states = model.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    last = attention_mask.sum(1) - 1  # (B,)
    states = states[torch.arange(len(last), device=last.device), last]  # (B, S, D) -> (B, D)
    return model.score(states).squeeze(1) + model.config.reward_bias


def pair_rewards(model, pairs):
    """(B,) rewards of the chosen and of the rejected texts, from one forward pass over all."""
    rows = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(device)  # (2B, S)
    return read_reward(model, batch["input_ids"], batch["attention_mask"]).split(len(pairs))


# %% 3. Loss
def preference_loss(chosen, rejected, margin, center_rewards_coefficient):
    """(B,) losses. Chosen 1, rejected -1, margin 0: sigmoid(2) = .88, and -log .88 = .13

    A margin says by how much the chosen text is better, where people were asked.
    """
    centring = center_rewards_coefficient * (chosen + rejected) ** 2
    return -F.logsigmoid(chosen - rejected - margin) + centring


# %% Model and data
args = Args() if "get_ipython" in globals() else tyro.cli(Args)  # a notebook has no command line
assert not Path(args.output_dir).exists(), f"output_dir: {args.output_dir} is there already"
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(args.seed)
# The head is new, which the library reports as a weight that is missing
model = AutoModelForSequenceClassification.from_pretrained(
    args.model, num_labels=1, dtype=torch.float32
)
D = model.score.in_features
torch.nn.init.normal_(model.score.weight, std=1 / math.sqrt(D + 1))  # first rewards: deviation 1
model.to(device)  # after the draw, so that a GPU's head is the CPU's
model.config.reward_bias = 0.0  # lecture/ppo.py and ../ppo.py add it to what the head says
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="right")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

files = args.dataset if args.dataset.endswith(".jsonl") else None  # or a folder, or a hub name
data = load_dataset("json" if files else args.dataset, data_files=files, split="train")
rows = zip(data["prompt"], data["chosen"], data["rejected"])
pairs = [(encode(prompt, a), encode(prompt, b)) for prompt, a, b in rows]
margins = data["margin"] if "margin" in data.column_names else [0.0] * len(pairs)


def make_seed(*numbers):
    """One seed made of several numbers: what a step draws depends on no step before it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def shuffled(n, seed, number):
    """The numbers below n in an order that follows from the seed and a number, that of a pass."""
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

# %% The loop: its numbers are those of the steps above
wandb.init(project="rlhf", config=vars(args), mode=None if args.track else "disabled")
history = []  # of the metrics, one dict for each step
model.train()  # with dropout, if the model's config asks for it
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
    stats["accuracy"] = (chosen > rejected).float().mean().item()  # of pairs not trained on so far
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
