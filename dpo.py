# /// script
# requires-python = ">=3.10"
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
"""DPO: preference pairs -> better policy, without a reward model or rollouts.

For each batch of pairs, a prompt x with a chosen completion y_w and a rejected y_l:
  1. encode   prompt and completion apart, EOS at the end of each completion
  2. read     log pi(y|x), the sum over the completion's tokens, of both; and log pi_ref(y|x) of a frozen copy of the
              first policy, once for each pair
  3. loss     Delta = [log pi(y_w|x) - log pi_ref(y_w|x)] - [log pi(y_l|x) - log pi_ref(y_l|x)]
              -log sigmoid(beta Delta)
  4. update   AdamW, with the learning rate warmed up and annealed

Where things stand, for a prompt of 3 tokens (left-padded to 4) and completions of 4 and 2 tokens:

  model input   PAD  p1  p2  p3 | w1  w2  w3  EOS         prompts (B, P) and completions (B, T), B = 2: chosen, rejected
                PAD  p1  p2  p3 | l1  EOS -   -
  mask                          |  1   1   1   1          true on real tokens
                                |  1   1   0   0
  logprobs                      |  *   *   *   *          of y_t, read from the logits one position to the left

Why there is no reward model: the policy that maximises E[r] - beta KL(pi || pi_ref) is pi_ref(y|x) exp(r(x, y) / beta)
/ Z(x). Solved for r, that says which reward a policy is best for: beta log pi(y|x) / pi_ref(y|x), up to a term of x
alone that falls out of a difference. Put into the Bradley-Terry likelihood of the pairs (reward_model.py's loss), it is
the loss above: to fit a reward and to maximise it are now one step of supervised learning. What falls away: the
rollouts, the reward, the critic, advantages, ratio and clipping. What is lost: the policy's own texts are never judged.
Papers: Rafailov et al. 2023 (DPO, arXiv 2305.18290, eq. 7); Mitchell 2023 (label smoothing: "conservative DPO"); Zhao
et al. 2023 (SLiC, 2305.10425: hinge); Azar et al. 2023 (IPO, 2310.12036, eq. 17); Ethayarajh et al. 2024 (KTO,
2402.01306: kto_pair, as in TRL 0.7). The README has a glossary of the metrics.

  python dpo.py                                       # the toy world: offline, 1 1/2 minutes on two CPU cores
  python dpo.py --model ./sft --dataset pairs.jsonl   # with chosen and rejected, with or without prompt

Shapes: B rows, P prompt tokens (left-padded), T completion tokens (right-padded), V vocabulary.
"""

import ctypes
import html
import importlib.util
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache, get_scheduler
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput, logging
from tyro.conf import arg

# ---------------------------------------------------------------------------------------------------------------------
# Arguments


@dataclass
class Args:
    # --- Run
    exp_name: str = "dpo"
    """name of this run, in its folder and on W&B"""
    output_dir: str | None = None
    """where everything goes; by default a new folder runs/NAME__SEED__TIME"""
    seed: int = 1
    """seed of the order of pairs and of the sampled responses"""
    device: str | None = None
    """cpu, cuda, mps; by default the best there is"""
    bf16: bool = False
    """run the models under bfloat16 autocast; weights and optimiser stay float32"""
    track: bool = False
    """also log to Weights & Biases (WANDB_MODE=offline works without an account)"""
    wandb_project_name: str = "rlhf"
    """W&B project, with --track"""
    wandb_entity: str | None = None
    """W&B team, with --track"""
    num_sample_generations: int = 3
    """how often in the run a table of responses is printed, the reference's beside the policy's; 0 for never"""

    # --- Survival
    save_steps: int = 100
    """steps (of PPO and RLOO: updates) between checkpoints, each of which holds all that a run consists of"""
    save_total_limit: int = 2
    """checkpoints that are kept, the newest"""
    resume: Annotated[str | None, arg(aliases=["--resume-from-checkpoint"])] = None
    """a run's folder, or one of its checkpoints: goes on from there, with the settings of that run"""

    # --- Many processes: torchrun --nproc-per-node N
    zero_stage: Literal[0, 2, 3] = 0
    """0: all of a model on each GPU; 2: shards of gradients and optimiser state; 3: of weights too (ZeRO, by FSDP2)"""
    shard_size: int | None = None
    """GPUs that hold one set of shards, such as those of a node (ZeRO++); by default all"""
    offload: bool = False
    """keep the shards in CPU memory, from where they come to the GPU when needed: slow, for models that do not fit"""
    gather_for_rollout: bool = True
    """with --zero-stage 3 sample from whole weights, gathered once a batch, or slowly, layer by layer for each token"""

    # --- Model: a folder, or a name on the hub
    model: Annotated[str, arg(aliases=["--model-name-or-path", "--sft-model-path"])] = "toy/sft"
    """the policy to start from, which is also the reference"""
    trust_remote_code: bool = False
    """run Python code that comes with a model; leave it off unless you have read that code"""
    attn_implementation: str | None = None
    """eager, sdpa, flash_attention_2, ...; by default what transformers takes for the model"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass: far less memory, a third more time, the same numbers"""
    lora_r: int = 0
    """rank of LoRA adapters (Hu et al. 2021), 0 for none; the reference is then the policy with its adapter off"""
    lora_alpha: float = 32.0
    """the adapter's output is scaled by lora_alpha / lora_r"""
    lora_target_modules: str | None = None
    """regular expression of the layers that get one, or all-linear; by default what peft takes for the model"""

    # --- Data
    dataset: Annotated[str, arg(aliases=["--dataset-name"])] = "toy/data/preferences"
    """folder, file (jsonl, csv, parquet) or hub name of the pairs: texts, or lists of {role, content} messages"""
    dataset_config: Annotated[str | None, arg(aliases=["--dataset-config-name"])] = None
    """configuration of a hub dataset that has several"""
    dataset_train_split: str = "train"
    """split to train on"""
    dataset_test_split: str | None = None
    """split to evaluate on; by default validation where the data have one; none for no evaluation"""
    chosen_column: str = "chosen"
    """column of preferred texts"""
    rejected_column: str = "rejected"
    """column of the other texts"""
    prompt_column: str = "prompt"
    """column that both go on from; without it, what the two texts have in common at the start"""
    max_length: int = 512
    """tokens of prompt and completion: of longer pairs first the prompt is cut, then the completions' ends (TRL)"""
    max_prompt_length: int = 128
    """tokens of a prompt that is cut (TRL 0.7)"""
    truncation_mode: Literal["keep_end", "keep_start"] = "keep_end"
    """which part of a prompt stays when it is cut (TRL)"""

    # --- DPO
    beta: float = 0.1
    """weight of the KL that the policy is tied with (DPO: 0.1 to 0.5). Lower: further from the reference"""
    loss_type: Literal["sigmoid", "hinge", "ipo", "kto_pair"] = "sigmoid"
    """sigmoid (DPO, eq. 7); hinge (SLiC); ipo (IPO, eq. 17, on means over tokens); kto_pair (KTO on pairs, TRL 0.7)"""
    label_smoothing: float = 0.0
    """share of pairs whose label is taken to be wrong (conservative DPO); with sigmoid only"""
    reference_free: bool = False
    """leave the reference out, as if it found all completions equally likely (TRL)"""
    precompute_ref: bool = False
    """read all pairs with the reference before the first step, and let go of it: the memory of one model less"""

    # --- Optimisation
    num_train_epochs: float = 1.0
    """passes over the pairs"""
    per_device_train_batch_size: int = 64
    """pairs in one forward/backward"""
    gradient_accumulation_steps: int = 1
    """micro-batches in an optimiser step; changes memory, not the result"""
    learning_rate: float | None = None
    """AdamW's; by default from the size of the policy (see dpo_learning_rate), ten times as high with LoRA"""
    lr_scheduler_type: str = "linear"
    """any name that transformers.get_scheduler knows (TRL: linear to 0)"""
    warmup_ratio: float = 0.1
    """share of the run in which the learning rate rises to its value"""
    weight_decay: float = 0.0
    """AdamW's"""
    max_grad_norm: float = 1.0
    """the gradient is clipped to this norm"""

    # --- Evaluation on the test split
    eval_steps: int = 100
    """optimiser steps between evaluations; there is one at the end too"""
    num_eval_prompts: int = 64
    """prompts of the test split that are answered"""
    response_length: int = 53
    """most tokens in an answer (ppo.py's)"""
    temperature: float = 0.7
    """of the answers, and of the KL that is measured on them (ppo.py's)"""
    gold_reward_fn: str | None = None
    """file.py:name, a second opinion that is logged as objective/gold_scores and never trained on"""


