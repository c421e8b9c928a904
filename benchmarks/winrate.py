"""Win rate: how often is one policy's response preferred to another policy's, or to a reference text?

  1. sample   each side gives one response to every prompt; side B may instead be a column of texts
  2. judge    pair by pair, the higher reward wins, or a language model says which response is better
  3. count    win rate = (wins + ties / 2) / judged pairs

A win rate measures the taste of its judge. A reward that a policy was trained on flatters that policy, so judge it by
another reward or by a language model (Stiennon et al. 2020, arXiv 2009.01325, fig. 5).

Language models tend to favour the response in a certain position, first or second, whatever it says (Zheng et al. 2023,
2306.05685, sec. 3.3-3.4). Every pair is therefore shown in both orders, and a response wins only if it is chosen both
times. A judge that chooses the same position twice has seen no difference, which is a tie:

  a shown first, b second   judge says  A   A   B   B
  b shown first, a second   judge says  B   A   B   A
                            winner      a  tie tie  b

The share of such ties is `order_disagreement`. Two equal texts are a tie, and the judge is not asked.

The confidence interval is Wilson's (1927, JASA 22), which stays between 0 and 1 and holds for few pairs too; with many
ties it is wider than it need be. It covers the choice of prompts, not the seed of the training. Judges also like long
responses (Dubois et al. 2024, 2404.04475), so the win rate is given again over the pairs in which A is not longer.

  python benchmarks/winrate.py --model runs/my-ppo --other toy/sft --reward-fn toy/make.py:gold_score
  OPENAI_API_KEY=... python benchmarks/winrate.py --model ./ppo --dataset tldr.jsonl --reference-column completion \\
      --judge-url https://api.openai.com/v1 --judge-model gpt-4o-mini

The results are pairs.jsonl (one line per pair, written as soon as it is judged) and winrate.json.
"""

import asyncio
import inspect
import json
import math
import os
import re
import runpy
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # Ctrl-C while the libraries load: no traceback

import datasets
import httpx2
import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig
from transformers import logging, pipeline

KEY = os.environ.get("OPENAI_API_KEY", "").strip()  # of the judge; sent to --judge-url, and written nowhere


@dataclass
class Args:
    # --- The two sides: folders, or names on the hub
    model: str = "toy/sft"  # side A, the policy to be judged
    other: str | None = None  # side B, a second policy; give either this or --reference-column
    reference_column: str | None = None  # side B, a column of texts, such as completions written by people
    trust_remote_code: bool = False  # run Python code that comes with a model; only if you have read that code
    attn_implementation: str | None = None  # eager, sdpa, flash_attention_2, ...; by default the model's own choice

    # --- Data
    dataset: str = "toy/data/prompts"  # a folder, a file (jsonl, csv, parquet) or a name on the hub
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    dataset_split: str = "validation"  # split to take prompts from; neither policy should have been trained on it
    prompt_column: str = "prompt"  # column of texts, or of lists of {role, content} for each policy's chat template
    num_prompts: int = 1000  # how many prompts to take from the top; 1000 make an interval of +- 3 points

    # --- Sampling: settings stored with a checkpoint are ignored, so that both sides are sampled alike
    response_length: int = 53  # longest response in tokens (TRL 0.16, from the TL;DR task); use that of the training
    temperature: float = 0.01  # logits are divided by this (TRL evaluates at 0.01); 0 takes the likeliest token
    batch_size: int = 64  # responses sampled, or pairs scored, at once; affects speed and memory only
    seed: int = 1  # seed for sampling A; B uses the next one, so that a policy does not repeat itself

    # --- Judge: one of the first three
    reward_model: str | None = None  # a sequence classifier with one label; the higher reward wins
    reward_label: str | None = None  # for a classifier with several labels, the one whose logit is the reward
    reward_fn: str | None = None  # file.py:name of f(prompts, completions, **columns) -> floats (TRL); the higher wins
    judge_url: str | None = None  # an OpenAI-compatible API, http://.../v1; its key is read from OPENAI_API_KEY only
    judge_model: str | None = None  # name of the judge at that address
    judge_template: str | None = None  # file with the question, with {prompt}, {first} and {second}; it asks for A or B
    judge_timeout: float = 60.0  # seconds after which a request has failed unless the whole reply has arrived
    judge_retries: int = 3  # further attempts after a failed request, 1, 2, 4 ... s apart; then the pair stays unjudged
    judge_concurrency: int = 8  # pairs that are judged at the same time

    # --- Run
    output_dir: str | None = None  # folder for the results; by default a new one, runs/winrate__TIME
    device: str | None = None  # cpu, cuda, mps; by default the best there is
    bf16: bool = False  # run the models under bfloat16 autocast; their weights stay float32


