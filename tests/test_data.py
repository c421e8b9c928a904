"""Data: folders, files and splits; batches; texts, pairs and conversations as tokens."""

import warnings

import pytest
from families import make_tokenizer
from runs import run, write_rows
from sources import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
import ppo
import reward_model
import sft


# --- Files, splits, columns


def test_a_file_is_one_split(tmp_path):
    """All of it is trained on, unless a part is asked for, in the syntax of `datasets`."""
    file = write_rows(tmp_path / "d.jsonl", [{"prompt": f"The film {i}"} for i in range(8)])
    (tmp_path / "links").mkdir()
    (tmp_path / "links/link.jsonl").symlink_to(file)
    assert len(ppo.load_split(str(tmp_path / "links/link.jsonl"), None, "train")) == 8
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


def test_the_prompt_column_may_be_called_prompts(tmp_path):
    """As the argument in which a reward function is given them. (An `input_ids` of the data would be lost.)"""
    data = write_rows(tmp_path / "d.jsonl", [{"prompts": f"The film {i}"} for i in range(4)])
    (tmp_path / "r.py").write_text(
        "def f(prompts, **_):\n    assert all(x.startswith('The film ') for x in prompts)\n"
        "    return [int(x[-1]) for x in prompts]\n"
    )
    settings = dict(prompt_column="prompts", reward_fn=(f"{tmp_path}/r.py:f",), missing_eos_penalty=0.0)
    [line] = run(ppo, tmp_path / "out", dataset=data, batch_size=8, total_episodes=8, response_length=4, **settings)
    assert line["objective/scores"] == 1.5


def test_unknown_words(tmp_path):
    """Of which the policy would otherwise learn without a sound: its tokenizer reads `<|unk|>` in their place."""
    rows = [{"prompt": "ball 1 : 12"}, {"prompt": "ball one : 12"}]
    data = ppo.load_split(write_rows(tmp_path / "d.jsonl", rows), None, "train")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/shells/sft")
    with pytest.warns(UserWarning, match="1 of 2"):
        ppo.encode_prompts(data, tokenizer, ppo.Args())


