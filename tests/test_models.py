"""Models: the architectures that people train, tiny and random; unusual ones, and wrong ones; adapters."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import NAMES, merged, run, slow_but, watch
from safetensors.torch import load_file, save_file
from sources import ROOT
from tiny import ARCHITECTURES, PAD, left_padded_prompts, tiny_model, tiny_rollout, uniforms
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import GPT2LMHeadModel

import ppo

GOLD = f"{ROOT}/toy/gold_score.py:gold_score"
OF_TOY = [name for name in NAMES if name in ("ppo", "dpo", "sft", "reward_model")]


@pytest.fixture
def saved(tmp_path):
    """saved(kind, auto_class, **settings) -> a new folder with such a model and the toy world's tokenizer."""

    def save(kind, auto_class=AutoModelForCausalLM, **settings):
        folder = tmp_path / f"{kind}-{auto_class.__name__}"
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
        tiny_model(kind, auto_class, vocab_size=len(tokenizer), **settings).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return save


def train(folder, tiny, name="ppo", **settings):
    """The lines of a run of one step or two on small batches."""
    settings = tiny[name] | dict(batch_size=4, total_episodes=4, response_length=8) | settings
    if name in ("dpo", "sft", "reward_model"):
        settings = {k: x for k, x in settings.items() if k not in ("total_episodes", "response_length")}
        settings |= dict(num_train_epochs=0.3) | (dict(max_prompt_length=20) if name == "dpo" else {})
    return run(name, folder / f"run{len(list(folder.iterdir()))}", **settings)


# --- Architectures


