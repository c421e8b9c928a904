"""Converts data sets, or your own file, to rows that the scripts read; recipes/README.md has the training commands.

    python recipes/data.py gsm8k data/gsm8k --chat "Think step by step. End with #### and the number."
    python recipes/data.py hh data/hh --source /datasets/hh-rlhf      # rows on disk: a folder, or a file
    python recipes/data.py file my.csv data/mine --held-out 200       # your own file: csv, tsv, jsonl, json, parquet
    python recipes/data.py pairs runs/my-evaluation/answers.jsonl data/pairs       # answers that your judge has scored

Without --chat rows are plain texts, for base models. With --chat they are messages, for the chat template of a chat
model; the text after --chat becomes the system message, unless the row has its own. (Conversations in your own file
are always messages.) The folder gets train.jsonl, and validation.jsonl if there are rows to evaluate on. Duplicate rows
are written once.

To add a data set, write a function from its row to one of ours, and a line in RECIPES. A row of ours has `prompt`
(messages) and `completion`, or `chosen` and `rejected` (texts), or the columns of a reward function. Or it has
`messages`, or only `text`.
"""

import argparse
import csv
import io
import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets

Messages = list[dict[str, str]]
ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")  # ShareGPT's names
ROLES["developer"] = "system"  # OpenAI's name
ANSWERS = ("completion", "chosen", "rejected")


class Misfit(ValueError):
    """A row that does not have the form of its data set."""


def require(condition: object, message: str) -> None:
    """Raises a Misfit with the message, unless the condition holds."""
    if not condition:
        raise Misfit(message)


def get(row: dict, column: str, kind: type = str, place: str = ""):
    """A value of a row, or of a dict in the column `place`. It must have this type."""
    found = f"is {row[column]!r:.60}" if column in row else f"is not among {', '.join(row)}"
    name = "text" if kind is str else kind.__name__
    require(isinstance(row.get(column), kind), f"the column {place + column!r} should be a {name}, but {found}")
    return row[column]


def turns(row: dict, column: str, role: str = "role", content: str = "content") -> Messages:
    """A conversation as messages, without an empty system message; `role` and `content` are the data set's keys."""
    found = []
    for turn in get(row, column, list):
        who = get(turn, role, str, f"{column}.")
        text = get(turn, content, str, f"{column}.").strip()  # many chat templates strip it, too
        found.append({"role": ROLES.get(who, who), "content": text})
    found = [turn for turn in found if turn["content"] or turn["role"] != "system"]
    require(found, f"the column {column!r} is empty")
    return found


def ask(text: str) -> Messages:
    """A text as a user's message."""
    return [{"role": "user", "content": text}]


# --- Prompts with answers ---------------------------------------------------------------------------------------------


def gsm8k(row: dict) -> dict:
    """question; answer, which ends in `#### 72`."""
    return {"prompt": ask(get(row, "question")), "answer": get(row, "answer")}


def math(row: dict) -> dict:
    """problem; solution, with \\boxed{...}; level and type."""
    return {"prompt": ask(get(row, "problem")), "answer": get(row, "solution")}


def dapo(row: dict) -> dict:
    """prompt, messages with the form of the answer; reward_model, a dict with ground_truth; each some hundred times."""
    answer = get(get(row, "reward_model", dict), "ground_truth", str, "reward_model.")
    return {"prompt": turns(row, "prompt"), "answer": answer}


def countdown(row: dict) -> dict:
    """target, a number; nums, the numbers to make it from. The question is ours."""
    target, nums = get(row, "target", int), get(row, "nums", list)
    numbers = ", ".join(map(str, nums))
    text = (
        f"Make {target} of the numbers {numbers}, each used once, with + - * / and brackets. "
        "End with the expression in answer tags, such as <answer>(1 + 2) / 3</answer>."
    )
    return {"prompt": ask(text), "target": target, "nums": nums}


# --- Pairs ------------------------------------------------------------------------------------------------------------


def ultrafeedback(row: dict) -> dict:
    """chosen and rejected, conversations that begin with the prompt; HuggingFaceH4's also has a column prompt."""
    return split(chosen=turns(row, "chosen"), rejected=turns(row, "rejected"))


def hh(row: dict) -> dict:
    """chosen and rejected, transcripts with the prompt."""
    return split(chosen=read_transcript(row, "chosen"), rejected=read_transcript(row, "rejected"))


def read_transcript(row: dict, column: str) -> Messages:
    """The turns of a text such as "\\n\\nHuman: Hi\\n\\nAssistant: Hello"."""
    start, *parts = re.split(r"\n\n(Human|Assistant):", get(row, column))
    require(
        parts and not start.strip(), f"the column {column!r} should begin with '\\n\\nHuman:', but is {start!r:.60}"
    )
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": text.strip()} for who, text in zip(parts[::2], parts[1::2])]


def split(**talks: Messages) -> dict:
    """A row from conversations that differ only in the last answer."""
    prompt, *others = [talk[:-1] for talk in talks.values()]
    names = " and ".join(map(repr, talks))
    is_same = prompt and all(other == prompt for other in others)
    require(is_same, f"{names} should begin with the same prompt")
    lasts = {name: talk[-1] for name, talk in talks.items()}
    is_answer = all(last["role"] == "assistant" for last in lasts.values())
    require(is_answer, f"{names} should end with a message of the assistant")
    return {"prompt": prompt} | {name: last["content"] for name, last in lasts.items()}


