"""Evaluation on held-out prompts during a run, and the sampler beside the trainer."""

import json

import pytest
from runs import ON_PROMPTS, assert_same_run, cut, lines_of, main, run, script, slow_but, untimed, words_of, write_rows
from runs import weights_of

NOTE = """
import json

def words(prompts, completions, ended, **columns):
    rewards = [len(x) % 7 + 0.1 * len(y.split()) for x, y in zip(prompts, completions)]
    with open(__file__ + "l", "a") as file:
        print(json.dumps([prompts, rewards, ended]), file=file)
    return rewards
"""


@pytest.fixture
def held_out(tiny, tmp_path):
    """held_out("ppo") -> settings of a run of three updates that has five held-out rows, and evaluates after two."""
    rows = [{"prompt": f"The film {i}", "answer": i} for i in range(5)]

    def make(name):
        settings = dict(tiny[name], num_eval_prompts=4, eval_steps=2, save_steps=1, save_total_limit=9)
        if name == "agent":
            rows[:] = [{"prompt": "1 to 15 :", "number": n} for n in range(1, 6)]
            settings["dataset"] = str(tmp_path / "data")
            (tmp_path / "data").mkdir(exist_ok=True)
            write_rows(tmp_path / "data/train.jsonl", [{"prompt": "1 to 15 :", "number": n} for n in range(6, 16)])
            write_rows(tmp_path / "data/validation.jsonl", rows)
            return settings
        (tmp_path / "note.py").write_text(NOTE)
        settings |= dict(rloo_k=4) if name == "rloo" else {}
        return settings | dict(reward_fn=(f"{tmp_path}/note.py:words",), missing_eos_penalty=0.0)

    return make


def evaluated(lines):
    """The numbers of the lines that have an evaluation."""
    return [i for i, line in enumerate(lines) if any(name.startswith("eval/") for name in line)]


@pytest.mark.parametrize("name", slow_but(["ppo"], ON_PROMPTS))
def test_evaluation_changes_no_number_of_the_training(name, held_out, tmp_path):
    """It comes before the first update, after every eval_steps, and after the last one; and resumed runs have it."""
    settings = held_out(name)
    lines = run(name, tmp_path / "with", **settings)
    plain = run(name, tmp_path / "without", **settings | dict(num_eval_prompts=0))
    assert evaluated(lines) == [0, 2, 3] and not evaluated(plain)
    training = [{key: x for key, x in line.items() if not key.startswith("eval/")} for line in lines[1:]]
    assert untimed(training) == untimed(plain)
    a, b = weights_of(tmp_path / "with"), weights_of(tmp_path / "without")
    assert all((a[key] == b[key]).all() for key in a)
    folder = cut(tmp_path / "with", tmp_path / "again", 1)
    run(name, tmp_path / "again", resume=str(folder), **settings)
    assert_same_run(tmp_path / "with", tmp_path / "again")


@pytest.mark.parametrize(("name", "answers"), [("ppo", 1), ("rloo", 4), ("grpo", 4)])
def test_evaluation_by_hand(name, answers, held_out, tmp_path):
    """The scores of one response (rloo.py, grpo.py: of each group) to the first held-out prompts. With the same random
    numbers in each evaluation, a policy that stands still has the same scores."""
    lines = run(name, tmp_path / "run", **held_out(name))
    calls = [json.loads(line) for line in (tmp_path / "note.pyl").read_text().splitlines()]
    first = calls[0]
    validation = [json.loads(line)["prompt"] for line in open(f"{held_out(name)['dataset']}/validation.jsonl")]
    assert first[0] == [prompt for prompt in validation[:4] for _ in range(answers)]
    assert lines[0]["eval/objective/scores"] == pytest.approx(sum(first[1]) / len(first[1]), abs=1e-6)
    if name == "rloo":
        groups = [first[1][i : i + 4] for i in range(0, 16, 4)]
        assert lines[0]["eval/objective/equal_groups"] == sum(len(set(scores)) == 1 for scores in groups) / 4
    assert lines[0]["eval/rewards/words/mean"] == lines[0]["eval/objective/scores"]
    if name != "grpo":
        assert lines[0]["eval/val/num_eos_tokens"] == sum(first[2])
        assert abs(lines[0]["eval/objective/kl"]) < 1e-4 < abs(lines[-1]["eval/objective/kl"])
    assert calls[-1][0] == first[0]
    assert lines[-1]["eval/objective/scores"] == pytest.approx(sum(calls[-1][1]) / len(first[1]))
    run(name, tmp_path / "still", **held_out(name) | dict(learning_rate=1e-20))
    assert json.loads((tmp_path / "note.pyl").read_text().splitlines()[-1]) == first


