"""Ten families of chat models: all scripts read one conversation alike, and end its turns where it ends."""

import pytest
from families import FAMILIES, make_tokenizer, save_family
from runs import is_in, run, slow_but, tokens_read, write_rows
from transformers import GenerationConfig

import dpo
import ppo
import reward_model
import sft


def talks(first, last):
    """A conversation with these answers, and one in which the first is given twice."""
    texts = ("The film?", first, "Why?", last)
    talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return talk, [*talk[:3], talk[1]]


TALK, _ = talks("It is good.", "It sings.")
ENDS = {"llama 3": "<|eot_id|>", "gemma 3": "<end_of_turn>", "phi 3.5": "<|end|>", "gpt-oss": "<|return|>"}
ENDS |= {"mistral": "</s>", "olmo 2": "<|endoftext|>", "granite": "<|end_of_text|>"}  # of the others: <|im_end|>


def read_with(tokenizer, messages, end):
    """The ids of a prompt up to where the assistant speaks, and of the last message with the token that ends it."""
    marked = [*messages[:-1], {"role": "assistant", "content": "ANSWER"}]
    head, _, _ = tokenizer.apply_chat_template(marked, tokenize=False).rpartition("ANSWER")
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert head.startswith(prompt)
    texts = prompt, head + messages[-1]["content"] + end
    prompt, whole = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in texts)
    return prompt, whole[len(prompt) :]


def sides(script, file, tokenizer):
    """Prompt, chosen and rejected text of a pair, as a script of pairs reads them."""
    (pair,) = script.load_pairs(script.Args(dataset=file), tokenizer, "train")
    return [x.tolist() for x in (pair.prompt, pair.chosen, pair.rejected)]


@pytest.mark.parametrize("answers", [("It is good.", "It sings."), ("<", "d"), ("n", "end"), (">", "s")])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_scripts_read_one_conversation_alike(family, answers, tmp_path):
    """Each answer is a text for sft.py: with labels behind the prompt that a rollout has, up to the token that ends the
    turn, of which an answer may be a part. Prompt and answer may stand apart, or in one conversation."""
    TALK, BAD = talks(*answers)
    tokenizer, end = make_tokenizer(family), ENDS.get(family, "<|im_end|>")
    (first, good), (asked, best), (_, bad) = (read_with(tokenizer, talk, end) for talk in (TALK[:2], TALK, BAD))

    def file(*rows):
        return write_rows(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", rows)

    args = ppo.Args(dataset=file(*({"prompt": TALK[:n]} for n in (1, 3))))
    assert [row["input_ids"].tolist() for row in ppo.load_prompts(args, tokenizer, "train")] == [first, asked]
    whole_talk = dict(messages=[*TALK, {"role": "user", "content": "Thanks."}])
    for row, answers in (
        (whole_talk, [(first, good), (asked, best)]),
        (dict(prompt=TALK[:3], completion=TALK[3:]), [(asked, best)]),
    ):
        args = sft.Args(dataset=file(row))
        texts = sft.load_texts(args, tokenizer, "train")
        assert [(ids[~label].tolist(), ids[label].tolist()) for ids, label in texts] == answers
        assert all(label.tolist() == sorted(label) for _, label in texts)
    for row in (dict(prompt=TALK[:3], chosen=TALK[3:], rejected=BAD[3:]), dict(chosen=TALK, rejected=BAD)):
        data = file(row)
        for script in (dpo, reward_model):
            assert sides(script, data, tokenizer) == [asked, best, bad]


CASES = [*((family, "ppo") for family in FAMILIES), ("phi 3.5", "rloo"), ("phi 3.5", "grpo")]


@pytest.mark.parametrize("family, name", slow_but([("gpt-oss", "ppo"), ("phi 3.5", "ppo")], CASES))
def test_a_policy_of_each_family_trains_and_stops_where_its_turns_end(family, name, tmp_path):
    """What is saved stops at the tokens that the makers name, and at the one that ends a turn."""
    policy, _ = save_family(family, tmp_path)
    tokenizer, end = make_tokenizer(family), ENDS.get(family, "<|im_end|>")
    stops = {*FAMILIES[family].stops.split(), FAMILIES[family].eos, end}
    if family == "phi 3.5":  # the template alone says that a turn ends with <|end|>
        (tmp_path / "policy/generation_config.json").unlink()
        stops = {FAMILIES[family].eos, end}
    (tmp_path / "r.py").write_text("def f(completion_ids, **_):\n    return [float(sum(x)) for x in completion_ids]")
    settings = dict(total_episodes=8, response_length=8, reward_fn=(f"{tmp_path}/r.py:f",), num_ppo_epochs=1)
    settings |= dict(model=policy, dataset=write_rows(tmp_path / "d.jsonl", [{"prompt": TALK[:3]}] * 8), batch_size=8)
    with tokens_read() as read:
        run(name, tmp_path / "run", **settings)
    assert is_in(read_with(tokenizer, TALK, end)[0], read)
    left = GenerationConfig.from_pretrained(tmp_path / "run").eos_token_id
    assert set(tokenizer.convert_tokens_to_ids([*stops])) == {*([left] if isinstance(left, int) else left)}


LOADS = [lambda x: sft.load_policy(sft.Args(model=x)), lambda x: dpo.load_models(dpo.Args(model=x))[0]]


@pytest.mark.parametrize("load", LOADS, ids=["sft", "dpo"])
def test_the_token_that_ends_trained_answers_is_saved_as_a_stop_token(load, tmp_path):
    """Also if the model's generation config does not name it."""
    folder, _ = save_family("phi 3.5", tmp_path)
    (tmp_path / "policy/generation_config.json").unlink()
    policy = load(folder)
    assert policy.tokenizer.decode(policy.generation_config.eos_token_id) == "<|end|><|endoftext|>"