METRICS = {
    "step": "optimiser steps so far",
    "epoch": "passes over the pairs so far",
    "lr": "learning rate",
    "loss": "the loss of --loss-type, mean over the pairs of the step; with sigmoid log 2 = .693 at the start",
    "rewards/chosen": "beta * (log pi - log pi_ref) of the chosen completions, mean",
    "rewards/rejected": "the same of the rejected ones",
    "rewards/accuracies": "share of pairs whose chosen completion has the higher reward (a tie is wrong)",
    "rewards/margins": "rewards/chosen - rewards/rejected",
    "logps/chosen": "log pi of the chosen completions, summed over tokens (ipo: their mean), mean over pairs",
    "logps/rejected": "the same of the rejected ones",
    "grad_norm": "norm of the gradient before clipping",
    "eval/loss": "the loss on the test split",
    "eval/rewards/accuracies": "rewards/accuracies on the test split",
    "eval/rewards/margins": "rewards/margins on the test split",
    "objective/kl": "KL to the reference of sampled responses, summed over a response, mean over responses",
    "objective/gold_scores": "mean of --gold-reward-fn on them, never trained on (only when it is given)",
    "val/eos_share": "share of sampled responses that end with EOS",
    "val/response_length": "tokens in a sampled response with its EOS, mean",
    "time/step": "seconds of this step",
    "perf/peak_memory_mb": "peak memory so far: of the GPU on CUDA, else of the process",
}


# ---------------------------------------------------------------------------------------------------------------------
# 1. Encode


@dataclass
class Preference:
    """Token ids of a prompt and of two completions, each with its EOS, of which the first was preferred."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def encode_preference(
    prompt: str | list[dict], chosen: str | list[dict], rejected: str | list[dict], tokenizer: AutoTokenizer
) -> Preference:
    """Prompt and completions of texts or of messages; where there is no prompt, it is what the two have in common.

    A prompt that is a text is encoded apart from what follows it, as in a rollout. Of whole texts and conversations the
    prompt is the longest common beginning: tokens that the two share after the same tokens have the same probability,
    and fall out of the loss (but for ipo's means).
    """
    eos = [tokenizer.eos_token_id]
    if list in map(type, (prompt, chosen, rejected)):
        turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] if prompt else []
        texts = [x if isinstance(x, list) else [{"role": "assistant", "content": x}] for x in (chosen, rejected)]
        whole = [apply_template(turns + text, tokenizer) for text in texts]
    elif prompt:
        ends = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (chosen, rejected)]
        return Preference(tokenizer(prompt)["input_ids"], *(ids if ids[-1:] == eos else ids + eos for ids in ends))
    else:
        whole = [tokenizer(text)["input_ids"] for text in (chosen, rejected)]
    a, b = (ids if ids[-1:] == eos else ids + eos for ids in whole)
    shared = len(os.path.commonprefix([a, b]))
    start = [] if shared else [tokenizer.bos_token_id or tokenizer.eos_token_id]  # something to go on from
    return Preference(start + a[:shared], a[shared:], b[shared:])


def cut_to_fit(pair: Preference, args: Args) -> Preference:
    """The pair within max_length: a prompt that makes it too long keeps max_prompt_length tokens, and then completions
    lose their ends (TRL 0.7)."""
    prompt, longest = pair.prompt, max(len(pair.chosen), len(pair.rejected))
    if len(prompt) + longest > args.max_length:
        prompt = (
            prompt[-args.max_prompt_length :]
            if args.truncation_mode == "keep_end"
            else prompt[: args.max_prompt_length]
        )
    room = args.max_length - len(prompt)
    return Preference(prompt, pair.chosen[:room], pair.rejected[:room])


def encode_preferences(data, tokenizer: AutoTokenizer, args: Args) -> list[Preference]:
    """All pairs of a dataset; those that are equal, before or after a cut, teach nothing: dropped and counted."""
    chosen = read_column(data, args.chosen_column, args.dataset, "--chosen-column", (str, list))
    rejected = read_column(data, args.rejected_column, args.dataset, "--rejected-column", (str, list))
    prompts = [""] * len(chosen)
    if args.prompt_column in data.column_names:
        prompts = read_column(data, args.prompt_column, args.dataset, "--prompt-column", (str, list))
    rows = tqdm(zip(prompts, chosen, rejected), total=len(prompts), desc="encoding", leave=False)
    whole = [encode_preference(*row, tokenizer) for row in rows]
    pairs = [cut_to_fit(pair, args) for pair in whole]
    too_long = sum(a != b for a, b in zip(whole, pairs))
    kept = [pair for pair in pairs if pair.chosen != pair.rejected]
    if too_long:
        print(f"cut {too_long} of {len(pairs)} pairs to --max-length {args.max_length} tokens")
    if len(kept) < len(pairs):
        print(f"dropped {len(pairs) - len(kept)} of {len(pairs)} pairs: both completions are the same")
    same = f"in all {len(pairs)} pairs the two completions are the same up to --max-length {args.max_length}"
    require(kept, f"--dataset {args.dataset}: {same}")
    return kept


def apply_template(messages: list[dict], tokenizer: AutoTokenizer, **options) -> list[int]:  # same in all scripts
    """Token ids of a conversation through the tokenizer's chat template."""
    require(tokenizer.chat_template, "the dataset holds messages, but the tokenizer has no chat template")
    try:
        return tokenizer.apply_chat_template(messages, return_dict=False, **options)
    except Exception as error:  # a template is a program of somebody else's
        raise UserError(f"the tokenizer's chat template refuses {messages!r}: {error}") from error


def length_grouped_batches(lengths: list[int], queue: list[list[int]], batch_size: int) -> Iterator[list[int]]:
    """Endless passes over all rows in batches of like length, in random order: little padding, yet random enough.

    Rows are shuffled, cut into groups of 50 batches, sorted by length inside a group, and the batches shuffled again.
    `queue` holds the batches that this pass has yet to give. It is the caller's, so that a checkpoint can hold it.
    """
    while True:
        while queue:
            yield queue.pop(0)
        order = from_first(torch.randperm(len(lengths))).tolist()
        groups = [order[i : i + 50 * batch_size] for i in range(0, len(order), 50 * batch_size)]
        ordered = [row for group in groups for row in sorted(group, key=lengths.__getitem__)]
        batches = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
        queue += [batches[i] for i in from_first(torch.randperm(len(batches))).tolist()]


# ---------------------------------------------------------------------------------------------------------------------
# 2. Read


def join(prompts: Tensor, prompt_mask: Tensor, responses: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Prompt (B, P) and response (B, T) as one model input (B, P+T). Positions count real tokens only."""
    attention_mask = torch.cat([prompt_mask, mask], 1).long()
    return {
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),  # GPT-2 would count the padding
    }


def response_forward(
    model: nn.Module, prompts: Tensor, prompt_mask: Tensor, responses: Tensor, mask: Tensor, temperature: float,
    allowed: Tensor | None = None, **options,
) -> tuple[Tensor, ModelOutput]:  # fmt: skip
    """(B, T, V) float32 logits / temperature from which response tokens are drawn, and the model's whole output.

    Position P-1+t predicts token t. Where sampling was restricted to allowed tokens (B, T, V), so are the logits: of
    the policy now, of the reference, and in the loss the same tokens as when the response was drawn.
    """
    P, T = prompts.shape[1], responses.shape[1]
    positions = torch.arange(P - 1, P + T - 1, device=prompts.device)
    output = model(**join(prompts, prompt_mask, responses, mask), use_cache=False, logits_to_keep=positions, **options)
    logits = output.logits.float().div_(temperature)  # in place: it is the largest tensor that there is
    return (logits if allowed is None else logits.masked_fill(~allowed, FORBIDDEN)), output


def response_logits(model: nn.Module, *inputs) -> Tensor:
    """The logits (B, T, V) of response_forward alone."""
    return response_forward(model, *inputs)[0]


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def completion_logps(
    model: nn.Module, pairs: list[Preference], tokenizer: AutoTokenizer, args: Args
) -> tuple[Tensor, Tensor]:
    """log pi(y|x) of the chosen and of the rejected completions, (b,) each, in one forward pass over all of them.

    The sum over a completion's tokens; for ipo their mean (TRL).
    """
    device, pad_token_id = model.device, tokenizer.pad_token_id
    prompts, prompt_mask = pad([p.prompt for p in pairs] * 2, pad_token_id, device, left=True)  # (2b, P)
    completions, mask = pad([p.chosen for p in pairs] + [p.rejected for p in pairs], pad_token_id, device)  # (2b, T)
    with autocast(args, device):
        logits = response_logits(model, prompts, prompt_mask.bool(), completions, mask.bool(), 1.0)  # (2b, T, V)
    logps = token_logprobs(logits, completions).masked_fill(~mask.bool(), 0.0).sum(1)  # (2b,)
    if args.loss_type == "ipo":
        logps = logps / mask.sum(1)
    return logps[: len(pairs)], logps[len(pairs) :]


class ReferenceLogps:
    """log pi_ref of every pair, read when the pair first comes and kept: two numbers a pair."""

    def __init__(self, num_pairs: int):
        self.logps = torch.full((num_pairs, 2), float("nan"))

    @torch.no_grad()
    def read(
        self, rows: list[int], pairs: list[Preference], policy: nn.Module, reference: nn.Module,
        tokenizer: AutoTokenizer, args: Args,
    ) -> Tensor:  # fmt: skip
        """(n, 2) of the pairs with these row numbers: chosen and rejected. Without a reference, 0."""
        if args.reference_free:
            return torch.zeros(len(rows), 2, device=policy.device)
        if self.logps[rows].isnan().any():
            parts = []
            for index in own_rows(len(rows)).split(args.per_device_train_batch_size):
                some = [pairs[rows[i % len(rows)]] for i in index]
                with adapter_off(policy, reference):
                    parts.append(torch.stack(completion_logps(reference, some, tokenizer, args), 1))
            self.logps[rows] = join_shares(torch.cat(parts), len(rows)).cpu()
        return self.logps[rows].to(policy.device)


# ---------------------------------------------------------------------------------------------------------------------
# 3. Loss


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, args: Args
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (b,), and the rewards beta * (log pi - log pi_ref) of chosen and rejected completions, (b,) each.

    All four are log-probabilities of completions (b,). Delta is how much more the policy prefers the chosen one than
    the reference does. The sigmoid loss falls along beta * sigmoid(-beta * Delta) * grad(log pi(y_w) - log pi(y_l)),
    most where the policy has the pair wrong.
    """
    chosen_ratio, rejected_ratio, beta = chosen - ref_chosen, rejected - ref_rejected, args.beta
    delta, s = chosen_ratio - rejected_ratio, args.label_smoothing
    if args.loss_type == "sigmoid":
        losses = -(1 - s) * F.logsigmoid(beta * delta) - s * F.logsigmoid(-beta * delta)
    elif args.loss_type == "hinge":
        losses = torch.relu(1 - beta * delta)
    elif args.loss_type == "ipo":
        losses = (delta - 1 / (2 * beta)) ** 2
    else:  # kto_pair: each against the mean KL of the others, in this forward pass
        chosen_kl, rejected_kl = chosen_ratio.mean().clamp(min=0), rejected_ratio.mean().clamp(min=0)
        wanted, unwanted = beta * (chosen_ratio - rejected_kl), beta * (chosen_kl - rejected_ratio)
        losses = (2 - wanted.sigmoid() - unwanted.sigmoid()) / 2
    return losses, beta * chosen_ratio.detach(), beta * rejected_ratio.detach()


# ---------------------------------------------------------------------------------------------------------------------
# 4. Update


def train(args: Args) -> None:
    """Trains the policy and leaves it, its metrics and its model card in args.output_dir."""
    check_settings(args)
    device = start_run(args)
    policy, tokenizer = load_trained_policy(args)
    reference = make_reference(policy, args)
    place(args, device, policy, reference)
    pairs = encode_preferences(load_split(args.dataset, args.dataset_config, args.dataset_train_split), tokenizer, args)
    test_pairs = load_test_preferences(args, tokenizer)
    batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * num_processes()
    steps_per_epoch = math.ceil(len(pairs) / batch_size)
    num_steps = math.ceil(args.num_train_epochs * steps_per_epoch)
    lengths = [len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in pairs]
    use_fast_kernels(args, max(lengths), policy, reference)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=args.weight_decay, fused=True)
    schedule = make_schedule(args, optimizer, num_steps)
    print(f"data: {len(pairs)} pairs, {len(test_pairs)} for evaluation")
    describe_training(args.model, policy, num_steps, args)
    ref, test_ref = ReferenceLogps(len(pairs)), ReferenceLogps(len(test_pairs))
    if args.precompute_ref:
        reference = precompute(policy, reference, tokenizer, args, (ref, pairs), (test_ref, test_pairs))
    batches = length_grouped_batches(lengths, queue := [], batch_size)
    log = PreferenceLog(args, num_steps)
    checkpoints = Checkpoints(args, log, policy=policy, optimizer=optimizer, schedule=schedule, batches=queue, ref=ref)
    try:
        for step, rows in zip(checkpoints.steps(num_steps), batches):
            with memory_for("update"):
                ref_logps = ref.read(rows, pairs, policy, reference, tokenizer, args)  # step 2, of the reference
                stats = preference_gradient(policy, [pairs[i] for i in rows], ref_logps, tokenizer, args)
            grad_norm = clip_gradient(trained, args.max_grad_norm)
            if grad_norm.isfinite():  # else the weights would be NaN for good
                optimizer.step()
            optimizer.zero_grad()
            stats |= {"epoch": step / steps_per_epoch, "lr": schedule.get_last_lr()[0], "grad_norm": float(grad_norm)}
            schedule.step()
            if test_pairs and (step % args.eval_steps == 0 or step == num_steps):
                stats |= evaluate_pairs(policy, reference, test_ref, test_pairs, tokenizer, args)
                stats |= evaluate_responses(policy, reference, test_pairs, tokenizer, args)
            log.write(step, stats)
            log.show_responses(step, policy, reference, tokenizer, test_pairs or pairs)
    finally:  # also after an error or Ctrl-C: what was trained is on disk
        log.finish(policy, tokenizer)


def preference_gradient(
    policy: nn.Module, batch: list[Preference], ref_logps: Tensor, tokenizer: AutoTokenizer, args: Args
) -> dict[str, float]:
    """Adds up the gradient of the mean loss over a batch of pairs; returns means over them of what is logged.

    `ref_logps` (n, 2) are the reference's. How the batch is cut, into micro-batches and among processes, changes
    nothing (but for kto_pair, whose KL is a mean over a micro-batch, as in TRL). A pair that is computed only so that
    all processes are equally busy does not count.
    """
    n, sums = len(batch), 0.0
    policy.train(args.gradient_checkpointing)  # dropout is off in both modes
    for index in own_rows(n).split(args.per_device_train_batch_size):
        logps = completion_logps(policy, [batch[i % n] for i in index], tokenizer, args)  # (b,) each
        losses, chosen, rejected = dpo_loss(*logps, *ref_logps[index.to(ref_logps.device) % n].unbind(1), args)
        counts = (index < n).to(losses.device)
        (num_processes() * (losses * counts).sum() / n).backward()  # FSDP takes the mean over processes
        sums += sum_stats(losses, chosen, rejected, *logps, counts)
    policy.eval()
    return name_stats(add_up(sums) / n)


def sum_stats(
    losses: Tensor, chosen: Tensor, rejected: Tensor, logps_chosen: Tensor, logps_rejected: Tensor, counts: Tensor
) -> Tensor:
    """(6,) sums, in the order of name_stats, of losses, rewards and log-probabilities (b,) of the pairs that count."""
    stats = losses, chosen, rejected, (chosen > rejected).float(), logps_chosen, logps_rejected
    return torch.stack([(x.detach() * counts).sum() for x in stats])


def name_stats(means: Tensor) -> dict[str, float]:
    """The means (6,) by TRL's names."""
    names = "loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected"
    stats = dict(zip(names, means.tolist()))
    return stats | {"rewards/margins": stats["rewards/chosen"] - stats["rewards/rejected"]}


def precompute(
    policy: nn.Module, reference: nn.Module, tokenizer: AutoTokenizer, args: Args,
    *parts: tuple[ReferenceLogps, list[Preference]],
) -> nn.Module | None:  # fmt: skip
    """Reads all pairs with the reference, which is then let go, unless it is the policy without its adapter."""
    for ref, pairs in parts:
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i].prompt) + len(pairs[i].chosen))
        size = args.per_device_train_batch_size * num_processes()
        for i in tqdm(range(0, len(order), size), desc="reading pairs with the reference", leave=False):
            ref.read(order[i : i + size], pairs, policy, reference, tokenizer, args)
    return reference if reference is policy else None


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation: what a user of the policy would see


