"""The options beside the main line of ppo.py and rloo.py: each does what its source says it does."""

import json
import sys
from collections import Counter
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from test_golden import close, golden
from test_rollout import CONFIGS, PAD, STOP, VOCAB, left_padded_prompts, tiny_model
from test_train import ROOT, run, untimed
from torch import nn
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM, OPTConfig, OPTForCausalLM, get_scheduler,
)  # fmt: skip
from transformers.optimization import SchedulerType

import ppo
import rloo

CPU = torch.device("cpu")
SCRIPTS = [ppo, rloo]


def brief(tiny, module, **settings):
    """Settings of three updates, each of one pass over the batch; nothing is evaluated."""
    return tiny[module.__name__] | {"num_ppo_epochs": 1, "dataset_test_split": "none"} | settings


def weights_of(folder):
    """The saved weights of a model, by name."""
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def distance(a, b):
    """Euclidean distance of two sets of weights."""
    return sum((a[name] - b[name]).square().sum() for name in a).sqrt().item()


def a_rollout(policy, **settings):
    """Args, and a rollout of six prompts with everything that an update needs."""
    settings = dict(micro_batch_size=6, num_ppo_epochs=1, response_length=8, temperature=0.9) | settings
    args = ppo.Args(**settings)
    policy.stop_token_id, policy.tokenizer = STOP, SimpleNamespace(pad_token_id=PAD)
    torch.manual_seed(0)
    prompts = [{"input_ids": row[real].tolist()} for row, real in zip(*left_padded_prompts())]
    rollout = ppo.sample_batch(policy, prompts, args)
    ppo.score_reference(rollout, policy, deepcopy(policy), args)
    rollout.advantages = torch.randn_like(rollout.old_logprobs)
    rollout.values = torch.zeros_like(rollout.old_logprobs)
    rollout.returns = torch.randn_like(rollout.old_logprobs)
    return args, rollout


def a_critic(args, policy):
    """The critic as make_critic makes it where there is no reward model, with a head that is not zero."""
    critic = ppo.make_critic(args, policy, None)
    nn.init.normal_(critic.head.weight)
    return critic


# --- score scaling


def test_running_moments_are_trls():
    i, o = golden("trl0711_score_scaling")
    history = []
    for step in o["sequence"]:
        for options, name in (
            ({}, "scores"),
            ({"use_score_scaling": True}, "scaled_only"),
            ({"use_score_scaling": True, "use_score_norm": True}, "scaled_and_normed"),
            ({"use_score_scaling": True, "use_score_norm": True, "score_clip": 0.5}, "scaled_normed_clip0p5"),
        ):
            scaled = ppo.scale_scores(step["scores"], list(history), ppo.Args(**options))
            close(scaled, step[name], rtol=1e-5, atol=1e-6)
        history += step["scores"].tolist()


def test_scores_are_scaled_by_the_moments_of_all_of_them():
    _, o = golden("trl07_running_moments")
    history, args = [], ppo.Args(use_score_scaling=True, use_score_norm=True)
    for row in o["rows"]:
        scaled = ppo.scale_scores(row["batch"], history, args)
        everything = torch.tensor(history)
        close(scaled, (row["batch"] - everything.mean()) / everything.std(), rtol=1e-5, atol=1e-6)
        close(everything.std(), row["running_std"], rtol=1e-5)


def test_scaled_scores_do_not_hide_the_score(tmp_path, tiny):
    settings = brief(tiny, ppo, total_episodes=8)
    a, b = (run(ppo, tmp_path / str(n), use_score_scaling=n, **settings) for n in (False, True))
    assert a[0]["objective/scores"] == b[0]["objective/scores"] and untimed(a) != untimed(b)


# --- steps left out


@pytest.mark.parametrize("module", SCRIPTS)
def test_a_ratio_beyond_the_threshold_makes_no_step(tmp_path, module, tiny):
    """TRL 0.7 zeroes both losses there: at a threshold below 1 nothing is ever learned, and each skip is counted."""
    settings = brief(tiny, module, total_episodes=16, num_ppo_epochs=2, num_mini_batches=2)
    lines = run(module, tmp_path, ratio_threshold=0.5, **settings)
    assert [line["val/skipped_steps"] for line in lines] == [4, 4]
    assert distance(weights_of(tmp_path), weights_of(ROOT / "toy/sft")) == 0


