"""Evaluates a policy on unseen prompts: the rewards of its answers, their KL to a reference, their length.

  1. sample    answers to the prompts of a split, from softmax(logits / temperature); temperature 0 takes the most
               likely token
  2. reward    the reward of each answer by each --reward-fn, which gets all answers to a prompt in one call
  3. KL        of policy and reference over each answer: k1 = sum_t log(pi / ref), which is unbiased, and
               k3 = sum_t (ref / pi - 1 - log(ref / pi)), which is never negative (Schulman 2020)
  4. average   mean and standard error over the prompts. Several answers to a prompt are first averaged; pass@k is the
               share of prompts with at least one answer of k whose first reward is 1 or more

  python tools/evaluate.py runs/my-ppo --reference toy/sft --reward-fn toy/gold_score.py:gold_score toy/reward_model
  python tools/evaluate.py runs/my-grpo --dataset toy/shells/data/prompts --temperature 0 --response-length 16 \\
      --reward-fn rewards/verifiers.py:right_number toy/shells/make.py:worked

With --env the policy plays episodes, as in agent.py: an answer is then an episode, and the environment gives its
reward; KL and length count only what the policy wrote. By default, limits, temperature and data are those of the
training. A folder may come from somebody else, so the code of environments and rewards is that of the command line
alone; those of the training are only printed:

  python tools/evaluate.py runs/my-player --env toy/guess/make.py:Game --split train --num-generations 8
  python tools/evaluate.py toy/guess/sft --env toy/guess/make.py:Game --dataset toy/guess/data/prompts --split train \\
      --response-length 32

Results: evaluation.json (numbers and settings) and answers.jsonl (row, text and numbers of each answer; a column of the
row that has the name of a number gets the prefix row/).
"""

import json
import os
import random
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pandas
import pydantic
import torch
import tyro
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, logging
from transformers.activations import ACT2FN, GELUTanh

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# The tools sample, read rows and score by functions of these scripts: a policy is judged on what it was trained on
import agent
import ppo
from ppo import require


@pydantic.dataclasses.dataclass(config={"allow_inf_nan": False})  # checks the values
class Args:
    model: tyro.conf.Positional[str]  # the policy: a folder, or a name on the hub
    reference: str | None = None  # the policy to measure the KL against, such as the initial policy of the training
    # rewards: file.py:name of a function with TRL's signature, or a reward model (a classifier with one label)
    reward_fn: tuple[str, ...] = ()
    env: str | None = None  # instead of rewards: file.py:name of an environment (agent.py)
    max_turns: PositiveInt | None = None  # with --env: most turns of an episode; --response-length includes the answers
    dataset: str = f"{ppo.TOY}/data/prompts"  # folder of SPLIT.jsonl (or .parquet), one such file, or a hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    split: str = "validation"  # split with the prompts; a file has only one
    num_prompts: PositiveInt | None = None  # number of prompts, drawn at random, always the same; by default all
    max_prompt_length: PositiveInt = 512  # in tokens; longer prompts are dropped, as in training, and counted
    num_generations: PositiveInt = 1  # answers to each prompt
    response_length: PositiveInt = 53  # maximum tokens in an answer; use the value from training
    temperature: NonNegativeFloat = 0.7  # divides the logits, also for KL (where 0 is 1); use that of the training
    seed: NonNegativeInt = 1  # seed of the answers
    batch_size: PositiveInt = 64  # answers sampled at once
    output_dir: str | None = None  # folder of the results; by default a new folder runs/evaluate__TIME
    bf16: bool = False  # run the models in bfloat16 (autocast), as the scripts do with this flag
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, mps; by default cuda if there is one


