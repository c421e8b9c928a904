"""tools/seeds.py and make_fork.py: what is said of paired seeds, which runs are made, what is not overwritten."""

import subprocess
import sys

import pytest
from sources import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import make_fork
import seeds

PROGRAM = """
import sys
import wandb
from value import VALUE
name, bonus, seed = sys.argv[0], *map(float, ([0, 0, 0] + sys.argv)[-5:-2:2])
if bonus < 0:
    sys.exit("no bonus below 0")
open(name + ".made", "a").write("run ")
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


def test_a_run_that_is_stopped_is_not_kept(tmp_path):
    """A script that ends by itself after Ctrl-C, as ours do, would leave a run that looks complete."""
    (tmp_path / "program.py").write_text(
        "import os, signal\nif signal.getsignal(signal.SIGINT) != signal.SIG_IGN:\n"
        "    signal.signal(signal.SIGINT, lambda *_: None)\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    [run] = seeds.plan(f"{tmp_path}/program.py", 1, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        seeds.train(run)
    assert not run.file.exists()


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


def test_a_changed_reward_is_run_again(tmp_path):
    """However its flag is written."""
    for sign in " =":
        names = set()
        for text in ("a = 1", "a = 2", "a = 2"):
            (tmp_path / "r.py").write_text(text)
            names |= {run.file for run in seeds.plan(f"program.py --reward-fn{sign}{tmp_path}/r.py:score", 1, tmp_path)}
        assert len(names) == 2


WRONG = {
    ("nosuch.py",): "'nosuch.py' should begin with the path of a script",
    ("program.py '",): "No closing quotation",
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
    for name in ("ppo.py", *make_fork.PAGES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
    monkeypatch.setattr(make_fork, "ROOT", tmp_path)
    for words, text in (["--script", "ppo.py"], "mine"), (["--script", "ppo.py", "--force"], ""):
        (tmp_path / "fork.py").write_text("mine")
        monkeypatch.setattr(sys, "argv", ["make_fork.py", "A metric", *words])
        if text:
            with pytest.raises(SystemExit, match="fork.py exists: rename it, or overwrite it with --force"):
                make_fork.main()
        else:
            make_fork.main()
        assert ((tmp_path / "fork.py").read_text("utf-8") == "mine") == bool(text)
