"""From a row to tokens, and back: the forms of rows that the scripts read, and rows that end a run before it begins."""

import json
import math
import os

import datasets
import pytest
from runs import NAMES, ON_PROMPTS, is_in, run, tokens_read, write_rows
from sources import ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import ppo

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% if quiet %} (quiet){% endif %}{% endif %}"
)
GRUMPY = TEMPLATE + "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}"
DEAF = TEMPLATE.replace("{{ m.role }}:", "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}:")
OF_PROMPTS = [name for name in NAMES if name == "ppo"]  # the others have the same functions
OF_PAIRS = [name for name in NAMES if name == "dpo"]  # reward_model.py has the same function
OF_TEXTS = [name for name in NAMES if name == "sft"]


def talk(*texts):
    """Messages of the user and the assistant, in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def say(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(script, rows or a path, template, changes of the tokenizer) runs a script on rows; it gives the tokens that
    models have read."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "r.py").write_text("def f(completion_ids, **_):\n    return [float(sum(ids)) for ids in completion_ids]")

    def call(name, rows, template=TEMPLATE, changes={}, **settings):
        model = folder / f"model{hash(template)}{hash(str(changes))}"
        if not model.exists():
            policy = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft")
            tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft", **changes)
            policy.generation_config.eos_token_id = policy.config.eos_token_id = tokenizer.eos_token_id
            policy.save_pretrained(model)
            tokenizer.chat_template = template
            tokenizer.save_pretrained(model)
        number = len(list(folder.iterdir()))
        data = write_rows(folder / f"rows{number}.jsonl", rows) if isinstance(rows, list) else str(rows)
        sizes = dict(model=str(model), dataset=data, batch_size=4) | settings
        if name in ON_PROMPTS:
            few = dict(total_episodes=sizes["batch_size"], response_length=4, num_ppo_epochs=1)
            few |= {"grpo": dict(num_generations=2), "agent": dict(num_generations=2)}.get(name, {})
            sizes = (dict(reward_fn=(f"{folder}/r.py:f",)) if name != "agent" else {}) | few | sizes
        with tokens_read() as read:
            run(name, folder / f"run{number}", **sizes)
        return read

    return call


def read_as(text):
    return AutoTokenizer.from_pretrained(ROOT / "toy/sft")(text, add_special_tokens=False)["input_ids"]


# --- Forms that are read, and how the models read them

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
ASKED, OK, NO = "user: The film?<|end|>\nassistant:", " Good.<|end|>", " Bad.<|end|>"
SO = "user: So?<|end|>\nassistant: So.<|end|>\n"
QUESTION, TALK, BOTH = talk("The film?"), talk("So?", "So.", "The film?"), [ASKED + OK, ASKED + NO]
AFTER_SO = [SO + text for text in BOTH]
WITH_TOOLS = f"tools: {json.dumps(TOOLS)}\n{ASKED} (quiet)"
GOOD, BAD = "The film is good.<|end|>", "The film is bad.<|end|>"
FORMS = {  # scripts, row, texts that their models read
    "a prompt": (OF_PROMPTS, dict(prompt="The film", answer=None), ["The film"]),
    "messages": (OF_PROMPTS, dict(prompt=QUESTION, tools=None, chat_template_kwargs=None), [ASKED]),
    "tools": (OF_PROMPTS, dict(prompt=QUESTION, tools=TOOLS, chat_template_kwargs={"quiet": True}), [WITH_TOOLS]),
    "messages and completion": (OF_TEXTS, dict(prompt=QUESTION, completion=say("Good.")), [ASKED + OK]),
    "a pair": (OF_PAIRS, dict(prompt="The film", chosen=" is good.", rejected=" is bad."), [GOOD, BAD]),
    "a pair of messages": (OF_PAIRS, dict(prompt=QUESTION, chosen=say("Good."), rejected=say("Bad.")), BOTH),
    "two conversations": (
        OF_PAIRS,
        dict(chosen=TALK + say("Good."), rejected=TALK + say("Bad.")),
        [SO + x for x in BOTH],
    ),
}
CASES = [(name, form) for form, (names, *_) in FORMS.items() for name in names]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_form_is_read_as_these_texts(name, form, start):
    _, row, texts = FORMS[form]
    read = start(name, [row] * 4)
    for text in texts:
        assert is_in(read_as(text), read), text


# --- Rows that are refused

PROMPT = dict(prompt=talk("The film?"))
WRONG_MESSAGES = {  # in any column of messages
    "a text and messages": "The film?",
    "null": None,
    "another key": [{"role": "user", "content": "The film?", "name": "Eve"}],
    "content of parts": [{"role": "user", "content": [{"type": "text", "text": "The film?"}]}],
    "empty content": [{"role": "user", "content": " "}],
    "the answer is last": talk("The film?", "Good."),
}
TEXT = dict(prompt="The film", completion=" is good.")
CHAT = dict(messages=talk("The film?", "Good."))
SAID = dict(prompt=talk("A?"), completion=say("B"))
PAIR = dict(prompt="The film", chosen=" is good.", rejected=" is bad.")
TALKS = dict(chosen=talk("The film?", "Good."), rejected=talk("The film?", "Bad."))
SYSTEM = [{"role": "system", "content": "Be brief."}, *talk("The film?")]
SWAPS = dict(prompt="ball 2 -- 34 :")
WRONG = [(OF_PROMPTS, what, PROMPT, dict(prompt=x)) for what, x in WRONG_MESSAGES.items()]
WRONG += [(OF_PROMPTS, f"{x!r} for a row", SWAPS, x) for x in ("Hello", None, [1])]
OPTIONS = ('{"quiet": true}', {"chat_template": "{{ messages[0].content }}"})
WRONG += [(OF_PROMPTS, f"options: {x!r:.20}", PROMPT, PROMPT | dict(chat_template_kwargs=x)) for x in OPTIONS]
WRONG += [  # scripts, what is wrong, three good rows, the wrong row, and settings
    (OF_PROMPTS, "an empty prompt", dict(prompt="The film"), dict(prompt="")),
    (OF_PROMPTS, "no prompt", dict(prompt="The film"), dict(text="The film")),
    (OF_PROMPTS, "the template refuses", PROMPT, dict(prompt=SYSTEM), dict(template=GRUMPY)),
    (OF_PROMPTS, "the template leaves out a message", PROMPT, dict(prompt=SYSTEM), dict(template=DEAF)),
    (OF_PROMPTS, "no chat template", dict(prompt="The film"), PROMPT, dict(template=None)),
    (OF_PROMPTS, "an unknown word", SWAPS, dict(prompt="ball 2 -- zebra :"), dict(model="toy/shells/sft")),
    (OF_TEXTS, "an empty completion", TEXT, TEXT | dict(completion="")),
    (OF_TEXTS, "a space of the prompt joins the completion", TEXT, dict(prompt="The film ", completion="is good.")),
    (OF_TEXTS, "no answer", CHAT, dict(messages=talk("The film?"))),
    (OF_TEXTS, "ShareGPT", CHAT, dict(messages=[*talk("The film?"), {"from": "gpt", "value": "It is good."}])),
    (OF_TEXTS, "a prompt as JSON", TEXT, TEXT | dict(prompt=json.dumps(talk("The film?")))),
    (OF_TEXTS, "a prompt as indented JSON", TEXT, TEXT | dict(prompt=json.dumps(talk("The film?"), indent=2))),
    (OF_TEXTS, "the user completes", SAID, SAID | dict(completion=talk("B"))),
    (OF_TEXTS, "the prompt again", TEXT, TEXT | dict(completion="The film is good.")),
    (OF_TEXTS, "a label", TEXT, TEXT | dict(label=False)),
    (OF_PAIRS, "an empty side", PAIR, PAIR | dict(rejected="")),
    (OF_PAIRS, "the same twice", PAIR, PAIR | dict(rejected=" is good.")),
    (OF_PAIRS, "a space of the prompt", PAIR, dict(prompt="The film ", chosen="is good.", rejected="is bad.")),
    (OF_PAIRS, "the prompt again", PAIR, PAIR | dict(chosen="The film is good.", rejected="The film is bad.")),
    (OF_PAIRS, "a margin of NaN", PAIR, PAIR | dict(margin=math.nan)),
    (OF_PAIRS, "a text and messages", PAIR, PAIR | dict(chosen=say("Good."))),
    (OF_PAIRS, "no answer", TALKS, TALKS | dict(rejected=talk("The film?"))),
    (OF_PAIRS, "another beginning", TALKS, TALKS | dict(rejected=talk("The book?", "Bad."))),
    (OF_PAIRS, "the prompt in messages", TALKS, TALKS | dict(prompt=talk("The film?"))),
    (OF_PAIRS, "a text beside talks", TALKS, TALKS | dict(prompt="The film?")),
]
CASES = [pytest.param((name, *rows), id=f"{name}-{what}") for names, what, *rows in WRONG for name in names]


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_row_is_refused_by_its_number(case, start):
    """The third of four. The message names it."""
    name, good, wrong, *settings = case
    with pytest.raises(SystemExit, match=r"^error: (.*\b[Rr]ow 3\b|the column .* in some rows)"):
        start(name, [good, good, wrong, good], **dict(*settings))


WRONG_FILES = [("d.csv", "prompt,answer\nA,B\n"), ("d.json", '[{"prompt": "A"}]'), ("d.jsonl", '{"text": "A"}\n{"te')]


@pytest.mark.parametrize("name", ["sft", "dpo", "ppo"])
@pytest.mark.parametrize("file, text", WRONG_FILES)
def test_wrong_files_are_refused(file, text, name, tmp_path, start):
    (tmp_path / file).write_text(text)
    with pytest.raises(SystemExit, match="^error: .*jsonl"):
        start(name, tmp_path / file)


# --- Files


def test_files_and_their_splits(tmp_path, start, capsys):
    """A file is the train split; in a folder, other files are not read."""
    write_rows(tmp_path / "train.jsonl", [{"text": "The film"}] * 4)
    write_rows(tmp_path / "validation.jsonl", [{"text": "I thought"}] * 4)
    datasets.Dataset.from_list([{"text": "The film"}] * 4).to_parquet(tmp_path / "one.parquet")
    for source, file in ((tmp_path, "train.jsonl"), (tmp_path / "one.parquet", "one.parquet")):
        read = start("sft", source)
        assert is_in(read_as("The film"), read)
        assert is_in(read_as("I thought"), read) == (source == tmp_path)
        assert f"{tmp_path}/{file}" in capsys.readouterr().out


def test_a_parquet_file_is_read_as_its_rows_were_written(tmp_path, start):
    """Without the nulls that it puts into tools; and again if it has changed, whatever its date says."""
    file = tmp_path / "train.parquet"
    tools = [[dict(name="add", parameters={x: {"type": "number"}})] for x in "ab"]
    for text in ("The film?", "The book?"):
        datasets.Dataset.from_list([dict(prompt=talk(text), tools=x) for x in tools * 2]).to_parquet(file)
        os.utime(file, (0, 0))
        read = start("ppo", file)
        for x in tools:
            assert is_in(read_as(f"tools: {json.dumps(x)}\nuser: {text}"), read)


# --- Tokenizers, and back


def test_a_tokenizer_may_name_ids_alone(start):
    start("sft", [TEXT] * 4, changes=dict(model_input_names=["input_ids"]))


@pytest.mark.parametrize(("name", "row"), [("sft", TEXT), ("dpo", PAIR), ("ppo", dict(prompt="The film"))])
def test_a_tokenizer_without_eos_is_refused(name, row, start):
    with pytest.raises(SystemExit, match="^error: "):
        start(name, [row] * 4, changes=dict(eos_token=None))


def test_a_response_keeps_its_first_space(tmp_path, start):
    """SentencePiece drops the first space of a text, so a response is decoded behind its prompt."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    texts = [json.loads(line)["prompt"] for line in open(ROOT / "toy/data/prompts/train.jsonl")][:200]
    model.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", pad_token="<s>")
    policy = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft")
    policy.resize_token_embeddings(len(tokenizer))
    for part in (policy, tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "r.py").write_text(f"""import transformers
t = transformers.AutoTokenizer.from_pretrained({str(tmp_path / "model")!r})
def f(prompts, completions, completion_ids, **_):
    for x, y, ids in zip(prompts, completions, completion_ids):
        first = t.convert_ids_to_tokens(ids[0])
        assert y.startswith(" ") == first.startswith("▁") or first in t.all_special_tokens
        assert x + y == t.decode(t(x)["input_ids"] + ids, skip_special_tokens=True)
    return [float(y.startswith(" ")) for y in completions]""")
    rows = [{"prompt": text} for text in ("I thought", "The film", "My queen told me", "What")]
    start("ppo", rows, model=str(tmp_path / "model"), reward_fn=(f"{tmp_path}/r.py:f",), batch_size=16)


def test_a_tokenizer_may_add_eos():
    """A text goes on: what is read has no EOS at its end. (Some community models add it.)"""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    [plain] = ppo.encode(["The film"], tokenizer)
    end = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    assert tokenizer("The film")["input_ids"][-1] == end[1]
    assert [ids.tolist() for ids in ppo.encode(["The film"], tokenizer)] == [plain.tolist()]
