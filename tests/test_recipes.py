"""recipes/: data sets in the form that they really have become rows that the scripts read and train on."""

import json
import re
import shutil
import shlex
import sys

import pytest
from families import save_family
from runs import run, slow_but, write_rows
from sources import ROOT, load
from test_docs import read


data = load("recipes/data.py", "recipes_data")


def said(*texts):
    """A conversation that the user begins."""
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * len(texts), texts)]


def shared_by(from_human, *texts):
    """The same as ShareGPT has it."""
    return [{"from": who, "value": text} for who, text in zip(["human", "gpt"] * len(texts), (from_human, *texts))]


POST = "SUBREDDIT: r/cats\n\nTITLE: A cat\n\nPOST: It sat on the mat.\n\nTL;DR:"
SOLVE = "Solve it step by step.\n\nWhat is 2 + 3?\n\nEnd with Answer: and the number."
HI = "\n\nHuman: Hi?\n\nAssistant:"
HI_SO = f"{HI} Yes.\n\nHuman: So?\n\nAssistant:"
CATS = "\n\nHuman: Hi?\n\nAssistant: Yes.\n\nHuman: A cat,\n\nand a dog?\n\nAssistant:"
TALK = said("Hi?", "Yes.", "So?", "Good")
SUM = "It is <<2+3=5>>5.\n#### 5"
NUMBERS = {"target": 98, "nums": [44, 19, 35]}
FILM = "I saw this film<br />and liked it."


def pair(prompt, space=""):
    return {"prompt": prompt, "chosen": space + "Good", "rejected": space + "Bad"}


def both(prompt):
    """The two conversations of a pair."""
    return {"chosen": said(*prompt, "Good"), "rejected": said(*prompt, "Bad")}


# Rows as the data sets have them; what they become as texts, and as messages with the system message "S"
ROWS = {
    "gsm8k": (
        {"question": "What is 2 + 3?", "answer": SUM},
        {"prompt": "Question: What is 2 + 3?\nAnswer:", "answer": SUM},
        {"prompt": "What is 2 + 3?", "answer": SUM},
    ),
    "math": (
        {"problem": "What is $2 + 3$?", "level": "Level 1", "solution": "It is $\\boxed{5}$.", "type": "Algebra"},
        {"prompt": "Question: What is $2 + 3$?\nAnswer:", "answer": "It is $\\boxed{5}$."},
        {"prompt": "What is $2 + 3$?", "answer": "It is $\\boxed{5}$."},
    ),
    "dapo": (
        {"data_source": "math_dapo", "prompt": said(SOLVE), "reward_model": {"ground_truth": "5", "style": "rule"}},
        {"prompt": SOLVE + "\n\n", "answer": "5"},
        {"prompt": SOLVE, "answer": "5"},
    ),
    "countdown": (
        NUMBERS,
        {"prompt": r"Question: Make 98 of the numbers 44, 19, 35, [^:]*\nAnswer:"} | NUMBERS,
        {"prompt": r"Make 98 of the numbers 44, 19, 35, .*"} | NUMBERS,
    ),
    "ultrafeedback": (both(["Hi?", "Yes.", "So?"]) | {"score_chosen": 8.0}, pair(HI_SO, " "), pair(TALK[:3])),
    "ultrafeedback-h4": (
        {"prompt": "Hi?", "messages": said("Hi?", "Good"), "score_chosen": 6.0} | both(["Hi?"]),
        pair(HI, " "),
        pair("Hi?"),
    ),
    "hh": (
        {"chosen": CATS + " Good", "rejected": CATS + " Bad"},
        pair(CATS, " "),
        pair(said("Hi?", "Yes.", "A cat,\n\nand a dog?")),
    ),
    "tldr": ({"prompt": POST, "info": {"id": "t3_1"}, "choice": 0} | both([POST]), pair(POST, " "), pair(POST)),
    "tldr-sft": (
        {"prompt": POST, "messages": said(POST, "A cat sat."), "id": "t3_1", "summary": "A cat sat."},
        {"prompt": POST, "completion": " A cat sat."},
        {"prompt": POST, "completion": "A cat sat."},
    ),
    "orca": ({"system": "", "question": "Hi?", "chosen": "Good", "rejected": " Bad"}, pair(HI, " "), pair("Hi?")),
    "safe-rlhf": (
        {"prompt": "Hi?", "response_0": "Bad", "response_1": "Good", "better_response_id": 1, "safer_response_id": 0},
        pair(HI, " "),
        pair("Hi?"),
    ),
    "stack": (
        {"qid": 1, "question": "Hi?", "date": "2020", "response_j": "Good", "response_k": "Bad"},
        pair("Question: Hi?\n\nAnswer:", " "),
        pair("Hi?"),
    ),
    "imdb": ({"text": FILM, "label": 1}, {"text": FILM, "prompt": "I saw this film<br"}, None),
    "alpaca": (
        {"instruction": "Name it.", "input": "a cat", "output": "Tom", "text": "Below is an instruction ..."},
        {"prompt": "### Instruction:\nName it.\n\na cat\n\n### Response:\n", "completion": "Tom"},
        {"prompt": "Name it.\n\na cat", "completion": "Tom"},
    ),
    "no-robots": (
        {"prompt": "Hi?", "messages": said("Hi?", "Good"), "category": "Chat"},
        {"text": HI + " Good"},
        {"messages": said("Hi?", "Good")},
    ),
    "capybara": (
        {"source": "Dove", "conversation": [{"input": "Hi?", "output": "Yes."}, {"input": "So?", "output": "Good"}]},
        {"text": HI_SO + " Good"},
        {"messages": TALK},
    ),
    "sharegpt": (
        {"conversations": shared_by("Hi?", "Yes.", "So?", "Good"), "source": None},
        {"text": HI_SO + " Good"},
        {"messages": TALK},
    ),
}
ROWS["descriptiveness"] = ROWS["tldr"]
recipes = pytest.mark.parametrize("name", data.RECIPES)