def tldr(row: dict) -> dict:
    """prompt, a text; chosen and rejected, conversations of the prompt and a summary. Also for descriptiveness."""
    return split(chosen=turns(row, "chosen"), rejected=turns(row, "rejected"))


def tldr_sft(row: dict) -> dict:
    """prompt, as above; messages, of the prompt and a summary; id, subreddit, title, post, summary."""
    return split(completion=turns(row, "messages"))


def orca(row: dict) -> dict:
    """system, which may be empty; question; chosen and rejected, texts."""
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return {
        "prompt": system + ask(get(row, "question")),
        "chosen": get(row, "chosen").strip(),
        "rejected": get(row, "rejected").strip(),  # all begin with a space, and no chosen one does
    }


def safe_rlhf(row: dict) -> dict:
    """prompt; response_0 and response_1, texts; better_response_id, 0 or 1; and more."""
    better = get(row, "better_response_id", int)
    require(better in (0, 1), f"the column 'better_response_id' should be 0 or 1, but is {better}")
    chosen, rejected = get(row, f"response_{better}"), get(row, f"response_{1 - better}")
    return {"prompt": ask(get(row, "prompt")), "chosen": chosen, "rejected": rejected}


def stack(row: dict) -> dict:
    """question; response_j, which more people voted for than for response_k; and more."""
    chosen, rejected = get(row, "response_j"), get(row, "response_k")
    return {"prompt": ask(get(row, "question")), "chosen": chosen, "rejected": rejected}


# --- Texts and conversations ------------------------------------------------------------------------------------------


def imdb(row: dict) -> dict:
    """text, a review; label. The prompt is its first four words."""
    text = get(row, "text")
    return {"text": text, "prompt": " ".join(text.split()[:4])}


def alpaca(row: dict) -> dict:
    """instruction; input, which may be empty; output; text, all of them."""
    parts = [get(row, "instruction"), get(row, "input")]
    return {"prompt": ask("\n\n".join(filter(None, parts))), "completion": get(row, "output")}


def no_robots(row: dict) -> dict:
    """messages; prompt, prompt_id, category."""
    return {"messages": turns(row, "messages")}


def capybara(row: dict) -> dict:
    """conversation, a list of dicts with input and output; source."""
    messages = []
    for turn in get(row, "conversation", list):
        messages += ask(get(turn, "input", str, "conversation."))
        messages.append({"role": "assistant", "content": get(turn, "output", str, "conversation.")})
    return {"messages": messages}


def sharegpt(row: dict) -> dict:
    """conversations, a list of dicts with from (system, human, gpt) and value."""
    return {"messages": turns(row, "conversations", "from", "value")}


# --- The list ---------------------------------------------------------------------------------------------------------


@dataclass
class Recipe:
    """A data set."""

    read: Callable[[dict], dict]
    hub: str
    next: str  # the command that reads its rows; {qwen} and {smollm} are models, where the user names none
    config: str | None = None  # on the hub
    part: str | None = None  # the folder to read, if not all of them
    splits: tuple[str, str | None] = ("train", None)  # to train and to evaluate on
    form: str | None = None  # of a prompt as a plain text; by default a transcript like HH's


GRPO = "grpo.py --model {qwen} --dataset {data} --response-length 256 --reward-fn "
RLOO = "rloo.py --model {smollm} --dataset {data} --response-length 256 --reward-fn "
PAIRS = "reward_model.py --model {smollm} --dataset {data}   # or dpo.py, with the same flags"
SFT = "sft.py --model {smollm} --dataset {data}"
YOURS = "YOUR_FILE.py:FUNCTION"
HELD = ("train", "test")
QUESTION = "Question: {}\nAnswer:"

RECIPES = {
    "gsm8k": Recipe(
        gsm8k, "openai/gsm8k", GRPO + "rewards/verifiers.py:right_number", config="main", splits=HELD, form=QUESTION
    ),
    "math": Recipe(
        math, "DigitalLearningGmbH/MATH-lighteval", GRPO + "rewards/maths.py:score", splits=HELD, form=QUESTION
    ),
    "dapo": Recipe(dapo, "BytedTsinghua-SIA/DAPO-Math-17k", GRPO + "rewards/maths.py:score", form="{}\n\n"),
    "countdown": Recipe(
        countdown, "Jiayi-Pan/Countdown-Tasks-3to4", GRPO + "rewards/verifiers.py:countdown", form=QUESTION
    ),
    "ultrafeedback": Recipe(ultrafeedback, "trl-lib/ultrafeedback_binarized", PAIRS, splits=HELD),
    "ultrafeedback-h4": Recipe(
        ultrafeedback, "HuggingFaceH4/ultrafeedback_binarized", PAIRS, splits=("train_prefs", "test_prefs")
    ),
    "hh": Recipe(hh, "Anthropic/hh-rlhf", PAIRS, splits=HELD),
    "tldr": Recipe(
        tldr, "trl-internal-testing/tldr-preference-trl-style", PAIRS, splits=("train", "validation"), form="{}"
    ),
    "tldr-sft": Recipe(
        tldr_sft, "trl-internal-testing/tldr-preference-sft-trl-style", SFT, splits=("train", "validation"), form="{}"
    ),
    "descriptiveness": Recipe(
        tldr,
        "trl-internal-testing/descriptiveness-sentiment-trl-style",
        PAIRS,
        splits=("descriptiveness", None),
        form="{}",
    ),
    "orca": Recipe(orca, "Intel/orca_dpo_pairs", PAIRS),
    "safe-rlhf": Recipe(safe_rlhf, "PKU-Alignment/PKU-SafeRLHF", PAIRS, splits=HELD),
    "stack": Recipe(stack, "lvwerra/stack-exchange-paired", PAIRS, part="data/reward", form="Question: {}\n\nAnswer:"),
    "imdb": Recipe(imdb, "stanfordnlp/imdb", SFT, splits=HELD),
    "alpaca": Recipe(alpaca, "tatsu-lab/alpaca", SFT, form="### Instruction:\n{}\n\n### Response:\n"),
    "no-robots": Recipe(no_robots, "HuggingFaceH4/no_robots", SFT, splits=HELD),
    "capybara": Recipe(capybara, "LDJnr/Capybara", SFT),
    "sharegpt": Recipe(sharegpt, "teknium/OpenHermes-2.5", SFT),
}


