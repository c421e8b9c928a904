"""GRPO: held to TRL 1.16's numbers, to the mathematics of its losses, and to the shell game."""

import json
import math
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from test_train import ROOT, run, untimed
from transformers import LlamaConfig, LlamaForCausalLM

import grpo

GOLDEN = ROOT / "tests/golden"
TRL = json.loads((GOLDEN / "trl116_grpo.json").read_text())
ARRAYS = load_file(GOLDEN / "trl116_grpo.safetensors")
LOSSES = ["dapo", "grpo", "dr_grpo", "bnpo", "cispo"]


@pytest.fixture(scope="module")
def tiny(tiny):
    """Settings of a run of three updates."""
    return tiny["grpo"]


@cache
def golden_tokenizer():
    """That of the golden numbers."""
    return grpo.AutoTokenizer.from_pretrained(GOLDEN / "digits")


def close(a, b, tolerance=1e-4):
    """Relative error of the whole."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape and (a - b).norm() <= tolerance * b.norm() + 1e-7, ((a - b).norm(), b.norm())


def golden_model(name):
    """The policy or the reference of the golden numbers."""
    model = LlamaForCausalLM(LlamaConfig(**TRL["config"])).eval()
    state = {key.partition("/")[2]: x for key, x in ARRAYS.items() if key.startswith(name + "/")}
    model.load_state_dict(state)
    model.tokenizer = golden_tokenizer()
    return model


def golden_args(settings):
    """TRL's settings under our names."""
    given = {name: x for name, x in settings.items() if name in {f.name for f in grpo.fields(grpo.Args)}}
    rows = settings["per_device_train_batch_size"]
    given |= dict(per_device_train_batch_size=None, gradient_accumulation_steps=1, micro_batch_size=rows)
    parts = settings.get("steps_per_generation", 1) // settings["gradient_accumulation_steps"] or 1
    given |= dict(num_mini_batches=parts, num_ppo_epochs=2 // parts, max_grad_norm=1e9)
    given |= dict(response_length=settings["max_completion_length"])
    args = grpo.Args(**given | {"reward_weights": tuple(settings.get("reward_weights", ()))})
    grpo.check_args(args)
    return args


def golden_rollout(args, policy):
    """The episodes, with the rewards that two functions give them, and their scores."""
    prompts = [policy.tokenizer(text)["input_ids"] for text in TRL["prompts"] for _ in range(args.num_generations)]
    prompts, prompt_mask = grpo.pad(prompts, 1, args, left=True)
    responses, mask = grpo.pad(TRL["completions"], 1, args)
    ended = torch.tensor([row[-1] == 0 for row in TRL["completions"]])
    examples = [{"prompt": ""}] * len(responses)
    rollout = grpo.Rollout(prompts, prompt_mask, responses, mask, ended, ARRAYS["old_logprobs"], examples)
    first, second = (torch.tensor([math.nan if x is None else x for x in row]) for row in TRL["rewards"])
    rollout.rewards_by_name = {"first": first} | ({"second": second} if args.reward_weights else {})
    rollout.scores = grpo.weighted_sum(rollout.rewards_by_name, args.reward_weights)
    return rollout


@pytest.mark.parametrize("case", TRL["cases"])
def test_a_whole_update_is_trls(case, monkeypatch):
    """Advantages, and the loss, gradient, metrics and weights of two steps: on one batch, or on its halves."""
    expected, policy = TRL["cases"][case], golden_model("policy")
    args = golden_args(expected["settings"])
    rollout = golden_rollout(args, policy)
    old = grpo.compute_logprobs(policy, rollout, args)
    torch.testing.assert_close(old.masked_fill(~rollout.mask, 0.0), ARRAYS["old_logprobs"] * rollout.mask)
    rollout.advantages = grpo.group_advantages(rollout.scores, args.num_generations, args.scale_rewards)[:, None]
    close(rollout.advantages.squeeze(1), ARRAYS[f"{case}/advantages"])
    rollout.loss_mask = rollout.mask & (rollout.ended[:, None] if args.mask_truncated_completions else True)
    if args.beta:
        rollout.ref_logprobs = grpo.compute_logprobs(golden_model("reference"), rollout, args)
    optimizer, gradients, losses = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0), [], []
    collect = lambda: torch.cat([p.grad.flatten() for p in policy.parameters()])  # noqa: E731
    optimizer.register_step_pre_hook(lambda *_: gradients.append(collect()))
    gradient = grpo.mini_batch_gradient
    monkeypatch.setattr(torch, "randperm", torch.arange)
    monkeypatch.setattr(grpo, "mini_batch_gradient", lambda *a: (losses.append(s := gradient(*a)), s)[1])
    stats = grpo.optimize(policy, optimizer, rollout, args)
    parts = len(expected["losses"]) // len(expected["metrics"])  # micro-batches of a step
    for step, metrics in enumerate(expected["metrics"]):
        close(gradients[step], ARRAYS[f"{case}/gradient_{step}"])
        theirs, ours = expected["losses"][step * parts : (step + 1) * parts], losses[step]
        assert ours["loss"] == pytest.approx(sum(theirs), rel=1e-5, abs=2e-6)
        ours["cispo_clip_ratio"] = ours["clip_ratio/high_mean"]
        for name in {"entropy", "kl", *ours} & set(metrics) - {"loss"}:
            if parts == 1:
                assert ours[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-5), name
    close(torch.cat([p.detach().flatten() for p in policy.parameters()]), ARRAYS[f"{case}/weights"])
    theirs, ours = expected["metrics"][0], grpo.rollout_stats(rollout, args)
    named = [name for name in ours if name in theirs]
    for name in named:
        assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
    assert len(named) >= 12
    assert stats["val/skipped_steps"] == 0


