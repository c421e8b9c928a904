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


@pytest.mark.parametrize("script", learning.SCRIPTS)
def test_our_runs_are_commands_that_are_understood(script, monkeypatch):
    module = __import__(script)
    for run in learning.RUNS:
        if run.script == script and run.side == "ours":
            command = [str(word) for word in learning.our_command(run, 1, "runs/x")]
            monkeypatch.setattr(sys, "argv", command[1:])
            assert module.read_command_line().seed == 1
