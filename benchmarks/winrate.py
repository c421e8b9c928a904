# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.23.0",
#     "datasets==5.2.0",
#     "tyro==1.0.17",
#     "matplotlib==3.11.2",
#     "rich==15.0.0",
#     "tqdm==4.70.1",
# ]
# ///
"""Win rate: how often are the responses of one policy preferred to those of another, or to reference texts?

  1. sample     side A, and side B unless its texts are given, answer the same prompts once, nearly greedily
  2. judge      pair by pair: the higher reward wins, or a language model is asked which response is better
  3. count      win rate = (wins + ties / 2) / judged pairs

What is measured is the judge's taste on these prompts. A reward that a policy was trained on flatters that policy; let
another one judge, or a language model (Stiennon et al. 2020, arXiv 2009.01325, fig. 5).

Why positions are swapped: language models favour the response shown first, or second, whatever it says (Zheng et al.
2023, 2306.05685, sec. 3.3-3.4). So every pair is asked in both orders. Only a response that is chosen in both places
wins; a judge that sticks to a place has found no difference, and that is a tie:

  a shown first, b second   judge says  A   A   B   B
  b shown first, a second   judge says  B   A   B   A
                            winner      a  tie tie  b

How often that happens is reported as `order_disagreement`. Two equal texts are a tie that nobody is asked about.

The interval is Wilson's (1927, "Probable inference, the law of succession, and statistical inference", JASA 22): all
win rates p that a score test at the 5 % level does not reject, |p_observed - p| <= 1.96 sqrt(p (1 - p) / n). It stays
within 0 and 1 and is right for few pairs too. Ties, as halves, vary less than a coin: with many of them it is too wide.
It speaks of other prompts of the same kind, not of other seeds of training.

Judges like length (Dubois et al. 2024, 2404.04475), so both lengths are given, and the win rate among pairs where A is
not the longer one, in characters. A high win rate that is gone there was bought with length.

  python benchmarks/winrate.py --model runs/my-ppo --other toy/sft --reward-fn toy/make.py:gold_score
  OPENAI_API_KEY=... python benchmarks/winrate.py --model ./ppo --dataset tldr.jsonl --reference-column completion \\
      --judge-url https://api.openai.com/v1 --judge-model gpt-4o-mini

It leaves pairs.jsonl (one line a pair, written as it is judged), winrate.json and winrate.png.
"""

import http.client
import importlib.util
import json
import os
import re
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig
from transformers.utils import logging
from tyro.conf import arg

# ---------------------------------------------------------------------------------------------------------------------
# Arguments


@dataclass
class Args:
    # --- Run
    output_dir: str | None = None
    """where everything goes; by default a new folder runs/winrate__TIME"""
    seed: int = 1
    """seed of the sampling of A; that of B is one higher, or a policy would equal itself at any temperature"""
    device: str | None = None
    """cpu, cuda, mps; by default the best there is"""
    bf16: bool = False
    """run the models under bfloat16 autocast; weights stay float32"""

    # --- The two sides: a folder, or a name on the hub
    model: Annotated[str, arg(aliases=["--model-name-or-path"])] = "toy/sft"
    """side A, the policy that is judged"""
    other: str | None = None
    """side B, a second policy; or else --reference-column"""
    reference_column: str | None = None
    """side B, a column of texts, such as completions that people wrote; they count as ended"""
    trust_remote_code: bool = False
    """run Python code that comes with a model; leave it off unless you have read that code"""
    attn_implementation: str | None = None
    """eager, sdpa, flash_attention_2, ...; by default what transformers takes for the model"""

    # --- Data
    dataset: Annotated[str, arg(aliases=["--dataset-name"])] = "toy/data/prompts"
    """folder, file (jsonl, csv, parquet) or hub name of the prompts"""
    dataset_config: Annotated[str | None, arg(aliases=["--dataset-config-name"])] = None
    """configuration of a hub dataset that has several"""
    dataset_split: str = "validation"
    """split to take prompts from; one that neither policy was trained on"""
    prompt_column: Annotated[str, arg(aliases=["--dataset-text-field"])] = "prompt"
    """column of prompts: texts, or lists of {role, content}, which go through each policy's chat template"""
    num_prompts: int = 1000
    """the first so many prompts are taken (or all there are); 1000 make an interval of +- 3 points"""

    # --- Sampling: nothing else shapes the samples, whatever generation settings a checkpoint comes with
    response_length: int = 53
    """most tokens in a response (TRL 0.16, from the TL;DR task); take what the policies were trained with"""
    temperature: float = 0.01
    """logits are divided by this (TRL evaluates at 0.01); 0 takes the likeliest token"""
    batch_size: int = 64
    """responses sampled, or scored, at once; changes memory and speed"""

    # --- Judge: one of the first three
    reward_model: Annotated[str | None, arg(aliases=["--reward-model-path"])] = None
    """a sequence classifier with one label; the higher reward wins"""
    reward_label: str | None = None
    """the label whose logit is the reward, for a classifier that has several"""
    reward_fn: str | None = None
    """file.py:name, a function from a list of texts to a list of floats; the higher one wins"""
    judge_url: str | None = None
    """address of an OpenAI-compatible API, http://.../v1; its key is read from the environment's OPENAI_API_KEY only"""
    judge_model: str | None = None
    """name of the judge at that address"""
    judge_template: str | None = None
    """file with the question for the judge, with {prompt}, {first} and {second}; it should ask for A (first) or B"""
    judge_timeout: float = 60.0
    """seconds that the judge may be silent before a request has failed"""
    judge_retries: int = 3
    """further attempts after a failed request, after 1, 2, 4 ... seconds; then the pair counts as not judged"""
    judge_concurrency: int = 8
    """pairs that the judge is asked about at the same time"""