# --- the mathematics


def an_update(policy, scores, settings, rows=None, in_loss=True):
    """The gradient of one mini-batch of the golden episodes with other scores, and what is logged of it."""
    args = golden_args(TRL["cases"]["dapo"]["settings"])
    vars(args).update(dict(num_ppo_epochs=1, epsilon=0.05, epsilon_high=0.1) | settings)
    rollout = golden_rollout(args, policy)
    rollout.old_logprobs = rollout.old_logprobs + torch.linspace(-0.2, 0.2, 72).view(12, 6).sin()
    rollout.advantages = grpo.group_advantages(scores, args.num_generations, args.scale_rewards)[:, None]
    rollout.loss_mask, rollout.ref_logprobs = rollout.mask & in_loss, rollout.old_logprobs - 0.3
    policy.zero_grad()
    order = torch.arange(12) if rows is None else rows
    stats = grpo.mini_batch_gradient(policy, rollout, order.split(args.micro_batch_size), args)
    return torch.cat([p.grad.flatten() for p in policy.parameters()]), stats


SCORES = torch.tensor([1.0, 0, 0, 2, 0, 0, 0, 1, 3, 1, 1, 0])


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_changes_nothing(loss_type, level):
    """A constant added to the scores of a group; another order of rows; and, but for bnpo, how the batch is cut."""
    policy, settings = golden_model("policy"), dict(loss_type=loss_type, importance_sampling_level=level, beta=0.1)
    plain, stats = an_update(policy, SCORES, settings)
    assert plain.norm() > 1e-3 and 0 < stats["clip_ratio/high_max"] <= 1 or loss_type == "cispo"
    close(an_update(policy, SCORES + torch.tensor([5.0, -3, 7]).repeat_interleave(4), settings)[0], plain)
    close(an_update(policy, SCORES, settings, torch.randperm(12))[0], plain)
    cut, cut_stats = an_update(policy, SCORES, settings | {"micro_batch_size": 5})
    if loss_type == "bnpo":
        assert (cut - plain).norm() > 1e-3 * plain.norm()
    else:
        close(cut, plain)
        assert stats == pytest.approx(cut_stats)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_shares_are_of_rows_in_the_loss(level, monkeypatch):
    """Every ratio is too low, and every advantage below 0 but that of a row that is masked."""
    ratio = grpo.importance_ratio
    monkeypatch.setattr(grpo, "importance_ratio", lambda *a: ratio(*a) / 2)
    scores, in_loss = torch.tensor([0.0, 9, 0, 0] * 3), torch.tensor([True, False, True, True] * 3)[:, None]
    settings = dict(importance_sampling_level=level, loss_type="grpo")
    _, stats = an_update(golden_model("policy"), scores, settings, in_loss=in_loss)
    assert stats["clip_ratio/low_min"] == stats["clip_ratio/low_mean"] == 1 and stats["clip_ratio/high_max"] == 0


