# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.23.0",
#     "datasets==5.2.0",
#     "tyro==1.0.17",
#     "wandb==0.31.0",
#     "matplotlib==3.11.2",
#     "rich==15.0.0",
#     "tqdm==4.70.1",
# ]
# ///
"""DPO for language models: preference pairs -> better policy, without a reward model or rollouts.

For each batch of pairs, a prompt x with a chosen completion y_w and a rejected one y_l:
  1. encode   prompt and completions apart, with EOS at the end of each completion
  2. read     log pi(y|x), the sum over the completion's tokens, for both; and log pi_ref(y|x) of a frozen copy of the
              initial policy, once per pair
  3. loss     Delta = [log pi(y_w|x) - log pi_ref(y_w|x)] - [log pi(y_l|x) - log pi_ref(y_l|x)]
              -log sigmoid(beta Delta)
  4. update   one AdamW step, with the learning rate warmed up and annealed

Where everything stands, for a prompt of 3 tokens (left-padded to 4) and completions of 4 and 2 tokens:

  model input   PAD  p1  p2  p3 | w1  w2  w3  EOS      prompts (B, P) and completions (B, T); first the chosen ones,
                PAD  p1  p2  p3 | l1  EOS -   -        then the rejected ones
  mask                          |  1   1   1   1       true on real tokens
                                |  1   1   0   0
  logprobs                      |  *   *   *   *       of y_t, read from the logits one position to the left

The policy pi is the language model in training, the reference pi_ref its frozen first self. KL, in nats, measures how
far pi has moved from it. Why there is no reward model: the policy that maximises E[r] - beta KL(pi || pi_ref) is
pi_ref(y|x) exp(r(x, y) / beta) / Z(x). Solved for r, this says for which reward a given policy is the best one:
r = beta log(pi(y|x) / pi_ref(y|x)), up to a term of x alone, which cancels in a difference. Put into the likelihood of
the pairs under Bradley and Terry's model (reward_model.py's loss), it gives the loss above: fitting a reward and
maximising it become one step of supervised learning. What falls away: rollouts, reward, critic, advantages, ratio and
clipping. What is lost: nobody ever judges the policy's own texts.
Papers: Rafailov et al. 2023 (DPO, arXiv 2305.18290, eq. 7); Mitchell 2023 (label smoothing: "conservative DPO"); Zhao
et al. 2023 (SLiC, 2305.10425: hinge); Azar et al. 2023 (IPO, 2310.12036, eq. 17); Ethayarajh et al. 2024 (KTO,
2402.01306: kto_pair, as in TRL 0.7). docs/dpo.md has a glossary of the metrics.

  python dpo.py                                       # the toy world: offline, two minutes on two CPU cores
  python dpo.py --model ./sft --dataset pairs.jsonl   # columns chosen and rejected, with or without prompt

Shapes: B rows, P prompt tokens (left-padded), T completion tokens (right-padded), V vocabulary.
"""

import ctypes
import json
import math
import os
import random
import runpy
import shlex
import signal
import sys
import time
import traceback
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal, get_args, get_type_hints

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: threads that wait spin for ever on a busy machine

import datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from filelock import FileLock
from huggingface_hub import ModelCard, ModelCardData, constants, get_session
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StaticCache, get_scheduler
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput, logging

# --- Arguments. The type of a setting says which values are allowed; the comment beside or above it is its help text

Positive = Annotated[float, "above 0", lambda x: 0 < x < math.inf]
NonNegative = Annotated[float, "0 or more", lambda x: 0 <= x < math.inf]
Share = Annotated[float, "between 0 and 1", lambda x: 0 <= x <= 1]
Count = Annotated[int, "1 or more", lambda x: x >= 1]
Natural = Annotated[int, "0 or more, and below 2**63", lambda x: 0 <= x < 2**63]
MinorShare = Annotated[float, "at least 0 and below 0.5", lambda x: 0 <= x < 0.5]


@dataclass
class Args:
    # --- DPO
    beta: Positive = 0.1  # weight of the KL that ties the policy down (DPO: 0.1 to 0.5). Lower: further from reference
    # sigmoid (DPO, eq. 7); hinge (SLiC); ipo (IPO, eq. 17, on means over tokens); kto_pair (KTO on pairs, TRL 0.7)
    loss_type: Literal["sigmoid", "hinge", "ipo", "kto_pair"] = "sigmoid"
    label_smoothing: MinorShare = 0.0  # share of pairs whose label is taken to be wrong (conservative DPO, sigmoid)
    reference_free: bool = False  # leave the reference out, as if it found all completions equally likely (TRL)
    precompute_ref: bool = False  # read all pairs with the reference first; without LoRA, then drop it, and log no KL

    # --- Optimisation
    learning_rate: Positive | None = None  # AdamW's; by default from the policy's size, ten times as high with LoRA
    lr_scheduler_type: str = "linear"  # any name that transformers.get_scheduler knows (TRL: linear to 0)
    warmup_ratio: Share = 0.1  # share of the run in which the learning rate rises to its value
    weight_decay: NonNegative = 0.0  # AdamW's
    max_grad_norm: Positive = 1.0  # the gradient is clipped to this norm

    # --- Batch sizes
    batch_size: Count | None = None  # pairs per optimiser step, on all GPUs together; by default 64
    micro_batch_size: Count | None = None  # pairs per forward/backward pass; no effect, except with kto_pair
    # TRL's way: this is micro_batch_size, and * gradient_accumulation_steps * GPUs is batch_size
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count = 1  # with per_device_train_batch_size (TRL)

    # --- Model: a folder, or a name on the hub
    model: str = "toy/sft"  # the policy to start from, which is also the reference
    lora_r: Natural = 0  # rank of LoRA adapters (Hu et al. 2021), 0 for none; the reference is the policy without them
    lora_alpha: Positive = 32.0  # the adapter's output is scaled by lora_alpha / lora_r
    lora_target_modules: str | None = None  # regular expression for their layers, or all-linear; default: peft's
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    attn_implementation: str | None = None  # eager, sdpa, flash_attention_2, ...; by default transformers' own choice
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    trust_remote_code: bool = False  # run Python code that comes with a model; only if you have read that code

    # --- Data
    dataset: str = "toy/data/preferences"  # folder, file (jsonl, json, csv, parquet) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    dataset_train_split: str = "train"  # split to train on
    dataset_test_split: str | None = None  # split to evaluate on, or none; by default validation, if there is one
    chosen_column: str = "chosen"  # preferred completions: texts, or lists of {role, content} messages
    rejected_column: str = "rejected"  # the others
    prompt_column: str = "prompt"  # what both continue; without this column, what the two have in common at the start
    max_length: Count = 512  # tokens of prompt and completion; in longer pairs first the prompt is cut, then the ends
    max_prompt_length: Count = 128  # tokens of a prompt that is cut (TRL 0.7)
    truncation_mode: Literal["keep_end", "keep_start"] = "keep_end"  # which part of a prompt stays when it is cut (TRL)

    # --- Answers of the policy to prompts of the test split (or, without one, of the training data)
    num_eval_prompts: Count = 64  # prompts that are answered in an evaluation
    response_length: Count = 53  # most tokens in an answer (ppo.py's)
    temperature: Positive = 0.7  # divides the logits of the answers, and in the KL measured on them (ppo.py's)
    gold_reward_fn: str | None = None  # a second opinion, logged as objective/gold_scores and never trained on
    seed: Natural = 1  # seed of the order of pairs and of the answers

    # --- Run. From here on, a resumed run may differ from what it was
    resume: str | None = None  # a run's folder or one of its checkpoints: continue, with the settings of that run
    num_train_epochs: Positive = 1.0  # passes over the pairs
    exp_name: str = "dpo"  # name of this run, in its folder and on W&B
    output_dir: str | None = None  # where everything goes; by default a new folder runs/NAME__SEED__TIME
    device: str | None = None  # cpu, cuda, mps; by default the best there is
    save_steps: Count = 100  # steps between checkpoints, each of which holds everything that a run consists of
    save_total_limit: Count = 2  # number of checkpoints to keep, the newest
    eval_steps: Count = 100  # steps between evaluations; there is one at the end, too
    num_sample_generations: Natural = 3  # how often a table of the reference's and the policy's responses is printed
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)
    wandb_project_name: str = "rlhf"  # W&B project, with --track
    wandb_entity: str | None = None  # W&B team, with --track

    # --- Many GPUs: torchrun --nproc-per-node N
    zero_stage: Literal[0, 2, 3] = 0  # shards: 0 none, 2 of gradients and optimiser state, 3 of weights too (FSDP2)
    shard_size: Count | None = None  # GPUs that hold one set of shards, such as those of a node (ZeRO++); default: all
    offload: bool = False  # keep the shards in CPU memory until they are needed: slow, for models that do not fit
    gather_for_rollout: bool = True  # with zero_stage 3: gather the weights once per rollout, not for every token

    # --- Computed
    torch_device: str = field(init=False, default="cpu")  # where the models are


