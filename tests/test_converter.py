"""`recipes/data.py file`: a user's own file becomes rows that the scripts read, or the program says what is wrong."""

import csv
import json
import re
import sys
from datetime import date

import datasets
import pytest
from sources import load

data = load("recipes/data.py", "recipes_data")


def talk(*texts):
    """Messages of the user and the assistant, in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def say(text):
    return talk("", text)[1:]


def save(file, rows):
    """Rows as a file of the kind that its name says; of csv and tsv all values are texts."""
    if file.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    elif file.suffix in (".csv", ".tsv"):
        with file.open("w", newline="", encoding="utf-8") as stream:
            delimiter = "\t" if file.suffix == ".tsv" else ","
            writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = [json.dumps(row) for row in rows]
        file.write_text("\n".join(lines) if file.suffix == ".jsonl" else f"[{', '.join(lines)}]", "utf-8")


def convert(folder, content, *flags, name="d.jsonl", program="file"):
    """Runs the program on rows, or on what a file has; the rows to train on, and those to evaluate on."""
    file = folder / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        save(file, content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["data.py", program, str(file), str(folder / "out"), *flags])
        data.main()
    files = [folder / "out" / f"{split}.jsonl" for split in ("train", "validation")]
    lines = [file.read_text("utf-8").split("\n")[:-1] if file.exists() else [] for file in files]
    return [[json.loads(line) for line in part] for part in lines]


HH = "\n\nHuman: Hi?\n\nAssistant: Yes.\n\nHuman: So?\n\nAssistant:"
TRANSCRIPTS = {"chosen": HH + " Good", "rejected": HH + " Bad"}
OF_HH = {"prompt": talk("Hi?", "Yes.", "So?"), "chosen": say("Good"), "rejected": say("Bad")}
GOOD, BAD = talk("Hi?", "Good"), talk("Hi?", "Bad")
CHAT = {"messages": GOOD}
PAIR = {"prompt": "The film is", "chosen": " good.", "rejected": " bad."}
TALKS = {"prompt": talk("Hi?"), "chosen": say("Good"), "rejected": say("Bad")}
SYSTEM = [{"role": "system", "content": "S"}]
WHOLE = {"chosen": GOOD, "rejected": BAD}
FROM = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Good"}]
SHARED = [{"from": "system", "value": "S"}, *FROM]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
TEXT, PICTURE = [{"type": "text", "text": "H"}, {"type": "text", "text": "i?\n"}], {"type": "image", "image": "x.png"}
ALPACA = {"instruction": "Name it.", "input": "a cat", "output": "Tom", "text": "Below is ..."}
RESPONSE = "### Instruction:\nName it.\n\na cat\n\n### Response:\n"


def filled(prompt, completion, **others):
    return {"prompt": prompt, "completion": completion} | others


FORMS = {  # a row of the user's, flags, and the row that the scripts read
    "texts": ({"text": "A film.", "id": 3}, [], {"text": "A film."}),
    "a transcript": ({"text": HH + " Good"}, ["--chat"], {"messages": OF_HH["prompt"] + say("Good")}),
    "completions": (filled("1 +", "1", id=3), [], filled("1 +", " 1")),
    "a space between": (filled("1 + ", "1"), [], filled("1 +", " 1")),
    "a line between": (filled("1:\n", "1"), [], filled("1:\n", "1")),
    "the prompt in it": (filled("A film", "A film A film"), [], filled("A film", " A film")),
    "texts to messages": (filled("Hi? ", " A"), ["--chat", "S"], filled([*SYSTEM, *talk("Hi?")], say("A"))),
    "a text after messages": (filled(talk("Hi?"), "A"), [], filled(talk("Hi?"), say("A"))),
    "pairs": (PAIR | {"score": 3}, [], PAIR),
    "the prompt in a pair": (PAIR | {name: PAIR["prompt"] + PAIR[name] for name in data.PAIR}, [], PAIR),
    "pairs of conversations": (WHOLE, [], TALKS),
    "both": (WHOLE | {"prompt": "Hi?"}, [], TALKS),
    "transcripts": (TRANSCRIPTS, [], {"prompt": HH, "chosen": " Good", "rejected": " Bad"}),
    "transcripts to messages": (TRANSCRIPTS, ["--chat"], OF_HH),
    "conversations": (CHAT | {"id": 1}, [], CHAT),
    "an empty message": ({"messages": [SYSTEM[0] | {"content": ""}, *GOOD]}, [], CHAT),
    "parts": ({"messages": talk(TEXT, "Good"), "tools": TOOLS}, [], CHAT | {"tools": TOOLS}),
    "ShareGPT's as JSON": ({"conversations": json.dumps(SHARED)}, [], {"messages": SYSTEM + GOOD}),
    "in another column": ({"items": FROM}, ["--messages-column", "items"], CHAT),
    "JSON that is a text": ({"prompt": '[{"a": 1}] =', "x": 1}, [], {"prompt": '[{"a": 1}] =', "x": 1}),
    "JSON": ({"messages": json.dumps(GOOD), "tools": json.dumps(TOOLS)}, [], CHAT | {"tools": TOOLS}),
    "Alpaca's": (ALPACA, [], filled(RESPONSE, "Tom")),
    "Alpaca's to messages": (ALPACA | {"input": None}, ["--chat"], filled(talk("Name it."), say("Tom"))),
    "prompts": ({"prompt": "1 + 1 = ", "x": [2]}, [], {"prompt": "1 + 1 =", "x": [2]}),
    "prompts to messages": ({"prompt": HH, "tools": TOOLS}, ["--chat"], {"prompt": OF_HH["prompt"], "tools": TOOLS}),
    "prompts by name": (filled("1 +", "1"), ["--form", "prompts"], filled("1 +", "1")),
    "numbers": ({"prompt": "x", "n": "007", "y": "0.50"}, ["--numbers", "n", "y"], {"prompt": "x", "n": 7, "y": 0.5}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_row_becomes(form, tmp_path):
    """And that one stays what it is."""
    row, flags, expected = FORMS[form]
    assert convert(tmp_path, [row], *flags) == [[expected], []]
    if form not in ("the prompt in it", "prompts by name"):
        assert convert(tmp_path, [expected]) == [[expected], []]


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather"}}]}
REFUSED = {  # a row that fits, one that does not, flags, and what the sentence names
    "an empty text": ({"text": "A"}, {"text": " "}, [], "'text'"),
    "a number": ({"text": "A"}, {"text": 5}, [], "'text'"),
    "equal answers": (PAIR, PAIR | {"rejected": "good. "}, [], "same"),
    "a question for an answer": (TALKS, TALKS | {"rejected": talk("Bad?")}, [], "assistant"),
    "different prompts": (WHOLE, WHOLE | {"rejected": talk("Ha?", "Bad")}, [], "prompt"),
    "a bad completion": (filled("A", "b", label=True), filled("A", "b", label=False), [], "'label'"),
    "an answered prompt": ({"prompt": talk("A?")}, {"prompt": talk("A?", "B")}, [], "'prompt'"),
    "no question": (CHAT, {"messages": say("B")}, [], "follow"),
    "tool calls": (CHAT, {"messages": [*talk("A?"), CALL]}, [], "tool calls"),
    "another key": (CHAT, {"messages": [GOOD[0] | {"name": "Eva"}, GOOD[1]]}, [], "name"),
    "several forms": ({"prompt": "A"}, {"prompt": talk("A?")}, [], "'prompt'"),
    "several types": ({"prompt": "A", "x": 72}, {"prompt": "A", "x": "72"}, [], "'x'"),
    "no number": ({"prompt": "A", "x": "1"}, {"prompt": "A", "x": "one"}, ["--numbers", "x"], "'one'"),
    "tools that are none": ({"prompt": GOOD[:1], "tools": None}, {"prompt": GOOD[:1], "tools": ["saw"]}, [], "'tools'"),
    "half a character": ({"text": "A"}, {"text": "\ud83d"}, [], "character"),
}
NO_MESSAGES = {
    "a picture": talk([*TEXT, PICTURE]),
    "one message": {"role": "user", "content": "Hi?"},
    "Python": str(talk("Hi?")),
}
REFUSED |= {kind: ({"prompt": talk("A?")}, {"prompt": value}, [], "'prompt") for kind, value in NO_MESSAGES.items()}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_row_that_does_not_fit(kind, tmp_path, capsys):
    """It ends the program with a sentence that names the row; with --skip it is left out and counted."""
    *rows, flags, match = REFUSED[kind]
    with pytest.raises(SystemExit, match=f"^error: row 2: .*{match}"):
        convert(tmp_path, rows, *flags)
    assert not (tmp_path / "out").exists()
    kept, _ = convert(tmp_path, rows, *flags, "--skip")
    assert len(kept) == 1 and "2 read, 1 kept, 1 misfits" in capsys.readouterr().out


FILES = {  # name, content, flags, and a word of the sentence
    "more cells": ("d.csv", b"prompt,x\nA,1\nIs it, good?,2\n", [], "row 2.*quote"),
    "fewer cells": ("d.csv", b"prompt,x\nA,1\nB\n", [], "row 2"),
    "Latin-1": ("d.csv", "prompt\nA\nZürich\n".encode("latin-1"), [], "line 3.*UTF-8"),
    "a broken line": ("d.jsonl", b'{"prompt": "A"}\n{"prompt": "B\n', [], "row 2.*JSON"),
    "nothing": ("d.jsonl", b"\n", [], "no rows"),
    "another kind": ("d.xlsx", b"x", [], "xlsx|jsonl"),
    "unknown columns": ("d.csv", b"question,answer\nA,1\n", [], "question, answer.*--prompt-column"),
    "answers of texts": ("d.csv", b"prompt,completion,x\nA,B,C\n", ["--answer-column", "x"], "--answer-column"),
    "a lost answer": ("d.csv", b"prompt,answer,x\nA,1,2\nB,3,\n", ["--answer-column", "x"], "answer.*2"),
    "a column that is not there": ("d.csv", b"text\nA\n", ["--prompt-column", "question"], "'question'.*text"),
    "a form that it has not": ("d.csv", b"prompt\nA\n", ["--form", "pairs"], "prompt"),
    "the name of an argument": ("d.csv", b"prompt,completions\nA,1\n", [], "completions"),
    "texts for a chat model": ("d.csv", b"text\nA\n", ["--chat"], "row 1.*--chat"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_does_not_fit(kind, tmp_path):
    name, content, flags, match = FILES[kind]
    with pytest.raises(SystemExit, match=f"^error: .*({match})"):
        convert(tmp_path, content, *flags, name=name)
    assert not (tmp_path / "out").exists()


def test_no_file_is_written_over(tmp_path, monkeypatch):
    """Not even one of another name: validation.jsonl would be removed."""
    for folder, file, match in ((".", "train.jsonl", "folder"), ("out", "nowhere.csv", "no file")):
        monkeypatch.setattr(sys, "argv", ["data.py", "file", str(tmp_path / file), str(tmp_path / folder)])
        with pytest.raises(SystemExit, match=match):
            data.main()


TEXTS = ["2024-01-05", "007", "1.50", "12345678901234567890123", "True", "None", "NA", "1e5"]
TEXTS += ["a, b", 'a "b"', "a\r\nb", "b" * 200_000]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_texts_stay_what_they_are(kind, tmp_path):
    rows = [{"prompt": f"The film {i}", "answer": text} for i, text in enumerate(TEXTS)]
    assert convert(tmp_path, rows, name=f"d.{kind}") == [rows, []]


def test_other_values_of_files(tmp_path):
    """JSON keeps its types; an empty cell and NaN are None; Excel's mark is none of the first name."""
    text = '{"prompt": "A", "x": 12345678901234567890, "y": NaN, "z": {"b": null}}\n\n{"prompt": "B\u2028", "x": 0.1}'
    rows = [{"prompt": "A", "x": 12345678901234567890, "y": None, "z": {"b": None}}]
    rows.append({"prompt": "B\u2028", "x": 0.1, "y": None, "z": None})
    assert convert(tmp_path, text.encode())[0] == rows
    assert convert(tmp_path, b"prompt;x\nA, B;1\n", name="d.csv")[0] == [{"prompt": "A, B", "x": "1"}]
    assert convert(tmp_path, b"\xef\xbb\xbfprompt,x\nA,\n", name="d.csv")[0] == [{"prompt": "A", "x": None}]
    [row], _ = convert(tmp_path, [{"prompt": "A", "day": date(2024, 1, 5), "x": float("nan")}], name="d.parquet")
    assert row == {"prompt": "A", "day": "2024-01-05", "x": None}
    options = [TOOLS, [TOOLS[0] | {"strict": True}]]  # parquet gives both the same keys
    rows = [{"prompt": talk(f"{i}?"), "tools": tools} for i, tools in enumerate(options)]
    assert convert(tmp_path, rows, name="d.parquet")[0] == rows


