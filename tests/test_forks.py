"""docs/fork.md and docs/diffs/questions.md: their diffs fit the short files and ppo.py, and do what the pages say."""

import shutil
import sys

import pytest
import torch
from runs import run
from sources import ROOT, load, text_of
from transformers import AutoModelForCausalLM

import ppo

sys.path.insert(0, str(ROOT / "experiments"))
import forks  # noqa: E402
import record  # noqa: E402  (which adds tools/ to the path)
from make_fork import PAGES, apply, main, read_diffs  # noqa: E402

DIFFS = {page: read_diffs(text_of(page)) for page in ("docs/fork.md", "docs/diffs/questions.md")}
USED = {("docs/fork.md", name, script) for name in DIFFS["docs/fork.md"] for script in ("lecture/ppo.py", "ppo.py")}
USED -= {("docs/fork.md", "A reward", "ppo.py")}  # which has --reward-fn
USED |= {("docs/diffs/questions.md", name, "lecture/grpo.py") for name in DIFFS["docs/diffs/questions.md"]}
RUNS = record.runs_of_group("questions")
USED |= {("docs/diffs/questions.md", run.options["fork"], run.command[0]) for run in RUNS if "fork" in run.options}


@pytest.mark.parametrize(("page", "name", "script"), sorted(USED))
def test_every_diff_fits_its_file(page, name, script):
    """What comes out is another program."""
    fork = apply(read_diffs(text_of(page), script)[name], text_of(script))
    compile(fork, name, "exec")
    assert fork != text_of(script)


@pytest.fixture
def fork(tmp_path, monkeypatch, tiny):
    """fork("A metric") -> metrics of an update of what tools/make_fork.py makes of ppo.py, and of ppo.py."""

    def make(name):
        (tmp_path / "docs/diffs").mkdir(parents=True, exist_ok=True)
        for file in ("ppo.py", *PAGES):
            shutil.copy(ROOT / file, tmp_path / file)
        monkeypatch.setattr("make_fork.ROOT", tmp_path)
        monkeypatch.setattr(sys, "argv", ["make_fork.py", name, "--script", "ppo.py", "--force"])
        main()
        module = load(tmp_path / "fork.py", "forked")
        settings = tiny["ppo"] | dict(
            total_episodes=8, model=f"{ROOT}/toy/sft", reward_model=f"{ROOT}/toy/reward_model"
        )
        return run(module, tmp_path / name, **settings)[0], run(ppo, tmp_path / f"{name}, plain", **settings)[0]

    return make


def test_a_fork_of_the_full_script_does_what_its_page_says(fork):
    """Another metric, and nothing else; a loss term that is small, and never negative."""
    line, plain = fork("A metric")
    assert set(line) - set(plain) == {"policy/outside_avg"}
    assert line["policy/clipfrac_avg"] <= line["policy/outside_avg"] < 1
    assert line["loss/policy_avg"] == plain["loss/policy_avg"]
    line, plain = fork("A loss term")
    assert line["objective/scores"] == plain["objective/scores"]
    assert 0 < abs(line["loss/policy_avg"] - plain["loss/policy_avg"]) < 0.1


# --- docs/questions.md


def run_fork(fork: str, flags: str) -> tuple[list[dict], dict]:
    """Metrics of each update of a fork of lecture/grpo.py, by default two of them, and its names after the last."""
    source = apply(DIFFS["docs/diffs/questions.md"][fork], text_of("lecture/grpo.py"))
    flags = f"--batch-size 32 --total-episodes 64 {flags}"
    return forks.execute("lecture/grpo.py", source, flags.split(), lambda names, stats: stats)


def test_distillation_lowers_the_kl_of_the_student_from_the_teacher(tmp_path):
    """KL(π || π_teacher) of answers of one token can be added up exactly: 512 samples come near to its gradient."""
    teacher = AutoModelForCausalLM.from_pretrained(ROOT / "toy/shells/sft")
    for p in teacher.parameters():
        p.data += 0.2 * torch.randn_like(p)
    teacher.save_pretrained(tmp_path)
    flags = "--batch-size 512 --total-episodes 512 --response-length 1 --learning-rate 0"
    _, names = run_fork("On-policy distillation", f"{flags} --teacher {tmp_path}")
    policy, prompts = names["policy"], names["ids"][:, : names["P"]]
    logprobs, wanted = [model(prompts).logits[:, -1].log_softmax(1) for model in (policy, names["teacher"])]
    kl = (logprobs.exp() * (logprobs - wanted.detach())).sum(1).mean()
    gradients = torch.autograd.grad(kl, list(policy.parameters())), [p.grad for p in policy.parameters()]
    wanted, found = (torch.cat([g.flatten() for g in gradient]) for gradient in gradients)
    assert torch.cosine_similarity(wanted, found, dim=0) > 0.9  # its length is clipped


@pytest.mark.parametrize("flags", ["", "--weights int4"])
def test_the_first_ratio_shows_another_sampler(flags):
    """While the trainer, which compares itself with itself, sees none."""
    updates, _ = run_fork("Another sampler", flags)
    assert (updates[-1]["approxkl"] > 1e-6) == bool(flags)
    assert updates[-1]["val/ratio"] == pytest.approx(1, abs=1e-5)
