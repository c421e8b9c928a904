"""Data: folders, files and splits; batches; texts, pairs and conversations as tokens."""

import json
from collections import Counter

import pytest
from runs import run
from sources import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
import ppo
import reward_model
import sft


def write_rows(file, rows):
    """A jsonl file of these rows; its name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


# --- Files, splits, columns


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_files(tmp_path, kind):
    data = ppo.datasets.Dataset.from_dict({"prompt": ["The film", "A tree"], "answer": [1, 2]})
    file = str(tmp_path / f"d.{kind}")
    if kind == "jsonl":
        data.to_json(file)
    elif kind == "json":
        (tmp_path / "d.json").write_text(json.dumps(data.to_list()))
    else:
        getattr(data, f"to_{kind}")(file)
    assert ppo.load_split(file, None, "train").to_list() == data.to_list()


def test_a_file_is_one_split(tmp_path):
    """All of it is trained on, unless a part is asked for, in the syntax of `datasets`."""
    file = write_rows(tmp_path / "d.jsonl", [{"prompt": f"The film {i}"} for i in range(8)])
    train, test = ppo.load_data(ppo.Args(dataset=file))
    assert len(train) == 8
    assert test is None
    with pytest.raises(ValueError, match="(?i)split"):
        ppo.load_data(ppo.Args(dataset=file, dataset_test_split="validation"))
    train, test = ppo.load_data(ppo.Args(dataset=file, dataset_train_split="train[2:]", dataset_test_split="train[:2]"))
    assert (len(train), len(test)) == (6, 2)


def test_prompts_that_are_dropped(tmp_path, capsys):
    """Empty ones, and long ones; they are counted. Other columns stay beside the rest."""
    rows = [
        {"prompt": "The film", "answer": 3},
        {"prompt": "", "answer": 4},
        {"prompt": "a b c d e f g h", "answer": 5},
    ]
    data = ppo.load_split(write_rows(tmp_path / "d.jsonl", rows), None, "train")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    kept = ppo.encode_prompts(data, tokenizer, ppo.Args(max_prompt_length=4))
    assert [(row["prompt"], row["answer"]) for row in kept] == [("The film", 3)]
    assert kept[0]["input_ids"] == tokenizer("The film")["input_ids"]
    assert "2 of 3" in capsys.readouterr().out


# --- Batches


def test_batches_are_passes_each_in_its_own_order():
    """Five rows in batches of two: each pass has every row once, though batches do not end with it."""
    rows = list("abcde")
    drawn = [x for number in range(10) for x in ppo.batch(rows, number, 2, seed=1)]
    passes = ["".join(drawn[start : start + 5]) for start in range(0, 20, 5)]
    assert all(Counter(one) == Counter(rows) for one in passes)
    assert len(set(passes)) > 1
    assert drawn[:2] == ppo.batch(rows, 0, 2, seed=1)  # whichever batches came before
    assert [ppo.batch(rows, n, 5, seed=1) for n in range(3)] != [ppo.batch(rows, n, 5, seed=2) for n in range(3)]


def test_seeds_of_steps_and_passes_differ():
    numbers = [(seed, step) for seed in range(30) for step in range(30)] + [(1, step, 1) for step in range(30)]
    assert len({ppo.make_seed(*x) for x in numbers}) == len(numbers)


def test_padding_is_known_by_position():
    """Though the padding token may stand in the text, as where EOS is the padding token."""
    args = ppo.Args(device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    tokenizer.pad_token = tokenizer.eos_token
    eos = tokenizer.eos_token_id
    ids, mask = ppo.pad([[5, eos], [7]], tokenizer, args)
    assert ids.tolist() == [[5, eos], [7, eos]]
    assert mask.tolist() == [[True, True], [True, False]]
    ids, mask = ppo.pad([[5, eos], [7]], tokenizer, args, "left")
    assert ids.tolist() == [[5, eos], [eos, 7]]
    assert mask.tolist() == [[True, True], [False, True]]


# --- Conversations

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def tokenizer():
    """The toy tokenizer with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def chat_model(tmp_path, tokenizer):
    """A folder with the toy model and that tokenizer."""
    AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    return str(tmp_path / "m")