# --- Texts or messages ------------------------------------------------------------------------------------------------


def check(row: dict) -> None:
    """Raises a Misfit if a row of ours is not as the scripts need it."""
    for name in ("prompt", *ANSWERS, "text", "messages"):
        value = row.get(name, [])
        talk = ask(value) if isinstance(value, str) else value
        for turn in talk:
            role = turn["role"]
            require(role in ("system", "user", "assistant"), f"the column {name!r} has a message of the role {role!r}")
            require(turn["content"].strip(), f"the column {name!r} has an empty text")
    if isinstance(row.get("prompt"), list):
        require(row["prompt"] and row["prompt"][-1]["role"] == "user", "'prompt' should end with the user's message")
    if "messages" in row:
        roles = [turn["role"] for turn in row["messages"]]
        require("assistant" in roles, "the column 'messages' has no answer of the assistant")
        for role, earlier in zip(roles, ["", *roles]):
            is_asked = role != "assistant" or earlier == "user"
            require(is_asked, "the column 'messages' has an answer that does not follow a message of the user")
    if "chosen" in row:
        is_pair = row["chosen"].strip() != row["rejected"].strip()
        require(is_pair, "the columns 'chosen' and 'rejected' have the same answer")


def transcript(messages: Messages) -> str:
    """Messages in HH's form; a system message comes first, without a name."""
    names = {"system": "", "user": "\n\nHuman: ", "assistant": "\n\nAssistant: "}
    return "".join(names[turn["role"]] + turn["content"] for turn in messages)


def as_texts(row: dict, form: str | None = None) -> dict:
    """A row for a base model. A space between prompt and answer belongs to the answer: most tokenizers join it with the
    next word, and the tokens of the prompt should begin those of both."""
    row = dict(row)
    if "messages" in row:
        return {"text": transcript(row.pop("messages"))} | row
    if "prompt" not in row:
        return row
    answers = {name: row[name] for name in ANSWERS if name in row}
    if isinstance(row["prompt"], list):
        is_question = form is not None and len(row["prompt"]) == 1
        question = row["prompt"][0]["content"] if is_question else ""
        row["prompt"] = form.format(question) if is_question else transcript(row["prompt"]) + "\n\nAssistant:"
        answers = {name: answer.strip() for name, answer in answers.items()}
    row["prompt"] = row["prompt"].rstrip(" \t")
    for name, answer in answers.items():
        is_apart = row["prompt"][-1].isspace() or answer[0].isspace()
        row[name] = answer if is_apart else " " + answer
    return row


def as_messages(row: dict, system: str) -> dict:
    """A row for a chat model."""
    row = dict(row)
    name = "messages" if "messages" in row else "prompt"
    require(isinstance(row.get(name), list), "these rows are texts without questions: remove --chat")
    if system and row[name][0]["role"] != "system":
        row[name] = [{"role": "system", "content": system}, *row[name]]
    for name in ANSWERS:
        if name in row:
            row[name] = [{"role": "assistant", "content": row[name].strip()}]
    return row


# --- Your own file: its rows ------------------------------------------------------------------------------------------


def read_file(path: Path) -> list[dict]:
    """The rows of a file. A value that a row lacks is None."""
    readers = {".csv": read_csv, ".tsv": read_csv, ".jsonl": read_json, ".json": read_json, ".parquet": read_parquet}
    require(path.is_file(), f"there is no file {path}")
    require(path.suffix in readers, f"the name of a file should end with one of {', '.join(readers)}")
    rows = readers[path.suffix](path)
    require(rows, "the file has no rows")
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{column: row.get(column) for column in columns} for row in rows]


def read_text(path: Path) -> str:
    """The text of a file, without the mark that Excel puts before it."""
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise Misfit(f"line {line} is not in UTF-8: save the file in UTF-8") from error