@dataclass
class Pair:
    """Both responses to a prompt and the judge's decision: a line of pairs.jsonl."""

    row: int
    prompt: str
    a: str  # the response of side A
    tokens_a: int  # its length including the stop token, counted by the side's own tokenizer
    ended_a: bool  # whether there is a stop token
    b: str
    tokens_b: int
    ended_b: bool
    winner: str | None = None  # "a", "b", "tie"; None if the judge gave no answer
    score_a: float | None = None
    score_b: float | None = None
    verdicts: list[str] | None = None  # letters, first with a shown first, then with b shown first
    error: str | None = None  # why there is no winner


def compare(args: Args) -> None:
    """Both sides respond to every prompt, the judge decides pair by pair, and the wins are counted."""
    device = check_args(args)
    prompts, references, rows = load_rows(args)
    a = load_side("A", args.model, prompts, args)
    b = load_side("B", args.other, prompts, args) if args.other else None
    judge = make_judge(args, device, rows)
    with explain(f"--output-dir {args.output_dir} cannot be written, or is in use"):
        file = Path(args.output_dir) / "pairs.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(exist_ok=False)  # from here on nothing can be wrong with the input

    in_a = respond(a, args.seed, args, device)  # 1
    if b:
        in_b = respond(b, args.seed + 1, args, device)
    else:  # people's texts have ended; their lengths are counted by A's tokenizer
        ids = [a.tokenizer(text + (a.tokenizer.eos_token or ""))["input_ids"] for text in references]
        in_b = [(text, len(tokens), True) for text, tokens in zip(references, ids)]
    texts = prompts if isinstance(prompts[0], str) else a.tokenizer.decode(a.prompts, skip_special_tokens=True)
    pairs = [Pair(row, texts[row], *in_a[row], *in_b[row]) for row in range(len(texts))]
    with tqdm(total=len(pairs), desc="judging", dynamic_ncols=True) as bar:

        def keep(pair: Pair) -> None:
            with explain(f"{file} cannot be written"), file.open("a") as lines:
                lines.write(json.dumps(asdict(pair)) + "\n")
            bar.update()
            if pair.error:  # shown at once, and not after an hour without an answer
                bar.set_postfix_str(f"not judged: {printable(pair.error)}")

        judge(pairs, keep)  # 2
    report(pairs, summarize(pairs), args)  # 3


# ---------------------------------------------------------------------------------------------------------------------
# 1. Sample


@dataclass
class Side:
    """A policy with its tokenizer, and the prompts in its tokens."""

    name: str
    policy: torch.nn.Module
    tokenizer: AutoTokenizer
    prompts: list[list[int]]


def respond(side: Side, seed: int, args: Args, device: torch.device) -> list[tuple[str, int, bool]]:
    """A response to each prompt, drawn from softmax(logits / temperature): its text, its tokens, whether it ended."""
    torch.manual_seed(seed)
    policy, tokenizer, eos = side.policy.to(device), side.tokenizer, side.tokenizer.eos_token_id
    policy.generation_config = GenerationConfig()  # generate() would fill the gaps in ours from the checkpoint's
    config = GenerationConfig(
        max_new_tokens=args.response_length, eos_token_id=eos, pad_token_id=tokenizer.pad_token_id,
        do_sample=args.temperature > 0, temperature=args.temperature or 1.0, top_k=0, top_p=1.0,
    )  # fmt: skip
    responses = []
    for i in tqdm(range(0, len(side.prompts), args.batch_size), desc=f"sampling {side.name}", dynamic_ncols=True):
        prompts = side.prompts[i : i + args.batch_size]
        batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(device)
        with explain(f"{side.name} cannot be sampled"), torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            output = policy.generate(**batch, generation_config=config)[:, batch["input_ids"].shape[1] :]
        for prompt, tokens in zip(prompts, output.tolist()):
            ended = eos in tokens
            tokens = tokens[: tokens.index(eos) + 1] if ended else tokens
            # Decoded with the prompt, since some tokenizers drop the blank of a first word.
            start, whole, alone = tokenizer.decode([prompt, prompt + tokens, tokens], skip_special_tokens=True)
            text = whole[len(start) :] if whole.startswith(start) else alone
            responses.append((text, len(tokens), ended))
    policy.to("cpu")  # makes room for the other side and the judge
    return responses