def make(name, folder, *flags, rows=None, held_out=()):
    """Runs the program on rows of a data set; the lines of train.jsonl, and of validation.jsonl."""
    source = folder / "source"
    source.mkdir(parents=True)
    write_rows(source / "train.jsonl", rows or [ROWS[name][0]])
    if held_out:
        write_rows(source / "test.jsonl", held_out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["data.py", name, str(folder / "out"), "--source", str(source), *flags])
        data.main()
    files = [folder / "out" / f"{split}.jsonl" for split in ("train", "validation")]
    return [[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]


@recipes
def test_rows_become_texts(name, tmp_path):
    """Prompt and answer are joined as one would write them; of countdown only the numbers matter."""
    _, expected, _ = ROWS[name]
    [row], _ = make(name, tmp_path)
    if name == "countdown":
        assert re.fullmatch(expected["prompt"], row["prompt"])
        row = row | {"prompt": expected["prompt"]}
    assert row == expected


@recipes
def test_rows_become_messages(name, tmp_path):
    _, _, expected = ROWS[name]
    if expected is None:
        with pytest.raises(SystemExit, match="--chat"):
            make(name, tmp_path, "--chat", "S")
        return
    [row], _ = make(name, tmp_path, "--chat", "S")
    column = "messages" if "messages" in row else "prompt"
    asked = expected[column] if isinstance(expected[column], list) else said(expected[column])
    if name == "countdown":
        assert re.fullmatch(asked[0]["content"], row[column][1]["content"])
        asked = row[column][1:]
    answers = {"completion", "chosen", "rejected"} & set(expected)
    wanted = expected | {name: [{"role": "assistant", "content": expected[name]}] for name in answers}
    assert row == wanted | {column: [{"role": "system", "content": "S"}, *asked]}


@recipes
def test_a_row_that_does_not_fit_names_its_column(name):
    """Any column that is not there or None, unless nothing changes without it."""
    row, _, _ = ROWS[name]
    read = data.RECIPES[name].read
    for column in row:
        for less in ({key: x for key, x in row.items() if key != column}, row | {column: None}):
            try:
                assert read(less) == read(row), column
            except data.Misfit as error:
                assert f"'{column}'" in str(error)


@pytest.mark.parametrize("name, columns, match", [
    ("hh", {"rejected": "\n\nHuman: Hi?\n\nAssistant:"}, "begin"),
    ("hh", {"chosen": "\n\nHuman: Hi?\n\nAssistant: ", "rejected": "\n\nHuman: Hi?\n\nAssistant: A"}, "empty"),
    ("stack", {"response_k": "Good"}, "same"),
    ("alpaca", {"output": " "}, "empty"),
    ("alpaca", {"instruction": "", "input": ""}, "empty"),
    ("dapo", {"prompt": said("Hi?", "Yes.")}, "user"),
    ("no-robots", {"messages": said("Hi?")}, "answer"),
    ("sharegpt", {"conversations": shared_by("Hi?", "Yes.")[1:]}, "follow"),
    ("sharegpt", {"conversations": [{"from": "tool", "value": "5"}, *shared_by("Hi?", "Yes.")]}, "tool"),
    ("tldr-sft", {"messages": said(POST)}, "prompt"),
    ("tldr-sft", {"messages": said(POST, "A cat", "Why?")}, "assistant"),
    ("sharegpt", {"conversations": shared_by("Hi?", None)}, "'conversations"),
    ("capybara", {"conversation": [{"input": "Hi?", "output": None}]}, "'conversation"),
    ("no-robots", {"messages": []}, "'messages"),
    ("dapo", {"reward_model": {"style": "rule"}}, "'reward_model"),
    ("hh", {"chosen": "Human: Hi?"}, "'chosen"),
    ("ultrafeedback", {"chosen": said("Hi?", "Good"), "rejected": said("Ha?", "Bad")}, "'chosen"),
    ("safe-rlhf", {"better_response_id": 2}, "'better_response_id"),
])  # fmt: skip
def test_a_row_that_the_scripts_would_refuse(name, columns, match, tmp_path):
    """It ends the program with a sentence that names its column or fault; with --skip it is left out."""
    rows = [ROWS[name][0], ROWS[name][0] | columns]
    with pytest.raises(SystemExit, match=f"row 2: .*{match}"):
        make(name, tmp_path / "strict", rows=rows)
    assert len(make(name, tmp_path / "skip", "--skip", rows=rows)[0]) == 1


def test_one_space_begins_an_answer(tmp_path):
    """Whatever white space the data set has around it; none behind a prompt that ends a line, or in messages. A system
    message without a text is none."""
    for name, column, prompt_end, answer in (("stack", "response_j", ":", " Yes"), ("alpaca", "output", "\n", "Yes")):
        rows = [ROWS[name][0] | {column: "\n Yes\n"}]
        [row], _ = make(name, tmp_path / name, rows=rows)
        written = row.get("chosen", row.get("completion"))
        assert row["prompt"].endswith(prompt_end) and written == answer
        [row], _ = make(name, tmp_path / f"{name}-chat", "--chat", rows=rows)
        assert row.get("chosen", row.get("completion")) == [{"role": "assistant", "content": "Yes"}]
    messages = [{"role": "system", "content": ""}, *said(" Hi?", "Yes.\n")]
    [row], _ = make("no-robots", tmp_path / "talk", "--chat", rows=[{"messages": messages}])
    assert row["messages"] == said("Hi?", "Yes.")
    [row], _ = make("orca", tmp_path / "own", "--chat", "S", rows=[ROWS["orca"][0] | {"system": "Be brief."}])
    assert [turn["content"] for turn in row["prompt"]] == ["Be brief.", "Hi?"]


def test_rows_held_back_and_rows_that_come_twice(tmp_path):
    """A split of the data set's own is kept apart; where there is none, some rows are."""
    rows = [ROWS["gsm8k"][0] | {"question": f"What is {i} + 3?"} for i in (1, 2, 2, 3)]
    train, validation = make("gsm8k", tmp_path / "own", rows=rows[:3], held_out=rows[3:])
    assert [row["prompt"][18:19] for row in train + validation] == ["1", "2", "3"] and len(validation) == 1
    pairs = [ROWS["orca"][0] | {"question": f"Is it {i}?"} for i in range(5)]
    train, validation = make("orca", tmp_path / "none", "--held-out", "2", rows=pairs)
    assert (len(train), len(validation)) == (3, 2)
    shutil.rmtree(tmp_path / "none/source")
    assert not make("orca", tmp_path / "none", rows=pairs)[1]  # those of the earlier call are gone
    with pytest.raises(SystemExit, match="--held-out 5"):
        make("orca", tmp_path / "empty", "--held-out", "5", rows=pairs)
    assert len(make("orca", tmp_path / "few", "--rows", "2", rows=pairs)[0]) == 2


def test_copies_on_disk_of_several_kinds(tmp_path, monkeypatch):
    """A file, and a folder that save_to_disk left."""
    import datasets

    row = ROWS["ultrafeedback-h4"][0]
    both = datasets.DatasetDict({split: datasets.Dataset.from_list([row]) for split in ("train_prefs", "test_prefs")})
    both.save_to_disk(tmp_path / "saved")
    write_rows(tmp_path / "one.jsonl", [row])
    for source, num_held_out in (("saved", 1), ("one.jsonl", 0)):
        out = tmp_path / f"of_{source}"
        monkeypatch.setattr(sys, "argv", ["data.py", "ultrafeedback-h4", str(out), "--source", str(tmp_path / source)])
        data.main()
        assert len((out / "train.jsonl").read_text().splitlines()) == 1
        assert (out / "validation.jsonl").exists() == bool(num_held_out)


def test_without_hub_and_copy(tmp_path, monkeypatch):
    """It says what to do; so it does for a copy that is not there."""
    for words, match in (([], "openai/gsm8k.*--source"), (["--source", "nowhere"], "nowhere")):
        monkeypatch.setattr(sys, "argv", ["data.py", "gsm8k", str(tmp_path / "out"), *words])
        with pytest.raises(SystemExit, match=match):
            data.main()
    assert not (tmp_path / "out").exists()


# --- The command that is printed, for two updates of a tiny model

SMALL = {"batch_size": 8, "micro_batch_size": 4, "local_rollout_forward_batch_size": 8, "response_length": 4}
SMALL |= {"total_episodes": 16, "num_train_epochs": 1.0, "rloo_k": 2, "num_generations": 2}
SMALL |= {"num_sample_generations": 0, "bf16": False, "device": "cpu", "num_mini_batches": 1, "save_steps": 100}
SMALL |= {"max_length": 128, "max_prompt_length": 120, "dataset_test_split": None}


def numbered(row, i):
    """The row with another number in its question and answers, so that rows differ."""
    text = re.sub(r"(Hi\?|A cat|2 \+ 3|film|Name it|\[44)", rf"\1 {i}", json.dumps(row))
    return json.loads(text.replace("[44 ", "[44, "))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Policy and reward model for rows of messages, and for texts."""
    chat = save_family("qwen 2.5", tmp_path_factory.mktemp("chat"))
    return {"chat": chat, "texts": (f"{ROOT}/toy/sft", f"{ROOT}/toy/reward_model")}


FEW = ("gsm8k", "hh", "tldr-sft")


@pytest.mark.parametrize("chat", ["texts", "chat"])
@pytest.mark.parametrize("name", slow_but(FEW, ROWS))
def test_the_command_that_is_printed(name, chat, models, tmp_path, monkeypatch, capsys):
    """It reads the rows, for two updates; a model that was taught to chat is named where the rows are messages."""
    if (name, chat) == ("imdb", "chat"):
        return
    rows = [numbered(ROWS[name][0], i) for i in range(16)]
    make(name, tmp_path, *(["--chat", "S"] if chat == "chat" else []), rows=rows)
    command = capsys.readouterr().out.splitlines()[-1]
    assert ("Instruct" in command) == (chat == "chat")
    module, args = read(shlex.split(command, comments=True)[1:], monkeypatch)
    known = vars(args)
    changes = SMALL | dict(zip(("model", "reward_model"), models[chat]))
    settings = known | {key: x for key, x in changes.items() if key in known}
    settings.pop("output_dir")
    assert len(run(module, tmp_path / "run", **settings)) >= 2  # each answer of a conversation is a text


# --- Tasks without a network


def make_task(name, folder, *words):
    """Runs recipes/tasks.py; the rows to train on and those to evaluate on."""
    tasks = load("recipes/tasks.py", "recipes_tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tasks.py", name, str(folder), *map(str, words)])
        tasks.main()
    files = [folder / f"{split}.jsonl" for split in ("train", "validation")]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def judged(rows, answer, function="score"):
    """What a reward function gives for an answer to each of these rows; {} stands for the right one."""
    score = getattr(load("rewards/reasoning.py"), function)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    texts = [f"So it is <answer>{answer}</answer>.".replace("{}", str(row["answer"])) for row in rows]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return score(prompts=columns["prompt"], completions=completions, **columns)


def test_a_task_of_numbers(tmp_path):
    """Settings reach the generator, no question comes twice, and the answer has to stand in its tags."""
    pytest.importorskip("reasoning_gym")
    words = ["--max-terms", 2, "--max-digits=1", "--size", 40, "--examples", 2]
    train, held_out = make_task("chain_sum", tmp_path, *words)
    questions = [row["prompt"][-1]["content"] for row in train + held_out]
    assert len(set(questions)) == len(questions) and held_out
    assert all(json.loads(row["metadata"])["num_terms"] == 2 for row in train)
    system, *shown, asked = train[0]["prompt"]
    assert "<answer>" in system["content"] and asked["role"] == "user"
    assert [turn["role"] for turn in shown] == ["user", "assistant"] * 2
    assert not {turn["content"] for turn in shown} & set(questions)
    assert judged(train, "{}") == [1.0] * len(train)
    assert len(train) == 40 and judged(train, "none") == [0.0] * 40
    assert 0 < judged(train[:1], "{} apples")[0] < 1 and judged(train[:1], "{} apples", "right") == [0.0]
    score = load("rewards/reasoning.py").score
    row = train[0]
    given = {"prompts": [row["prompt"]] * 2, "task": [row["task"]] * 2}
    assert score(completions=["no tags: " + row["answer"], "<answer>0"], **given) == [0, 0]
    with pytest.raises(ValueError, match="version"):
        score(prompts=["What is 0 + 0?"], completions=["5"], task=[row["task"]])


def test_tasks_that_cannot_be_made(tmp_path):
    pytest.importorskip("reasoning_gym")
    for words, match in (
        (["no_such_task"], "no_such_task"),
        (["n_queens"], "Python"),
        (["chain_sum", "--max-trems", "2"], "max_terms"),
        (["rush_hour", "--examples", "1"], "--examples"),
    ):
        with pytest.raises(SystemExit, match=match):
            make_task(words[0], tmp_path, *words[1:], "--size", 5)


@pytest.mark.slow
def test_every_task_is_judged_and_no_judge_runs_an_answer(tmp_path):
    """What the library calls the answer is right, a text that is none earns little, and Python is not run."""
    pytest.importorskip("reasoning_gym")
    tasks = load("recipes/tasks.py", "recipes_tasks")
    trap = tmp_path / "opened"
    assert len(tasks.TASKS) == 95
    for name in tasks.TASKS:
        rows = tasks.make_rows(name, {"seed": 1, "size": 2}, "", 0)
        rows = json.loads(json.dumps(rows))
        for text in (str(trap), f"{trap}2"):
            for form in ("{}", "[{}]", "[[{}]]", "{} + 1"):
                judged(rows, form.format(f"open({text!r}, 'w')"))
        assert not list(tmp_path.iterdir()), name
        if rows[0]["answer"] is not None:
            assert judged(rows, "{}") == [1.0] * len(rows), name
        if name != "game_of_life_halting":  # whose judge takes any text for a no
            assert max(judged(rows, "nonsense")) < 0.5, name
