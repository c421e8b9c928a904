"""Evaluates a policy: rewards of its answers to unseen prompts, their KL to a reference, how long they are.

  1. sample    answers to the prompts of a split, from softmax(logits / temperature); with temperature 0 the likeliest
  2. reward    each answer by every --reward-fn
  3. KL        of policy and reference over each answer: k1 = sum_t log(pi / ref), which has no bias, and
               k3 = sum_t (ref / pi - 1 - log(ref / pi)), which is never negative (Schulman 2020)
  4. average   mean and standard error over the prompts; of several answers to a prompt, their mean counts

  python tools/evaluate.py runs/my-ppo --reference toy/sft --reward-fn toy/make.py:gold_score toy/reward_model
  python tools/evaluate.py runs/my-grpo --dataset toy/shells/data/prompts --temperature 0 --response-length 16 \\
      --reward-fn rewards/verifiers.py:right_number toy/shells/make.py:worked

It leaves evaluation.json (the figures and the settings) and answers.jsonl (of each answer row, text and figures).
"""

import json
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated

import datasets
import pandas
import pydantic
import torch
import tyro
from pydantic import Field
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig
from transformers import logging

NonNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0, lt=2**32)]
Name = Annotated[str, Field(min_length=1)]
Reward = Callable[[list["Answer"]], list[float | None]]


@pydantic.dataclasses.dataclass  # which checks the values
class Args:
    model: tyro.conf.Positional[Name]  # the policy: a folder, or a name on the hub
    reference: Name | None = None  # the policy that KL is measured to, such as the one that training began with
    # rewards: file.py:name of a function with TRL's signature, or a reward model, which is a classifier with one label
    reward_fn: tuple[Name, ...] = ()
    dataset: Name = "toy/data/prompts"  # folder, file (jsonl, json, csv, parquet) or hub name
    dataset_config: Name | None = None  # configuration of a hub dataset that has several
    split: Name = "validation"  # split to take prompts from; a file is taken whole
    prompt_column: Name = "prompt"  # texts, or lists of {role, content} messages for the tokenizer's chat template
    num_prompts: Count | None = None  # how many prompts to take from the top; by default all
    num_generations: Count = 1  # answers to each prompt
    response_length: Count = 53  # maximum tokens in an answer; use that of the training
    temperature: NonNegative = 0.7  # divides the logits, for KL too (where 0 counts as 1); use that of the training
    seed: Natural = 1  # seed of the answers
    batch_size: Count = 64  # answers at a time
    output_dir: Name | None = None  # where the results go; by default a new folder runs/evaluate__TIME
    dtype: Name = "float32"  # type of the models' weights: float32, or the faster and rougher bfloat16
    trust_remote_code: bool = False  # run Python code that comes with a model; only if you have read that code
    # cpu, cuda, mps; by default cuda if there is one
    device: Name = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")


def evaluate(args: Args) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """The figures, each with its mean and standard error; and the answers, a line each."""
    settings = Path(args.model) / "args.json"
    turns = settings.exists() and json.loads(settings.read_text("utf-8")).get("env")
    require(
        not turns,
        f"{args.model} was trained with --env {turns}: this tool would see the first turn of its episodes alone",
    )
    rows = load_rows(args)
    rewards = {spec: make_reward(spec, args) for spec in args.reward_fn}
    policy = load_model(AutoModelForCausalLM, args.model, args)
    reference = load_model(AutoModelForCausalLM, args.reference, args) if args.reference else None
    numbers = [number for number in range(len(rows)) for _ in range(args.num_generations)]
    torch.manual_seed(args.seed)
    texts = []
    figures = []
    for i in tqdm(range(0, len(numbers), args.batch_size), desc="evaluating"):
        answers = respond(policy, [rows[number] for number in numbers[i : i + args.batch_size]], args)  # 1
        part = pandas.DataFrame({spec: reward(answers) for spec, reward in rewards.items()})  # 2
        if reference is not None:  # 3
            part[["kl", "kl_k3"]] = kl_estimates(policy, reference, answers, args)
        part["eos_share"] = [float(answer.ended) for answer in answers]
        part["response_length"] = [len(answer.ids) for answer in answers]
        figures.append(part)
        texts += [answer.row | {"response": answer.text} for answer in answers]
    figures = pandas.concat(figures, ignore_index=True).astype(float)
    means = figures.groupby(numbers).mean()  # 4; a reward of None is left out
    summary = pandas.DataFrame({"mean": means.mean(), "standard error": means.sem()})
    return summary, pandas.DataFrame(texts).assign(**figures)


