"""How often are one policy's answers preferred to another policy's, or to reference texts?

  1. sample   each side gives one answer to every prompt; side B may also be a column of the data, such as answers of
              people: texts, or messages of the assistant (recipes/data.py converts other forms)
  2. judge    for each pair, the higher reward wins, or a language model chooses the better answer
  3. count    win rate = (wins + ties / 2) / judged pairs

A win rate depends on the judge. The reward that trained a policy overrates that policy, so judge it by another reward
or by a language model (Stiennon et al. 2020, arXiv 2009.01325, fig. 5).

Language models tend to favour the answer in a certain position, first or second (Zheng et al. 2023, 2306.05685, sec.
3.3-3.4). Every pair is therefore shown in both orders, and an answer wins only if it is chosen both times. If the judge
chooses the same position twice, the pair is a tie:

  a shown first, b second   judge says  A   A   B   B
  b shown first, a second   judge says  B   A   B   A
                            winner      a  tie tie  b

The share of such ties is `order_disagreement`. Equal texts are a tie without asking the judge.

The confidence interval is Wilson's (1927, JASA 22). It stays between 0 and 1 and is valid for few pairs; with many ties
it is too wide. It reflects the choice of prompts, not the training seed. Judges also prefer long answers (Dubois et al.
2024, 2404.04475), so there is a second win rate, over the pairs in which A is not longer.

  python tools/compare.py runs/my-ppo toy/sft --reward-fn toy/gold_score.py:gold_score
  OPENAI_API_KEY=... python tools/compare.py ./ppo --dataset tldr.jsonl --reference-column completion \\
      --judge-url https://api.openai.com/v1 --judge-model gpt-4o-mini

Results: pairs.jsonl (one line per pair, written as soon as it is judged) and compare.json.
"""

import asyncio
import json
import math
import os
import re
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from warnings import warn

import httpx2
import numpy as np
import pydantic
import torch
import tyro
from evaluate import check_length, configure, find, load_policy, load_prompts, load_reward, new_folder, ppo
from evaluate import read_command_line, reading, require, settings_of, stop_tokens, trained_with
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm
from transformers import AutoTokenizer

KEY = os.environ.get("OPENAI_API_KEY", "").strip()  # of the judge; sent to --judge-url, written to no file

Address = Annotated[str, Field(pattern=r"^https?://[^/\s@?#]+(/[^\s@?#]*)?$")]  # without a password or a query


@pydantic.dataclasses.dataclass(config={"allow_inf_nan": False})  # checks the values
class Args:
    # --- The two sides: folders, or names on the hub ---
    model: tyro.conf.Positional[str]  # side A, the policy to judge
    other: tyro.conf.Positional[str | None] = None  # side B, a second policy; give either this or --reference-column
    reference_column: str | None = None  # side B, a column of texts or messages, such as human answers

    # --- Prompts ---
    dataset: str = f"{ppo.TOY}/data/prompts"  # folder of SPLIT.jsonl (or .parquet), one such file, or a hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    split: str = "validation"  # split with the prompts, which neither policy was trained on; a file has only one
    num_prompts: PositiveInt = 1000  # prompts drawn at random, always the same; 1000: an interval of +- 3 points
    max_prompt_length: PositiveInt = 512  # in tokens; longer prompts are dropped, as in training, and counted

    # --- Answers: settings stored with a model are ignored, so that both sides are sampled in the same way ---
    response_length: PositiveInt = 53  # maximum tokens in an answer; use the value from training
    temperature: NonNegativeFloat = 0.7  # divides the logits; by default that of A's training; 0: the likeliest token
    seed: NonNegativeInt = 1  # seed of A's answers; B has seed + 1: compared with itself, a policy gives others
    batch_size: PositiveInt = 64  # answers sampled at once

    # --- The judge: one of the first two ---
    # file.py:name of a function with TRL's signature, or a reward model (a classifier with one label)
    reward_fn: str | None = None
    # an OpenAI-compatible API, http://.../v1; its key is read from OPENAI_API_KEY only
    judge_url: Address | None = None
    judge_model: str | None = None  # name of the judge at that address
    # file with the question, which contains {prompt}, {first} and {second}, and asks for A or B
    judge_template: str | None = None
    judge_timeout: PositiveFloat = 60.0  # seconds after which a request without a complete reply fails
    judge_retries: NonNegativeInt = 3  # retries of a failed request, after 1, 2, 4 ... s; then there is no verdict
    judge_concurrency: PositiveInt = 8  # pairs judged at the same time

    # --- Run ---
    output_dir: str | None = None  # folder of the results; by default a new folder runs/compare__TIME
    bf16: bool = False  # run the models in bfloat16 (autocast), as the scripts do with this flag
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, mps; by default cuda if there is one