# --- The loop: its numbers are those of the steps above ---------------------------------------------------------------


def train(args: Args) -> None:
    """Trains the policy; leaves it, its metrics, curves and model card in args.output_dir."""
    check_preferences(args)
    start_run(args)
    policy = load_trained_policy(args)
    reference = make_reference(policy, args)
    place(args, policy, reference)
    gold_reward = load_gold_reward(args)
    pairs, test_pairs = (encode_preferences(x, policy.tokenizer, args) if x else [] for x in load_data(args))  # 1
    if not test_pairs:
        asked = "nothing is" if args.dataset_test_split == "none" else "answers to prompts of the training data are"
        print(f"no test split: {asked} evaluated")
    longest = max(max(len(pair.chosen), len(pair.rejected)) for pair in pairs)
    pair_size = 2 * longest * policy.config.get_text_config().vocab_size  # of the logits; in all, at most 256 MB
    num_steps, steps_per_epoch = plan_steps(args, policy, len(pairs), fits_cpu=2**26 // pair_size)
    use_fast_kernels(args, [policy, reference], 2 * args.micro_batch_size, max(map(len, pairs)))
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=args.weight_decay, fused=True)
    schedule = make_schedule(args, optimizer, num_steps)
    check_policy(policy, args)
    test_ref = torch.full((len(test_pairs), 2), math.nan)  # the reference's log-probabilities, once they are known
    state = {"batches": [], "ref": torch.full((len(pairs), 2), math.nan)}  # what else changes during the run
    run = Run(args, {"policy": policy}, optimizer, schedule, state)
    batches = length_grouped_batches([len(pair) for pair in pairs], state["batches"], args.batch_size)
    try:
        if args.precompute_ref:
            read_all(state["ref"], pairs, policy, reference, args)
            read_all(test_ref, test_pairs, policy, reference, args)
            reference = reference if args.lora_r else None
        for step in run.steps(num_steps):
            with run.clock("step"):
                rows = next(batches)
                ref_logps = read_reference(rows, state["ref"], pairs, policy, reference, args)  # 2, of the reference
                stats = preference_gradient(policy, [pairs[i] for i in rows], ref_logps, args)  # 2 and 3
                grad_norm = clip_gradient(trained, args.max_grad_norm)
                if grad_norm.isfinite():  # else the weights would be NaN for good
                    optimizer.step()  # 4
                optimizer.zero_grad()
            stats |= {"step": step, "epoch": step / steps_per_epoch, "grad_norm": grad_norm.item()}
            stats["lr"] = schedule.get_last_lr()[0]
            if args.dataset_test_split != "none" and (step % args.eval_steps == 0 or step == num_steps):
                if test_pairs:
                    stats |= evaluate_pairs(policy, reference, test_ref, test_pairs, args)
                stats |= evaluate_responses(policy, reference, test_pairs or pairs, args, gold_reward)
            run.write(step, stats, "loss", "rewards/accuracies", "objective/kl", "objective/gold_scores")
            if run.is_turn(step, args.num_sample_generations):
                show_responses(run, step, policy, reference, test_pairs or pairs, args)
            schedule.step()
    finally:  # after an error or Ctrl-C, too: what was trained is on disk
        run.finish(policy, CURVES)


# --- 1. Encode --------------------------------------------------------------------------------------------------------


@dataclass
class Preference:
    """Token ids of a prompt and of two completions, each with its EOS, of which the first was preferred."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    def __len__(self) -> int:
        """Tokens in the prompt and the longer of its completions."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def encode_preference(
    prompt: str | list[dict], chosen: str | list[dict], rejected: str | list[dict], tokenizer: AutoTokenizer
) -> Preference:
    """A pair of texts or of conversations; without a prompt, it is what the two have in common at the start.

    A prompt that is a text is encoded apart from what follows it, as in a rollout. For whole texts and conversations
    the prompt is the longest common beginning: tokens that both share have the same probability in both, and cancel in
    the loss (except in the means of ipo).
    """
    eos = [tokenizer.eos_token_id]
    if list in map(type, (prompt, chosen, rejected)):
        turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] if prompt else []
        texts = [x if isinstance(x, list) else [{"role": "assistant", "content": x}] for x in (chosen, rejected)]
        texts = [text if text[: len(turns)] == turns else turns + text for text in texts]  # some hold the prompt, too
        whole = [apply_template(text, tokenizer) for text in texts]
        whole = [ids[:-1] if ids[-2:-1] == eos else ids for ids in whole]  # ChatML writes a newline behind EOS
    elif prompt:
        ends = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (chosen, rejected)]
        return Preference(tokenizer(prompt)["input_ids"], *(ids if ids[-1:] == eos else ids + eos for ids in ends))
    else:
        whole = [tokenizer(text)["input_ids"] for text in (chosen, rejected)]
    a, b = (ids if ids[-1:] == eos else ids + eos for ids in whole)
    shared = len(os.path.commonprefix([a, b]))
    bos = eos if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    start = [] if shared else bos  # something to continue
    return Preference(start + a[:shared], a[shared:], b[shared:])


def cut_to_fit(pair: Preference, args: Args) -> Preference:
    """The pair within max_length: of a longer one the prompt keeps max_prompt_length tokens, and if that is not enough,
    the completions lose their ends (TRL 0.7)."""
    prompt, n = pair.prompt, args.max_prompt_length
    if len(pair) > args.max_length:
        prompt = prompt[-n:] if args.truncation_mode == "keep_end" else prompt[:n]
    room = args.max_length - len(prompt)
    return Preference(prompt, pair.chosen[:room], pair.rejected[:room])


def encode_preferences(data, tokenizer: AutoTokenizer, args: Args) -> list[Preference]:
    """All pairs of a dataset; those whose completions are equal, before or after a cut, are dropped and counted."""
    chosen = read_column(data, args.chosen_column, args.dataset, "--chosen-column", (str, list))
    rejected = read_column(data, args.rejected_column, args.dataset, "--rejected-column", (str, list))
    prompts = [""] * len(chosen)
    if args.prompt_column in data.column_names:
        prompts = read_column(data, args.prompt_column, args.dataset, "--prompt-column", (str, list))
    rows = tqdm(zip(prompts, chosen, rejected), total=len(prompts), desc="encoding", leave=False)
    whole = [encode_preference(*row, tokenizer) for row in rows]
    pairs = [cut_to_fit(pair, args) for pair in whole]
    kept = [pair for pair in pairs if pair.chosen != pair.rejected]
    num_cut, num_same = sum(a != b for a, b in zip(whole, pairs)), sum(pair.chosen == pair.rejected for pair in whole)
    if num_cut:
        print(f"cut {num_cut} of {len(pairs)} pairs to --max-length {args.max_length} tokens")
    dropped = (f"{len(pairs) - len(kept)} of {len(pairs)} pairs: both completions are the same ({num_same}), or become "
               f"so when cut to --max-length {args.max_length} ({len(pairs) - len(kept) - num_same})")  # fmt: skip
    require(kept, f"--dataset {args.dataset}: dropped {dropped}")
    if len(kept) < len(pairs):
        print(f"dropped {dropped}")
    return kept


def length_grouped_batches(lengths: list[int], queue: list[list[int]], batch_size: int) -> Iterator[list[int]]:
    """Endless passes over all rows in batches of similar length, in random order: little padding, yet random enough.

    Rows are shuffled, cut into groups of 50 batches, sorted by length within a group, and the batches shuffled again.
    `queue` holds the batches that this pass has yet to give. It is the caller's, so that a checkpoint can hold it.
    """
    while True:
        while queue:
            yield queue.pop(0)
        order = broadcast(torch.randperm(len(lengths))).tolist()
        groups = [order[i : i + 50 * batch_size] for i in range(0, len(order), 50 * batch_size)]
        ordered = [row for group in groups for row in sorted(group, key=lengths.__getitem__)]
        batches = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
        queue += [batches[i] for i in broadcast(torch.randperm(len(batches))).tolist()]


# --- 2. Read ----------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """Prompts and a response to each: completions of the data, or texts that a policy drew (see `sample`)."""

    prompts: Tensor  # (B, P) left-padded
    prompt_mask: Tensor  # (B, P) true on real tokens
    responses: Tensor  # (B, T) right-padded
    mask: Tensor  # (B, T) true on real tokens
    ended: Tensor | None = None  # (B,) whether there is an EOS, if drawn
    old_logprobs: Tensor | None = None  # (B, T) under the policy that drew the responses

    def inputs(self) -> dict[str, Tensor]:
        """Prompt and response as one model input (B, P+T). Positions count real tokens only."""
        attention_mask = torch.cat([self.prompt_mask, self.mask], 1).long()
        return {
            "input_ids": torch.cat([self.prompts, self.responses], 1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),  # GPT-2 would count the padding
        }