@torch.no_grad()
def kl_estimates(policy: nn.Module, reference: nn.Module, answers: list["Answer"], args: Args) -> list[list[float]]:
    """k1 and k3 of each answer, in nats."""
    prompts, prompt_mask = pad([answer.prompt_ids for answer in answers], policy.tokenizer, args, "left")  # (b, P)
    responses, mask = pad([answer.ids for answer in answers], policy.tokenizer, args)  # (b, T)
    attention_mask = torch.cat([prompt_mask, mask], 1)
    ids = torch.cat([prompts, responses], 1)
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)  # GPT-2 would count the padding
    logprobs = []
    for model in (policy, reference):
        logits = model(ids, attention_mask=attention_mask, position_ids=positions, use_cache=False).logits
        logits = logits[:, prompts.shape[1] - 1 : -1].float() / (args.temperature or 1.0)  # (b, T, V)
        logprobs.append(logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1))
    k1 = (logprobs[0] - logprobs[1]).masked_fill(mask == 0, 0.0)  # (b, T)
    k3 = torch.expm1(-k1) + k1
    return torch.stack([k1.sum(1), k3.sum(1)], 1).tolist()


# --- Models, answers and rewards, for compare.py too ------------------------------------------------------------------


@dataclass
class Answer:
    """A policy's response to the prompt of a row."""

    row: dict  # of the dataset
    prompt: str  # as text, in which a conversation has gone through the chat template
    prompt_ids: list[int]
    text: str
    ids: list[int]  # with the stop token
    ended: bool  # whether there is a stop token
    tokenizer: AutoTokenizer | None = None  # whose tokens these are, if they are those of a policy


def load_rows(args: Args) -> list[dict]:
    """The rows of the split, or the first of them."""
    path = Path(args.dataset)
    if path.is_file():
        data = datasets.load_dataset(str(path.resolve().parent), data_files=path.name, split="train")
    else:
        data = datasets.load_dataset(args.dataset, args.dataset_config, split=args.split)
    there = ", ".join(data.column_names)
    require(args.prompt_column in data.column_names, f"no column {args.prompt_column!r}; there are {there}")
    return data.to_list()[: args.num_prompts]


def load_model(auto_class: type, name: str, args: Args) -> nn.Module:
    """A model with its tokenizer. Refuses one that lacks weights, which the library would draw at random."""
    options = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    model, info = auto_class.from_pretrained(name, use_safetensors=True, output_loading_info=True, **options)
    wrong = sorted(info["missing_keys"] | info["unexpected_keys"])
    require(not wrong, f"{name!r} was not saved as a {type(model).__name__}: these do not fit: {wrong[:3]}")
    model.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    model.tokenizer.pad_token = model.tokenizer.pad_token or model.tokenizer.eos_token  # padding is known by position
    with suppress(OSError):  # of an adapter, beside it, not beside the model that it belongs to
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model.to(args.device).eval()


def respond(policy: nn.Module, rows: list[dict], args: Args) -> list[Answer]:
    """An answer to the prompt of each row, drawn from softmax(logits / temperature), or the likeliest one."""
    tokenizer = policy.tokenizer
    stops = stop_tokens(policy)
    prompts = [encode_prompt(row[args.prompt_column], tokenizer) for row in rows]
    ids, mask = pad(prompts, tokenizer, args, "left")  # (b, P)
    P = ids.shape[1]
    limit = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    too_long = f"a prompt of {P} tokens and --response-length {args.response_length} exceed the model's {limit}"
    require(P + args.response_length <= limit, too_long)
    stored = policy.generation_config
    policy.generation_config = GenerationConfig()  # else what is stored there fills the gaps in ours
    config = GenerationConfig(do_sample=args.temperature > 0, temperature=args.temperature or 1.0, top_k=0, top_p=1.0)
    config.update(max_new_tokens=args.response_length, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id)
    responses = policy.generate(ids, attention_mask=mask, generation_config=config)[:, P:].tolist()
    policy.generation_config = stored
    answers = []
    for row, prompt, response in zip(rows, prompts, responses):
        length = next((i for i, token in enumerate(response, 1) if token in stops), None)
        response = response[:length]
        start, text = tokenizer.batch_decode([prompt, response], skip_special_tokens=True)
        answers.append(Answer(row, start, prompt, text, response, length is not None, tokenizer))
    return answers


def stop_tokens(policy: nn.Module) -> list[int]:
    """Ids of the tokens that end an answer: those of its generation config, where a training leaves them, else EOS."""
    stored = policy.generation_config.eos_token_id  # an int, a list, or None
    if stored is None:
        stored = policy.tokenizer.eos_token_id
    return stored if isinstance(stored, list) else [stored]