# ---------------------------------------------------------------------------------------------------------------------
# 1. Sample


@dataclass
class Response:
    """What one side says to one prompt."""

    text: str
    tokens: int  # with the stop token, in the tokens of the side's own tokenizer
    ended: bool  # whether there is a stop token


@dataclass
class Side:
    """A policy with its tokenizer, and the prompts in its tokens."""

    name: str
    policy: nn.Module
    tokenizer: AutoTokenizer
    prompts: list[list[int]]


def response_mask(responses: Tensor, stop_token_id: int | None) -> tuple[Tensor, Tensor]:
    """(B, T) true up to and including the first stop token, and (B,) whether there is one.

    Made from positions, so that it is right where the padding token is the stop token. With stop token 0:
        responses [[5, 0, 7, 0], [5, 6, 7, 8]]  ->  mask [[1, 1, 0, 0], [1, 1, 1, 1]], ended [1, 0]
    """
    is_stop = torch.zeros_like(responses) if stop_token_id is None else (responses == stop_token_id).long()
    return is_stop.cumsum(1) - is_stop == 0, is_stop.any(1)


def generation_config(tokenizer: AutoTokenizer, args: Args) -> GenerationConfig:
    """softmax(logits / temperature) up to EOS, or the likeliest tokens at temperature 0; no top-k, no top-p."""
    sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        max_new_tokens=args.response_length, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        **(sampling if args.temperature > 0 else {"do_sample": False}),
    )  # fmt: skip


def continuation(tokenizer: AutoTokenizer, prompt: list[int], response: list[int]) -> str:
    """The text that a response adds to its prompt. Decoded in one: some tokenizers drop the blank of a first word."""
    start, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + response))
    return whole[len(start) :] if whole.startswith(start) else tokenizer.decode(response, skip_special_tokens=True)


@torch.no_grad()
def respond(side: Side, seed: int, args: Args, device: torch.device) -> list[Response]:
    """One response to each prompt, `batch_size` at a time. The policy is on the device for as long as it is needed."""
    torch.manual_seed(seed)
    policy, tokenizer, responses = side.policy.to(device), side.tokenizer, []
    policy.generation_config = GenerationConfig()  # generate() fills gaps in ours from it, and it is the checkpoint's
    config = generation_config(tokenizer, args)
    for i in tqdm(range(0, len(side.prompts), args.batch_size), desc=f"sampling {side.name}", dynamic_ncols=True):
        rows = side.prompts[i : i + args.batch_size]
        ids, mask = pad(rows, tokenizer.pad_token_id, device, left=True)
        with autocast(args, device):
            output = policy.generate(ids, attention_mask=mask, generation_config=config)[:, ids.shape[1] :]  # (B, T)
        is_real, ended = response_mask(output, tokenizer.eos_token_id)
        for prompt, response, real, end in zip(rows, output, is_real, ended.tolist()):
            tokens = response[real].tolist()
            responses.append(Response(continuation(tokenizer, prompt, tokens), len(tokens), end))
    policy.to("cpu")
    return responses


# ---------------------------------------------------------------------------------------------------------------------
# 2. Judge


@dataclass
class Pair:
    """Both responses to a prompt, and what the judge makes of them."""

    row: int
    prompt: str
    a: Response
    b: Response
    winner: str | None = None  # "a", "b", "tie"; None where the judge gave no answer
    scores: tuple[float, float] | None = None  # of a and b, from a reward
    verdicts: list[str] | None = None  # letters, first for a shown first, then for b shown first
    error: str | None = None  # why there is no winner

    def line(self) -> str:
        """The pair as a line of pairs.jsonl."""
        known = {"row": self.row, "prompt": self.prompt, "a": self.a.text, "b": self.b.text, "winner": self.winner}
        if self.scores is not None:
            known |= dict(zip(("score_a", "score_b"), self.scores))
        else:
            known |= {"verdicts": self.verdicts, "error": self.error}
        for side, response in (("a", self.a), ("b", self.b)):
            known |= {f"tokens_{side}": response.tokens, f"ended_{side}": response.ended}
        return json.dumps(known) + "\n"