def read_csv(path: Path) -> list[dict]:
    """The rows of a csv or tsv file. All cells are texts, and an empty cell is None."""
    csv.field_size_limit(2**31 - 1)  # a cell may be a long text
    text = read_text(path)
    delimiter = "\t" if path.suffix == ".tsv" else ","
    first, _, _ = text.partition("\n")
    if delimiter not in first and ";" in first:  # as Excel writes it in much of Europe
        delimiter = ";"
        print("the cells are separated by ;")
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows = []
    try:
        names = reader.fieldnames or []
        require(all(names) and len(set(names)) == len(names), "each column needs a name of its own in line 1")
        for row in reader:
            is_whole = None not in row and None not in row.values()  # cells without names, names without cells
            number = len(rows) + 1
            require(is_whole, f"row {number} has not as many cells as the names: quote texts with {delimiter!r}")
            rows.append({name: cell or None for name, cell in row.items()})
    except csv.Error as error:
        raise Misfit(f"row {len(rows) + 1} cannot be read: {error}") from error
    return rows


def read_json(path: Path) -> list[dict]:
    """The rows of a file that has a JSON object in each line, or one list of them."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        rows = parse_json(text, "the list")
    else:
        lines = [line for line in text.split("\n") if line.strip()]
        rows = [parse_json(line, f"row {number}") for number, line in enumerate(lines, 1)]
    for number, row in enumerate(rows, 1):
        require(isinstance(row, dict), f"row {number} should be an object with the columns' names, but is {row!r:.60}")
    return rows


def parse_json(text: str, what: str):
    """The value of a JSON text. Python also writes NaN, which becomes None."""
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except ValueError as error:
        raise Misfit(f"{what} is not JSON: {error}") from error


def read_parquet(path: Path) -> list[dict]:
    """The rows of a parquet file."""
    try:
        return datasets.Dataset.from_parquet(str(path)).to_list()
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise Misfit(f"the file cannot be read: {error.__cause__ or error}") from error


# --- Your own file: its values ----------------------------------------------------------------------------------------


def read_value(row: dict, column: str, is_chat: bool) -> str | Messages:
    """A text or a conversation, which may be written as JSON. For a chat model, a transcript is a conversation."""
    value = row[column]
    if isinstance(value, str):
        value = read_json_messages(value, column)
    if isinstance(value, list):
        return read_messages(value, column)
    text = get(row, column)
    if not is_chat or not text.startswith("\n\nHuman:"):
        return text
    messages = read_transcript(row, column)
    is_prompt = messages[-1] == {"role": "assistant", "content": ""}
    return messages[:-1] if is_prompt else messages


def read_json_messages(text: str, column: str) -> str | list:
    """The messages that a text has as JSON; other texts stay what they are."""
    if not re.match(r"\s*\[\s*\{", text):
        return text
    is_meant = re.match(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""", text)
    try:
        found = parse_json(text, f"the conversation in the column {column!r}")
    except Misfit:
        if is_meant:
            raise
        return text
    are_messages = all(isinstance(part, dict) and part.keys() & {"role", "from"} for part in found)
    return found if is_meant or are_messages else text


def read_messages(value: list, column: str) -> Messages:
    """A conversation. An empty system message is left out."""
    messages = [read_message(message, column) for message in value]
    messages = [turn for turn in messages if turn["content"] or turn["role"] != "system"]
    require(messages, f"the column {column!r} has no messages")
    return messages


def read_message(message: object, column: str) -> dict[str, str]:
    """A message. ShareGPT's keys are from and value, and OpenAI's content may be a list of parts."""
    place = f"the column {column!r} has a message"
    require(isinstance(message, dict), f"the column {column!r} should have messages, but has {message!r:.60}")
    keys = {"from": "role", "value": "content"}
    given = {keys.get(key, key): value for key, value in message.items() if value is not None}
    require("tool_calls" not in given, f"{place} with tool calls, but the scripts train on texts only")
    others = sorted(given.keys() - {"role", "content"})
    require(not others, f"{place} with {', '.join(others)}, which the scripts do not read")
    if isinstance(given.get("content"), list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in given["content"]]
        require(all(isinstance(text, str) for text in texts), f"{place} with a part that is not a text")
        given["content"] = "".join(texts)
    role = get(given, "role", str, f"{column}.")
    content = get(given, "content", str, f"{column}.")
    return {"role": ROLES.get(role, role), "content": content.strip()}


def read_number(row: dict, column: str) -> object:
    """The number that a text stands for; other values stay what they are."""
    value = row[column]
    if not isinstance(value, str):
        return value
    try:
        number = int(value) if re.fullmatch(r"\s*[+-]?\d+\s*", value) else float(value)
    except ValueError:
        number = float("nan")
    require(abs(number) < float("inf"), f"the column {column!r} should be a number, but is {value!r:.60}")
    return number


def read_option(row: dict, column: str) -> list | dict | None:
    """A column for the chat template, which may be written as JSON; None if there is nothing in it."""
    value, kind = row[column] or None, OPTIONS[column]
    if isinstance(value, str):
        value = parse_json(value, f"the column {column!r}")
    is_option = isinstance(value, kind) and all(isinstance(part, dict) for part in value if kind is list)
    require(is_option or not value, f"the column {column!r} is for the chat template, which cannot read {value!r:.60}")
    return without_none(value)


