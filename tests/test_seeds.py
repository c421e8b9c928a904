"""tools/seeds.py: what it says of paired seeds, and which runs it makes."""

import sys

import pytest
from sources import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import seeds

PROGRAM = """
import sys
import wandb
name, bonus, seed = sys.argv[0], *map(float, sys.argv[2:5:2])
if bonus < 0:
    sys.exit("no bonus below 0")
open(name + ".made", "a").write("run ")
for step in range(9):
    wandb.log({"score": 10 * seed + bonus * seed + step, "time/update": seed}, step=step)
"""


STOPPED = """
import os
import signal
def stop(*_):
    "As the scripts do."
if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, stop)
os.kill(os.getpid(), signal.SIGINT)
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


@pytest.mark.parametrize("sign", [" ", "="])
def test_a_changed_reward_is_run_again(tmp_path, sign):
    """However its flag is written."""
    program, reward = tmp_path / "program.py", tmp_path / "reward.py"
    program.touch()
    names = set()
    for text in ("a = 1", "a = 2", "a = 2"):
        reward.write_text(text)
        [run] = seeds.plan(f"{program} --reward-fn{sign}{reward}:score", 1, tmp_path)
        names.add(run.file.name)
    assert len(names) == 2


def test_a_run_that_is_stopped_is_not_kept(tmp_path):
    """A script that ends by itself after Ctrl-C would leave a run that looks complete."""
    program = tmp_path / "program.py"
    program.write_text(STOPPED)
    [run] = seeds.plan(str(program), 1, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        seeds.train(run)
    assert not run.file.exists()


def test_sides_have_modules_of_their_own(tmp_path, monkeypatch):
    """Each script imports the module beside it, though both have one name."""
    for side in (1, 2):
        (tmp_path / f"{side}").mkdir()
        (tmp_path / f"{side}/value.py").write_text(f"VALUE = {side}")
        (tmp_path / f"{side}/program.py").write_text(
            "import wandb\nfrom value import VALUE\nwandb.log({'x': VALUE}, step=1)"
        )
    sides = [f"{tmp_path}/{side}/program.py" for side in (1, 2)]
    monkeypatch.setattr(sys, "argv", ["seeds.py", *sides, "--seeds", "2", "--output-dir", f"{tmp_path}/out"])
    monkeypatch.setattr(seeds, "draw", lambda *_: None)
    ends = []
    monkeypatch.setattr(seeds, "show", ends.append)
    seeds.main()
    assert ends[0]["x"] == ([1, 1], [2, 2])


def test_runs_are_made_once_until_their_program_changes(tmp_path, monkeypatch, capsys, pictures):
    """The ends are those of the last five updates, and differ by the bonus times the seed; clocks are left out."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    made = tmp_path / "program.py.made"

    def compare(bonus, *words):
        sides = [f"{program} --bonus {x}" for x in (0, bonus)]
        argv = ["seeds.py", *sides, "--seeds", "3", "--output-dir", f"{tmp_path}/out", *words]
        monkeypatch.setattr(sys, "argv", argv)
        seeds.main()
        return len(made.read_text().split()), capsys.readouterr().out

    count, said = compare(1)
    assert count == 6 and "time/" not in said
    assert [row for row in said.splitlines() if "score" in row and "26 ± 10" in row and "28 ± 11" in row]
    assert compare(1)[0] == 6
    assert compare(2)[0] == 9
    assert len(list((tmp_path / "out").glob("*.png"))) == 2
    with pytest.raises(SystemExit, match="no bonus below 0"):
        compare(-1)
    program.write_text(PROGRAM + "\n")
    assert compare(2)[0] == 15
    for bonus, words in (0, []), (2, ["--seeds", "1"]), (2, ["--metrics", "reward"]):
        with pytest.raises(SystemExit):
            compare(bonus, *words)
