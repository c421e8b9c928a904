"""docs/fork.md: its diffs fit lecture/ppo.py, and what it says of ppo.py works."""

import sys
from dataclasses import dataclass

import pytest
import torch
from runs import run
from sources import ROOT, text_of

import ppo

sys.path.insert(0, str(ROOT / "experiments"))
import forks  # noqa: E402


def test_every_diff_fits_the_short_file():
    """What comes out is a program; and no diff was overlooked."""
    source = text_of("lecture/ppo.py")
    diffs = forks.read_diffs(text_of("docs/fork.md"))
    assert len(diffs) == text_of("docs/fork.md").count("```diff")
    for name, diff in diffs.items():
        fork = forks.apply(diff, source)
        compile(fork, name, "exec")
        assert fork != source


def test_a_diff_that_fits_nowhere_or_twice_is_refused():
    for old in ("    no such line", "    return states"):
        with pytest.raises(ValueError, match="not once"):
            forks.apply(f"@@ somewhere\n {old}\n+    pass\n", "    return states\n    return states\n")


def test_a_field_of_the_rollout_and_its_metric_live_through_an_evaluation(tiny, tmp_path, monkeypatch):
    """Two rows of the table of the full script, together; what `train` fills in, an evaluation does not have."""

    @dataclass
    class Rollout(ppo.Rollout):
        surprise: torch.Tensor | None = None  # (B, T)

    def optimize(*given):
        (rollout,) = (x for x in given if isinstance(x, Rollout))
        rollout.surprise = -rollout.ref_logprobs
        return step(*given)

    step, stats = ppo.optimize, ppo.rollout_stats
    surprise = lambda rollout: {"objective/surprise": rollout.surprise[rollout.mask].mean().item()}  # noqa: E731
    monkeypatch.setattr(ppo, "Rollout", Rollout)
    monkeypatch.setattr(ppo, "optimize", optimize)
    monkeypatch.setattr(ppo, "rollout_stats", lambda rollout: stats(rollout) | surprise(rollout))
    lines = run(ppo, tmp_path / "run", eval_steps=1, num_eval_prompts=4, **tiny["ppo"])
    assert all(line["objective/surprise"] > 0 and "eval/scores" in line for line in lines)