def without_none(value: object) -> object:
    """A value without keys that are None. Parquet files add such keys to dicts that lack them."""
    if isinstance(value, dict):
        return {key: without_none(x) for key, x in value.items() if x is not None}
    if isinstance(value, list):
        return [without_none(x) for x in value]
    return value


# --- Your own file: its form ------------------------------------------------------------------------------------------


def read_answers(names: tuple[str, ...], row: dict, is_chat: bool) -> dict:
    """A prompt with its answers. If one of them is a conversation, all become messages."""
    is_bad = "completion" in names and str(row.get("label")).lower() == "false"  # TRL's unpaired preferences
    require(not is_bad, "the column 'label' is false: the completion is bad, and sft.py would train it")
    given = {name: read_value(row, name, is_chat) for name in ("prompt", *names)}
    if all(isinstance(value, str) for value in given.values()):
        return given
    prompt = given.pop("prompt")
    prompt = ask(prompt.strip()) if isinstance(prompt, str) else prompt
    return split(**{name: join(prompt, answer, name) for name, answer in given.items()})


def join(prompt: Messages, answer: str | Messages, name: str) -> Messages:
    """The conversation of a prompt and an answer, which may repeat the prompt, perhaps after a system message."""
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    talk = prompt + answer if len(answer) == 1 else answer
    end = talk[:-1][-len(prompt) :]
    require(end == prompt, f"the column {name!r} has several messages, but does not begin with those of 'prompt'")
    return talk


def read_pair(row: dict, is_chat: bool) -> dict:
    """Two conversations, or two transcripts in HH's form, that begin with the prompt."""
    talks = {name: read_value(row, name, is_chat) for name in PAIR}
    if all(isinstance(talk, list) for talk in talks.values()):
        return split(**talks)
    return read_as("hh", row, is_chat)


def read_as(name: str, row: dict, is_chat: bool) -> dict:
    """A row that has the form of a data set."""
    recipe = RECIPES[name]
    ours = recipe.read({"input": ""} | without_none(row))  # Alpaca's input may be missing
    check(ours)
    return ours if is_chat else as_texts(ours, recipe.form)


def read_only(column: str, row: dict, is_chat: bool) -> dict:
    """A text or a conversation with nothing beside it."""
    value = read_value(row, column, is_chat)
    if column == "prompt":
        return {"prompt": value}
    return {"text" if isinstance(value, str) else "messages": value}


@dataclass
class Form:
    """What the rows of a file are."""

    columns: tuple[str, ...]
    read: Callable[[dict, bool], dict]
    next: str  # as in Recipe
    also: tuple[str, ...] = ()  # columns that a file may lack


PAIR = ("chosen", "rejected")
NAMED = ("prompt", *ANSWERS, "text", "messages", "answer")  # columns that the user may name
FORMS = {  # a file has the first form whose columns it has
    "pairs": Form(("prompt", *PAIR), partial(read_answers, PAIR), PAIRS),
    "whole-pairs": Form(PAIR, read_pair, PAIRS),
    "chats": Form(("messages",), partial(read_only, "messages"), SFT),
    "sharegpt": Form(("conversations",), partial(read_only, "conversations"), SFT),
    "completions": Form(("prompt", "completion"), partial(read_answers, ("completion",)), SFT, ("label",)),
    "alpaca": Form(("instruction", "output"), partial(read_as, "alpaca"), SFT, ("input",)),
    "prompts": Form(("prompt",), partial(read_only, "prompt"), GRPO + YOURS),
    "texts": Form(("text",), partial(read_only, "text"), SFT),
}
OPTIONS = {"tools": list, "chat_template_kwargs": dict}  # what a chat template reads besides messages
# what reward functions get besides a row's columns
RESERVED = {"input_ids", "prompts", "prompts_text", "completions", "prompt_ids", "completion_ids"}
MEASURES = ("kl", "kl_k3", "eos_share", "response_length")  # of tools/evaluate.py, which are no rewards
MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def rename(rows: list[dict], named: dict[str, str]) -> list[dict]:
    """The rows with our names for the columns that the user names."""
    for name, column in named.items():
        require(column in rows[0], f"there is no column {column!r}, but {', '.join(rows[0])}")
        if name in rows[0] and name != column:
            lost = [number for number, row in enumerate(rows, 1) if row[name] and not row[column]]
            message = (
                f"of {name}, which {column} would replace, these rows have a value, and of {column} none: {lost[:9]}"
            )
            require(not lost, message)
            print(f"not read: the column {name}, since {column} takes its place")
    others = [column for column in rows[0] if column not in (*named, *named.values())]
    ours = named | {column: column for column in others}
    return [{name: row[column] for name, column in ours.items()} for row in rows]


def choose_form(columns: list[str], named: dict[str, str], asked: str | None) -> str:
    """The form of a file, which the user may name. It reads all columns that the user names."""
    for name, form in FORMS.items():
        is_there = set(form.columns) <= set(columns)
        if is_there and set(named) <= {*form.columns, "answer"} and asked in (None, name):
            require(name == "prompts" or "answer" not in named, f"--answer-column is for prompts, but these are {name}")
            return name
    forms = "; ".join(f"{name}: {', '.join(form.columns)}" for name, form in FORMS.items())
    flags = ", ".join(f"--{name}-column" for name in NAMED[:-1])
    raise Misfit(f"the columns {', '.join(columns)} have none of the forms ({forms}): name yours by {flags}")


