"""docs/fork.md, docs/diffs/: their diffs fit the short files and scripts, and do what the pages say."""

import json
import re
import shutil
import sys
from dataclasses import fields
from functools import cache
from unittest import mock

import on_many_processes
import numpy as np
import pytest
import torch
from numbers_of_others import close, golden, leaf
from runs import main as run_main
from runs import NAMES, assert_close_runs, cut, run, script, slow_but, untimed, watch, words_of, write_rows
from safetensors.torch import load_file
from sources import ROOT, load, text_of
from tiny import SIZES
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

import ppo
import test_grpo
import test_prompts
import test_loss

sys.path.insert(0, str(ROOT / "experiments"))
import record  # noqa: E402  (which adds tools/ to the path)
from make_fork import apply, fork, main, read_diffs, script_of, scripts_of  # noqa: E402

PAGE = "docs/diffs/settings.md"
DIFFS = {page: read_diffs(text_of(page)) for page in ("docs/fork.md", PAGE, "docs/diffs/questions.md")}
USED = {(page, name, script_of(DIFFS[page][name])) for page in ("docs/fork.md", PAGE) for name in DIFFS[page]}
ALL = {}  # script -> the diffs of settings that name it
for script_name in ("ppo.py", "rloo.py", "grpo.py", "agent.py", "dpo.py", "sft.py", "ddpo.py"):
    found = read_diffs(text_of(PAGE), script_name)
    ALL[script_name] = [name for name, diff in found.items() if script_name in scripts_of(diff)]
    USED |= {(PAGE, name, script_name) for name in ALL[script_name]}
USED |= {("docs/fork.md", name, "ppo.py") for name in ("A loss term", "Clip-higher")}
USED |= {("docs/diffs/questions.md", name, "lecture/grpo.py") for name in DIFFS["docs/diffs/questions.md"]}
MODELS = dict(model=f"{ROOT}/toy/sft", reward_model=f"{ROOT}/toy/reward_model")
RUNS = record.runs_of_group("questions")
USED |= {("docs/diffs/questions.md", run.options["fork"], run.command[0]) for run in RUNS if "fork" in run.options}


@pytest.mark.parametrize(("page", "name", "script"), sorted(USED))
def test_every_diff_fits_its_file(page, name, script):
    """What comes out is another program."""
    fork = apply(read_diffs(text_of(page), script)[name], text_of(script))
    compile(fork, name, "exec")
    assert fork != text_of(script)


@pytest.mark.parametrize("name", ["A metric", "A loss term"])
def test_a_fork_of_the_full_script_does_what_its_page_says(name, tmp_path, monkeypatch, tiny):
    """Another metric, and nothing else; a loss term that is small, and never negative."""
    for linked in ("ppo.py", "docs", "toy", "rewards"):
        (tmp_path / linked).symlink_to(ROOT / linked)
    monkeypatch.setattr("make_fork.ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_fork.py", name, "--script", "ppo.py"])
    main()
    with pytest.raises(SystemExit, match="fork.py exists"):  # it may hold work
        main()
    settings = tiny["ppo"] | MODELS | dict(total_episodes=8, num_eval_prompts=0)
    (line,) = run(load(tmp_path / "fork.py", "forked"), tmp_path / "run", **settings)
    (plain,) = run(ppo, tmp_path / "plain", **settings)
    assert line["objective/scores"] == plain["objective/scores"]
    change = abs(line["loss/policy_avg"] - plain["loss/policy_avg"])
    assert change == 0 if name == "A metric" else 0 < change < 0.1
    if name == "A metric":
        assert line["policy/clipfrac_avg"] <= line["policy/outside_avg"] < 1


# --- What left the script, and what others add

SHORT = dict(total_episodes=16, temperature=1.0, learning_rate=1e-3, num_eval_prompts=0)


def load_fork(folder, name, *diffs):
    """A script with these diffs, in a folder with the toy world."""
    for linked in ("toy", "rewards"):
        (folder / linked).symlink_to(ROOT / linked)
    (folder / "forked.py").write_text(fork(diffs, f"{name}.py"))
    return load(folder / "forked.py", "forked")


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    """everything(name) -> a script with all diffs."""
    return cache(lambda name: load_fork(tmp_path_factory.mktemp(name), name, *ALL[f"{name}.py"]))


@pytest.fixture(scope="session")
def experts(tmp_path_factory):
    """A mixture of experts that reads the toy world's tokens."""
    folder = tmp_path_factory.mktemp("experts")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    sizes = SIZES | dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, initializer_range=0.3)
    torch.manual_seed(0)
    for part in (MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4)), tokenizer):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def train(tmp_path, tiny, monkeypatch):
    """train(diff, function, name, **settings) -> the metrics of two updates of a fork, by default of ppo.py, and what
    each call of this function of it returned and was given."""
    forks = {}

    def train_fork(diff, function, name="ppo", **settings):
        if diff not in forks:
            (tmp_path / f"{len(forks)}").mkdir()
            forks[diff] = load_fork(tmp_path / f"{len(forks)}", name, diff)
        calls = []
        watch(monkeypatch, forks[diff], function, lambda *call: calls.append(call))
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        settings = dict(dataset=tiny["ppo"]["dataset"]) | settings
        return run(forks[diff], folder, **tiny[name] | OTHER_SETTINGS[name] | SHORT | settings), calls

    return train_fork


