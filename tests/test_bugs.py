"""The museum of bugs, exercises/bugs: each can be planted and is caught."""

import sys
import tomllib

import pytest
from sources import ROOT, text_of

FOLDER = "exercises/bugs"
BUGS = tomllib.loads(text_of(f"{FOLDER}/bugs.toml"))["bug"]


@pytest.fixture
def play(monkeypatch):
    """The module; it finds checks.py."""
    monkeypatch.syspath_prepend(ROOT / FOLDER)
    import play

    yield play
    for name in ("play", "checks"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["name"])
def test_a_bug_is_caught_and_the_healthy_file_is_not(bug, play):
    """By the property that the gallery names. All other checks of the file hold, so that its sentence comes alone."""
    import checks

    holds = getattr(checks, bug["property"])
    assert holds in checks.PROPERTIES[bug["script"]]
    for text, is_healthy in ((play.healthy(bug["script"]), True), (play.plant(bug), False)):
        seen = holds(lambda text=text, **settings: play.small(bug["script"], text, **settings))
        assert seen == is_healthy


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["name"])
def test_an_answer_is_right_on_the_lines_that_differ(bug, play):
    for line in play.changed(play.healthy(bug["script"]), play.plant(bug)):
        function = play.place(play.plant(bug), line)
        assert play.judge(bug, f"{function}:{line}").startswith("Yes")
        assert "Yes" not in play.judge(bug, f"{function}:{line + 60}")