@pytest.mark.parametrize("module", SCRIPTS)
def test_target_kl_ends_the_passes_over_a_batch(tmp_path, module, tiny):
    """With a target that the first step exceeds: the weights are those of one epoch, not of four."""
    settings = brief(tiny, module, total_episodes=8)
    (stopped,) = run(module, tmp_path / "stopped", target_kl=1e-6, **settings | {"num_ppo_epochs": 4})
    run(module, tmp_path / "one", **settings)
    assert stopped["val/skipped_steps"] == 3
    assert distance(weights_of(tmp_path / "stopped"), weights_of(tmp_path / "one")) == 0
    assert distance(weights_of(tmp_path / "stopped"), weights_of(ROOT / "toy/sft")) > 0


# --- the critic


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_shared_trunk_gives_the_same_values_in_one_pass(kind):
    policy = tiny_model(kind)
    args, rollout = a_rollout(policy, critic="shared")
    critic = a_critic(args, policy)
    logits, output = ppo.response_forward(policy, rollout, args.temperature, output_hidden_states=True)
    values = critic(rollout, output.hidden_states[-1])
    torch.testing.assert_close(values, ppo.critic_values(policy, critic, rollout), rtol=1e-4, atol=1e-4)
    alone = ppo.Critic(policy.base_model, critic.head)(rollout)
    torch.testing.assert_close(values, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, ppo.response_forward(policy, rollout, args.temperature)[0])
    calls = Counter()
    policy.base_model.register_forward_hook(lambda *_: calls.update(["body"]))
    ppo.mini_batch_gradient(policy, critic, rollout, (torch.arange(6),), args)
    assert calls["body"] == 1


def test_a_shared_critic_has_only_its_head_to_itself():
    policy = tiny_model("gpt2")
    args, rollout = a_rollout(policy, critic="shared", vf_coef=1.0, learning_rate=1e-3)
    critic = a_critic(args, policy)
    optimizer = ppo.make_optimizer(args, policy, critic)
    assert sum(p.numel() for p in optimizer.param_groups[1]["params"]) == 32 + 1  # weight and bias
    rollout.advantages = torch.zeros_like(rollout.old_logprobs)
    before = deepcopy(policy.state_dict())
    ppo.optimize(policy, critic, optimizer, rollout, [], args)
    assert distance(policy.state_dict(), before) > 0  # the value loss reaches the trunk, as in TRL 0.7


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_critic_warm_up(tmp_path, critic, tiny):
    """The policy stays where it is for so long, while the critic learns."""
    settings = brief(tiny, ppo, critic=critic)
    lines = run(ppo, tmp_path / "a", critic_warmup_updates=3, **settings)
    assert distance(weights_of(tmp_path / "a"), weights_of(ROOT / "toy/sft")) == 0
    assert [line["lr"] for line in lines] == [0, 0, 0] and all(abs(line["val/ratio"] - 1) < 1e-4 for line in lines)
    assert lines[-1]["loss/value_avg"] != lines[0]["loss/value_avg"]
    lines = run(ppo, tmp_path / "b", critic_warmup_updates=1, **settings)
    assert [line["lr"] > 0 for line in lines] == [False, True, True]


# --- beside the algorithm


