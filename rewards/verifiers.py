"""Reward functions that check an answer by a rule ("verifiable rewards"), as for reasoning models.

    python grpo.py --dataset problems.jsonl --reward-fn rewards/verifiers.py:right_number rewards/verifiers.py:tagged

They have the signature of TRL's reward functions, f(prompts, completions, **columns): they get lists of texts or
messages, and each column of the dataset by its name, and return one number per row. They compare texts as a reader sees
them (`as_seen`). A model's text is never run: Python's parser reads an expression, and only + - * / of integers are
computed, so `9**9**9` or a call takes no time and earns 0.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from unicodedata import category, normalize

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 200  # characters of a number or an expression that are read
ENDS = ".!?…‼⁇⁈⁉‽。｡．！？।॥။។៕።፧։᠃᱾᱿\u061f\u06d4"  # of a sentence; the last two are Arabic
QUOTES = "\"'”“’»›」』）】)\\]"  # that close
CJK = "\u3040-\u30ff\u3400-\u9fff"  # Japanese and Chinese
THAI = "\u0e00-\u0fff"  # and Lao and Tibetan: their sentences end without a mark
UNSPACED = CJK + THAI + "\u1000-\u109f\u1780-\u17ff"  # and Burmese and Khmer: no spaces between words


def as_seen(text: str) -> str:
    """The text as a reader sees it: composed (NFC), without format characters (Cf), with one kind of space."""
    seen = {"Cf": "", "Zs": " "}  # such as U+200B; such as U+00A0
    text = re.sub(r"[^\x00-\x7f]", lambda char: seen.get(category(char[0]), char[0]), text)
    return normalize("NFC", text).strip()


def text_of(completion: str | list[dict]) -> str:
    """A completion as a text, as a reader sees it; of messages, their contents."""
    texts = [completion] if isinstance(completion, str) else [message["content"] or "" for message in completion]
    return as_seen("".join(texts))


def right_answers(answer: object) -> list[str]:
    """The right texts: any entry of a list, nested or not; none for None or NaN; `true` or `True` for JSON's true."""
    if isinstance(answer, list):
        return [text for part in answer for text in right_answers(part)]
    texts = [] if answer is None or answer != answer else [as_seen(str(answer))]
    if isinstance(answer, bool):
        texts.append(str(answer).lower())
    if isinstance(answer, float) and answer.is_integer():
        texts.append(str(int(answer)))  # a gap makes the integers of a column floats
    return texts


def compare(given: Iterable, right: Iterable) -> list[float | None]:
    """1 where what is given is among what is right, else 0; None where nothing is."""
    return [float(x in those) if those else None for x, those in zip(given, right, strict=True)]


def exact_match(completions: list, answer: list, **_) -> list[float | None]:
    """1 if a reader sees the text in the column `answer`, or one of several in a list, else 0; None without one."""
    return compare(map(text_of, completions), map(right_answers, answer))


# ---------------------------------------------------------------------------------------------------------------------
# A number


def final_answer(text: str) -> str | None:
    r"""The text after the last `####`, up to the end of its line (GSM8K), or the content of the last `\boxed{}` (MATH).

    If there are both, the later one counts. None if there is neither, or if the last brace is not closed.
    """
    hashes, box = text.rfind("####"), text.rfind("\\boxed{")
    if hashes > box:
        return text[hashes + 4 :].strip().partition("\n")[0]
    start, depth = box + len("\\boxed{"), 1
    for end in range(start, len(text)) if box >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


PLAIN = str.maketrans("−‐‑–－＋／．％＄\u066b\u066c\u066a", "-----+/.%$.,%")  # the last three are Arabic
NUMBER = re.compile(
    r"""
    (\\?\$\s*)? [+-]? \s* (\\?\$\s*)?                    # $7, -$7 or $-7
    ( \d* | [1-9]\d{0,2} ((,|\{,\}|,?\\[,!;])\d{3})+ )     # 1234, or 1,234 with a comma as in texts or in LaTeX
    ( (?<=\d) \s*/\s* 0*[1-9]\d*                         # over a whole number,
    | (\.\d+)? (?<=\d) ([eE][+-]?\d{1,3})? )             # or with decimals, and times a power of 10
    \s* (\\?[$%])?
    """,
    re.ASCII | re.VERBOSE,
)


def in_plain_signs(text: str) -> str:
    """The text with ASCII's digits and signs, and a/b for LaTeX's fractions."""
    text = re.sub(r"(?![0-9])\d", lambda digit: str(int(digit[0])), text.translate(PLAIN))
    text = re.sub(r"(?<![+-])(?=\\[dt]?frac)", " ", text)  # 1\frac{1}{2} is not 11/2
    return re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", text)


def read_number(text: str) -> Fraction | None:
    r"""1,234.50 or $7 or 50% (as 50) or -3/4 or \frac{3}{4} or 1e-05 as an exact number.

    None for other texts, such as `1 2`, 1\frac{1}{2}, 1.234,5 or 1e9999, and for more than LONGEST characters. A comma
    and the end of a sentence are left out, but not `!`: 4! is 24.
    """
    text = in_plain_signs(text.strip().rstrip(ENDS.replace("!", "") + ",，、\u060c"))
    if len(text) > LONGEST:
        return None
    return Fraction(re.sub(r"[^\d./eE+-]", "", text)) if NUMBER.fullmatch(text) else None


def right_numbers(answer: object) -> set[Fraction]:
    """The numbers among the right answers. As in the usual datasets, a text may give one as a final answer."""
    return {read_number(final_answer(text) or text) for text in right_answers(answer)} - {None}