# ---------------------------------------------------------------------------------------------------------------------
# 2. Judge


def judge_by_score(pairs: list[Pair], keep: Callable, score: Callable, args: Args) -> None:
    """The higher score wins. Equal texts are scored once, so that rounding cannot make one of them the winner."""
    for i in range(0, len(pairs), args.batch_size):
        batch = pairs[i : i + args.batch_size]
        keys = [((p.row, p.prompt, p.a, p.ended_a), (p.row, p.prompt, p.b, p.ended_b)) for p in batch]
        unique = list(dict.fromkeys(key for both in keys for key in both))
        with explain(f"the reward {args.reward_fn or args.reward_model} cannot be used"):
            rewards = [float(x) for x in score(unique)]
            require(len(rewards) == len(unique), f"it gave {len(rewards)} numbers for {len(unique)} texts")
            for x, (_, prompt, response, _) in zip(rewards, unique):
                require(math.isfinite(x), f"it is {x} for the text {prompt + response!r}")
        scores = dict(zip(unique, rewards))
        for pair, (a, b) in zip(batch, keys):
            pair.score_a, pair.score_b = scores[a], scores[b]
            pair.winner = "a" if scores[a] > scores[b] else "b" if scores[b] > scores[a] else "tie"
            keep(pair)


TEMPLATE = """Two responses to the same prompt follow. Which one is better: more correct, more to the
point, better written? Length is no merit in itself, nor is the place where a response is shown.

--- Prompt
{prompt}

--- Response A
{first}

--- Response B
{second}

--- End
Answer with one letter and nothing else, A or B."""


async def judge_by_model(pairs: list[Pair], keep: Callable, template: str, args: Args) -> None:
    """Asks a language model about `judge_concurrency` pairs at a time. A question that fails leaves its pair open."""
    todo = iter(pairs)
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})
    async with httpx2.AsyncClient(headers=headers, timeout=None) as client:

        async def work() -> None:
            for pair in todo:  # all workers take from the same iterator
                try:
                    await ask_both_orders(client, pair, template, args)
                except UserError as error:
                    pair.error = str(error)
                keep(pair)

        await asyncio.gather(*(work() for _ in range(min(args.judge_concurrency, len(pairs)))))


async def ask_both_orders(client: httpx2.AsyncClient, pair: Pair, template: str, args: Args) -> None:
    """Finds the winner of a pair. The template is filled in one pass: braces in a response stay as they are."""
    pair.verdicts = []
    orders = [(pair.a, pair.b), (pair.b, pair.a)] if pair.a.strip() != pair.b.strip() else []
    for first, second in orders:
        parts = {"{prompt}": pair.prompt.strip(), "{first}": first.strip(), "{second}": second.strip()}
        question = "".join(parts.get(part, part) for part in re.split(r"(\{\w+\})", template))
        answer = await ask(client, question, args)
        require(letter := parse_verdict(answer), f"neither A nor B in the answer {answer[-100:]!r}")
        pair.verdicts.append(letter)
    # Letters are places, so that two different ones mean the same response.
    pair.winner = {("A", "B"): "a", ("B", "A"): "b"}.get(tuple(pair.verdicts), "tie")


