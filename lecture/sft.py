"""Supervised fine-tuning in short: ../sft.py without what only large models and long runs need.

A language model learns to continue prompts from texts with good completions. This is the first step
of RLHF: PPO and DPO start from the trained model. For each batch of B texts x_1..x_n:

  1. encode     prompt tokens, completion tokens, EOS (end of sequence)
  2. loss       -mean_t log pi(x_t | x_1..x_{t-1}), over the tokens of completions and EOS
  3. update     one AdamW step; the learning rate is warmed up, then annealed

The layout of the tensors, for a prompt of 3 tokens with a completion of 2, and one of 2 with 1:

  input_ids     p1  p2  p3  y1  y2  EOS      texts (B, S), right-padded
                p1  p2  y1  EOS PAD PAD
  mask           0   0   0   1   1   1       true on the tokens that carry loss
                 0   0   1   1   0   0
  logprobs           *   *   *   *   *       (B, S-1), each read one position to its left; nothing
                     *   *   *   .   .       predicts the first token. A dot is padding

Prompt tokens carry no loss: the policy is to answer prompts, not to invent them. EOS does: a policy
that never sees where texts end never ends one.

  python lecture/sft.py    # the toy world, from random weights: a minute on a CPU, loss 8.1 -> 3.1
  python lecture/sft.py --model gpt2 --learning-rate 2e-5 --micro-batch-size 4 --dataset MINE.jsonl

Papers: InstructGPT 2203.02155, sec. 3.5; the N+ implementation details 2403.17031 (arXiv).
"""

# %% Settings, with the names and defaults of ../sft.py
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
import wandb
from datasets import load_dataset
from tqdm import trange
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler

HERE = Path(globals().get("__file__", "this.py")).resolve().parent  # in a notebook: where it runs
TOY = (HERE if Path(HERE, "toy").exists() else HERE.parent) / "toy"


@dataclass
class Args:
    max_length: int = 512  # longer texts lose their end
    learning_rate: float = 3e-3  # its maximum; for a pretrained model 2e-5
    lr_scheduler_type: str = "cosine"  # any name in transformers.get_scheduler
    warmup_ratio: float = 0.03  # share of the run in which the rate rises from 0
    batch_size: int = 64  # B, the texts of a step
    micro_batch_size: int = 16  # b, the texts of one forward and backward pass; as memory allows
    num_train_epochs: float = 1.0  # passes over the texts
    model: str | None = None  # the pretrained model to fine-tune: a folder, or a name on the hub
    from_scratch: str = f"{TOY}/base"  # else: its config and tokenizer, with random weights
    dataset: str = f"{TOY}/data/sft"  # folder, .jsonl, hub name; columns prompt, completion
    output_dir: str = f"runs/lecture_sft__{time.strftime('%Y%m%d-%H%M%S')}"  # a new folder
    seed: int = 1  # of the weights, the order of texts, and dropout
    track: bool = False  # log to Weights & Biases


# %% 1. Encode
def encode(prompt, completion):
    """Token ids of a text, and the position at which its completion begins.

    The whole text is encoded at once: the completion alone could have other tokens, since
    SentencePiece puts a space before every text.
    """
    head = tokenizer(prompt)["input_ids"]
    ids = tokenizer(prompt + completion)["input_ids"]
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids = ids + [tokenizer.eos_token_id]
    start = max(1, len(head))  # nothing predicts the first token of a text
    return ids[: args.max_length], start


def collate(texts):
    """Token ids of texts as one tensor (B, S); masks of real tokens and of completions (B, S)."""
    batch = tokenizer.pad({"input_ids": [ids for ids, _ in texts]}, return_tensors="pt").to(device)
    ids, attention_mask = batch["input_ids"], batch["attention_mask"]
    starts = torch.tensor([[start] for _, start in texts], device=device)  # (B, 1)
    is_completion = torch.arange(ids.shape[1], device=device) >= starts  # (B, S)
    return ids, attention_mask, is_completion & attention_mask.bool()


# %% 2. Loss
def token_logprobs(logits, tokens):
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