def cut_prompts(rows: list[dict], names: list[str]) -> None:
    """Cuts the prompts off the answers that begin with them. White space around a prompt may differ. "It is" does not
    begin with the prompt "I", unless all answers of the file begin so."""
    texts = [(row, name) for row in rows for name in names if isinstance(row["prompt"], str)]
    texts = [(row, name) for row, name in texts if isinstance(row[name], str)]
    rests = []
    for row, name in texts:
        prompt, answer = row["prompt"].lstrip(), row[name].lstrip()
        start = prompt if answer.startswith(prompt) else prompt.strip()
        rests.append(answer.removeprefix(start) if start and answer.startswith(start) else None)
    are_whole = None not in rests
    num_cut = 0
    for (row, name), rest in zip(texts, rests):
        is_within_a_word = rest and re.match(r"\w", rest) and re.search(r"\w$", row["prompt"])
        if rest is not None and (are_whole or not is_within_a_word):
            row[name] = rest
            num_cut += 1
    if num_cut:
        print(f"{num_cut} of {len(texts)} answers begin with their prompt, which is cut off")


def read_own(form: Form, args: argparse.Namespace, row: dict) -> dict:
    """A row of the user's file as the scripts read it."""
    for column in MEDIA:
        require(not row.get(column), f"the column {column!r} is not empty, but the scripts train on texts only")
    row = row | {column: read_number(row, column) for column in args.numbers}
    ours = form.read(row, args.chat is not None)
    check(ours)
    prompt = ours.get("prompt")
    if args.chat is not None and isinstance(prompt, str):
        ours["prompt"] = ask(prompt.strip())
    is_text = args.chat is None and isinstance(ours.get("prompt", ours.get("text")), str)
    ours = as_texts(ours) if is_text else as_messages(ours, args.chat or "")
    options = {column: read_option(row, column) for column in OPTIONS if column in row}
    require(not is_text or not any(options.values()), f"{' and '.join(options)} are for messages: use --chat")
    others = row if form is FORMS["prompts"] else {}
    return ours | {column: value for column, value in others.items() if column not in ours} | options


def draw_examples(rows: list[dict], number: int) -> list[dict]:
    """Rows with an answer, drawn at random, since a file may be sorted; the same in each call."""
    require(number >= 0, f"--examples {number} is less than 0")
    solved = [row for row in rows if row.get("answer") not in (None, "")]
    enough = len(solved) >= number
    require(enough, f"--examples {number}: {len(solved)} rows have an answer (--answer-column names its column)")
    return random.Random(0).sample(solved, number)


def show_solved(prompt: str | Messages, solved: list[dict]) -> str | Messages:
    """A prompt behind the solved ones, which are rows of the same form: as one text, or as earlier turns."""
    answers = [row["answer"] if isinstance(row["answer"], str) else json.dumps(row["answer"]) for row in solved]
    is_alike = all(type(row["prompt"]) is type(prompt) for row in solved)
    require(is_alike, "some prompts are texts, and others are conversations")
    if isinstance(prompt, str):
        rows = [as_texts({"prompt": row["prompt"], "completion": text}) for row, text in zip(solved, answers)]
        return "".join(row["prompt"] + row["completion"].rstrip() + "\n\n" for row in rows) + prompt
    turns = []
    for row, text in zip(solved, answers):
        turns += [turn for turn in row["prompt"] if turn["role"] != "system"]
        turns.append({"role": "assistant", "content": text.strip()})
    has_system = prompt[0]["role"] == "system"
    return prompt[:has_system] + turns + prompt[has_system:]


def convert_file(args: argparse.Namespace) -> tuple[list[str], list[str], str]:
    """The rows of the user's own file to train on, none to evaluate on, and the command that reads them."""
    require(args.path.resolve().parent != args.folder.resolve(), "the rows need a folder of their own")
    flags = {name: getattr(args, f"{name}_column") for name in NAMED}
    named = {name: column for name, column in flags.items() if column}
    rows = rename(read_file(args.path), named)
    columns = list(rows[0])
    name = choose_form(columns, named, args.form)
    form = FORMS[name]
    print(f"form: {name}, with the columns {', '.join(form.columns)}")
    others = [column for column in columns if column not in (*form.columns, *form.also, *OPTIONS)]
    if name == "prompts":
        clash = sorted(RESERVED & {*others})
        require(not clash, f"rename the columns {', '.join(clash)}: reward functions have arguments of these names")
    print("for reward functions:" if name == "prompts" else "not read:", ", ".join(others) or "none")
    for column in args.numbers:
        require(column in others, f"--numbers: there is no other column {column!r}, but {', '.join(others) or 'none'}")
    if "prompt" in form.columns:
        cut_prompts(rows, [column for column in form.columns if column in ANSWERS])
    read = partial(read_own, form, args)
    require(name == "prompts" or not args.examples, f"--examples: only for prompts, but these are {name}")
    examples = draw_examples(rows, args.examples)
    solved = [read(row) for row in examples]
    shown = [row["prompt"] for row in examples]

    def read_behind(row: dict) -> dict | None:
        """A row whose prompt stands behind the examples; None if it is the prompt of an example."""
        if row["prompt"] in shown:
            return None
        ours = read(row)
        return ours | {"prompt": show_solved(ours["prompt"], solved)}

    num_answers = sum(row.get("answer") is not None for row in rows)
    command = RLOO + YOURS if name == "prompts" and num_answers <= args.examples else form.next
    return convert(rows, read_behind if solved else read, args), [], command