def test_memorised_prompts_are_not_held_out_ones(tmp_path):
    """A reward for the words of eight prompts rises on those, and not on others."""
    (tmp_path / "r.py").write_text("def known(prompts, **_):\n    return [float('film' in x) for x in prompts]\n")
    write_rows(tmp_path / "train.jsonl", [{"prompt": "The film"}] * 8)
    write_rows(tmp_path / "validation.jsonl", [{"prompt": "A book"}] * 8)
    settings = dict(dataset=str(tmp_path), batch_size=8, total_episodes=8, response_length=2, num_eval_prompts=8)
    settings |= dict(reward_fn=(f"{tmp_path}/r.py:known",), missing_eos_penalty=0.0)
    first, last = run("ppo", tmp_path / "run", **settings)
    assert last["objective/scores"] == 1 and first["eval/objective/scores"] == last["eval/objective/scores"] == 0


@pytest.mark.parametrize(("code", "length", "is_told"), [("1.0", 48, True), ("len(x)", 1, True), ("len(x)", 48, False)])
def test_hopeless_runs_are_told_at_once(code, length, is_told, held_out, tmp_path, capsys):
    """Equal scores, or responses that do not end."""
    (tmp_path / "r.py").write_text(f"def f(completions, **_):\n    return [float({code}) for x in completions]\n")
    settings = held_out("ppo") | dict(reward_fn=(f"{tmp_path}/r.py:f",), response_length=length)
    run("ppo", tmp_path / "run", **settings)
    assert ("--response-length" in capsys.readouterr().out) == is_told


@pytest.mark.parametrize("name", slow_but(["ppo"], ON_PROMPTS))
def test_a_sampler_with_another_cache_is_refused(name, tiny, tmp_path, monkeypatch):
    """With bfloat16 the trainer reads what the sampler wrote: they differ by rounding alone, or the run ends."""
    settings = tiny[name] | dict(bf16=True)
    first, *_ = run(name, tmp_path / "right", **settings)
    assert 0 <= first["sampling/sampling_logp_difference/mean"] <= first["sampling/sampling_logp_difference/max"] < 0.5
    cache = script(name).OneTypeCache
    update = cache.update
    monkeypatch.setattr(cache, "update", lambda self, keys, values, *rest: update(self, keys, -values, *rest))
    with pytest.raises(SystemExit, match="^error: "):
        run(name, tmp_path / "wrong", **settings)


def test_the_run_says_what_it_was(held_out, tmp_path, capsys):
    """It prints the data, and args.json has settings and revision; the command line of a user makes the same."""
    settings = {key: x for key, x in held_out("ppo").items() if key != "reward_fn"}
    main("ppo", *words_of(**settings, device="cpu", output_dir=tmp_path / "run", num_sample_generations=0))
    args = json.loads((tmp_path / "run/args.json").read_text())
    said = capsys.readouterr().out
    assert {key: args[key] for key in settings} == settings and args["revision"]
    assert f"train: 64 rows of {settings['dataset']}/train.jsonl" in said and "validation: 64 rows" in said
    assert evaluated(lines_of(tmp_path / "run")) == [0, 2, 3]
