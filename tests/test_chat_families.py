"""Ten families of chat models: all scripts read one conversation alike, and end its turns where it ends."""

import json

import pytest
import torch
from families import FAMILIES, make_tokenizer, save_family
from runs import NAMES, is_in, run, tokens_read, write_rows
from transformers import AutoModelForSequenceClassification, GenerationConfig

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
    (tmp_path / "r.py").write_text("def f(completion_ids, **_):\n    return [float(sum(ids)) for ids in completion_ids]")
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


NOTE = """
import json

def note(prompts, completions, completion_ids, **columns):
    with open(__file__ + "l", "a") as file:
        print(json.dumps([prompts, completions, completion_ids]), file=file)
    return [0.0] * len(prompts)
"""


@pytest.mark.parametrize("family", FAMILY)
def test_a_reward_model_with_another_template_reads_its_own(family, tmp_path):
    """Of the messages and the response, with the end of a turn if the response ended; the other judge is Gemma, or for
    Gemma a Llama."""
    judge = "gemma 3" if family != "gemma 3" else "llama 3"
    policy, _ = save_family(family, tmp_path / "policy")
    _, folder = save_family(judge, tmp_path / "judge")
    (tmp_path / "r.py").write_text(NOTE)
    rows = [{"prompt": TALK[:1]}, {"prompt": TALK[:3]}] * 4
    tokenizer, other = make_tokenizer(family), make_tokenizer(judge)
    words = [(tokenizer.decode([i]), i) for i in range(300, 900)]
    stops = {word: i for word, i in words if tokenizer(word, add_special_tokens=False)["input_ids"] == [i]}
    settings = dict(dataset=write_rows(tmp_path / "d.jsonl", rows), batch_size=8, total_episodes=8, num_ppo_epochs=1)
    settings |= dict(reward_fn=("reward_model", f"{tmp_path}/r.py:note"), response_length=4, stop_token=tuple(stops))
    (line,) = run("ppo", tmp_path / "run", model=policy, reward_model=folder, **settings)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rewards, ended = [], []
    for messages, completion, ids in zip(*json.loads((tmp_path / "r.pyl").read_text())):
        assert completion[0]["content"] == tokenizer.decode(ids, skip_special_tokens=True).strip()
        whole = read_with(other, [*messages, *completion], ENDS.get(judge))
        ended.append(ids[-1] in stops.values())
        whole = whole if ended[-1] else whole[:-1]
        with torch.no_grad():
            states = model.base_model(torch.tensor([whole])).last_hidden_state[0, -1]
            rewards.append(model.score(states).item())
    assert line["rewards/reward_model/mean"] == pytest.approx(sum(rewards) / 8, abs=1e-4)
    assert any(ended) and not all(ended)