GOLD = f"{ROOT}/toy/gold_score.py:gold_score"
SCORED = dict(model=MODELS["model"], reward_fn=(GOLD,))
OTHER_SETTINGS = {"ppo": MODELS, "rloo": SCORED, "grpo": SCORED | dict(beta=0.1)}
NORM = {"ppo": "policy/grad_norm", "rloo": "policy/grad_norm", "grpo": "grad_norm"}
of_three = pytest.mark.parametrize("name", slow_but(["ppo"], ["ppo", "rloo", "grpo"]))
NONE = ["Score scaling", "Early stop", "KL estimators", "Adaptive KL", "Whitened rewards", "Moving average"]
OFF = {("ppo", name): {} for name in [*NONE, "Stop tokens of one's own"]}
OFF |= {  # settings with which a diff changes nothing
    ("ppo", "Critic warm-up"): dict(critic_warmup_updates=0),
    ("ppo", "Entropy bonus"): dict(entropy_coef=0),
    ("rloo", "Token-level KL"): {},
    ("rloo", "REINFORCE++'s normalisation"): {},
    ("grpo", "Dynamic sampling"): dict(dynamic_sampling=0),
    ("grpo", "Rows without a gradient"): dict(skip_equal_groups=False),
    ("grpo", "Scores as advantages"): dict(baseline="mean"),
    ("grpo", "Two-sided clip"): dict(delta=1e9),
    ("grpo", "Means of micro-batches"): dict(loss_type="dapo"),
    ("grpo", "KL without the ratio"): dict(use_bias_correction_kl=True),
}


@pytest.mark.parametrize(("name", "diff"), slow_but([("ppo", "Entropy bonus")], OFF))
def test_a_fork_whose_settings_are_off_is_the_script(name, diff, train, tmp_path, tiny):
    """It may log more."""
    lines, _ = train(diff, "update", name, **OFF[name, diff])
    dataset = tiny["ppo"]["dataset"]
    plain = run(name, tmp_path / "plain", **tiny[name] | OTHER_SETTINGS[name] | SHORT | dict(dataset=dataset))
    assert [line | old for line, old in zip(untimed(lines), untimed(plain), strict=True)] == untimed(lines)


SPECIAL = {
    "ppo": dict(critic_warmup_updates=0, kl_estimator="full", kl_target=1.0, score_scaling="norm", whiten_rewards=True),
    "rloo": dict(kl_estimator="k3", kl_target=1.0, normalize_reward=True, normalize_advantage=True)
    | dict(token_level_kl=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "rloo", "grpo", "dpo"])
def test_all_diffs_train_together(name, tmp_path, tiny, experts, part_of, monkeypatch):
    """Two updates of a mixture of experts, on one process, and on two at each stage: they compute the same. One that
    is resumed comes to the same numbers, too."""
    module = load_fork(tmp_path, name, *ALL[f"{name}.py"])
    monkeypatch.syspath_prepend(tmp_path)
    settings = tiny[name] | dict(micro_batch_size=4, save_steps=1, save_total_limit=9)
    if name == "dpo":
        settings |= dict(num_train_epochs=0.7, learning_rate=1e-4)
    else:
        settings |= OTHER_SETTINGS[name] | SHORT | dict(model=experts, reward_fn=(GOLD,), adam_epsilon=1e-3)
        settings |= dict(num_sample_generations=0)
        settings |= dict(dataset=tiny["ppo"]["dataset"], pretrain_data=part_of("sft", 32), target_kl=1.0)
        settings |= dict(stop_token=("eos", ".")) | SPECIAL.get(name, {})
    run(module, tmp_path / "alone", **settings)
    shutil.copytree(cut(tmp_path / "alone", tmp_path / "cut", 1), tmp_path / "resumed")
    jobs = [words_of(**settings, device="cpu", zero_stage=i, output_dir=tmp_path / f"stage{i}") for i in (2, 3)]
    resumed = {} if name == "dpo" else dict(reward_fn=settings["reward_fn"])
    jobs.append(["--resume", str(tmp_path / "resumed"), *words_of(**resumed)])
    jobs = [["forked", words] for words in jobs]
    on_many_processes.wait(on_many_processes.start(jobs, tmp_path), tmp_path)
    for other in ("stage2", "stage3", "resumed"):
        assert_close_runs(tmp_path / "alone", tmp_path / other, rel=1e-3, abs=1e-4, weights=1e-5)