# --- Answers that a judge has scored ----------------------------------------------------------------------------------


def convert_answers(args: argparse.Namespace) -> tuple[list[str], list[str], str]:
    """The same of the answers.jsonl of tools/evaluate.py: a pair for each prompt, or with --best its best answer."""
    answers = read_file(args.path)
    columns = list(answers[0])
    require("response" in columns, "this is not answers.jsonl, which tools/evaluate.py writes")
    place = columns.index("response")  # the columns of the row come before it, and the rewards after it
    reward = args.reward or columns[place + 1]
    is_reward = reward in columns[place + 1 :] and reward not in MEASURES
    require(is_reward, "there are no such rewards: see --reward-fn of tools/evaluate.py")
    print(f"reward: {reward}")
    groups = {}
    for answer in answers:
        row = {column: answer[column] for column in columns[:place]}
        if answer[reward] is not None and answer["response"].strip():
            groups.setdefault(as_line(row), []).append(answer)
    draw = random.Random(0)
    rows = [choose(json.loads(row), group, reward, args, draw) for row, group in groups.items()]
    rows = [row for row in rows if row]
    num_left_out = len(groups) - len(rows)
    print(f"prompts: {len(groups)}, of which {num_left_out} have no complete answer that is better than another")
    require(rows, "no prompt has answers with different rewards")
    form = FORMS["completions" if args.best else "pairs"]
    return convert(rows, partial(read_own, form, args), args), [], form.next


def choose(row: dict, answers: list[dict], reward: str, args: argparse.Namespace, draw: random.Random) -> dict | None:
    """The row with its best answer and one of a lower reward; None if there are none.

    An answer that was cut off cannot be the best one: in training it would end where it was cut off.
    """
    ended = [answer for answer in answers if answer["eos_share"]]
    best = max(ended, key=lambda answer: answer[reward], default=None)
    worse = [answer["response"] for answer in answers if best and answer[reward] < best[reward]]
    if not worse:
        return None
    if args.best:
        return row | {"completion": best["response"]}
    pair = [best["response"], draw.choice(worse)]
    if draw.random() < args.flip:
        pair.reverse()
    return row | dict(zip(PAIR, pair))


# --- Reading and writing ----------------------------------------------------------------------------------------------


def load(recipe: Recipe, source: str | None) -> dict[str, datasets.Dataset]:
    """The splits of a data set, from the hub or from a copy on disk."""
    path = Path(source or recipe.hub)
    if path.is_file():
        return datasets.load_dataset(str(path.parent.resolve()), data_files=path.name)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():  # save_to_disk
        found = datasets.load_from_disk(str(path))
        return found if isinstance(found, dict) else {"train": found}
    if source and not path.exists():
        sys.exit(f"error: --source {source}: there is no such folder or file")
    options = {"data_dir": recipe.part} if recipe.part and (not source or (path / recipe.part).exists()) else {}
    try:
        names = datasets.get_dataset_config_names(str(path))
        return datasets.load_dataset(str(path), recipe.config if recipe.config in names else None, **options)
    except Exception as error:
        if source:
            raise
        sys.exit(f"error: cannot load {recipe.hub} from the hub ({error}). Use --source for a copy on disk")


def convert_recipe(args: argparse.Namespace) -> tuple[list[str], list[str], str]:
    """A data set's rows to train and to evaluate on, and the command that reads them."""
    recipe = RECIPES[args.name]

    def read(row: dict) -> dict:
        ours = recipe.read(row)
        check(ours)
        return as_texts(ours, recipe.form) if args.chat is None else as_messages(ours, args.chat)

    splits = load(recipe, args.source)
    first, second = recipe.splits
    first = first if first in splits else "train"
    require(first in splits, f"there is no split {recipe.splits[0]!r}, but {', '.join(splits)}")
    train = convert(splits[first], read, args)
    validation = convert(splits[second], read, args) if second in splits else []
    return train, validation, recipe.next


def convert(rows: datasets.Dataset | list, read: Callable[[dict], dict | None], args: argparse.Namespace) -> list[str]:
    """The rows of a split as lines of JSON, all of them in memory; without those of which `read` makes None."""
    num_rows = min(len(rows), args.rows or len(rows))
    lines, kinds, num_misfits, num_examples = {}, {}, 0, 0
    for number, row in zip(range(1, num_rows + 1), rows):
        try:
            ours = read(row)
            if ours is None:
                num_examples += 1
                continue
            line = as_line(ours)
            check_kinds(ours, kinds)
            lines[line] = None
        except Misfit as error:
            require(args.skip, f"row {number}: {error} (--skip leaves such rows out)")
            num_misfits += 1
    num_duplicates = num_rows - num_misfits - num_examples - len(lines)
    counts = f"{len(lines)} kept, {num_misfits} misfits, {num_duplicates} duplicates"
    print(f"rows: {num_rows} read, {counts}" + f", {num_examples} as examples" * (num_examples > 0))
    return list(lines)