def test_advantages():
    """Of the group, of the batch, or as they are; a group of equal scores has none."""
    scores = torch.tensor([1.0, 0, 0, 0, 5, 5, 5, 5])
    plain = torch.tensor([0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0])
    assert grpo.group_advantages(scores, 4, "none").tolist() == plain.tolist()
    torch.testing.assert_close(grpo.group_advantages(scores, 4, "group"), plain / 0.5001)
    torch.testing.assert_close(grpo.group_advantages(scores, 4, "batch"), plain / (scores.std() + 1e-4))


@pytest.mark.parametrize("loss_type", LOSSES)
def test_equal_scores_give_no_gradient(loss_type):
    """Whatever they are: in float32 the mean of seven times 57.1 is another number."""
    assert not grpo.group_advantages(torch.full((7,), 57.1), 7, "group").any()
    gradient, _ = an_update(golden_model("policy"), torch.full((12,), 57.1), dict(loss_type=loss_type))
    assert gradient.norm() == 0


def test_losses_of_equal_lengths():
    """If all responses are equally long, grpo, dapo and bnpo are one, and dr_grpo is a constant times them."""
    args = grpo.Args(response_length=10)
    weights = {}
    for args.loss_type in ("dapo", "grpo", "bnpo", "dr_grpo"):
        weights[args.loss_type] = grpo.token_weights(torch.ones(6, 4).bool(), 6, torch.tensor(24.0), args).expand(6, 1)
    for name, share in (("grpo", 1.0), ("bnpo", 1.0), ("dr_grpo", 0.4)):
        torch.testing.assert_close(weights[name], share * weights["dapo"])


def test_token_weights_by_hand():
    """Responses of 1 and 3 tokens, at most 4."""
    mask, args = torch.tensor([[1, 0, 0], [1, 1, 1]]).bool(), grpo.Args(response_length=4)
    for args.loss_type, expected in (("dapo", [1 / 4, 1 / 4]), ("cispo", [1 / 4, 1 / 4]), ("grpo", [1 / 2, 1 / 6]),
                                     ("dr_grpo", [1 / 8, 1 / 8]), ("bnpo", [1 / 4, 1 / 4])):  # fmt: skip
        weights = grpo.token_weights(mask, 2, torch.tensor(4.0), args).flatten().tolist()
        assert weights == pytest.approx(expected), args.loss_type


def test_a_sequence_of_one_token_is_a_token():
    new, old, mask = torch.randn(5, 1), torch.randn(5, 1), torch.ones(5, 1).bool()
    ratios = [grpo.importance_ratio(new, old, mask, level) for level in ("token", "sequence")]
    torch.testing.assert_close(*ratios)


def test_the_ratio_of_a_sequence_is_a_geometric_mean():
    new, old = torch.tensor([[0.1, 0.5, 99.0]]), torch.tensor([[0.0, 0.2, 0.0]])
    ratio = grpo.importance_ratio(new, old, torch.tensor([[1, 1, 0]]).bool(), "sequence")
    assert ratio.item() == pytest.approx((math.exp(0.1) * math.exp(0.3)) ** 0.5)