def read_reward(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, labels) output of a sequence classifier's head at the last real token, found from the attention mask (B, S).

    The library's own pooling looks for the last token that is not the pad token: where padding and EOS are one token,
    it reads the token before EOS. A classifier that pools elsewhere (BERT's first token, say) has no `score` head over
    a causal body; its own logits are taken.
    """
    if not hasattr(model, "score"):
        return model(input_ids=input_ids, attention_mask=attention_mask).logits.float()
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False
    ).last_hidden_state  # (B, S, D)
    last = (attention_mask * torch.arange(attention_mask.shape[1], device=input_ids.device)).argmax(1)  # (B,)
    rewards = model.score(hidden[torch.arange(len(last), device=last.device), last]).float()
    return rewards + getattr(model.config, "reward_bias", 0.0)


def judge_by_score(pairs: list[Pair], score: Callable[[list[str], Tensor], Tensor], batch_size: int) -> Iterator[Pair]:
    """The pairs, each with the winner by score. Equal texts are scored once: rounding must not make one of them win."""
    for i in range(0, len(pairs), batch_size):
        batch = pairs[i : i + batch_size]
        texts = [[(p.prompt + r.text, r.ended) for r in (p.a, p.b)] for p in batch]
        unique = list(dict.fromkeys(key for both in texts for key in both))
        scores = score([text for text, _ in unique], torch.tensor([ended for _, ended in unique])).tolist()
        score_of = dict(zip(unique, scores))
        for pair, (a, b) in zip(batch, texts):
            pair.scores = score_of[a], score_of[b]
            pair.winner = "a" if score_of[a] > score_of[b] else "b" if score_of[a] < score_of[b] else "tie"
            yield pair


JUDGE_TEMPLATE = """Two responses to the same prompt follow. Which one is better: more correct, more to the
point, better written? Length is no merit in itself, nor is the place where a response is shown.

--- Prompt
{prompt}

--- Response A
{first}

--- Response B
{second}

--- End
Answer with one letter and nothing else, A or B."""


# Where a judge says more than a letter: a statement ("Answer: B", "the winner is A", "I prefer response A"), a
# comparison ("A is clearly better"), or a first or last line that opens with the letter ("B. It is shorter.").
LINK = r"(?:[\s:=–—-]|\b(?:the|response|text|answer|option|summary|completion|one|is|would|be|with)\b)*"
STATED = (
    r"(?i:\b(?:answer|verdict|winner|choice|preference|better|best)\s*(?:response|text|option|one)?\s*"
    rf"(?:[:=–—-]|is\b|would\b){LINK}|\b(?:prefer|choose|pick|select|go)\b{LINK})"
    r"\b([AB]|[ab](?=\W*$))\b(?!\s*(?:/|,?\s*(?:or|and)\b))"
)
BETTER = r"\b([AB])\W+(?:wins\b|(?:is|was)\s+(?:(?!no)\w+\s+){0,2}(?:better|best|prefer(?:able|red)|superior)\b)"
OPENING = rf"(?i:{LINK})\b([AB])(?:\s*(?:$|[.,:;–—-])|\s+(?:because|since)\b)"


def parse_verdict(answer: str) -> str | None:
    """The letter that a judge answers with, "A" or "B"; None where it names none, or both, or stops while thinking."""
    text = re.sub(r"(?s)<think>.*", "", answer.rpartition("</think>")[2])
    text = re.sub(r"[*_\"'`()\[\]{}]+", ":", text).strip(": \n")  # **A**, (A) and "A" stand apart from the article a
    if re.fullmatch(r"[ABab][\s.:]*", text):
        return text[0].upper()
    if said := re.findall(STATED, text) or re.findall(BETTER, text):
        return said[-1].upper()
    lines = text.splitlines()
    letters = {match[1] for line in lines[:1] + lines[-1:] if (match := re.match(OPENING, line))}
    return letters.pop() if len(letters) == 1 else None


def combine_verdicts(forward: str | None, swapped: str | None) -> str | None:
    """The winner, "a", "b" or "tie", from the letters given with a shown first and with b shown first.

    Letters are places, so different letters mean the same response. None where either order got no answer.
    """
    if forward is None or swapped is None:
        return None
    return "tie" if forward == swapped else "a" if forward == "A" else "b"


def fill_template(template: str, prompt: str, first: str, second: str) -> str:
    """The question for the judge. Filled in one pass: a response that contains "{second}" is shown as it is."""
    fields = {"prompt": prompt, "first": first, "second": second}
    return re.sub(r"\{(prompt|first|second)\}", lambda match: fields[match[1]].strip(), template)


def api_key() -> str:
    """The key for the judge, or "" where it needs none. It is asked for where it is used, and kept nowhere."""
    return os.environ.get("OPENAI_API_KEY", "").strip()


def hide_key(text: str) -> str:
    """Text from outside without the key, which some servers repeat in their error messages."""
    return text.replace(api_key(), "***") if api_key() else text


def ask(question: str, args: Args) -> tuple[str | None, str | None]:
    """The judge's answer to one question, or None and the reason after the last attempt."""
    url = args.judge_url.rstrip("/") + "/chat/completions"
    body = {"model": args.judge_model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    if api_key():
        request.add_unredirected_header("Authorization", f"Bearer {api_key()}")  # not for whom a redirect points to
    for attempt in range(args.judge_retries + 1):
        wait = min(2**attempt, 60)
        try:
            with urllib.request.urlopen(request, timeout=args.judge_timeout) as reply:
                return str(json.loads(reply.read(2**22))["choices"][0]["message"]["content"] or ""), None
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}: {read_error(error)}"
            if 400 <= error.code < 500 and error.code not in (408, 429):
                break  # a wrong key or name stays wrong
            asked = error.headers.get("Retry-After") or ""
            wait = min(int(asked), 60) if asked.isdecimal() else wait
        except (OSError, http.client.HTTPException) as error:  # no connection, no reply in time, half a reply
            reason = f"{type(error).__name__}: {error}"
        except (ValueError, LookupError, TypeError) as error:  # a reply, but not of this form
            reason = f"a reply that is no chat completion ({type(error).__name__}: {error})"
        if attempt < args.judge_retries:
            time.sleep(wait)
    return None, hide_key(reason)


def read_error(error: urllib.error.HTTPError) -> str:
    """What the server says of its error, on one line and not at length."""
    try:
        return hide_key(" ".join(error.read(2**16).decode(errors="replace").split()))[:200]
    except (OSError, http.client.HTTPException) as reason:
        return f"({type(reason).__name__})"


def ask_both_orders(pair: Pair, template: str, args: Args) -> Pair:
    """The pair with its verdicts and winner. After a question without answer the other order is not asked."""
    if pair.a.text.strip() == pair.b.text.strip():
        pair.winner = "tie"
        return pair
    pair.verdicts = []
    for first, second in ((pair.a, pair.b), (pair.b, pair.a)):
        answer, pair.error = ask(fill_template(template, pair.prompt, first.text, second.text), args)
        verdict = None if answer is None else parse_verdict(answer)
        if verdict is None:
            pair.error = pair.error or f"neither A nor B in the answer {hide_key(answer)[-100:]!r}"
            return pair
        pair.verdicts.append(verdict)
    pair.winner = combine_verdicts(*pair.verdicts)
    return pair


def judge_by_model(pairs: list[Pair], template: str, args: Args) -> Iterator[Pair]:
    """The pairs as they are judged, `judge_concurrency` at a time, in no order."""
    pool, warned = ThreadPoolExecutor(args.judge_concurrency), False
    try:
        for future in as_completed([pool.submit(ask_both_orders, pair, template, args) for pair in pairs]):
            pair = future.result()
            if pair.error and not warned:  # now, and not after an hour in which nobody answers
                tqdm.write(f"warning: the judge left a pair open, the run goes on: {printable(pair.error)}", sys.stderr)
                warned = True
            yield pair
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------------------
# 3. Count


def wilson_interval(wins: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Bounds of a share of which `wins` of n were seen (Wilson 1927); 8 of 10 -> 0.490, 0.943. Nothing seen: 0 to 1.

    The roots in p of (wins / n - p)^2 = z^2 p (1 - p) / n, where z is 1.96 for 95 %.
    """
    if n == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    share, shrink = wins / n, 1 + z * z / n
    center = (share + z * z / (2 * n)) / shrink
    half = z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5 / shrink
    return max(0.0, min(share, center - half)), min(1.0, max(share, center + half))  # but for rounding, center +- half


def win_rate(pairs: list[Pair], suffix: str = "") -> dict:
    """Side A's share of wins, ties as halves, with its interval, over the pairs that have a winner."""
    points = [{"a": 1.0, "tie": 0.5, "b": 0.0}[pair.winner] for pair in pairs if pair.winner]
    low, high = wilson_interval(sum(points), len(points))
    rate = sum(points) / len(points) if points else None
    return {f"win_rate{suffix}": rate, f"win_rate{suffix}_low": low, f"win_rate{suffix}_high": high}


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """Mean, and its standard error s / sqrt(n), which a single value does not have."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.fmean(values), error


def summarize(pairs: list[Pair]) -> dict:
    """All that winrate.json says of the pairs, as one flat table of names and numbers."""
    counts = {name: sum(p.winner == winner for p in pairs) for name, winner in
              (("wins", "a"), ("ties", "tie"), ("losses", "b"), ("unjudged", None))}  # fmt: skip
    summary = {"pairs": len(pairs), **counts, **win_rate(pairs)}
    for side in "ab":
        responses = [getattr(p, side) for p in pairs]
        summary[f"tokens_{side}"] = statistics.fmean(r.tokens for r in responses)
        summary[f"characters_{side}"] = statistics.fmean(len(r.text) for r in responses)
        summary[f"eos_share_{side}"] = statistics.fmean(r.ended for r in responses)
    not_longer = [p for p in pairs if p.winner and len(p.a.text) <= len(p.b.text)]
    summary |= {"pairs_a_not_longer": len(not_longer), **win_rate(not_longer, "_a_not_longer")}
    if scored := [p.scores for p in pairs if p.scores]:
        summary["score_a"], summary["score_b"] = (statistics.fmean(scores) for scores in zip(*scored))
        summary["score_difference"], summary["score_difference_error"] = mean_and_error([a - b for a, b in scored])
    if asked := [p.verdicts for p in pairs if p.verdicts and p.winner]:
        summary["order_disagreement"] = statistics.fmean(forward == swapped for forward, swapped in asked)
        summary["first_shown_won"] = statistics.fmean(letter == "A" for verdicts in asked for letter in verdicts)
    if counts["unjudged"]:
        summary["last_error"] = next(p.error for p in reversed(pairs) if p.winner is None)
    return summary


# ---------------------------------------------------------------------------------------------------------------------
# The comparison


def compare(args: Args) -> None:
    """Both sides answer every prompt, the judge looks at pair after pair, and the wins are counted."""
    device = start_comparison(args)
    prompts, references = load_rows(args)
    a = load_side("A", args.model, prompts, args)
    b = load_side("B", args.other, prompts, args) if references is None else None
    judge = make_judge(args, device)  # what can be wrong with the input is known from here on
    file = open_pairs(args)

    answers_a = respond(a, args.seed, args, device)  # 1
    answers_b = respond(b, args.seed + 1, args, device) if b else as_responses(references, a.tokenizer)
    texts = prompt_texts(prompts, a)
    pairs = [Pair(row, *parts) for row, parts in enumerate(zip(texts, answers_a, answers_b))]

    judged = []
    with file:
        for pair in tqdm(judge(pairs), "judging", len(pairs), dynamic_ncols=True):  # 2
            judged.append(pair)
            file.write(pair.line())
            file.flush()
    report(judged, summarize(judged), args)  # 3


def report(pairs: list[Pair], summary: dict, args: Args) -> None:
    """winrate.json, winrate.png and the tables; exit code 1 where not one pair was judged."""
    output = Path(args.output_dir)
    (output / "winrate.json").write_text(json.dumps(summary | {"args": asdict(args)}, indent=2) + "\n")
    unjudged, count = summary["unjudged"], summary["pairs"]
    if unjudged == count:
        sys.exit(f"winrate.py: not one of {count} pairs was judged; the last error: {printable(summary['last_error'])}")
    first = sorted(pairs, key=lambda pair: pair.row)[:3]
    why = [", ".join(f"{x:.2f}" for x in p.scores) if p.scores else " then ".join(p.verdicts or []) for p in first]
    rows = [[p.prompt, p.a.text, p.b.text, f"{p.winner or 'unjudged'} {w}"] for p, w in zip(first, why)]
    print_table("the first pairs", ["prompt", "A", "B", "winner"], rows)
    print_table("win rate", ["", "A", "B"], summary_rows(summary, args))
    if unjudged:
        print(f"{unjudged} of {count} pairs were not judged and do not count; the last error: "
              f"{printable(summary['last_error'])}")  # fmt: skip
    draw_summary(output, summary)
    print(f"saved in {output}: pairs.jsonl, winrate.json and winrate.png")


def summary_rows(s: dict, args: Args) -> list[list[str]]:
    """The summary as a table of two columns: side A with its figures, and side B with its own."""

    def share(x: float | None) -> str:
        return "-" if x is None else f"{100 * x:.1f} %"

    def rate(suffix: str) -> list[str]:
        rate, low, high = (s[f"win_rate{suffix}{end}"] for end in ("", "_low", "_high"))
        if rate is None:
            return ["-", "-"]
        return [f"{share(x)} [{100 * lo:.1f}, {100 * hi:.1f}]" for x, lo, hi in
                ((rate, low, high), (1 - rate, 1 - high, 1 - low))]  # fmt: skip

    rows = [
        ["side", args.model, args.other or f"column {args.reference_column}"],
        ["win rate, ties half [95 %]", *rate("")],
        ["wins", str(s["wins"]), str(s["losses"])],
        ["ties", str(s["ties"]), str(s["ties"])],
        [f"where A is not longer ({s['pairs_a_not_longer']} pairs)", *rate("_a_not_longer")],
        ["tokens, characters", *(f"{s[f'tokens_{x}']:.1f}, {s[f'characters_{x}']:.1f}" for x in "ab")],
        ["ends with EOS", share(s["eos_share_a"]), share(s["eos_share_b"])],
    ]
    if "score_a" in s:
        error = "" if s["score_difference_error"] is None else f" ± {s['score_difference_error']:.3f}"
        rows.append(["mean score", f"{s['score_a']:.3f}", f"{s['score_b']:.3f}"])
        rows.append(["score of A - B, with standard error", f"{s['score_difference']:+.3f}{error}", ""])
    if "first_shown_won" in s:
        rows.append(["judge: the two orders disagree", share(s["order_disagreement"]), ""])
        rows.append(["judge: the first shown won", share(s["first_shown_won"]), ""])
    return rows


def draw_summary(output: Path, summary: dict) -> None:
    """winrate.png: wins, ties and losses as one bar, the win rate with its interval below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 1.9), layout="constrained")
    counts = [summary[name] for name in ("wins", "ties", "losses")]
    left = 0.0
    for label, count, color in zip(("A wins", "tie", "B wins"), counts, ("#3b6fb6", "#cccccc", "#d08a3e")):
        axis.barh(1, count / sum(counts), left=left, color=color, height=0.6, label=f"{label} ({count})")
        left += count / sum(counts)
    rate = summary["win_rate"]
    errors = [[rate - summary["win_rate_low"]], [summary["win_rate_high"] - rate]]
    axis.errorbar([rate], [0.3], xerr=errors, fmt="o", color="black", capsize=4)
    axis.axvline(0.5, color="black", linewidth=0.8, linestyle=":")
    axis.set(xlim=(0, 1), ylim=(0, 1.4), yticks=[], xlabel="win rate of A, ties half, with its 95 % interval")
    axis.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(output / "winrate.png", dpi=120)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments, prompts and models


