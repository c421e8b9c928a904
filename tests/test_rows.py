"""From a user's row to tokens, and back to texts: what was put in comes out, or the run ends."""

import json
import re
import sys
from contextlib import suppress
from datetime import datetime

import pytest
import torch
from runs import run, watch, write_rows
from sources import ROOT
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import PreTrainedTokenizerFast

import dpo
import grpo
import ppo
import reward_model
import rloo
import sft

sys.path.insert(0, str(ROOT / "tools"))
import chat  # noqa: E402
import evaluate  # noqa: E402

# As the templates of many models: other roles are left out without a word, and tools and options are read
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "{% if m.role in ('system', 'user', 'assistant') %}{{ m.role }}: {{ m.content | trim }}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}{{ call.name }} {{ call.arguments | tojson }}"
    "{% endif %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if thinking %} thinks{% endif %}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
ON_ROLLOUTS = [ppo, rloo, grpo]
ON_TEXTS = [*ON_ROLLOUTS, dpo, reward_model, sft]


def make_tokenizer(template=TEMPLATE):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy with a chat template, and beside it what a reward function was given."""
    folder = tmp_path_factory.mktemp("rows")
    AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    note = f"""
import json
def note(**given):
    with open({str(folder / "given.jsonl")!r}, "a") as file:
        print(json.dumps(given, default=repr), file=file)
    return [float(len(str(text))) for text in given["completions"]]
"""
    (folder / "r.py").write_text(note)
    return folder


def told(*texts, role="user", **others):
    """A conversation: turns of the user and the assistant, in turn."""
    return [{"role": (role, "assistant")[i % 2], "content": text} | others for i, text in enumerate(texts)]


def start_run(module, folder, rows, **settings):
    """A short run of any script on these rows, which hold what each of them reads."""
    file = write_rows(folder / f"rows-{module.__name__}.jsonl", rows)
    settings = dict(model=str(folder / "model"), dataset=file) | settings
    if module in ON_ROLLOUTS:
        settings = (
            dict(batch_size=4, total_episodes=4, response_length=4, reward_fn=(f"{folder}/r.py:note",)) | settings
        )
    else:
        settings = dict(batch_size=4) | settings
    if module is grpo:
        settings = dict(num_generations=2) | settings
    return run(module, folder / f"out-{module.__name__}-{abs(hash(str(rows) + str(settings)))}", **settings)


def rows_for_all(prompt, n=4, **columns):
    """Rows that all six scripts can read, with a conversation as prompt."""
    good, bad = told("", "good.")[1:], told("", "bad.")[1:]
    return [dict(prompt=prompt, chosen=good, rejected=bad, messages=[*prompt, *good]) | columns] * n


def prompts_read(folder):
    """What the policy has read, as the reward function was given it last."""
    return json.loads((folder / "given.jsonl").read_text().splitlines()[-1])["prompts_text"]


# --- 1. What a template leaves out


@pytest.mark.parametrize("module", ON_TEXTS, ids=lambda m: m.__name__)
def test_a_turn_that_the_template_leaves_out(module, folder):
    rows = [*rows_for_all(told("The film?")), *rows_for_all(told("What is two and two?", role="narrator"))]
    with pytest.raises(SystemExit, match=r"^error: .*'narrator'.*row 4 of train"):
        start_run(module, folder, rows)


def test_evaluation_and_chat_end_alike(folder, monkeypatch):
    file = write_rows(folder / "e.jsonl", rows_for_all(told("What is two?", role="narrator")))
    with pytest.raises(SystemExit, match="narrator"):
        evaluate.evaluate(evaluate.Args(str(folder / "model"), dataset=file, device="cpu", response_length=4))
    with pytest.raises(SystemExit, match="narrator"):
        chat.encode(told("What is two?", role="narrator"), make_tokenizer(), {})


@pytest.mark.parametrize("messages", [
    told("The film?", role="human"),
    [{"from": "human", "value": "The film?"}],
    [{"role": "user", "content": [{"type": "text", "text": "The "}, {"type": "text", "text": "film?"}]}],
    [{"role": "user", "content": "The film?", "tool_calls": None, "name": None}],
], ids=["role", "sharegpt", "parts", "nulls"])  # fmt: skip
def test_other_spellings_of_a_message(messages):
    tokenizer = make_tokenizer()
    assert ppo.encode_prompt(messages, tokenizer) == ppo.encode_prompt(told("The film?"), tokenizer)
    assert ppo.as_turns([{"role": "developer", "content": "x"}, {"from": "gpt", "value": "y"}], "user") == [
        {"role": "system", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]


CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Basel"}}}]
WRONG = {
    "a number": told(5),
    "no content": [{"role": "user"}],
    "no role": [{"content": "The film?"}],
    "null": [{"role": "user", "content": None}],
    "a dict": told({"text": "The film?"}),
    "a picture": told([{"type": "text", "text": "What?"}, {"type": "image", "image": "x.png"}]),
    "bare texts": ["The film?", "It is good."],
    "a list of conversations": [told("The film?")],
    "one message": {"role": "user", "content": "The film?"},
    "lists in a dict": {"role": ["user"], "content": ["The film?"]},
    "JSON": json.dumps(told("The film?")),
    "Python": str(told("The film?")),
    "a number for a prompt": 5,
    "nothing": None,
    "tool calls": [*told("The film?"), {"role": "assistant", "content": "", "tool_calls": CALL}, *told("Why?")],
    "thoughts": [*told("The film?"), {"role": "user", "content": "Why?", "reasoning_content": "It is a film."}],
}


@pytest.mark.parametrize("prompt", WRONG.values(), ids=WRONG)
def test_what_no_model_would_read(prompt, tmp_path):
    """In a file, each ends the run by a sentence that names the row; nothing is left out, or read as Python's own."""
    file = write_rows(tmp_path / "d.jsonl", [{"prompt": prompt}] * 2)
    data = ppo.load_split(file, None, "train")
    with pytest.raises(SystemExit, match="^error: .*row 0"):
        ppo.encode_prompts(data, make_tokenizer(PLAIN), ppo.Args())