def evaluate(args):
    """Returns a table of metrics with their means and standard errors, and the lines of answers.jsonl."""
    require(not (args.env and args.reward_fn), "--reward-fn: not with --env, which gives the rewards")
    require(args.env or not args.max_turns, "--max-turns: only with --env")
    settings = settings_of(args)
    policy = load_policy(args.model, settings)
    rows = load_prompts(args, policy.tokenizer)
    policy.stop_token_ids = stop_tokens(policy, is_chat=isinstance(rows[0]["prompt"], list))
    longest = max(len(row["input_ids"]) for row in rows) + args.response_length
    check_length(policy, longest)
    rewards = {spec: load_reward(spec, policy, settings) for spec in args.reward_fn}
    if args.env:
        rewards[args.env] = lambda episodes: episodes.rewards.sum(1)
        policy.environment = ppo.load_function(find(args.env), "--env")
    reference = load_policy(args.reference, settings) if args.reference else None
    if reference is not None:
        is_alike = reference.tokenizer.get_vocab() == policy.tokenizer.get_vocab()
        require(is_alike, f"{args.reference} has another tokenizer than {args.model}: there is no KL between them")
        check_length(reference, longest)
    torch.manual_seed(args.seed)
    figures, texts = [], []
    size = max(1, args.batch_size // args.num_generations)  # whole prompts: a reward function may compare answers
    for i in tqdm(range(0, len(rows), size), desc="evaluating"):
        examples = rows[i : i + size]
        if args.env:
            r = play(policy, examples, args)  # 1
            written = r.written  # (B, T), false on what the environment wrote
            texts += [transcript(*episode, policy.tokenizer) for episode in zip(r.responses, r.mask, r.written)]
        else:
            repeated = [example for example in examples for _ in range(args.num_generations)]
            r = ppo.sample_batch(policy, repeated, settings)
            written = r.mask
            texts += ppo.decode(r, policy.tokenizer)
        part = {spec: reward(r) for spec, reward in rewards.items()}  # 2
        require(not any(x.isinf().any() for x in part.values()), "a reward is infinite")
        if reference is not None:  # 3
            part["kl"], part["kl_k3"] = kl_estimates(policy, reference, r, written, args)
        part["eos_share"] = r.ended
        part["response_length"] = written.sum(1)
        if args.env:
            part["turns"] = (r.turn * written).amax(1) + 1
        figures.append(pandas.DataFrame({name: x.tolist() for name, x in part.items()}))
    figures = pandas.concat(figures, ignore_index=True).astype(float)
    groups = figures.index // args.num_generations
    means = figures.groupby(groups).mean()  # 4; a reward of None is left out
    if rewards and args.num_generations > 1:
        are_right = (figures.iloc[:, 0] >= 1).where(figures.iloc[:, 0].notna())
        means[f"pass@{args.num_generations}"] = are_right.groupby(groups).max().astype(float)
    results = [{"response": text} | numbers for text, numbers in zip(texts, figures.to_dict("records"))]
    lines = [line_of(rows[group], result) for group, result in zip(groups, results)]
    return pandas.DataFrame({"mean": means.mean(), "standard error": means.sem()}), lines


def play(policy, examples, args):
    """Plays num_generations episodes from each example."""
    names = ("response_length", "temperature", "local_rollout_forward_batch_size", "bf16", "device")
    settings = agent.Args(max_turns=args.max_turns, **{name: getattr(settings_of(args), name) for name in names})
    settings.num_generations = args.num_generations  # also 1, which training refuses
    return agent.sample_batch(policy, examples, settings)


def kl_estimates(policy, reference, r, written, args):
    """k1 and k3 (B,) of each answer, in nats, over the tokens that the policy wrote (B, T)."""
    settings = replace(settings_of(args), temperature=args.temperature or 1.0)
    d = agent.read_logprobs(policy, r, settings) - agent.read_logprobs(reference, r, settings)  # (B, T)
    return [x.masked_fill(~written, 0.0).sum(1) for x in (d, torch.expm1(-d) + d)]


def line_of(row, results):
    """A line of answers.jsonl: the row, under other names where it has those of the results, and the results."""
    row = {f"row/{name}" if name in results else name: x for name, x in row.items() if name != "input_ids"}
    return row | {name: None if x != x else x for name, x in results.items()}  # JSON has no NaN


# --- Models, prompts and rewards, for compare.py too ------------------------------------------------------------------


def settings_of(args):
    """The settings of ppo.py for these answers."""
    return ppo.Args(
        model=args.model,
        dataset=find(args.dataset),
        dataset_config=args.dataset_config,
        max_prompt_length=args.max_prompt_length,
        response_length=args.response_length,
        temperature=args.temperature or 1e-6,  # so low that the most likely token is sampled
        micro_batch_size=max(1, args.batch_size // 4),
        local_rollout_forward_batch_size=args.batch_size,
        bf16=args.bf16,
        device=args.device,
    )


def find(name):
    """A path (or file.py:name) from here or, if there is none, from the project's folder; else a name on the hub: NAME
    or OWNER/NAME, where OWNER is no folder. Other names are mistakes, which would be looked up on the hub for long."""
    file, _, function = name.partition(":")
    if Path(file).exists():
        return name
    if (ROOT / file).exists():
        return str(ROOT / name)
    owner, *rest = Path(name).parts
    is_local = name.startswith("./") or len(rest) > 1 or Path(owner).is_dir() or (ROOT / owner).is_dir()
    require(not is_local, f"there is no file or folder {name}")
    return name


@contextmanager
def reading(name):
    """Ends the program with one sentence if a library cannot read what has this name."""
    try:
        yield
    except (OSError, ValueError) as error:
        sys.exit(f"error: {name} should be a folder, or a name on the hub: {str(error).splitlines()[0]}")


def load_policy(name, settings):
    """Loads a policy."""
    with reading(name):
        policy = ppo.load_model(AutoModelForCausalLM, find(name))
    ppo.place(policy.requires_grad_(False), settings)
    return policy


def trained_with(name):
    """The settings of the run that saved a model, maybe in merged/; none if no run did."""
    folder = Path(name).resolve()
    files = [place / "args.json" for place in (folder, folder.parent)]
    return next((json.loads(file.read_text("utf-8")) for file in files if file.exists()), {})


def stop_tokens(policy, is_chat):
    """Ids of the tokens that end an answer: for a run, those that it saved in the generation config."""
    stored = policy.generation_config.eos_token_id  # an int, a list, or None
    if stored is None or not trained_with(policy.name_or_path):
        ppo.set_stop_tokens(policy, is_chat, temperature=1.0)  # which only other programs read
        return policy.stop_token_ids
    return stored if isinstance(stored, list) else [stored]


def load_prompts(args, tokenizer):
    """`num_prompts` prompts of the split, as training reads them. They are drawn at random, since a file may be sorted,
    and are the same in each call."""
    split = "train" if Path(find(args.dataset)).is_file() else args.split
    with reading(args.dataset):
        rows = ppo.load_prompts(settings_of(args), tokenizer, split)
    require(rows, f"{args.dataset} has no prompts in the split {split!r}")
    num_prompts = min(args.num_prompts or len(rows), len(rows))
    drawn = random.Random(0).sample(range(len(rows)), num_prompts)
    return [rows[i] for i in sorted(drawn)]


def transcript(ids, mask, written, tokenizer):
    """A stream as a text. Answers of the environment are in «guillemets»."""
    is_own, sizes = written[mask].unique_consecutive(return_counts=True)
    texts = tokenizer.batch_decode(ids[mask].split(sizes.tolist()))
    return "".join(text if own else f" «{text.strip()}» " for text, own in zip(texts, is_own))


def check_length(model, num_tokens):
    """Exits if a model cannot read so many tokens."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", num_tokens)
    require(
        num_tokens <= limit, f"a prompt and its answer have {num_tokens} tokens, but {model.name_or_path} reads {limit}"
    )


def load_reward(spec, policy, settings):
    """The reward that a spec names, as a function of a rollout; it returns one number (B,) for each response."""
    if ":" in spec:
        settings = replace(settings, reward_fn=(find(spec),))
    else:
        settings = replace(settings, reward_model=find(spec), reward_fn=("reward_model",))
        os.environ["REWARD_MODEL"] = settings.reward_model  # for rewards/model.py
    with reading(spec):
        [read] = ppo.load_reward_fns(settings).values()
    return lambda r: read(r, policy.tokenizer, settings)


def configure():
    """Configures the library as the scripts do."""
    ACT2FN["gelu_new"] = GELUTanh  # GPT-2's activation, in one operator instead of eight
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def new_folder(args, tool):
    """The folder of the results, which does not exist yet."""
    output = Path(args.output_dir or time.strftime(f"runs/{tool}__%Y%m%d-%H%M%S"))
    require(not output.exists(), f"{output} exists: give another --output-dir, or remove it")
    return output


def read_command_line(args_class, description):
    """Reads the settings. For a policy from ppo.py, rloo.py, grpo.py or agent.py, the defaults are its data, limits and
    temperature. Its environment and rewards are code, which runs only if the command line names it."""
    read = partial(tyro.cli, args_class, description=description)
    args = read()
    trained = trained_with(find(args.model))
    if "response_length" not in trained:
        return args
    names = ["response_length", "temperature", "dataset", "dataset_config", "max_prompt_length"]
    if getattr(args, "env", None):
        names.append("max_turns")
    settings = {name: trained[name] for name in names if name in trained}
    print(f"from the run of {args.model}, unless the command line has others: {settings}")
    specs = {"--env": trained.get("env"), "--reward-fn": trained.get("reward_fn")}
    for flag, spec in specs.items():
        if spec:
            print(f"it was trained with {flag} {spec if isinstance(spec, str) else ' '.join(spec)}")
    return read(default=args_class(args.model, **settings))


def main():
    """Evaluates with the settings of the command line, prints the numbers, and saves them."""
    args = read_command_line(Args, __doc__.splitlines()[0])
    output = new_folder(args, "evaluate")
    configure()
    figures, lines = evaluate(args)
    output.mkdir(parents=True)  # only now, since a killed evaluation should leave nothing
    (output / "answers.jsonl").write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8"
    )
    results = {"figures": json.loads(figures.to_json(orient="index")), "args": asdict(args)}
    (output / "evaluation.json").write_text(json.dumps(results, indent=2) + "\n")
    table = Table("", "mean", "standard error", title=f"{len(lines)} answers of {args.model}")
    for name, mean, error in figures.itertuples():
        table.add_row(name, f"{mean:.4g}", f"{error:.2g}")
    Console().print(table)
    print(f"saved in {output}")


if __name__ == "__main__":
    main()
