"""docs/fork.md: its diffs fit lecture/ppo.py, what it says of ppo.py works, and its table is what forks.py measured."""

import importlib.util
import json
import sys

import pytest
from runs import run
from sources import ROOT, text_of


@pytest.fixture
def forks(monkeypatch):
    """The module; it finds benchmarks/common.py."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import forks

    yield forks
    for name in ("forks", "common"):
        sys.modules.pop(name, None)


def test_every_diff_fits_the_short_file(forks):
    """What comes out is a program that is no wider than a slide; and no diff was overlooked."""
    source = text_of("lecture/ppo.py")
    diffs = forks.read_diffs(text_of("docs/fork.md"))
    assert len(diffs) == text_of("docs/fork.md").count("```diff")
    for name, diff in diffs.items():
        fork = forks.apply(diff, source)
        compile(fork, name, "exec")
        assert fork != source
        assert max(map(len, fork.splitlines())) <= 100, name


def test_a_diff_that_fits_nowhere_or_twice_is_refused(forks):
    for old in ("    no such line", "    return states"):
        with pytest.raises(ValueError, match="not once"):
            forks.apply(f"@@ somewhere\n {old}\n+    pass\n", "    return states\n    return states\n")


def test_the_table_is_that_of_the_results(forks):
    results = json.loads(forks.OUTPUT.read_text())
    assert results["diffs"] == forks.forks_to_compare()
    runs = sorted((run["fork"], run["seed"]) for run in results["runs"])
    assert runs == sorted((fork, seed) for fork in results["diffs"] for seed in results["seeds"])
    assert f"<!-- forks -->\n{forks.table(results)}\n<!-- /forks -->" in text_of("docs/fork.md")


def test_a_field_of_the_rollout_and_its_metric_live_through_an_evaluation(tiny, tmp_path):
    """Two rows of the table of the full script, together; what `train` fills in, an evaluation does not have."""
    source = text_of("ppo.py")
    metric = '        "objective/surprise": rollout.surprise[rollout.mask].mean().item(),'
    for line, added in {
        "    returns: Tensor | None = None  # (B, T)": "    surprise: Tensor | None = None  # (B, T)",
        "            rollout.kl = compute_kl(policy, reference, rollout, args)": "            rollout.surprise = -rollout.ref_logprobs",
        '        "objective/scores": score,': metric,
    }.items():
        assert source.count(f"\n{line}\n") == 1, line
        source = source.replace(f"\n{line}\n", f"\n{line}\n{added}\n")
    (tmp_path / "fork.py").write_text(source)
    spec = importlib.util.spec_from_file_location("fork", tmp_path / "fork.py")
    sys.modules["fork"] = fork = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fork)
    try:
        lines = run(fork, tmp_path / "run", eval_steps=1, num_eval_prompts=4, **tiny["ppo"])
    finally:
        del sys.modules["fork"]
    assert all(line["objective/surprise"] > 0 and "eval/scores" in line for line in lines)