EXAMPLES = {  # a solved prompt, another one, flags, and what becomes of the other one
    "texts": ("1 + ", "2 +", [], "1 + 1\n\n2 +"),
    "texts to messages": ("1 +", "2 +", ["--chat", "S"], [*SYSTEM, *talk("1 +", "1", "2 +")]),
    "messages": ([*SYSTEM, *talk("1 +")], talk("2 +"), [], talk("1 +", "1", "2 +")),
    "system messages": (talk("1 +"), [*SYSTEM, *talk("2 +")], [], [*SYSTEM, *talk("1 +", "1", "2 +")]),
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_solved_examples_before_each_prompt(kind, tmp_path):
    """A row with an answer stands in the others, and is no row itself. Of several, some are drawn, always the same."""
    solved, asked, flags, expected = EXAMPLES[kind]
    flags = ["--examples", "1", "--answer-column", "sum", *flags]
    rows = [{"prompt": asked, "sum": None}, {"prompt": solved, "sum": 1}]
    assert convert(tmp_path, rows, *flags)[0] == [{"prompt": expected, "answer": None}]
    rows = [{"prompt": f"{n} +", "sum": n} for n in range(9)]
    found, again = convert(tmp_path, rows, *flags), convert(tmp_path, rows, *flags)
    assert found == again and [row["answer"] for row in found[0]] != list(range(1, 9)) and len(found[0]) == 8


def test_rows_to_evaluate_on(tmp_path):
    """Drawn from the whole file, the same in each call, and gone in a call without them."""
    rows = [{"text": f"{i}."} for i in range(40)]
    train, held_out = convert(tmp_path, rows, "--held-out", "10")
    assert len(held_out) == 10 and sorted(map(str, train + held_out)) == sorted(map(str, rows))
    assert held_out not in (rows[:10], rows[-10:]) and held_out != sorted(held_out, key=rows.index)
    assert convert(tmp_path, rows, "--held-out", "10") == [train, held_out]
    assert convert(tmp_path, rows) == [rows, []]


def test_what_the_program_says(tmp_path, capsys):
    """Counts, and the command of a script that reads such rows."""
    rows = [PAIR | {"id": 1}, PAIR | {"id": 2}, PAIR | {"prompt": "A song is"}, PAIR | {"chosen": None}]
    convert(tmp_path, rows, "--skip", "--rows", "4")
    out = capsys.readouterr().out
    assert "4 read, 2 kept, 1 misfits, 1 duplicates" in out
    assert re.fullmatch(rf"python reward_model\.py .*--dataset {tmp_path}/out .*", out.splitlines()[-1])
    convert(tmp_path, [TALKS | {"id": 1}], "--form", "prompts", "--model", "my/model")
    assert "python rloo.py --model my/model " in capsys.readouterr().out
    convert(tmp_path, [{"prompt": "A", "answer": "B"}])
    assert "python grpo.py " in capsys.readouterr().out


def answers(prompt, *judged):
    """Lines of the answers.jsonl of tools/evaluate.py: each answer with its reward, and whether it is complete."""
    names = ("response", "f.py:f", "g.py:g", "eos_share")
    return [{"prompt": prompt, "x": 1} | dict(zip(names, (text, f, -f if f else f, end))) for text, f, end in judged]


JUDGED = answers("A", (" good", 1.0, 1.0), (" bad", 0.0, 1.0), (" cut", 2.0, 0.0))  # what was cut off is not the best
JUDGED += answers("B", (" one", 1.0, 1.0), (" two", 1.0, 1.0))  # equal rewards
JUDGED += answers("C", (" cut", 1.0, 0.0), (" too", 0.0, 0.0))  # no complete answer
JUDGED += answers("D", (" ", 0.0, 1.0), (" some", 1.0, 1.0), (" none", None, 1.0))  # an empty one, and no reward
JUDGED += answers(talk("E?"), (" Bad.", 0.5, 0.0), ("Good.", 0.75, 1.0), ("Good.", 0.75, 1.0))


def test_answers_that_a_judge_has_scored(tmp_path, capsys):
    """The best complete answer to a prompt stands against one of a lower reward, or alone."""
    texts, chats = JUDGED[:-3], JUDGED[-3:]
    pair = {"prompt": "A", "chosen": " good", "rejected": " bad"}
    assert convert(tmp_path, texts, program="pairs") == [[pair], []]
    assert "reward: f.py:f" in capsys.readouterr().out
    assert convert(tmp_path, texts, "--best", program="pairs") == [[{"prompt": "A", "completion": " good"}], []]
    found = {"prompt": talk("E?"), "chosen": say("Good."), "rejected": say("Bad.")}
    assert convert(tmp_path, chats, program="pairs") == [[found], []]
    [row], _ = convert(tmp_path, texts[:2], "--reward", "g.py:g", program="pairs")
    assert row["chosen"] == " bad"
    for flags, rows in ((["--reward", "x"], texts), ([], texts[3:5]), ([], [PAIR])):
        with pytest.raises(SystemExit, match="^error: (there are no such rewards|no prompt|this is not)"):
            convert(tmp_path, rows, *flags, program="pairs")


def test_a_share_of_labels_is_wrong_on_purpose(tmp_path):
    """The same ones in each call."""
    rows = sum((answers(f"{i}", (" good", 1.0, 1.0), (" bad", 0.0, 1.0)) for i in range(200)), [])
    pairs, _ = convert(tmp_path, rows, "--flip", "0.1", program="pairs")
    assert 10 <= sum(row["chosen"] == " bad" for row in pairs) <= 30
    assert convert(tmp_path, rows, "--flip", "0.1", program="pairs")[0] == pairs