def test_clipping_by_hand():
    """Ratios .5, 1, 2 with A = 1 and -1: epsilon .2, epsilon_high .3, delta 1.5."""
    args = grpo.Args(epsilon=0.2, epsilon_high=0.3, delta=1.5)
    ratio = torch.tensor([[0.5, 1, 2, 0.5, 1, 2]])
    advantages = torch.tensor([[1.0, 1, 1, -1, -1, -1]])
    losses = grpo.surrogate_loss(ratio, ratio.log(), advantages, args)
    assert losses[0].tolist() == pytest.approx([-0.5, -1, -1.3, 0.8, 1, 1.5])
    args.delta = None
    assert grpo.surrogate_loss(ratio, ratio.log(), advantages, args)[0, 5] == 2


def test_the_gradient_of_cispo():
    """Of each token: minus the capped ratio, times A, whatever the ratio."""
    args = grpo.Args(loss_type="cispo", epsilon_high=1.5)
    logprobs = torch.tensor([[0.5, 1.0, 2.0]]).log().requires_grad_()
    ratio = logprobs.exp()  # the old probabilities are 1
    grpo.surrogate_loss(ratio, logprobs, torch.tensor([[2.0]]), args).sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([-1.0, -2.0, -3.0])


def test_only_the_corrected_k3_has_the_gradient_of_the_kl():
    """Summed over the vocabulary with the policy's probabilities, exactly."""
    logits = torch.linspace(-1, 1, 7, requires_grad=True)
    ref = logits.detach().flip(0).log_softmax(0)

    def gradient(loss):
        return torch.autograd.grad(loss, logits)[0]

    logprobs = logits.log_softmax(0)
    kl = gradient((logprobs.exp() * (logprobs - ref)).sum())
    logprobs = logits.log_softmax(0)
    k3 = grpo.kl_estimate(logprobs, ref, "k3")
    ratio = (logprobs - logprobs.detach()).exp()
    corrected = gradient((logprobs.detach().exp() * k3 * ratio).sum())
    torch.testing.assert_close(corrected, kl)
    k3 = grpo.kl_estimate(logprobs := logits.log_softmax(0), ref, "k3")
    assert (gradient((logprobs.detach().exp() * k3).sum()) - kl).norm() > 0.1 * kl.norm()


# --- the loop


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory, tiny):
    """The folder and the metrics of a run of one group an update; that a reference is made would end it."""
    folder, settings = tmp_path_factory.mktemp("plain"), tiny | dict(batch_size=4, total_episodes=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "make_reference", lambda *_: 1 / 0)
        return folder, run(grpo, folder, num_sample_generations=3, learning_rate=3e-4, **settings)


@pytest.fixture(scope="module")
def run_with_kl(tmp_path_factory, tiny):
    """The metrics of a run with KL in the loss and four passes over each batch."""
    settings = tiny | dict(beta=0.1, num_ppo_epochs=4, learning_rate=1e-2)
    return run(grpo, tmp_path_factory.mktemp("kl"), **settings)


def test_one_pass_has_ratio_1(plain_run, run_with_kl):
    for line in plain_run[1]:
        assert line["val/ratio"] == pytest.approx(1, abs=1e-4) and line["clip_ratio/region_mean"] == 0
    assert any(line["clip_ratio/region_mean"] > 0 for line in run_with_kl)


def test_the_rate_falls(plain_run):
    assert [line["learning_rate"] for line in plain_run[1]] == pytest.approx([3e-4, 2e-4, 1e-4])


