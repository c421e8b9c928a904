"""The architectures that people train, tiny and random: each works in float32 and bfloat16, or is refused."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaModel

import dpo
import grpo
import ppo
import reward_model
import rloo
import sft

ROOT = Path(ppo.__file__).parent
GOLD = f"{ROOT}/toy/make.py:gold_score"
TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
SIZES = dict(vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
             num_key_value_heads=1, intermediate_size=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
             eos_token_id=1)  # fmt: skip
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
WINDOW = dict(sliding_window=6)
ARCHITECTURES = {
    "bloom": {}, "falcon": {}, "gemma": {}, "gemma2": WINDOW, "gemma3_text": WINDOW, "gpt2": {}, "gpt_neox": {},
    "gpt_oss": EXPERTS | WINDOW, "gptj": dict(rotary_dim=4), "granite": {}, "llama": {}, "mistral": WINDOW,
    "mixtral": EXPERTS, "olmo": {}, "opt": dict(ffn_dim=16, word_embed_proj_dim=8, do_layer_norm_before=False),
    "phi": {}, "phi3": {}, "qwen2": {}, "qwen3": {}, "smollm3": {}, "stablelm": {}, "starcoder2": {},
}  # fmt: skip
DECODER = dict(d_model=16, encoder_layers=1, decoder_layers=1, decoder_attention_heads=2, encoder_attention_heads=2)
STRANGERS = {  # positions of another kind, or another kind of cache; each with what the sentence of refusal says
    "bart": (DECODER, "reads a text behind padding"),
    "roberta": (dict(is_decoder=True), "reads a text behind padding"),
    "gpt_neo": (dict(attention_types=[[["global", "local"], 1]], window_size=6), "ratio pi/pi_old is off"),
    "mamba2": (dict(num_heads=4, head_dim=8, n_groups=1, state_size=4, num_hidden_layers=1), "pi/pi_old|reads a text"),
}


def make(kind, auto_class=AutoModelForCausalLM, **settings):
    """A random model whose weights are large enough for its distributions to be far from uniform."""
    torch.manual_seed(0)
    settings = SIZES | (ARCHITECTURES[kind] if kind in ARCHITECTURES else STRANGERS[kind][0]) | settings
    if kind == "falcon":
        del settings["head_dim"]  # it computes its own
    model = auto_class.from_config(AutoConfig.for_model(kind, **settings)).eval()
    for p in model.parameters():
        if p.dim() == 2:
            p.data.mul_(4)
    return model


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """saved(kind, auto_class, **settings) -> a folder with such a model and the toy world's tokenizer."""
    folders = {}

    def save(kind, auto_class=AutoModelForCausalLM, **settings):
        key = kind, auto_class.__name__, str(settings)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(kind)
            make(kind, auto_class, **settings).save_pretrained(folders[key])
            TOKENIZER.save_pretrained(folders[key])
        return str(folders[key])

    return save


@pytest.fixture
def train(tmp_path, part_of):
    """train(script, **settings) -> the lines of metrics.jsonl of a run of one or two steps."""

    def run(script, **settings):
        if script in (ppo, rloo, grpo):
            sizes = dict(batch_size=4, total_episodes=4, response_length=8, dataset=part_of("prompts", 64))
            sizes |= dict(num_generations=2, reward_fn=(GOLD,)) if script is grpo else dict(num_ppo_epochs=1)
        else:
            sizes = dict(dataset=part_of("sft" if script is sft else "preferences", 8), max_length=48)
            sizes |= dict(max_prompt_length=16, response_length=8, num_eval_prompts=4) if script is dpo else {}
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        settings = dict(dataset_test_split="none", num_sample_generations=0) | sizes | settings
        script.train(script.Args(device="cpu", output_dir=str(out), **settings))
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    return run