def response_forward(model: nn.Module, r: Rollout, temperature: float, **options) -> tuple[Tensor, ModelOutput]:
    """(B, T, V) float32 logits / temperature that predict the response tokens, and the model's whole output.

    Position P-1+t of the input predicts response token t.
    """
    P, T = r.prompts.shape[1], r.responses.shape[1]
    positions = torch.arange(P - 1, P + T - 1, device=r.mask.device)
    output = model(**r.inputs(), use_cache=False, logits_to_keep=positions, **options)
    return output.logits.float().div_(temperature), output  # in place: it is the largest tensor of all


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def completion_logps(model: nn.Module, pairs: list[Preference], args: Args) -> tuple[Tensor, Tensor]:
    """log pi(y|x) of the chosen and of the rejected completions, (b,) each, in one forward pass over all of them.

    The sum over a completion's tokens; for ipo their mean (TRL).
    """
    padding = model.tokenizer.pad_token_id
    prompts, prompt_mask = pad([p.prompt for p in pairs] * 2, padding, args, left=True)  # (2b, P)
    completions, mask = pad([p.chosen for p in pairs] + [p.rejected for p in pairs], padding, args)  # (2b, T)
    with autocast(args):
        logits, _ = response_forward(model, Rollout(prompts, prompt_mask, completions, mask), 1.0)  # (2b, T, V)
    logps = token_logprobs(logits, completions).masked_fill(~mask, 0.0).sum(1)  # (2b,)
    return (logps / mask.sum(1) if args.loss_type == "ipo" else logps).split(len(pairs))


@torch.no_grad()
def read_reference(
    rows: list[int], known: Tensor, pairs: list[Preference], policy: nn.Module, reference: nn.Module | None, args: Args
) -> Tensor:
    """(n, 2) log pi_ref of the chosen and rejected completions of these rows of pairs; with reference_free, 0.

    Each pair is read when it first comes up, and kept in `known` (N, 2), where NaN stands for what is not known yet.
    """
    if args.reference_free:
        return torch.zeros(len(rows), 2)
    if known[rows].isnan().any():
        with adapter_off(policy, reference):
            parts = micro_batches([pairs[i] for i in rows], args)
            logps = [torch.stack(completion_logps(reference, some, args), 1) for some, _ in parts]
        known[rows] = all_gather(torch.cat(logps))[: len(rows)].cpu()
    return known[rows]


def read_all(
    known: Tensor, pairs: list[Preference], policy: nn.Module, reference: nn.Module | None, args: Args
) -> None:
    """Reads all pairs with the reference, which is then needed no more."""
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i]))
    for i in tqdm(range(0, len(order), args.batch_size), desc="reading pairs with the reference", leave=False):
        read_reference(order[i : i + args.batch_size], known, pairs, policy, reference, args)


# --- 3. Loss ----------------------------------------------------------------------------------------------------------


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, args: Args
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (b,), and the rewards beta * (log pi - log pi_ref) of chosen and rejected completions, (b,) each.

    All four inputs are log-probabilities of completions (b,). Delta is how much more the policy prefers the chosen one
    than the reference does. The gradient of the sigmoid loss is -beta * sigmoid(-beta * Delta) * grad(log pi(y_w) -
    log pi(y_l)): largest where the policy has the pair wrong.
    """
    chosen_ratio, rejected_ratio, beta = chosen - ref_chosen, rejected - ref_rejected, args.beta
    delta, s = chosen_ratio - rejected_ratio, args.label_smoothing
    if args.loss_type == "sigmoid":
        losses = -(1 - s) * F.logsigmoid(beta * delta) - s * F.logsigmoid(-beta * delta)
    elif args.loss_type == "hinge":
        losses = torch.relu(1 - beta * delta)
    elif args.loss_type == "ipo":
        losses = (delta - 1 / (2 * beta)) ** 2
    else:  # kto_pair: each against the mean KL of the others in this forward pass
        chosen_kl, rejected_kl = chosen_ratio.mean().clamp(min=0), rejected_ratio.mean().clamp(min=0)
        wanted, unwanted = beta * (chosen_ratio - rejected_kl), beta * (chosen_kl - rejected_ratio)
        losses = (2 - wanted.sigmoid() - unwanted.sigmoid()) / 2
    return losses, beta * chosen_ratio.detach(), beta * rejected_ratio.detach()


# --- 4. Update --------------------------------------------------------------------------------------------------------


def preference_gradient(
    policy: nn.Module, batch: list[Preference], ref_logps: Tensor, args: Args
) -> dict[str, float]:
    """Adds up the gradient of the mean loss over a batch of pairs; returns means over the pairs of what is logged.

    `ref_logps` (n, 2) are the reference's. How the batch is cut, into micro-batches and among processes, changes
    nothing (except for kto_pair, whose KL is a mean over a micro-batch, as in TRL).
    """
    n, sums = len(batch), defaultdict(float)
    policy.train(args.gradient_checkpointing)  # which works in training mode only; dropout stays off (see place)
    for rows, counts in micro_batches(range(n), args):
        logps = completion_logps(policy, [batch[i] for i in rows], args)  # (b,) each
        losses, chosen, rejected = dpo_loss(*logps, *ref_logps[rows].to(args.torch_device).unbind(1), args)
        if losses.requires_grad:  # not in an evaluation
            (WORLD_SIZE * (losses * counts).sum() / n).backward()  # gradients become means over processes
        pair_stats = {
            "loss": losses.detach(), "rewards/chosen": chosen, "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(), "logps/chosen": logps[0].detach(),
            "logps/rejected": logps[1].detach(),
        }  # fmt: skip
        for name, x in pair_stats.items():
            sums[name] += (x * counts).sum()
    policy.eval()
    stats = dict(zip(sums, (all_reduce(torch.stack(list(sums.values()))) / n).tolist()))
    return stats | {"rewards/margins": stats["rewards/chosen"] - stats["rewards/rejected"]}


# === The algorithm ends here. What follows is needed by every program of this kind ====================================


@torch.no_grad()
def evaluate_pairs(
    policy: nn.Module, reference: nn.Module | None, known: Tensor, pairs: list[Preference], args: Args
) -> dict[str, float]:
    """Loss, accuracy and margin on the test split."""
    ref_logps = read_reference(list(range(len(pairs))), known, pairs, policy, reference, args)
    stats = preference_gradient(policy, pairs, ref_logps, args)
    return {f"eval/{name}": stats[name] for name in ("loss", "rewards/accuracies", "rewards/margins")}


def respond(model: nn.Module, pairs: list[Preference], args: Args) -> Rollout:
    """Responses to the prompts of pairs, drawn with the same random numbers for every model and at any time."""
    tokenizer = model.tokenizer
    prompts, mask = pad([p.prompt for p in pairs], tokenizer.pad_token_id, args, left=True)
    n, T = len(pairs), min(args.response_length, context_length(model) - prompts.shape[1])  # the longest prompt tells
    uniforms = torch.rand(n, T, generator=torch.Generator().manual_seed(args.seed)).to(args.torch_device)
    inputs, own = (prompts, mask, uniforms), shard_rows(n).to(args.torch_device)
    settings = args.temperature, tokenizer.eos_token_id, tokenizer.pad_token_id
    with autocast(args), gathered(model, args):
        return Rollout(prompts, mask, *(all_gather(x)[:n] for x in sample(model, *(x[own] for x in inputs), *settings)))


@torch.no_grad()
def evaluate_responses(
    policy: nn.Module, reference: nn.Module | None, pairs: list[Preference], args: Args,
    gold_reward: Callable[[list[str]], list[float]] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Answers to some of the prompts: their KL to the reference, as ppo.py measures it, and their gold score."""
    r = respond(policy, pairs[: args.num_eval_prompts], args)
    stats = {"val/eos_share": r.ended.float().mean().item(), "val/response_length": r.mask.sum(1).float().mean().item()}
    if reference is not None:
        parts = [Rollout(*part) for part in zip(*(x.split(2 * args.micro_batch_size) for x in vars(r).values()))]
        with autocast(args), adapter_off(policy, reference):
            logits = lambda part: response_forward(reference, part, args.temperature)[0]  # noqa: E731 - (b, T, V)
            ref_logprobs = torch.cat([token_logprobs(logits(part), part.responses) for part in parts])
        stats["objective/kl"] = (r.old_logprobs - ref_logprobs).masked_fill(~r.mask, 0.0).sum(1).mean().item()
    if gold_reward:
        texts = decode(r, policy.tokenizer)
        padded = (texts * WORLD_SIZE)[: len(texts) + -len(texts) % WORLD_SIZE]  # as many for each process
        scores = call_reward_function(gold_reward, padded, args)
        stats["objective/gold_scores"] = scores[: len(texts)].mean().item()
    return stats


