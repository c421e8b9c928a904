"""What the pages show is what the record of the runs says."""

import sys

import pytest
from sources import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import learning
import tables


def test_the_tables_are_those_of_the_results(monkeypatch):
    """Else run experiments/tables.py, or the program whose page it names."""
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit) as done:
        tables.main()
    assert done.value.code == 0


def test_a_run_in_short():
    """Means of the last five updates, the last of evaluations; what began, and the curves."""
    lines = []
    for i in range(1, 9):
        lines.append({"episode": 8 * i, "objective/scores": float(i), "objective/kl": 1.0, "val/eos_share": 0.5})
    lines[3]["eval/scores"] = 4
    lines[7]["eval/scores"] = 8
    short = learning.summarize("ppo", lines)
    assert short["start"]["objective/scores"] == 1
    assert short["end"]["objective/scores"] == 6
    assert short["end"]["eval/scores"] == 8
    assert short["curves"]["episode"] == [8 * i for i in range(1, 9)]


@pytest.mark.parametrize("script", learning.SCRIPTS)
def test_our_runs_are_commands_that_are_understood(script, monkeypatch):
    module = __import__(script)
    for run in learning.RUNS:
        if run.script == script and run.side == "ours":
            command = [str(word) for word in learning.our_command(run, 1, "runs/x")]
            monkeypatch.setattr(sys, "argv", command[1:])
            assert module.read_command_line().seed == 1