def response_mask(responses: Tensor, stop_token_id: int | None) -> tuple[Tensor, Tensor]:
    """(B, T) true up to and including the first stop token, and (B,) whether there is one.

    Made from positions, so that it is right where the padding token is the stop token. With stop token 0:
        responses [[5, 0, 7, 0], [5, 6, 7, 8]]  ->  mask [[1, 1, 0, 0], [1, 1, 1, 1]], ended [1, 0]
    """
    is_stop = torch.zeros_like(responses) if stop_token_id is None else (responses == stop_token_id).long()
    return is_stop.cumsum(1) - is_stop == 0, is_stop.any(1)


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each row of logits (B, V), and its logprob: the distribution function inverted at uniform (B,)."""
    logprobs = logits.log_softmax(1)
    cdf = logprobs.exp().cumsum(1)
    threshold = uniform[:, None] * cdf[:, -1:]  # (B, 1), scaled because rounding lets the sum end a little off 1
    tokens = torch.searchsorted(cdf, threshold, right=True).clamp(max=logits.shape[1] - 1)  # (B, 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


FORBIDDEN = -1e9  # the logit of a token that may not be drawn: probability 0, and unlike -inf no NaN in an entropy


@torch.no_grad()
def sample(
    policy: nn.Module, prompts: Tensor, prompt_mask: Tensor, uniforms: Tensor, temperature: float,
    stop_token_id: int | None, pad_token_id: int, restrict: Callable[[Tensor, int], Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Draws one response for each prompt (B, P) from softmax(logits / temperature), with a key-value cache.

    Nothing else shapes the distribution, unless `restrict` says which tokens may be drawn: no generation config is
    read. All chance is in `uniforms` (B, T), drawn ahead from [0, 1), so that no response depends on its neighbours.
    Returns responses (B, T), mask (B, T), logprobs (B, T) of the drawn tokens (0 on padding), ended (B,), and with
    `restrict` allowed (B, T, V): the loss must describe the distribution that was sampled from.
    """
    (B, T), device = uniforms.shape, prompts.device
    V = policy.config.get_text_config().vocab_size
    allowed = torch.ones(B, T, V, dtype=torch.bool, device=device) if restrict else None
    responses = prompts.new_full((B, T), pad_token_id)  # (B, T)
    logprobs = torch.zeros(B, T, device=device)  # (B, T)
    ended = torch.zeros(B, dtype=torch.bool, device=device)  # (B,)
    rows = torch.arange(B, device=device)  # the rows still in the forward pass; all arrays below have one line for each
    tokens, positions = prompts, (prompt_mask.cumsum(1) - 1).clamp(min=0)  # (rows, P), after the first pass (rows, 1)
    attention_mask = F.pad(prompt_mask.long(), (0, T), value=1)  # (rows, P+T): what is yet to come, causality hides
    cache = StaticCache(config=policy.config, max_cache_len=attention_mask.shape[1])  # one shape, and never copied
    for t in range(T):
        output = policy(
            input_ids=tokens, attention_mask=attention_mask, position_ids=positions,
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        logits = output.logits[:, -1].float() / temperature  # (rows, V)
        if restrict:
            allowed[rows, t] = restrict(logits, t)
            logits = logits.masked_fill(~allowed[rows, t], FORBIDDEN)
        token, logprob = draw(logits, uniforms[rows, t])
        responses[rows, t], logprobs[rows, t] = token, logprob
        ended[rows] |= token == (-1 if stop_token_id is None else stop_token_id)
        going = ~ended[rows]
        if not add_up(going.any().int()):  # on no process: each needs the others while weights are sharded
            break
        if 0 < going.float().mean() < 0.75:  # a forward pass over ended rows costs more than copying the cache once
            rows, token, positions, attention_mask = (x[going] for x in (rows, token, positions, attention_mask))
            cache.reorder_cache(going.nonzero().squeeze(1))
        tokens, positions = token[:, None], positions[:, -1:] + 1
    mask, ended = response_mask(responses, stop_token_id)  # what an ended row drew while it waited is erased here
    mask &= torch.arange(T, device=device) <= t
    return {
        "responses": responses.masked_fill(~mask, pad_token_id),
        "mask": mask,
        "logprobs": logprobs.masked_fill(~mask, 0.0),
        "ended": ended,
        "allowed": allowed,
    }


@torch.no_grad()
def evaluate_pairs(
    policy: nn.Module, reference: nn.Module | None, ref: ReferenceLogps, pairs: list[Preference],
    tokenizer: AutoTokenizer, args: Args,
) -> dict[str, float]:  # fmt: skip
    """Loss, accuracy and margin on the test split."""
    n, sums = len(pairs), 0.0
    ref_logps = ref.read(list(range(n)), pairs, policy, reference, tokenizer, args)
    for index in own_rows(n).split(args.per_device_train_batch_size):
        logps = completion_logps(policy, [pairs[i % n] for i in index], tokenizer, args)
        results = dpo_loss(*logps, *ref_logps[index.to(ref_logps.device) % n].unbind(1), args)
        sums += sum_stats(*results, *logps, (index < n).to(ref_logps.device))
    stats = name_stats(add_up(sums) / n)
    return {f"eval/{name}": stats[name] for name in ("loss", "rewards/accuracies", "rewards/margins")}


def respond(
    model: nn.Module, pairs: list[Preference], tokenizer: AutoTokenizer, args: Args
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Sampled responses to the prompts of pairs: what a model reads of them, logprobs (B, T), and which ended (B,).

    The numbers that they are drawn with are the same for every model and at every time.
    """
    prompts, mask = pad([p.prompt for p in pairs], tokenizer.pad_token_id, model.device, left=True)
    T = min(args.response_length, context_length(model) - prompts.shape[1])
    uniforms = torch.rand(len(pairs), T, generator=torch.Generator().manual_seed(args.seed)).to(model.device)
    inputs = own_share(prompts), own_share(mask.bool()), own_share(uniforms)
    with autocast(args, model.device), gathered(model, args.zero_stage, args.gather_for_rollout):
        drawn = sample(model, *inputs, args.temperature, tokenizer.eos_token_id, tokenizer.pad_token_id)
    names = ("responses", "mask", "logprobs", "ended")
    responses, real, logprobs, ended = (join_shares(drawn[name], len(pairs)) for name in names)
    return (prompts, mask.bool(), responses, real), logprobs, ended


@torch.no_grad()
def evaluate_responses(
    policy: nn.Module, reference: nn.Module | None, pairs: list[Preference], tokenizer: AutoTokenizer, args: Args
) -> dict[str, float]:
    """Answers to prompts of the test split: their KL to the reference, as ppo.py measures it, and their gold score."""
    pairs = pairs[: args.num_eval_prompts]
    text, logprobs, ended = respond(policy, pairs, tokenizer, args)
    mask = text[3]
    stats = {"val/eos_share": ended.float().mean().item(), "val/response_length": mask.sum(1).float().mean().item()}
    if reference is not None:
        with autocast(args, mask.device), adapter_off(policy, reference):
            ref_logprobs = token_logprobs(response_logits(reference, *text, args.temperature), text[2])
        stats["objective/kl"] = (logprobs - ref_logprobs).masked_fill(~mask, 0.0).sum(1).mean().item()
    if args.gold_reward_fn:
        scores = load_function(args.gold_reward_fn)(response_texts(text, tokenizer))
        stats["objective/gold_scores"] = sum(scores) / len(scores)
    return stats


def response_texts(text: tuple[Tensor, Tensor, Tensor, Tensor], tokenizer: AutoTokenizer) -> list[str]:
    """Prompt and response of each row as one text, without padding and special tokens."""
    ids, mask = torch.cat([text[0], text[2]], 1), torch.cat([text[1], text[3]], 1)
    return [tokenizer.decode(row[real], skip_special_tokens=True) for row, real in zip(ids, mask)]


# ---------------------------------------------------------------------------------------------------------------------
# Models


def load_trained_policy(args: Args) -> tuple[nn.Module, AutoTokenizer]:
    """The policy in float32 and its tokenizer; fills in the settings that depend on it. Dropout stays off (TRL)."""
    tokenizer = load_tokenizer(args.model, args.trust_remote_code)
    require(
        tokenizer.eos_token_id is not None, f"the tokenizer of {args.model} has no EOS token to end completions with"
    )
    policy = load_weights(AutoModelForCausalLM, args.model, args)
    args.learning_rate = args.learning_rate or dpo_learning_rate(policy.num_parameters()) * (10 if args.lora_r else 1)
    limit = context_length(policy)
    if args.max_length > limit:
        print(f"--max-length lowered from {args.max_length} to {limit}, the context of this model")
        args.max_length = limit
    require(
        args.max_prompt_length < args.max_length,
        f"--max-prompt-length {args.max_prompt_length} leaves no room for a completion in {args.max_length} tokens",
    )
    if args.gradient_checkpointing:
        enable_checkpointing(policy)
    return policy.eval(), tokenizer


def dpo_learning_rate(num_parameters: int) -> float:
    """1e-5 for a model of GPT-2's size, higher for smaller ones, never below 5e-7 (DPO's Pythia 2.8B had 1e-6)."""
    return max(5e-7, 1e-5 * (124e6 / num_parameters) ** 0.6)


def load_test_preferences(args: Args, tokenizer: AutoTokenizer) -> list[Preference]:
    """The test split; [] without one."""
    data = load_test_split(args)
    return encode_preferences(data, tokenizer, args) if data else []


def enable_checkpointing(model: nn.Module) -> None:
    """Gradient checkpointing works in transformers' training mode only; so that mode must not bring dropout back."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
    model.activation_checkpointing_enable({"use_reentrant": False})


def make_reference(policy: nn.Module, args: Args) -> nn.Module:
    """A frozen copy of the policy; with LoRA the policy itself, which then is given its adapter."""
    if not args.lora_r:
        return deepcopy(policy).requires_grad_(False)
    require(find_spec("peft"), f"--lora-r {args.lora_r} needs the package peft: pip install peft")
    from peft import LoraConfig

    config = LoraConfig(
        task_type="CAUSAL_LM", r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=args.lora_target_modules,
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in policy.modules()),  # GPT-2 keeps its weights transposed
    )  # fmt: skip
    try:
        policy.add_adapter(config)
    except ValueError as error:  # it knows no layers of this architecture, or finds none of those named
        raise UserError(f"--lora-target-modules {args.lora_target_modules}: {error}") from error
    return policy