# %% Model and data
args = Args() if "get_ipython" in globals() else tyro.cli(Args)  # a notebook has no command line
assert not Path(args.output_dir).exists(), f"output_dir: {args.output_dir} is there already"
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(args.seed)
if args.model:
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
else:
    config = AutoConfig.from_pretrained(args.from_scratch)
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
policy.to(device).train()  # with dropout, if the model's config has any
tokenizer = AutoTokenizer.from_pretrained(args.model or args.from_scratch, padding_side="right")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

files = args.dataset if args.dataset.endswith(".jsonl") else None  # or a folder, or a hub name
data = load_dataset("json" if files else args.dataset, data_files=files, split="train")
texts = [encode(*pair) for pair in zip(data["prompt"], data["completion"])]
texts = [(ids, start) for ids, start in texts if len(ids) > start]  # it has a label


def make_seed(*numbers):
    """One seed from several numbers. The draws of a step do not depend on the steps before it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def shuffled(n, seed, number):
    """The numbers below n, in an order that depends on the seed and the number of the pass."""
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


B, b = args.batch_size, args.micro_batch_size
passes = range(math.ceil(args.num_train_epochs))
orders = [shuffled(len(texts), args.seed, number) for number in passes]
batches = [order[i : i + B] for order in orders for i in range(0, len(texts), B)]  # row numbers
num_steps = math.ceil(args.num_train_epochs * len(batches) / len(passes))

optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)
warmup_steps = int(args.warmup_ratio * num_steps)
schedule = get_scheduler(args.lr_scheduler_type, optimizer, warmup_steps, num_steps)

# %% The loop, with the steps of the docstring
wandb.init(project="rlhf", config=vars(args), mode=None if args.track else "disabled")
history = []  # of the metrics, one dict for each step
for step in (bar := trange(1, num_steps + 1)):
    torch.manual_seed(make_seed(args.seed, step))  # of dropout

    # 1. Encode
    batch = sorted([texts[i] for i in batches[step - 1]], key=lambda text: len(text[0]))
    num_labels = sum(len(ids) - start for ids, start in batch)
    loss = accuracy = 0
    optimizer.zero_grad()
    for part in [batch[i : i + b] for i in range(0, len(batch), b)]:  # by length: little padding
        ids, attention_mask, mask = collate(part)  # (b, S) each

        # 2. Loss: a sum over all labels of the batch, divided by their number. In a mean of the
        # parts' means, labels in a part with few would have more weight
        logits = policy(input_ids=ids, attention_mask=attention_mask).logits  # (b, S, V)
        logits, targets, mask = logits[:, :-1], ids[:, 1:], mask[:, 1:]  # each predicts the next
        part_loss = -token_logprobs(logits, targets)[mask].sum() / num_labels
        part_loss.backward()  # adds to the gradient of the parts before
        loss += part_loss.detach()
        is_hit = logits.argmax(-1) == targets  # (b, S-1) whether the likeliest token is right
        accuracy += is_hit[mask].sum() / num_labels

    # 3. Update
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()

    stats = {"loss": loss.item(), "grad_norm": grad_norm.item()}
    stats["mean_token_accuracy"] = accuracy.item()
    stats["lr"] = optimizer.param_groups[0]["lr"]
    schedule.step()
    history.append(stats)
    wandb.log(stats, step=step)
    bar.set_postfix_str(f"loss {stats['loss']:.2f}")

# %% The trained policy
policy.save_pretrained(args.output_dir)
tokenizer.save_pretrained(args.output_dir)
policy.eval()  # without dropout
torch.manual_seed(args.seed)
options = dict(do_sample=True, top_k=0, top_p=1.0)  # the policy's own distribution
options |= dict(max_new_tokens=53, eos_token_id=tokenizer.eos_token_id)
for prompt in data["prompt"][:3]:
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)  # (1, P)
    print(tokenizer.decode(policy.generate(ids, **options)[0]))
for name, first in history[0].items():
    print(f"{name:20s} {first:9.3g} -> {history[-1][name]:9.3g}")