def test_dicts_that_a_template_prints_as_python():
    talk = [*told("The film?"), {"role": "assistant", "content": "", "tool_calls": CALL}, *told("Why?")]
    python = TEMPLATE.replace("arguments | tojson", "arguments")
    assert ppo.encode_prompt(talk, make_tokenizer())
    with pytest.raises(SystemExit, match="tool_calls"):
        ppo.encode_prompt(talk, make_tokenizer(python))


def test_arguments_of_a_tool_call_as_a_text():
    """As OpenAI has them: some templates write the text as it is, most of them in quotes."""
    call = [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}]
    talk = [*told("The film?"), {"role": "assistant", "content": "", "tool_calls": call}, *told("Why?")]
    assert ppo.encode_prompt(talk, make_tokenizer(TEMPLATE.replace("arguments | tojson", "arguments")))
    with pytest.raises(SystemExit, match="arguments"):
        ppo.encode_prompt(talk, make_tokenizer())


def test_conversations_for_a_model_without_a_template():
    with pytest.raises(SystemExit, match="no chat template"):
        ppo.encode_prompt(told("The film?"), make_tokenizer(None))


def test_a_template_that_refuses_says_why():
    tokenizer = make_tokenizer("{{ raise_exception('no system messages here') }}")
    with pytest.raises(SystemExit, match="system, user: no system messages here"):
        ppo.encode_prompt([{"role": "system", "content": "x"}, *told("The film?")], tokenizer)


def test_a_second_run_warns_again(tmp_path):
    """It finds the rows in the library's cache."""
    file = write_rows(tmp_path / "d.jsonl", [{"messages": [m | {"weight": 1} for m in told("", "Good.")]}] * 2)
    for _ in range(2):
        data = sft.load_split(file, None, "train")
        with pytest.warns(UserWarning, match="'weight'"):
            sft.read_texts(data, make_tokenizer(), sft.Args(), 99)


# --- 2. Columns with a meaning


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a town", "parameters": {}}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "JSON"])
@pytest.mark.parametrize("module", ON_TEXTS, ids=lambda m: m.__name__)
def test_tools_and_options_reach_the_template(module, tools, folder, monkeypatch):
    """In every script; a template that reads no tools, or not this option, ends the run."""
    read = []
    render = module.render
    monkeypatch.setattr(module, "render", lambda *given, **more: read.append(render(*given, **more)) or read[-1])
    rows = rows_for_all(told("The film?"), tools=tools, chat_template_kwargs={"thinking": True})
    if isinstance(tools, str):
        start_run(module, folder, rows)
        assert all("weather" in text for text in read if "film" in text)
        assert module in (dpo, reward_model) or any("thinks" in text for text in read)
    model = folder / "no-tools"
    with suppress(FileExistsError):
        AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").save_pretrained(model)
        make_tokenizer(PLAIN).save_pretrained(model)
    for columns, word in ((dict(tools=tools), "weather"), (dict(chat_template_kwargs={"thinking": True}), "thinking")):
        with pytest.raises(SystemExit, match=f"{word}.*row 0"):
            start_run(module, folder, rows_for_all(told("The film?"), **columns), model=str(model))