def check_args(args: Args) -> None:
    """Sides and judge that no comparison can have."""
    judges = [flag for flag, value in (("--reward-model", args.reward_model), ("--reward-fn", args.reward_fn),
                                       ("--judge-url", args.judge_url)) if value]  # fmt: skip
    found = f"it has {' and '.join(judges) or 'none'}"
    require(len(judges) == 1, f"a comparison needs one judge: --reward-model, --reward-fn or --judge-url; {found}")
    given = "both are" if args.other else "neither is"
    wanted = "either --other, a second policy, or --reference-column, a column of texts"
    require(bool(args.other) != bool(args.reference_column), f"side B is {wanted}; {given} given")
    require(bool(args.judge_url) == bool(args.judge_model), "--judge-url and --judge-model go together; one is missing")
    positive = "response_length batch_size num_prompts judge_timeout judge_concurrency"
    check_numbers(args, positive, natural="temperature judge_retries")
    if args.judge_url:
        check_url(args.judge_url)


def check_url(url: str) -> None:
    """An http(s) address with no secret in it; the sentence does not repeat one that may have."""
    has_secret = "@" in url or "?" in url
    require(not has_secret, "--judge-url holds a user, a password or a query; a key goes into OPENAI_API_KEY alone")
    is_http = re.fullmatch(r"https?://[^/\s]+(/\S*)?", url)  # and not file://, which urllib would read
    require(is_http, f"--judge-url {url!r} must be an address such as http://localhost:8000/v1")
    is_key = api_key().isascii() and api_key().isprintable()
    require(is_key, "OPENAI_API_KEY holds characters that no key has; copy it again")


