"""DPO for language models, in short: ../dpo.py without what only large models and long runs need.

Direct preference optimisation improves a policy with pairs of completions, of which people
preferred one, without a reward model and without sampling. For each batch of B pairs, a prompt x
with a chosen completion y_w and a rejected one y_l:

  1. encode     prompt tokens, completion tokens, EOS (end of sequence), for both completions
  2. read       log pi(y|x) of both, the sum over the completion's tokens; and log pi_ref(y|x), the
                same of the reference, a frozen copy of the initial policy
  3. loss       Delta = [log pi(y_w|x) - log pi_ref(y_w|x)] - [log pi(y_l|x) - log pi_ref(y_l|x)]
                -log sigmoid(beta Delta)
  4. update     one AdamW step; the learning rate is warmed up, then annealed

Where does the loss come from? PPO seeks the policy with the highest E[r] - beta KL(pi || pi_ref).
This policy is known: pi_ref(y|x) exp(r(x, y) / beta) / Z(x). Solved for r, this gives the reward
for which a policy is optimal: r = beta log(pi(y|x) / pi_ref(y|x)) + beta log Z(x). So every policy
is also a reward model. Its loss is that of reward_model.py, where Z(x) cancels in the difference.

The layout of the tensors, for a pair with a prompt of 2 tokens and completions of 3 and 1:

  input_ids     p1  p2  w1  w2  w3  EOS      texts (2B, S), right-padded: all chosen ones,
                p1  p2  l1  EOS PAD PAD      then all rejected ones
  mask           0   0   1   1   1   1       true on real tokens after the prompt
                 0   0   1   1   0   0
  logprobs           .   *   *   *   *       (2B, S-1), each read one position to its left; the sum
                     .   *   *   .   .       over the stars of a row is log pi(y|x)

  python lecture/dpo.py    # the toy world: 4 minutes on a CPU, loss .69 -> .57, accuracy -> .69
  python lecture/dpo.py --model gpt2 --learning-rate 1e-5 --batch-size 8 --dataset MINE.jsonl

Paper: Rafailov et al. 2023 (arXiv 2305.18290; its equation 7 is the loss).
"""

# %% Settings, with the names and defaults of ../dpo.py, and two for the responses at the end
import math
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
import wandb
from datasets import load_dataset
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

HERE = Path(globals().get("__file__", "this.py")).resolve().parent  # in a notebook: where it runs
TOY = (HERE if Path(HERE, "toy").exists() else HERE.parent) / "toy"


@dataclass
class Args:
    beta: float = 0.1  # weight of the KL that keeps the policy near the reference; usually .1 to .5
    learning_rate: float = 3.1e-4  # its maximum. For GPT-2: 1e-5
    lr_scheduler_type: str = "linear"  # any name in transformers.get_scheduler
    warmup_ratio: float = 0.1  # share of the run in which the rate rises from 0
    batch_size: int = 64  # B, the pairs of a step, all in one pass: fewer if memory is short
    num_train_epochs: float = 1.0  # passes over the pairs
    response_length: int = 53  # maximum length of the responses printed at the end
    temperature: float = 0.7  # divides the logits of those responses
    model: str = f"{TOY}/sft"  # the policy to start from: a folder, or a name on the hub
    dataset: str = f"{TOY}/data/preferences"  # with columns `prompt`, `chosen` and `rejected`
    output_dir: str = f"runs/lecture_dpo__{time.strftime('%Y%m%d-%H%M%S')}"  # a new folder
    seed: int = 1  # of the order of pairs, and of the responses
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
    return ids, len(head)


def collate(texts):
    """Token ids of texts as one tensor (B, S); masks of real tokens and of completions (B, S)."""
    batch = tokenizer.pad({"input_ids": [ids for ids, _ in texts]}, return_tensors="pt").to(device)
    ids, attention_mask = batch["input_ids"], batch["attention_mask"]
    starts = torch.tensor([[start] for _, start in texts], device=device)  # (B, 1)
    is_completion = torch.arange(ids.shape[1], device=device) >= starts  # (B, S)
    return ids, attention_mask, is_completion & attention_mask.bool()