@contextmanager
def adapter_off(policy: nn.Module, reference: nn.Module) -> Iterator[None]:
    """In here the reference is what it should be: with LoRA, the policy without its adapter."""
    if reference is policy:
        reshard(policy), policy.disable_adapters()  # which changes requires_grad, and that must be of the shards
    yield
    if reference is policy:
        reshard(policy), policy.enable_adapters()


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing of this script


def check_settings(args: Args) -> None:
    """Numbers that no run can have, and settings that do not go together."""
    check_numbers(
        args,
        positive="beta max_length max_prompt_length num_train_epochs per_device_train_batch_size max_grad_norm "
        "eval_steps gradient_accumulation_steps learning_rate num_eval_prompts response_length temperature "
        "lora_alpha save_steps save_total_limit",
        natural="lora_r weight_decay num_sample_generations",
        shares="warmup_ratio",
    )
    in_range, smoothing = 0 <= args.label_smoothing < 0.5, f"--label-smoothing {args.label_smoothing}"
    require(in_range, f"{smoothing} must be at least 0 and below 0.5, where a label says nothing")
    is_plain = args.loss_type == "sigmoid" or not args.label_smoothing
    require(is_plain, f"{smoothing} is of the sigmoid loss; --loss-type {args.loss_type} has none")
    is_free = args.reference_free and args.loss_type == "kto_pair"
    require(not is_free, "--loss-type kto_pair needs the reference: its rewards are measured against a KL")


