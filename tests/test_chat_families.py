"""Ten families of chat models: all scripts read one conversation alike, and end its turns where it ends."""

import pytest
from families import FAMILIES, make_tokenizer, save_family
from runs import NAMES, is_in, run, tokens_read, write_rows
from transformers import GenerationConfig

TALK = [
    {"role": "user", "content": "The film?"},
    {"role": "assistant", "content": "It is good."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "It sings."},
]
ENDS = {"llama 3": "<|eot_id|>", "gemma 3": "<end_of_turn>", "phi 3.5": "<|end|>", "gpt-oss": "<|return|>"}
ENDS |= {"mistral": "</s>", "olmo 2": "<|endoftext|>", "granite": "<|end_of_text|>"}  # of the others: <|im_end|>
QUICK = ["llama 3", "qwen 3", "gemma 3", "gpt-oss"]
FAMILY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def read_with(tokenizer, messages, end):
    """The ids of a conversation up to and including the token that ends its last turn."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    head, answer, _ = text.rpartition(messages[-1]["content"])
    return tokenizer(head + answer + end, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("name", [name for name in NAMES if name in ("ppo", "sft", "dpo", "reward_model")])
def test_all_scripts_read_one_conversation_alike(name, family, tmp_path):
    """The prompt up to where the assistant speaks; behind it the answer, and the token that ends the turn. What is
    saved stops at the tokens that the makers name, and at this one."""
    policy, judge = save_family(family, tmp_path)
    tokenizer = make_tokenizer(family)
    prompts = [TALK[:1], TALK[:3]] * 4
    rows = [{"prompt": prompt, "completion": TALK[3:], "chosen": TALK[3:], "rejected": TALK[1:2]} for prompt in prompts]
    (tmp_path / "r.py").write_text(
        "def f(completion_ids, **_):\n    return [float(sum(ids)) for ids in completion_ids]"
    )
    settings = dict(model=policy, dataset=write_rows(tmp_path / "d.jsonl", rows), batch_size=8)
    if name == "ppo":
        settings |= dict(total_episodes=8, response_length=8, reward_fn=(f"{tmp_path}/r.py:f",), num_ppo_epochs=1)
    if name == "reward_model" and judge is None:
        pytest.skip("the library has no reward model of this family")
    with tokens_read() as read:
        run(name, tmp_path / "run", **settings)
    end = ENDS.get(family, "<|im_end|>")
    for prompt in prompts[:2]:
        head = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        assert is_in(tokenizer(head, add_special_tokens=False)["input_ids"], read)
        for answer in (TALK[3], TALK[1]) if name in ("dpo", "reward_model") else (TALK[3],) if name == "sft" else ():
            whole = read_with(tokenizer, [*prompt, answer], end)
            assert tokenizer.decode(whole).startswith(head) and is_in(whole, read)
    if name != "reward_model":
        stops = {*FAMILIES[family].stops.split(), FAMILIES[family].eos, end}
        left = GenerationConfig.from_pretrained(tmp_path / "run").eos_token_id
        assert set(tokenizer.convert_tokens_to_ids([*stops])) == {*([left] if isinstance(left, int) else left)}
