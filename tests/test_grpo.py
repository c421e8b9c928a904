"""grpo.py: whole updates against TRL 1.16's, what changes nothing, groups, evaluation, and the shell game."""

import json
import math
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from runs import main, run, watch
from safetensors.torch import load_file
from sources import ROOT
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import grpo

GOLDEN = ROOT / "tests/golden"
TRL = json.loads((GOLDEN / "trl116_grpo.json").read_text())
ARRAYS = load_file(GOLDEN / "trl116_grpo.safetensors")
TOKENIZER = AutoTokenizer.from_pretrained(GOLDEN / "digits")
LOSSES = ["dapo", "grpo", "dr_grpo", "bnpo", "cispo"]


@pytest.fixture(scope="module")
def tiny(tiny):
    return tiny["grpo"]


# --- two steps, as TRL makes them


def close(a, b, tolerance=1e-4):
    a = torch.as_tensor(a, dtype=torch.float64)
    b = torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape
    assert (a - b).norm() <= tolerance * b.norm() + 1e-7


def golden_model(name):
    model = LlamaForCausalLM(LlamaConfig(**TRL["config"])).eval()
    weights = {key.partition("/")[2]: x for key, x in ARRAYS.items() if key.startswith(name + "/")}
    model.load_state_dict(weights)
    model.tokenizer = TOKENIZER
    return model


def golden_args(settings, **more):
    names = {field.name for field in fields(grpo.Args)}
    given = {name: x for name, x in settings.items() if name in names}
    parts = settings.get("steps_per_generation", 1) // settings["gradient_accumulation_steps"] or 1
    given |= dict(
        micro_batch_size=settings["per_device_train_batch_size"],
        per_device_train_batch_size=None,
        gradient_accumulation_steps=1,
        num_mini_batches=parts,
        num_ppo_epochs=2 // parts,
        max_grad_norm=1e9,
        response_length=settings["max_completion_length"],
        reward_weights=tuple(settings.get("reward_weights", ())),
        device="cpu",
    )
    return grpo.Args(**given | more)


def golden_rollout(args, policy):
    """The episodes, with the rewards that two functions give them, and their scores."""
    prompts = [TOKENIZER(text)["input_ids"] for text in TRL["prompts"] for _ in range(args.num_generations)]
    prompts, prompt_mask = grpo.pad(prompts, TOKENIZER, args, "left")
    responses, mask = grpo.pad(TRL["completions"], TOKENIZER, args)
    ended = torch.tensor([row[-1] == 0 for row in TRL["completions"]])
    examples = [{"prompt": ""}] * len(responses)
    rollout = grpo.Rollout(prompts, prompt_mask, responses, mask, ended, ARRAYS["old_logprobs"], examples)
    first, second = (torch.tensor([math.nan if x is None else x for x in row]) for row in TRL["rewards"])
    rollout.rewards_by_name = {"first": first}
    if args.reward_weights:
        rollout.rewards_by_name["second"] = second
    rollout.scores = grpo.weighted_sum(rollout.rewards_by_name, args.reward_weights)
    return rollout


def gradient_of(policy):
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def test_distances_from_the_old_policy():
    """Of log-probabilities that all differ by 0.1."""
    args = golden_args(next(iter(TRL["cases"].values()))["settings"], beta=0.0)
    policy = golden_model("policy")
    rollout = golden_rollout(args, policy)
    rollout.old_logprobs = rollout.in_micro_batches(lambda r: grpo.logprobs_under(policy, r, args), args) - 0.1
    rollout.advantages, rollout.loss_mask = rollout.scores[:, None], rollout.mask
    stats = grpo.update(policy, torch.optim.AdamW(policy.parameters(), lr=0.0), rollout, args)
    assert stats["policy/approxkl_avg"] == pytest.approx(0.005, rel=1e-3)
    assert stats["val/ratio"] == pytest.approx(math.exp(0.1), rel=1e-4)