def check_kinds(row: dict, kinds: dict[str, str]) -> None:
    """Raises a Misfit if a column has values of another type than in the rows before, whose types are in `kinds`."""
    is_alike = not kinds or ("text" in row) == ("text" in kinds)
    require(is_alike, "some rows are texts, and others are conversations")
    for column, value in row.items():
        kind = "number" if type(value) in (int, float) else type(value).__name__
        known = kind if value is None else kinds.setdefault(column, kind)
        require(kind == known, f"the column {column!r} has a value of type {kind}, but {known} in earlier rows")


def as_line(row: dict) -> str:
    """A row as a line of JSON. Dates become texts, and NaN becomes None."""
    plain = parse_json(json.dumps(row, default=str), "the row")
    line = json.dumps(plain, ensure_ascii=False)
    require(not re.search(r"[\ud800-\udfff]", line), "a text has half of a character, which UTF-8 cannot write")
    return line


def hold_out(lines: list[str], number: int) -> tuple[list[str], list[str]]:
    """The lines to train on, and a number of lines to evaluate on. They are drawn at random, since a file may be
    sorted, and are the same in each call, in the same order."""
    require(0 <= number < len(lines), f"--held-out {number} leaves none of {len(lines)} rows to train on")
    drawn = random.Random(0).sample(lines, number)
    held_out = set(drawn)
    return [line for line in lines if line not in held_out], drawn


def write(file: Path, lines: list[str]) -> None:
    """Writes a jsonl file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines), "utf-8")


def read_command_line() -> argparse.Namespace:
    """The settings: a data set's, or those of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(["file", "pairs", *RECIPES])
    programs = parser.add_subparsers(dest="name", required=True, metavar="NAME", help=names)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("folder", type=Path, help="for train.jsonl and validation.jsonl")
    shared.add_argument("--chat", nargs="?", const="", metavar="SYSTEM", help="messages, with this system message")
    shared.add_argument("--held-out", type=int, default=0, help="rows to evaluate on, if the data set has none")
    shared.add_argument("--model", help="your model, for the command that is printed")
    shared.add_argument("--rows", type=int, help="maximum number of rows to read from a split")
    shared.add_argument("--skip", action="store_true", help="skip rows that do not fit")
    for name in RECIPES:
        recipe = programs.add_parser(name, parents=[shared])
        recipe.add_argument("--source", help="the data set's own rows on disk, instead of the hub")
    paths = argparse.ArgumentParser(add_help=False)
    paths.add_argument("path", type=Path, help="csv, tsv, jsonl, json or parquet")
    file = programs.add_parser("file", parents=[paths, shared])
    file.add_argument("--form", choices=FORMS, help="what the rows are, if the columns do not say it")
    file.add_argument("--prompt-column", help="name of the column in the file; so are the next six")
    file.add_argument("--completion-column")
    file.add_argument("--chosen-column")
    file.add_argument("--rejected-column")
    file.add_argument("--text-column")
    file.add_argument("--messages-column")
    file.add_argument("--answer-column")
    examples = "number of rows with an answer that become solved examples in each prompt"
    file.add_argument("--examples", type=int, default=0, help=examples)
    file.add_argument("--numbers", nargs="+", default=[], metavar="COLUMN", help="columns to read as numbers")
    pairs = programs.add_parser("pairs", parents=[paths, shared])
    pairs.add_argument("--reward", help="column of answers.jsonl to compare; by default the first reward")
    pairs.add_argument("--best", action="store_true", help="write the best answers, for sft.py, instead of pairs")
    pairs.add_argument("--flip", type=float, default=0.0, help="share of the pairs whose labels are wrong on purpose")
    pairs.set_defaults(numbers=[])
    return parser.parse_args()


def main() -> None:
    """Reads the command line, and writes the rows."""
    args = read_command_line()
    try:
        convert_it = {"file": convert_file, "pairs": convert_answers}.get(args.name, convert_recipe)
        train, validation, command = convert_it(args)
        require(train, "no rows are left")
        if not validation:
            train, validation = hold_out(train, args.held_out)
    except Misfit as error:
        sys.exit(f"error: {error}")
    old = [file for file in sorted(args.folder.glob("*.jsonl")) if file.stem in ("train", "validation")]
    if old:
        print(f"overwritten: {', '.join(map(str, old))}")
    write(args.folder / "train.jsonl", train)
    (args.folder / "validation.jsonl").unlink(missing_ok=True)  # of an earlier call
    if validation:
        write(args.folder / "validation.jsonl", validation)
    row = json.loads(train[0])
    is_chat = isinstance(row.get("prompt", row.get("messages")), list)
    models = {"qwen": "Qwen/Qwen2.5-0.5B", "smollm": "HuggingFaceTB/SmolLM2-135M"}
    models = {name: args.model or model + "-Instruct" * is_chat for name, model in models.items()}
    print(f"{train[0][:500]}\n\npython {command.format(data=args.folder, **models)}")


if __name__ == "__main__":
    main()
