"""Models: the architectures that people train, tiny and random; weights that do not fit; adapters, types and memory."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import GOLD, run, watch, write_rows
from safetensors.torch import load_file, save_file
from sources import ROOT
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import GenerationConfig

import dpo
import grpo
import ppo
import reward_model
import rloo
import sft
from tiny import ARCHITECTURES, PAD, left_padded_prompts, tiny_model, tiny_rollout, uniforms

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
COMMON = {"gpt2", "llama", "gemma3_text", "gpt_oss"}  # positions learned and rotary, windows, experts


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """saved(kind, auto_class, **settings) -> a new folder with such a model and the toy world's tokenizer."""

    def save(kind, auto_class=AutoModelForCausalLM, **settings):
        folder = tmp_path_factory.mktemp(kind)
        tiny_model(kind, auto_class, vocab_size=len(TOKENIZER), **settings).save_pretrained(folder)
        TOKENIZER.save_pretrained(folder)
        return str(folder)

    return save


def change_weights(folder, change):
    """Saves the weights of a model anew, after a function has changed them."""
    file = Path(folder, "model.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture
def train(tmp_path, part_of):
    """train(script, **settings) -> the lines of metrics.jsonl of a run of one or two steps."""

    def call(script, **settings):
        if script in (ppo, rloo, grpo):
            sizes = dict(batch_size=4, total_episodes=4, response_length=8, num_ppo_epochs=1)
            sizes["dataset"] = part_of("prompts", 64)
        else:
            sizes = dict(dataset=part_of("sft" if script is sft else "preferences", 8), max_length=48)
        if script is grpo:
            sizes |= dict(num_generations=2, reward_fn=(GOLD,))
        if script is dpo:
            sizes["max_prompt_length"] = 16
        number = len(list(tmp_path.iterdir()))
        return run(script, tmp_path / f"run{number}", **dict(dataset_test_split="none") | sizes | settings)

    return call


# --- Architectures


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_rollouts_are_plain_forward_passes(kind, bf16):
    """The logprobs of padded rows, drawn with a cache or read at once, are those of each row alone."""
    policy = tiny_model(kind)
    policy.tokenizer = SimpleNamespace(pad_token_id=PAD)
    policy.stop_token_ids = []
    prompts, mask = left_padded_prompts()
    tolerance = dict(rtol=0, atol=5e-2 if bf16 else 1e-5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        responses, *_ = ppo.sample(policy, prompts, mask, uniforms()[:, :4], 0.9)
        policy.stop_token_ids = [responses[0, 3].item()]  # so that at least one row leaves the batch on the way
        r = ppo.Rollout(prompts, mask, *ppo.sample(policy, prompts, mask, uniforms(), 0.9), examples=[])
        assert r.ended.any()
        read = ppo.token_logprobs(
            ppo.response_forward(policy, r, ppo.Args(temperature=0.9, device="cpu"))[0], r.responses
        )
        for i in range(6):
            real = r.mask[i]
            response = r.responses[i][real]
            ids = torch.cat([prompts[i][mask[i]], response])[None]
            logits = policy(input_ids=ids).logits[0, -len(response) - 1 : -1].float() / 0.9
            alone = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
            torch.testing.assert_close(r.old_logprobs[i][real], alone, **tolerance)
            torch.testing.assert_close(read[i][real], alone, **tolerance)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind", [kind if kind in COMMON else pytest.param(kind, marks=pytest.mark.slow) for kind in ARCHITECTURES]
)
def test_every_architecture_trains(saved, train, kind, bf16):
    """Rollout, reward, critic and update, as a run makes them; the run itself sees to it that the first ratio is 1."""
    judge = "llama" if kind in ("granite", "lfm2") else kind  # of which there are no classifiers
    reward = saved(judge, AutoModelForSequenceClassification, num_labels=1)
    (line,) = train(ppo, model=saved(kind), reward_model=reward, bf16=bf16)
    assert line["policy/grad_norm"] > 0
    assert line["val/grad_norm"] > 0
    assert line["objective/scores_std"] > 0
    assert abs(line["objective/kl"]) < (0.1 if bf16 else 1e-4)  # policy and reference are yet the same


@pytest.mark.parametrize("script", [rloo, grpo, dpo, sft, reward_model], ids=lambda module: module.__name__)
def test_bfloat16_elsewhere(saved, train, script, tmp_path):
    """Rotary embeddings are computed, and the weights saved, in float32."""
    assert train(script, model=saved("llama"), bf16=True)
    assert {x.dtype for x in load_file(tmp_path / "run0/model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("script", [ppo, rloo, grpo], ids=lambda module: module.__name__)
def test_a_sampler_that_is_off_under_bfloat16(saved, train, script, monkeypatch):
    """The rounding of tokens adds up over a response, but both sides of its ratio come from one pass. What is no
    rounding ends the run, though the first ratio is then exactly 1."""
    settings = dict(model=saved("llama"), bf16=True)
    if script is grpo:
        settings |= dict(importance_sampling_level="sequence", loss_type="grpo")
    watch(monkeypatch, script, "sample_batch", lambda r, *_: r.old_logprobs.add_(off))
    off = 0.04
    (line,) = train(script, **settings)
    assert line["policy/sampler_error"] == pytest.approx(1 - math.exp(-0.04), abs=5e-3)
    assert line["policy/first_ratio_error"] == 0
    off = 0.3
    with pytest.raises(SystemExit, match="ratio"):
        train(script, **settings)


OF_RESPONSES = dict(importance_sampling_level="sequence")


@pytest.mark.parametrize("parts", [1, 2], ids=["one mini-batch", "two mini-batches"])
@pytest.mark.parametrize(
    ("script", "more"),
    [(ppo, {}), (rloo, {}), (rloo, dict(token_level_kl=True)), (grpo, {}), (grpo, OF_RESPONSES)],
    ids=["ppo", "rloo", "rloo of tokens", "grpo", "grpo of responses"],
)
def test_the_first_ratio_under_bfloat16_is_1(train, script, more, parts):
    """Exactly, in each update: whichever rows the mini-batches draw, both sides are read beside the same neighbours."""
    settings = dict(batch_size=16, total_episodes=48, num_mini_batches=parts, micro_batch_size=3, num_ppo_epochs=2)
    settings |= more
    if script is grpo:  # in some groups all scores are equal: their rows are read last
        settings |= dict(num_generations=2, reward_fn=(f"{__file__}:is_short",))
    lines = train(script, model="toy/sft", bf16=True, **settings)
    assert [line["policy/first_ratio_error"] for line in lines] == [0, 0, 0]
    assert any(line["policy/sampler_error"] > 0 for line in lines)
    assert all(line["policy/approxkl_avg"] > 0 for line in lines)  # the later ratios are others


def is_short(completions, **columns):
    """A reward of which some groups are all of one mind."""
    return [float(len(text) < 30) for text in completions]


@pytest.mark.parametrize("script", [ppo, grpo, dpo, sft, reward_model], ids=lambda module: module.__name__)
def test_a_pad_token_without_an_embedding(saved, train, script):
    """As tokenizers have it to which one was added later: another token pads, since padding is known by its place."""
    model = saved("llama")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(model)
    assert tokenizer.pad_token_id == len(TOKENIZER)
    assert train(script, model=model)


@pytest.mark.parametrize("script", [ppo, rloo, grpo, dpo, sft], ids=lambda module: module.__name__)
def test_settings_of_sampling_that_the_library_would_not_save(saved, script):
    """One of them, as old models have, is enough for a policy to be sampled from; one of none stays as it was."""
    model = saved("llama")
    for stored, is_sampled in (({"temperature": 0.9}, True), ({"top_p": 0.6}, True), ({"top_k": 20}, True), ({}, None)):
        Path(model, "generation_config.json").write_text(json.dumps(stored))
        policy = script.load_policy(script.Args(model=model, device="cpu"))
        policy.generation_config.save_pretrained(model)
        after = GenerationConfig.from_pretrained(model).to_dict()
        assert after | stored == after and after["do_sample"] is is_sampled


@pytest.mark.parametrize("script", [ppo, rloo, grpo, dpo, sft], ids=lambda module: module.__name__)
def test_settings_that_could_not_be_saved_end_a_run_before_it_begins(saved, train, script, tmp_path):
    model = saved("llama")
    Path(model, "generation_config.json").write_text('{"length_penalty": 2.0}')  # without beams
    with pytest.raises((ValueError, SystemExit), match="length_penalty"):
        train(script, model=model)
    assert not (tmp_path / "run0").exists()


def test_an_adapter_is_no_model(saved, train, tmp_path):
    train(sft, model=saved("llama"), lora_r=2)
    with pytest.raises(SystemExit, match="run0/merged"):
        train(dpo, model=str(tmp_path / "run0"))


def test_dropout_is_off_where_the_loss_must_see_what_was_sampled(saved, train):
    """Also where a layer calls it as a function (OPT), and where activations are computed again."""
    kinds = dict(gpt2=dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5), opt=dict(dropout=0.5, layerdrop=0.5))
    for kind, rates in kinds.items():
        for again in (False, True):
            (line,) = train(ppo, model=saved(kind, **rates), reward_fn=(GOLD,), gradient_checkpointing=again)
            assert abs(line["val/ratio"] - 1) < 1e-4
            assert line["policy/approxkl_avg"] < 1e-6


def test_a_shared_critic_on_embeddings_of_another_width(saved, train):
    """OPT-350m's last layer is projected down to the width of its embeddings; the critic's head reads that."""
    (line,) = train(ppo, model=saved("opt"), critic="shared", reward_fn=(GOLD,))
    assert line["val/grad_norm"] > 0


# --- Weights that do not fit


def test_weights_that_are_missing(saved, train):
    """The library would draw them at random, and say so in a log that nobody reads."""
    folder = saved("llama")
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(SystemExit, match="lm_head.weight"):
        train(sft, model=folder)


def test_weights_that_no_layer_takes(saved, train):
    """They are another architecture's, of which the model that would be trained is a part."""
    folder = saved("llama")
    name = "model.layers.0.self_attn.q_norm.weight"
    change_weights(folder, lambda weights: weights.update({name: torch.ones(8)}))
    with pytest.raises(SystemExit, match=name):
        train(ppo, model=folder)


def test_a_language_model_is_no_reward_model(saved, train):
    with pytest.raises(SystemExit, match="score.weight"):
        train(ppo, reward_model=saved("gpt2", num_labels=1))


def test_a_reward_model_starts_with_a_new_head_but_with_no_other_new_weight(saved, train):
    folder = saved("llama")
    assert train(reward_model, model=folder)
    change_weights(folder, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(SystemExit, match="norm.weight"):
        train(reward_model, model=folder)


def test_weights_in_half_precision_are_trained_in_float32(tmp_path):
    AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").half().save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    policy = ppo.load_policy(ppo.Args(model=str(tmp_path)))
    assert {p.dtype for p in policy.parameters()} == {torch.float32}


# --- Policy and reward model


def test_texts_that_end_with_another_token_are_others(train, capsys, tmp_path):
    """One vocabulary is not enough: the reward model would never see its end of text."""
    for part in (AutoModelForSequenceClassification, AutoTokenizer):
        part.from_pretrained(ROOT / "toy/reward_model").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.eos_token = "."
    tokenizer.save_pretrained(tmp_path)
    train(ppo, reward_model=str(tmp_path))
    assert "starts from the policy" in capsys.readouterr().out


def test_a_reward_model_with_a_short_context(saved, train):
    """One that reads the policy's tokens cannot be shown less than all."""
    reward = saved("gpt2", AutoModelForSequenceClassification, num_labels=1, max_position_embeddings=24)
    with pytest.raises(SystemExit, match="24 tokens"):
        train(ppo, model=saved("gpt2"), reward_model=reward, response_length=24)


@pytest.mark.parametrize("script", [ppo, rloo, grpo], ids=lambda module: module.__name__)
def test_a_prompt_that_fills_most_of_the_context(saved, train, script, tmp_path):
    """Reward functions are tried on a prompt and a response that is no longer than those of the run."""
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "the film " * 10}] * 4)
    sizes = dict(max_position_embeddings=32)
    reward = saved("gpt2", AutoModelForSequenceClassification, num_labels=1, **sizes)
    settings = dict(reward_model=reward, reward_fn=("reward_model",), dataset=str(tmp_path / "prompts.jsonl"))
    assert train(script, model=saved("gpt2", **sizes), response_length=8, **settings)