# --- numbers of others


def test_kl_estimators_against_trl07(everything):
    i, o = golden("trl0711_kl_penalty_modes")
    module = everything("ppo")
    theirs = {name: o[name] for name in ("k1", "k2", "k3")} | {"abs": o["modes"]["abs"]["kl"]}
    for name, kl in theirs.items():
        close(module.kl_estimate(i["logprobs"], i["ref_logprobs"], name), kl)
    close(module.exact_kl(i["logits"], i["ref_logits"])[:, :5], o["modes"]["full"]["kl"])


def test_score_scaling_against_trl07(everything):
    sums = {name: [0, 0.0, 0.0] for name in ("std", "norm", "clip")}
    settings = {"std": ("std", None), "norm": ("norm", None), "clip": ("norm", 0.5)}
    keys = {"std": "scaled_only", "norm": "scaled_and_normed", "clip": "scaled_normed_clip0p5"}
    for step in golden("trl0711_score_scaling")[1]["sequence"]:
        for name, (scaling, clip) in settings.items():
            ours = everything("ppo").scale_scores(step["scores"].float(), sums[name], scaling, clip)
            close(ours, step[keys[name]], rtol=1e-5, atol=1e-6)


def test_moving_average_against_openrlhf(everything):
    i, o = golden("openrlhf031_ema_ptx")
    policy, ema = (torch.nn.ParameterList([torch.zeros(2, dtype=torch.float64)]) for _ in range(2))
    for step in o["ema_sequence"]:
        policy[0].data = step["param"]
        everything("ppo").average(ema, policy, i["ema_beta"])
        close(ema[0].data, step["ema"])


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_kl_controller_against_trl07(name, monkeypatch, tiny, tmp_path):
    """At the target, inside the clip, and far outside it; 16 episodes of a horizon of 625 are 256 of 10,000."""
    i, o = golden("trl0711_kl_controller")
    steps = [step for step in o["sequence"] if step["n_steps"] == 256]
    kls = [step["current_kl"] for step in [*steps, steps[0]]]
    coefs = []
    module = load_fork(tmp_path, name, "Adaptive KL")
    log = lambda rollout, args: {"objective/kl": kls[len(coefs)], "objective/scores": coefs.append(args.kl_coef) or 0.0}  # noqa: E731
    monkeypatch.setattr(module, "rollout_stats", log)
    monkeypatch.setattr(module, "update", lambda *_: {"policy/first_ratio_error": 0.0})
    sizes = dict(kl_target=i["target"], kl_horizon=625, batch_size=16, total_episodes=16 * len(kls), response_length=1)
    run(module, tmp_path / "run", **tiny[name] | SHORT | sizes)
    ratios = [step["value_after"] / step["value_before"] for step in steps]
    close([after / before for before, after in zip(coefs, coefs[1:])], ratios)


def test_token_level_kl_against_openrlhf(everything):
    """Its REINFORCE++ returns carry the score too; what is left without it is the KL from each token on."""
    i, o = golden("openrlhf059_reinforce")
    mask = i["action_mask"].bool()
    kl = o["kl_k1"].masked_fill(~mask, 0.0)
    advantages = everything("rloo").token_advantages(torch.zeros(3), -i["kl_coef"] * kl, 3)
    close(advantages, o["reinforce_returns"] - i["rm_reward"].clamp(-10, 10)[:, None], mask)


OF_GRPO = {"bnpo": "Means of micro-batches", "delta": "Two-sided clip", "kl": "KL without the ratio"}


@pytest.mark.parametrize("case, diff", OF_GRPO.items())
def test_losses_of_grpo_against_trl(case, diff, tmp_path, monkeypatch):
    monkeypatch.setattr(test_grpo, "grpo", load_fork(tmp_path, "grpo", diff))
    test_grpo.test_a_whole_update_is_trls(case, monkeypatch)


@pytest.mark.parametrize(
    "num_unequal, beta, size, num_passes", [(0, 0, 4, 1), (4, 0, 4, 1), (4, 0, 3, 2), (0, 0.1, 4, 3)]
)
def test_equal_scores_need_no_backward_pass(num_unequal, beta, size, num_passes, tmp_path, monkeypatch):
    """The gradient and the metrics are those of grpo.py, also if no group differs. With a KL in the loss, every row has
    a gradient."""
    scores = torch.tensor([7.0] * 8 + [1, 2, 2, 1][:num_unequal] + [7.0] * (4 - num_unequal))
    plain, stats = test_grpo.an_update(scores, micro_batch_size=12, beta=beta)
    module = load_fork(tmp_path, "grpo", "Rows without a gradient")
    monkeypatch.setattr(test_grpo, "grpo", module)
    advantage = test_grpo.advantage

    def marked(rollout, scores, args):
        advantage(rollout, scores, args)
        rollout.has_gradient = (rollout.advantages[:, 0] != 0) | (beta > 0)

    monkeypatch.setattr(test_grpo, "advantage", marked)
    passes = []
    watch(monkeypatch, torch.Tensor, "backward", lambda *_, **__: passes.append(1))
    quick, quick_stats = test_grpo.an_update(scores, micro_batch_size=size, beta=beta)
    assert len(passes) == num_passes
    close(quick, plain, rtol=1e-3, atol=1e-6)
    assert stats == pytest.approx(quick_stats, rel=1e-4, abs=1e-6)
    assert (plain.norm() > 1e-3) == (beta > 0 or num_unequal > 0)