def start_comparison(args: Args) -> torch.device:
    """Checks the arguments, names args.output_dir, picks the device; raises UserError where a result already is."""
    check_args(args)
    logging.set_verbosity_error(), logging.disable_progress_bar()
    args.output_dir = args.output_dir or f"runs/winrate__{time.strftime('%Y%m%d-%H%M%S')}"
    is_used = (Path(args.output_dir) / "pairs.jsonl").exists()
    require(not is_used, f"--output-dir {args.output_dir} already holds pairs.jsonl; name another, or remove it")
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=args.device or best).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {args.device} cannot be used on this machine; leave it out to use {best}") from error


def open_pairs(args: Args):
    """pairs.jsonl in args.output_dir, which is made here: a run that failed before this point leaves nothing."""
    try:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        return open(Path(args.output_dir) / "pairs.jsonl", "w")
    except OSError as error:
        raise UserError(f"--output-dir {args.output_dir} cannot be written: {error.strerror}") from error


def load_rows(args: Args) -> tuple[list[str] | list[list[dict]], list[str] | None]:
    """The first `num_prompts` prompts, and the reference texts where they are side B."""
    data = load_split(args.dataset, args.dataset_config, args.dataset_split)
    data = data.select(range(min(args.num_prompts, len(data))))
    prompts = read_column(data, args.prompt_column, args.dataset, "--prompt-column", (str, list))
    if args.reference_column is None:
        return prompts, None
    return prompts, read_column(data, args.reference_column, args.dataset, "--reference-column")