def test_metrics_are_those_of_the_responses(plain_run):
    """From samples.jsonl, which holds the four responses of an update and their scores."""
    folder, lines = plain_run
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for update, line in enumerate(lines, 1):
        four = [sample for sample in samples if sample["update"] == update]
        scores = torch.tensor([sample["score"] for sample in four])
        lengths = torch.tensor([len(sample["tokens"]) for sample in four]).float()
        assert line["reward"] == line["objective/scores"] == line["rewards/right_number/mean"] == scores.mean()
        assert line["reward_std"] == pytest.approx(scores.std().item())
        assert line["frac_reward_zero_std"] == float(scores.std() == 0)
        assert line["completions/mean_length"] == lengths.mean() and line["completions/max_length"] == lengths.max()
        advantages = torch.tensor([sample["advantages"][0] for sample in four])
        torch.testing.assert_close(advantages, (scores - scores.mean()) / (scores.std() + 1e-4))
        assert "kl" not in line or line["kl"] == 0
    sizes = [len(sample["tokens"]) + len(sample["prompt"].split()) for sample in samples]
    assert [line["num_tokens"] for line in lines] == [sum(sizes[: 4 * update]) for update in (1, 2, 3)]


def test_kl_enters_the_loss_only_with_beta(plain_run, run_with_kl):
    """Without it no reference is made at all."""
    assert "objective/kl" not in plain_run[1][0]
    assert run_with_kl[-1]["kl"] > 0 and run_with_kl[0]["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert abs(run_with_kl[-1]["objective/kl"]) > 1e-2  # to the first policy, not to that of the rollout


def test_what_is_not_finished_is_left_out(tmp_path, tiny):
    """With every response cut off there is no gradient."""
    cut = dict(stop_token="<|pad|>", mask_truncated_completions=True)  # which is never drawn
    for line in run(grpo, tmp_path, **tiny | cut):
        assert line["grad_norm"] == 0 and line["completions/clipped_ratio"] == 1 and line["loss"] == 0


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_loss_of_no_tokens_is_zero(loss_type):
    """Nothing is divided by zero."""
    gradient, stats = an_update(golden_model("policy"), SCORES, dict(loss_type=loss_type, beta=0.1), in_loss=False)
    assert gradient.norm() == 0 and all(x == 0 for x in stats.values()), stats


def test_dynamic_sampling(monkeypatch):
    """Groups whose scores differ are kept, in whole; equal ones fill up; and draws are counted."""
    args = grpo.Args(batch_size=8, num_generations=2, dynamic_sampling=3)
    prompts = [{"n": n} for n in range(64)]
    monkeypatch.setattr(grpo, "shuffled", lambda n, *_: list(range(n)))

    def sample_groups(draws, first_draw=0):
        """Does the group differ? Of four groups in each draw."""
        coming = iter(draws)

        def score(rollout, *_):
            differ = torch.tensor(next(coming)).repeat_interleave(2).bool()
            rollout.scores = torch.where(differ, torch.tensor([0.0, 1.0] * 4), 0.0)
            rollout.rewards_by_name = {"f": rollout.scores}

        monkeypatch.setattr(grpo, "score_responses", score)
        rollout, count = grpo.sample_groups(None, prompts, None, first_draw, args)
        assert not list(coming)
        assert rollout.scores.tolist() == rollout.rewards_by_name["f"].tolist()
        assert [x["n"] for x in rollout.examples] == rollout.prompts.flatten().tolist()
        return rollout, count

    def answer(policy, examples, _):
        ids = torch.tensor([x["n"] for x in examples])[:, None]
        width = torch.ones(8, 1 + int(ids[0] % 3))
        return grpo.Rollout(ids, ids > -1, width.long(), width > 0, width[:, 0] > 0, width, examples)

    monkeypatch.setattr(grpo, "sample_batch", answer)
    rollout, count = sample_groups([[0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    assert rollout.prompts.flatten().tolist() == [3, 3, 8, 8, 9, 9, 12, 12] and count == 4
    assert rollout.scores.tolist() == [0, 1] * 4
    assert rollout.mask.sum(1).tolist() == [1, 1, 3, 3, 3, 3, 1, 1]
    args.dynamic_sampling = 1  # too few: the rest is filled up with what differs not
    rollout, count = sample_groups([[1, 0, 0, 0], [0, 0, 1, 0]], first_draw=5)
    assert rollout.prompts.flatten().tolist() == [20, 20, 26, 26, 21, 21, 22, 22] and count == 2
    args.dynamic_sampling = 0  # in the order of sampling
    rollout, count = sample_groups([[0, 0, 1, 0]])
    assert rollout.prompts.flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and count == 1


def test_dynamic_sampling_in_a_run(tmp_path, tiny, monkeypatch):
    """Every draw is counted, and has the next prompts."""
    numbers, batch = [], grpo.batch
    monkeypatch.setattr(grpo, "batch", lambda rows, number, *a: numbers.append(number) or batch(rows, number, *a))
    lines = run(grpo, tmp_path, dynamic_sampling=5, **tiny)
    assert max(line["sampled_batches"] for line in lines) > 1
    assert numbers == list(range(sum(line["sampled_batches"] for line in lines)))
    assert all(line["frac_reward_zero_std"] == 0 for line in lines if line["sampled_batches"] < 6)


@pytest.mark.parametrize("processes", [1, 3])
def test_evaluation(monkeypatch, processes):
    """Four prompts: low temperature is right on 0 and 1; of two answers each, of prompt 0 both, of 1 and 2 one is."""
    args = grpo.Args(num_generations=2)

    def answer(policy, examples, answers):
        ids, k = torch.tensor([x["n"] for x in examples])[:, None], 1 if answers.temperature < 0.1 else 2
        assert len(ids) == k * (6 if processes == 3 else 4)
        first = (torch.arange(len(ids)) % k == 0)[:, None]
        right = (ids < 2) if k == 1 else (ids == 0) | (((ids == 1) | (ids == 2)) & first)
        return grpo.Rollout(ids, ids > -1, ids, ids > -1, right[:, 0], right.float(), examples)

    monkeypatch.setattr(grpo, "WORLD_SIZE", processes)
    monkeypatch.setattr(grpo, "sample_batch", answer)

    def reward(r):
        return {"right": r.old_logprobs[:, 0], "other": r.prompts[:, 0].float()}

    prompts = [{"prompt": "", "n": n} for n in range(4)]
    stats = grpo.evaluate(None, reward, prompts, args)
    expected = {"eval/accuracy": 0.5, "eval/scores": 0.5 + 1.5, "eval/pass@1": 0.5, "eval/pass@2": 0.75}
    assert stats == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(num_generations=1), "--num-generations 1: Input should be greater than or equal to 2"),
        (dict(num_generations=3), "a batch of 8 responses does not divide into groups of --num-generations 3"),
        (dict(reward_fn=("rewards/verifiers.py:countdown",)), "missing 2 required positional arguments: 'target' and 'nums'"),
        (dict(epsilon=-1.0), "--epsilon -1.0: Input should be greater than 0"),
        (dict(mask_truncated_completions=True, stop_token="none"), "with --stop-token none no response would be in"),
    ],
)
def test_wrong_settings(tmp_path, tiny, settings, sentence):
    with pytest.raises(grpo.UserError, match=sentence):
        run(grpo, tmp_path, **tiny | settings)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_warnings(capsys):
    grpo.check_args(grpo.Args(importance_sampling_level="sequence"))
    assert "weighs a response by its length" in capsys.readouterr().err
    grpo.check_args(grpo.Args(importance_sampling_level="sequence", loss_type="grpo"))
    assert not capsys.readouterr().err


def test_resumed_with_everything_on(tmp_path, tiny):
    """Weights and metrics of an interrupted run, bit for bit."""
    settings = tiny | dict(dynamic_sampling=2, beta=0.1, num_ppo_epochs=2, num_mini_batches=2, lora_r=2, save_steps=1)
    whole = run(grpo, tmp_path, save_total_limit=9, **settings)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    checkpoint = str(tmp_path / "checkpoints/step-00000001.pt")
    resumed = run(grpo, tmp_path, save_total_limit=9, resume=checkpoint, **settings)
    assert untimed(whole) == untimed(resumed) and len(whole) == 3
    again = load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.equal(x, again[name]) for name, x in weights.items())