def test_tools_in_evaluation_and_chat(folder, monkeypatch, capsys):
    rows = rows_for_all(told("The film?"), 1, tools=TOOLS, chat_template_kwargs={"thinking": True})
    args = evaluate.Args(str(folder / "model"), reward_fn=(f"{folder}/r.py:note",), device="cpu", response_length=4)
    args.dataset = write_rows(folder / "t.jsonl", rows)
    evaluate.evaluate(args)
    (text,) = prompts_read(folder)
    assert "weather" in text and text.endswith("assistant: thinks")
    asked = []
    monkeypatch.setattr(chat, "encode_prompt", lambda talk, _, options: asked.append(options) or [5])
    lines = iter(["The film?"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or (_ for _ in ()).throw(EOFError))
    words = ["chat.py", f"{folder}/model", "--response-length", "2", "--tools", json.dumps(TOOLS)]
    monkeypatch.setattr(sys, "argv", [*words, "--chat-template-kwargs", '{"thinking": true}'])
    chat.main()
    assert asked == [{"thinking": True, "tools": TOOLS}]


@pytest.mark.parametrize("column", ["hammer, saw", ["hammer"], {"a": "hammer"}], ids=["text", "texts", "dict"])
def test_a_column_of_tools_that_are_none(column, tmp_path):
    data = ppo.load_split(
        write_rows(tmp_path / "d.jsonl", [dict(prompt=told("The film?"), tools=column)]), None, "train"
    )
    with pytest.raises(SystemExit, match="'tools'.*row 0"):
        ppo.encode_prompts(data, make_tokenizer(), ppo.Args())


@pytest.mark.parametrize("module", ON_TEXTS, ids=lambda m: m.__name__)
def test_columns_that_are_refused(module, folder):
    """Pictures; and tools beside prompts that are texts, which no template reads."""
    with pytest.raises(SystemExit, match="images"):
        start_run(module, folder, rows_for_all(told("The film?"), images=["x.png"]))
    rows = [dict(prompt="The film", completion=" is", chosen=" is", rejected=" was", tools=TOOLS)] * 4
    with pytest.raises(SystemExit, match="tools"):
        start_run(module, folder, rows)


def test_completions_that_were_judged_bad_are_not_taught(folder):
    rows = [dict(prompt="The film", completion=" is good.", label=bool(i % 2)) for i in range(4)]
    with pytest.raises(SystemExit, match="'label'"):
        start_run(sft, folder, rows)


def test_columns_of_two_formats_are_not_both_named(folder):
    rows = rows_for_all(told("The film?"))
    for settings in (dict(text_column="messages", completion_column="chosen"), dict(prompt_column="chosen")):
        with pytest.raises(SystemExit, match="--(text|prompt)-column"):
            start_run(sft, folder, rows, **settings)


@pytest.mark.parametrize("module", [dpo, reward_model], ids=lambda module: module.__name__)
def test_a_text_beside_a_conversation(module, folder):
    rows = [dict(prompt="The film?", chosen="Good.", rejected=[{"role": "assistant", "content": "Bad."}])] * 4
    with pytest.raises(SystemExit, match="list of messages"):
        start_run(module, folder, rows)


def test_a_margin_that_is_no_number(folder):
    rows = [
        dict(prompt="The film?", chosen=" Good.", rejected=" Bad.", margin=margin) for margin in (1.0, "nan", 2.0, 3.0)
    ]
    with pytest.raises(SystemExit, match="'margin'.*row 1"):
        start_run(reward_model, folder, rows)


def test_the_named_column_is_read(folder):
    """In sft.py, though the rows have another of the three formats, too; one that is missing is named with its flag."""
    data = sft.datasets.Dataset.from_list([dict(prompt="The film", completion=" is bad.", story="It sings.")])
    rows = sft.read_texts(data, make_tokenizer(), sft.Args(text_column="story"), 99)
    assert make_tokenizer().decode(rows[0]["ids"]).startswith("It sings.")
    names = [(module, "prompt") for module in ON_TEXTS if module is not sft]
    names += [(module, name) for module in (dpo, reward_model) for name in ("chosen", "rejected")]
    for module, name in [*names, (reward_model, "margin"), (sft, "text")]:
        with pytest.raises(SystemExit, match=f"'question'.* --{name}-column"):
            start_run(module, folder, rows_for_all(told("The film?")), **{f"{name}_column": "question"})


def test_conversations_in_the_column_of_texts():
    """The answers alone are labels, as in the column of messages."""
    talk = [{"role": "user", "content": "The film?"}, {"role": "assistant", "content": "Good."}]
    data = sft.datasets.Dataset.from_list([dict(conversations=talk, messages=talk)])
    rows = [
        sft.read_texts(data, make_tokenizer(), sft.Args(**{f"{kind}_column": "conversations"}), 99)
        for kind in ("messages", "text")
    ]
    assert rows[0].to_list() == rows[1].to_list()
    assert sft.IGNORE in rows[0][0]["labels"]


def test_the_shortest_text_that_can_be_learned():
    """One token, and EOS, which it predicts. An empty text has only EOS, which nothing predicts."""
    data = sft.datasets.Dataset.from_list([dict(text="."), dict(text="")])
    rows = sft.read_texts(data, make_tokenizer(None), sft.Args(), 99)
    assert list(rows["length"]) == [2]


# --- 3. Texts that hold their prompt


@pytest.mark.parametrize("start", ["The film", "The film ", "\nThe film"])
def test_texts_that_hold_their_prompt_are_read_once(start, tmp_path):
    """In all three scripts, as are conversations that do (tests/test_data.py)."""
    tokenizer = make_tokenizer(None)
    read = []
    for head in ("", start):
        rows = [dict(prompt=start.rstrip(), chosen=" is good.", rejected=" is bad.", completion=" is good.")] * 3
        if head:
            rows = [{name: x if name == "prompt" else start.rstrip() + x for name, x in row.items()} for row in rows]
            rows = [row | {"prompt": start} for row in rows]
        data = sft.load_split(write_rows(tmp_path / f"{len(head)}.jsonl", rows), None, "train")
        pair = dpo.encode_pairs(data, tokenizer, dpo.Args(), 300)[0]
        two = reward_model.encode_pairs(data, tokenizer, reward_model.Args(), 300)[0]
        text = sft.read_texts(data, tokenizer, sft.Args(), 300)[0]
        assert two["chosen"] == pair["prompt"] + pair["chosen"] == text["ids"]
        read.append([pair, two, text])
    assert read[0] == read[1]
    assert tokenizer.decode(read[1][0]["chosen"]) == " is good.<|end|>"


def test_messages_that_repeat_the_prompt_may_have_other_keys():
    prompt, turn = "The film?", {"role": "user", "content": "The film?", "num_tokens": 3}
    turns = dpo.whole_turns(prompt, [turn, {"role": "assistant", "content": "Good."}])
    assert [turn["content"] for turn in turns] == ["The film?", "Good."]


SYSTEM = [{"role": "system", "content": "Be brief."}]


@pytest.mark.parametrize("system", [[], SYSTEM], ids=["without", "with a system message"])
@pytest.mark.parametrize("repeated", [0, 1, 3])
def test_answers_of_the_prompt_have_no_loss(system, repeated):
    """However many turns of the prompt the completion repeats."""
    prompt = [*SYSTEM, *told("A film?", "It is good.", "A song?")]
    tokenizer = make_tokenizer()
    completion = [*prompt[1:][3 - repeated :], *told("", "It sings.")[1:]]
    if repeated == 3:
        completion = system + completion
    ids, labels = sft.encode_pair(prompt, completion, tokenizer, True)
    assert tokenizer.decode(ids).count("brief") == 1
    assert tokenizer.decode([x for x in labels if x != sft.IGNORE]).strip() == "It sings.<|end|>"
    if not repeated:
        answered = [*prompt[1:3]], [*SYSTEM, prompt[3], completion[-1]]
        ids, labels = sft.encode_pair(*answered, tokenizer, True)
        assert tokenizer.decode([x for x in labels if x != sft.IGNORE]).strip() == "It sings.<|end|>"


def test_a_prompt_that_is_a_system_message():
    talk = [*SYSTEM, *told("A film?", "Good.")]
    assert sft.whole_turns(SYSTEM, talk) == sft.whole_turns(SYSTEM, talk[1:]) == talk
    with pytest.raises(SystemExit, match="different system messages"):
        sft.whole_turns(SYSTEM, [{"role": "system", "content": "Be rude."}, *talk[1:]])


@pytest.mark.parametrize("module", [dpo, reward_model], ids=lambda module: module.__name__)
def test_both_texts_of_a_pair_answer_one_conversation(module, folder):
    rows = rows_for_all(told("The film?"))
    talks = [[{"role": "system", "content": text}, *told("The film?", "Good.")] for text in ("Be brief.", "Be kind.")]
    rows[1] = rows[1] | dict(prompt=[], chosen=talks[0], rejected=talks[1])
    with pytest.raises(SystemExit, match="row 1"):
        start_run(module, folder, rows)


def test_an_answer_that_begins_otherwise_than_a_rollout():
    """Templates that open a thought for the policy do not write it into the conversation."""
    tokenizer = make_tokenizer(TEMPLATE.replace("{% if thinking %} thinks{% endif %}", " thinks"))
    with pytest.warns(UserWarning, match="chat template"):
        sft.encode_messages(told("The film?", "It is good."), tokenizer, True)


def test_eos_ends_only_answers():
    """Where the chat template has no token that does."""
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    _, labels = sft.encode_messages(told("A film?", "It is good.", "A song?"), tokenizer, True)
    assert tokenizer.eos_token_id not in labels
    _, labels = sft.encode_messages(told("A film?", "It is good."), tokenizer, True)
    assert labels[-1] == tokenizer.eos_token_id


def test_an_answer_that_continues_the_other_one():
    """Both completions have at least one token."""
    short, long = told("A film?", "Good.")[1:], told("A film?", "Good.", "A song?", "It sings.")[1:]
    pair = dpo.encode_preference(told("A film?"), short, long, make_tokenizer())
    assert pair.chosen and pair.chosen == pair.rejected[:1] and len(pair.rejected) > 1


def test_the_column_that_is_named_is_read(tmp_path):
    """Also if it is the last of those that are looked for."""
    rows = [dict(text="The film is good.", **row) for row in rows_for_all(told("A song?"), completion="Good.")]
    data = sft.load_split(write_rows(tmp_path / "d.jsonl", rows), None, "train")
    for column, words in (("text", "The film is good."), ("completion", "Good."), ("messages", "A song?")):
        row = sft.read_texts(data, make_tokenizer(), sft.Args(**{f"{column}_column": column}), 99)[0]
        assert words in make_tokenizer().decode(row["ids"])


def test_white_space_of_texts_without_a_prompt(tmp_path):
    """It stays, though the other texts repeat their prompts."""
    rows = [dict(prompt="The film", completion="The film is good."), dict(prompt="", completion="\n\n is good.")]
    data = sft.load_split(write_rows(tmp_path / "d.jsonl", rows), None, "train")
    texts = sft.read_texts(data, make_tokenizer(None), sft.Args(), 99)["ids"]
    assert [make_tokenizer().decode(ids) for ids in texts] == ["The film is good.<|end|>", "\n\n is good.<|end|>"]


def test_a_test_split_without_labels(tmp_path):
    for split, prompt in (("train", "The film"), ("validation", "The film is " * 20)):
        write_rows(tmp_path / f"{split}.jsonl", [dict(prompt=prompt, completion=" good.")] * 4)
    with pytest.raises(SystemExit, match="test split"):
        run(sft, tmp_path / "run", dataset=str(tmp_path), max_length=16, batch_size=4)


@pytest.mark.parametrize("module", [dpo, sft], ids=lambda module: module.__name__)
def test_micro_batches_fit_the_longest_row_of_the_test_split(module, folder, tmp_path, monkeypatch):
    for split, text in (("train", "It is good."), ("validation", "It is good. " * 9)):
        write_rows(tmp_path / f"{split}.jsonl", [dict(prompt="The film", completion=text, chosen=text, rejected="")])
    sizes = []
    watch(monkeypatch, module, "rows_that_fit", lambda result, model, num_tokens, *_: sizes.append(num_tokens))
    run(module, tmp_path / "run", dataset=str(tmp_path), model="toy/sft", eval_steps=1)
    tokens = len(make_tokenizer()("The film" + "It is good. " * 9)["input_ids"])
    assert min(sizes) > tokens


def test_some_texts_that_begin_with_their_prompt_are_answers(tmp_path):
    """As in the correction of sentences: a text that repeats its prompt is no sign that all do."""
    rows = [dict(prompt="The film is", completion="The film is good."), dict(prompt="A film good", completion="Good.")]
    data = sft.load_split(write_rows(tmp_path / "d.jsonl", rows), None, "train")
    with pytest.warns(UserWarning, match="1 of 2"):
        text = sft.read_texts(data, make_tokenizer(None), sft.Args(), 99)[0]
    assert make_tokenizer().decode(text["ids"]).count("film") == 2


# --- 4. What the loader makes of a column

KINDS = {
    "dates": ["2024-01-05", "2024-01-06"],
    "times": ["2024-01-05T10:00:00Z", "2024-01-06T10:00:00+02:00"],
    "leading zeros": ["007", "0042"],
    "trailing zeros": ["1.50", "2.00"],
    "identifiers": ["12345678901234567890123", "9"],
    "truth": ["True", "False"],
    "lower truth": ["true", "false"],
    "words for nothing": ["None", "NA"],
    "exponents": ["1e5", "2e5"],
}


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("texts", KINDS.values(), ids=KINDS)
def test_texts_stay_what_they_are(texts, kind, tmp_path):
    data = ppo.datasets.Dataset.from_dict({"prompt": ["The film", "A film"], "answer": texts})
    file = tmp_path / f"d.{kind}"
    if kind in ("jsonl", "json"):
        lines = [json.dumps(row) for row in data.to_list()]
        file.write_text("\n".join(lines) if kind == "jsonl" else f"[{', '.join(lines)}]")
    else:
        getattr(data, f"to_{kind}")(file)
    for place in (file, tmp_path):  # the file, and its folder
        assert list(ppo.load_split(str(place), None, "train")["answer"]) == texts


def test_numbers_stay_what_they_are(tmp_path):
    """In JSON: whole ones beside others, long ones, keys that only some rows have. In a csv file: plain ones."""
    rows = [dict(answer=72, id=12345678901234567890, more={"a": 1}), dict(answer=3.5, id=1, more={"b": None})]
    data = ppo.load_split(write_rows(tmp_path / "d.jsonl", rows), None, "train")
    assert data.to_list() == rows and [type(x) for x in data["answer"]] == [int, float]
    rows = [dict(answer=x) for x in (6.674e-11, 3.141592653589793, 10**22 + 1, -0.0)]
    assert ppo.load_split(write_rows(tmp_path / "exact.jsonl", rows), None, "train").to_list() == rows
    file = write_rows(tmp_path / "nan.jsonl", [dict(answer=x) for x in (0.5, float("nan"))])
    assert list(ppo.load_split(file, None, "train")["answer"]) == [0.5, None]
    (tmp_path / "d.csv").write_text("prompt,n,x,some\nA film,1,0.5,7\nThe film,20,3.0,\n")
    data = ppo.load_split(str(tmp_path / "d.csv"), None, "train")
    assert ppo.with_numbers(data, "prompt").to_list() == [
        {"prompt": "A film", "n": 1, "x": 0.5, "some": "7"},
        {"prompt": "The film", "n": 20, "x": 3.0, "some": None},
    ]


@pytest.mark.parametrize("module", ON_TEXTS, ids=lambda m: m.__name__)
def test_texts_that_are_numbers(module, folder, tmp_path):
    """All of them, in a csv file."""
    (tmp_path / "d.csv").write_text("prompt,completion,chosen,rejected\n" + "12,4,4,5\n20,5,5,4\n" * 2)
    model = "toy/reward_model" if module is reward_model else "toy/sft"
    start_run(module, folder, [], model=model, dataset=str(tmp_path / "d.csv"))


@pytest.mark.parametrize("module", ON_ROLLOUTS, ids=lambda m: m.__name__)
def test_types_that_differ_between_splits(module, folder, tmp_path):
    """In csv files, whose columns are numbers only if all cells are."""
    (tmp_path / "train.csv").write_text("prompt,answer\n" + "A film,2\nThe film,4\n" * 2)
    (tmp_path / "validation.csv").write_text("prompt,answer\nA film,2\nThe film,0.50\n")
    with pytest.warns(UserWarning, match="'answer'"):
        start_run(module, folder, [], model="toy/sft", dataset=str(tmp_path))


def test_types_that_differ_within_a_column(tmp_path):
    """The library would read this text as a number: the run says so."""
    file = write_rows(tmp_path / "d.jsonl", [{"prompt": "The film", "answer": x} for x in (72, "72", "none")])
    with pytest.warns(UserWarning, match="several types"):
        ppo.load_split(file, None, "train")


@pytest.mark.parametrize("place", ["d.csv", ""], ids=["file", "folder"])
def test_commas_without_quotes(place, tmp_path):
    """In each row of a csv file: its first cell would be dropped."""
    (tmp_path / "d.csv").write_text("prompt,chosen,rejected\nIs it, good?,yes,no\nIs it, bad?,no,yes\n")
    with pytest.raises(SystemExit, match="d.csv.*comma"):
        ppo.load_split(str(tmp_path / place), None, "train")


def test_dates_in_messages_and_in_a_typed_file(tmp_path, folder, capsys):
    """A turn may be a date. Of a parquet file, whose dates are dates, the run says so."""
    data = ppo.load_split(write_rows(tmp_path / "d.jsonl", [{"prompt": told("2024-01-05")}] * 2), None, "train")
    assert data[0]["prompt"][0]["content"] == "2024-01-05"
    data = ppo.datasets.Dataset.from_dict({"prompt": ["The film"] * 4, "answer": [datetime(2024, 1, 5)] * 4})
    data.to_parquet(tmp_path / "d.parquet")
    settings = dict(dataset=f"{tmp_path}/d.parquet", reward_fn=(f"{folder}/r.py:note",))
    run(rloo, tmp_path / "out", batch_size=4, total_episodes=4, rloo_k=2, response_length=4, **settings)
    assert re.search(r"answer \(timestamp", capsys.readouterr().out)


def test_files_that_are_none(tmp_path):
    (tmp_path / "d.jsonl").write_text("Once upon a time\nthere was a file.\n")
    (tmp_path / "d.tsv").write_text("prompt\tx\nThe film\t1\n")
    with pytest.raises(SystemExit, match="d.jsonl cannot be read"):
        ppo.load_split(str(tmp_path / "d.jsonl"), None, "train")
    with pytest.raises(SystemExit, match="d.tsv"):
        ppo.load_split(str(tmp_path / "d.tsv"), None, "train")


def test_names_that_look_like_patterns(tmp_path):
    """A file in them is read, beside a script of the folder's name; a folder is refused."""
    place = tmp_path / "a [1]" / "data"
    place.mkdir(parents=True)
    (place / "data.py").write_text("")
    rows = [{"prompt": "The film"}]
    assert ppo.load_split(write_rows(place / "d[2].jsonl", rows), None, "train").to_list() == rows
    with pytest.raises(SystemExit, match="pattern"):
        ppo.load_split(str(place), None, "train")


# --- 5. The first space of a completion


@pytest.fixture(scope="module")
def sentencepiece():
    """A tokenizer of Llama 2's kind: a space before every text, and none of it in the text that comes back."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), strip])
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>"], vocab_size=200, show_progress=False)
    backend.train_from_iterator(["The film went home. The film is good. The tree went home."] * 9, trainer)
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.mark.parametrize(
    "prompt, text", [("The film", " went home."), ("The film ", "went home."), ("The fi", "lm is")]
)
@pytest.mark.filterwarnings("ignore:some prompts end within")
def test_a_completion_has_the_tokens_of_the_whole_text(sentencepiece, prompt, text):
    whole = sentencepiece(prompt + text)["input_ids"] + [sentencepiece.eos_token_id]
    ids, labels = sft.encode_pair(prompt, text, sentencepiece, True)
    pair = dpo.encode_preference(prompt, text, " is", sentencepiece)
    assert ids == pair.prompt + pair.chosen == reward_model.encode_whole(prompt, text, sentencepiece) == whole
    assert [x for x in labels if x != sft.IGNORE] == pair.chosen
    alone = sentencepiece(prompt)["input_ids"]
    assert pair.prompt == alone[: len(pair.prompt)]
    if not prompt.endswith(" "):
        assert sentencepiece.convert_tokens_to_ids("▁") not in pair.chosen


def test_a_prompt_that_ends_within_a_token_is_named(sentencepiece):
    for encode in (sft.encode_pair, dpo.encode_preference):
        with pytest.warns(UserWarning, match="within a token"):
            encode(
                "The film ",
                "went home.",
                *([sentencepiece, True] if encode is sft.encode_pair else ["is", sentencepiece]),
            )


def test_a_response_is_the_text_behind_its_prompt(sentencepiece):
    """With the space that SentencePiece drops from what is decoded alone."""
    ids = sentencepiece("The film went home.")["input_ids"]
    n = len(sentencepiece("The film")["input_ids"])
    assert sentencepiece.decode(ids[n:]) == "went home."
    assert ppo.decode_after(ids[:n], ids[n:], sentencepiece) == " went home."
    assert ppo.decode_after(ids, [sentencepiece.eos_token_id], sentencepiece) == ""


# --- 6. Tokenizers that end every text


@pytest.mark.parametrize("form", ["$A <|end|>", "<|pad|> $A <|end|>", "<|pad|> $A <|sep|>"], ids=["T5", "BOS", "BERT"])
def test_a_prompt_goes_on(form):
    tokenizer = make_tokenizer(None)
    tokenizer.add_special_tokens({"bos_token": "<|pad|>", "sep_token": "<|sep|>"})
    words = tokenizer(" is good.")["input_ids"]
    special = [(x, tokenizer.convert_tokens_to_ids(x)) for x in ("<|pad|>", "<|end|>", "<|sep|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=form, special_tokens=special)
    start = [tokenizer.bos_token_id] * form.startswith("<|pad|>")
    end = [tokenizer.eos_token_id]
    assert len(tokenizer(" is good.")["input_ids"]) == len(start + words) + 1
    assert ppo.encode_prompt(" is good.", tokenizer) == start + words
    assert ppo.encode_prompt(" is good.<|end|>", tokenizer) == start + words + end  # the user's own stays
    assert sft.encode_pair(" is good.", " is good.", tokenizer, True)[0] == start + words + words + end
    assert reward_model.encode_whole(" is good.", " is good.", tokenizer) == start + words + words + end
    assert dpo.encode_preference(" is good.", " is good.", "", tokenizer).prompt == start + words


# --- 7. What a reward function is given


def test_a_function_is_given_the_prompt_as_it_was_read(folder):
    """`tagged` sees the <think> that a template opens, which messages do not show."""
    rows = rows_for_all(told("The film?"), chat_template_kwargs={"thinking": True})
    for module in ON_ROLLOUTS:
        start_run(module, folder, rows)
        assert set(prompts_read(folder)) == {"user: The film?<|end|>assistant: thinks"}
    tagged = ppo.load_function(f"{ROOT}/rewards/verifiers.py:tagged")
    said = [[{"role": "assistant", "content": "It sings.</think><answer>good</answer>"}]]
    assert tagged(prompts=[told("The film?")], completions=said, prompts_text=["<|user|>The film?<think>\n"]) == [1.0]
    assert tagged(prompts=[told("The film?")], completions=said, prompts_text=["<|user|>The film?"]) == [0.0]


MISTAKES = {
    "one number": "return 1.0",
    "nothing": "return None",
    "a text": "return 'good'",
    "texts": "return ['1.0'] * len(completions)",
    "too few": "return []",
    "an error": "return completions[99]",
    "a coroutine": "return [1.0] * len(completions)",
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_wrong_reward_function_costs_no_rollout(kind, tmp_path, monkeypatch):
    text = f"{'async ' * (kind == 'a coroutine')}def f(completions, **_):\n    {MISTAKES[kind]}\n"
    (tmp_path / "r.py").write_text(text)
    monkeypatch.setattr(rloo, "sample_batch", lambda *_: pytest.fail("it samples"))
    with pytest.raises((SystemExit, IndexError)):
        run(rloo, tmp_path / "out", reward_fn=(f"{tmp_path}/r.py:f",), batch_size=4, total_episodes=4, rloo_k=2)
    assert not (tmp_path / "out").exists()


# --- 8. Reward models


def test_a_reward_model_that_is_trained_further_keeps_its_head():
    known = AutoModelForSequenceClassification.from_pretrained(ROOT / "toy/reward_model")
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(reward_model.load_reward_model(reward_model.Args(model="toy/reward_model", device="cpu")))
    for model in models:
        assert model.score.weight.equal(known.score.weight)
        assert model.config.reward_bias == getattr(known.config, "reward_bias", 0.0)
    fresh = reward_model.load_reward_model(reward_model.Args(model="toy/sft", device="cpu"))
    assert not fresh.score.weight.equal(known.score.weight) and fresh.score.weight.std() > 0


def test_the_bias_of_a_reward_model_that_is_trained_further(tmp_path, clear_pairs):
    """Its mean reward ends at 0, wherever it began."""
    model = AutoModelForSequenceClassification.from_pretrained(ROOT / "toy/reward_model")
    model.config.reward_bias = 7.0
    model.save_pretrained(tmp_path / "rm")
    AutoTokenizer.from_pretrained(ROOT / "toy/reward_model").save_pretrained(tmp_path / "rm")
    settings = dict(model=str(tmp_path / "rm"), dataset=clear_pairs, learning_rate=1e-9, batch_size=192)
    lines = run(reward_model, tmp_path / "out", **settings)
    assert lines[0]["accuracy"] > 0.9 and abs(lines[-1]["eval/mean_reward"]) < 1


def test_a_reward_model_with_another_template_reads_its_own(folder):
    """The policy's tokens, but conversations as it has learnt to read them."""
    args = ppo.Args(model=str(folder / "model"), device="cpu", micro_batch_size=2)
    policy = ppo.load_policy(args)
    model = ppo.load_reward_model(args, policy)
    model.tokenizer.chat_template = PLAIN.replace("{{ m.role }}:", "{{ m.role | upper }} says")
    rows = [{"prompt": told("The film?")}, {"prompt": told("Why?")}]
    texts = [reward_model.encode_whole(row["prompt"], "good.", model.tokenizer) for row in rows]
    assert_reads(model, policy, rows, texts, args)


def test_a_reward_model_with_another_tokenizer_reads_plain_texts():
    """Without the policy's special tokens, and without a chat template, though it has one."""
    args = ppo.Args(device="cpu", micro_batch_size=2)
    policy = ppo.load_policy(args)
    policy.tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    begin = ("<|begin|>", policy.tokenizer.bos_token_id)
    policy.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[begin]
    )
    model = ppo.load_reward_model(args, policy)
    model.tokenizer.chat_template = PLAIN
    rows = [{"prompt": "The film is"}, {"prompt": "We say that it is very"}]
    texts = [model.tokenizer(row["prompt"] + " good.<|end|>")["input_ids"] for row in rows]
    assert_reads(model, policy, rows, texts, args)