def show_responses(
    run: "Run", step: int, policy: nn.Module, reference: nn.Module | None, pairs: list[Preference], args: Args
) -> None:
    """A table of three prompts with the responses of reference and policy, drawn with the same random numbers."""
    tokenizer = policy.tokenizer
    columns = {"prompt": [tokenizer.decode(p.prompt) for p in pairs[:3]]}
    for name, model in (("reference", reference), ("policy", policy)):
        if model is not None:
            with adapter_off(policy, reference if name == "reference" else None):
                r = respond(model, pairs[:3], args)
            columns[name] = [tokenizer.decode(row[real]) for row, real in zip(r.responses, r.mask)]
    run.table(f"step {step} of {run.bar.total}", list(columns), [list(row) for row in zip(*columns.values())])


def response_mask(responses: Tensor, stop_token_id: int | None) -> tuple[Tensor, Tensor]:
    """(B, T) true up to and including the first stop token, and (B,) whether there is one.

    Made from positions, so that it is right even if the padding token is the stop token. With stop token 0:
        responses [[5, 0, 7, 0], [5, 6, 7, 8]]  ->  mask [[1, 1, 0, 0], [1, 1, 1, 1]], ended [1, 0]
    """
    is_stop = torch.zeros_like(responses) if stop_token_id is None else (responses == stop_token_id).long()
    return is_stop.cumsum(1) - is_stop == 0, is_stop.any(1)