MEMORY_ADVICE = {
    "update": "lower --per-device-train-batch-size and raise --gradient-accumulation-steps as much, or add "
    "--gradient-checkpointing or --precompute-ref",
    "run": "lower --per-device-train-batch-size, or take --lora-r 16, or more GPUs with --zero-stage 3",
}


class PreferenceLog:
    """Everything a run leaves behind: metrics.jsonl, the progress bar, tables of responses, W&B, curves, the model."""

    def __init__(self, args: Args, num_steps: int):
        self.args, self.num_steps, self.last = args, num_steps, time.perf_counter()
        self.metrics: dict[str, float] = {}
        self.file, self.wandb, self.broken = open_metrics(args), start_wandb(args), 0
        self.bar = tqdm(total=num_steps, unit="step", dynamic_ncols=True)

    def write(self, step: int, stats: dict) -> None:
        """Ends a step: one line of metrics.jsonl, the bar, W&B."""
        self.broken = count_broken(self.broken, not math.isfinite(stats["grad_norm"]))
        now = time.perf_counter()
        stats |= {"step": step, "time/step": now - self.last, "perf/peak_memory_mb": peak_memory_mb()}
        self.last = now
        line = {name: stats[name] for name in METRICS if name in stats}
        self.metrics |= line
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log(line, step=step)
        seen = [("kl", "objective/kl"), ("gold", "objective/gold_scores")]
        more = "".join(f", {name} {self.metrics[key]:.2f}" for name, key in seen if key in self.metrics)
        self.bar.set_postfix_str(f"loss {stats['loss']:.3f}, accuracy {stats['rewards/accuracies']:.2f}{more}")
        self.bar.update()

    def show_responses(
        self,
        step: int,
        policy: nn.Module,
        reference: nn.Module | None,
        tokenizer: AutoTokenizer,
        pairs: list[Preference],
    ) -> None:
        """A table of prompts with the responses of reference and policy, drawn with the same random numbers."""
        if not is_turn(step, self.num_steps, self.args.num_sample_generations):
            return
        columns, cells = ["prompt"], [[tokenizer.decode(p.prompt) for p in pairs[:3]]]
        for name, model in (("reference", reference), ("policy", policy)):
            if model is None:
                continue
            before = nullcontext() if name == "policy" else adapter_off(policy, reference)
            with before:
                text = respond(model, pairs[:3], tokenizer, self.args)[0]
            columns.append(name)
            cells.append([tokenizer.decode(row[real]) for row, real in zip(text[2], text[3])])
        with self.bar.external_write_mode():
            print_table(f"step {step} of {self.num_steps}", columns, [list(row) for row in zip(*cells)])
        self.last = time.perf_counter()

    def state_dict(self) -> dict:
        """What a checkpoint keeps of it."""
        return {"metrics": self.metrics}

    def load_state_dict(self, state: dict) -> None:
        """Takes that up again."""
        vars(self).update(state)

    def finish(self, policy: nn.Module, tokenizer: AutoTokenizer) -> None:
        """Closes the files and, unless not one step was made, saves the policy with its card and draws the curves.

        Not so when one of many processes has failed: the others cannot put the policy together without it.
        """
        self.bar.close()
        self.file.close()
        if self.metrics and can_gather():
            save_model(policy, tokenizer, self.args, self.metrics)
            save_merged(tokenizer, self.args)
            draw_curves(
                Path(self.args.output_dir), "step",
                [["loss", "eval/loss"], ["rewards/chosen", "rewards/rejected"], ["rewards/accuracies",
                 "eval/rewards/accuracies"], ["objective/kl"], ["objective/gold_scores"]],
            )  # fmt: skip
        if self.wandb:
            self.wandb.finish()


def save_merged(tokenizer: AutoTokenizer, args: Args) -> None:
    """Where the policy is an adapter, the whole model beside it, in merged/."""
    if not args.lora_r or process_index():
        return
    from peft import PeftModel

    merged = PeftModel.from_pretrained(load_weights(AutoModelForCausalLM, args.model, args), args.output_dir)
    folder = Path(args.output_dir) / "merged"
    merged.merge_and_unload().save_pretrained(folder), tokenizer.save_pretrained(folder)


def describe_training(name: str, model: nn.Module, num_steps: int, args: Args) -> None:
    """Prints what is about to happen."""
    size, lr = f"{model.num_parameters() / 1e6:.2f}M parameters", f"learning rate {args.learning_rate:.2g}"
    print(f"model: {name}, {size} on {model.device}, {lr}")
    micro_batch = args.per_device_train_batch_size
    print(f"batch: {args.gradient_accumulation_steps} micro-batches of {micro_batch} rows; {num_steps} steps")
    print(f"output: {args.output_dir}")


def make_schedule(args: Args, optimizer: torch.optim.Optimizer, num_steps: int):  # same in all scripts
    """The learning rate's course, by the name that transformers gives it."""
    name = args.lr_scheduler_type
    try:
        schedule = get_scheduler(name, optimizer, int(args.warmup_ratio * num_steps), num_steps)
    except (ValueError, TypeError) as error:
        raise UserError(f"--lr-scheduler-type {name}: {error}") from error
    is_plain = isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    require(is_plain, f"--lr-scheduler-type {name} wants to see a metric; take one that depends on the step alone")
    return schedule


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing: checkpoints

HARMLESS = {  # settings that a resumed run may change: how much is shown and saved, and how long it goes on
    "output_dir", "exp_name", "resume", "device", "track", "wandb_project_name", "wandb_entity", "trust_remote_code",
    "num_sample_generations", "save_steps", "save_total_limit", "eval_steps", "total_episodes", "num_train_epochs",
    "zero_stage", "shard_size", "offload", "gather_for_rollout",
}  # fmt: skip


class Interrupted(Exception):  # same in all scripts
    """A signal asked the run to stop, and it has stopped between two steps."""