@pytest.mark.parametrize("script", [sft, dpo], ids=lambda module: module.__name__)
def test_answers_that_are_shown_end_with_the_context(saved, train, script, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [dict(prompt="the film " * 9, completion="it", chosen="it", rejected="a")] * 4)
    sizes = dict(max_prompt_length=28) if script is dpo else {}
    model = saved("gpt2", max_position_embeddings=32)
    assert train(script, model=model, dataset=str(tmp_path / "rows.jsonl"), num_sample_generations=1, **sizes)


# --- Adapters


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "gpt_neox"])
@pytest.mark.filterwarnings("ignore")  # peft speaks of what is not ours to change
def test_the_reference_is_the_policy_with_its_adapter_off(kind):
    policy = tiny_model(kind)
    rollout = tiny_rollout(policy)
    args = ppo.Args(lora_r=1, micro_batch_size=6, temperature=0.9, device="cpu")
    logprobs = lambda model: rollout.in_micro_batches(lambda r: ppo.logprobs_under(model, r, args), args)  # noqa: E731
    before = logprobs(policy)
    size = policy.num_parameters()
    ppo.add_adapter(policy, args, task_type="CAUSAL_LM")
    reference = ppo.make_reference(args, policy)
    assert reference is policy
    assert policy.num_parameters() < 1.3 * size  # no second copy
    torch.testing.assert_close(logprobs(policy), before)  # an adapter begins as nothing
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    with ppo.adapter_off(policy, reference):
        torch.testing.assert_close(logprobs(reference), before)
    assert not torch.allclose(logprobs(policy), before)  # and it is on again
    assert [name for name, p in policy.named_parameters() if p.requires_grad] == trained


