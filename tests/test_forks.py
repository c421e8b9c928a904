"""docs/fork.md and docs/diffs/questions.md: their diffs fit the short files and ppo.py, and do what the pages say."""

import shutil
import sys

import pytest
from runs import run
from sources import ROOT, load, text_of

import ppo

sys.path.insert(0, str(ROOT / "experiments"))
import record  # noqa: E402  (which adds tools/ to the path)
from make_fork import PAGES, apply, main, read_diffs  # noqa: E402

DIFFS = {page: read_diffs(text_of(page)) for page in ("docs/fork.md", "docs/diffs/questions.md")}
USED = {("docs/fork.md", name, script) for name in DIFFS["docs/fork.md"] for script in ("lecture/ppo.py", "ppo.py")}
USED -= {("docs/fork.md", "A reward", "ppo.py")}  # which has --reward-fn
USED |= {("docs/diffs/questions.md", name, "lecture/grpo.py") for name in DIFFS["docs/diffs/questions.md"]}
RUNS = record.runs_of_group("questions")
USED |= {("docs/diffs/questions.md", run.options["fork"], run.command[0]) for run in RUNS if "fork" in run.options}


@pytest.mark.parametrize(("page", "name", "script"), sorted(USED))
def test_every_diff_fits_its_file(page, name, script):
    """What comes out is another program."""
    fork = apply(read_diffs(text_of(page), script)[name], text_of(script))
    compile(fork, name, "exec")
    assert fork != text_of(script)


@pytest.mark.parametrize("name", ["A metric", "A loss term"])
def test_a_fork_of_the_full_script_does_what_its_page_says(name, tmp_path, monkeypatch, tiny):
    """Another metric, and nothing else; a loss term that is small, and never negative."""
    (tmp_path / "docs/diffs").mkdir(parents=True)
    for file in ("ppo.py", *PAGES):
        shutil.copy(ROOT / file, tmp_path / file)
    monkeypatch.setattr("make_fork.ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_fork.py", name, "--script", "ppo.py"])
    main()
    with pytest.raises(SystemExit, match="fork.py exists"):  # it may hold work
        main()
    models = dict(model=f"{ROOT}/toy/sft", reward_model=f"{ROOT}/toy/reward_model")
    settings = tiny["ppo"] | models | dict(total_episodes=8)
    (line,) = run(load(tmp_path / "fork.py", "forked"), tmp_path / "run", **settings)
    (plain,) = run(ppo, tmp_path / "plain", **settings)
    assert line["objective/scores"] == plain["objective/scores"]
    change = abs(line["loss/policy_avg"] - plain["loss/policy_avg"])
    assert change == 0 if name == "A metric" else 0 < change < 0.1
    if name == "A metric":
        assert line["policy/clipfrac_avg"] <= line["policy/outside_avg"] < 1