def sample_categorical(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row of logits (B, V), and its logprob, by inverting the distribution function at uniforms (B,).

    The token is the first whose cumulative probability exceeds the uniform number. Probabilities .2 .5 .3 and .6 give
    the second token, since .2 <= .6 < .7. Unlike torch.multinomial this takes one random number per token, drawn
    beforehand, so that what a row gets depends neither on its neighbours nor on how a batch is cut.
    """
    logprobs = logits.log_softmax(1)
    cdf = logprobs.exp().cumsum(1)
    threshold = uniforms[:, None] * cdf[:, -1:]  # (B, 1), scaled because rounding lets the sum end slightly off 1
    tokens = torch.searchsorted(cdf, threshold, right=True).clamp(max=logits.shape[1] - 1)  # (B, 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


class OneTypeCache(StaticCache):
    """A static key-value cache in one type: under autocast, rotary embeddings leave the keys in float32, while the
    values are bfloat16, the type in which attention reads both."""

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Takes in the keys and values of a layer's new tokens; returns all of that layer."""
        return super().update(keys.to(values.dtype), values, *args, **kwargs)


@torch.no_grad()
def sample(
    policy: nn.Module, prompts: Tensor, prompt_mask: Tensor, uniforms: Tensor, temperature: float,
    stop_token_id: int | None, pad_token_id: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Draws one response to each prompt (B, P) from softmax(logits / temperature), with a key-value cache.

    Nothing else shapes the distribution: no generation config is read. All randomness is in `uniforms` (B, T).
    Returns responses (B, T), mask (B, T), ended (B,), and the logprobs (B, T) of the tokens drawn, 0 on padding.
    """
    (B, T), device = uniforms.shape, prompts.device
    responses, logprobs = prompts.new_full((B, T), pad_token_id), torch.zeros(B, T, device=device)  # (B, T)
    rows = torch.arange(B, device=device)  # rows still in the forward pass; the next four tensors have one row for each
    tokens, positions = prompts, (prompt_mask.cumsum(1) - 1).clamp(min=0)  # (rows, P), after the first pass (rows, 1)
    attention_mask = F.pad(prompt_mask.long(), (0, T), value=1)  # (rows, P+T): causality hides what is not yet written
    going = torch.ones(B, dtype=torch.bool, device=device)  # (rows,) those without a stop token so far
    cache = OneTypeCache(config=policy.config, max_cache_len=attention_mask.shape[1])  # allocated once: it never grows
    for t in range(T):
        output = policy(
            input_ids=tokens, attention_mask=attention_mask, position_ids=positions,
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        token, logprob = sample_categorical(output.logits[:, -1].float() / temperature, uniforms[rows, t])  # (rows,)
        responses[rows, t], logprobs[rows, t] = token, logprob
        if stop_token_id is not None:
            going &= token != stop_token_id
        if not all_reduce(going.any().int()):  # all processes stop together, since sharded weights need all of them
            break
        if 0 < going.float().mean() < 0.75:  # a forward pass over ended rows costs more than copying the cache once
            rows, token, positions, attention_mask = (x[going] for x in (rows, token, positions, attention_mask))
            cache.reorder_cache(going.nonzero().squeeze(1))
            going = going[going]
        tokens, positions = token[:, None], positions[:, -1:] + 1
    mask, ended = response_mask(responses, stop_token_id)  # what an ended row drew while it waited is erased here
    return responses.masked_fill(~mask, pad_token_id), mask, ended, logprobs.masked_fill(~mask, 0.0)


# --- Models and gold scores -------------------------------------------------------------------------------------------


def load_trained_policy(args: Args) -> nn.Module:
    """The policy in float32; fills in the settings that depend on it. Dropout stays off (TRL)."""
    policy = load_model(AutoModelForCausalLM, args.model, args)
    has_eos = policy.tokenizer.eos_token_id is not None
    require(has_eos, f"the tokenizer of {args.model} has no EOS token to end completions with")
    # 1e-5 for a model of GPT-2's size, higher for smaller ones, never below 5e-7 (DPO's Pythia 2.8B: 1e-6)
    default = max(5e-7, 1e-5 * (124e6 / policy.num_parameters()) ** 0.6) * (10 if args.lora_r else 1)
    args.learning_rate, args.max_length = args.learning_rate or default, min(args.max_length, context_length(policy))
    fits = args.max_prompt_length < args.max_length
    require(fits, f"--max-prompt-length {args.max_prompt_length} leaves no room for a completion in {args.max_length} "
            "tokens")  # fmt: skip
    return policy.eval()


def make_reference(policy: nn.Module, args: Args) -> nn.Module:
    """A frozen copy of the policy; with LoRA the policy itself, which is then given its adapter."""
    if not args.lora_r:
        return deepcopy(policy).requires_grad_(False)
    add_adapter(policy, args, task_type="CAUSAL_LM")
    return policy


@contextmanager
def adapter_off(policy: nn.Module, reference: nn.Module) -> Iterator[None]:
    """With LoRA, the policy without its adapter serves as the reference within this context."""
    is_adapter, shards = reference is policy, [module for module in policy.modules() if isinstance(module, FSDPModule)]
    if is_adapter:  # the switch changes requires_grad, which must be that of the shards
        for shard in shards:
            shard.reshard()
        policy.disable_adapters()
    yield
    if is_adapter:
        for shard in shards:
            shard.reshard()
        policy.enable_adapters()


@torch.no_grad()
def check_policy(policy: nn.Module, args: Args) -> None:
    """Refuses a model that reads a text differently beside padding, or with a cache, than alone; two short rows tell.

    If it does not heed positions, attention mask or cache, log-probabilities are off by a tenth of the logits' standard
    deviation or more; by rounding, by a millionth of it (on a GPU, with TF32 or flash attention, by up to a hundredth).
    """
    prompts, mask = pad([list(range(5, 8)), list(range(5, 12))], 0, args, left=True)
    uniforms, needs_bf16 = torch.linspace(0.1, 0.9, 8).view(2, 4), "flash" in (args.attn_implementation or "")
    with explain(f"{args.model} ({type(policy).__name__}) cannot be sampled from with a key-value cache, as GPT-2 can"):
        with torch.autocast(prompts.device.type, torch.bfloat16, enabled=needs_bf16), gathered(policy, args):
            r = Rollout(prompts, mask, *sample(policy, prompts, mask, uniforms.to(prompts.device), 1.0, None, 0))
            beside = token_logprobs(response_forward(policy, r, 1.0)[0], r.responses)
            text = r.inputs()["input_ids"][:1, 4:]  # the first row, whose prompt has 3 tokens, without its padding
            logits = policy(input_ids=text, use_cache=False).logits[:, -5:-1].float()  # (1, 4, V)
            alone = token_logprobs(logits, r.responses[:1])[0]
    errors = torch.stack([r.old_logprobs[0], beside[0]]) - alone
    error, bound = (errors.abs().mean() / logits.std()).item(), 1e-3 if prompts.device.type == "cpu" else 0.05
    require(error <= bound, f"{args.model} ({type(policy).__name__}) reads a text differently beside padding or "
            f"with a cache than alone, by {error:.2g} of its logits' deviation: it cannot be used here")  # fmt: skip


def load_gold_reward(args: Args) -> Callable[[list[str]], list[float]] | None:
    """The function that --gold-reward-fn names, called once: one that is wrong fails now, not later."""
    if args.gold_reward_fn is None:
        return None
    function = load_function(args.gold_reward_fn)
    call_reward_function(function, ["A first text.", "A second."] * WORLD_SIZE, args)
    return function


def decode(rollout: Rollout, tokenizer: AutoTokenizer) -> list[str]:
    """Prompt and response of each row as one text, without padding and special tokens."""
    rows = zip(rollout.inputs()["input_ids"], rollout.inputs()["attention_mask"].bool())
    return [tokenizer.decode(row[real], skip_special_tokens=True) for row, real in rows]


def call_reward_function(function: Callable[[list[str]], list[float]], texts: list[str], args: Args) -> Tensor:
    """(B,) rewards of texts, of which each process asks for its share."""
    own = texts[RANK::WORLD_SIZE]
    with explain("the reward function failed"):
        rewards = torch.tensor([float(x) for x in function(own)], device=args.torch_device)
    require(len(rewards) == len(own), f"the reward function gave {len(rewards)} rewards for {len(own)} texts")
    return all_gather(check_rewards(rewards, own))


def check_rewards(rewards: Tensor, texts: list[str]) -> Tensor:
    """The rewards (B,) themselves; raises UserError with the text for one that is NaN or infinite."""
    bad = int(rewards.isfinite().long().argmin())
    require(rewards.isfinite().all(), f"the reward is {rewards[bad].item()} for the text {texts[bad]!r}")
    return rewards


# --- Settings and checks ----------------------------------------------------------------------------------------------

ALIASES = {  # other libraries' spellings
    "--model-name-or-path": "--model", "--sft-model-path": "--model", "--dataset-name": "--dataset",
    "--dataset-config-name": "--dataset-config", "--resume-from-checkpoint": "--resume",
}  # fmt: skip
CURVES = [["loss", "eval/loss"], ["rewards/chosen", "rewards/rejected"],
          ["rewards/accuracies", "eval/rewards/accuracies"], ["objective/kl"], ["objective/gold_scores"]]  # fmt: skip


def check_preferences(args: Args) -> None:
    """Raises UserError for settings that make no sense together."""
    is_plain = args.loss_type == "sigmoid" or not args.label_smoothing
    require(is_plain, f"--label-smoothing {args.label_smoothing} is for the sigmoid loss; --loss-type {args.loss_type} "
            "has none")  # fmt: skip
    is_free = args.reference_free and args.loss_type == "kto_pair"
    require(not is_free, "--loss-type kto_pair needs the reference: its rewards are measured against a KL")


def plan_steps(args: Args, model: nn.Module, num_rows: int, fits_cpu: int) -> tuple[int, int]:
    """Fills in the batch sizes and prints them; returns the number of steps in the run, and in one pass over the rows.

    `fits_cpu` rows at a time go through the model on a CPU, unless the settings say otherwise.
    """
    per_device, on_cpu = args.per_device_train_batch_size, args.torch_device == "cpu"
    require(per_device or args.gradient_accumulation_steps == 1, "--gradient-accumulation-steps goes with "
            "--per-device-train-batch-size; or give --batch-size and --micro-batch-size")  # fmt: skip
    args.batch_size = args.batch_size or (per_device or 0) * args.gradient_accumulation_steps * WORLD_SIZE or 64
    share = -(-args.batch_size // WORLD_SIZE)  # rows of a batch that each process computes
    args.micro_batch_size = args.micro_batch_size or per_device or (max(1, min(share, fits_cpu)) if on_cpu else share)
    steps_per_epoch = math.ceil(num_rows / args.batch_size)
    num_steps = math.ceil(args.num_train_epochs * steps_per_epoch)
    print(f"model: {model.name_or_path}, {model.num_parameters() / 1e6:.2f}M parameters on {args.torch_device}, "
          f"learning rate {args.learning_rate:.2g}")  # fmt: skip
    print(f"batch: {args.batch_size} of {num_rows} rows per step, {args.micro_batch_size} at a time; {num_steps} steps")
    return num_steps, steps_per_epoch


# Many processes: what they must agree on is drawn by the first


def broadcast(x: Tensor) -> Tensor:
    """x of the first process."""
    if WORLD_SIZE > 1:
        dist.broadcast(x, 0)
    return x


def shard_rows(n: int) -> Tensor:
    """(m,) numbers of those of n rows that this process computes: every WORLD_SIZE-th.

    m is the same everywhere, since passes over sharded weights must be equally many. If n does not divide, the last
    process or processes begin again with row 0, ... for want of another.
    """
    return torch.arange(RANK, -(-n // WORLD_SIZE) * WORLD_SIZE, WORLD_SIZE) % n


def micro_batches(rows: Sequence, args: Args) -> Iterator[tuple[list, Tensor]]:
    """This process's share of the rows, `micro_batch_size` at a time, and (b,) which of them are not there twice."""
    own = [rows[i] for i in shard_rows(len(rows))]
    counts = torch.arange(len(own), device=args.torch_device) < len(range(RANK, len(rows), WORLD_SIZE))
    for i in range(0, len(own), args.micro_batch_size):
        yield own[i : i + args.micro_batch_size], counts[i : i + args.micro_batch_size]


# --- The same text in every script, from here to the end: mistakes, models and data by name, processes, the run -------

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
DATA_FILES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # and what datasets calls them
WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)  # the state of a model, put together from shards


class UserError(Exception):
    """A mistake in the input: shown as one sentence, exit code 2, no traceback."""


def require(condition: object, sentence: str) -> None:
    """Raises UserError with the sentence unless the condition holds."""
    if not condition:
        raise UserError(sentence)


@contextmanager
def explain(sentence: str) -> Iterator[None]:
    """Runs other people's code: an error in it ends in one sentence, ours followed by the error's own."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:500]  # its cause tells more
        known = (__file__, "<", os.path.dirname(os.__file__), sys.prefix)  # this file, Python and the libraries
        user = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(known)]
        where = f" ({user[-1].filename}, line {user[-1].lineno})" if user else ""
        raise UserError(f"{sentence}: {type(error).__name__}: {reason}{where}") from error


@cache
def hub_answers() -> bool:
    """Asks the hub once; if it cannot be reached, its libraries, which would retry for minutes, read their caches."""
    with suppress(Exception):
        get_session().head(constants.ENDPOINT, timeout=5)
        return True
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return False


def locate(name: str) -> str:
    """The file or folder of that name, here or beside this script; any other name is taken for one on the hub."""
    here = next((path for path in (Path(name), Path(__file__).resolve().parent / name) if path.exists()), None)
    is_path = name.startswith((".", "/", "~", "toy/")) or name.endswith(tuple(DATA_FILES)) or "\\" in name
    is_path = is_path or name.count("/") > 1
    require(here or (name and not is_path), f"{name!r}: there is no such file or folder")
    if here is None and not hub_answers():
        is_cached = any(Path(constants.HF_HUB_CACHE).glob(f"*--{name.replace('/', '--')}"))
        require(is_cached, f"{name!r} is neither a folder here nor in the cache, and the hub cannot be reached; python "
                f"{Path(__file__).name} without flags runs offline")  # fmt: skip
    return str(here or name)


def load_model(auto_class: type, name: str, args: Args, new_head: bool = False, **options) -> nn.Module:
    """A model from a folder or the hub, with float32 weights, and with its tokenizer as `model.tokenizer`.

    Refuses one that lacks weights, which the library would draw at random, except for those of a new head.
    """
    options |= {"attn_implementation": args.attn_implementation, "output_loading_info": True}
    options |= {"dtype": torch.float32, "use_safetensors": True}
    with explain(f"the model {name!r} could not be loaded (from safetensors; save_pretrained makes them)"):
        model, info = auto_class.from_pretrained(locate(name), trust_remote_code=args.trust_remote_code, **options)
    missing = [x for x in info["missing_keys"] if not new_head or x.startswith(f"{model.base_model_prefix}.")]
    require(not missing, f"{name!r} has no weights {sorted(missing)[:3]}: it was not saved as a {type(model).__name__}")
    model.auto_class, model.tokenizer = auto_class, load_tokenizer(name, args, model)
    return model


def load_tokenizer(name: str, args: Args, model: nn.Module) -> AutoTokenizer:
    """The tokenizer of a model; if it has no pad token, EOS stands in, since padding is known by position only."""
    with explain(f"the tokenizer of {name!r} could not be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(locate(name), trust_remote_code=args.trust_remote_code)
    require(tokenizer("a text")["input_ids"], f"{name} holds no tokenizer; save the one of its base model beside it")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    require(tokenizer.pad_token is not None, f"the tokenizer of {name} has neither a pad nor an EOS token")
    template, rows = tokenizer(f"{tokenizer.chat_template}")["input_ids"], model.get_input_embeddings().num_embeddings
    last = max(tokenizer.vocab_size - 1, tokenizer.pad_token_id, tokenizer.eos_token_id or 0, *template)
    require(last < rows, f"{name} embeds {rows} tokens, but its tokenizer has one with id {last}; call "
            "model.resize_token_embeddings and save it, or take the tokenizer that it was trained with")  # fmt: skip
    return tokenizer


def add_adapter(model: nn.Module, args: Args, **options) -> None:
    """Freezes the model and gives it LoRA adapters to train (Hu et al. 2021)."""
    with explain(f"--lora-r {args.lora_r} --lora-target-modules {args.lora_target_modules} (pip install peft?)"):
        from peft import LoraConfig

        model.add_adapter(LoraConfig(
            r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=args.lora_target_modules, **options,
            fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),  # GPT-2 keeps its weights transposed
        ))  # fmt: skip


def context_length(model: nn.Module) -> int:
    """Most tokens that the model can read at once. RoBERTa's positions begin behind that of its padding."""
    tables = [module for name, module in model.named_modules() if name.endswith(".position_embeddings")]
    first = max(((getattr(module, "padding_idx", None) or -1) + 1 for module in tables), default=0)
    return (getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize) - first


def load_function(spec: str) -> Callable:
    """file.py:name -> the function."""
    file, _, name = spec.rpartition(":")
    require(file.endswith(".py") and name, f"{spec!r} should be file.py:name")
    print(f"runs the code in {locate(file)}")  # which may be somebody else's, with --resume
    with explain(f"{file} could not be imported"):
        names = runpy.run_path(locate(file))
    require(callable(names.get(name)), f"{file} defines no function {name!r}")
    return names[name]


def load_split(name: str, config: str | None, split: str):
    """One split of a dataset: a folder, a jsonl/json/csv/parquet file (which is its split train), or a hub name."""
    path, data = locate(name), []
    kind = DATA_FILES.get(Path(path).suffix)
    require(kind or not Path(path).is_file(), f"the dataset {name}: a file must be jsonl, json, csv or parquet")
    source = {"path": kind, "data_files": path} if Path(path).is_file() else {"path": path, "name": config}
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    with explain(f"the dataset {name}, split {split!r}, could not be loaded"), suppress(StopIteration):  # if empty
        data = datasets.load_dataset(**source, split=split)
    require(len(data), f"the dataset {name}, split {split!r}, is empty")
    return data


def load_data(args: Args) -> tuple:
    """The split to train on, and the one to evaluate on or None: by default `validation`, if the data have one."""
    train, test = load_split(args.dataset, args.dataset_config, args.dataset_train_split), args.dataset_test_split
    test = test or ("validation" if "validation" in train.info.splits else "none")
    return train, None if test == "none" else load_split(args.dataset, args.dataset_config, test)


def read_column(data, column: str, name: str, flag: str, kind=str) -> list:
    """A column of a dataset; raises UserError if it is missing, or if a row holds something of another kind."""
    there = ", ".join(data.column_names)
    require(column in data.column_names, f"the dataset {name} has no column {column!r}; it has {there} (set {flag})")
    with explain(f"the dataset {name}, column {column!r}, could not be read"):
        rows = list(data[column])
    for i, row in enumerate(rows):
        require(isinstance(row, kind), f"the dataset {name}: row {i} of {column!r} holds {row!r} (set {flag})")
    return rows


def apply_template(messages: list[dict], tokenizer: AutoTokenizer, **options) -> list[int]:
    """Token ids of a conversation through the tokenizer's chat template."""
    require(tokenizer.chat_template, "the dataset holds messages, but the tokenizer has no chat template")
    with explain(f"the tokenizer's chat template refuses {messages!r}"):
        return tokenizer.apply_chat_template(messages, return_dict=False, **options)


def pad(rows: list[list[int]], value: int, args: Args, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token lists as one tensor (B, S), and its mask (B, S), true on real tokens."""
    ids, ones = [torch.tensor(row, dtype=torch.long) for row in rows], [torch.ones(len(row)).bool() for row in rows]
    ids, mask = (pad_sequence(x, True, y, "left" if left else "right") for x, y in ((ids, value), (ones, False)))
    return ids.to(args.torch_device), mask.to(args.torch_device)


def autocast(args: Args) -> torch.autocast:
    """bfloat16 if --bf16 asks for it; weights, losses and everything after the logits stay float32."""
    return torch.autocast(torch.device(args.torch_device).type, torch.bfloat16, enabled=args.bf16)


def use_fast_kernels(args: Args, models: list[nn.Module], rows: int, length: int) -> None:
    """The same functions, equal to rounding, in fewer or faster kernels, for passes over `rows` x `length` tokens."""
    modules = [module for model in models for module in model.modules()]
    for module in modules:
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):  # GPT-2's: six kernels, a third of its update on a CPU
                setattr(module, name, nn.GELU(approximate="tanh"))
    if args.torch_device != "cpu":
        return torch.set_float32_matmul_precision("high")  # TF32; plain float32 does not use the tensor cores
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc: freed memory is kept, since
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # getting it back page by page takes a tenth of the time, or half of it
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    shape = models[0].config.get_text_config()
    heads = getattr(shape, "num_attention_heads", 1) * shape.num_hidden_layers
    if args.attn_implementation or rows * length**2 * heads > 2**24:
        return  # eager attention, below, would keep all attention weights in memory until the backward pass
    for name, size in (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "192"), ("LRU_CACHE_CAPACITY", "96")):
        os.environ.setdefault(name, size)  # oneDNN keeps a megabyte for each shape that it has seen, and 1,024 of them
    torch.set_float32_matmul_precision("medium")  # products go through oneDNN: twice as fast on AMD processors
    a = torch.linspace(-1, 1, 64**2).view(64, 64).sin()
    if ((a @ a).double() - a.double() @ a.double()).abs().max() > 1e-4:  # in bfloat16, as on Intel's AMX: undone
        torch.set_float32_matmul_precision("highest")
        return
    for module in modules:  # the backward pass of flash attention would take five times as long for texts so short
        if isinstance(module, PreTrainedModel):
            module.set_attn_implementation("eager")


def make_schedule(args: Args, optimizer: torch.optim.Optimizer, num_steps: int):
    """The course of the learning rate, by the name that transformers gives it."""
    with explain(f"--lr-scheduler-type {args.lr_scheduler_type}"):
        schedule = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_ratio * num_steps), num_steps)
    is_plain = isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    require(is_plain, f"--lr-scheduler-type {args.lr_scheduler_type}: take one that depends on the step alone")
    return schedule


# Many processes: all read the same data and draw the same numbers; of every batch, each computes its share


def all_reduce(x: Tensor) -> Tensor:
    """The sum of x over all processes."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
    return x


def all_gather(x: Tensor) -> Tensor:
    """(B, ...) all rows, of which each process has the rows RANK, RANK + WORLD_SIZE, ... as x (B/WORLD_SIZE, ...)."""
    shares = [x.clone() for _ in range(WORLD_SIZE)]
    if WORLD_SIZE > 1:
        dist.all_gather(shares, x.contiguous())
    return torch.stack(shares, 1).flatten(0, 1)


def place(args: Args, *models: nn.Module | None) -> list[nn.Module]:
    """Moves the models to the device, and returns those that exist, without duplicates.

    With --zero-stage they are sharded by torch's FSDP2, a layer at a time; with stage 2 only those in training, and
    gathered weights are kept until the backward pass. The gradient of a shard becomes the mean over processes.
    """
    models, size = list(dict.fromkeys(model for model in models if model is not None)), args.shard_size or WORLD_SIZE
    device_type = torch.device(args.torch_device).type
    for model in models:
        is_trained = any(p.requires_grad for p in model.parameters())
        modules = list(model.modules())
        embeddings = [module.weight for module in modules if isinstance(module, nn.Embedding)]
        if args.gradient_checkpointing and is_trained:  # in training mode only, which must not bring dropout back
            for module in modules:
                dropouts = [x for x in vars(module) if "drop" in x or (x == "p" and isinstance(module, nn.Dropout))]
                off = [x for x in dropouts if not module.training and isinstance(getattr(module, x), float)]
                vars(module).update(dict.fromkeys(off, 0.0))
                getattr(module, "activation_checkpointing_enable", lambda _: None)({"use_reentrant": False})
        for module in modules if args.bf16 and not is_trained else []:  # what autocast would cast at each use
            if isinstance(module, (nn.Linear, Conv1D)) and not any(module.weight is x for x in embeddings):
                module.to(torch.bfloat16)
        if args.zero_stage == 0 or (args.zero_stage == 2 and not is_trained):
            model.to(args.torch_device)
            continue
        mesh = init_device_mesh(device_type, (WORLD_SIZE // size, size), mesh_dim_names=("replicate", "shard"))
        options = {"mesh": mesh["shard"] if size == WORLD_SIZE else mesh, "reshard_after_forward": args.zero_stage == 3}
        options |= {"offload_policy": CPUOffloadPolicy(device_type == "cuda")} if args.offload else {}
        layers = {name for module in modules for name in getattr(module, "_no_split_modules", None) or []}
        roots = [model.base_model, model.score] if hasattr(model, "score") else [model]  # what read_reward calls
        for module in [module for module in modules if type(module).__name__ in layers] + roots:
            fully_shard(module, **options)
    return models


@contextmanager
def gathered(model: nn.Module, args: Args) -> Iterator[None]:
    """Within this context each process holds a sharded model whole: weights are sent once, not for every token."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule) and args.gather_for_rollout]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    yield
    for part in parts:
        part.set_reshard_after_forward(args.zero_stage == 3, recurse=False)
        part.reshard()


def clip_gradient(parameters: list[Tensor], max_norm: float) -> Tensor:
    """Scales the gradient down to a norm of max_norm; returns the norm that it had.

    Whole gradients are first averaged over the processes, as those of shards already are.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if WORLD_SIZE > 1 and not isinstance(gradients[0], DTensor):
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            work.wait()
        torch._foreach_div_(gradients, WORLD_SIZE)
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def start_run(args: Args) -> None:
    """Checks the settings, joins the processes, seeds everything, fills in args.output_dir and args.torch_device."""
    logging.set_verbosity_error()  # of transformers, to which a fresh head is news
    logging.disable_progress_bar()
    for name, hint in get_type_hints(Args, include_extras=True).items():
        value = getattr(args, name)
        for kind in (hint, *get_args(hint)):
            if hasattr(kind, "__metadata__") and value is not None:
                allowed, holds = kind.__metadata__
                fits = all(map(holds, value if isinstance(value, tuple) else [value]))
                require(fits, f"--{name.replace('_', '-')} {value} must be {allowed}")
    is_sharded = args.zero_stage or args.shard_size or args.offload
    can_shard = "RANK" in os.environ and args.zero_stage and WORLD_SIZE % (args.shard_size or 1) == 0
    require(can_shard or not is_sharded, "--zero-stage, --shard-size and --offload are for runs under torchrun "
            "--nproc-per-node N; with stage 2 or 3, and a shard size that divides N")  # fmt: skip
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
        print(f"processes: {WORLD_SIZE}, --zero-stage {args.zero_stage}")
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    args.output_dir = args.output_dir or f"runs/{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    files = [Path(args.output_dir, name) for name in ("metrics.jsonl", "config.json", "README.md")]
    is_used = any(file.exists() and file.stat().st_size for file in files)
    require(args.resume or RANK or not is_used, f"--output-dir {args.output_dir} already holds a run or a model; name "
            f"another, or go on with that run: --resume {shlex.quote(args.output_dir)}")  # fmt: skip
    with explain(f"--device {args.device} cannot be used on this machine"):
        device = torch.empty(0, device=args.device or torch.accelerator.current_accelerator(True) or "cpu").device
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index)))
            torch.cuda.set_device(device)
    args.torch_device = str(device)


class Run:
    """What a run shows and leaves: progress bar, tables, metrics.jsonl, W&B, checkpoints; in the end model and curves.

    A number is logged by putting it into the stats, under any name. A checkpoint is one dict: weights and optimiser,
    whole, however they are sharded; `state`, the lists and dicts that change during the run; the random state; and the
    length of metrics.jsonl, to which the file is cut when the run goes on. On a CPU a resumed run is, bit for bit, the
    one that was never interrupted.
    """

    def __init__(self, args: Args, models: dict, optimizer: torch.optim.Optimizer, schedule, state: dict):
        self.args, self.optimizer, self.schedule, self.state = args, optimizer, schedule, state
        self.models = nn.ModuleDict({name: model for name, model in models.items() if model is not None})
        self.output, self.metrics, self.seconds, self.warned = Path(args.output_dir), {}, {}, set()
        self.step, self.signal, self.broken, self.start = 0, None, 0, time.perf_counter()
        self.wandb, self.wandb_id, self.file = None, None, open(os.devnull, "w")
        if not RANK:
            with explain(f"--output-dir {self.output} cannot be used (is another run writing there?)"):
                (self.output / "checkpoints").mkdir(parents=True, exist_ok=True)
                self.lock = FileLock(self.output / ".lock", timeout=0).acquire()  # let go of when the process ends
                self.file = open(self.output / "metrics.jsonl", "a")
                (self.output / "args.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
        if args.resume:
            self.restore(Path(args.resume))
        if args.track and not RANK:
            with explain("W&B did not start; log in with `wandb login`, set WANDB_MODE=offline, or leave out --track"):
                import wandb

                names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": self.output.name}
                names |= {"dir": self.output, "id": self.wandb_id, "resume": "allow"}
                self.wandb = wandb.init(**names, config=asdict(args))
        print(f"output: {self.output}")

    def steps(self, num_steps: int) -> Iterator[int]:
        """The numbers of the steps that are left. Ctrl-C, SIGTERM or SIGHUP end the run after the step it is in."""
        self.bar = tqdm(total=num_steps, initial=self.step, dynamic_ncols=True)
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        before = {number: signal.signal(number, self.stop) for number in heeded}
        try:
            for step in range(self.step + 1, num_steps + 1):
                yield step
                is_asked = bool(all_reduce(torch.tensor(int(self.signal is not None))))  # in one process, so in all
                if step % self.args.save_steps == 0 or step == num_steps or is_asked:
                    self.save(step)
                if is_asked and step < num_steps:
                    raise KeyboardInterrupt(f"stopped by a signal after step {step} of {num_steps}")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self, number: int, frame) -> None:
        """The handler. A second signal does not wait for the end of the step; but torchrun passes each one on twice."""
        if self.signal and WORLD_SIZE == 1:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        print(f"\n{self.signal.name}: stopping after this step; send it again to stop at once", file=sys.stderr)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Takes the seconds of a phase of this step."""
        start = time.perf_counter()
        yield
        if self.args.torch_device != "cpu":
            torch.accelerator.synchronize()
        self.seconds[phase] = time.perf_counter() - start

    def write(self, step: int, stats: dict[str, float], *shown: str) -> None:
        """Ends a step: one line of metrics.jsonl, W&B, and the metrics named in `shown` beside the bar."""
        stats |= {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        stats["perf/peak_memory_mb"] = peak_memory_mb()
        self.metrics |= stats
        with explain(f"{self.output}/metrics.jsonl could not be written"):
            print(json.dumps(stats), file=self.file, flush=True)
        if self.wandb:
            self.wandb.log(stats, step=step)
        beside = [f"{name.split('/')[-1]} {self.metrics[name]:.2f}" for name in shown if name in self.metrics]
        self.bar.set_postfix_str(", ".join(beside), refresh=False)
        self.bar.update()
        is_finite = all(math.isfinite(x) for name, x in stats.items() if name.endswith("grad_norm"))
        self.broken = 0 if is_finite else self.broken + 1
        require(self.broken < 5, "the gradient was NaN or infinite in five steps in a row (most often the "
                "learning rate is too high); the weights from before are saved")  # fmt: skip

    def is_turn(self, step: int, times: int) -> bool:
        """True at `times` evenly spread steps, the last one included."""
        return step * times // self.bar.total > (step - 1) * times // self.bar.total

    def warn(self, sentence: str) -> None:
        """Prints a warning, once per run."""
        if sentence not in self.warned and not RANK:
            self.bar.write(f"warning: {sentence}", file=sys.stderr)
        self.warned.add(sentence)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Shows a table. Markup and control characters in its cells are shown, not obeyed."""
        table = Table(*(Column(name, overflow="fold") for name in columns), title=title, show_lines=True)
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        with self.bar.external_write_mode():
            Console(quiet=RANK > 0).print(table)

    def save(self, step: int) -> None:
        """Writes a checkpoint beside the others and renames it into place, so that none is ever half written."""
        models, optimizer = dcp.get_state_dict(self.models, self.optimizer, options=WHOLE)
        state = {
            "script": Path(__file__).name, "step": step, "models": models, "optimizer": optimizer, "state": self.state,
            "torch_random": torch.get_rng_state(), "python_random": random.getstate(), "bytes": self.file.tell(),
            "seconds": time.perf_counter() - self.start, "wandb_id": self.wandb and self.wandb.id,
        }  # fmt: skip
        folder = self.output / "checkpoints"
        try:
            if not RANK:
                os.fsync(self.file.fileno())
                with open(folder / "unfinished", "wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                (folder / "unfinished").replace(folder / f"step-{step:08d}.pt")
                for old in sorted(folder.glob("step-*.pt"))[: -self.args.save_total_limit]:
                    old.unlink()
        except (OSError, RuntimeError) as error:  # a disk that is full, a folder that is gone: the run itself goes on
            (folder / "unfinished").unlink(missing_ok=True)
            print(f"warning: no checkpoint after step {step} (is the disk full?): {error}", file=sys.stderr)

    def restore(self, path: Path) -> None:
        """Brings everything back to a checkpoint and removes what came after it; without any, the run starts over."""
        files = [path] if path.is_file() else sorted((self.output / "checkpoints").glob("step-*.pt"), reverse=True)
        metrics, script = self.output / "metrics.jsonl", Path(__file__).name
        for file in files:
            with suppress(Exception):  # whatever a damaged file makes of it
                if zipfile.ZipFile(file).testzip() is None:  # its checksums
                    state = torch.load(file, map_location="cpu", weights_only=True)
                    break
            print(f"warning: {file} is damaged and cannot be read", file=sys.stderr)
        else:
            require(not files, f"--resume {path}: there is no checkpoint that can be read; start a new run")
            return None if RANK else self.file.truncate(0)
        require(state["script"] == script, f"--resume {path}: that is a checkpoint of {state['script']}, not {script}")
        is_whole = metrics.stat().st_size >= state["bytes"]
        require(is_whole, f"{metrics} is shorter than when {file.name} was written; start a new run")
        with explain(f"--resume {path}: this checkpoint does not fit the model"):
            # The optimiser first: to have moments to fill in, it is made to take a step, and the average follows
            dcp.set_optimizer_state_dict(self.models, self.optimizer, state["optimizer"], options=WHOLE)
            dcp.set_model_state_dict(self.models, state["models"], options=WHOLE)
        self.state.update(state["state"])
        random.setstate(state["python_random"])
        torch.set_rng_state(state["torch_random"])
        self.step, self.start, self.wandb_id = state["step"], self.start - state["seconds"], state["wandb_id"]
        self.schedule.last_epoch = self.step - 1
        self.schedule.step()  # the rate of the next step, which is another one if the run is now longer
        if not RANK:
            self.file.truncate(state["bytes"])
            for later in (self.output / "checkpoints").glob("step-*.pt"):
                if later.name > file.name:
                    later.unlink()
        for line in metrics.read_bytes()[: state["bytes"]].splitlines():
            self.metrics |= json.loads(line)
        print(f"continues after step {self.step}, from {file}")

    def finish(self, model: nn.Module, panels: list[list[str]], **others) -> None:
        """Closes the files; unless no step was made, saves the model, its card and curves, and others in subfolders.

        Not if another process has failed: the model cannot be put together without it.
        """
        self.bar.close()
        with suppress(OSError):  # what a full disk did not take was reported where it was written
            self.file.close()
        if self.metrics and (WORLD_SIZE == 1 or sys.exc_info()[0] in (None, KeyboardInterrupt)):
            with explain(f"the model could not be saved in {self.output}"):
                for name, part in {"": model, **others}.items():
                    if part is not None:
                        save_model(part, self.output / name, self.args)
            if not RANK:
                with explain(f"the model is saved in {self.output}, but its card or curves could not be made"):
                    write_card(self.output, self.args, self.metrics)
                    draw_curves(self.output, panels)
                print(f"saved in {self.output}: the model, its card, metrics.jsonl and curves.png")
        if self.wandb:
            self.wandb.finish()


def printable(text: str) -> str:
    """Text without control characters: what a model writes must not steer the reader's terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def peak_memory_mb() -> float:
    """Peak memory in MB: of the GPU on CUDA, else of this process; 0 on Windows, which keeps no such figure."""
    if torch.cuda.max_memory_allocated() or sys.platform == "win32":  # 0 if there is none, or it is not used
        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def save_model(model: nn.Module, folder: Path, args: Args) -> None:
    """Model (safetensors) and tokenizer; beside an adapter, in merged/, the whole model."""
    weights, tied = dcp.get_model_state_dict(model, options=WHOLE), model.all_tied_weights_keys
    if RANK:
        return
    model.save_pretrained(folder, state_dict={name: x for name, x in weights.items() if name not in tied})
    model.tokenizer.save_pretrained(folder)
    if getattr(model, "peft_config", None):
        from peft import PeftModel

        whole = load_model(model.auto_class, args.model, args, new_head=True, config=model.config)
        merged = PeftModel.from_pretrained(whole, folder)
        merged.merge_and_unload().save_pretrained(folder / "merged")
        model.tokenizer.save_pretrained(folder / "merged")


def write_card(output: Path, args: Args, metrics: dict[str, float], library: str = "transformers") -> None:
    """README.md, the model card: the last metrics and all settings, as JSON, in which no name is taken for markup."""
    names = {"base_model": args.model, "datasets": args.dataset}
    hub = {key: name for key, name in names.items() if name and not Path(locate(name)).exists()}
    data = ModelCardData(library_name=library, tags=[Path(__file__).stem], **hub)
    rows = "\n".join(f"| `{name}` | {value:.6g} |" for name, value in metrics.items())
    text = f"Made by `{Path(__file__).name}`.\n\n## Last metrics\n\n| metric | value |\n|---|---|\n{rows}\n"
    settings = f"\n## Settings\n\n```json\n{json.dumps(asdict(args), indent=2)}\n```\n"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}{settings}").save(output / "README.md")


def draw_curves(output: Path, panels: list[list[str]]) -> None:
    """curves.png: one panel for each list of metric names, from metrics.jsonl."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    x, figure = "episode" if "episode" in lines[0] else "step", Figure((5 * len(panels), 3.2), layout="constrained")
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for name in panel:
            points = [(line[x], line[name]) for line in lines if name in line]
            if points:
                axis.plot(*zip(*points), label=name)
        axis.set_xlabel(x)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(frameon=False)
    figure.savefig(output / "curves.png", dpi=120)


def read_command_line() -> Args:
    """The settings. With --resume, those of that run, except for what may differ (in Args, from `resume` on)."""
    flags = [word.partition("=") for word in sys.argv[1:]]
    words = [ALIASES.get(flag.replace("_", "-"), flag) + equals + value for flag, equals, value in flags]
    read = partial(tyro.cli, Args, args=words, description=__doc__.splitlines()[0])
    if (args := read()).resume is None:
        return args
    path, names = Path(args.resume), [f.name for f in fields(Args) if f.init]
    folder = path.parent.parent if path.is_file() else path
    with explain(f"--resume {args.resume}: its args.json cannot be read (is it a run of {Path(__file__).name}?)"):
        saved = json.loads((folder / "args.json").read_text())
        before = Args(**{name: tuple(saved[name]) if isinstance(saved[name], list) else saved[name] for name in names})
    args = read(default=before)
    for name in names[: names.index("resume")]:
        old, new, flag = getattr(before, name), getattr(args, name), f"--{name.replace('_', '-')}"
        require(old == new, f"{flag} {new} is not what the run in {folder} was made with, {old}; start a new run")
    same = args.output_dir in (before.output_dir, str(folder))
    require(same, f"--output-dir {args.output_dir}: a run that is resumed stays in its folder, {folder}")
    args.output_dir = str(folder)
    return args


def main() -> None:
    """Reads the command line and trains; a user's mistake ends in one sentence and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args, terminal, script = None, sys.stderr, Path(__file__).name
    if RANK:  # only the first process writes to the terminal
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        train(args := read_command_line())
        if dist.is_initialized():
            dist.destroy_process_group()
    except KeyboardInterrupt as stop:
        launcher = "python" if WORLD_SIZE == 1 else f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
        command = f"; to resume: {launcher} {script} --resume {shlex.quote(args.output_dir or '')}" if args else ""
        has_run = args and args.output_dir and Path(args.output_dir, "args.json").exists()
        print(f"{str(stop) or 'interrupted'}{command if has_run else ''}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        sys.stderr = terminal
        if "by peer" in str(error):
            sys.exit(f"process {RANK} stops: another one, which shows its own error, has closed the connection")
        is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        if not (is_full or isinstance(error, UserError)):
            raise
        time.sleep(2 * (RANK > 0))  # an error that all processes find is reported by the first
        full = "out of memory: lower --micro-batch-size (of images --train-batch-size); more in docs/guide.md"
        print(printable(f"{script}: error: {full if is_full else error}"), file=terminal)
        sys.exit(2)


if __name__ == "__main__":
    main()