@pytest.mark.parametrize("kind", ["phi3", "smollm3", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("script", [sft, reward_model], ids=lambda module: module.__name__)
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_other_architectures(saved, train, script, kind):
    assert train(script, model=saved(kind), lora_r=2)


def test_the_rate_of_a_critic_beside_an_adapter():
    """It learns as a whole, so what makes an adapter's rate high does not hold for it; for a head it does."""

    def rates(**settings):
        args = ppo.Args(learning_rate=1e-3, **settings)
        return [group["lr"] for group in ppo.make_optimizer(args, nn.Linear(1, 1), nn.Linear(1, 1)).param_groups]

    assert rates() == rates(lora_r=2, critic="shared") == [1e-3, 1e-3]
    assert rates(lora_r=2) == pytest.approx([1e-3, 1e-4])
    assert rates(lora_r=2, critic_learning_rate=1e-2) == [1e-3, 1e-2]


@pytest.mark.filterwarnings("ignore")
def test_adapter_and_merged_model_are_saved(tmp_path, tiny):
    from peft import AutoPeftModelForCausalLM

    run(ppo, tmp_path, **tiny["ppo"] | dict(model="toy/sft", lora_r=4, lora_alpha=3.0, learning_rate=1e-2))
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 300_000
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 3
    saved = [name for file in tmp_path.glob("checkpoints/*/*.safetensors") for name in load_file(file)]
    assert saved and all("lora" in name or "model." not in name for name in saved)
    ids = torch.randint(5, 500, (2, 9))
    with torch.no_grad():
        adapter = AutoPeftModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(ids).logits
        base = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").eval()(ids).logits
    torch.testing.assert_close(adapter, merged, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(base, merged, atol=0.05)
    AutoTokenizer.from_pretrained(tmp_path / "merged")


# --- Types, memory, kernels


@pytest.mark.parametrize(
    "script, lora_r", [(ppo, 0), (ppo, 4), (dpo, 0), (sft, 4)], ids=lambda x: getattr(x, "__name__", str(x))
)
@pytest.mark.filterwarnings("ignore")
def test_gradient_checkpointing_changes_memory_and_no_number(script, lora_r, tmp_path, tiny):
    """The same metrics, with far fewer activations kept for the backward pass."""
    settings = tiny[script.__name__] | dict(lora_r=lora_r, model="toy/sft", dataset_test_split="none")
    kept = []

    def train(folder, **more):
        """The lines of a run; in `kept`, the size of all that it kept."""
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            lines = run(script, tmp_path / folder, **settings, **more)
        kept.append(sum(sizes))
        return lines

    plain, again = train("a"), train("b", gradient_checkpointing=True)
    for name in [name for name in plain[0] if name.startswith("loss") or name.endswith("grad_norm")]:
        assert [line[name] for line in plain] == pytest.approx([line[name] for line in again], rel=1e-3), name
    assert kept[1] < 0.8 * kept[0]


@pytest.mark.parametrize("lora_r", [0, 4])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.filterwarnings("ignore")
def test_what_is_frozen_is_stored_in_bfloat16(kind, lora_r):
    """It says to the bit what autocast makes of float32 weights, but for experts, which autocast does not reach."""
    args = ppo.Args(bf16=True, lora_r=lora_r, device="cpu")
    model = tiny_model(kind, vocab_size=64)
    ids = torch.arange(4, 64).view(4, 15)

    def logits():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids).logits

    ppo.place(model, args)
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # a model that is trained stays
    if lora_r:
        ppo.add_adapter(model, args, task_type="CAUSAL_LM")
        [nn.init.normal_(p, std=0.1) for name, p in model.named_parameters() if "lora_B" in name]
    else:
        model.requires_grad_(False)
    before = logits()
    ppo.place(model, args)
    torch.testing.assert_close(logits(), before, rtol=0, atol=0.1 if kind == "mixtral" else 0)
    for name, p in model.named_parameters():
        stays = p.requires_grad or re.search(r"norm|ln_|emb|wte|wpe|\.gate\.", name)
        assert p.dtype == (torch.float32 if stays else torch.bfloat16), name


@pytest.mark.parametrize("script", [ppo, rloo, grpo, reward_model], ids=lambda module: module.__name__)
def test_rewards_and_values_under_bfloat16(script):
    """The head is in float32: a reward of about 10 would else be a multiple of 1/16."""
    args = ppo.Args(bf16=True, device="cpu")
    model = tiny_model("llama", AutoModelForSequenceClassification, num_labels=1).requires_grad_(False)
    ppo.place(model, args)
    model.tokenizer = TOKENIZER
    prompts, mask = left_padded_prompts()
    r = ppo.Rollout(prompts, mask, prompts, torch.ones_like(mask), mask[:, 0], torch.zeros(mask.shape), [])
    with ppo.autocast(args):
        found = [script.read_reward(model, r.inputs()["input_ids"], r.inputs()["attention_mask"])]
        if script is ppo:
            policy = tiny_model("llama")
            policy.tokenizer = TOKENIZER
            found.append(ppo.make_critic(args, policy, model)(r))
    for x in found:
        assert x.dtype == torch.float32
        assert (x != x.bfloat16()).float().mean() > 0.8


@pytest.mark.parametrize("script", [sft, dpo], ids=lambda module: module.__name__)
def test_tables_show_the_policy_itself(train, script, tmp_path):
    """Whatever its generation config says, which is kept."""
    shutil.copytree(ROOT / "toy/sft", tmp_path / "m")
    hostile = dict(repetition_penalty=9.0, min_new_tokens=20, bad_words_ids=[[x] for x in range(2, 99)], eos_token_id=0)
    (tmp_path / "m/generation_config.json").write_text(json.dumps(hostile))
    for name in ("toy/sft", str(tmp_path / "m")):
        train(script, model=name, num_sample_generations=1)
    a, b = (load_file(file) for file in sorted(tmp_path.glob("run*/samples/*")))
    assert a["responses"].equal(b["responses"])
    assert GenerationConfig.from_pretrained(tmp_path / "run2").repetition_penalty == 9.0


def test_all_that_ends_a_turn_stops_a_response(train, tmp_path):
    """The tokenizer's EOS, what a template ends turns with, special tokens of the generation config; and a run says so
    in the generation config that it leaves."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|call|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|turn|>\n{% endfor %}"
    end, turn, call = tokenizer.convert_tokens_to_ids(["<|end|>", "<|turn|>", "<|call|>"])
    policy = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft")
    policy.resize_token_embeddings(len(tokenizer))
    for stored, found in ((7, {end, turn}), (None, {end, turn}), ([7, call], {end, turn, call})):
        policy.generation_config.eos_token_id = stored
        policy.save_pretrained(tmp_path / "m")
        tokenizer.save_pretrained(tmp_path / "m")
        args = ppo.Args(model=str(tmp_path / "m"), stop_token=("eos", "."))
        assert set(ppo.load_policy(args).stop_token_ids) == found | {tokenizer.convert_tokens_to_ids(".")}
        for script in (sft, dpo, rloo, grpo):
            stored_by_it = script.load_policy(script.Args(model=str(tmp_path / "m"))).generation_config
            assert set(stored_by_it.eos_token_id) == found
    train(ppo, model=str(tmp_path / "m"), reward_fn=(GOLD,))
    assert GenerationConfig.from_pretrained(tmp_path / "run1").eos_token_id == sorted({end, turn, call})


@pytest.mark.parametrize("script", [ppo, rloo, grpo, sft, dpo], ids=lambda module: module.__name__)
def test_all_processes_have_the_same_stop_tokens(script, tmp_path, monkeypatch):
    """Process 0 alone reads the weights of a sharded model; the generation config is read by all."""
    policy = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft")
    policy.generation_config.eos_token_id = [0, 1]
    policy.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ROOT / "toy/sft").save_pretrained(tmp_path)
    args = script.Args(model=str(tmp_path), device="cpu", zero_stage=2)
    stops = []
    for rank in (0, 1):
        monkeypatch.setattr(script, "RANK", rank)
        stops.append(set(script.load_policy(args).generation_config.eos_token_id))
    assert stops == [{0, 1}, {0, 1}]


@pytest.mark.parametrize("layers", [".*(c_attn|lm_head)", ".*wte"])
def test_an_adapter_of_a_weight_that_is_shared(layers, train):
    """Embeddings and head of the toy policy: merged, the adapter of one would change the other."""
    pytest.importorskip("peft")
    with pytest.raises(SystemExit, match="--lora-target-modules"):
        train(sft, model="toy/sft", lora_r=2, lora_target_modules=layers)


def test_a_tokenizer_with_neither_padding_nor_eos(tmp_path):
    shutil.copytree(ROOT / "toy/sft", tmp_path / "m")
    config = json.loads((tmp_path / "m/tokenizer_config.json").read_text())
    (tmp_path / "m/tokenizer_config.json").write_text(json.dumps(config | {"pad_token": None, "eos_token": None}))
    args = ppo.Args(model=str(tmp_path / "m"), device="cpu", stop_token=("none",))
    policy = ppo.load_policy(args)
    assert ppo.pad([[5], [6, 7]], policy.tokenizer, args)[1].tolist() == [[True, False], [True, True]]


def test_a_policy_with_more_embeddings_than_its_reward_model():
    """It can sample ids without a text, as Qwen's sizes are rounded up: the reward model reads them, too."""
    policy = ppo.load_policy(ppo.Args())
    size = len(policy.tokenizer) + 8
    policy.resize_token_embeddings(size)
    model = ppo.load_reward_model(ppo.Args(), policy)
    ids = torch.tensor([[5, size - 1]])
    assert ppo.read_reward(model, ids, torch.ones_like(ids)).isfinite()


def test_a_word_that_is_no_token_is_no_stop_token():
    """A tokenizer of words reads it as one token, its unknown one; but that may be named."""
    policy = ppo.load_policy(ppo.Args(model="toy/shells/sft"))
    unknown = policy.tokenizer.unk_token_id
    assert policy.tokenizer.encode("zyzzyva") == [unknown]
    with pytest.raises(SystemExit, match="zyzzyva"):
        ppo.find_stop_tokens(ppo.Args(stop_token=("eos", "zyzzyva")), policy)
    for named in (policy.tokenizer.unk_token, str(unknown)):
        assert ppo.find_stop_tokens(ppo.Args(stop_token=(named,)), policy) == [unknown]


def test_stop_token_is_the_unknown_token_too():
    """As in GPT-2 and GPT-NeoX."""
    policy = ppo.load_policy(ppo.Args())
    eos = policy.tokenizer.eos_token_id
    policy.tokenizer.unk_token = policy.tokenizer.eos_token
    for text in ("eos", str(eos), policy.tokenizer.eos_token):
        assert ppo.find_stop_tokens(ppo.Args(stop_token=(text,)), policy) == [eos]
    policy.tokenizer.unk_token = "."  # another one, which may be named all the same (SmolLM2)
    assert len(ppo.find_stop_tokens(ppo.Args(stop_token=("eos", ".")), policy)) == 2


@pytest.mark.parametrize("script", [ppo, rloo, grpo], ids=lambda script: script.__name__)
def test_copies_of_the_weights_in_bfloat16(script):
    """They are kept in a rollout, so that weights are not cast for each token, if all weights are there; in an update
    not with gradient checkpointing, which is for models whose copies would not fit."""
    plain = script.Args(device="cpu", bf16=True)
    small = replace(plain, gradient_checkpointing=True)
    for args, in_update, in_rollout in (
        (plain, True, True),
        (small, False, True),
        (replace(small, zero_stage=3), False, True),
        (replace(small, zero_stage=3, gather_for_rollout=False), False, False),
    ):
        with script.autocast(args):
            assert torch.is_autocast_cache_enabled() == in_update
            with script.gathered(torch.nn.Linear(2, 2), args):
                assert torch.is_autocast_cache_enabled() == in_rollout
        assert torch.is_autocast_cache_enabled()