def encode_prompt(prompt: str | list[dict], tokenizer: AutoTokenizer) -> list[int]:  # same in all scripts
    """Token ids of a text, or of a conversation up to where the assistant is to speak."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return apply_template(prompt, tokenizer, add_generation_prompt=True)


def apply_template(messages: list[dict], tokenizer: AutoTokenizer, **options) -> list[int]:  # same in all scripts
    """Token ids of a conversation through the tokenizer's chat template."""
    require(tokenizer.chat_template, "the dataset holds messages, but the tokenizer has no chat template")
    try:
        return tokenizer.apply_chat_template(messages, return_dict=False, **options)
    except Exception as error:  # a template is a program of somebody else's
        raise UserError(f"the tokenizer's chat template refuses {messages!r}: {error}") from error


def load_side(letter: str, name: str, prompts: list[str] | list[list[dict]], args: Args) -> Side:
    """A policy on the CPU, and the prompts in its tokens; raises UserError where they and the response do not fit."""
    tokenizer = load_tokenizer(name, args.trust_remote_code)
    rows = [encode_prompt(prompt, tokenizer) for prompt in prompts]
    empty = next((i for i, row in enumerate(rows) if not row), None)
    require(empty is None, f"--dataset {args.dataset}: the prompt in row {empty} is empty; remove it")
    policy = load_weights(AutoModelForCausalLM, name, args).eval()
    is_finite = all(weight.isfinite().all() for weight in policy.parameters())
    require(is_finite, f"the weights of {name} are not finite (NaN or inf); take an earlier checkpoint")
    longest, limit = max(map(len, rows)), context_length(policy)
    require(
        longest + args.response_length <= limit,
        f"the longest prompt ({longest} tokens) and --response-length {args.response_length} make "
        f"{longest + args.response_length} tokens, but {name} has a context of {limit}; lower --response-length, or "
        "take long prompts out of the dataset",
    )
    return Side(letter, policy, tokenizer, rows)