# %% 2. Read
def token_logprobs(logits, tokens):
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def completion_logps(model, pairs):
    """log pi(y|x) of the chosen and of the rejected completions, (B,) each, in one forward pass."""
    texts = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
    ids, attention_mask, mask = collate(texts)  # (2B, S) each
    logits = model(input_ids=ids, attention_mask=attention_mask).logits  # (2B, S, V)
    logprobs = token_logprobs(logits[:, :-1], ids[:, 1:])  # (2B, S-1): each predicts the next token
    return (logprobs * mask[:, 1:]).sum(1).split(len(pairs))  # sums: log pi of all tokens together


# %% 3. Loss
def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    """Losses (B,), and the rewards beta log(pi / pi_ref) of chosen and rejected completions, (B,).

    The gradient is -beta sigmoid(-beta Delta) times that of log pi(y_w|x) - log pi(y_l|x): largest
    where the policy prefers the wrong completion.
    """
    chosen_rewards = beta * (chosen - ref_chosen)
    rejected_rewards = beta * (rejected - ref_rejected)
    losses = -F.logsigmoid(chosen_rewards - rejected_rewards)
    return losses, chosen_rewards.detach(), rejected_rewards.detach()


# %% Models and data
args = Args() if "get_ipython" in globals() else tyro.cli(Args)  # a notebook has no command line
assert not Path(args.output_dir).exists(), f"output_dir: {args.output_dir} is there already"
device = "cuda" if torch.cuda.is_available() else "cpu"
# Without .train(), dropout is off: at first the policy must be the reference, and the loss log 2
policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
reference = deepcopy(policy)
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="right")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

files = args.dataset if args.dataset.endswith(".jsonl") else None  # or a folder, or a hub name
data = load_dataset("json" if files else args.dataset, data_files=files, split="train")
rows = zip(data["prompt"], data["chosen"], data["rejected"])
pairs = [(encode(prompt, a), encode(prompt, b)) for prompt, a, b in rows]


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

optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)
warmup_steps = int(args.warmup_ratio * num_steps)
schedule = get_scheduler(args.lr_scheduler_type, optimizer, warmup_steps, num_steps)

# %% The loop, with the steps of the docstring
wandb.init(project="rlhf", config=vars(args), mode=None if args.track else "disabled")
history = []  # of the metrics, one dict for each step
for step in (bar := trange(1, num_steps + 1)):
    # 1. Encode, and 2. read
    batch = [pairs[i] for i in batches[step - 1]]
    chosen, rejected = completion_logps(policy, batch)  # (B,) each
    with torch.no_grad():
        ref_chosen, ref_rejected = completion_logps(reference, batch)  # (B,) each

    # 3. Loss
    losses, chosen_rewards, rejected_rewards = dpo_loss(
        chosen, rejected, ref_chosen, ref_rejected, args.beta
    )  # (B,) each
    loss = losses.mean()

    # 4. Update
    optimizer.zero_grad()
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()

    stats = {"loss": loss.item(), "grad_norm": grad_norm.item()}
    stats["rewards/chosen"] = chosen_rewards.mean().item()
    stats["rewards/rejected"] = rejected_rewards.mean().item()
    stats["rewards/accuracies"] = (chosen_rewards > rejected_rewards).float().mean().item()
    stats["rewards/margins"] = (chosen_rewards - rejected_rewards).mean().item()
    stats["logps/chosen"] = chosen.mean().item()
    stats["logps/rejected"] = rejected.mean().item()
    stats["lr"] = optimizer.param_groups[0]["lr"]
    schedule.step()
    history.append(stats)
    wandb.log(stats, step=step)
    bar.set_postfix_str(f"loss {stats['loss']:.2f}, accuracy {stats['rewards/accuracies']:.2f}")

# %% The trained policy, and responses of both
policy.save_pretrained(args.output_dir)
tokenizer.save_pretrained(args.output_dir)
options = dict(do_sample=True, temperature=args.temperature, top_k=0, top_p=1.0)
options |= dict(max_new_tokens=args.response_length, eos_token_id=tokenizer.eos_token_id)
for i, prompt in enumerate(data["prompt"][:3]):
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)  # (1, P)
    for name, model in {"reference": reference, "policy": policy}.items():
        torch.manual_seed(make_seed(args.seed, i))
        print(f"{name:9s} {tokenizer.decode(model.generate(ids, **options)[0])}")
for name, first in history[0].items():
    print(f"{name:18s} {first:9.3g} -> {history[-1][name]:9.3g}")