def right_number(completions: list, answer: list, **_) -> list[float | None]:
    """1 if the final answer is the number in the column `answer`, or one of several in a list, else 0; None without."""
    given = [read_number(final_answer(text_of(completion)) or "") for completion in completions]
    return compare(given, map(right_numbers, answer))


LAST = re.compile(
    r"(?<!\d)(?<!\d\$)[+-]?(?:\\?\$)?(?:\d(?:\{,\}|\\[,!;](?=\d{3})|[\d,])*)?\.?\d+(?:[eE][+-]?\d+)?(?: ?/ ?\d+)?",
    re.ASCII,
)


def last_number(completions: list, answer: list, **_) -> list[float | None]:
    """1 if the last number in the text is that in the column `answer`, else 0. None for a row without a number there.

    For models that were not trained on a form such as `#### 72`: "18 + 17 = 35." is read as 35.
    """
    texts = [in_plain_signs(text_of(completion)) for completion in completions]
    return compare([read_number(["", *LAST.findall(text)][-1]) for text in texts], map(right_numbers, answer))


# ---------------------------------------------------------------------------------------------------------------------
# Countdown: reach a target with given numbers, each used once


def work_out(expression: str, signs: bool = False) -> tuple[Fraction | None, list[int]]:
    """The value of an expression of whole numbers, + - * / and brackets, and the numbers in it; (None, []) if it is not
    one, is longer than LONGEST characters, or divides by zero. With `signs`, -5 is a number, too."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if signs and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and type(node.value) is int:  # not True, which is an int, too
            numbers.append(node.value)
            return Fraction(node.value)
        raise ValueError(f"{ast.unparse(node)} is no arithmetic")

    numbers = []
    try:
        if not re.fullmatch(rf"[\d+\-*/() ]{{1,{LONGEST}}}", expression, re.ASCII):
            raise ValueError("not arithmetic")
        return value(ast.parse(expression.strip(), mode="eval").body), numbers
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None, []


def countdown(completions: list, target: list, nums: list, **_) -> list[float | None]:
    """1 if the last <answer> holds an expression that uses each of `nums` once and equals `target`, else 0 (TinyZero).
    None for a row without numbers in these two columns.

    `3 + 4 = 7` is read up to the equals sign.
    """
    rewards = []
    for completion, goal, given in zip(completions, target, nums, strict=True):
        goal, *given = (read_number(str(x)) for x in [goal, *(given or [None])])
        answers = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text_of(completion), re.DOTALL)
        result, used = work_out(answers[-1].partition("=")[0].strip() if answers else "")
        is_right = result == goal and Counter(used) == Counter(given)
        rewards.append(None if None in (goal, *given) else float(is_right))
    return rewards


# ---------------------------------------------------------------------------------------------------------------------
# Form and length

BODY = rf"(?:[^\n{ENDS}]|[.!?．](?=[^\s{ENDS}{QUOTES}{CJK}]))+"  # 3.5 and example.com do not end a sentence
SENTENCE = re.compile(rf"({BODY})(?:[{ENDS}]+(?: ?[{QUOTES}])*|(?<=[{THAI}]))")
WORD = re.compile(rf"[{UNSPACED}]|[^\s፡{UNSPACED}]+")  # ፡ separates words in Ethiopic


def tagged(prompts: list, completions: list, prompts_text: list[str] | None = None, **_) -> list[float]:
    """1 for <think> ... </think> <answer> ... </answer> and nothing else, each tag once; else 0 (DeepSeek-R1).

    If the prompt ends in <think>, as with some chat templates, the completion continues from there. Tags that are
    special tokens are missing in completions, so this function cannot find them.
    """
    heads = prompts_text or [text_of(prompt) for prompt in prompts]
    texts = ["<think>" * head.rstrip().endswith("<think>") + text_of(c) for head, c in zip(heads, completions)]
    form = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
    tags = "<think>", "</think>", "<answer>", "</answer>"  # counted first: with many tags, the form is slow
    return [float(all(text.count(tag) == 1 for tag in tags) and form.fullmatch(text) is not None) for text in texts]


def one_sentence(completions: list, **_) -> list[float]:
    """1 for one sentence: at least three words (letters in scripts without spaces), with . ! ? or another mark of ENDS
    at the end, and nowhere else except as in 3.5; else 0.

    A text that was cut off may end in a full stop by chance: use `--missing-eos-penalty 1` as well.
    """
    found = [SENTENCE.fullmatch(text_of(completion)) for completion in completions]
    return [float(match is not None and len(WORD.findall(match[1])) >= 3) for match in found]


def repetition_penalty(completion_ids: list[list[int]], n: int = 3, **_) -> list[float]:
    """-(1 - different n-grams / all n-grams) of the tokens: 0 if none occurs twice, near -1 for an endless repetition
    (Yeo et al. 2025, arXiv 2502.03373, app. C)."""
    grams_of_rows = [list(zip(*(ids[i:] for i in range(n)))) for ids in completion_ids]
    return [len(set(grams)) / len(grams) - 1 if grams else 0.0 for grams in grams_of_rows]


def overlong_penalty(longest: int, buffer: int) -> Callable[..., list[float]]:
    """Makes a reward function: 0 up to longest - buffer tokens, then falling linearly to -1 at longest, and -1 beyond
    (DAPO, arXiv 2503.14476, eq. 13; there longest is 20,480 and buffer 4,096)."""

    def penalty(completion_ids: list[list[int]], **_) -> list[float]:
        return [max(-1.0, min(0.0, (longest - buffer - len(ids)) / buffer)) for ids in completion_ids]

    return penalty