def prompt_texts(prompts: list[str] | list[list[dict]], side: Side) -> list[str]:
    """The prompts for the judge: texts as they are, conversations as the side's chat template writes them."""
    if isinstance(prompts[0], str):
        return prompts
    return [side.tokenizer.decode(ids, skip_special_tokens=True) for ids in side.prompts]


def as_responses(texts: list[str], tokenizer: AutoTokenizer) -> list[Response]:
    """Reference texts as responses that ended, their lengths in side A's tokens."""
    has_eos = tokenizer.eos_token_id is not None
    return [Response(t, len(tokenizer(t, add_special_tokens=False)["input_ids"]) + has_eos, True) for t in texts]


def make_judge(args: Args, device: torch.device) -> Callable[[list[Pair]], Iterator[Pair]]:
    """The function from pairs to judged pairs."""
    if args.judge_url is None:
        score = make_text_scorer(args, device)
        return lambda pairs: judge_by_score(pairs, score, args.batch_size)
    template = JUDGE_TEMPLATE
    if args.judge_template is not None:
        try:
            template = (path_from_root(args.judge_template) or Path(args.judge_template)).read_text()
        except (OSError, ValueError) as error:
            raise UserError(f"--judge-template {args.judge_template} cannot be read: {error}") from error
    missing = [field for field in ("{prompt}", "{first}", "{second}") if field not in template]
    require(not missing, f"--judge-template {args.judge_template} lacks {' and '.join(missing)}; it needs all three "
                         "of {prompt}, {first} and {second}")  # fmt: skip
    return lambda pairs: judge_by_model(pairs, template, args)


