"""docs/fork.md: its diffs fit lecture/ppo.py, and its table says what experiments/forks.py measured."""

import json
import sys

import pytest
from sources import ROOT, text_of


@pytest.fixture
def forks(monkeypatch):
    """The module; it finds benchmarks/common.py."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import forks

    yield forks
    for name in ("forks", "common"):
        del sys.modules[name]


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