@dataclass
class Answer:
    """A side's answer to a prompt."""

    prompt: str  # as text; a conversation is rendered by the chat template
    text: str
    tokens: int  # with the stop token
    ended: bool  # whether it ends with a stop token
    score: float | None = None


@dataclass
class Pair:
    """Two answers to a prompt and the judge's decision: a line of pairs.jsonl."""

    row: int
    prompt: str
    a: str
    b: str
    tokens_a: int  # with the stop token
    tokens_b: int
    ended_a: bool  # whether it ends with a stop token
    ended_b: bool
    winner: str | None = None  # "a", "b", "tie"; None without a verdict
    score_a: float | None = None
    score_b: float | None = None
    verdicts: list[str] | None = None  # two letters: with a shown first, with b shown first
    error: str | None = None  # why there is no winner


def compare(args):
    """Samples both sides' answers, judges the pairs, counts wins; returns the content of compare.json."""
    require(bool(args.reward_fn) != bool(args.judge_url), "give one judge: --reward-fn or --judge-url")
    require(bool(args.judge_url) == bool(args.judge_model), "give both --judge-url and --judge-model, or neither")
    require(bool(args.other) != bool(args.reference_column), "give side B: a second policy or --reference-column")
    sides = [args.model] + ([args.other] if args.other else [])
    for side in sides:
        env = trained_with(find(side)).get("env")
        require(not env, f"{side} was trained with --env {env}: tools/evaluate.py --env plays all of its turns")
    template = Path(args.judge_template).read_text("utf-8") if args.judge_template else TEMPLATE
    for part in ("{prompt}", "{first}", "{second}"):
        require(part in template, f"{args.judge_template} lacks {part}")
    output = new_folder(args, "compare")

    rows = [load_prompts(args, tokenizer_of(side)) for side in sides]  # of each side, with its own tokens
    prompts = [[row["prompt"] for row in of_side] for of_side in rows]
    same = f"--max-prompt-length {args.max_prompt_length} drops other prompts for {args.other} than for {args.model}"
    require(prompts[0] == prompts[-1], same)
    texts = reference_texts(rows[0], args) if args.reference_column else []
    policy = load_policy(args.model, settings_of(args))  # 1
    in_a = answer_all(policy, rows[0], args.seed, args)
    if args.other:
        del policy  # before the next one is loaded
        in_b = answer_all(load_policy(args.other, settings_of(args)), rows[1], args.seed + 1, args)
    else:
        in_b = answer_all(policy, rows[0], args.seed, args, texts)
    pairs = []
    for row, (a, b) in enumerate(zip(in_a, in_b)):
        pair = Pair(row, a.prompt, a.text, b.text, a.tokens, b.tokens, a.ended, b.ended)
        pair.score_a, pair.score_b = a.score, b.score
        pairs.append(pair)
    output.mkdir(parents=True)
    bar = tqdm(total=len(pairs), desc="judging", dynamic_ncols=True)
    with bar, open(output / "pairs.jsonl", "w") as file:

        def keep(pair):
            """Writes a judged pair."""
            print(json.dumps(asdict(pair)), file=file, flush=True)
            bar.update()

        if args.reward_fn:  # 2
            for pair in pairs:
                judge_by_reward(pair)
                keep(pair)
        else:
            asyncio.run(judge_by_model(pairs, template, keep, args))
    summary = summarize(pairs)  # 3
    (output / "compare.json").write_text(json.dumps(summary | {"args": asdict(args)}, indent=2) + "\n")
    report(pairs, summary, args)
    print(f"saved in {output}")
    return summary


# --- 1. Sample --------------------------------------------------------------------------------------------------------


def tokenizer_of(name):
    """The tokenizer of a policy."""
    with reading(name):
        return AutoTokenizer.from_pretrained(find(name))


def reference_texts(rows, args):
    """The texts of --reference-column, or the assistant's message in it. If all texts begin with their prompts, which
    pairs may hold twice, without these."""

    def text_of(row):
        """The reference text of a row."""
        there = ", ".join(name for name in row if name != "input_ids")
        ppo.require(args.reference_column in row, f"there is no column {args.reference_column!r}, only {there}")
        found, prompt = row[args.reference_column], row["prompt"]
        if isinstance(found, list):
            ppo.check_messages(found, last="assistant")
            before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            ppo.require(found[:-1] in ([], before), f"{args.reference_column!r} has another prompt than 'prompt'")
            return found[-1]["content"]
        is_text = isinstance(found, str) and found.strip()
        ppo.require(is_text, f"{args.reference_column!r} is neither a text nor messages, or empty")
        return found

    texts = ppo.parse(rows, text_of, args.dataset)
    pairs = [(text, row["prompt"]) for text, row in zip(texts, rows) if isinstance(row["prompt"], str)]
    hold_prompts = len(pairs) == len(rows) and all(text.startswith(prompt) for text, prompt in pairs)
    return [text.removeprefix(prompt) for text, prompt in pairs] if hold_prompts else texts