def make_text_scorer(args: Args, device: torch.device) -> Callable[[list[str], Tensor], Tensor]:
    """The function from texts, and whether each ended (B,), to scores (B,)."""
    if args.reward_fn is not None:
        function = load_function(args.reward_fn)
        call_reward_function(function, ["A first text.", "And a second one."])  # a wrong function fails now, not later
        return lambda texts, ended: call_reward_function(function, texts)
    model, tokenizer = load_reward_model(args)
    model.to(device)
    label = list(model.config.id2label.values()).index(args.reward_label) if args.reward_label else 0

    @torch.no_grad()
    def score(texts: list[str], ended: Tensor) -> Tensor:
        """(B,) rewards of the reward model."""
        with autocast(args, device):
            rewards = read_reward(model, *encode_texts(texts, ended, tokenizer, model))[:, label]
        return check_scores(rewards, texts, "the reward model")

    return score


def load_reward_model(args: Args) -> tuple[nn.Module | None, AutoTokenizer | None]:
    """The reward model, frozen, and its tokenizer; (None, None) where a function gives the reward."""
    if args.reward_fn is not None:
        return None, None
    model = load_weights(AutoModelForSequenceClassification, args.reward_model, args)
    labels = list(model.config.id2label.values())
    require(
        args.reward_label in labels or (len(labels) == 1 and args.reward_label is None),
        f"the reward model {args.reward_model} has the labels {', '.join(map(str, labels))}; choose with "
        "--reward-label the one whose logit is the reward",
    )
    return model.eval().requires_grad_(False), load_tokenizer(args.reward_model, args.trust_remote_code)


def encode_texts(texts: list[str], ended: Tensor, tokenizer: AutoTokenizer, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Texts in the reward model's own tokens, (B, S) with their mask; a response that ended gets that model's EOS."""
    rows = tokenizer(texts)["input_ids"]
    if tokenizer.eos_token_id is not None and hasattr(model, "score"):
        rows = [row + [tokenizer.eos_token_id] * stop for row, stop in zip(rows, ended.tolist())]
    limit = context_length(model)
    return pad([row[-limit:] for row in rows], tokenizer.pad_token_id, model.device)


def call_reward_function(reward_fn: Callable[[list[str]], list[float]], texts: list[str]) -> Tensor:
    """(B,) scores of texts; raises UserError for a wrong number of scores or one that is not finite."""
    try:
        scores = [float(x) for x in reward_fn(texts)]
    except Exception as error:  # somebody else's code: whatever goes wrong in it, say what
        raise UserError(f"the reward function failed: {type(error).__name__}: {error}") from error
    require(
        len(scores) == len(texts),
        f"the reward function gave {len(scores)} scores for {len(texts)} texts, not one a text",
    )
    return check_scores(torch.tensor(scores), texts, "the reward function")


def check_scores(scores: Tensor, texts: list[str], source: str) -> Tensor:
    """The scores (B,) themselves; raises UserError with the text for one that is NaN or infinite."""
    bad = int(scores.isfinite().long().argmin())
    require(scores.isfinite().all(), f"{source} gave {scores[bad].item()} for the text {texts[bad]!r}")
    return scores


def path_from_root(name: str) -> Path | None:
    """The folder or file of that name, or the one under the repository's root; None where there is none."""
    return next((path for path in (Path(name), Path(__file__).resolve().parent.parent / name) if path.exists()), None)


def locate_from_root(name: str, kind: str = "model") -> str:
    """A folder or file as given, or under the root; else a name on the hub, if the hub or its cache has it."""
    if path := path_from_root(name):
        return str(path)
    from huggingface_hub import HfApi, try_to_load_from_cache

    if kind == "model" and isinstance(try_to_load_from_cache(name, "config.json"), str):
        return name
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=10)
    except Exception as error:  # no network, no such name, no permission: all end in the same advice
        raise UserError(
            f"{name!r} is neither a folder or file here nor a {kind} that the hub can be asked for "
            f"({type(error).__name__}); offline, name a local one, such as those in toy/"
        ) from error
    return name


local_path, locate = path_from_root, locate_from_root  # by these names the text that all scripts share calls them


def command_line() -> None:
    """Reads the command line and compares; a user's mistake ends in one sentence and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    try:
        compare(args)
    except UserError as error:
        print(f"{Path(__file__).name}: error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"interrupted; what was judged is in {args.output_dir}", file=sys.stderr, flush=True)
        os._exit(130)  # a thread that waits for the judge would hold the process until it answers


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing that stands in every script, word for word


class UserError(Exception):
    """A mistake in the input: shown as one sentence, exit code 2, no traceback."""


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


def autocast(args: Args, device: torch.device) -> torch.autocast:  # same in all scripts
    """bfloat16 where --bf16 asks for it; weights, losses and everything after the logits stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)


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


if __name__ == "__main__":
    command_line()
