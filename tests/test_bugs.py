"""The museum of bugs, exercises/bugs: each can be planted and is caught."""

import sys
import tomllib

import pytest
from sources import ROOT, text_of

FOLDER = "exercises/bugs"
BUGS = tomllib.loads(text_of(f"{FOLDER}/bugs.toml"))["bug"]
of_bugs = pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["name"])


@pytest.fixture
def play(monkeypatch, tmp_path):
    """The module, which leaves its files elsewhere; it finds checks.py."""
    monkeypatch.syspath_prepend(ROOT / FOLDER)
    import play

    monkeypatch.setattr(play, "FOLDER", tmp_path)
    yield play
    for name in ("play", "checks"):
        sys.modules.pop(name, None)


def call(play, monkeypatch, capsys, *words) -> str:
    monkeypatch.setattr(sys, "argv", ["play.py", *words])
    play.main()
    return capsys.readouterr().out


@of_bugs
def test_a_bug_is_caught_and_the_healthy_file_is_not(bug, play):
    """By the property that the gallery names. All other checks of the file hold, so that its sentence comes alone."""
    import checks

    holds = getattr(checks, bug["property"])
    assert holds in checks.PROPERTIES[bug["script"]]
    for text, is_healthy in ((play.healthy(bug["script"]), True), (play.plant(bug), False)):
        seen = holds(lambda text=text, **settings: play.small(bug["script"], text, **settings))
        assert seen == is_healthy


@of_bugs
def test_an_answer_is_judged(bug, play):
    """Every line that differs, and not the line far from it, nor another function."""
    for line in play.changed(play.healthy(bug["script"]), play.plant(bug)):
        function = play.place(play.plant(bug), line)
        assert play.judge(bug, f"{function}:{line}").startswith("Yes")
        near = play.judge(bug, f"{function}:{line + 60}")
        assert "Yes" not in near and not near.startswith("No,")
    assert play.judge(bug, "make_seed:1").startswith("No, make_seed")
    assert play.judge(bug, "nosuch:1").startswith(f"{bug['script']}.py has no function nosuch")


def test_a_student_finds_a_bug(play, monkeypatch, capsys):
    """Curves, a look at the copy, its repair, and the check of that: the bug whose runs are the shortest."""
    monkeypatch.setattr(play, "RUNS", {"grpo": {"total_episodes": 128}})
    number = next(str(n) for n, bug in enumerate(BUGS, 1) if bug["name"] == "stop")
    assert "--answer" in call(play, monkeypatch, capsys, number)
    file = play.FOLDER / f"{number}/grpo.py"
    assert file.read_text() == play.plant(BUGS[int(number) - 1])
    broken = " ".join(sys.modules["checks"].stop_is_trained.__doc__.split())
    assert call(play, monkeypatch, capsys, number, "--check").strip() == broken
    assert "nanochat" in call(play, monkeypatch, capsys, number, "--reveal")
    file.write_text(play.healthy("grpo"))
    assert call(play, monkeypatch, capsys, number, "--check").startswith("All checks pass, and")
