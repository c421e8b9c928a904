"""toy/pipeline.sh and toy/report.py, with a stand-in for Python that writes down what it is asked to run."""

import importlib
import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
if words[0] == (work / "fails").read_text():
    (work / "fails").write_text("")
    sys.exit(1)
if words[0] == "benchmarks/winrate.py":
    (out / "winrate.json").write_text("{}")
"""


@pytest.fixture
def pipeline(tmp_path):
    """Runs the pipeline; returns its exit code and the commands that it gave."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    python, command = tmp_path / "python", [sys.executable, "-S", str(tmp_path / "stand_in.py")]
    python.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')  # a first line with a blank in it fails
    python.chmod(0o755)

    def run(fails=""):
        (tmp_path / "fails").write_text(fails)
        (tmp_path / "calls.jsonl").write_text("")
        environment = os.environ | {"PYTHON": str(python)}
        done = subprocess.run(
            ["bash", ROOT / "toy/pipeline.sh", tmp_path / "out"], env=environment, capture_output=True, check=False
        )
        return done.returncode, [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]

    return run


def test_the_pipeline_gives_commands_that_are_understood(pipeline, monkeypatch):
    code, calls = pipeline()
    names = [call[0] for call in calls]
    assert code == 0 and names[:6] == [f"{x}.py" for x in ("sft", "reward_model", "ppo", "rloo", "grpo", "dpo")]
    assert names[6:] == ["benchmarks/winrate.py"] * 4 + ["toy/report.py"]
    monkeypatch.chdir(ROOT)
    made = set()
    for call in calls[:6]:
        monkeypatch.setattr(sys, "argv", call)
        args = importlib.import_module(Path(call[0]).stem).read_command_line()
        started = {getattr(args, "model", None), getattr(args, "reward_model", None)} - {None, "toy/reward_model"}
        assert started <= made, f"{shlex.join(call)} starts from what is not made yet"
        made.add(args.output_dir)


def test_the_pipeline_goes_on_where_it_stopped(pipeline, tmp_path):
    code, calls = pipeline(fails="rloo.py")
    assert code != 0 and calls[-1][0] == "rloo.py"
    code, calls = pipeline()
    assert code == 0 and [call[0] for call in calls[:3]] == ["rloo.py", "grpo.py", "dpo.py"]
    assert calls[0][1:3] == ["--resume", str(tmp_path / "out/rloo")] and "--resume" not in calls[1]
    code, calls = pipeline()
    assert [call[0] for call in calls] == ["toy/report.py"]


def test_the_report_says_what_the_runs_said(tmp_path, monkeypatch, pictures):
    def write(name, lines):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / f"{name}.done").write_text("12\n")

    write("sft", [{"eval/perplexity": 9.04}])
    write("reward_model", [{"eval/accuracy": 0.731}])
    for name in ("ppo", "rloo", "dpo"):
        write(name, [{"objective/kl": 3.0 * i, "objective/gold_scores": i} for i in range(4)] + [{"loss": 1.0}])
    write("grpo", [{"kl": 0.5, "completions/mean_length": 40.0, "objective/gold_scores": 2.0}])
    for i, name in enumerate(("ppo", "rloo", "grpo", "dpo")):
        (tmp_path / f"winrate-{name}").mkdir()
        figures = {"pairs": 200, "win_rate": 0.5 + i / 10, "win_rate_low": 0.4, "win_rate_high": 0.9, "score_a": 3.25,
                   "score_b": -0.5, "tokens_a": 31.0, "tokens_b": 25.0, "eos_share_a": 0.75, "eos_share_b": 1.0}  # fmt: skip
        (tmp_path / f"winrate-{name}/winrate.json").write_text(json.dumps(figures))
    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "toy/report.py"), run_name="__main__")
    report = (tmp_path / "report.md").read_text("utf-8")
    assert "| sft | -0.50 | 0.0 |  | 25 | 1.00 | 12 |" in report and "perplexity 9.0 " in report and "73%" in report
    assert "| ppo | 3.25 | 9.0 | 50% (40%–90%) | 31 | 0.75 | 12 |" in report
    assert "| grpo | 3.25 | 20.0 | 70% (40%–90%) |" in report
    assert (tmp_path / "frontier.png").stat().st_size and (tmp_path / "winrates.png").stat().st_size
    (tmp_path / "winrate-dpo/winrate.json").unlink()
    with pytest.raises(SystemExit, match="^[^\n]*winrate-dpo[^\n]*$"):
        runpy.run_path(str(ROOT / "toy/report.py"), run_name="__main__")