class Checkpoints:  # same in all scripts
    """Writes all that a run consists of to checkpoints/ now and then, and when a signal asks it to stop; reads it back.

    A part is a module, an optimiser or a schedule, a list, or an object that is its attributes. Beside the parts a
    checkpoint holds the random state and the length of metrics.jsonl, to which the file is cut when the run goes on.
    A resumed run is, bit for bit on a CPU, the one that was never interrupted. Of many processes the first writes what
    all have put together; each reads it, from a folder that they share, and keeps its shards.
    """

    def __init__(self, args: Args, log, **parts):
        self.args, self.log, self.step, self.signal = args, log, 0, None
        self.parts = {name: part for name, part in (parts | {"log": log}).items() if part is not None}
        self.folder = Path(args.output_dir) / "checkpoints"
        if args.resume:
            self.restore()

    def steps(self, num_steps: int) -> Iterator[int]:
        """The numbers of the steps that are left. Ctrl-C and SIGTERM end the run after the step that it is in."""
        if self.step >= num_steps:  # it may have been killed while it saved its model, which happens now
            print(
                f"the run in {self.args.output_dir} has made all its {num_steps} steps; ask for more of them to go on"
            )
            return
        before = {number: signal.signal(number, self.stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for step in range(self.step + 1, num_steps + 1):
                yield step
                is_asked = bool(add_up(torch.tensor(int(self.signal is not None))))  # in one process, so in all
                if step % self.args.save_steps == 0 or step == num_steps or is_asked:
                    self.save(step)
                if is_asked and step < num_steps:
                    name = self.signal.name if self.signal else "a signal to another process"
                    raise Interrupted(f"stopped by {name} after step {step} of {num_steps}")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self, number: int, frame) -> None:
        """The handler. A second signal does not wait for the end of the step; but torchrun passes each one on twice."""
        if self.signal and num_processes() == 1:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal = signal.Signals(number)
            print(f"\n{self.signal.name}: the run ends after this step; once more ends it at once", file=sys.stderr)

    def save(self, step: int) -> None:
        """Writes a checkpoint beside the others and renames it into place, so that none is ever half written."""
        state = {"step": step, "metrics_bytes": self.log.file.tell(), "python_random": random.getstate()}
        for name, random_state in self.random_states().items():
            state[name] = join_shares(random_state[None], num_processes())  # of every process
        for name, part in self.parts.items():
            state[name] = whole(part.state_dict() if hasattr(part, "state_dict") else getattr(part, "__dict__", part))
        if process_index():
            return
        self.log.file.flush(), os.fsync(self.log.file.fileno())
        temporary = self.folder / "unfinished"
        try:
            self.folder.mkdir(exist_ok=True)
            with open(temporary, "wb") as file:
                torch.save(state, file)
                file.flush(), os.fsync(file.fileno())
            temporary.replace(self.folder / f"step-{step:08d}.pt")
        except (OSError, RuntimeError) as error:  # a disk that is full, a folder that is gone: the run itself goes on
            temporary.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or f"is the disk full? {str(error).strip().splitlines()[0]}"
            print(f"warning: the checkpoint after step {step} was not written: {reason}", file=sys.stderr)
        for file in sorted(self.folder.glob("step-*.pt"))[: -self.args.save_total_limit]:
            file.unlink()

    def random_states(self) -> dict[str, Tensor]:
        """Those of torch in this process, as bytes."""
        states = {"torch_random": torch.get_rng_state()}
        return states | ({"cuda_random": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})

    def restore(self) -> None:
        """Brings every part back to the newest checkpoint that can be read, or to the one that --resume names."""
        path, state = Path(self.args.resume), None
        for file in [path] if path.is_file() else sorted(self.folder.glob("step-*.pt"), reverse=True):
            try:
                state = torch.load(file, map_location="cpu", weights_only=True)
                break
            except Exception as error:  # whatever a damaged file makes of it
                print(f"warning: {file} cannot be read ({type(error).__name__}: it is damaged)", file=sys.stderr)
        require(state, f"--resume {path}: there is no checkpoint that can be read; start the run anew")
        metrics = Path(self.args.output_dir) / "metrics.jsonl"
        is_whole = metrics.stat().st_size >= state["metrics_bytes"]
        require(is_whole, f"{metrics} is shorter than when {file.name} was written; the run cannot go on without it")
        if process_index() == 0:
            self.log.file.truncate(state["metrics_bytes"])
        for name, part in self.parts.items():
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(cut(state[name], part))
            elif isinstance(part, list):
                part[:] = state[name]
            else:
                vars(part).update(state[name])
        random.setstate(state["python_random"])
        torch.set_rng_state(
            state["torch_random"][process_index()].clone()
        )  # of a row that is a view torch 2.13 crashes
        if "cuda_random" in state and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state["cuda_random"][process_index()].clone())
        self.step = state["step"]
        self.log.bar.n = self.log.bar.initial = self.step
        print(f"goes on after step {self.step}, from {file}")


def read_command_line() -> Args:  # same in all scripts
    """The settings. With --resume, those that are not given are the ones of that run, and few may differ from them."""
    description, words = __doc__.splitlines()[0], " ".join(sys.argv[1:]).replace("=", " ").split()
    resume = next((b for a, b in zip(words, words[1:]) if a in ("--resume", "--resume-from-checkpoint")), None)
    if resume is None:
        return tyro.cli(Args, description=description)
    path = Path(resume)
    folder = path.parent.parent if path.is_file() else path
    require((folder / "args.json").exists(), f"--resume {resume}: that is no run's folder, nor a checkpoint in one")
    values = json.loads((folder / "args.json").read_text())
    made_by = values.pop("num_processes", 1)
    is_same = made_by == num_processes()
    require(
        is_same, f"--resume {resume}: that run has {made_by} process(es); go on with as many, not {num_processes()}"
    )
    unknown = ", ".join(values.keys() ^ {f.name for f in fields(Args)})
    require(not unknown, f"--resume {resume}: that run was made by another version of this script, which differs in "
            f"the settings {unknown}")  # fmt: skip
    before = Args(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()})
    args = tyro.cli(Args, description=description, default=before)
    for name, value in asdict(before).items():
        same = name in HARMLESS or getattr(args, name) == value
        require(same, f"--{name.replace('_', '-')} {getattr(args, name)} is not what the run in {folder} was made "
                f"with, {value}; leave it out, or start a new run")  # fmt: skip
    args.output_dir = str(folder)
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing: many processes (torchrun). All read the same data; of every batch, each computes its share of the rows


def process_index() -> int:  # same in all scripts
    """Number of this process. The first, 0, which may be the only one, is the one that prints, logs and writes."""
    return int(os.environ.get("RANK", 0))


def num_processes() -> int:  # same in all scripts
    """How many processes share the work."""
    return int(os.environ.get("WORLD_SIZE", 1))