@pytest.mark.parametrize(
    "name, logits, labels, loss",
    [("openrlhf_gpt_lm_loss", "logits", "labels", "loss"),
     ("openrlhf031_losses_rewards_gae", "lm_logits", "lm_labels", "gptlm_loss")],
)  # fmt: skip
def test_ptx_loss_is_openrlhfs(name, logits, labels, loss, monkeypatch):
    """With each text drawn once, in their order; a token that has no label is not real, there a first one, too."""
    i, o = golden(name)
    x = i[logits].float().requires_grad_()
    rows = (x[n : n + 1] for n in range(len(x)))
    policy = lambda **_: SimpleNamespace(logits=next(rows))  # noqa: E731
    policy.tokenizer = SimpleNamespace(pad_token_id=0)
    monkeypatch.setattr(torch, "randint", lambda high, size: torch.arange(high).expand(size))
    monkeypatch.setattr(ppo, "pad", lambda texts, *_: (torch.stack(texts).clamp(min=0), torch.stack(texts) != -100))
    args = ppo.Args(ptx_coef=3.0, micro_batch_size=1, batch_size=2 * len(x), num_mini_batches=2)
    value = ppo.pretrain_gradient(policy, list(i[labels].long()), args)
    close(value, o[loss], rtol=1e-5)
    y = i[logits].float().requires_grad_()
    nn.functional.cross_entropy(y[:, :-1].flatten(0, 1), i[labels][:, 1:].flatten().long()).backward()
    close(x.grad, 3.0 * y.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("module", SCRIPTS)
def test_ptx_lowers_the_loss_on_the_texts(tmp_path, module, tiny):
    (tmp_path / "t.jsonl").write_text('{"text": "The cat sat on the mat."}\n' * 8)
    settings = brief(tiny, module, pretrain_data=str(tmp_path / "t.jsonl"), learning_rate=1e-3)
    lines = run(module, tmp_path / "out", ptx_coef=10.0, **settings)
    assert lines[-1]["loss/ptx"] < 0.7 * lines[0]["loss/ptx"]


def test_moving_average(tmp_path, tiny):
    """OpenRLHF's sequence; and a run leaves the average in ema/, between the first policy and the last."""
    i, o = golden("openrlhf031_ema")
    policy = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(policy.weight)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    ema = deepcopy(policy)
    ppo.follow(ema, policy, optimizer, ppo.Args(ema_decay=i["ema_beta"]))
    for step in o["ema_sequence"]:
        policy.weight.data = step["param"][None]
        optimizer.step()
        close(ema.weight[0].detach(), step["ema"])
    for module in SCRIPTS:
        out = tmp_path / module.__name__
        run(module, out, ema_decay=0.9, **brief(tiny, module))
        start, average, last = (weights_of(folder) for folder in (ROOT / "toy/sft", out / "ema", out))
        assert 0 < distance(start, average) < distance(start, last) and distance(average, last) > 0
        AutoTokenizer.from_pretrained(out / "ema")


def a_mixture():
    """A tiny mixture of experts."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=16, num_local_experts=4, pad_token_id=PAD, bos_token_id=None, eos_token_id=None,
    )).eval()  # fmt: skip


@pytest.mark.parametrize("module", SCRIPTS)
def test_the_router_loss_is_the_librarys(module):
    """With advantages 0 nothing but it has a gradient: the coefficient times that of the model's own aux_loss."""
    policy = a_mixture()
    args, rollout = a_rollout(policy, aux_loss_coef=0.5, vf_coef=0.0)
    rollout.advantages = torch.zeros_like(rollout.old_logprobs)
    index = (torch.arange(6),)
    if module is ppo:
        critic = ppo.Critic(deepcopy(policy.base_model), nn.Linear(16, 1))
        ppo.mini_batch_gradient(policy, critic, rollout, index, args)
    else:
        args = rloo.Args(micro_batch_size=6, temperature=0.9, aux_loss_coef=0.5)
        rollout.advantages = rollout.advantages[:, :1]
        rloo.mini_batch_gradient(policy, rollout, index, args)
    ours = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    (0.5 * policy(**rollout.inputs(), output_router_logits=True).aux_loss).backward()
    assert any("gate" in name for name in ours)
    for name, p in policy.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(ours[name], p.grad, rtol=1e-4, atol=1e-7)


# --- lengths


def test_the_limit_of_a_response_is_drawn_for_each_rollout(tmp_path, tiny, monkeypatch):
    seen, sample = [], ppo.sample
    monkeypatch.setattr(ppo, "sample", lambda *a: (seen.append(a[3].shape[1]), sample(*a))[1])
    run(ppo, tmp_path, **brief(tiny, ppo, response_length_min=2, batch_size=4, total_episodes=48))
    assert set(seen) <= set(range(2, 9)) and len(set(seen)) > 3 and len(seen) == 12


# --- LoRA


@pytest.fixture
def without_warnings():
    """peft speaks of what is not ours to change."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_reference_is_the_policy_with_its_adapter_off(kind, without_warnings):
    policy = tiny_model(kind)
    args, rollout = a_rollout(policy, lora_r=4)
    before, base = ppo.compute_logprobs(policy, rollout, args), policy.num_parameters()
    ppo.add_adapter(policy, args, task_type="CAUSAL_LM")
    reference = ppo.make_reference(args, policy)
    assert reference is policy and policy.num_parameters() < 1.3 * base  # no second copy
    torch.testing.assert_close(ppo.compute_logprobs(policy, rollout, args), before)  # an adapter begins as nothing
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained)
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    ppo.score_reference(rollout, policy, reference, args)
    torch.testing.assert_close(rollout.ref_logprobs, before)
    assert not torch.allclose(ppo.compute_logprobs(policy, rollout, args), before)  # and it is on again
    assert [name for name, p in policy.named_parameters() if p.requires_grad] == trained
    args.kl_estimator = "full"
    ppo.score_reference(rollout, policy, reference, args)
    assert (rollout.kl[rollout.mask] > 0).any()


@pytest.mark.parametrize("module, more", [(ppo, {}), (ppo, {"critic": "shared"}), (rloo, {})], ids=str)
def test_adapter_and_merged_model_are_saved(tmp_path, module, more, tiny, without_warnings):
    lines = run(module, tmp_path, **brief(tiny, module, lora_r=4, learning_rate=1e-2, total_episodes=16) | more)
    assert abs(lines[-1]["objective/kl"]) > 1e-3
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 300_000
    from peft import AutoPeftModelForCausalLM

    adapter = AutoPeftModelForCausalLM.from_pretrained(tmp_path).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    base = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").eval()
    ids = torch.randint(5, 500, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(adapter(ids).logits, merged(ids).logits, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(base(ids).logits, merged(ids).logits, atol=0.05)
    AutoTokenizer.from_pretrained(tmp_path / "merged")


def test_lora_without_peft_ends_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ppo.UserError, match="--lora-r 4 .*pip install peft"):
        ppo.load_policy(ppo.Args(lora_r=4))


# --- memory and kernels


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_gradient_checkpointing_changes_memory_and_no_number(tmp_path, critic, tiny, monkeypatch):
    """The same metrics, with far fewer activations kept for the backward pass."""
    kept, gradient = [], ppo.mini_batch_gradient

    def counted(*args):
        total = 0

        def pack(x):
            nonlocal total
            total += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            sums = gradient(*args)
        kept.append(total)
        return sums

    monkeypatch.setattr(ppo, "mini_batch_gradient", counted)
    settings = brief(tiny, ppo, critic=critic, total_episodes=8)
    (a,) = run(ppo, tmp_path / "a", **settings)
    (b,) = run(ppo, tmp_path / "b", gradient_checkpointing=True, **settings)
    for name in ("loss/policy_avg", "policy/grad_norm", "val/grad_norm", "policy/entropy_avg"):
        assert a[name] == pytest.approx(b[name], rel=1e-4), name
    assert kept[1] < 0.6 * kept[0]


def test_checkpointing_brings_no_dropout_back(tmp_path):
    """Not to a policy, nor to its critic. OPT calls dropout as a function, where no module can be switched off."""
    config = OPTConfig(
        vocab_size=3072, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, dropout=0.5,
        max_position_embeddings=64, word_embed_proj_dim=16, layerdrop=0.5,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ROOT / "toy/sft").save_pretrained(tmp_path)
    settings = dict(model=str(tmp_path), gradient_checkpointing=True)
    policy = ppo.load_policy(ppo.Args(**settings))
    args, rollout = a_rollout(policy, **settings)
    critic = a_critic(args, policy)
    before = ppo.compute_logprobs(policy, rollout, args), ppo.critic_values(policy, critic, rollout)
    policy.train(), critic.train()
    after = ppo.compute_logprobs(policy, rollout, args), ppo.critic_values(policy, critic, rollout)
    torch.testing.assert_close(after, before)


def test_attention_implementation():
    for name in ("eager", "sdpa"):
        args = ppo.Args(attn_implementation=name)
        policy = ppo.load_policy(args)
        reward_model = ppo.load_reward_model(args, policy)
        assert policy.config._attn_implementation == reward_model.config._attn_implementation == name
    with pytest.raises(ppo.UserError, match="(?i)flash"):
        ppo.load_policy(ppo.Args(attn_implementation="flash_attention_2"))


# --- schedules


@pytest.mark.parametrize("name", [kind.value for kind in SchedulerType])
def test_every_schedule_runs_or_ends_in_a_sentence(name):
    """Its rates are those of the library, which steps its schedules."""
    ours, theirs = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5) for _ in range(2))
    args = ppo.Args(lr_scheduler_type=name, warmup_ratio=0.2)
    try:
        with ppo.setting_up():
            schedule = ppo.make_schedule(args, ours, 10)
    except ppo.UserError as error:
        assert f"--lr-scheduler-type {name}" in str(error) or "the run could not start: " in str(error)
        return
    stepped = get_scheduler(name, theirs, 2, 10)
    for step in range(1, 11):
        ppo.set_learning_rates(schedule, step)
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"])
        theirs.step(), stepped.step()


def test_the_rate_falls_linearly_and_the_critics_with_it(tmp_path, tiny, monkeypatch):
    seen, optimize = [], ppo.optimize

    def watched(policy, critic, optimizer, *rest):
        seen.append([group["lr"] for group in optimizer.param_groups])
        return optimize(policy, critic, optimizer, *rest)

    monkeypatch.setattr(ppo, "optimize", watched)
    run(ppo, tmp_path, learning_rate=3e-4, critic_learning_rate=6e-4, **brief(tiny, ppo))
    assert [x for pair in seen for x in pair] == pytest.approx([3e-4, 6e-4, 2e-4, 4e-4, 1e-4, 2e-4])


# --- evaluation


@pytest.mark.parametrize("module", SCRIPTS)
def test_evaluation_does_not_touch_the_training(tmp_path, module, tiny):
    """After the second update, and after the last in any case; the third goes on as if nothing had been."""
    a = run(module, tmp_path / "a", **brief(tiny, module))
    b = run(module, tmp_path / "b", eval_steps=2, **brief(tiny, module, dataset_test_split="validation"))
    assert ["eval/scores" in line for line in b] == [False, True, True]
    b = [{name: x for name, x in line.items() if not name.startswith("eval/")} for line in b]
    assert untimed(a) == untimed(b)


def test_evaluation_by_hand(tmp_path, tiny):
    """Greedy answers of the saved policy: their share of EOS, their length, their KL at the training temperature."""
    line = run(ppo, tmp_path, learning_rate=1e-3, num_eval_prompts=5, eval_temperature=1e-4, **tiny["ppo"])[-1]
    policy, start = (AutoModelForCausalLM.from_pretrained(x).eval() for x in (tmp_path, ROOT / "toy/sft"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with open(f"{tiny['ppo']['dataset']}/validation.jsonl") as file:
        prompts = [json.loads(row)["prompt"] for row in file][:5]
    lengths, kls, ends = [], [], 0
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        answer = policy.generate(ids, max_new_tokens=8, do_sample=False)[0]
        new = answer[ids.shape[1] :]
        lengths.append(len(new))
        ends += int(tokenizer.eos_token_id in new)
        with torch.no_grad():
            a, b = ((m(answer[None]).logits[0, ids.shape[1] - 1 : -1] / 0.7).log_softmax(-1) for m in (policy, start))
        kls.append((a - b).gather(1, new[:, None]).sum().item())
    assert line["eval/response_length"] == pytest.approx(sum(lengths) / 5)
    assert line["eval/eos_share"] == pytest.approx(ends / 5)
    assert line["eval/kl"] == pytest.approx(sum(kls) / 5, abs=1e-3)


# --- chats


def chat_tokenizer():
    """The toy tokenizer with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer


def test_prompts_as_messages(tmp_path):
    tokenizer = chat_tokenizer()
    AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    prompt = [{"role": "user", "content": "The film"}]
    (tmp_path / "d.jsonl").write_text((json.dumps({"prompt": prompt}) + "\n") * 8)
    args = ppo.Args(model=str(tmp_path / "m"), dataset=str(tmp_path / "d.jsonl"))
    prompts, _ = ppo.load_prompts(args, ppo.load_policy(args), None)
    assert tokenizer.decode(prompts[0]["input_ids"]) == "user: The film<|end|>assistant:"
    settings = dict(model=args.model, dataset=args.dataset, batch_size=8, total_episodes=8, response_length=4)
    run(ppo, tmp_path / "out", **settings)


def test_prompts_as_messages_before_completions_and_pairs():
    import reward_model
    import sft

    tokenizer = chat_tokenizer()
    prompt = [{"role": "user", "content": "The film"}, {"role": "assistant", "content": "is"}]
    prompt.append({"role": "user", "content": "what"})
    whole = "user: The film<|end|>assistant: is<|end|>user: what<|end|>assistant: good.<|end|>"
    for completion in ("good.", [{"role": "assistant", "content": "good."}]):
        ids, labels = sft.encode_pair(prompt, completion, tokenizer, True)
        assert tokenizer.decode(ids) == whole
        assert tokenizer.decode([x for x in labels if x != sft.IGNORE]).strip() == "good.<|end|>"
        assert sft.encode_pair(prompt, completion, tokenizer, False)[1] == ids
        assert tokenizer.decode(reward_model.encode_conversation(prompt, completion, tokenizer)) == whole


def test_a_prompt_beside_messages_is_read_once():
    """A text as prompt, beside messages that hold it too (as in ultrafeedback_binarized), or that go on from it."""
    import dpo
    import reward_model
    import sft

    tokenizer, eos = chat_tokenizer(), AutoTokenizer.from_pretrained(ROOT / "toy/sft").eos_token
    tokenizer.chat_template += "{{ '\\n' }}"  # as ChatML ends
    turn = lambda role, text: [{"role": role, "content": text}]  # noqa: E731
    good, bad, user = turn("assistant", "good."), turn("assistant", "bad."), turn("user", "The film")
    for start in (user, []):
        text = reward_model.encode_conversation("The film", start + good, tokenizer)
        assert tokenizer.decode(text) == f"user: The film{eos}assistant: good.{eos}"
        pair = dpo.encode_preference("The film", start + good, start + bad, tokenizer)
        assert tokenizer.decode(pair.prompt) == f"user: The film{eos}assistant:"
        assert [tokenizer.decode(x) for x in (pair.chosen, pair.rejected)] == [f" good.{eos}", f" bad.{eos}"]
    ids, labels = sft.encode_pair("The film", good, chat_tokenizer(), True)
    assert tokenizer.decode(ids) == f"user: The film{eos}assistant: good.{eos}"
    assert tokenizer.decode([x for x in labels if x != sft.IGNORE]).strip() == f"good.{eos}"


# --- one file as data


def test_a_single_file_is_not_evaluated_on(tmp_path):
    """All of it is trained on, so nothing is held out."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "The film"}\n' * 4)
    args = ppo.Args(dataset=str(tmp_path / "d.jsonl"))
    train, test = ppo.load_data(args)
    assert len(train) == 4 and test is None


def test_a_single_file_has_no_other_split(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "The film"}\n' * 4)
    with pytest.raises(ppo.UserError, match="(?i)unknown split"):
        ppo.load_data(ppo.Args(dataset=str(tmp_path / "d.jsonl"), dataset_test_split="validation"))


def test_a_part_of_a_single_file(tmp_path):
    """The split syntax of `datasets` works there as in a folder."""
    (tmp_path / "d.jsonl").write_text("".join(f'{{"prompt": "The film {i}"}}\n' for i in range(8)))
    assert list(ppo.load_split(str(tmp_path / "d.jsonl"), None, "train[2:5]")["prompt"]) == [
        "The film 2", "The film 3", "The film 4",
    ]  # fmt: skip


def test_total_episodes_win_over_epochs(tmp_path, tiny):
    """As in TRL 0.16."""
    settings = {name: x for name, x in brief(tiny, ppo).items() if name != "total_episodes"}
    assert run(ppo, tmp_path / "a", num_train_epochs=0.25, **settings)[-1]["episode"] == 16  # of 64 prompts
    assert run(ppo, tmp_path / "b", num_train_epochs=0.25, total_episodes=8, **settings)[-1]["episode"] == 8
