"""Converts well-known data sets to rows that the scripts read; recipes/README.md has the training commands.

    python recipes/data.py gsm8k data/gsm8k --chat "Think step by step. End with #### and the number."
    python recipes/data.py hh data/hh --source /datasets/hh-rlhf      # rows on disk: a folder, or a file

Without --chat rows are plain texts, for base models. With --chat they are messages, for the chat template of a chat
model; the text after --chat becomes the system message, unless the row has its own. The folder gets train.jsonl, and
validation.jsonl if there are rows to evaluate on. Duplicate rows are written once.

To add a data set, write a function from its row to one of ours, and a line in RECIPES. A row of ours has `prompt`
(messages) and `completion`, or `chosen` and `rejected` (texts), or the columns of a reward function. Or it has
`messages`, or only `text`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import datasets

Messages = list[dict[str, str]]
ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")  # ShareGPT's names


class Misfit(ValueError):
    """A row that does not have the form of its data set."""


def require(condition: object, message: str) -> None:
    """Raises a Misfit with the message, unless the condition holds."""
    if not condition:
        raise Misfit(message)


def get(row: dict, column: str, kind: type = str, place: str = ""):
    """A value of a row, or of a dict in the column `place`. It must have this type."""
    found = f"is {row[column]!r:.60}" if column in row else f"is not among {', '.join(row)}"
    require(
        isinstance(row.get(column), kind), f"the column {place + column!r} should be a {kind.__name__}, but {found}"
    )
    return row[column]


def turns(row: dict, column: str, role: str = "role", content: str = "content") -> Messages:
    """A conversation as messages; `role` and `content` are the data set's names of these keys."""
    found = []
    for turn in get(row, column, list):
        who = get(turn, role, str, f"{column}.")
        found.append({"role": ROLES.get(who, who), "content": get(turn, content, str, f"{column}.")})
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
    return split_pair(turns(row, "chosen"), turns(row, "rejected"))


def hh(row: dict) -> dict:
    """chosen and rejected, transcripts with the prompt."""
    return split_pair(read_transcript(row, "chosen"), read_transcript(row, "rejected"))


def read_transcript(row: dict, column: str) -> Messages:
    """The turns of a text such as "\\n\\nHuman: Hi\\n\\nAssistant: Hello"."""
    start, *parts = re.split(r"\n\n(Human|Assistant):", get(row, column))
    require(
        parts and not start.strip(), f"the column {column!r} should begin with '\\n\\nHuman:', but is {start!r:.60}"
    )
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": text.strip()} for who, text in zip(parts[::2], parts[1::2])]


def split_pair(chosen: Messages, rejected: Messages) -> dict:
    """A row from two conversations that differ in the last answer."""
    *prompt, good = chosen
    *other, bad = rejected
    require(prompt == other and prompt, "the columns 'chosen' and 'rejected' should begin with the same prompt")
    is_answer = good["role"] == bad["role"] == "assistant"
    require(is_answer, "the columns 'chosen' and 'rejected' should end with a message of the assistant")
    return {"prompt": prompt, "chosen": good["content"], "rejected": bad["content"]}


def tldr(row: dict) -> dict:
    """prompt, a text; chosen and rejected, conversations of the prompt and a summary. Also for descriptiveness."""
    return split_pair(turns(row, "chosen"), turns(row, "rejected"))


def tldr_sft(row: dict) -> dict:
    """prompt, as above; messages, of the prompt and a summary; id, subreddit, title, post, summary."""
    *prompt, answer = turns(row, "messages")
    return {"prompt": prompt, "completion": answer["content"]}


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
    next: str  # the command that reads its rows; {instruct} is -Instruct for chat models
    config: str | None = None  # on the hub
    part: str | None = None  # the folder to read, if not all of them
    splits: tuple[str, str | None] = ("train", None)  # to train and to evaluate on
    form: str | None = None  # of a prompt as a plain text; by default a transcript like HH's


GRPO = "grpo.py --model Qwen/Qwen2.5-0.5B{instruct} --bf16 --dataset {data} --response-length 256 --reward-fn "
PAIRS = "reward_model.py --model ./sft --bf16 --dataset {data}   # or dpo.py, with the same flags"
SFT = "sft.py --model HuggingFaceTB/SmolLM2-135M{instruct} --bf16 --dataset {data}"
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


