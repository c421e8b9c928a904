"""Evaluates a policy on unseen prompts: the rewards of its answers, their KL to a reference, their length.

  1. sample    answers to the prompts of a split, from softmax(logits / temperature); temperature 0 takes the most
               likely token
  2. reward    the reward of each answer by each --reward-fn
  3. KL        of policy and reference over each answer: k1 = sum_t log(pi / ref), which is unbiased, and
               k3 = sum_t (ref / pi - 1 - log(ref / pi)), which is never negative (Schulman 2020)
  4. average   mean and standard error over the prompts. Several answers to a prompt are first averaged; pass@k is the
               share of prompts with at least one answer of k whose first reward is 1 or more

  python tools/evaluate.py runs/my-ppo --reference toy/sft --reward-fn toy/gold_score.py:gold_score toy/reward_model
  python tools/evaluate.py runs/my-grpo --dataset toy/shells/data/prompts --temperature 0 --response-length 16 \\
      --reward-fn rewards/verifiers.py:right_number toy/shells/make.py:worked

A policy that was trained with grpo.py --env plays episodes: an answer is then an episode, and the environment gives its
reward; KL and length count only what the policy wrote. By default, environment, limits and data are those of the
training:

  python tools/evaluate.py runs/my-player --num-generations 8
  python tools/evaluate.py toy/guess/sft --env toy/guess/make.py:Game --dataset toy/guess/data/prompts --split train \\
      --response-length 32

Results: evaluation.json (numbers and settings) and answers.jsonl (row, text and numbers of each answer).
"""

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path

import pandas
import pydantic
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig
from transformers import logging

sys.path.append(str(Path(__file__).resolve().parent.parent))
import grpo
from grpo import Count, Name, Natural, NonNegative, as_turns, blank_before_answer, context_length, encode_prompt
from grpo import encode_text, check_rewards, read_value, render_whole, require, template_options, decode_after, turn_end

Reward = Callable[[list["Answer"]], list[float | None]]


@pydantic.dataclasses.dataclass  # checks the values
class Args:
    model: tyro.conf.Positional[Name]  # the policy: a folder, or a name on the hub
    reference: Name | None = None  # the policy to measure the KL against, such as the initial policy of the training
    # rewards: file.py:name of a function with TRL's signature, or a reward model (a classifier with one label)
    reward_fn: tuple[Name, ...] = ()
    env: Name | None = None  # instead of rewards: file.py:name of a class that answers the policy (grpo.py --env)
    max_turns: Count | None = None  # with --env: maximum turns of an episode; --response-length includes the answers
    dataset: Name = "toy/data/prompts"  # folder, file (jsonl, json, csv, parquet) or hub name
    dataset_config: Name | None = None  # configuration of a hub dataset that has several
    split: Name = "validation"  # split with the prompts; a file has only one
    prompt_column: Name = "prompt"  # prompts: texts, or lists of {role, content} messages for the chat template
    num_prompts: Count | None = None  # number of prompts, taken from the top; by default all
    num_generations: Count = 1  # answers to each prompt
    response_length: Count = 53  # maximum tokens in an answer; use the value from training
    temperature: NonNegative = 0.7  # divides the logits, also for KL (where 0 counts as 1); use the value from training
    seed: Natural = 1  # seed of the answers
    batch_size: Count = 64  # answers sampled at once
    output_dir: Name | None = None  # folder of the results; by default a new folder runs/evaluate__TIME
    dtype: Name = "float32"  # type of the models' weights: float32, or bfloat16, which is faster and less precise
    trust_remote_code: bool = False  # run Python code that comes with a model; only if you have read that code
    # cpu, cuda, mps; by default cuda if there is one
    device: Name = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")