@pytest.mark.parametrize("case", TRL["cases"])
def test_a_whole_update_is_trls(case, monkeypatch):
    """Advantages, and the loss, gradient, metrics and weights of two steps: on one batch, or on its halves."""
    theirs = TRL["cases"][case]
    policy = golden_model("policy")
    args = golden_args(theirs["settings"])
    rollout = golden_rollout(args, policy)
    logprobs = lambda model: rollout.in_micro_batches(lambda r: grpo.logprobs_under(model, r, args), args)  # noqa: E731
    old = logprobs(policy)
    torch.testing.assert_close(old.masked_fill(~rollout.mask, 0.0), ARRAYS["old_logprobs"] * rollout.mask)
    rollout.advantages = grpo.group_advantages(rollout.scores, args.num_generations, args.scale_rewards)[:, None]
    close(rollout.advantages.squeeze(1), ARRAYS[f"{case}/advantages"])
    rollout.loss_mask = rollout.mask
    if args.mask_truncated_completions:
        rollout.loss_mask = rollout.mask & rollout.ended[:, None]
    if args.beta:
        rollout.ref_logprobs = logprobs(golden_model("reference"))

    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0)
    gradients = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(gradient_of(policy)))
    monkeypatch.setattr(torch, "randperm", torch.arange)
    stats = grpo.update(policy, optimizer, rollout, args)

    for number, gradient in enumerate(gradients):
        close(gradient, ARRAYS[f"{case}/gradient_{number}"])
    num_steps = len(theirs["metrics"])
    assert len(gradients) == num_steps
    assert stats["loss"] == pytest.approx(sum(theirs["losses"]) / num_steps, rel=1e-5, abs=2e-6)
    if len(theirs["losses"]) == num_steps:  # else theirs are means over micro-batches of means
        ours = stats | {"cispo_clip_ratio": stats["clip_ratio/high_mean"]}
        for name in ours.keys() & theirs["metrics"][0].keys() - {"loss"}:
            mean = sum(metrics[name] for metrics in theirs["metrics"]) / num_steps
            assert ours[name] == pytest.approx(mean, rel=1e-5, abs=1e-5), name
    close(torch.cat([p.detach().flatten() for p in policy.parameters()]), ARRAYS[f"{case}/weights"])
    ours = grpo.rollout_stats(rollout, args)
    shared = ours.keys() & theirs["metrics"][0].keys()
    assert len(shared) >= 12
    for name in shared:
        assert ours[name] == pytest.approx(theirs["metrics"][0][name], abs=1e-5), name
    assert stats["val/skipped_steps"] == 0


# --- what changes nothing

SCORES = torch.tensor([1.0, 0, 0, 2, 0, 0, 0, 1, 3, 1, 1, 0])


