"""experiments/run.py: which runs are missing, and what is made first."""

import json
import sys

from sources import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import record  # noqa: E402
import run  # noqa: E402


def test_a_run_is_missing_if_it_is_not_on_record_with_its_command(tmp_path, monkeypatch):
    """Lines without a digest are of older commands, and count."""
    runs = record.runs_of_group("takeoff")[:4]
    digests = [runs[0].digest, "another", None]
    lines = [{"run": one.name, "seed": one.seed, "digest": digest} for one, digest in zip(runs, digests)]
    lines[2].pop("digest")
    (tmp_path / "takeoff.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(record, "LEARNED", tmp_path)
    assert run.missing_of(runs) == [runs[1], runs[3]]


def test_a_changed_command_or_diff_changes_the_digest(monkeypatch):
    fork = next(one for one in record.runs_of_group("forks") if "fork" in one.options)
    digests = [fork.digest]
    fork.command = [*fork.command, "--bf16"]
    digests.append(fork.digest)
    monkeypatch.setattr(record, "diff_of", lambda one: "another")
    assert len({*digests, fork.digest}) == 3


def test_only_what_the_runs_name_is_made_first(tmp_path, monkeypatch):
    """And what that is made of, before it."""
    made = []
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run.subprocess, "run", lambda command, **_: made.append(command[1]))
    runs = {one.name: one for one in record.runs_of_group("real")}
    run.make_needs("real", [runs["grpo"]])
    assert made == ["tools/smollm2.py", "experiments/real_data.py"]
    made.clear()
    run.make_needs("real", [runs["ppo, 0"]])
    assert made[1:] == ["tools/smollm2.py", "experiments/real_data.py", "experiments/real_pairs.py", "reward_model.py"]