@pytest.mark.parametrize("variant", test_loss.VARIANTS)
def test_losses_of_pairs_against_trl07(variant, everything):
    test_loss.assert_trl07(variant, everything("dpo").dpo_loss)


def test_ipo_takes_means_over_tokens(everything):
    module = everything("dpo")
    model = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    pair = module.Pair(*map(np.array, ([5, 6], [7, 8, 9], [7])), 0.0)
    logps = {}
    for name in ("ipo", "sigmoid"):
        args = module.Args(loss_type=name, device="cpu")
        with torch.no_grad():
            logps[name] = torch.cat(module.completion_logps(model, [pair], tokenizer, args))
    close(logps["ipo"] * torch.tensor([3, 1]), logps["sigmoid"])


def test_a_reference_that_reads_before_gives_the_same_numbers(tmp_path, tiny):
    module = load_fork(tmp_path, "dpo", "Reference before training")
    settings = tiny["dpo"] | dict(lora_r=2, learning_rate=5e-2)
    lines, plain = run(module, tmp_path / "run", **settings), run("dpo", tmp_path / "plain", **settings)
    del lines[0]["rewards/accuracies"], plain[0]["rewards/accuracies"]  # of margins that are 0 but for rounding
    for ours, theirs in zip(untimed(lines), untimed(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


# --- Packing


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return load_fork(tmp_path_factory.mktemp("packed"), "sft", "Packing")


def as_text(ids):
    """All tokens have a label."""
    return np.array(ids), np.ones(len(ids), bool)


def test_packing_against_trl07(packed):
    """Blocks of constant length, of two passes joined, against TRL 0.7.11."""
    i, o = golden("trl0711_sft_packing")
    rows = [i["tokenized"][text].tolist() + [i["eos_id"]] for text in i["texts"] * 2]
    blocks = packed.pack([as_text(row) for row in rows], i["seq_length"])
    assert [ids.tolist() for ids, _ in blocks][:12] == o["packing"]["infinite"]["first_12"].tolist()


@pytest.mark.parametrize("num_tokens, blocks", [(7, 1), (8, 2), (9, 2), (11, 2), (12, 3)])
def test_the_last_block_is_kept_if_it_is_full(num_tokens, blocks, packed):
    ids = list(range(num_tokens))
    found = packed.pack([as_text(ids[:5]), as_text(ids[5:])], 4)
    assert [block.tolist() for block, _ in found] == [ids[i : i + 4] for i in range(0, 4 * blocks, 4)]


def test_blocks_keep_their_labels_and_need_one(packed):
    """Nothing predicts the first token of a block, so a label there does not count."""
    texts = [(np.arange(6), np.arange(6) >= 5), (np.arange(6, 12), np.arange(6) >= 2)]
    (block,) = packed.pack(texts, 5)
    assert block[0].tolist() == [5, 6, 7, 8, 9] and block[1].tolist() == [True, False, False, True, True]
    assert packed.pack([(np.arange(6), np.arange(6) == 3)], 3) == []


def test_what_is_packed_is_not_cut(tmp_path, tiny, packed, monkeypatch):
    sizes = []

    def note(_, texts, length):
        sizes.append((sum(len(ids) for ids, _ in texts), length))

    watch(monkeypatch, packed, "pack", note)
    run(packed, tmp_path / "run", **tiny["sft"], max_length=8)
    rows = [json.loads(line) for line in open(f"{tiny['sft']['dataset']}/train.jsonl")]
    texts = AutoTokenizer.from_pretrained(ROOT / "toy/sft")([row["prompt"] + row["completion"] for row in rows])
    assert sizes == [(sum(len(ids) + 1 for ids in texts["input_ids"]), 8)]


# --- The others


def test_entropy_has_the_gradient_of_autograd(everything):
    """Beside that of the log-probabilities."""
    logits, weights = torch.randn(2, 3, 5), torch.randn(2, 2, 3)
    tokens = torch.randint(5, (2, 3))
    ours, theirs = leaf(logits), leaf(logits)
    logprobs, entropy = everything("ppo").SlicedLogprobs.apply(ours * 1, tokens, 0.7, True)
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()
    log_softmax = (theirs / 0.7).log_softmax(-1)
    by_hand = log_softmax.gather(-1, tokens[..., None]).squeeze(-1), -(log_softmax.exp() * log_softmax).sum(-1)
    (by_hand[0] * weights[0] + by_hand[1] * weights[1]).sum().backward()
    close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_sampling_weights(everything):
    """With an old probability of three times, half, and as much as that of the sampler; padding has weight 1."""
    old = torch.tensor([[3.0, 0.5, 1.0, float("nan")]]).log()
    weight = everything("ppo").sampling_weight(old, torch.zeros(1, 4), torch.tensor([[1, 1, 1, 0]]).bool(), 2.0)
    close(weight, [[2.0, 0.5, 1.0, 1.0]])


# --- runs of one diff


def test_score_scaling(train):
    """The rewards are those of scaled scores, by all scores so far."""
    _, calls = train("Score scaling", "update", score_scaling="norm", score_clip=1.5, kl_coef=0.0)
    scores = torch.empty(0)
    for *_, rollout, _ in calls:
        scores = torch.cat([scores, rollout.scores])
        scaled = ((rollout.scores - scores.mean()) / scores.std()).clamp(-1.5, 1.5)
        assert torch.allclose(rollout.rewards.sum(1), scaled, atol=1e-5)


@of_three
def test_early_stop(name, train):
    """After one step the policy is too far for the second pass; a step with a large ratio does not end the update."""
    loss = "surrogate_loss" if name == "grpo" else "policy_loss"
    lines, calls = train("Early stop", loss, name, target_kl=1e-6, num_ppo_epochs=3)
    assert [line["val/skipped_steps"] for line in lines] == [1, 1] and len(calls) == 2 * 2
    lines, calls = train("Early stop", loss, name, ratio_threshold=1 + 1e-9, num_ppo_epochs=3)
    assert sum(line["val/skipped_steps"] for line in lines) > 0 and len(calls) == 2 * 3


@pytest.mark.parametrize("bf16", slow_but([False], [False, True]))
def test_shared_critic(bf16, train):
    """It reads the policy's states, adds only its head to the optimiser, and its loss moves the policy, too."""
    lines, calls = train("Shared critic", "update", vf_coef=10.0, bf16=bf16)
    _, policy, critic, optimizer, rollout, args = calls[-1]
    assert [p.numel() for p in optimizer.param_groups[1]["params"]] == [policy.config.hidden_size, 1]
    assert all(0 < line["loss/value_avg"] < 10 and line["val/grad_norm"] > 0 for line in lines)
    other, _ = train("Shared critic", "update", vf_coef=0.1, bf16=bf16)
    assert other[0]["policy/grad_norm"] != pytest.approx(lines[0]["policy/grad_norm"], rel=0.01)
    module = sys.modules["forked"]
    with torch.no_grad():
        values = rollout.in_micro_batches(lambda r: module.read_values(policy, critic, r, args), args)
        for ids, real, mask, row in zip(*rollout.joined(), rollout.mask, values):
            by_hand = critic(policy.base_model(ids[None, real > 0]).last_hidden_state[0, -mask.sum() - 1 : -1])
            assert torch.allclose(row[mask], by_hand.squeeze(1), atol=0.05 if bf16 else 1e-4)


def test_exact_kl(train):
    """A sum over the vocabulary at each token, of models of which one has moved."""
    lines, calls = train("KL estimators", "response_logits", kl_estimator="full")
    _, models, r, args = calls[-1]
    with torch.no_grad():
        kl = sys.modules["forked"].exact_kl(*sys.modules["forked"].response_logits(models, r, args))
        for ids, real, mask, row in zip(*r.joined(), r.mask, kl):
            p, q = (model(ids[None, real > 0]).logits[0, -mask.sum() - 1 : -1] for model in models)
            by_hand = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
            assert torch.allclose(row[mask], by_hand, atol=1e-4) and by_hand.max() > 1e-3
    assert lines[0]["objective/kl"] == pytest.approx(0, abs=1e-5) and lines[1]["objective/kl"] > 1e-3


@of_three
def test_pretraining_texts(name, train, tmp_path):
    """With one text, the loss is -log pi of its tokens; its gradient has the weight ptx_coef."""
    text = "The film is a love story of two people who never meet."
    texts = dict(pretrain_data=write_rows(tmp_path / "texts.jsonl", [{"text": text}]), num_ppo_epochs=1)
    lines, _ = train("Pretraining texts", "update", name, **texts, ptx_coef=1e4, max_grad_norm=1e9)
    model, tokenizer = (kind.from_pretrained(ROOT / "toy/sft") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert lines[0]["loss/ptx"] == pytest.approx(loss.item(), rel=1e-4) and lines[1]["loss/ptx"] < loss
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert lines[0][NORM[name]] == pytest.approx(1e4 * norm, rel=1e-2)


@pytest.mark.parametrize("name", slow_but(["grpo"], ["ppo", "rloo", "grpo"]))
def test_balanced_experts(name, train, experts):
    """The gradient is aux_loss_coef times that of transformers' loss of the texts."""
    settings = dict(model=experts, micro_batch_size=8, aux_loss_coef=1e4, max_grad_norm=1e9, num_ppo_epochs=1)
    settings |= dict(learning_rate=1e-12, reward_weights=(0.0,))
    if name == "grpo":  # no row has another gradient
        settings["beta"] = 0.0
    lines, calls = train("Balanced experts", "update", name, **settings)
    _, policy, *_, rollout, _ = calls[-1]
    ids, mask = rollout.joined()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    policy(input_ids=ids, attention_mask=mask, position_ids=positions, output_router_logits=True).aux_loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters() if p.grad is not None]).item()
    assert lines[1][NORM[name]] == pytest.approx(1e4 * norm, rel=1e-2)


@of_three
def test_shared_layers(name, train, tmp_path):
    """Policy and reference have one tensor for each of the first weights, which stay; the others are trained."""
    _, calls = train("Shared layers", "load_models", name, num_shared_layers=1)
    before = load_file(f"{OTHER_SETTINGS[name]['model']}/model.safetensors")
    policy, reference = calls[0][0]
    of_reference = dict(reference.named_parameters())
    for key, p in policy.named_parameters():
        is_first = ".h.1." not in key and "ln_f" not in key
        assert (p is of_reference[key]) == is_first == (not p.requires_grad)
        same = torch.equal(p, before.get(key.removeprefix("transformer."), before.get(key)))
        assert same == is_first and not of_reference[key].requires_grad


def test_random_length(train):
    """Each batch has its own, from the smallest to the largest."""
    _, calls = train("Random length", "sample", min_response_length=3, total_episodes=160, num_ppo_epochs=1)
    lengths = {uniforms.shape[1] for _, _, _, _, uniforms, _ in calls}
    assert min(lengths) >= 3 and max(lengths) <= 8 and len(lengths) > 3


def test_stop_tokens(train):
    """At the full stop, and where the model ends a text; one token for each."""
    _, calls = train("Stop tokens of one's own", "sample_batch", stop_token=("eos", "."))
    rollout, policy, *_ = calls[0]
    assert policy.tokenizer.convert_ids_to_tokens(policy.stop_token_ids) == ["<|end|>", "."] and rollout.ended.any()
    with pytest.raises(SystemExit, match="the end of it all"):
        train("Stop tokens of one's own", "sample_batch", stop_token=("the end of it all",))


def test_the_loss_is_a_mean_over_actions(train):
    """Without KL, tokens and responses have one gradient but for what its sum is divided by: their numbers."""
    once = dict(num_ppo_epochs=1, kl_coef=0.0, total_episodes=8, micro_batch_size=3)
    (of_tokens,), _ = train("Token-level KL", "update", "rloo", **once, token_level_kl=True)
    (of_rows,), _ = train("Token-level KL", "update", "rloo", **once)
    mean = of_tokens["policy/grad_norm"] * of_tokens["val/response_length"]
    assert mean == pytest.approx(of_rows["policy/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("kind", slow_but(["gpt2"], ["gpt2", "llama", "lfm2"]))
def test_shared_prompts(kind, tmp_path, monkeypatch):
    """As those of grpo.py: log-probabilities and their gradient."""
    monkeypatch.setattr(test_prompts, "grpo", load_fork(tmp_path, "rloo", "Shared prompts"))
    test_prompts.test_shared_prompts_change_nothing(kind, bf16=False)


def test_shared_prompts_train(train, tmp_path, tiny):
    """The numbers of the script, but for rounding; also with adapters."""
    settings = dict(rloo_k=4, lora_r=2, learning_rate=1e-5)
    lines, _ = train("Shared prompts", "update", "rloo", **settings)
    settings |= tiny["rloo"] | OTHER_SETTINGS["rloo"] | SHORT | dict(dataset=tiny["ppo"]["dataset"]) | settings
    plain = run("rloo", tmp_path / "plain", **settings)
    for line, other in zip(lines, plain, strict=True):
        assert line["objective/scores"] == other["objective/scores"]
        assert line["policy/grad_norm"] == pytest.approx(other["policy/grad_norm"], rel=1e-3)


def test_token_level_advantages(train):
    """The KL of a token and of those after it is subtracted from the advantage of the score."""
    _, calls = train("Token-level KL", "update", "rloo", kl_coef=0.3, token_level_kl=True, num_ppo_epochs=1)
    for _, _, _, r, args in calls:
        others = r.scores.view(-1, args.rloo_k).sum(1).repeat_interleave(args.rloo_k) - r.scores
        for advantages, kl, score, baseline in zip(r.advantages, r.kl * r.mask, r.scores, others / (args.rloo_k - 1)):
            close(advantages, [score - baseline - 0.3 * kl[t:].sum() for t in range(len(kl))], rtol=1e-4, atol=1e-5)


@pytest.fixture
def draws(tmp_path, monkeypatch):
    """draws(answers, **settings) -> the rollout of sample_groups. Prompts are numbers; a draw has four groups of two.
    Of the answers "0012" those of the third group differ, of the fourth the scores differ, but none ends."""
    grpo = load_fork(tmp_path, "grpo", "Dynamic sampling")

    def sample_batch(policy, examples, args):
        examples = [example for example in examples for _ in range(2)]
        ids = torch.tensor([example["n"] for example in examples])[:, None]
        prompts = torch.nn.functional.pad(ids, (1, 0), value=-1)
        responses = ids.expand(-1, 3)
        real = torch.arange(3).expand(len(ids), -1) <= int(ids[0]) % 3  # each draw has other lengths
        return grpo.Rollout(prompts, prompts > -1, responses, real, real[:, 0], responses / 8, examples, 2)

    def draw(answers, first_draw=0, **settings):
        coming = iter(answers)

        def score_batch(rollout, *_):
            kinds = torch.tensor([int(digit) for digit in next(coming)]).repeat_interleave(2)
            rollout.scores = (kinds > 0) * torch.tensor([0.0, 1.0] * 4)
            rollout.ended = kinds < 2
            rollout.reward_table = rollout.scores[:, None]

        monkeypatch.setattr(grpo, "sample_batch", sample_batch)
        monkeypatch.setattr(grpo, "score_batch", score_batch)
        state = {"num_draws": first_draw}
        args = grpo.Args(batch_size=8, num_generations=2, **settings)
        prompts = [{"n": n} for n in range(64)]
        rollout = grpo.sample_groups(mock.Mock(), {"f": None}, prompts, range(64), state, args)
        assert state["num_draws"] - first_draw == len(answers) and not list(coming)
        return rollout

    return draw


@pytest.mark.parametrize(
    "answers, most, first_draw, kept",
    [
        (["0001", "0000", "1100", "1111"], 3, 0, [3, 8, 9, 12]),
        (["1000", "0010"], 1, 5, [20, 21, 22, 26]),  # filled up with what differs not
        (["0010"], 0, 0, [0, 1, 2, 3]),  # in the order of sampling
        (["2211", "0110"], 1, 0, [2, 3, 5, 6]),  # of the first two groups no response is in the loss
    ],
)
def test_dynamic_sampling(draws, answers, most, first_draw, kept):
    """Groups whose scores differ are kept, in whole; equal ones fill up; draws are counted; prompts
    end, and responses begin, at one border."""
    rollout = draws(answers, first_draw, dynamic_sampling=most, mask_truncated_completions=True)
    assert rollout.scores.tolist() == rollout.reward_table[:, 0].tolist()
    prompts = rollout.prompts[rollout.prompt_mask].tolist()
    assert [example["n"] for example in rollout.examples] == prompts == [n for n in kept for _ in range(2)]
    assert rollout.prompt_mask[:, -1].all() and rollout.mask[:, 0].all()
    for x, scale in ((rollout.responses, 1), (rollout.old_logprobs, 8)):
        rows = [(scale * row[real]).tolist() for row, real in zip(x, rollout.mask)]
        assert rows == [[n] * (1 + n // 4 * 4 % 3) for n in prompts]


def test_draws_are_counted(tmp_path, tiny, uneven, monkeypatch):
    """No prompts are drawn twice in a pass, whether their answers were kept or not, also after the run was
    interrupted."""
    module = load_fork(tmp_path, "grpo", "Dynamic sampling")
    (tmp_path / "r.py").write_text("def same(prompts, **_):\n    return [1.0] * len(prompts)\n")
    settings = tiny["grpo"] | dict(dynamic_sampling=2, reward_fn=(f"{tmp_path}/r.py:same",))
    settings["dataset"] = uneven("prompts", 12)  # for two passes
    drawn, read = [], []
    watch(monkeypatch, module, "sample_batch", lambda r, *_: drawn.append([row["prompt"] for row in r.examples[::4]]))
    watch(monkeypatch, module, "update", lambda _, policy, optimizer, r, args: read.append(r.joined()[1].sum()))
    *_, last = run(module, tmp_path / "out", **settings, save_steps=3, save_total_limit=1)
    assert len(drawn) == 9 and last["sampled_batches"] == 3
    assert last["num_tokens"] == sum(read)  # TRL: prompts included
    run_main(module, "--resume", tmp_path / "out", "--total-episodes", 32, "--reward-fn", *settings["reward_fn"])
    prompts = sum(drawn, [])
    assert [len(set(prompts[:12])), len(set(prompts[12:]))] == [12, 12] and len(prompts) == 24


def test_weights_of_tokens(tmp_path, tiny):
    """They are those of grpo.py; dapo is the script."""
    module = load_fork(tmp_path, "agent", "Weights of tokens")
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]]).bool()
    for kind in ("dapo", "grpo", "dr_grpo"):
        close(module.token_weights(mask, 2, 5.0, kind, 7), test_grpo.grpo.token_weights(mask, 2, 5.0, kind, 7))
    lines = run(module, tmp_path / "run", **tiny["agent"], loss_type="dapo")
    assert untimed(lines) == untimed(run("agent", tmp_path / "plain", **tiny["agent"]))


def test_scores_as_advantages(train):
    _, calls = train("Scores as advantages", "update", "grpo")
    for _, _, _, rollout, _ in calls:
        assert torch.equal(rollout.advantages[:, 0], rollout.scores) and rollout.scores.abs().max() > 0


@of_three
def test_truncated_importance_weights(name, train):
    """Where the sampler says that its tokens were likelier, by a factor of e^.05, the weights of actions are smaller by
    it."""
    _, plain = train("Truncated importance weights", "update", name)
    module = sys.modules["forked"]
    sample = module.sample

    def likelier(*given):
        *drawn, logprobs = sample(*given)
        return *drawn, logprobs + 0.05

    with mock.patch.object(module, "sample", likelier):
        _, other = train("Truncated importance weights", "update", name)
    first, second = ([x for x in call if isinstance(x, module.Rollout)][0] for call in (plain[0], other[0]))
    lengths = first.mask.sum(1, keepdim=True) if name == "rloo" else torch.ones_like(first.mask)
    real = (first.advantages != 0) & first.mask[:, : first.advantages.shape[1]]
    expected = (-0.05 * lengths).exp().expand_as(first.advantages)
    close((second.advantages / first.advantages)[real], expected[real], rtol=1e-3)
    assert real.any()


@of_three
def test_entropy_bonus(name, train):
    """With a large weight the entropy is higher in later passes over the first batch."""
    key = "entropy" if name == "grpo" else "policy/entropy_avg"
    entropies = []
    for weight in (0.0, 10.0):
        settings = dict(entropy_coef=weight, reward_weights=(0.0,), num_ppo_epochs=4)
        lines, _ = train("Entropy bonus", "update", name, **settings)
        entropies.append(lines[0][key])
    assert entropies[1] > entropies[0] + 0.01


def test_critic_warm_up(train, tmp_path):
    """The policy stays as it was for one update, but not for two; the critic learns from the first."""
    policy, reward = (load_file(ROOT / f"toy/{name}/model.safetensors") for name in ("sft", "reward_model"))
    for num_updates in (1, 2):
        _, calls = train("Critic warm-up", "update", total_episodes=8 * num_updates, critic_warmup_updates=1)
        after = load_file(sorted(tmp_path.glob("run*"))[-1] / "model.safetensors")
        assert all(torch.equal(x, policy[name]) for name, x in after.items()) == (num_updates == 1)
        critic = calls[0][2]
        assert not torch.equal(critic["score"].weight, reward["score.weight"])


@of_three
def test_moving_average(name, train, tmp_path):
    """After one step: 0.9 of the weights before and 0.1 of those after it."""
    train("Moving average", "update", name, total_episodes=8, num_ppo_epochs=1, ema_decay=0.9)
    (folder,) = tmp_path.glob("run*")
    before, after = load_file(ROOT / "toy/sft/model.safetensors"), load_file(folder / "model.safetensors")
    for key, x in load_file(folder / "ema/model.safetensors").items():
        assert torch.allclose(x, 0.9 * before[key] + 0.1 * after[key], atol=1e-7)
        assert not torch.equal(before[key], after[key])


# --- docs/options.md

ROWS = [row.split(" | ") for row in text_of("docs/options.md").splitlines() if row.startswith("| `")]
ROWS = [row for row in ROWS if len(row) == 3]
ANSWERS = {name: kind for names, kind, _ in ROWS for name in re.findall("`(.+?)`", names)}


@pytest.mark.parametrize("signature", json.loads(text_of("tests/golden/options.json")))
def test_the_page_has_an_answer_for_every_setting(signature):
    names = json.loads(text_of("tests/golden/options.json"))[signature]
    assert {name: ANSWERS.get(name) for name in names if ANSWERS.get(name) not in ("flag", "diff", "no")} == {}


def test_settings_of_the_same_name_exist():
    ours = {field.name for name in NAMES if name != "ddpo" for field in fields(script(name).Args)}
    same = [names for names, _, answer in ROWS if "same name" in answer]
    assert set(re.findall("`(.+?)`", " ".join(same))) <= ours
