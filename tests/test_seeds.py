"""tools/seeds.py: what is said of paired seeds."""

import sys

import pytest
from sources import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import seeds

pytest.importorskip("scipy", reason="pip install -r requirements-more.txt")


def test_the_statistics_of_three_pairs_by_hand():
    """d = 1, 2, 3 deviates by 1; Student's t of two degrees is 4.303; 7.849 (1 / 2)^2 = 1.96 seeds."""
    root = 3**-0.5
    wanted = {"difference": 2, "error": root, "low": 2 - 4.3027 * root, "high": 2 + 4.3027 * root}
    assert seeds.judge([1, 5, 9], [2, 7, 12]) == pytest.approx(wanted | {"higher": 3, "needed": 2}, abs=1e-4)
    assert seeds.judge([0, 0, 0], [1, 5, 0])["needed"] == 14  # d = 2 with a deviation of sqrt 7: 7.849 * 7 / 4
    assert seeds.judge([1, 2], [2, 1])["needed"] == float("inf")
    lines = [{"loss": i} | ({"eval": i} if i % 4 == 0 else {}) for i in range(1, 13)]  # the end: the last five updates
    assert (seeds.end(lines, "loss"), seeds.end(lines, "eval"), seeds.end(lines[:3], "eval")) == (10, 10, None)