def transcript(messages: Messages) -> str:
    """Messages in HH's form; a system message comes first, without a name."""
    names = {"system": "", "user": "\n\nHuman: ", "assistant": "\n\nAssistant: "}
    others = {turn["role"] for turn in messages} - set(names)
    require(not others, f"a text has no name for the roles {others}: use --chat")
    return "".join(names[turn["role"]] + turn["content"] for turn in messages)


def as_texts(row: dict, form: str | None) -> dict:
    """A row for a base model."""
    row = dict(row)
    if "messages" in row:
        return {"text": transcript(row.pop("messages"))} | row
    if isinstance(row["prompt"], list):
        is_question = form is not None and len(row["prompt"]) == 1
        question = row["prompt"][0]["content"] if is_question else ""
        row["prompt"] = form.format(question) if is_question else transcript(row["prompt"]) + "\n\nAssistant:"
    space = "" if row["prompt"][-1:].isspace() else " "
    return row | {name: space + row[name] for name in ("completion", "chosen", "rejected") if name in row}


def as_messages(row: dict, system: str) -> dict:
    """A row for a chat model."""
    row = dict(row)
    name = "messages" if "messages" in row else "prompt"
    require(isinstance(row[name], list), "these rows are texts without questions: remove --chat")
    if system and row[name][0]["role"] != "system":
        row[name] = [{"role": "system", "content": system}, *row[name]]
    for name in {"completion", "chosen", "rejected"} & set(row):
        row[name] = [{"role": "assistant", "content": row[name]}]
    return row


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


def convert(rows: datasets.Dataset, recipe: Recipe, args: argparse.Namespace) -> list[str]:
    """The rows of a split as lines of JSON, all of them in memory."""
    rows = rows.take(min(len(rows), args.rows or len(rows)))
    lines, num_misfits = {}, 0
    for number, row in enumerate(rows):
        try:
            ours = recipe.read(row)
            ours = as_texts(ours, recipe.form) if args.chat is None else as_messages(ours, args.chat)
            lines[json.dumps(ours, ensure_ascii=False)] = None
        except Misfit as error:
            if not args.skip:
                sys.exit(f"error: row {number}: {error} (--skip leaves such rows out)")
            num_misfits += 1
    print(f"{len(lines)} of {len(rows)} rows; {num_misfits} did not fit, the others were duplicates")
    return list(lines)


def write(file: Path, lines: list[str]) -> None:
    """Writes a jsonl file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines), "utf-8")


def main() -> None:
    """Reads the command line and converts the data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RECIPES, metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("folder", type=Path, help="for train.jsonl and validation.jsonl")
    parser.add_argument("--chat", nargs="?", const="", metavar="SYSTEM", help="messages, with this system message")
    parser.add_argument("--source", help="the data set's own rows on disk, instead of the hub")
    parser.add_argument("--held-out", type=int, default=0, help="rows to evaluate on, if the data set has none")
    parser.add_argument("--rows", type=int, help="maximum number of rows to read from a split")
    parser.add_argument("--skip", action="store_true", help="skip rows that do not fit")
    args = parser.parse_args()

    recipe = RECIPES[args.name]
    splits = load(recipe, args.source)
    first, second = recipe.splits
    first = first if first in splits else "train"
    if first not in splits:
        sys.exit(f"error: there is no split {recipe.splits[0]!r}, but {', '.join(splits)}")
    train = convert(splits[first], recipe, args)
    validation = train[len(train) - args.held_out :]
    if second in splits:
        validation = convert(splits[second], recipe, args)
    else:
        if args.held_out and args.held_out >= len(train):
            sys.exit(f"error: --held-out {args.held_out} leaves none of {len(train)} rows to train on")
        train = train[: len(train) - args.held_out]
    if not train:
        sys.exit("error: no rows are left")
    write(args.folder / "train.jsonl", train)
    (args.folder / "validation.jsonl").unlink(missing_ok=True)  # of an earlier call
    if validation:
        write(args.folder / "validation.jsonl", validation)
    instruct = "" if args.chat is None else "-Instruct"
    print(f"{train[0][:500]}\n\npython {recipe.next.format(data=args.folder, instruct=instruct)}")


if __name__ == "__main__":
    main()