def evaluate(args: Args) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Returns a table of metrics with their means and standard errors, and a table with one row per answer."""
    require(not (args.env and args.reward_fn), "--reward-fn: not with --env, which gives the rewards")
    require(args.env or not args.max_turns, "--max-turns: only with --env")
    rows = load_rows(args)
    rewards = {spec: make_reward(spec, args) for spec in args.reward_fn}
    policy = load_model(AutoModelForCausalLM, args.model, args)
    if args.env:
        rewards = {args.env: lambda episodes: [episode.reward for episode in episodes]}
        policy.environment = grpo.load_function(args.env)
    reference = load_model(AutoModelForCausalLM, args.reference, args) if args.reference else None
    encode_prompts(policy, rows, args)  # exits here if a prompt is too long
    numbers = [number for number in range(len(rows)) for _ in range(args.num_generations)]
    torch.manual_seed(args.seed)
    texts = []
    figures = []
    for i in tqdm(range(0, len(numbers), args.batch_size), desc="evaluating"):
        batch = [rows[number] for number in numbers[i : i + args.batch_size]]
        answers = (play if args.env else respond)(policy, batch, args)  # 1
        part = pandas.DataFrame({spec: reward(answers) for spec, reward in rewards.items()})  # 2
        if reference is not None:  # 3
            part[["kl", "kl_k3"]] = kl_estimates(policy, reference, answers, args)
        part["eos_share"] = [float(answer.ended) for answer in answers]
        part["response_length"] = [sum(answer.written) for answer in answers]
        if args.env:
            part["turns"] = [answer.num_turns for answer in answers]
        figures.append(part)
        texts += [answer.row | {"response": answer.text} for answer in answers]
    figures = pandas.concat(figures, ignore_index=True).astype(float)
    means = figures.groupby(numbers).mean()  # 4; a reward of None is left out
    if rewards and args.num_generations > 1:
        are_right = (figures.iloc[:, 0] >= 1).where(figures.iloc[:, 0].notna())
        means[f"pass@{args.num_generations}"] = are_right.groupby(numbers).max().astype(float)
    summary = pandas.DataFrame({"mean": means.mean(), "standard error": means.sem()})
    return summary, pandas.DataFrame(texts).assign(**figures)


@torch.no_grad()
def kl_estimates(policy: nn.Module, reference: nn.Module, answers: list["Answer"], args: Args) -> list[list[float]]:
    """k1 and k3 of each answer, in nats, over the tokens that the policy wrote."""
    prompts = pad([answer.prompt_ids for answer in answers], policy.tokenizer, args, "left")  # (b, P), and the mask
    responses = pad([answer.ids for answer in answers], policy.tokenizer, args)  # (b, T), and the mask
    rollout = grpo.Rollout(*prompts, *responses, ended=None, old_logprobs=None, examples=[])
    at_temperature = grpo.Args(temperature=args.temperature or 1.0)
    logprobs = [grpo.logprobs_under(model, rollout, at_temperature) for model in (policy, reference)]
    written = pad_sequence([torch.tensor(answer.written) for answer in answers], batch_first=True).to(args.device)
    k1 = (logprobs[0] - logprobs[1]).masked_fill(~written, 0.0)  # (b, T)
    k3 = torch.expm1(-k1) + k1
    return torch.stack([k1.sum(1), k3.sum(1)], 1).tolist()


# --- Models, answers and rewards, for compare.py too ------------------------------------------------------------------


@dataclass
class Answer:
    """A policy's response to the prompt of a row, or its episode with an environment."""

    row: dict  # of the dataset
    prompt: str  # as text; a conversation is rendered by the chat template
    prompt_ids: list[int]
    text: str
    ids: list[int]  # with the stop token
    ended: bool  # whether it ends with a stop token; of an episode, whether it is over
    tokenizer: AutoTokenizer | None = None  # the policy's
    written: list[bool] | None = None  # for each of the ids, whether the policy wrote it; by default all true
    reward: float | None = None  # only of an episode, like the next one
    num_turns: float | None = None

    def __post_init__(self):
        self.written = self.written or [True] * len(self.ids)


def load_rows(args: Args) -> list[dict]:
    """The first `num_prompts` rows of the split, or all of them."""
    data = grpo.load_split(args.dataset, args.dataset_config, "train" if Path(args.dataset).is_file() else args.split)
    grpo.check_columns(data, {"--prompt-column": args.prompt_column})
    return grpo.with_numbers(data, args.prompt_column).to_list()[: args.num_prompts]


def load_model(auto_class: type, name: str, args: Args) -> nn.Module:
    """Loads a model and its tokenizer. Exits if weights are missing, which the library would initialise at random."""
    options = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    model, info = auto_class.from_pretrained(name, use_safetensors=True, output_loading_info=True, **options)
    wrong = sorted(info["missing_keys"] | info["unexpected_keys"])
    require(not wrong, f"{name!r} is not a {type(model).__name__}: missing or unexpected weights: {wrong[:3]}")
    model.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    model.tokenizer.pad_token = model.tokenizer.pad_token or model.tokenizer.eos_token  # masks mark padding
    model.name_or_path = name  # with an adapter, the library has that of the base model here and in the next line
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model.to(args.device).eval()