# --- learning


def accuracy(folder, seed, **settings):
    """The share of right answers in the last 6 of 40 updates; in the first it is 0.4.

    Over three seeds and all kinds it was 0.87 to 0.96; with the advantages' sign turned, 0.25 to 0.28.
    """
    settings = dict(total_episodes=40 * 64, dataset_test_split="none") | settings
    return sum(line["reward"] for line in run(grpo, folder, seed=seed, **settings)[-6:]) / 6


GSPO = dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-3)
DR_GRPO = dict(loss_type="dr_grpo", scale_rewards="none")
KINDS = [GSPO, DR_GRPO, dict(loss_type="cispo"), dict(beta=0.01, dynamic_sampling=2)]


def test_grpo_learns(tmp_path):
    assert accuracy(tmp_path, 1) > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("seed, settings", [(2, {}), (3, {}), *((1, kind) for kind in KINDS)])
def test_other_seeds_and_kinds_learn(tmp_path, seed, settings):
    assert accuracy(tmp_path, seed, **settings) > 0.7


def test_grpo_unlearns_with_the_sign_turned(tmp_path, monkeypatch):
    right = grpo.group_advantages
    monkeypatch.setattr(grpo, "group_advantages", lambda *a: -right(*a))
    assert accuracy(tmp_path, 1) < 0.4


