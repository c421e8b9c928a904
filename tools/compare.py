"""How often is one policy's answer preferred to another policy's, or to a reference text?

  1. sample   each side gives one answer to every prompt; side B may instead be a column of texts
  2. judge    pair by pair, the higher reward wins, or a language model says which answer is better
  3. count    win rate = (wins + ties / 2) / judged pairs

A win rate measures the taste of its judge. A reward that a policy was trained on flatters that policy, so judge it by
another reward or by a language model (Stiennon et al. 2020, arXiv 2009.01325, fig. 5).

Language models tend to favour the answer in a certain position, first or second, whatever it says (Zheng et al. 2023,
2306.05685, sec. 3.3-3.4). Every pair is therefore shown in both orders, and an answer wins only if it is chosen both
times. A judge that chooses the same position twice has seen no difference, which is a tie:

  a shown first, b second   judge says  A   A   B   B
  b shown first, a second   judge says  B   A   B   A
                            winner      a  tie tie  b

The share of such ties is `order_disagreement`. Two equal texts are a tie, and the judge is not asked.

The confidence interval is Wilson's (1927, JASA 22), which stays between 0 and 1 and holds for few pairs too; with many
ties it is wider than it need be. It covers the choice of prompts, not the seed of the training. Judges also like long
answers (Dubois et al. 2024, 2404.04475), so the win rate is given again over the pairs in which A is not longer.

  python tools/compare.py runs/my-ppo toy/sft --reward-fn toy/make.py:gold_score
  OPENAI_API_KEY=... python tools/compare.py ./ppo --dataset tldr.jsonl --reference-column completion \\
      --judge-url https://api.openai.com/v1 --judge-model gpt-4o-mini

What comes out: pairs.jsonl (a line for each pair, written as soon as it is judged) and compare.json.
"""

import asyncio
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import httpx2
import pydantic
import torch
import tyro
from evaluate import Answer, Count, Name, Natural, NonNegative, Reward
from evaluate import as_turns, encode_text, load_model, load_rows, make_reward, render_whole, require, respond
from evaluate import template_options
from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

KEY = os.environ.get("OPENAI_API_KEY", "").strip()  # of the judge; sent to --judge-url, and written nowhere

Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Address = Annotated[str, Field(pattern=r"^https?://[^/\s@?#]+(/[^\s@?#]*)?$")]  # which cannot hold a secret


@pydantic.dataclasses.dataclass  # which checks the values
class Args:
    # --- The two sides: folders, or names on the hub ---
    model: tyro.conf.Positional[Name]  # side A, the policy to be judged
    other: tyro.conf.Positional[Name | None] = None  # side B, a second policy; give either this or --reference-column
    reference_column: Name | None = None  # side B, a column of texts, or of messages, such as answers of people

    # --- Prompts ---
    dataset: Name = "toy/data/prompts"  # folder, file (jsonl, json, csv, parquet) or hub name
    dataset_config: Name | None = None  # configuration of a hub dataset that has several
    split: Name = "validation"  # split to take prompts from, which neither policy was trained on; a file is taken whole
    prompt_column: Name = "prompt"  # texts, or lists of {role, content} messages for each tokenizer's chat template
    num_prompts: Count = 1000  # how many prompts to take from the top; 1000 make an interval of +- 3 points

    # --- Answers: settings stored with a model are ignored, so that both sides are sampled alike ---
    response_length: Count = 53  # maximum tokens in an answer; use that of the training
    temperature: NonNegative = 0.01  # divides the logits (TRL evaluates at 0.01); 0 takes the likeliest token
    seed: Natural = 1  # seed of A's answers; B's have the next one, so that a policy does not repeat itself
    batch_size: Count = 64  # answers sampled, or pairs scored, at once

    # --- The judge: one of the first two ---
    # file.py:name of a function with TRL's signature, or a reward model, a classifier with one label: the higher wins
    reward_fn: Name | None = None
    # an OpenAI-compatible API, http://.../v1; its key is read from OPENAI_API_KEY only
    judge_url: Address | None = None
    judge_model: Name | None = None  # name of the judge at that address
    # file with the question, in which {prompt}, {first} and {second} stand; it asks for A or B
    judge_template: Name | None = None
    judge_timeout: Positive = 60.0  # seconds after which a request has failed unless the whole reply has arrived
    judge_retries: Natural = 3  # further attempts after a failed request, 1, 2, 4 ... s apart; then no verdict
    judge_concurrency: Count = 8  # pairs that are judged at the same time

    # --- Run ---
    output_dir: Name | None = None  # where the results go; by default a new folder runs/compare__TIME
    dtype: Name = "float32"  # type of the models' weights: float32, or the faster and rougher bfloat16
    trust_remote_code: bool = False  # run Python code that comes with a model; only if you have read that code
    # cpu, cuda, mps; by default cuda if there is one
    device: Name = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Pair:
    """Both answers to a prompt and the judge's decision: a line of pairs.jsonl."""

    row: int
    prompt: str
    a: str
    b: str
    tokens_a: int  # with the stop token
    tokens_b: int
    ended_a: bool  # whether there is a stop token
    ended_b: bool
    winner: str | None = None  # "a", "b", "tie"; None without a verdict
    score_a: float | None = None
    score_b: float | None = None
    verdicts: list[str] | None = None  # letters, first with a shown first, then with b shown first
    error: str | None = None  # why there is no winner