def turns(*contents):
    """A conversation, which the user begins."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def labelled(ids, labels, tokenizer):
    """The text that carries the loss."""
    assert all(label in (token, sft.IGNORE) for token, label in zip(ids, labels, strict=True))
    return tokenizer.decode([label for label in labels if label != sft.IGNORE])


def test_the_assistants_words_carry_the_loss(tokenizer):
    """And the end of each of its turns; nothing else does, unless all is asked for."""
    messages = turns("The film", "is good.", "Why", "It sings.")
    ids, labels = sft.encode_messages(messages, tokenizer, True)
    text = "user: The film<|end|>assistant: is good.<|end|>user: Why<|end|>assistant: It sings.<|end|>"
    assert tokenizer.decode(ids) == text
    assert labelled(ids, labels, tokenizer) == " is good.<|end|> It sings.<|end|>"
    assert sft.encode_messages(messages, tokenizer, False)[1] == ids


def test_prompts_as_messages(tokenizer, chat_model, tmp_path):
    """The assistant is to speak next; before a completion or a pair they are its beginning."""
    prompt = turns("The film", "is", "what")
    head = "user: The film<|end|>assistant: is<|end|>user: what<|end|>assistant:"
    assert tokenizer.decode(ppo.encode_texts([prompt], tokenizer)[0]) == head
    for completion in ("good.", [{"role": "assistant", "content": "good."}]):
        ids, labels = sft.encode_pair(prompt, completion, tokenizer, True)
        assert tokenizer.decode(ids) == f"{head} good.<|end|>"
        assert labelled(ids, labels, tokenizer).strip() == "good.<|end|>"
        assert sft.encode_pair(prompt, completion, tokenizer, False)[1] == ids
        assert (
            tokenizer.decode(reward_model.encode_conversation(prompt, completion, tokenizer)) == f"{head} good.<|end|>"
        )
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": prompt}] * 8)
    run(ppo, tmp_path / "out", model=chat_model, dataset=data, batch_size=8, total_episodes=8, response_length=4)


def test_a_prompt_beside_messages_is_read_once(tokenizer):
    """A text as prompt, beside messages that hold it too (as in ultrafeedback_binarized), or that go on from it."""
    tokenizer.chat_template += "{{ '\\n' }}"  # as ChatML ends
    eos = tokenizer.eos_token
    for start in (turns("The film"), []):
        good = start + [{"role": "assistant", "content": "good."}]
        bad = start + [{"role": "assistant", "content": "bad."}]
        text = reward_model.encode_conversation("The film", good, tokenizer)
        assert tokenizer.decode(text) == f"user: The film{eos}assistant: good.{eos}"
        pair = dpo.encode_preference("The film", good, bad, tokenizer)
        assert tokenizer.decode(pair.prompt) == f"user: The film{eos}assistant:"
        assert tokenizer.decode(pair.chosen) == f" good.{eos}"
        assert tokenizer.decode(pair.rejected) == f" bad.{eos}"


def test_conversations_in_a_run(chat_model, tmp_path):
    talk = turns("The film", "is good.", "Why", "It sings.")
    rows = [{"messages": talk, "chosen": talk, "rejected": turns("The film", "is good.", "Why", "Is it?")}] * 16
    settings = dict(model=chat_model, dataset=write_rows(tmp_path / "d.jsonl", rows), batch_size=4)
    assert run(sft, tmp_path / "sft", packing=True, max_length=16, **settings)[-1]["loss"] > 0
    assert run(reward_model, tmp_path / "rm", **settings)[-1]["loss"] > 0
    assert run(dpo, tmp_path / "dpo", **settings)[-1]["loss"] > 0


# --- Texts and pairs


def test_texts_that_are_cut(capsys):
    """Those that so lose all that was to be predicted are dropped."""
    long = ([1, 2, 3, 4], [sft.IGNORE, sft.IGNORE, sft.IGNORE, 4])
    assert sft.cut([long, ([1, 2], [1, 2]), ([1, 2, 3, 9], [1, 2, 3, 9])], 3) == [
        ([1, 2], [1, 2]),
        ([1, 2, 3], [1, 2, 3]),
    ]
    assert "cut 2 of 3" in capsys.readouterr().out


def test_margin_and_whole_texts(tmp_path):
    """Pairs without a prompt column; a margin column enters the loss."""
    rows = [{"chosen": f"The film is good {i}.", "rejected": f"The film is bad {i}."} for i in range(8)]
    plain = write_rows(tmp_path / "a.jsonl", rows)
    wide = write_rows(tmp_path / "b.jsonl", [row | {"margin": 2.0} for row in rows])
    (a,) = run(reward_model, tmp_path / "a", dataset=plain)
    (b,) = run(reward_model, tmp_path / "b", dataset=wide)
    assert b["loss"] > a["loss"] + 0.5
    assert b["margin"] == pytest.approx(a["margin"])
