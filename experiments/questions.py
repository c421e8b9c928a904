"""docs/findings/questions.md: what is measured of its runs, which end with answers to unseen prompts."""

import statistics
import time

import torch
from datasets import load_dataset
from forks import train
from record import Run
from gold_score import gold_text_score

EVERY = 64  # episodes between two looks at what a learner from a teacher can do
METRICS = {"sampler": ("reward", "first_ratio", "approxkl"), "liar": ("truth",)}  # whose curves are kept


def judge(names: dict, copies: int) -> dict[str, float]:
    """What the policy earns with the prompts of the validation split, each answered so many times."""
    args, tokenizer, forward = names["args"], names["tokenizer"], names["forward"]
    rows = [row for row in load_dataset(args.dataset, split="validation").to_list() for _ in range(copies)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = tokenizer.pad(tokenizer(columns["prompt"]), return_tensors="pt")
    ids, attention_mask = prompts["input_ids"], prompts["attention_mask"]  # (B, P)
    P, stop = ids.shape[1], tokenizer.eos_token_id
    uniforms = torch.rand(len(ids), args.response_length, generator=torch.Generator().manual_seed(0))
    answers, logprobs = names["sample"](names["policy"], ids, attention_mask, uniforms, args.temperature, stop)
    mask, _ = names["response_mask"](answers, stop)  # (B, T)
    if "reward" in names:
        completions = [answer[real] for answer, real in zip(answers, mask)]
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        return {"right": statistics.fmean(names["reward"](prompts=columns["prompt"], completions=texts, **columns))}
    ids, attention_mask = torch.cat([ids, answers], 1), torch.cat([attention_mask, mask], 1)  # (B, P+T)
    real = [row[here] for row, here in zip(ids, attention_mask.bool())]
    texts = tokenizer.batch_decode(real, skip_special_tokens=True)
    with torch.no_grad():
        logits = forward(names["reference"], ids, attention_mask).logits  # (B, P+T, V)
        ref_logprobs = names["response_logprobs"](logits, ids, P, args.temperature)  # (B, T)
    kl = ((logprobs - ref_logprobs) * mask).sum(1).mean().item()
    return {"gold score": statistics.fmean(map(gold_text_score, texts)), "KL": kl}


def measure(run: Run) -> dict:
    """How many episodes it had, what its policy earns in the end, and curves of what the question asks for."""
    question = run.name.partition(":")[0]
    begin = None  # the clock after the first update
    spent = 0.0  # CPU seconds of judging, which are not the run's

    def look(names: dict, stats: dict[str, float]) -> dict[str, float]:
        """An update's metrics. Of learners from a teacher also: how they do now, and when that is."""
        nonlocal begin, spent
        start = time.process_time()
        begin = begin or start
        episode = len(names["history"]) * names["args"].batch_size
        found = {}
        if question in METRICS:
            found = {"episode": episode} | {metric: stats[metric] for metric in METRICS[question]}
        if question == "teacher" and episode % EVERY == 0:
            found = {"episode": episode, "seconds": start - begin - spent, "right": judge(names, 1)["right"]}
            spent += time.process_time() - start
        return found

    updates, names = train(run, look)
    metrics = dict.fromkeys(metric for update in updates for metric in update)
    curves = {metric: [round(update[metric], 5) for update in updates if metric in update] for metric in metrics}
    end = {metric: round(value, 5) for metric, value in judge(names, 2).items()}
    return {"episodes": len(updates) * names["args"].batch_size, "end": end, "curves": curves}