def compare(args: Args) -> dict:
    """Both sides answer every prompt, the judge decides pair by pair, and the wins are counted: compare.json."""
    require(bool(args.reward_fn) != bool(args.judge_url), "give one judge: --reward-fn or --judge-url")
    require(bool(args.judge_url) == bool(args.judge_model), "--judge-url and --judge-model go together")
    require(bool(args.other) != bool(args.reference_column), "give one side B: a second policy or --reference-column")
    for side in filter(None, (args.model, args.other)):
        settings = Path(side, "args.json")
        env = settings.exists() and json.loads(settings.read_text("utf-8")).get("env")
        require(not env, f"{side} was trained with --env {env}: only tools/evaluate.py plays more than its first turn")
    template = Path(args.judge_template).read_text("utf-8") if args.judge_template else TEMPLATE
    for part in ("{prompt}", "{first}", "{second}"):
        require(part in template, f"{args.judge_template} lacks {part}")
    output = Path(args.output_dir or time.strftime("runs/compare__%Y%m%d-%H%M%S"))
    output.mkdir(parents=True)

    rows = load_rows(args)
    there = ", ".join(rows[0])
    require(args.reference_column in (None, *rows[0]), f"no column {args.reference_column!r}; there are {there}")
    is_whole = args.reference_column is None or all(row[args.reference_column] is not None for row in rows)
    require(is_whole, f"some rows have no {args.reference_column!r}")
    reward = make_reward(args.reward_fn, args) if args.reward_fn else None
    in_a = answer_all(args.model, rows, args.seed, args)  # 1
    in_b = answer_all(args.other, rows, args.seed + 1, args) if args.other else references(in_a, args)
    pairs = []
    for row, (a, b) in enumerate(zip(in_a, in_b)):
        pairs.append(Pair(row, a.prompt, a.text, b.text, len(a.ids), len(b.ids), a.ended, b.ended))
    bar = tqdm(total=len(pairs), desc="judging", dynamic_ncols=True)
    with bar, open(output / "pairs.jsonl", "w") as file:

        def keep(pair: Pair) -> None:
            """Writes a pair that has been judged."""
            print(json.dumps(asdict(pair)), file=file, flush=True)
            bar.update()

        if reward:  # 2
            judge_by_reward(pairs, in_a, in_b, reward, keep, args)
        else:
            asyncio.run(judge_by_model(pairs, template, keep, args))
    summary = summarize(pairs)  # 3
    (output / "compare.json").write_text(json.dumps(summary | {"args": asdict(args)}, indent=2) + "\n")
    report(pairs, summary, args)
    print(f"saved in {output}")
    return summary


# --- 1. Sample --------------------------------------------------------------------------------------------------------


def answer_all(name: str, rows: list[dict], seed: int, args: Args) -> list[Answer]:
    """A policy's answers to the prompts of all rows."""
    policy = load_model(AutoModelForCausalLM, name, args)
    torch.manual_seed(seed)
    answers = []
    for i in tqdm(range(0, len(rows), args.batch_size), desc=name, dynamic_ncols=True):
        answers += respond(policy, rows[i : i + args.batch_size], args)
    return answers


