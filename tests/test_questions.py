"""docs/questions.md: its diffs fit the short files and do what they say."""

import sys

import pytest
import torch
from sources import ROOT, text_of
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(ROOT / "experiments"))
import forks
import questions

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
    """What comes out is a program; and no diff was overlooked."""
    assert {name for name, _ in USED} == set(DIFFS)
    assert len(DIFFS) == PAGE.count("```diff")
    compile(forks.apply(DIFFS[fork], text_of(script)), fork, "exec")


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


@pytest.mark.parametrize("flags", ["", "--weights int4", "--age 1"])
def test_the_first_ratio_shows_another_sampler(flags):
    """While the trainer, which compares itself with itself, sees none."""
    updates, _ = run("Another sampler", flags)
    assert (updates[-1]["approxkl"] > 1e-6) == bool(flags)
    assert updates[-1]["val/ratio"] == pytest.approx(1, abs=1e-5)
