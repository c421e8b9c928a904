"""docs/questions.md: its diffs fit the short files and do what they say."""

import sys

import pytest
import torch
from sources import ROOT, text_of
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(ROOT / "experiments"))
import forks
import questions
import takeoff

PAGE = text_of("docs/questions.md")
SFT = f"{ROOT}/toy/shells/sft"
DIFFS = forks.read_diffs(PAGE)
USED = {(arm.fork, arm.script) for arm in questions.arms() if arm.fork != "default"}


def run(fork: str, flags: str) -> tuple[list[dict], dict]:
    """Metrics of each update of a fork of lecture/grpo.py, by default two of them, and its names after the last."""
    source = forks.apply(DIFFS[fork], text_of("lecture/grpo.py"))
    flags = f"--batch-size 32 --total-episodes 64 {flags}"
    return forks.run("lecture/grpo.py", source, flags.split(), lambda names, stats: stats)


@pytest.mark.parametrize(("fork", "script"), sorted(USED))
def test_every_diff_fits_its_file(fork, script):
    """What comes out is a program that is no wider than a slide; and no diff was overlooked."""
    assert {name for name, _ in USED} == set(DIFFS)
    assert len(DIFFS) == PAGE.count("```diff")
    compile(forks.apply(DIFFS[fork], text_of(script)), fork, "exec")
    assert max(map(len, DIFFS[fork].splitlines())) <= 101


def is_gradient_of(loss: torch.Tensor, policy: torch.nn.Module, cosine: float) -> bool:
    """Whether the gradient that the policy has points where that of the loss does; its length is clipped."""
    wanted = torch.autograd.grad(loss, list(policy.parameters()))
    found = [p.grad for p in policy.parameters()]
    wanted, found = [torch.cat([g.flatten() for g in gradient]) for gradient in (wanted, found)]
    return torch.cosine_similarity(wanted, found, dim=0) > cosine


def test_distillation_lowers_the_kl_of_the_student_from_the_teacher(tmp_path):
    """KL(π || π_teacher) of answers of one token can be added up exactly: 512 samples come near to its gradient."""
    teacher = AutoModelForCausalLM.from_pretrained(SFT)
    for p in teacher.parameters():
        p.data += 0.2 * torch.randn_like(p)
    teacher.save_pretrained(tmp_path)
    flags = "--batch-size 512 --total-episodes 512 --response-length 1 --learning-rate 0"
    _, names = run("On-policy distillation", f"{flags} --teacher {tmp_path}")
    policy, prompts = names["policy"], names["ids"][:, : names["P"]]
    logprobs, wanted = [model(prompts).logits[:, -1].log_softmax(1) for model in (policy, names["teacher"])]
    kl = (logprobs.exp() * (logprobs - wanted.detach())).sum(1).mean()
    assert is_gradient_of(kl, policy, 0.9)


def test_learning_from_answers_is_fine_tuning():
    """The gradient is that of the cross-entropy of the teacher's tokens."""
    _, names = run("The teacher's answers", f"--teacher {SFT} --learning-rate 0")
    policy, ids, mask = names["policy"], names["ids"], names["mask"]
    logits = names["forward"](policy, ids, names["attention_mask"]).logits
    logprobs = names["response_logprobs"](logits, ids, names["P"], 1.0)
    assert is_gradient_of(-logprobs[mask].mean(), policy, 0.9999)


@pytest.mark.parametrize("flags", ["", "--weights int4", "--age 1"])
def test_the_first_ratio_shows_another_sampler(flags):
    """While the trainer, which compares itself with itself, sees none."""
    updates, _ = run("Another sampler", flags)
    assert (updates[-1]["approxkl"] > 1e-6) == bool(flags)
    assert updates[-1]["val/ratio"] == pytest.approx(1, abs=1e-5)


def test_a_weight_of_two_at_most():
    """An advantage is multiplied by π / π_sampler, and by no more than 2."""
    _, names = run("Another sampler", "--weights int4 --correction tis")
    weights = (names["old_logprobs"] - names["drawn_logprobs"]).exp().clamp(max=2)
    plain = names["group_advantages"](names["scores"], names["G"], "group")[:, None]
    assert torch.allclose((plain * weights)[names["mask"]], names["advantages"][names["mask"]])


def test_a_verifier_that_always_lies_says_the_opposite():
    _, names = run("A lying verifier", "--false-positives 1 --false-negatives 1")
    assert torch.equal(names["scores"], 1 - names["truth"])
    _, names = run("A lying verifier", "--false-positives 0.5 --false-negatives 0.5 --by-prompt")
    lies = (names["scores"] != names["truth"]).view(-1, names["G"])
    assert torch.equal(lies.all(1), lies.any(1))


def a_run(right: list[int]) -> dict:
    """A run of takeoff.py with so many right answers in each of its ten parts."""
    return {"right": [count for count in right for _ in range(takeoff.UPDATES // 10)]}


def test_what_is_said_of_runs_that_take_off_or_do_not():
    """By hand: of the four pairs, one of each kind, the sign is right twice, ties once and is wrong once."""
    off, on = [0, 2] + [0] * 8, [0] * 8 + [60, 60]
    runs = {"GRPO": {1: a_run([2, *on[1:]]), 2: a_run(on), 3: a_run(off), 4: a_run([1] * 10)}}
    assert takeoff.outcome(runs["GRPO"][1]) == 60 / 64 and takeoff.half(runs["GRPO"][1]) == 67
    assert takeoff.foretold(runs, "right", 8) == (1 + 1 + 0.5 + 0) / 4
    opposite, shown, wrong = takeoff.rankings([0.3, 0.3], [0.9, 0.9])
    assert (opposite, shown, wrong) == (0, 1, 0)
    opposite, shown, wrong = takeoff.rankings([0.3, 0.9], [0.9, 0.3])
    assert opposite == pytest.approx((1 - 70 / 256) ** 2 / 2, abs=0.02)  # as many draws of .9 in 70 of 256 cases


def test_the_tables_of_the_last_question_are_those_of_the_record():
    """Else run experiments/takeoff.py."""
    runs = takeoff.by_arm(takeoff.read_record())
    for name, table in takeoff.TABLES.items():
        assert f"<!-- {name} -->\n{table(runs)}\n<!-- /{name} -->" in PAGE