def references(answers: list[Answer], args: Args) -> list[Answer]:
    """The texts of --reference-column in the place of answers. They have ended; A's tokenizer counts their tokens."""
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    found = []
    for answer in answers:
        text = answer.row[args.reference_column]
        if isinstance(text, list):  # of messages, the last of which is the answer
            text = text[-1]["content"]
        ids = answer_tokens(answer, text, tokenizer, args)
        found.append(replace(answer, text=text, ids=ids, ended=True, tokenizer=tokenizer))
    return found


def answer_tokens(answer: Answer, text: str, tokenizer: AutoTokenizer, args: Args) -> list[int]:
    """Token ids of another answer to the same prompt, with the token that ends it, as they are behind that prompt."""
    prompt = answer.row[args.prompt_column]
    end = tokenizer.eos_token or ""
    if isinstance(prompt, list) and tokenizer.chat_template:
        turns = [*as_turns(prompt, "user"), {"role": "assistant", "content": text}]
        ids = tokenizer(render_whole(turns, tokenizer, template_options(answer.row)), add_special_tokens=False)[
            "input_ids"
        ]
    else:
        ids = encode_text(answer.prompt + text + end, tokenizer)
    start = len(answer.prompt_ids)
    if ids[:start] == answer.prompt_ids:
        return ids[start:]
    return tokenizer(text + end, add_special_tokens=False)["input_ids"]


# --- 2. Judge ---------------------------------------------------------------------------------------------------------


def judge_by_reward(
    pairs: list[Pair], in_a: list[Answer], in_b: list[Answer], reward: Reward, keep: Callable, args: Args
) -> None:
    """The higher reward wins. Equal texts are a tie, whatever rounding makes of them."""
    for i in range(0, len(pairs), args.batch_size):
        part = slice(i, i + args.batch_size)
        for pair, a, b in zip(pairs[part], reward(in_a[part]), reward(in_b[part]), strict=True):
            pair.score_a, pair.score_b = a, b
            if a is None or b is None or not math.isfinite(a - b):
                pair.error = f"the rewards are {a} and {b}"
            elif a == b or (pair.a, pair.ended_a) == (pair.b, pair.ended_b):
                pair.winner = "tie"
            else:
                pair.winner = "a" if a > b else "b"
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


class NoVerdict(Exception):
    """Why a judge has not decided."""


async def judge_by_model(pairs: list[Pair], template: str, keep: Callable, args: Args) -> None:
    """Asks a language model about `judge_concurrency` pairs at a time. A question that fails leaves its pair open."""
    todo = iter(pairs)
    headers = {"Authorization": f"Bearer {KEY}"} if KEY else {}
    async with httpx2.AsyncClient(headers=headers, timeout=None) as client:

        async def work() -> None:
            for pair in todo:  # all workers take from the same iterator
                try:
                    await ask_both_orders(client, pair, template, args)
                except NoVerdict as error:
                    pair.error = str(error)
                keep(pair)

        await asyncio.gather(*(work() for _ in range(args.judge_concurrency)))


async def ask_both_orders(client: httpx2.AsyncClient, pair: Pair, template: str, args: Args) -> None:
    """Finds the winner of a pair. The template is filled in one pass: braces in an answer stay as they are."""
    pair.verdicts = []
    orders = [(pair.a, pair.b), (pair.b, pair.a)] if pair.a.strip() != pair.b.strip() else []
    for first, second in orders:
        parts = {"{prompt}": pair.prompt.strip(), "{first}": first.strip(), "{second}": second.strip()}
        question = "".join(parts.get(part, part) for part in re.split(r"(\{\w+\})", template))
        said = await ask(client, question, args)
        letter = parse_verdict(said)
        if letter is None:
            raise NoVerdict(f"neither A nor B in the answer {said[-100:]!r}")
        pair.verdicts.append(letter)
    # Letters are places, so that two different ones mean the same answer
    pair.winner = {("A", "B"): "a", ("B", "A"): "b"}.get(tuple(pair.verdicts), "tie")


