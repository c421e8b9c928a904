"""Old names, until all tests import from runs."""

from runs import GOLD, lines_of, run, untimed  # noqa: F401
from sources import ROOT  # noqa: F401
