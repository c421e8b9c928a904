"""toy/pipeline.sh, with a stand-in for Python that writes down what it is asked to run."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT

TRAINED = ("sft", "reward_model", "ppo", "rloo", "grpo", "dpo")
STAND_IN = """
import json, sys
from pathlib import Path

work, words = Path(__file__).parent, sys.argv[1:]
with open(work / "calls.jsonl", "a") as file:
    file.write(json.dumps(words) + "\\n")
out = next((Path(word.partition("=")[2]) for word in words if word.startswith("--output-dir=")), None)
if "--output-dir" in words:
    out = Path(words[words.index("--output-dir") + 1])
if out:
    out.mkdir(parents=True)
    (out / "args.json").write_text("{}")
results = {"tools/compare.py": "compare.json", "tools/evaluate.py": "evaluation.json"}
if words[0] in results:
    (out / results[words[0]]).write_text("{}")
"""


@pytest.fixture
def pipeline(tmp_path):
    """Runs the pipeline; returns its exit code and the commands that it gave."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    command = shlex.join([sys.executable, "-S", str(tmp_path / "stand_in.py")])
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')  # a first line with a blank in it fails
    python.chmod(0o755)

    def run():
        (tmp_path / "calls.jsonl").write_text("")
        words = ["bash", ROOT / "toy/pipeline.sh", tmp_path / "out"]
        done = subprocess.run(words, env=os.environ | {"PYTHON": str(python)}, capture_output=True, check=False)
        calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
        return done.returncode, calls

    return run


def test_the_pipeline_gives_commands_that_are_understood(pipeline, monkeypatch):
    """And none starts from what is not made yet."""
    code, calls = pipeline()
    assert code == 0
    names = [call[0] for call in calls]
    assert names[:6] == [f"{name}.py" for name in TRAINED]
    assert names[6:] == ["tools/compare.py", "tools/evaluate.py"] * 4 + ["toy/report.py"]
    monkeypatch.chdir(ROOT)
    made = {None, "toy/reward_model"}
    for call in calls[:6]:
        monkeypatch.setattr(sys, "argv", call)
        args = importlib.import_module(Path(call[0]).stem).read_command_line()
        assert {getattr(args, "model", None), getattr(args, "reward_model", None)} <= made, shlex.join(call)
        made.add(args.output_dir)