@pytest.mark.parametrize("kind", slow_but(["gpt2", "llama", "gpt_oss", "gemma3_text"], ARCHITECTURES))
def test_rollouts_are_plain_forward_passes(kind):
    """The logprobs of padded rows, drawn with a cache or read at once, are those of each row alone."""
    policy = tiny_model(kind)
    policy.tokenizer = SimpleNamespace(pad_token_id=PAD)
    policy.stop_token_ids = []
    prompts, mask = left_padded_prompts()
    with torch.no_grad():
        responses, *_ = ppo.sample(policy, prompts, mask, uniforms()[:, :4], 0.9)
        policy.stop_token_ids = [responses[0, 3].item()]  # so that at least one row leaves the batch on the way
        r = ppo.Rollout(prompts, mask, *ppo.sample(policy, prompts, mask, uniforms(), 0.9), examples=[])
        assert r.ended.any()
        read, _ = ppo.logprobs_under(policy, r, ppo.Args(temperature=0.9, device="cpu"))
        for i in range(6):
            real = r.mask[i]
            response = r.responses[i][real]
            ids = torch.cat([prompts[i][mask[i]], response])[None]
            logits = policy(input_ids=ids).logits[0, -len(response) - 1 : -1] / 0.9
            alone = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
            torch.testing.assert_close(r.old_logprobs[i][real], alone, rtol=0, atol=1e-5)
            torch.testing.assert_close(read[i][real], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", slow_but(["gemma3_text"], ARCHITECTURES))
def test_every_architecture_trains(kind, bf16, saved, tiny, tmp_path):
    """The first ratio is 1: the sampler's rounding is not in it. Rewards and values are read in float32."""
    judge = "llama" if kind in ("granite", "lfm2") else kind  # of which there are no classifiers
    models = dict(model=saved(kind), reward_model=saved(judge, AutoModelForSequenceClassification, num_labels=1))
    (line,) = train(tmp_path, tiny, bf16=bf16, **models)
    assert line["policy/grad_norm"] > 0 and line["val/grad_norm"] > 0 and line["objective/scores_std"] > 0
    assert abs(line["objective/kl"]) < (0.1 if bf16 else 1e-4)  # policy and reference are yet the same
    assert line["policy/first_ratio_error"] < 1e-5
    assert {x.dtype for x in load_file(tmp_path / "run2/model.safetensors").values()} == {torch.float32}


# --- Unusual models, which train


@pytest.mark.parametrize("name", slow_but(["ppo"], OF_TOY))
def test_unusual_models_train(name, saved, tiny, tmp_path):
    """Half precision, a padding token without an embedding, settings of sampling that the library would not save; more
    embeddings than tokens, no padding token."""
    folder = saved("llama")
    AutoModelForCausalLM.from_pretrained(folder).half().save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    Path(folder, "generation_config.json").write_text('{"temperature": 0.9, "top_k": 5}')
    train(tmp_path, tiny, name, model=folder)
    policy = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft")
    policy.resize_token_embeddings(policy.config.vocab_size + 8)
    policy.save_pretrained(tmp_path / "more")
    AutoTokenizer.from_pretrained(ROOT / "toy/sft", pad_token=None).save_pretrained(tmp_path / "more")
    train(tmp_path, tiny, name, model=str(tmp_path / "more"))
    for file in tmp_path.glob("run*/model.safetensors"):
        assert {x.dtype for x in load_file(file).values()} == {torch.float32}


@pytest.mark.parametrize("name", ["ppo", "agent"])
def test_a_policy_that_samples_otherwise_than_it_trains_ends_the_run(name, tiny, tmp_path, monkeypatch):
    def spoil(output, *_, **__):
        if torch.is_grad_enabled():
            output.logits = torch.dropout(output.logits, 0.2, True)

    watch(monkeypatch, GPT2LMHeadModel, "forward", spoil)
    with pytest.raises(SystemExit, match="^error: .*ratio"):
        run(name, tmp_path / "run", **tiny[name] | ({} if name == "agent" else dict(model="toy/sft")))


# --- Wrong models, which end the run


def test_weights_that_are_missing_or_belong_to_another_architecture_are_refused(saved, tiny, tmp_path):
    folder = saved("llama")
    weights = load_file(Path(folder, "model.safetensors"))
    key, other = "model.norm.weight", "model.layers.0.self_attn.q_norm.weight"
    for wrong in ({name: x for name, x in weights.items() if name != key}, weights | {other: torch.ones(8)}):
        save_file(wrong, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        with pytest.raises(SystemExit, match=f"^error: .*({key}|{other})"):
            train(tmp_path, tiny, model=folder)


def test_a_causal_model_or_two_labels_are_no_reward_model(saved, tiny, tmp_path):
    with pytest.raises(SystemExit, match="^error: .*score.weight"):
        train(tmp_path, tiny, reward_model=saved("gpt2", num_labels=1))
    with pytest.raises(SystemExit, match="^error: .*one label"):
        train(tmp_path, tiny, reward_model=saved("gpt2", AutoModelForSequenceClassification, num_labels=2))


# --- Adapters


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.filterwarnings("ignore")  # peft speaks of what is not ours to change
def test_an_adapter_changes_the_policy_and_not_the_reference(kind, saved):
    """The critic has adapters of its own."""
    judge = saved(kind, AutoModelForSequenceClassification, num_labels=1)
    args = ppo.Args(model=saved(kind), reward_model=judge, lora_r=1, micro_batch_size=6, temperature=0.9, device="cpu")
    policy, reference = ppo.load_models(args)
    critic = ppo.load_critic(args, policy)
    rollout = tiny_rollout(policy)

    def logprobs(model):
        return ppo.read_logprobs(model, rollout, args)

    before = logprobs(AutoModelForCausalLM.from_pretrained(args.model))
    torch.testing.assert_close(logprobs(policy), before)  # an adapter begins as nothing
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained)
    trained = {name for name, p in critic.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in critic.named_parameters() if "lora" in name or name.startswith("score")}
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    assert not torch.allclose(logprobs(policy), before)
    torch.testing.assert_close(logprobs(reference), before)


@pytest.mark.filterwarnings("ignore")
def test_adapter_and_merged_model_are_saved(tmp_path, tiny):
    from peft import AutoPeftModelForCausalLM

    settings = dict(model="toy/sft", lora_r=4, learning_rate=1e-2, save_total_limit=1, save_steps=3)
    *_, line = run("ppo", tmp_path / "run", **tiny["ppo"] | settings)
    folder = tmp_path / "run"
    assert abs(line["objective/kl"]) > 0.05 and (folder / "adapter_model.safetensors").stat().st_size < 300_000
    stored = torch.load(folder / "checkpoints/step-00000003.pt")["weights"]
    assert stored and all("lora" in name for name in stored if "critic" not in name)
    ids = torch.randint(5, 500, (2, 9))
    with torch.no_grad():
        adapter = AutoPeftModelForCausalLM.from_pretrained(folder).eval()(ids).logits
        complete = AutoModelForCausalLM.from_pretrained(merged(folder)).eval()(ids).logits
        base = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").eval()(ids).logits
    torch.testing.assert_close(adapter, complete, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(base, complete, atol=0.05)
    with pytest.raises(SystemExit, match="^error: .*merge"):
        train(tmp_path, tiny, model=str(folder))


# --- Stop tokens


def test_the_context_has_room_for_prompt_and_response(saved, tiny, tmp_path):
    """To the last token, and no further."""
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "the film" + " the film" * 11}) + "\n")
    settings = dict(model=saved("gpt2", max_position_embeddings=32), dataset=f"{tmp_path}/d.jsonl", reward_fn=(GOLD,))
    assert train(tmp_path, tiny, response_length=8, **settings)
    with pytest.raises(SystemExit, match="^error: .*33 tokens"):
        train(tmp_path, tiny, response_length=9, **settings)
