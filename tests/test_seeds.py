"""tools/seeds.py: what it says of paired seeds, and which runs it makes."""

import subprocess
import sys

import pytest
from sources import ROOT

sys.path.insert(0, str(ROOT / "tools"))
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


def test_what_is_shown(capsys):
    """A difference has a star on either side of 0; the end of a run is its last five updates, if they have it."""
    shown = {"up": ([1, 2, 3], [11, 12.1, 13]), "down": ([11, 12.1, 13], [1, 2, 3]), "level": ([1, 2, 3], [3, 2, 1.5])}
    seeds.show(shown)
    rows = [row for row in capsys.readouterr().out.splitlines() if "±" in row]
    assert ["*" in row for row in rows] == [True, True, False]
    lines = [{"loss": i} | ({"eval": i} if i % 4 == 0 else {}) for i in range(1, 13)]
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


@pytest.mark.parametrize("sign", [" ", "="])
def test_a_changed_reward_is_run_again(tmp_path, sign):
    """However its flag is written."""
    names = set()
    for text in ("a = 1", "a = 2", "a = 2"):
        (tmp_path / "r.py").write_text(text)
        names |= {
            run.file.name for run in seeds.plan(f"program.py --reward-fn{sign}{tmp_path}/r.py:score", 1, tmp_path)
        }
    assert len(names) == 2


WRONG = {
    "no script": ("nosuch.py", [], "'nosuch.py' should begin with the path of a script"),
    "a quote": ("program.py '", [], "No closing quotation"),
    "no job": ("other.py", ["--jobs", "0"], "at least two seeds and one job are needed"),
    "one seed": ("other.py", ["--seeds", "1"], "at least two seeds"),
    "itself": ("program.py", [], "two different sides"),
    "a seed": ("program.py --seed 3", [], "the seed and the folder of a run are set here"),
    "what the script refuses": ("program.py --bonus -1", [], "no bonus below 0"),
    "no metrics": ("other.py", [], "It logged no metrics"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_inputs_end_at_once_in_one_sentence(what, tmp_path):
    side, words, sentence = WRONG[what]
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "value.py").write_text("VALUE = 1")
    (tmp_path / "other.py").write_text("print('hello')")
    command = [sys.executable, ROOT / "tools/seeds.py", side, "program.py", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode and sentence in done.stderr and "Traceback" not in done.stderr