def respond(policy: nn.Module, rows: list[dict], args: Args) -> list[Answer]:
    """Samples an answer to the prompt of each row from softmax(logits / temperature); at 0 the most likely tokens."""
    tokenizer = policy.tokenizer
    stops = stop_tokens(policy)
    prompts = encode_prompts(policy, rows, args)
    ids, mask = pad(prompts, tokenizer, args, "left")  # (b, P)
    stored = policy.generation_config
    policy.generation_config = GenerationConfig()  # otherwise stored options would be added to these
    config = GenerationConfig(do_sample=args.temperature > 0, temperature=args.temperature or 1.0, top_k=0, top_p=1.0)
    config.update(max_new_tokens=args.response_length, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id)
    responses = policy.generate(ids, attention_mask=mask, generation_config=config)[:, ids.shape[1] :].tolist()
    policy.generation_config = stored
    answers = []
    for row, prompt, response in zip(rows, prompts, responses):
        length = next((i for i, token in enumerate(response, 1) if token in stops), None)
        response = response[:length]
        text = decode_after(prompt, response, tokenizer)
        if isinstance(row[args.prompt_column], list):
            text = text.removeprefix(blank_before_answer(tokenizer))
        start = tokenizer.decode(prompt, skip_special_tokens=True)
        answers.append(Answer(row, start, prompt, text, response, length is not None, tokenizer))
    return answers


def play(policy: nn.Module, rows: list[dict], args: Args) -> list[Answer]:
    """Plays an episode for each row: the environment answers the policy."""
    policy.stop_token_ids = stop_tokens(policy)
    prompts = encode_prompts(policy, rows, args)
    settings = grpo.Args(
        env=args.env,
        max_turns=args.max_turns,
        response_length=args.response_length,
        prompt_column=args.prompt_column,
        temperature=args.temperature or 1e-6,  # so low that the most likely token is sampled
        local_rollout_forward_batch_size=args.batch_size,
        device=args.device,
    )
    r = grpo.play_batch(policy, [row | {"input_ids": prompt} for row, prompt in zip(rows, prompts)], settings)
    episodes = []
    for i, (row, prompt) in enumerate(zip(rows, prompts)):
        episode = Answer(
            row,
            prompt=policy.tokenizer.decode(prompt, skip_special_tokens=True),
            prompt_ids=prompt,
            text=grpo.transcript(r.responses[i], r.mask[i], r.written[i], policy.tokenizer),
            ids=r.responses[i, r.mask[i]].tolist(),
            ended=r.ended[i].item(),
            tokenizer=policy.tokenizer,
            written=r.written[i, r.mask[i]].tolist(),
            reward=r.rewards[i].sum().item(),
            num_turns=r.num_turns[i].item(),
        )
        episodes.append(episode)
    return episodes


def stop_tokens(policy: nn.Module) -> list[int]:
    """Ids of the tokens that end an answer: those of the generation config, where the scripts save them. For a model
    that is not from a run of the scripts, also EOS and the chat template's end of a turn."""
    stored = policy.generation_config.eos_token_id  # an int, a list, or None
    ids = stored if isinstance(stored, list) else [stored]
    folder = Path(policy.name_or_path)
    is_run = any((place / "args.json").exists() for place in (folder, folder.parent))  # ema/ and merged/ are in a run
    if not is_run or stored is None:
        ids = {*ids, *grpo.eos_tokens(policy), policy.tokenizer.eos_token_id} - {None}
    return sorted(ids)


def encode_prompts(policy: nn.Module, rows: list[dict], args: Args) -> list[list[int]]:
    """Token ids of the rows' prompts. Exits if a prompt leaves no room for an answer."""
    column = args.prompt_column
    prompts = [encode_prompt(read_value(row, column), policy.tokenizer, template_options(row)) for row in rows]
    require(all(prompts), f"a prompt in the column {column!r} is empty")
    P = max(map(len, prompts))
    limit = context_length(policy)
    too_long = f"a prompt of {P} tokens and --response-length {args.response_length} exceed the model's {limit}"
    require(P + args.response_length <= limit, too_long)
    return prompts