def own_rows(n: int) -> Tensor:  # same in all scripts
    """Numbers of those of n rows that this process computes, (m,): every num_processes()-th.

    m is the same everywhere: passes over sharded weights must be equally many, or a process would wait for ever for
    another. Where n does not divide, some numbers are beyond n; they stand for rows from the beginning, once more.
    """
    return torch.arange(process_index(), -(-n // num_processes()) * num_processes(), num_processes())


def own_share(x: Tensor) -> Tensor:  # same in all scripts
    """(m, ...) the rows of x (n, ...) that this process computes."""
    return x[own_rows(len(x)).to(x.device) % len(x)]


def join_shares(x: Tensor, n: int) -> Tensor:  # same in all scripts
    """(n, ...) rows put together from the shares x (m, ...) of all processes: the inverse of own_share."""
    if num_processes() == 1:
        return x
    x = x.contiguous()
    shares = [torch.empty_like(x) for _ in range(num_processes())]
    dist.all_gather(shares, x)
    return torch.stack(shares, 1).flatten(0, 1)[:n]


def add_up(x: Tensor) -> Tensor:  # same in all scripts
    """The sum of x over all processes."""
    if num_processes() > 1:
        dist.all_reduce(x)
    return x


def from_first(x: Tensor) -> Tensor:  # same in all scripts
    """x of the first process."""
    if num_processes() > 1:
        dist.broadcast(x, 0)
    return x


def place(args: Args, device: torch.device, *models: nn.Module | None) -> None:  # same in all scripts
    """Moves models to the device, whole or as shards; models without gradients are sharded by stage 3 alone."""
    for model in models:
        if model is None or hasattr(model, "unshard"):  # a policy that is its own reference comes twice
            continue
        is_trained = any(p.requires_grad for p in model.parameters())
        if args.zero_stage == 3 or (args.zero_stage == 2 and is_trained):
            shard(model, args, device)
        else:
            model.to(device)


def shard(model: nn.Module, args: Args, device: torch.device) -> None:  # same in all scripts
    """Spreads a model over the processes with torch's FSDP2, moving it there a layer at a time.

    Its weights are gathered layer by layer when they are needed, and with stage 2 kept until the backward pass; the
    gradient of a shard becomes the mean over processes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    size = args.shard_size or num_processes()
    mesh = init_device_mesh(device.type, (num_processes() // size, size), mesh_dim_names=("replicate", "shard"))
    options = {
        "mesh": mesh["shard"] if size == num_processes() else mesh, "reshard_after_forward": args.zero_stage == 3,
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if args.offload else OffloadPolicy(),
    }  # fmt: skip
    layers = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or []}
    for module in [module for module in model.modules() if type(module).__name__ in layers]:
        fully_shard(module, **options)
    for root in [model.base_model, model.score] if hasattr(model, "score") else [model]:  # what read_reward calls
        fully_shard(root, **options)


@contextmanager
def gathered(model: nn.Module, stage: int, is_asked: bool = True) -> Iterator[None]:  # same in all scripts
    """In here each process has the whole of a sharded model: its weights travel once, and not for each token."""
    parts = [module for module in model.modules() if hasattr(module, "unshard") and is_asked]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False), part.unshard()
    yield
    for part in parts:
        part.set_reshard_after_forward(stage == 3, recurse=False), part.reshard()


def reshard(model: nn.Module) -> None:  # same in all scripts
    """Lets go of what is gathered of a sharded model: its parameters are the shards again, and can be changed."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def unsharded(x: Tensor) -> Tensor:  # same in all scripts
    """x, put together from the shards of all processes if it is one."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def sharded_like(x: Tensor, shard: Tensor) -> Tensor:  # same in all scripts
    """x, of which all processes have the whole, sharded as that tensor is, if it is and has its shape."""
    if not hasattr(shard, "full_tensor") or x.shape != shard.shape:
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None)


def clip_gradient(parameters: Iterable[Tensor], max_norm: float) -> Tensor:  # same in all scripts
    """Scales the gradient, sharded or not, down to a norm of max_norm; returns the norm that it had.

    Where each process has its own whole gradient, it becomes their mean before, as those of shards are already.
    """
    parameters = [p for p in parameters if p.grad is not None]
    if num_processes() > 1 and not hasattr(parameters[0], "full_tensor"):
        for work in [dist.all_reduce(p.grad, async_op=True) for p in parameters]:
            work.wait()
        torch._foreach_div_([p.grad for p in parameters], num_processes())
    return unsharded(nn.utils.clip_grad_norm_(parameters, max_norm))


def whole(state):  # same in all scripts
    """A state whose shards are put together, in CPU memory of the first process; the others get None for them."""
    if isinstance(state, dict):
        return {name: whole(x) for name, x in state.items()}
    if isinstance(state, list):
        return [whole(x) for x in state]
    if not hasattr(state, "full_tensor"):
        return state
    tensor = unsharded(state)  # all processes take part
    return None if process_index() else tensor.cpu()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:  # same in all scripts
    """The weights of a model in the first process, once each: not under a second name too, as those of a tied head."""
    return whole({name: x for name, x in model.state_dict().items() if name not in model.all_tied_weights_keys})


def can_gather() -> bool:  # same in all scripts
    """Whether all processes are at the same place: there is but one, or no error is on its way out."""
    return num_processes() == 1 or sys.exc_info()[0] in (None, Interrupted)


def cut(state: dict, part) -> dict:  # same in all scripts
    """The whole state of a module or an optimiser, cut into the shards that this process holds of it."""
    if isinstance(part, nn.Module):
        shards = part.state_dict()
        return {name: sharded_like(x, shards[name]) for name, x in state.items()}
    if isinstance(part, torch.optim.Optimizer):
        shards = [p for group in part.param_groups for p in group["params"]]
        moments = {i: {name: sharded_like(x, shards[i]) for name, x in m.items()} for i, m in state["state"].items()}
        return state | {"state": moments}
    return state


@contextmanager
def first_speaks() -> Iterator[None]:  # same in all scripts
    """In here only the first process writes to the terminal."""
    if process_index() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing that stands in every script, word for word


def require(condition: object, sentence: str) -> None:  # same in all scripts
    """Raises UserError with the sentence unless the condition holds."""
    if not condition:
        raise UserError(sentence)


def check_numbers(args: Args, positive: str, natural: str = "", shares: str = "") -> None:  # same in all scripts
    """The named arguments must be above 0, at least 0, or between 0 and 1; None is left alone."""
    for names, holds, range_ in (
        (positive, lambda x: x > 0, "above 0"),
        (natural, lambda x: x >= 0, "0 or more"),
        (shares, lambda x: 0 <= x <= 1, "between 0 and 1"),
    ):
        for name in names.split():
            value = getattr(args, name)
            require(value is None or holds(value), f"--{name.replace('_', '-')} {value} must be {range_}")


class UserError(Exception):
    """A mistake in the input: shown as one sentence, exit code 2, no traceback."""


@contextmanager
def memory_for(phase: str) -> Iterator[None]:  # same in all scripts
    """Turns running out of memory into a sentence that names the phase and what to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        require(not is_full, f"out of memory in phase {phase!r}: {MEMORY_ADVICE[phase]} (README: when memory runs out)")
        raise


def count_broken(steps: int, is_broken: bool) -> int:  # same in all scripts
    """How many steps in a row had no finite gradient and changed nothing; raises UserError at the fifth."""
    steps = steps + 1 if is_broken else 0
    cause = "most often the --learning-rate is too high"
    sentence = f"the gradient was NaN or infinite in {steps} steps in a row ({cause}); the weights of before are saved"
    require(steps < 5, sentence)
    return steps


def start_run(args: Args) -> torch.device:  # same in all scripts
    """Seeds everything, names args.output_dir, picks the device; raises UserError where a run already is.

    Under torchrun (or accelerate launch, which sets the same variables) the processes find each other here.
    """
    logging.set_verbosity_error(), logging.disable_progress_bar()  # transformers': a fresh head is no news here
    check_processes(args)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    now = from_first(torch.tensor(time.time(), dtype=torch.float64)).item()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    args.output_dir = args.output_dir or f"runs/{args.exp_name}__{args.seed}__{stamp}"
    output = Path(args.output_dir)
    metrics = output / "metrics.jsonl"
    is_used = metrics.exists() and metrics.stat().st_size > 0
    advice = f"name another, remove it, or go on with it: --resume {output}"
    is_free = args.resume or process_index() or not is_used  # the first process is asked: it may be writing already
    require(is_free, f"--output-dir {output} already holds a run (metrics.jsonl); {advice}")
    best = (
        f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        if torch.cuda.is_available()
        else "mps"
        if torch.backends.mps.is_available()
        else "cpu"
    )
    try:
        device = torch.empty(0, device=args.device or best).device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {args.device} cannot be used on this machine; leave it out to use {best}") from error


def check_processes(args: Args) -> None:  # same in all scripts
    """Joins the processes that torchrun has started; raises UserError where there are none for settings of many."""
    script, W = Path(__file__).name, num_processes()
    is_sharded = args.zero_stage or args.shard_size or args.offload
    how = f"torchrun --nproc-per-node N {script} ... (N = 1 for one GPU)"
    flags = "--zero-stage, --shard-size and --offload"
    require("RANK" in os.environ or not is_sharded, f"{flags} are for runs that are started as {how}")
    require(W % (args.shard_size or 1) == 0, f"--shard-size {args.shard_size} does not divide the {W} processes")
    whole = "--shard-size and --offload are about shards: they need --zero-stage 2 or 3"
    require(args.zero_stage or not (args.shard_size or args.offload), whole)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
        print(f"processes: {W}, --zero-stage {args.zero_stage}")


def open_metrics(args: Args):  # same in all scripts
    """metrics.jsonl beside args.json in the output folder, made here: a run that failed before leaves nothing."""
    if process_index():
        return open(os.devnull, "w")
    try:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        settings = asdict(args) | {"num_processes": num_processes()}
        (Path(args.output_dir) / "args.json").write_text(json.dumps(settings, indent=2) + "\n")
        return open(Path(args.output_dir) / "metrics.jsonl", "a")
    except OSError as error:
        raise UserError(f"--output-dir {args.output_dir} cannot be written: {error.strerror}") from error


def autocast(args: Args, device: torch.device) -> torch.autocast:  # same in all scripts
    """bfloat16 where --bf16 asks for it; weights, losses and everything after the logits stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)


def local_path(name: str) -> Path | None:  # same in all scripts
    """The folder or file of that name, or the one beside this script; None where there is none."""
    return next((path for path in (Path(name), Path(__file__).resolve().parent / name) if path.exists()), None)


def locate(name: str, kind: str = "model") -> str:  # same in all scripts
    """A folder or file as given, or beside this script; else a name on the hub, if the hub or its cache has it."""
    if path := local_path(name):
        return str(path)
    from huggingface_hub import HfApi, try_to_load_from_cache

    if kind == "model" and isinstance(try_to_load_from_cache(name, "config.json"), str):
        return name
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=10)
    except Exception as error:  # no network, no such name, no permission: all end in the same advice
        raise UserError(
            f"{name!r} is neither a folder or file here nor a {kind} that the hub can be asked for "
            f"({type(error).__name__}); offline, name a local one: python {Path(__file__).name} with no flags runs on "
            "toy/ without any network"
        ) from error
    return name


def load(auto_class: type, name: str, trust_remote_code: bool, **kwargs):  # same in all scripts
    """auto_class.from_pretrained for a folder or a hub name; Python code that comes with it runs only if asked for."""
    try:
        return auto_class.from_pretrained(locate(name), trust_remote_code=trust_remote_code, **kwargs)
    except Exception as error:  # of many classes: whatever is wrong with a checkpoint
        reason = str(error).strip().splitlines()[0]
        advice = "; once you have read that code, --trust-remote-code runs it" if "custom code" in reason else ""
        raise UserError(f"{name!r} could not be loaded: {reason}{advice}") from error


def load_weights(auto_class: type, name: str, args: Args, **kwargs) -> nn.Module:  # same in all scripts
    """A model with float32 weights, whatever precision its checkpoint was saved in."""
    kwargs |= {"dtype": torch.float32, "use_safetensors": True, "attn_implementation": args.attn_implementation}
    return load(auto_class, name, args.trust_remote_code, **kwargs)


def use_fast_kernels(args: Args, longest: int, *models: nn.Module | None) -> None:  # same in all scripts
    """The same functions, equal to rounding, in fewer or faster kernels; `longest` is that of the texts, in tokens."""
    models = [model for model in models if model is not None]
    for model in models:
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, NewGELUActivation):  # GPT-2's: six kernels, a third of its update on a CPU
                    setattr(module, name, nn.GELU(approximate="tanh"))
    if models[0].device.type != "cpu":
        return
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc: freed memory is kept. To get it back page by page takes
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # a tenth of the time, and half with a vocabulary of 50,000
        libc.mallopt(M_MMAP_MAX, 0), libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    if longest > 512 or args.attn_implementation:
        return
    for name, size in (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "192"), ("LRU_CACHE_CAPACITY", "96")):
        os.environ.setdefault(name, size)  # oneDNN keeps a megabyte for each shape that it has seen, and 1,024 of them
    torch.set_float32_matmul_precision("medium")  # products go through oneDNN: twice as fast on AMD processors
    a = torch.linspace(-1, 1, 64**2).view(64, 64).sin()
    if ((a @ a).double() - a.double() @ a.double()).abs().max() > 1e-4:  # in bfloat16, as on Intel's AMX: undone
        torch.set_float32_matmul_precision("highest")
        return
    for model in models:  # the backward pass of flash attention would take five times as long, for texts so short
        model.set_attn_implementation("eager")


def load_tokenizer(name: str, trust_remote_code: bool) -> AutoTokenizer:  # same in all scripts
    """The tokenizer of a model; where it has no pad token, EOS stands in, since padding is known by position only."""
    tokenizer = load(AutoTokenizer, name, trust_remote_code)
    require(tokenizer("a text")["input_ids"], f"{name} holds no tokenizer; save the one of its base model beside it")
    if tokenizer.pad_token_id is None:
        require(tokenizer.eos_token_id is not None, f"the tokenizer of {name} has neither a pad nor an EOS token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def context_length(model: nn.Module) -> int:  # same in all scripts
    """Most tokens that the model can read at once."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def load_split(name: str, config: str | None, split: str):  # same in all scripts
    """One split of a dataset: a folder, a jsonl/json/csv/parquet file, or a name on the hub."""
    import datasets

    datasets.disable_progress_bars(), datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    path = locate(name, "dataset")
    kinds = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    is_file, kind = Path(path).is_file(), kinds.get(Path(path).suffix)
    require(kind or not is_file, f"--dataset {name}: a file must be one of {', '.join(kinds)}")
    try:
        if is_file:
            data = datasets.load_dataset(kind, data_files={split.split("[")[0]: path}, split=split)
        else:
            data = datasets.load_dataset(path, config, split=split)
    except StopIteration:  # how an empty jsonl file shows itself
        data = []
    except Exception as error:  # of many classes: no such split, an unreadable file, no network
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"--dataset {name}, split {split!r}, could not be loaded: {reason}") from error
    require(len(data), f"--dataset {name}, split {split!r}, is empty")
    return data


def load_test_split(args: Args):  # same in all scripts
    """The split to evaluate on, or None: by default `validation`, where the data have one."""
    from datasets import get_dataset_split_names

    split, path = args.dataset_test_split, locate(args.dataset, "dataset")
    if Path(path).is_file():
        no_split = split in (None, "none")
        require(no_split, f"--dataset {args.dataset} is one file, trained on as a whole; it has no split {split!r}")
        return None
    if split is None and "validation" in get_dataset_split_names(path, args.dataset_config):
        split = "validation"
    return None if split in (None, "none") else load_split(args.dataset, args.dataset_config, split)


def read_column(data, column: str, name: str, flag: str, kind=str) -> list:  # same in all scripts
    """A column of a dataset; raises UserError where it is missing, or has a row that is of another kind (no text)."""
    there = ", ".join(data.column_names)
    require(column in data.column_names, f"--dataset {name} has no column {column!r}; it has {there} (set {flag})")
    rows = list(data[column])
    bad = next((i for i, row in enumerate(rows) if not isinstance(row, kind)), None)
    wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
    require(
        bad is None, f"--dataset {name}: row {bad} of {column!r} holds {rows[bad or 0]!r}, not a {wanted} (set {flag})"
    )
    return rows


def pad(rows: list[list[int]], pad_token_id: int, device: torch.device, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token lists as one tensor (B, S), and its attention mask (B, S). Same in all scripts."""
    size = max(map(len, rows))
    fill = [[0] * (size - len(row)) for row in rows]
    ids = [[pad_token_id] * len(f) + row if left else row + [pad_token_id] * len(f) for f, row in zip(fill, rows)]
    mask = [f + [1] * len(row) if left else [1] * len(row) + f for f, row in zip(fill, rows)]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def load_function(spec: str) -> Callable:  # same in all scripts
    """file.py:name -> the function."""
    file, _, name = spec.partition(":")
    path = local_path(file)
    require(path and path.is_file() and name, f"{spec!r} should be file.py:name, and the file should exist")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # somebody else's code
        raise UserError(f"{path} could not be imported: {type(error).__name__}: {error}") from error
    require(callable(getattr(module, name, None)), f"{path} defines no function {name!r}")
    return getattr(module, name)


def peak_memory_mb() -> float:  # same in all scripts
    """Peak memory in MB: of the GPU on CUDA, else of this process; 0 on Windows, which keeps no such figure."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    if sys.platform == "win32":
        return 0.0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def start_wandb(args: Args):  # same in all scripts
    """The W&B run, or None without --track."""
    if not args.track or process_index():
        return None
    import wandb

    folder = Path(args.output_dir)
    id_file = folder / "wandb_id"
    run_id = id_file.read_text() if args.resume and id_file.exists() else os.urandom(4).hex()
    id_file.write_text(run_id)
    try:
        return wandb.init(
            project=args.wandb_project_name, entity=args.wandb_entity, name=folder.name, config=asdict(args),
            dir=folder, id=run_id, resume="allow",
        )  # fmt: skip
    except wandb.Error as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"W&B did not start ({reason}); log in with `wandb login`, set WANDB_MODE=offline, or leave out --track"
        ) from error


def is_turn(step: int, num_steps: int, times: int) -> bool:  # same in all scripts
    """True at `times` of the steps 1..num_steps, evenly spread, the last one among them."""
    return step * times // num_steps > (step - 1) * times // num_steps


def printable(text: str) -> str:  # same in all scripts
    """Text without control characters: what a model writes must not steer the reader's terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:  # same in all scripts
    """A table on the terminal; markup in its cells is shown, not obeyed."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, show_lines=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    Console().print(table)


def save_model(model: nn.Module, tokenizer: AutoTokenizer, args: Args, metrics: dict) -> None:  # same in all scripts
    """Model (safetensors), tokenizer and a model card in args.output_dir."""
    output, weights = Path(args.output_dir), whole_weights(model)
    if process_index():
        return
    model.save_pretrained(output, state_dict=weights)
    tokenizer.save_pretrained(output)
    script, reward = Path(__file__).name, getattr(args, "reward_fn", None) or getattr(args, "reward_model", None)
    on_the_hub = {"base_model": args.model, "datasets": args.dataset}
    head = [f"{key}: [{json.dumps(name)}]" for key, name in on_the_hub.items() if name and not local_path(name)]
    shown = lambda text: f"`{html.escape(printable(str(text))).replace('`', chr(39))}`"  # noqa: E731 - never as markup
    rows = [f"| `{name}` | {value:.6g} |" for name, value in metrics.items()]
    card = [
        "---", "library_name: transformers", f"tags: [{script.removesuffix('.py')}]", *head, "---",
        f"# {shown(output.name)}", "",
        f"Made by `{script}` from {shown(args.model)} with the data {shown(args.dataset)}"
        + (f" and the reward {shown(reward)}." if reward else "."), "",
        "## Last metrics", "", "| metric | value |", "|---|---|", *rows, "",
        "## Arguments", "", "```json", json.dumps(asdict(args), indent=2), "```", "",
    ]  # fmt: skip
    (output / "README.md").write_text("\n".join(card))
    print(f"saved in {output}: the model, its card, metrics.jsonl and curves.png")


def draw_curves(output: Path, x: str, panels: list[list[str]]) -> None:  # same in all scripts
    """curves.png: one panel for each list of metric names, from metrics.jsonl."""
    if process_index():
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    logged = {name for line in lines for name in line}
    panels = [names for names in ([name for name in panel if name in logged] for panel in panels) if names]
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.2), layout="constrained", squeeze=False)
    for axis, names in zip(axes[0], panels):
        for name in names:
            axis.plot(*zip(*((line[x], line[name]) for line in lines if name in line)), label=name)
        axis.set_xlabel(x)
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(output / "curves.png", dpi=120)
    plt.close(figure)


def main() -> None:  # same in all scripts
    """Reads the command line and trains; a user's mistake ends in one sentence and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args = None
    try:
        with first_speaks(), memory_for("run"):
            train(args := read_command_line())
        if dist.is_initialized():
            dist.destroy_process_group()
    except UserError as error:
        time.sleep(2 * (process_index() > 0))  # of what all find wrong, the first speaks; torchrun then ends the others
        print(printable(f"{Path(__file__).name}: error: {error}"), file=sys.stderr)
        sys.exit(2)
    except Interrupted as stop:
        here = os.environ.get("LOCAL_WORLD_SIZE", num_processes())
        launcher = "python" if num_processes() == 1 else f"torchrun --nproc-per-node {here}"
        command = f"{launcher} {Path(__file__).name} --resume {args.output_dir}"
        if process_index() == 0:
            print(f"{stop}; to go on from there: {command}", file=sys.stderr)
        sys.exit(130)
    except RuntimeError as error:
        if "by peer" not in str(error):
            raise
        sys.exit(f"process {process_index()} stops: another one, which shows its own error, has closed the connection")
    except KeyboardInterrupt:
        print(f"interrupted; what was trained is in {args.output_dir if args else 'no folder yet'}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