def answer_all(policy, rows, seed, args, texts=()):
    """A policy's answers to all prompts, with their scores; or these texts, as if it had written them."""
    settings = settings_of(args)
    policy.stop_token_ids = stop_tokens(policy, is_chat=isinstance(rows[0]["prompt"], list))
    check_length(policy, max(len(row["input_ids"]) for row in rows) + args.response_length)
    reward = load_reward(args.reward_fn, policy, settings) if args.reward_fn else None
    torch.manual_seed(seed)
    answers = []
    for i in tqdm(range(0, len(rows), args.batch_size), desc=policy.name_or_path, dynamic_ncols=True):
        batch, given = rows[i : i + args.batch_size], texts[i : i + args.batch_size]
        rollout = as_rollout(given, batch, policy, settings) if given else ppo.sample_batch(policy, batch, settings)
        prompts = [policy.tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in batch]
        responses = ppo.decode(rollout, policy.tokenizer)
        if reward and any(text.strip() != read.strip() for text, read in zip(given, responses)):
            warn(f"the reward reads reference texts as the tokenizer of {args.model} spells them, which changes some")
        scores = reward(rollout).tolist() if reward else [math.nan] * len(batch)
        scores = [None if math.isnan(score) else score for score in scores]
        lengths = rollout.mask.sum(1).tolist()
        answers += map(Answer, prompts, given or responses, lengths, rollout.ended.tolist(), scores)
    return answers


def as_rollout(texts, rows, policy, settings):
    """Texts as responses that end: the tokens that follow those of the prompt, if the two are read as one text."""
    tokenizer = policy.tokenizer
    behind, end = turn_end(tokenizer) if isinstance(rows[0]["prompt"], list) else ("", "")
    responses = []
    for text, row in zip(texts, rows):
        start = len(row["input_ids"])
        if isinstance(row["prompt"], list):
            messages = [*row["prompt"], {"role": "assistant", "content": text}]
            whole = ppo.render(messages, row, tokenizer).removesuffix(behind) + end
            [ids] = ppo.encode([whole], tokenizer, is_chat=True)
        else:
            [ids] = ppo.encode([row["prompt"] + text], tokenizer)
            ids = np.append(ids, tokenizer.eos_token_id)
        if ids[:start].tolist() == row["input_ids"].tolist():
            responses.append(ids[start:])
        else:
            alone = tokenizer(text, add_special_tokens=False)["input_ids"]
            responses.append([*alone, ids[-1]])
    prompts = ppo.pad([row["input_ids"] for row in rows], tokenizer, settings, "left")  # (B, P), and the mask
    responses, mask = ppo.pad(responses, tokenizer, settings)  # (B, T) each
    return ppo.Rollout(*prompts, responses, mask, mask.any(1), torch.zeros_like(mask).float(), rows)


def turn_end(tokenizer):
    """What the chat template writes behind an answer, and its part that ends the answer: up to the first added token,
    such as <|im_end|>; EOS if it has none. An answer could hold these words, so a placeholder stands for it."""
    placeholder = "an answer"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": placeholder}]
    behind = ppo.render(talk, {}, tokenizer).partition(placeholder)[2]
    ends = [behind.index(token) + len(token) for token in tokenizer.get_added_vocab() if token in behind]
    return behind, behind[: min(ends)] if ends else tokenizer.eos_token


# --- 2. Judge ---------------------------------------------------------------------------------------------------------


def judge_by_reward(pair):
    """The higher reward wins. Equal texts are a tie, even if rounding makes their rewards differ."""
    a, b = pair.score_a, pair.score_b
    if a is None or b is None or not math.isfinite(a - b):
        pair.error = f"the rewards are {a} and {b}"
    elif a == b or (pair.a, pair.ended_a) == (pair.b, pair.ended_b):
        pair.winner = "tie"
    else:
        pair.winner = "a" if a > b else "b"


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
    """The reason why a judge has not decided."""


async def judge_by_model(pairs, template, keep, args):
    """Asks a language model about `judge_concurrency` pairs at a time. If a request fails, its pair has no winner."""
    todo = iter(pairs)
    headers = {"Authorization": f"Bearer {KEY}"} if KEY else {}
    async with httpx2.AsyncClient(headers=headers, timeout=None) as client:

        async def work():
            for pair in todo:  # all workers share this iterator
                try:
                    await ask_both_orders(client, pair, template, args)
                except NoVerdict as error:
                    pair.error = str(error)
                keep(pair)

        await asyncio.gather(*(work() for _ in range(args.judge_concurrency)))