def an_update(scores, rows=None, in_loss=True, ref_padding=0.0, **settings):
    """The gradient of one mini-batch of the golden episodes with other scores, and what is logged of it."""
    policy = golden_model("policy")
    given = dict(num_ppo_epochs=1, num_mini_batches=1, epsilon=0.05, epsilon_high=0.1) | settings
    args = golden_args(TRL["cases"]["dapo"]["settings"], **given)
    rollout = golden_rollout(args, policy)
    rollout.old_logprobs = rollout.old_logprobs + torch.linspace(-0.2, 0.2, 72).view(12, 6).sin()
    rollout.advantages = grpo.group_advantages(scores, args.num_generations, args.scale_rewards)[:, None]
    rollout.loss_mask = rollout.mask & in_loss
    rollout.ref_logprobs = (rollout.old_logprobs - 0.3).masked_fill(~rollout.mask, ref_padding)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    gradients = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(gradient_of(policy)))
    with mock.patch("torch.randperm", lambda n: torch.arange(n) if rows is None else rows):
        stats = grpo.update(policy, optimizer, rollout, args)
    return *gradients, stats


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_changes_nothing(loss_type, level):
    """A constant added to the scores of a group; another order of rows; what the reference says of padding; and, but for
    bnpo, how the batch is cut."""
    settings = dict(loss_type=loss_type, importance_sampling_level=level, beta=0.1)
    plain, stats = an_update(SCORES, **settings)
    assert plain.norm() > 1e-3
    shift = torch.tensor([5.0, -3, 7]).repeat_interleave(4)
    close(an_update(SCORES + shift, **settings)[0], plain)
    close(an_update(SCORES, torch.randperm(12), **settings)[0], plain)
    close(an_update(SCORES, ref_padding=1e3, **settings)[0], plain)
    cut, cut_stats = an_update(SCORES, micro_batch_size=5, **settings)
    if loss_type == "bnpo":
        assert (cut - plain).norm() > 1e-3 * plain.norm()
    else:
        close(cut, plain)
        assert stats == pytest.approx(cut_stats, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_micro_batch_of_which_nothing_is_in_the_loss(loss_type, level):
    """It adds nothing: the gradient is a number, and (but for bnpo, which counts it) that of the other rows alone."""
    in_loss = torch.arange(12)[:, None] >= 4
    settings = dict(in_loss=in_loss, loss_type=loss_type, importance_sampling_level=level, beta=0.1)
    cut, stats = an_update(SCORES, micro_batch_size=4, **settings)
    assert cut.isfinite().all() and cut.norm() > 1e-3 and all(map(math.isfinite, stats.values()))
    if loss_type != "bnpo":
        close(an_update(SCORES, micro_batch_size=12, **settings)[0], cut)


@pytest.mark.parametrize("loss_type", [x for x in LOSSES if x != "bnpo"])
@pytest.mark.parametrize("heard", [0, 4])
def test_equal_scores_need_no_backward_pass(loss_type, heard, monkeypatch):
    """The gradient and the metrics are those of a pass over all rows, also if no group differs."""
    scores = torch.tensor([7.0] * 8 + [1, 2, 2, 1][:heard] + [7.0] * (4 - heard))
    settings = dict(loss_type=loss_type, micro_batch_size=4)
    micro_batches = grpo.with_gradient_first
    parts = []
    monkeypatch.setattr(grpo, "with_gradient_first", lambda *args: parts.extend(micro_batches(*args)) or parts)
    quick, quick_stats = an_update(scores, **settings)
    assert [needs_backward for _, needs_backward in parts] == [True, False, False]
    monkeypatch.setattr(grpo, "with_gradient_first", lambda *args: [(index, True) for index, _ in micro_batches(*args)])
    plain, stats = an_update(scores, **settings)
    close(quick, plain)
    assert stats == pytest.approx(quick_stats, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_shares_are_of_rows_in_the_loss(level, monkeypatch):
    """Every ratio is too low, and every advantage below 0 but that of a row that is masked."""
    ratio = grpo.importance_ratio
    monkeypatch.setattr(grpo, "importance_ratio", lambda *a: ratio(*a) / 2)
    scores = torch.tensor([0.0, 9, 0, 0] * 3)
    in_loss = torch.tensor([True, False, True, True] * 3)[:, None]
    _, stats = an_update(scores, in_loss=in_loss, importance_sampling_level=level, loss_type="grpo")
    assert stats["clip_ratio/low_min"] == stats["clip_ratio/low_mean"] == 1
    assert stats["clip_ratio/high_max"] == 0


# --- sample_groups, join


def test_dynamic_sampling(monkeypatch):
    """Groups whose scores differ are kept, in whole; equal ones fill up; draws are counted; and in rollouts of whichever
    widths prompts end, and responses begin, at one border."""
    args = grpo.Args(batch_size=8, num_generations=2)
    prompts = [{"n": n} for n in range(64)]
    monkeypatch.setattr(grpo, "shuffled", lambda n, *_: list(range(n)))

    def answer(policy, examples, _):
        ids = torch.tensor([example["n"] for example in examples])[:, None]
        prompts = F.pad(ids, (int(ids[0]) // 4 % 2, 0), value=-1)  # each draw has other widths
        responses = ids.expand(-1, 1 + int(ids[0]) % 3)
        real = torch.ones_like(responses, dtype=torch.bool)
        return grpo.Rollout(prompts, prompts > -1, responses, real, real[:, 0], responses / 8, examples)

    monkeypatch.setattr(grpo, "sample_batch", answer)

    def sample_groups(most, draws, first_draw=0):
        """Of draws of four groups each, "0010" being one in which the third group's scores differ: the prompts."""
        coming = iter(draws)

        def score(rollout, *_):
            differ = torch.tensor([int(digit) for digit in next(coming)]).repeat_interleave(2)
            scores = differ * torch.tensor([0.0, 1.0] * 4)
            return {"f": scores}, scores

        monkeypatch.setattr(grpo, "score_responses", score)
        settings = replace(args, dynamic_sampling=most)
        rollout, count = grpo.sample_groups(None, prompts, None, first_draw, settings)
        assert count == len(draws) and not list(coming)
        assert rollout.scores.tolist() == rollout.rewards_by_name["f"].tolist()
        kept = rollout.prompts[rollout.prompt_mask].tolist()
        assert [example["n"] for example in rollout.examples] == kept
        assert rollout.prompt_mask[:, -1].all() and rollout.mask[:, 0].all()
        for x, scale in ((rollout.responses, 1), (rollout.old_logprobs, 8)):
            rows = [(scale * row[real]).tolist() for row, real in zip(x, rollout.mask)]
            assert rows == [[n] * (1 + n // 4 * 4 % 3) for n in kept]
        assert kept[::2] == kept[1::2]
        return kept[::2]

    assert sample_groups(3, ["0001", "0000", "1100", "1111"]) == [3, 8, 9, 12]
    assert sample_groups(1, ["1000", "0010"], first_draw=5) == [20, 26, 21, 22]  # filled up with what differs not
    assert sample_groups(0, ["0010"]) == [0, 1, 2, 3]  # in the order of sampling


@pytest.mark.parametrize("masks, useless", [(False, [False, False, True]), (True, [True, False, True])])
def test_groups_without_a_gradient(masks, useless):
    """Also those of which no response is in the loss, since all are cut off."""
    scores = torch.tensor([1.0, 0, 1, 0, 1, 1])
    ended = torch.tensor([False, False, True, False, True, True])
    args = grpo.Args(num_generations=2, mask_truncated_completions=masks)
    assert grpo.useless_groups(SimpleNamespace(scores=scores, ended=ended), args).tolist() == useless


# --- evaluate


@pytest.mark.parametrize("processes", [1, 3])
def test_evaluation(monkeypatch, processes):
    """Four prompts: low temperature is right on 0 and 1; of two answers each, of 0 and 1 both, of 2 one is, and the
    other has no reward; nothing is said of 3."""
    args = grpo.Args(num_generations=2)

    def answer(policy, examples, answers):
        k = 1 if answers.temperature < 0.1 else 2
        ids = torch.tensor([example["n"] for example in examples])[:, None]
        assert len(ids) == k * (6 if processes == 3 else 4)
        right = ids < 2
        if k == 2:
            is_first = (torch.arange(len(ids)) % 2 == 0)[:, None]
            right = (ids < 2) | (ids == 2) & is_first
        return grpo.Rollout(ids, ids > -1, ids, ids > -1, right[:, 0], right.float(), examples)

    monkeypatch.setattr(grpo, "WORLD_SIZE", processes)
    monkeypatch.setattr(grpo, "sample_batch", answer)

    def said(r):
        is_open = r.prompts[:, 0] == 3
        if len(is_open) > 6:  # two answers each
            is_open |= (r.prompts[:, 0] == 2) & (r.old_logprobs[:, 0] == 0)
        return r.old_logprobs[:, 0].masked_fill(is_open, math.nan)

    rewards = {"right": said, "other": lambda r: r.prompts[:, 0].float()}
    prompts = [{"prompt": "", "n": n} for n in range(4)]
    stats = grpo.evaluate(None, rewards, prompts, args)
    expected = {"eval/accuracy": 2 / 3, "eval/scores": 0.5 + 1.5, "eval/pass@1": 1.0, "eval/pass@2": 1.0}
    expected |= {"eval/rewards/right/mean": 2 / 3, "eval/rewards/other/mean": 1.5}
    assert stats == pytest.approx(expected)


# --- the loop


def test_tokens_and_draws_are_counted(tmp_path, tiny, monkeypatch):
    """num_tokens are those that were read, prompts included (TRL). No prompts are drawn twice in a pass, whether their
    answers were kept or not, also after the run was interrupted."""
    (tmp_path / "r.py").write_text("def same(prompts, **_):\n    return [1.0] * len(prompts)\n")
    settings = tiny | dict(dynamic_sampling=2, reward_fn=(f"{tmp_path}/r.py:same",))
    drawn, read = [], []
    watch(monkeypatch, grpo, "batch", lambda _, rows, number, *__: drawn.append(number))
    watch(monkeypatch, grpo, "update", lambda _, policy, optimizer, r, args: read.append(r.inputs()["attention_mask"]))
    *_, last = run(grpo, tmp_path / "out", **settings | dict(dataset_test_split="none", num_eval_prompts=256))
    assert drawn == list(range(9)) and last["sampled_batches"] == 3
    assert last["num_tokens"] == sum(mask.sum() for mask in read)
    drawn.clear()
    main(grpo, "--resume", tmp_path / "out", "--total-episodes", 32)
    assert drawn == [9, 10, 11]


def test_without_beta_there_is_no_reference(tmp_path, tiny, monkeypatch):
    """And a batch may be one group."""
    monkeypatch.setattr(grpo, "make_reference", lambda *_: 1 / 0)
    settings = tiny | dict(batch_size=4, total_episodes=12, num_generations=4)
    assert "objective/kl" not in run(grpo, tmp_path, **settings)[0]


def test_the_kl_in_the_loss_of_an_adapter(tmp_path, tiny):
    """It is to the policy without it, not to that of the rollout: it grows."""
    settings = tiny | dict(beta=0.1, num_ppo_epochs=4, lora_r=4, learning_rate=5e-2)
    first, *_, last = run(grpo, tmp_path, **settings)
    assert first["objective/kl"] == pytest.approx(0, abs=1e-3)
    assert abs(last["objective/kl"]) > 1e-2
    assert last["kl"] > 0


def test_what_is_not_finished_is_left_out(tmp_path, tiny):
    """With every response cut off there is no gradient."""
    code = "def letters(completions, **_):\n    return [sum(map(ord, x)) for x in completions]\n"
    (tmp_path / "r.py").write_text(code)
    cut = dict(stop_token=("<|pad|>",), mask_truncated_completions=True)  # which is never drawn
    for line in run(grpo, tmp_path / "out", **tiny | cut | dict(reward_fn=(f"{tmp_path}/r.py:letters",))):
        assert line["grad_norm"] == line["loss"] == 0 < line["reward_std"]
        assert line["completions/clipped_ratio"] == 1


# --- learning


KINDS = [
    dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-3),
    dict(loss_type="dr_grpo", scale_rewards="none"),
    dict(loss_type="cispo"),
    dict(beta=0.01, dynamic_sampling=2),
]


SLOW = [(2, {}), (3, {}), *((1, kind) for kind in KINDS)]


@pytest.mark.parametrize("seed, settings", [(1, {}), *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)])
def test_grpo_learns(tmp_path, seed, settings):
    """The share of right answers in the last 6 of 40 updates; in the first it is 0.4.

    Over three seeds and all kinds it was 0.87 to 0.96; with the advantages' sign turned, 0.25 to 0.28.
    """
    lines = run(grpo, tmp_path, seed=seed, total_episodes=40 * 64, dataset_test_split="none", **settings)
    assert sum(line["reward"] for line in lines[-6:]) / 6 > 0.7
