"""tools/seeds.py and make_fork.py: what is said of paired seeds, which runs are made, what is not overwritten."""

import subprocess
import sys

import pytest
from sources import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import make_fork
import seeds

PROGRAM = """
import sys, wandb
from value import VALUE
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
bonus, seed = float(flags.get("--bonus", 0)), float(flags["--seed"])
if bonus < 0:
    sys.exit("no bonus below 0")
open(sys.argv[0] + ".made", "a").write("run ")
for step in range(9):
    wandb.log({"score": 10 * seed + bonus * seed + step, "value": VALUE, "time/update": seed}, step=step)
"""


def test_what_three_pairs_say():
    """By hand: d = 1, 2, 3 deviates by 1; Student's t of two degrees is 4.303; 7.849 (1 / 2)^2 = 1.96 seeds."""
    root = 3**-0.5
    wanted = {"difference": 2, "error": root, "low": 2 - 4.3027 * root, "high": 2 + 4.3027 * root}
    assert seeds.judge([1, 5, 9], [2, 7, 12]) == pytest.approx(wanted | {"higher": 3, "needed": 2}, abs=1e-4)
    assert seeds.judge([0, 0, 0], [1, 5, 0])["needed"] == 14  # d = 2 with a deviation of sqrt 7: 7.849 * 7 / 4
    assert seeds.judge([1, 2], [2, 1])["needed"] == float("inf")
    lines = [{"loss": i} | ({"eval": i} if i % 4 == 0 else {}) for i in range(1, 13)]  # the end: the last five updates
    assert (seeds.end(lines, "loss"), seeds.end(lines, "eval"), seeds.end(lines[:3], "eval")) == (10, 10, None)


def test_runs_are_made_once_until_their_program_changes(tmp_path, monkeypatch, capsys, pictures):
    """The ends are those of the last five updates, and differ by the bonus times the seed; clocks are left out. Each
    script imports the module beside it."""
    program, made = tmp_path / "program.py", tmp_path / "program.py.made"
    (tmp_path / "other").mkdir()
    for value, folder in enumerate((tmp_path, tmp_path / "other")):
        (folder / "program.py").write_text(PROGRAM)
        (folder / "value.py").write_text(f"VALUE = {value}")

    def compare(other, *words):
        argv = ["seeds.py", f"{program} --bonus 0", other, "--seeds", "2", "--output-dir", f"{tmp_path}/out", *words]
        monkeypatch.setattr(sys, "argv", argv)
        seeds.main()
        return len(made.read_text().split()), capsys.readouterr().out

    count, said = compare(f"{program} --bonus 1")
    assert count == 4 and "time/" not in said and len(list((tmp_path / "out").glob("*.png"))) == 1
    assert [row for row in said.splitlines() if "score" in row and "21 ± 7.1" in row and "22.5 ± 7.8" in row]
    assert compare(f"{program} --bonus 1")[0] == 4
    assert [row for row in compare(f"{tmp_path}/other/program.py --bonus 0")[1].splitlines() if "value" in row]
    program.write_text(PROGRAM + "\n")
    assert compare(f"{tmp_path}/other/program.py --bonus 0")[0] == 6
    with pytest.raises(SystemExit, match="not in all runs: .'reward'."):
        compare(f"{tmp_path}/other/program.py --bonus 0", "--metrics", "reward")


def test_which_runs_are_kept(tmp_path):
    """A changed reward is run again, however its flag is written. A run that Ctrl-C ends would look complete."""
    program, reward, files = tmp_path / "program.py", tmp_path / "r.py", []
    for sign, text in (" ", "a"), (" ", "b"), ("=", "b"), ("=", "c"):
        reward.write_text(text)
        files += [run.file for run in seeds.plan(f"{program} --reward-fn{sign}{reward}:f", 1, tmp_path)]
    assert len({*files}) == 4
    handles = "import os, signal\nif signal.getsignal(2) != signal.SIG_IGN:\n    signal.signal(2, print)\n"
    program.write_text(f"{handles}os.kill(os.getpid(), 2)\n")
    [run] = seeds.plan(str(program), 1, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        seeds.train(run)
    assert not run.file.exists()


WRONG = {
    ("nosuch.py",): "'nosuch.py' should begin with the path of a script",
    ("other.py", "--jobs", "0"): "at least two seeds and one job are needed",
    ("program.py",): "two different sides",
    ("program.py --seed 3",): "the seed and the folder of a run are set here",
    ("program.py --bonus -1",): "no bonus below 0",
    ("other.py",): "It logged no metrics",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_inputs_end_at_once_in_one_sentence(words, tmp_path):
    for name, text in {"program.py": PROGRAM, "value.py": "VALUE = 1", "other.py": "print('hello')"}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, ROOT / "tools/seeds.py", "program.py", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode and WRONG[words] in done.stderr and "Traceback" not in done.stderr


def test_a_fork_is_not_overwritten(tmp_path, monkeypatch):
    """It may hold work, and git ignores it."""
    for name in ("ppo.py", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(make_fork, "ROOT", tmp_path)
    fork = tmp_path / "fork.py"
    fork.write_text("mine")
    monkeypatch.setattr(sys, "argv", ["make_fork.py", "A metric", "--script", "ppo.py"])
    with pytest.raises(SystemExit, match="fork.py exists: rename it, or overwrite it with --force"):
        make_fork.main()
    assert fork.read_text() == "mine"
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--force"])
    make_fork.main()
    assert "def train(args)" in fork.read_text()