async def ask(client: httpx2.AsyncClient, question: str, args: Args) -> str:
    """What the judge says to a question; NoVerdict if the last attempt fails, whatever the server did."""
    url = args.judge_url.rstrip("/") + "/chat/completions"
    body = {"model": args.judge_model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
    for attempt in range(args.judge_retries + 1):
        wait = 2**attempt
        try:
            async with asyncio.timeout(args.judge_timeout):
                reply = await client.post(url, json=body)
            if reply.status_code == 200:
                return hide_key(reply.json()["choices"][0]["message"]["content"] or "")
            problem = f"HTTP {reply.status_code}: {hide_key(reply.text)[:200]}"
            if reply.status_code < 500 and reply.status_code not in (408, 429):
                break  # a wrong key or name stays wrong
            asked = reply.headers.get("Retry-After", "")
            wait = int(asked) if re.fullmatch("[0-9]{1,9}", asked) else wait
        except Exception as error:  # no connection, no reply in time, or one of another form
            problem = hide_key(f"{type(error).__name__}: {error}")
        if attempt < args.judge_retries:
            await asyncio.sleep(min(wait, 60))
    raise NoVerdict(problem)


def hide_key(text: str) -> str:
    """Text from outside without the key, which some servers repeat."""
    return text.replace(KEY, "***") if KEY else text


# A line of an answer may have these words, and whatever is no word, before the letter: "The better response is **B**."
FILLERS = (
    "the response text answer option summary completion verdict winner choice better best one is would be with "
    "i d my think prefer choose pick select go json"
)
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


# --- 3. Count ---------------------------------------------------------------------------------------------------------


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
    """The figures of compare.json."""
    winners = [pair.winner for pair in pairs]
    counts = {"wins": winners.count("a"), "ties": winners.count("tie"), "losses": winners.count("b")}
    summary = {"pairs": len(pairs), "unjudged": winners.count(None), **counts, **win_rate(pairs)}
    not_longer = [pair for pair in pairs if pair.winner and len(pair.a) <= len(pair.b)]
    summary |= {"pairs_a_not_longer": len(not_longer), **win_rate(not_longer, "_a_not_longer")}
    for side in "ab":
        summary[f"tokens_{side}"] = statistics.fmean(getattr(pair, f"tokens_{side}") for pair in pairs)
        summary[f"characters_{side}"] = statistics.fmean(len(getattr(pair, side)) for pair in pairs)
        summary[f"eos_share_{side}"] = statistics.fmean(getattr(pair, f"ended_{side}") for pair in pairs)
    scored = [pair for pair in pairs if pair.winner and pair.score_a is not None]
    if scored:
        differences = [pair.score_a - pair.score_b for pair in scored]
        summary["score_a"] = statistics.fmean(pair.score_a for pair in scored)
        summary["score_b"] = statistics.fmean(pair.score_b for pair in scored)
        summary["score_difference"] = statistics.fmean(differences)
        if len(scored) > 1:
            summary["score_difference_error"] = statistics.stdev(differences) / len(scored) ** 0.5  # standard error
    asked = [pair.verdicts for pair in pairs if pair.winner and pair.verdicts]
    if asked:
        summary["order_disagreement"] = statistics.fmean(forward == swapped for forward, swapped in asked)
        summary["first_shown_won"] = statistics.fmean(letter == "A" for verdicts in asked for letter in verdicts)
    errors = [pair.error for pair in pairs if pair.error]
    if errors:
        summary["last_error"] = errors[-1]
    return summary


def report(pairs: list[Pair], summary: dict, args: Args) -> None:
    """Three pairs and the figures; exit code 1 if not one pair was judged."""
    if summary["unjudged"] == len(pairs):
        sys.exit(f"error: not one of {len(pairs)} pairs was judged: {summary['last_error']}")
    table = Table("prompt", "A", "B", "winner", show_lines=True)
    for pair in pairs[:3]:
        table.add_row(*map(Text, (pair.prompt, pair.a, pair.b, pair.winner or "")))
    figures = Table("compare.json", "")
    for name, x in summary.items():
        figures.add_row(name, Text(f"{x:.4g}" if isinstance(x, float) else str(x)))
    Console().print(table, figures)
    rate, low, high = (100 * summary[name] for name in ("win_rate", "win_rate_low", "win_rate_high"))
    other = args.other or args.reference_column
    print(f"A, {args.model}, wins {rate:.1f} % [{low:.1f}, {high:.1f}] against B, {other}")


def main() -> None:
    """Compares with the settings of the command line."""
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    compare(args)


if __name__ == "__main__":
    main()