async def ask(client: httpx2.AsyncClient, question: str, args: Args) -> str:
    """The judge's answer to a question. Raises UserError if the last attempt fails, whatever the server did: it may
    refuse, be silent, send a byte now and then, send without end, or send JSON that is nested too deeply to be read."""
    url = args.judge_url.rstrip("/") + "/chat/completions"
    body = {"model": args.judge_model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
    for attempt in range(args.judge_retries + 1):
        wait = 2**attempt
        try:
            with explain("the judge's reply is no chat completion"):
                async with asyncio.timeout(args.judge_timeout), client.stream("POST", url, json=body) as reply:
                    data = bytearray()
                    async for part in reply.aiter_raw():
                        data += part
                        require(len(data) <= 2**20, "it is longer than 1 MiB")
                if reply.status_code == 200:
                    return hide_key(str(json.loads(data)["choices"][0]["message"]["content"] or ""))
            problem = f"HTTP {reply.status_code}: {' '.join(hide_key(data.decode(errors='replace')).split())[:200]}"
            if reply.status_code < 500 and reply.status_code not in (408, 429):
                break  # a wrong key or name stays wrong
            asked = reply.headers.get("Retry-After", "")
            wait = int(asked) if re.fullmatch("[0-9]{1,9}", asked) else wait
        except UserError as error:
            problem = str(error)
        if attempt < args.judge_retries:
            await asyncio.sleep(min(wait, 60))
    raise UserError(problem)


def hide_key(text: str) -> str:
    """Text from outside without the key, which some servers repeat."""
    return text.replace(KEY, "***") if KEY else text


# A line of an answer may have these words, and whatever is no word, before the letter: "The better response is **B**."
FILLERS = "the response text answer option summary completion verdict winner choice better best one is would be with " \
          "i d my think prefer choose pick select go json"  # fmt: skip
OPENING = rf"(?i:[\W_]|\b(?:{FILLERS.replace(' ', '|')})(?=[\W_]))*"
# And these after it: "B", "A. It is shorter", "A because it ends", "A is clearly better". But not "A or B", "A film".
ENDING = r"(?=[\W_]*$|[\W_]*[.,:;–—-]|\W+(?:because|since|wins|is (?:\w+ly )?(?:the )?(?:better|best))\b)"
VERDICT = rf"{OPENING}(?<![^\W_])([AB]|[ab](?=[\W_]*$)){ENDING}"


def parse_verdict(answer: str) -> str | None:
    """The letter that begins the answer's first or last line. None if there is none, if the two lines have different
    letters, or if the judge stopped in the middle of its thoughts."""
    lines = re.sub(r"(?s)<think>.*", "", answer.rpartition("</think>")[2]).strip("` \n").splitlines()
    matches = [re.match(VERDICT, line[:300]) for line in lines[:1] + lines[-1:]]
    letters = {match[1].upper() for match in matches if match}
    return letters.pop() if len(letters) == 1 else None


# ---------------------------------------------------------------------------------------------------------------------
# 3. Count


def wilson_interval(wins: float, n: int) -> tuple[float, float]:
    """95 % bounds of a share, from `wins` of n: the roots in p of (wins / n - p)^2 = z^2 p (1 - p) / n, z = 1.96."""
    if n == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf(0.975)
    share, shrink = wins / n, 1 + z * z / n
    center = (share + z * z / (2 * n)) / shrink
    half = z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5 / shrink
    return max(0.0, min(share, center - half)), min(1.0, max(share, center + half))  # center +- half, but for rounding


def win_rate(pairs: list[Pair], suffix: str = "") -> dict:
    """Side A's share of wins, ties as halves, with its interval, over the pairs that have a winner."""
    points = [{"a": 1.0, "tie": 0.5, "b": 0.0}[pair.winner] for pair in pairs if pair.winner]
    low, high = wilson_interval(sum(points), len(points))
    rate = statistics.fmean(points) if points else None
    return {f"win_rate{suffix}": rate, f"win_rate{suffix}_low": low, f"win_rate{suffix}_high": high}


def summarize(pairs: list[Pair]) -> dict:
    """The figures of winrate.json."""
    winners = [p.winner for p in pairs]
    counts = {"wins": winners.count("a"), "ties": winners.count("tie"), "losses": winners.count("b")}
    summary = {"pairs": len(pairs), "unjudged": winners.count(None), **counts, **win_rate(pairs)}
    not_longer = [p for p in pairs if p.winner and len(p.a) <= len(p.b)]
    summary |= {"pairs_a_not_longer": len(not_longer), **win_rate(not_longer, "_a_not_longer")}
    for side in "ab":
        summary[f"tokens_{side}"] = statistics.fmean(getattr(p, f"tokens_{side}") for p in pairs)
        summary[f"characters_{side}"] = statistics.fmean(len(getattr(p, side)) for p in pairs)
        summary[f"eos_share_{side}"] = statistics.fmean(getattr(p, f"ended_{side}") for p in pairs)
    if differences := [p.score_a - p.score_b for p in pairs if p.score_a is not None]:
        summary["score_a"] = statistics.fmean(p.score_a for p in pairs)
        summary["score_b"] = statistics.fmean(p.score_b for p in pairs)
        error = statistics.stdev(differences) / len(pairs) ** 0.5 if len(pairs) > 1 else None  # standard error
        summary |= {"score_difference": statistics.fmean(differences), "score_difference_error": error}
    if asked := [p.verdicts for p in pairs if p.verdicts and p.winner]:
        summary["order_disagreement"] = statistics.fmean(forward == swapped for forward, swapped in asked)
        summary["first_shown_won"] = statistics.fmean(letter == "A" for verdicts in asked for letter in verdicts)
    if errors := [p.error for p in pairs if p.error]:
        summary["last_error"] = errors[-1]
    return summary


def report(pairs: list[Pair], summary: dict, args: Args) -> None:
    """winrate.json, and its figures on the terminal; exit code 1 if not one pair was judged."""
    file = Path(args.output_dir) / "winrate.json"
    with explain(f"{file} cannot be written"):
        file.write_text(json.dumps(summary | {"args": asdict(args)}, indent=2) + "\n")
    if summary["unjudged"] == len(pairs):
        sys.exit(f"winrate.py: not one of {len(pairs)} pairs was judged: {printable(summary['last_error'])}")
    examples = [[p.prompt, p.a, p.b, p.winner or "not judged"] for p in pairs[:3]]
    figures = [[name, f"{x:.4g}" if isinstance(x, float) else str(x)] for name, x in summary.items()]
    for columns, rows in ((["prompt", "A", "B", "winner"], examples), (["winrate.json", ""], figures)):
        table = Table(*columns)
        for row in rows:
            table.add_row(*(Text(printable(cell), overflow="fold") for cell in row))
        Console().print(table)
    rate, low, high = (100 * summary[name] for name in ("win_rate", "win_rate_low", "win_rate_high"))
    print(printable(f"A, {args.model}, wins {rate:.1f} % [{low:.1f}, {high:.1f}] against B, "
                    f"{args.other or args.reference_column}; see {args.output_dir}"))  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The comparison ends here. What follows checks and loads what the user names, and explains mistakes.


def check_args(args: Args) -> torch.device:
    """Refuses arguments that make no comparison, names the output folder, and picks the device."""
    empty = [f"--{name.replace('_', '-')}" for name, value in vars(args).items() if value == ""]
    require(not empty, f"{', '.join(empty)} must not be empty; leave it out for its default")
    judges = [args.reward_model, args.reward_fn, args.judge_url]
    require(sum(map(bool, judges)) == 1, "give one judge: --reward-model, --reward-fn or --judge-url")
    require(bool(args.judge_url) == bool(args.judge_model), "--judge-url and --judge-model go together")
    require(bool(args.other) != bool(args.reference_column), "give one side B: either --other or --reference-column")
    is_url = re.fullmatch(r"https?://[^/\s@?#]+(/[^\s@?#]*)?", args.judge_url or "http://none")
    require(is_url, "--judge-url must be like http://localhost:8000/v1; only OPENAI_API_KEY may hold a secret")
    require(KEY.isascii() and KEY.isprintable(), "OPENAI_API_KEY holds characters that no key has; copy it again")
    least = min(args.response_length, args.batch_size, args.num_prompts, args.judge_concurrency)
    require(least >= 1, "--response-length, --batch-size, --num-prompts and --judge-concurrency must be 1 or more")
    require(0 <= args.seed < 2**63, "--seed must be between 0 and 2^63")
    require(0 <= args.temperature < math.inf, f"--temperature {args.temperature} must be 0 or more")
    require(args.judge_timeout > 0 and args.judge_retries >= 0, "--judge-timeout or --judge-retries is too small")
    args.output_dir = args.output_dir or f"runs/winrate__{time.strftime('%Y%m%d-%H%M%S')}"
    best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    with explain(f"--device {args.device} cannot be used on this machine; leave it out to use {best}"):
        return torch.empty(0, device=args.device or best).device


def load_rows(args: Args) -> tuple[list, list | None, list[dict]]:
    """The first `num_prompts` prompts, texts or conversations, the reference texts if they are side B, and all rows."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    kind = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}.get(Path(args.dataset).suffix)
    source = {"data_files": {args.dataset_split.split("[")[0]: args.dataset}} if kind else {"name": args.dataset_config}
    with explain(f"--dataset {args.dataset}, split {args.dataset_split!r}, is empty or could not be read"):
        data = datasets.load_dataset(kind or args.dataset, split=args.dataset_split, **source)
        data = data.select(range(min(args.num_prompts, len(data))))
        prompts = list(data[args.prompt_column])
        references = list(data[args.reference_column]) if args.reference_column else None
    for i, prompt in enumerate(prompts):
        roles = [x.get("role") if isinstance(x, dict) else None for x in prompt] if isinstance(prompt, list) else []
        require(all(roles), f"--dataset {args.dataset}: row {i} has a message without a role")
        is_text = prompt and isinstance(prompt, (str, list)) and (not references or isinstance(references[i], str))
        require(is_text, f"--dataset {args.dataset}: row {i} has no prompt, or no text to compare with")
    return prompts, references, data.to_list()


def load_model(auto_class: type, name: str, args: Args) -> torch.nn.Module:
    """A model on the CPU. Refuses one that lacks weights, which the library would draw at random, or has others."""
    with explain(f"{name!r} could not be loaded, as a folder here or from the hub"):
        model, info = auto_class.from_pretrained(
            name, use_safetensors=True, attn_implementation=args.attn_implementation, dtype=torch.float32,
            trust_remote_code=args.trust_remote_code, output_loading_info=True,
        )  # fmt: skip
    wrong = sorted(info["missing_keys"] | info["unexpected_keys"])
    require(not wrong, f"{name!r} was not saved as a {type(model).__name__}: one of the two lacks {wrong[:3]}")
    return model.eval()


def load_side(letter: str, name: str, prompts: list, args: Args) -> Side:
    """A policy on the CPU, and the prompts in its tokens. Raises UserError if these and the response do not fit."""
    policy = load_model(AutoModelForCausalLM, name, args)
    with explain(f"the tokenizer of {name} could not be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    is_finite = all(weight.isfinite().all() for weight in policy.parameters())
    require(is_finite, f"the weights of {name} are not finite (NaN or inf); use an earlier checkpoint")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # where padding is, the attention mask says
    with explain(f"the tokenizer of {name} cannot be used for the prompts"):
        template = {"add_generation_prompt": True, "return_dict": False}
        rows = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else
                tokenizer.apply_chat_template(prompt, **template) for prompt in prompts]  # fmt: skip
        require(all(rows) and tokenizer.pad_token, "it has no vocabulary, or neither a pad nor an EOS token")
    longest = max(map(len, rows)) + args.response_length
    limit = getattr(policy.config.get_text_config(), "max_position_embeddings", None) or longest
    require(longest <= limit, f"the longest prompt and --response-length are {longest} tokens; {name} reads {limit}")
    return Side(letter, policy, tokenizer, rows)


def make_judge(args: Args, device: torch.device, rows: list[dict]) -> Callable[[list[Pair], Callable], None]:
    """The function that judges pairs, and calls its second argument with each pair as soon as it is judged."""
    if args.judge_url:
        with explain(f"--judge-template {args.judge_template} cannot be used"):
            template = Path(args.judge_template).read_text("utf-8") if args.judge_template else TEMPLATE
            for part in ("{prompt}", "{first}", "{second}"):
                require(part in template, f"it lacks {part}")
        return lambda pairs, keep: asyncio.run(judge_by_model(pairs, keep, template, args))
    if args.reward_fn:
        file, _, name = args.reward_fn.rpartition(":")
        with explain(f"--reward-fn {args.reward_fn} could not be loaded; it should be file.py:name"):
            function = runpy.run_path(file)[name]

        def score(keys: list[tuple[int, str, str, bool]]) -> list[float]:
            """By f(prompts, completions, **columns), TRL's signature, called by keyword as the scripts call it."""
            copies = [deepcopy(rows[row]) for row, *_ in keys]  # a function may change what it is given
            given = {name: [row[name] for row in copies] for name in rows[0]}
            given["prompts"] = given[args.prompt_column]
            given["completions"] = [response for _, _, response, _ in keys]
            if isinstance(given["prompts"][0], list):
                given["completions"] = [[{"role": "assistant", "content": text}] for text in given["completions"]]
            try:
                inspect.signature(function).bind(**given)
            except TypeError as error:
                raise UserError(f"it is to be f(prompts, completions, **columns), but: {error}; the data have "
                                f"{', '.join(rows[0])}") from error  # fmt: skip
            scores = function(**given)
            has_order = not isinstance(scores, (dict, set, str, bytes))
            require(has_order, f"it gave a {type(scores).__name__}; it is to give a list of one number for each text")
            return scores

    else:
        score = reward_scorer(args, device)
    trial = Pair(0, "A text", " that ends", 0, True, " and goes on", 0, False)
    judge_by_score([trial], lambda pair: None, score, args)  # a faulty reward should fail now, not after the sampling
    return lambda pairs, keep: judge_by_score(pairs, keep, score, args)


def reward_scorer(args: Args, device: torch.device) -> Callable[[list[tuple[int, str, str, bool]]], list[float]]:
    """The function from rows, their prompts, responses, and whether these ended, to the rewards of --reward-model."""
    model = load_model(AutoModelForSequenceClassification, args.reward_model, args)
    with explain(f"the tokenizer of {args.reward_model} could not be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(args.reward_model, trust_remote_code=args.trust_remote_code)
        judge = pipeline("text-classification", model, tokenizer=tokenizer, device=device)
    config, tokenizer = judge.model.config, judge.tokenizer
    labels = list(config.id2label.values())
    label = args.reward_label or (labels[0] if len(labels) == 1 else "")
    require(label in labels, f"--reward-label must be one of {', '.join(labels)}, the labels of {args.reward_model}")
    stop = tokenizer.eos_token if tokenizer.eos_token and hasattr(judge.model, "score") else ""
    bias = getattr(config, "reward_bias", 0.0)
    length = getattr(config.get_text_config(), "max_position_embeddings", None) or tokenizer.model_max_length
    tokenizer.truncation_side = "left"
    config.pad_token_id = None  # texts come one by one: the last token is read even if it is the pad token

    def score(keys: list[tuple[int, str, str, bool]]) -> list[float]:
        texts = [prompt + response + stop * ended for _, prompt, response, ended in keys]
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            found = judge(texts, function_to_apply="none", top_k=None, truncation=True, max_length=length)
        return [{one["label"]: one["score"] for one in logits}[label] + bias for logits in found]

    return score


def printable(text: str) -> str:
    """Text without control characters: a response must not steer the reader's terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


class UserError(Exception):
    """A mistake in the input, or a judge that fails: shown as one sentence, without a traceback."""


def require(condition: object, sentence: str) -> None:
    """Raises UserError with the sentence unless the condition holds."""
    if not condition:
        raise UserError(sentence)


@contextmanager
def explain(sentence: str):
    """Other people's code runs inside: whatever it raises becomes a UserError, the sentence with their reason."""
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:  # sys.exit, too
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(" ".join(f"{sentence}: {kind}{error}".split())[:1000]) from error


def command_line() -> None:
    """Reads the command line and compares. A mistake in the input ends in one sentence and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.set_verbosity_error(), logging.disable_progress_bar()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    try:
        compare(args)
    except UserError as error:
        print(f"winrate.py: error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(printable(f"interrupted; what was judged is in {args.output_dir}"), file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    command_line()