async def ask_both_orders(client, pair, template, args):
    """Finds the winner of a pair. The template is filled in one pass, so that braces in an answer stay as they are."""
    pair.verdicts = []
    orders = [(pair.a, pair.b), (pair.b, pair.a)] if pair.a.strip() != pair.b.strip() else []
    for first, second in orders:
        parts = {"{prompt}": pair.prompt.strip(), "{first}": first.strip(), "{second}": second.strip()}
        question = "".join(parts.get(part, part) for part in re.split(r"(\{\w+\})", template))
        reply = await ask(client, question, args)
        letter = parse_verdict(reply)
        if letter is None:
            raise NoVerdict(f"neither A nor B in the answer {reply[-100:]!r}")
        pair.verdicts.append(letter)
    # A letter is a position, so two different letters mean the same answer
    pair.winner = {("A", "B"): "a", ("B", "A"): "b"}.get(tuple(pair.verdicts), "tie")


async def ask(client, question, args):
    """The judge's reply to a question. Raises NoVerdict if all attempts fail, for any reason."""
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
                break  # a wrong key or name, which no retry corrects
            seconds = reply.headers.get("Retry-After", "")
            wait = int(seconds) if re.fullmatch("[0-9]{1,9}", seconds) else wait
        except Exception as error:  # no connection, no reply in time, or a reply of another form
            problem = hide_key(f"{type(error).__name__}: {error}")
        if attempt < args.judge_retries:
            await asyncio.sleep(min(wait, 60))
    raise NoVerdict(problem)


def hide_key(text):
    """Removes the key from a server's text: some servers repeat it."""
    return text.replace(KEY, "***") if KEY else text


# These words, and punctuation, may precede the letter in a line: "The better response is **B**."
FILLERS = (
    "the response text answer option summary completion verdict winner choice better best one is would be with "
    "i d my think prefer choose pick select go json"
)
OPENING = rf"(?i:[\W_]|\b(?:{FILLERS.replace(' ', '|')})(?=[\W_]))*"
# This may follow it: "B", "A. It is shorter", "A because it ends", "A is clearly better". But not "A or B", "A film".
ENDING = r"(?=[\W_]*$|[\W_]*(?:[.,;–—-]|:(?!.*\b[AB]\b\W*:))|\W+(?:because|since|wins|is (?:\w+ly )?(?:the )?(?:better|best))\b)"  # noqa: E501
VERDICT = rf"{OPENING}(?<![^\W_])([AB]|[ab](?=[\W_]*$)){ENDING}"


def parse_verdict(answer):
    """The letter at the start of the reply's first or last line. None if there is none, if the two lines have different
    letters, or if the reply ends inside <think>."""
    lines = re.sub(r"(?s)<think>.*", "", answer.rpartition("</think>")[2]).strip("` \n").splitlines()
    matches = [re.match(VERDICT, line[:300]) for line in lines[:1] + lines[-1:]]
    letters = {match[1].upper() for match in matches if match}
    return letters.pop() if len(letters) == 1 else None


# --- 3. Count ---------------------------------------------------------------------------------------------------------


def wilson_interval(wins, n):
    """95 % bounds of a share, from `wins` of n: the roots in p of (wins / n - p)^2 = z^2 p (1 - p) / n, z = 1.96."""
    if n == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf(0.975)
    share, shrink = wins / n, 1 + z * z / n
    center = (share + z * z / (2 * n)) / shrink
    half = z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5 / shrink
    return max(0.0, min(share, center - half)), min(1.0, max(share, center + half))  # center +- half, unless rounded


def win_rate(pairs, suffix=""):
    """Side A's share of wins, with a tie as half a win, and its interval, over the judged pairs."""
    points = [{"a": 1.0, "tie": 0.5, "b": 0.0}[pair.winner] for pair in pairs if pair.winner]
    low, high = wilson_interval(sum(points), len(points))
    rate = statistics.fmean(points) if points else None
    return {f"win_rate{suffix}": rate, f"win_rate{suffix}_low": low, f"win_rate{suffix}_high": high}


def summarize(pairs):
    """The numbers of compare.json."""
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
    verdicts = [pair.verdicts for pair in pairs if pair.winner and pair.verdicts]
    if verdicts:
        summary["order_disagreement"] = statistics.fmean(forward == swapped for forward, swapped in verdicts)
        summary["first_shown_won"] = statistics.fmean(letter == "A" for letters in verdicts for letter in letters)
    errors = [pair.error for pair in pairs if pair.error]
    if errors:
        summary["last_error"] = errors[-1]
    return summary


def report(pairs, summary, args):
    """Prints three pairs and the numbers; exits with code 1 if no pair was judged."""
    if summary["unjudged"] == len(pairs):
        sys.exit(f"error: none of {len(pairs)} pairs was judged: {summary['last_error']}")
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


def main():
    """Compares with the settings of the command line."""
    args = read_command_line(Args, __doc__.splitlines()[0])
    configure()
    compare(args)


if __name__ == "__main__":
    main()