def encode_prompt(prompt: str | list[dict], tokenizer: AutoTokenizer) -> list[int]:
    """Token ids of a text, or of a conversation up to where the assistant is to speak."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)


def make_reward(spec: str, args: Args) -> Reward:
    """By file.py:name, a function f(prompts, completions, **columns) -> a number each, or None; else by a model."""
    file, _, name = spec.rpartition(":")
    if not file:
        return model_reward(load_model(AutoModelForSequenceClassification, spec, args), args)
    function = runpy.run_path(file)[name]

    def reward(answers: list[Answer]) -> list[float | None]:
        rows = deepcopy([answer.row for answer in answers])  # which the function may change
        given = {column: [row[column] for row in rows] for column in rows[0]}
        given["prompts"] = given[args.prompt_column]
        given["completions"] = [answer.text for answer in answers]
        given["completion_ids"] = [list(answer.ids) for answer in answers]
        if isinstance(given["prompts"][0], list):
            given["completions"] = [[{"role": "assistant", "content": text}] for text in given["completions"]]
        return [None if x is None else float(x) for x in function(**given)]  # of whichever type

    return reward


def model_reward(model: nn.Module, args: Args) -> Reward:
    """By a reward model, which reads the policy's tokens, or, with another tokenizer, its own for the same text."""
    labels = model.config.num_labels
    require(labels == 1, f"the reward model has {labels} labels: --reward-fn rewards/classifier.py:score takes one")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    @torch.no_grad()
    def reward(answers: list[Answer]) -> list[float | None]:
        rows = []
        for answer in answers:
            is_ours = same_tokens(answer.tokenizer, model.tokenizer)
            row = answer.prompt_ids + answer.ids if is_ours else encode_again(answer, model.tokenizer, args)
            rows.append(row[-limit:])
        ids, mask = pad(rows, model.tokenizer, args, "left")  # so that the last token is real in every row
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = model.base_model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
        rewards = model.score(output.last_hidden_state[:, -1]).squeeze(1).float()  # (b,)
        return (rewards + getattr(model.config, "reward_bias", 0.0)).tolist()  # where reward_model.py may put its shift

    return reward


@cache
def same_tokens(a: AutoTokenizer | None, b: AutoTokenizer) -> bool:
    """Whether two tokenizers give the same ids, as far as their vocabularies tell."""
    return a is not None and a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id


def encode_again(answer: Answer, other: AutoTokenizer, args: Args) -> list[int]:
    """Prompt and answer in the tokens of another tokenizer: the text, and EOS where the answer has ended; of a
    conversation what the other chat template makes of it."""
    prompt = answer.row[args.prompt_column]
    if isinstance(prompt, list) and other.chat_template:
        end, behind = turn_end(other)
        talk = [*prompt, {"role": "assistant", "content": answer.text}]
        text = other.apply_chat_template(talk, tokenize=False).removesuffix(behind)
        text = text if answer.ended else text.removesuffix(end)
        ids = other(text, add_special_tokens=False)["input_ids"]
    else:
        end = ""
        ids = other(answer.prompt + answer.text)["input_ids"]
    is_open = answer.ended and not end and other.eos_token_id is not None
    return [*ids, other.eos_token_id] if is_open else ids


@cache
def turn_end(tokenizer: AutoTokenizer) -> tuple[str, str]:
    """The token that ends a turn of a chat template, and what stands behind it: mostly a line break, which is neither
    drawn, nor taught, nor read by a reward model. Both are empty where no special token ends a turn."""
    if not tokenizer.chat_template:
        return "", ""
    turns = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "So."}]
    _, _, tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("So.")
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    end = min(filter(tail.count, special), key=tail.index, default="")
    return end, tail.partition(end)[2] if end else ""


def pad(rows: list[list[int]], tokenizer: AutoTokenizer, args: Args, side: str = "right") -> tuple[Tensor, Tensor]:
    """Token lists as one tensor (B, S), and its attention mask (B, S)."""
    padded = tokenizer.pad({"input_ids": rows}, padding_side=side, return_tensors="pt").to(args.device)
    return padded["input_ids"], padded["attention_mask"]


def require(condition: object, sentence: str) -> None:
    """Ends the program with the sentence, unless the condition holds: for mistakes that no library would name."""
    if not condition:
        sys.exit(f"error: {sentence}")


def main() -> None:
    """Evaluates with the settings of the command line, shows the figures, and saves them."""
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    output = Path(args.output_dir or time.strftime("runs/evaluate__%Y%m%d-%H%M%S"))
    output.mkdir(parents=True)
    figures, answers = evaluate(args)
    answers.to_json(output / "answers.jsonl", orient="records", lines=True, force_ascii=False)
    results = {"figures": json.loads(figures.to_json(orient="index")), "args": asdict(args)}
    (output / "evaluation.json").write_text(json.dumps(results, indent=2) + "\n")
    table = Table("", "mean", "standard error", title=f"{len(answers)} answers of {args.model}")
    for name, mean, error in figures.itertuples():
        table.add_row(name, f"{mean:.4g}", f"{error:.2g}")
    Console().print(table)
    print(f"saved in {output}")


if __name__ == "__main__":
    main()
