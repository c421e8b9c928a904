"""toy/pipeline.sh, with `echo` for Python, which says what it is asked to run."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

from sources import ROOT

TRAINED = ("sft", "reward_model", "ppo", "rloo", "grpo", "dpo")


def test_the_pipeline_gives_commands_that_are_understood(tmp_path, monkeypatch):
    """And none starts from what is not made yet."""
    words = ["bash", ROOT / "toy/pipeline.sh", tmp_path / "out"]
    done = subprocess.run(words, env=os.environ | {"PYTHON": "echo"}, capture_output=True, text=True, check=True)
    calls = [line.split() for line in done.stdout.splitlines() if not line.startswith("== ")]
    names = [call[0] for call in calls]
    assert names[:6] == [f"{name}.py" for name in TRAINED]
    assert names[6:] == ["tools/compare.py", "tools/evaluate.py"] * 4 + ["toy/report.py"]
    monkeypatch.chdir(ROOT)
    made = {None, "toy/reward_model"}
    for call in calls[:6]:
        monkeypatch.setattr(sys, "argv", call)
        args = importlib.import_module(Path(call[0]).stem).read_command_line()
        assert {getattr(args, "model", None), getattr(args, "reward_model", None)} <= made, call
        made.add(args.output_dir)
