"""benchmarks/learning.py: what the table says of runs that are over."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def learning(monkeypatch):
    """The module; it finds throughput.py beside it."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import learning

    yield learning
    for name in ("learning", "throughput"):
        del sys.modules[name]


def test_a_seed_that_never_reaches_the_goal(learning):
    """The others have a mean and a deviation, and the table says how many they are; with none it says never."""

    def updates(*gold):
        """A run of 64 episodes and a second an update."""
        return [
            {"episode": 64 * i, "seconds": float(i), "score": 1.0, "gold": x, "kl": 2.0, "eos_share": 0.5}
            for i, x in enumerate(gold, 1)
        ]

    runs = [updates(3, 3, 3, 3), updates(0, 0, 0, 0), updates(0, 3, 3, 3)]

    def cells(runs):
        table = learning.make_table({"runs": [{"algorithm": "rloo", "side": "ours", "updates": run} for run in runs]})
        return [cell.strip() for cell in table.splitlines()[-1].split("|")]

    assert cells(runs)[-3:-1] == ["224 ± 45 (2 of 3 seeds)", "4 ± 1 (2 of 3 seeds)"]
    assert cells(runs[:1])[-3:-1] == ["192", "3"]
    assert cells(runs[1:2])[-3:-1] == ["never", "never"]
