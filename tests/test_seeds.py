"""tools/seeds.py: what is said of paired seeds, and which runs are made."""

import sys

import pytest
from sources import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import seeds

pytest.importorskip("scipy", reason="pip install -r requirements-more.txt")

PROGRAM = """
import sys, wandb
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
bonus, seed = float(flags.get("--bonus", 0)), float(flags["--seed"])
open(sys.argv[0] + ".made", "a").write("run ")
for step in range(9):
    wandb.log({"score": 10 * seed + bonus * seed + step, "eps": seed}, step=step)
"""


def test_the_statistics_of_three_pairs_by_hand():
    """d = 1, 2, 3 deviates by 1; Student's t of two degrees is 4.303; 7.849 (1 / 2)^2 = 1.96 seeds."""
    root = 3**-0.5
    wanted = {"difference": 2, "error": root, "low": 2 - 4.3027 * root, "high": 2 + 4.3027 * root}
    assert seeds.judge([1, 5, 9], [2, 7, 12]) == pytest.approx(wanted | {"higher": 3, "needed": 2}, abs=1e-4)
    assert seeds.judge([0, 0, 0], [1, 5, 0])["needed"] == 14  # d = 2 with a deviation of sqrt 7: 7.849 * 7 / 4
    assert seeds.judge([1, 2], [2, 1])["needed"] == float("inf")
    lines = [{"loss": i} | ({"eval": i} if i % 4 == 0 else {}) for i in range(1, 13)]  # the end: the last five updates
    assert (seeds.end(lines, "loss"), seeds.end(lines, "eval"), seeds.end(lines[:3], "eval")) == (10, 10, None)


@pytest.mark.slow
def test_runs_are_made_once_until_their_program_changes(tmp_path, monkeypatch, capsys):
    """The ends are those of the last five updates, and differ by the bonus times the seed; clocks are left out."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    sides = [f"{program} --bonus 0", f"{program} --bonus 1"]
    monkeypatch.setattr(sys, "argv", ["seeds.py", *sides, "--seeds", "2", "--output-dir", f"{tmp_path}/out"])
    monkeypatch.setattr(seeds, "draw", lambda *_: None)
    for change, count in (("", 4), ("", 4), ("\n", 8)):
        program.write_text(PROGRAM + change)
        seeds.main()
        assert len((tmp_path / "program.py.made").read_text().split()) == count
        said = capsys.readouterr().out
        assert [row for row in said.splitlines() if "score" in row and "21 ± 7.1" in row and "22.5 ± 7.8" in row]
        assert "eps" not in said