def left_padded_prompts(V):
    """(6, 7) random prompts of 1 to 7 tokens, and their mask."""
    prompts = torch.randint(4, V, (6, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(7) >= torch.tensor([0, 6, 3, 5, 1, 2])[:, None]
    return prompts.masked_fill(~mask, 0), mask


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_rollouts_are_plain_forward_passes(kind):
    """The logprobs of a cached rollout of padded rows are those of each row alone, without padding or cache."""
    policy = make(kind, vocab_size=32)
    prompts, mask = left_padded_prompts(32)
    uniforms = torch.rand(6, 12, generator=torch.Generator().manual_seed(0))
    policy.tokenizer = SimpleNamespace(pad_token_id=0)
    for bf16 in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            policy.stop_token_id = None
            policy.stop_token_id = ppo.sample(policy, prompts, mask, uniforms[:, :4], 0.9)[0][0, 3].item()
            r = ppo.Rollout(prompts, mask, *ppo.sample(policy, prompts, mask, uniforms, 0.9))
            assert r.ended.any()  # at least one row left the batch on the way
            for i in range(6):
                response = r.responses[i][r.mask[i]]
                ids = torch.cat([prompts[i][mask[i]], response])[None]
                logits = policy(input_ids=ids).logits[0, -len(response) - 1 : -1].float() / 0.9
                alone = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
                torch.testing.assert_close(r.old_logprobs[i][r.mask[i]], alone, rtol=0, atol=5e-2 if bf16 else 1e-5)


COMMON = {"gpt2", "llama", "gemma3_text", "gpt_oss"}  # positions learned and rotary, windows, experts


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind", [kind if kind in COMMON else pytest.param(kind, marks=pytest.mark.slow) for kind in ARCHITECTURES]
)
def test_every_architecture_trains(saved, train, kind, bf16):
    """Rollout, reward, critic and update, as a run makes them; the run itself sees to it that the first ratio is 1."""
    judge = "llama" if kind == "granite" else kind  # there are no classifiers of Granite
    folder, reward = saved(kind), saved(judge, AutoModelForSequenceClassification, num_labels=1)
    (line,) = train(ppo, model=folder, reward_model=reward, bf16=bf16)
    assert line["policy/grad_norm"] > 0 and line["val/grad_norm"] > 0 and line["objective/scores_std"] > 0
    assert abs(line["objective/kl"]) < (0.1 if bf16 else 1e-4)  # policy and reference are yet the same


def refusal(train, script, **settings):
    """The one sentence with which a run is refused."""
    with pytest.raises(script.UserError) as error:
        train(script, **settings)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("script", [rloo, grpo, dpo], ids=lambda module: module.__name__)
def test_rotary_embeddings_under_bfloat16_elsewhere(saved, train, script):
    data = dict(dataset_test_split="validation") if script is dpo else dict(reward_fn=(GOLD,))
    assert train(script, model=saved("llama"), bf16=True, **data)


@pytest.mark.parametrize("script", [ppo, rloo, grpo], ids=lambda module: module.__name__)
@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_refused(saved, train, script, kind):
    """Before the first step: what they read in one pass beside padding is not what they read alone, or drew."""
    sentence = refusal(train, script, model=saved(kind), reward_fn=(GOLD,))
    assert re.search(STRANGERS[kind][1], sentence)


def test_dpo_refuses_what_reads_otherwise_behind_padding(saved, train):
    assert "reads a text behind padding" in refusal(train, dpo, model=saved("bart"))


def test_dropout_is_off_in_training_mode_too():
    """Of all kinds of layers, whatever the names of their rates, and though they read them in the config (Falcon)."""
    ids = torch.arange(4, 28).view(2, 12)
    for kind in ARCHITECTURES:
        config = make(kind).config
        rates = {name: 0.5 for name, rate in config.to_dict().items() if "drop" in name and isinstance(rate, float)}
        model = make(kind, **rates)
        with torch.no_grad():
            before, dropped = model(input_ids=ids).logits, model.train()(input_ids=ids).logits
            ppo.turn_off_dropout(model)
            torch.testing.assert_close(model(input_ids=ids).logits, before)
        assert rates and not torch.allclose(before, dropped, atol=1e-2)


@pytest.mark.parametrize("script", [sft, reward_model, dpo], ids=lambda module: module.__name__)
def test_padding_is_read_as_nothing(saved, train, script, monkeypatch):
    """A model that mistakes which side of a row is padded is refused, and without this fault it is not."""
    plain = LlamaModel.forward
    check = script.check_padding if script is dpo else script.check_causal
    check(make("llama"), script.Args())

    def shifted(self, *args, attention_mask=None, **kwargs):
        mask = None if attention_mask is None else attention_mask.flip(1)
        return plain(self, *args, attention_mask=mask, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", shifted)
    assert "reads a text" in refusal(train, script, model=saved("llama"))


@pytest.mark.parametrize("script", [sft, ppo], ids=lambda module: module.__name__)
def test_a_model_that_looks_ahead_is_no_language_model(saved, train, script):
    assert "reads a text" in refusal(train, script, model=saved("roberta", is_decoder=False))


def test_weights_that_are_missing(saved, train, tmp_path):
    """The library would draw them at random, and say so in a log that nobody reads."""
    folder = shutil.copytree(saved("llama"), tmp_path / "headless")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight" in refusal(train, sft, model=str(folder))


def test_weights_that_no_layer_takes(saved, train, tmp_path):
    """They are another architecture's, of which the model that would be trained is a part."""
    folder = shutil.copytree(saved("llama"), tmp_path / "more")
    weights = load_file(folder / "model.safetensors") | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "layers.0.self_attn.q_norm.weight" in refusal(train, ppo, model=str(folder))


def test_a_language_model_is_no_reward_model(saved, train):
    """Whether or not one of the labels that its random head would have is named."""
    for label in (None, "LABEL_1"):
        sentence = refusal(train, ppo, reward_model=saved("gpt2"), reward_label=label)
        assert "score.weight" in sentence and "--reward-label" not in sentence


def test_a_reward_model_starts_with_a_new_head_but_with_no_other_new_weight(saved, train, tmp_path):
    assert train(reward_model, model=saved("llama"))
    folder = shutil.copytree(saved("llama"), tmp_path / "hollow")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refusal(train, reward_model, model=str(folder))


def test_tokens_without_an_embedding(saved, train, tmp_path):
    """One that was added for padding; a vocabulary that is another model's; one that the chat template writes."""
    tokenizer = AutoTokenizer.from_pretrained(saved("gpt2"))
    padded, talking = tmp_path / "padded", tmp_path / "talking"
    for folder in (padded, talking):
        shutil.copytree(saved("gpt2"), folder)
    tokenizer.add_special_tokens({"pad_token": "<|more|>"})
    tokenizer.save_pretrained(padded)
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, "{{ '<|more|>' }}"
    tokenizer.save_pretrained(talking)
    for folder in (padded, talking, saved("gpt2", vocab_size=3000)):
        sentence = refusal(train, sft, model=str(folder))
        assert "id 3072" in sentence or "id 3071" in sentence


def test_an_added_token_that_is_never_used_does_no_harm(saved, train, tmp_path):
    """As in Gemma 3's tokenizer, whose token for images the text models do not have."""
    folder = shutil.copytree(saved("gpt2"), tmp_path / "images")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|image|>"])
    tokenizer.save_pretrained(folder)
    assert train(sft, model=str(folder))


def test_a_policy_with_a_larger_vocabulary_than_its_reward_model(saved, train):
    """Embeddings are padded to round sizes, by each model to its own: the policy may draw an id beyond the other's."""
    reward = saved("llama", AutoModelForSequenceClassification, num_labels=1)
    assert train(ppo, model=saved("llama", vocab_size=6000), reward_model=reward, response_length=20)


def test_a_reward_model_with_a_short_context(saved, train):
    """One that reads the policy's tokens cannot be shown less than all; one that reads texts sees their ends."""
    reward = saved("gpt2", AutoModelForSequenceClassification, num_labels=1, max_position_embeddings=24)
    sentence = refusal(train, ppo, model=saved("gpt2"), reward_model=reward, response_length=24)
    assert "--response-length 24" in sentence and "24 tokens that policy and reward model can read" in sentence


def test_the_context_of_roberta():
    """Its positions begin behind that of the padding token: of 64 it has 62, as its tokenizer knows."""
    model = make("roberta", AutoModelForSequenceClassification, is_decoder=False, pad_token_id=1)
    for known, length in ((62, 62), (512, 64), (10**30, 64)):
        model.tokenizer = SimpleNamespace(model_max_length=known)
        assert ppo.context_length(model) == length
    ids = torch.full((1, 62), 5)
    assert ppo.read_reward(model, ids, torch.ones_like(ids)).isfinite().all()


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_critic_on_embeddings_of_another_width(saved, train, critic):
    """OPT-350m's last layer is projected down to the width of its embeddings; the critic's head reads that."""
    assert train(ppo, model=saved("opt"), critic=critic, reward_fn=(GOLD,))[0]["val/grad_norm"] > 0


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_frozen_models_in_bfloat16_say_the_same(kind):
    """To the bit what autocast makes of float32 weights, and half of the memory."""
    model, ids = make(kind), torch.arange(4, 64).view(4, 15)

    def logits():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids).logits

    before, of_trained = logits(), {p.dtype for p in model.parameters()}
    ppo.shard(model, ppo.Args(bf16=True))
    assert of_trained == {p.dtype for p in model.parameters()} == {torch.float32}  # a model that is trained stays
    ppo.shard(model.requires_grad_(False), ppo.Args(bf16=True))
    assert torch.equal(logits(), before)
    layers = [m for m in model.modules() if type(m).__name__ in ("Linear", "Conv1D") and m is not model.lm_head]
    assert all(m.weight.dtype == torch.bfloat16 for m in layers)


def test_tf32_on_a_gpu_and_the_ratio_that_goes_with_it(tmp_path):
    """On any device but a CPU float32 products go through the tensor cores, and the first ratio may show it."""
    for device, precision in (("cpu", "highest"), ("meta", "high")):
        torch.set_float32_matmul_precision("highest")
        args = ppo.start_run(ppo.Args(device=device, output_dir=str(tmp_path / device)))
        assert torch.get_float32_matmul_precision() == precision
        if device == "cpu":
            with pytest.raises(ppo.UserError):
                ppo.check_first_ratio(5e-3, args)
    ppo.check_first_ratio(5e-3, args)


@pytest.mark.parametrize("script", [ppo, grpo, dpo, sft, reward_model], ids=lambda module: module.__name__)
def test_windows(saved, train, script, monkeypatch):
    """There is no module `resource`, and text is UTF-8 only if one says so."""

    def write_text(self, text, encoding="cp1252", **kwargs):
        self.write_bytes(text.encode(encoding))

    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr(script.sys, "platform", "win32")
    assert train(script, model=saved("gpt2"), exp_name="\N{GREEK SMALL LETTER LAMDA}")


def test_a_path_with_a_colon_before_the_name_of_a_function(tmp_path):
    """C:\\folder\\file.py:name, on a system whose file names may hold colons."""
    (tmp_path / "C:file.py").write_text("def reward(prompts, completions, **columns):\n    return [1.0]\n")
    assert ppo.load_function(f"{tmp_path}/C:file.py:reward")(["a"], ["b"]) == [1.0]


def test_weights_of_another_shape(saved, train):
    """As after an edit of the config; the library would draw those anew."""
    folder = Path(saved("gpt2", n_positions=64))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_positions": 48}))
    assert "transformer.wpe.weight" in refusal(train, ppo, model=str(folder))


def test_weights_that_say_nothing(saved, train):
    """All zero, or not a number: not a matter of padding."""
    for value in (0.0, float("nan")):
        folder = Path(saved("gpt2", n_positions=96 if value == 0 else 80))
        weights = load_file(folder / "model.safetensors")
        for x in weights.values():
            x.fill_(value)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        assert "gives all tokens the same logit" in refusal(train, ppo, model=str(folder))