def test_plain_texts_for_a_chat_model(tmp_path):
    """It would continue them, or be trained without its template: the run says so. Other models read plain texts."""
    rows = [{"prompt": "The film", "completion": " is good.", "chosen": " is good.", "rejected": " is bad."}]
    data = ppo.load_split(write_rows(tmp_path / "d.jsonl", rows), None, "train")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    read = [
        lambda: ppo.encode_prompts(data, tokenizer, ppo.Args()),
        lambda: sft.read_texts(data, tokenizer, sft.Args(), 300),
        lambda: dpo.encode_pairs(data, tokenizer, dpo.Args(), 300),
        lambda: reward_model.encode_pairs(data, tokenizer, reward_model.Args(), 300),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for function in read:
            function()
    tokenizer.chat_template = TEMPLATE
    for function in read:
        with pytest.warns(UserWarning, match="plain texts"):
            function()


# --- Batches


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


# A system message goes into the last turn, if that is the user's
MISTRAL = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: "
    "{% if system and loop.last and m.role == 'user' %}{{ system }} {% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def chat_model(tmp_path, tokenizer):
    AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    return str(tmp_path / "m")


def turns(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def labelled(ids, labels, tokenizer):
    """The text that carries the loss."""
    assert all(label in (token, sft.IGNORE) for token, label in zip(ids, labels, strict=True))
    return tokenizer.decode([label for label in labels if label != sft.IGNORE])


def test_what_no_answer_comes_before_carries_no_loss(tokenizer):
    """A greeting; and where a template moves the system message to the last question, no answer is where it was."""
    greeted = [{"role": "assistant", "content": "Hi."}, *turns("The film", "is good.")]
    assert labelled(*sft.encode_messages(greeted, tokenizer, True), tokenizer) == " is good.<|end|>"
    told = [{"role": "system", "content": "Be brief."}, *turns("The film ", "is good.")]
    mistral = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    for marker in ("", "assistant: "):  # what ends the prompt of a rollout
        mistral.chat_template = MISTRAL + "{% if add_generation_prompt %}" + marker + "{% endif %}"
        ids, labels = sft.encode_messages(told, mistral, True)
        assert labelled(ids, labels, mistral).strip() == "assistant: is good.<|end|>".removeprefix(marker)
        assert mistral.decode(ids) == "user: Be brief. The film assistant: is good.<|end|>"
        assert ids == reward_model.encode_whole(told[:2], told[2:], mistral)


def test_thoughts_that_a_template_leaves_out(tokenizer):
    """Those of the last answer would not be trained; earlier ones may go."""
    tokenizer.chat_template = TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]")
    talk = turns("The film", "<think>It sings.</think> is good.", "Why", "It sings.")
    assert "is good." in tokenizer.decode(sft.encode_messages(talk, tokenizer, True)[0])
    with pytest.raises(SystemExit, match="message 1"):
        sft.encode_messages(turns("The film", "<think>It sings.</think> is good."), tokenizer, True)


def test_conversations_of_a_split(tokenizer, capsys):
    """One without messages is dropped and counted; so is one without an answer."""
    talks = [turns("The film", "is good."), [], turns("The film")]
    data = sft.datasets.Dataset.from_dict({"messages": talks})
    rows = sft.read_texts(data, tokenizer, sft.Args(), 99)
    assert sft.as_rows(rows[:]) == [sft.encode_messages(talks[0], tokenizer, True)]
    assert "dropped 2 of 3" in capsys.readouterr().out


def test_no_second_bos():
    """Of a text that was rendered before, with a tokenizer that adds one."""
    tokenizer = make_tokenizer("llama 3")
    bos, word = tokenizer.bos_token_id, tokenizer(" good", add_special_tokens=False)["input_ids"]
    for text in (" good", tokenizer.bos_token + " good"):
        assert ppo.encode_prompt(text, tokenizer) == [bos, *word]
        assert sft.encode_pair("", text, tokenizer, False)[0][:-1] == [bos, *word]
        assert sft.encode_pair(text, " good", tokenizer, True)[0][:-1] == [bos, *word, *word]
        assert reward_model.encode_whole("", text, tokenizer)[:-1] == [bos, *word]
        assert reward_model.encode_whole(text, "", tokenizer)[:-1] == [bos, *word]
        assert dpo.encode_preference(text, "", "", tokenizer).prompt == [bos, *word]
        assert dpo.encode_preference("", text, text, tokenizer).prompt == [bos, *word]


def test_all_tokens_of_a_pair_may_carry_the_loss(tokenizer):
    ids, labels = sft.encode_pair("The film", " is good.", tokenizer, False)
    assert labels == ids == sft.encode_pair("The film", " is good.", tokenizer, True)[0]


def test_prompts_as_messages(tokenizer, chat_model, tmp_path):
    """The assistant is to speak next; before a completion or a pair they are its beginning."""
    prompt = turns("The film", "is", "what")
    with pytest.raises(SystemExit, match="assistant"):
        ppo.encode_prompt(prompt[:2], tokenizer)
    head = "user: The film<|end|>assistant: is<|end|>user: what<|end|>assistant:"
    assert tokenizer.decode(ppo.encode_prompt(prompt, tokenizer)) == head
    for completion in ("good.", [{"role": "assistant", "content": "good."}]):
        ids, labels = sft.encode_pair(prompt, completion, tokenizer, True)
        assert tokenizer.decode(ids) == f"{head} good.<|end|>"
        assert labelled(ids, labels, tokenizer).strip() == "good.<|end|>"
        assert sft.encode_pair(prompt, completion, tokenizer, False)[1] == ids
        assert tokenizer.decode(reward_model.encode_whole(prompt, completion, tokenizer)) == f"{head} good.<|end|>"
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": prompt}] * 8)
    run(ppo, tmp_path / "out", model=chat_model, dataset=data, batch_size=8, total_episodes=8, response_length=4)


def test_a_prompt_beside_messages_is_read_once(tokenizer):
    """A text as prompt, beside messages that hold it too (as in ultrafeedback_binarized), or that go on from it."""
    tokenizer.chat_template += "{{ '\\n' }}"  # as ChatML ends
    eos = tokenizer.eos_token
    for start in (turns("The film"), []):
        good = start + [{"role": "assistant", "content": "good."}]
        bad = start + [{"role": "assistant", "content": "bad."}]
        text = reward_model.encode_whole("The film", good, tokenizer)
        assert tokenizer.decode(text) == f"user: The film{eos}assistant: good.{eos}"
        pair = dpo.encode_preference("The film", good, bad, tokenizer)
        assert tokenizer.decode(pair.prompt) == f"user: The film{eos}assistant:"
        assert tokenizer.decode(pair.chosen) == f" good.{eos}"
        assert tokenizer.decode(pair.rejected) == f" bad.{eos}"
    system = [{"role": "system", "content": "Be brief."}]
    good = turns("The film", "good.")
    text = reward_model.encode_whole("The film", system + good, tokenizer)  # as in orca_dpo_pairs
    for prompt, answer in ((system, good), (system + good[:1], system + good), ("", system + good)):
        assert reward_model.encode_whole(prompt, answer, tokenizer) == text
    assert reward_model.encode_whole(system + good[:1], good, tokenizer) == text
    more = turns("The film", "is", "what", "good.")  # an answer that goes on behind another
    text_of_all = reward_model.encode_whole("", more, tokenizer)
    for start in (more[:2], more[:3]):  # with the last question once more, or not
        assert reward_model.encode_whole(start, more[2:], tokenizer) == text_of_all
    with pytest.raises(SystemExit, match="user's message"):
        reward_model.encode_whole("A tree", good, tokenizer)
    with pytest.raises(SystemExit, match="different system messages"):
        reward_model.encode_whole([{"role": "system", "content": "Rhyme."}] + good[:1], system + good, tokenizer)
    assert tokenizer.decode(text) == f"system: Be brief.{eos}user: The film{eos}assistant: good.{eos}"