def make_reward(spec: str, args: Args) -> Reward:
    """The reward that a spec names: file.py:name of a function f(prompts, completions, **columns) -> numbers or None,
    or a reward model."""
    if ":" not in spec:
        return model_reward(load_model(AutoModelForSequenceClassification, spec, args), args)
    function = grpo.load_function(spec)

    def reward(answers: list[Answer]) -> list[float | None]:
        rows = [deepcopy(answer.row) for answer in answers]  # the function may change them
        given = {column: [row[column] for row in rows] for column in rows[0]}
        given["prompts"] = given[args.prompt_column]
        given["prompts_text"] = [x.tokenizer.decode(x.prompt_ids) if x.tokenizer else x.prompt for x in answers]
        given["completions"] = [answer.text for answer in answers]
        given["completion_ids"] = [list(answer.ids) for answer in answers]
        given["input_ids"] = [list(answer.prompt_ids) for answer in answers]
        if isinstance(given["prompts"][0], list):
            given["completions"] = [[{"role": "assistant", "content": text}] for text in given["completions"]]
        values = check_rewards(function(**given), len(rows), spec)
        return [None if math.isnan(x) else x for x in values]

    return reward


def model_reward(model: nn.Module, args: Args) -> Reward:
    """Makes a reward of a reward model. If its tokenizer is not the policy's, texts are encoded again."""
    labels = model.config.num_labels
    require(labels == 1, f"the reward model has {labels} labels: use --reward-fn rewards/classifier.py:score")
    limit = context_length(model)

    @torch.no_grad()
    def reward(answers: list[Answer]) -> list[float | None]:
        rows = []
        for answer in answers:
            reads_same_ids = same_tokens(answer.tokenizer, model.tokenizer)
            if reads_same_ids and isinstance(answer.row[args.prompt_column], list):
                reads_same_ids = model.tokenizer.chat_template in (None, answer.tokenizer.chat_template)
            row = answer.prompt_ids + answer.ids if reads_same_ids else encode_again(answer, model.tokenizer, args)
            rows.append(row[-limit:])
        ids, mask = pad(rows, model.tokenizer, args, "left")  # on the left, so that the last token of every row is real
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = model.base_model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
        rewards = model.score(output.last_hidden_state[:, -1]).squeeze(1).float()  # (b,)
        return (rewards + getattr(model.config, "reward_bias", 0.0)).tolist()  # reward_model.py may save a shift there

    return reward


@cache
def same_tokens(a: AutoTokenizer | None, b: AutoTokenizer) -> bool:
    """Whether two tokenizers have the same vocabulary and EOS."""
    return a is not None and a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id


def encode_again(answer: Answer, other: AutoTokenizer, args: Args) -> list[int]:
    """Encodes prompt and answer again, with another tokenizer. A text gets that tokenizer's EOS if the answer ended; a
    conversation is rendered by its chat template."""
    prompt = answer.row[args.prompt_column]
    if isinstance(prompt, list) and other.chat_template:
        end, _ = turn_end(other)
        turns = [*as_turns(prompt, "user"), {"role": "assistant", "content": answer.text}]
        text = render_whole(turns, other, template_options(answer.row))
        text = text if answer.ended else text.removesuffix(end)
        ids = other(text, add_special_tokens=False)["input_ids"]
    else:
        end = ""
        ids = encode_text(answer.prompt + answer.text, other)
    needs_eos = answer.ended and not end and other.eos_token_id is not None
    return [*ids, other.eos_token_id] if needs_eos else ids


def pad(rows: list[list[int]], tokenizer: AutoTokenizer, args: Args, side: str = "right") -> tuple[Tensor, Tensor]:
    """Pads lists of token ids to one tensor (B, S); returns it, and its attention mask (B, S)."""
    padded = tokenizer.pad({"input_ids": rows}, padding_side=side, return_tensors="pt").to(args.device)
    return padded["input_ids"], padded["attention_mask"]


def read_command_line() -> Args:
    """Reads the settings. For a policy from ppo.py, rloo.py or grpo.py, the defaults are its data, limits and
    environment."""
    read = partial(tyro.cli, Args, description=__doc__.splitlines()[0])
    args = read()
    file = Path(args.model, "args.json")
    trained = json.loads(file.read_text("utf-8")) if file.exists() else {}
    if "response_length" not in trained:
        return args
    names = ("env", "max_turns", "response_length", "dataset", "dataset_config", "prompt_column")
    settings = {name: trained[name] for name in names if name in trained}
    if trained["dataset_test_split"] not in (None, "none"):
        settings["split"] = trained["dataset_test_split"]
    return read(default=Args(args.model, **settings))


def main() -> None:
    """Evaluates with the settings of the command line, prints the numbers, and saves them."""
    args = read_command_line()
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