def assert_reads(model, policy, rows, texts, args):
    """In a rollout with the answer " good.", a reward model reads these token ids."""
    ids = [ppo.encode_prompt(row["prompt"], policy.tokenizer) for row in rows]
    answers = [policy.tokenizer(" good.", add_special_tokens=False)["input_ids"] + [policy.tokenizer.eos_token_id]] * 2
    prompts = ppo.pad(ids, policy.tokenizer, args, "left")
    responses, mask = ppo.pad(answers, policy.tokenizer, args)
    rollout = ppo.Rollout(*prompts, responses, mask, mask[:, 0], torch.zeros(mask.shape), rows)
    given = ppo.model_reward(model, policy, args)(rollout)
    ids, mask = ppo.pad(texts, model.tokenizer, args)
    with torch.no_grad():
        expected = ppo.read_reward(model, ids, mask.long())
    assert given.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


# --- The run shows what it reads


@pytest.mark.parametrize("module", ON_TEXTS, ids=lambda m: m.__name__)
def test_the_first_row_is_shown(module, folder, capsys):
    """As the model reads it, special tokens and all, before anything is trained; and how many rows there are."""
    start_run(module, folder, rows_for_all(told("The film?")), num_sample_generations=0)
    out = capsys.readouterr().out
    shown = out.partition("the first row")[2].partition("output:")[0]
    assert "user: The film?<|end|>assistant:" in re.sub(r"[\s│]+", " ", shown)
    assert re.search(r"train \w+: \d+, of \d+ to \d+ tokens, median \d+", out)
    if module in (dpo, reward_model):
        assert "good." in shown and "bad." in shown
    if module is sft:
        text = module.as_read([5, 6, 7], make_tokenizer(), [False, True, True])
        assert [span.style for span in text.spans] == ["green"] and text.spans[0].end == len(text)


@pytest.mark.parametrize("module, unread", [(sft, "prompt, chosen, rejected, note"), (dpo, "messages, note")])
def test_columns_that_are_not_read(module, unread, folder, capsys):
    """Alpaca's column `input`, say, which belongs to the prompt."""
    start_run(module, folder, rows_for_all(told("The film?"), note="three"))
    assert any(line.endswith(f": {unread}") for line in capsys.readouterr().out.splitlines())