# --- the rest of the loop


def test_join():
    """Prompts are padded on the left, everything else on the right."""
    one, two = torch.ones(1, 1).long(), torch.full((1, 2), 2)
    a = grpo.Rollout(one, one > 0, two, two > 0, two[:, 0] > 0, two * 0.5, [{"n": 1}], {"f": torch.ones(1)})
    b = grpo.Rollout(two, two > 0, one, one > 0, one[:, 0] > 0, one * 0.5, [{"n": 2}], {"f": torch.zeros(1)})
    both = grpo.join([a, b])
    assert both.prompts.tolist() == [[0, 1], [2, 2]] and both.prompt_mask.tolist() == [[False, True], [True, True]]
    assert both.responses.tolist() == [[2, 2], [1, 0]] and both.mask.tolist() == [[True, True], [True, False]]
    assert both.old_logprobs.tolist() == [[1.0, 1.0], [0.5, 0.0]] and both.ref_logprobs is None
    assert both.examples == [{"n": 1}, {"n": 2}] and both.rewards_by_name["f"].tolist() == [1, 0]


def test_the_reference_has_no_adapter(tmp_path, tiny):
    """With LoRA too, the KL in the loss is to the first policy: it grows."""
    lines = run(grpo, tmp_path, lora_r=4, beta=0.1, learning_rate=0.05, **tiny)
    assert lines[0]["objective/kl"] == pytest.approx(0, abs=1e-3) and abs(lines[-1]["objective/kl"]) > 0.01


def test_lora_without_a_reference(tmp_path, tiny):
    run(grpo, tmp_path, lora_r=2, **tiny)
    assert (tmp_path / "adapter_model.safetensors").exists() and (tmp_path / "merged/model.safetensors").exists()


def test_a_gradient_that_is_not_finite(tmp_path, tiny, monkeypatch):
    """Makes no step, is counted, and leaves the weights whole."""
    loss = grpo.surrogate_loss
    monkeypatch.setattr(grpo, "surrogate_loss", lambda *a: loss(*a) * math.nan)
    lines = run(grpo, tmp_path, **tiny)
    assert all(line["val/skipped_steps"] == 1 for line in lines)
    weights = load_file(tmp_path / "model.safetensors")
    assert all(x.isfinite().all() for x in weights.values())


def test_the_first_ratio_is_checked(tmp_path, tiny, monkeypatch):
    sample_batch = grpo.sample_batch

    def sample_wrongly(*args):
        r = sample_batch(*args)
        r.old_logprobs += 0.01
        return r

    monkeypatch.setattr(grpo, "sample_batch", sample_wrongly)
    with pytest.raises(grpo.UserError, match="ratio pi/pi_old is off by"):
        run(grpo, tmp_path, **tiny)
