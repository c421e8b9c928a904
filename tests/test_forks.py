"""docs/fork.md and docs/diffs/questions.md: their diffs fit the short files and scripts, and do what the pages say."""

import shutil
import sys

import on_many_processes
import pytest
import torch
from runs import assert_close_runs, assert_same_run, run, slow_but, untimed, watch, words_of, write_rows
from safetensors.torch import load_file
from sources import ROOT, load, text_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo

sys.path.insert(0, str(ROOT / "experiments"))
import record  # noqa: E402  (which adds tools/ to the path)
from make_fork import PAGES, apply, main, read_diffs, script_of  # noqa: E402

DIFFS = {page: read_diffs(text_of(page)) for page in ("docs/fork.md", "docs/diffs/questions.md")}
OF_PPO = DIFFS["docs/fork.md"]
USED = {("docs/fork.md", name, script) for name in OF_PPO for script in (script_of(OF_PPO[name]), "ppo.py")}
USED -= {("docs/fork.md", name, "ppo.py") for name in ("A reward", "REINFORCE++'s normalisation")}  # it has no place
USED |= {("docs/diffs/questions.md", name, "lecture/grpo.py") for name in DIFFS["docs/diffs/questions.md"]}
MODELS = dict(model=f"{ROOT}/toy/sft", reward_model=f"{ROOT}/toy/reward_model")
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
    settings = tiny["ppo"] | MODELS | dict(total_episodes=8)
    (line,) = run(load(tmp_path / "fork.py", "forked"), tmp_path / "run", **settings)
    (plain,) = run(ppo, tmp_path / "plain", **settings)
    assert line["objective/scores"] == plain["objective/scores"]
    change = abs(line["loss/policy_avg"] - plain["loss/policy_avg"])
    assert change == 0 if name == "A metric" else 0 < change < 0.1
    if name == "A metric":
        assert line["policy/clipfrac_avg"] <= line["policy/outside_avg"] < 1


# --- What left the script


def write_fork(folder, name):
    """A copy of ppo.py with this diff."""
    fork = apply(read_diffs(text_of("docs/fork.md"), "ppo.py")[name], text_of("ppo.py"))
    (folder / "fork.py").write_text(fork)
    return folder / "fork.py"


@pytest.fixture
def train(tmp_path, tiny, monkeypatch):
    """train(name, function, **settings) -> the metrics of two updates of a fork, and what each call of this function of
    it returned and was given."""

    def train_fork(name, function, **settings):
        fork = load(write_fork(tmp_path, name), "forked")
        calls = []
        watch(monkeypatch, fork, function, lambda *call: calls.append(call))
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        settings = dict(total_episodes=16, temperature=1.0, learning_rate=1e-3) | settings
        return run(fork, folder, **tiny["ppo"] | MODELS | settings), calls

    return train_fork


OFF = ["Score scaling", "Early stop", "Exact KL", "Pretraining texts", "Moving average"]


@pytest.mark.parametrize("name", slow_but(["Score scaling"], OFF))
def test_a_fork_whose_settings_are_off_is_ppo(name, train, tmp_path, tiny):
    lines, _ = train(name, "update")
    settings = dict(total_episodes=16, temperature=1.0, learning_rate=1e-3)
    assert untimed(lines) == untimed(run(ppo, tmp_path / "plain", **tiny["ppo"] | MODELS | settings))


@pytest.mark.parametrize("scaling", ["std", "norm"])
def test_score_scaling(scaling, train, tmp_path):
    """By mean and deviation of all scores so far; what is needed for that is in checkpoints."""
    saved = dict(save_steps=1, save_total_limit=1)
    _, calls = train("Score scaling", "update", score_scaling=scaling, score_clip=1.5, kl_coef=0.0, **saved)
    scores = torch.empty(0)
    for *_, rollout, _ in calls:
        scores = torch.cat([scores, rollout.scores])
        shift = scores.mean() if scaling == "norm" else 0.0
        scaled = ((rollout.scores - shift) / scores.std()).clamp(-1.5, 1.5)
        assert torch.allclose(rollout.rewards.sum(1), scaled, atol=1e-5)
    (file,) = tmp_path.glob("run*/checkpoints/step-00000002.pt")
    sums = torch.load(file, weights_only=True)["carry"]["scores"]
    assert sums == pytest.approx([len(scores), scores.sum().item(), (scores**2).sum().item()])


def test_early_stop(train):
    """After one step the policy is too far for the second pass; a step with a large ratio does not end the update."""
    lines, calls = train("Early stop", "policy_loss", target_kl=1e-6, num_ppo_epochs=3)
    assert [line["val/skipped_steps"] for line in lines] == [2, 2] and len(calls) == 2 * 2
    lines, calls = train("Early stop", "policy_loss", ratio_threshold=1 + 1e-9, num_ppo_epochs=3)
    assert sum(line["val/skipped_steps"] for line in lines) > 0 and len(calls) == 2 * 3


def test_shared_critic(train):
    """It reads the policy's states, adds only its head to the optimiser, and its loss moves the policy, too."""
    lines, calls = train("Shared critic", "update", vf_coef=10.0)
    _, policy, critic, optimizer, rollout, args = calls[-1]
    assert [p.numel() for p in optimizer.param_groups[1]["params"]] == [policy.config.hidden_size, 1]
    assert all(0 < line["loss/value_avg"] < 10 and line["val/grad_norm"] > 0 for line in lines)
    other, _ = train("Shared critic", "update", vf_coef=0.1)
    assert other[0]["policy/grad_norm"] != pytest.approx(lines[0]["policy/grad_norm"], rel=0.01)
    with torch.no_grad():
        _, states = sys.modules["forked"].response_forward(policy, rollout, args)
        for ids, real, mask, row in zip(*rollout.joined(), rollout.mask, states):
            by_hand = policy.base_model(ids[None, real > 0]).last_hidden_state[0, -mask.sum() - 1 : -1]
            assert torch.allclose(row[mask], by_hand, atol=1e-4)


def test_exact_kl(train):
    """A sum over the vocabulary at each token, of models of which one has moved."""
    lines, calls = train("Exact KL", "exact_kl", kl_estimator="full")
    kl, policy, reference, r, args = calls[-1]
    assert kl[r.mask].min() >= -1e-6 and lines[1]["objective/kl"] == pytest.approx(kl[r.mask].sum().item() / 8)
    with torch.no_grad():
        kl = sys.modules["forked"].exact_kl(policy, reference, r, args)
        for ids, real, mask, row in zip(*r.joined(), r.mask, kl):
            p, q = (model(ids[None, real > 0]).logits[0, -mask.sum() - 1 : -1] for model in (policy, reference))
            by_hand = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
            assert torch.allclose(row[mask], by_hand, atol=1e-4) and by_hand.max() > 1e-3


def test_pretraining_texts(train, tmp_path):
    """With one text, the loss is -log pi of its tokens; its gradient has the weight ptx_coef."""
    text = "The film is a love story of two people who never meet."
    texts = dict(pretrain_data=write_rows(tmp_path / "texts.jsonl", [{"text": text}]), num_ppo_epochs=1)
    lines, _ = train("Pretraining texts", "update", **texts, ptx_coef=1e4, max_grad_norm=1e9)
    model, tokenizer = (kind.from_pretrained(ROOT / "toy/sft") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert lines[0]["loss/ptx"] == pytest.approx(loss.item(), rel=1e-4) and lines[1]["loss/ptx"] < loss
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert lines[0]["policy/grad_norm"] == pytest.approx(1e4 * norm, rel=1e-2)


def test_critic_warm_up(train, tmp_path):
    """The policy stays as it was for one update, but not for two; the critic learns from the first."""
    policy, reward = (load_file(ROOT / f"toy/{name}/model.safetensors") for name in ("sft", "reward_model"))
    for num_updates in (1, 2):
        _, calls = train("Critic warm-up", "update", total_episodes=8 * num_updates, critic_warmup_updates=1)
        after = load_file(sorted(tmp_path.glob("run*"))[-1] / "model.safetensors")
        assert all(torch.equal(x, policy[name]) for name, x in after.items()) == (num_updates == 1)
        critic = calls[0][2]
        assert not torch.equal(critic.score.weight, reward["score.weight"])


def test_moving_average(train, tmp_path):
    """After one step: 0.9 of the weights before and 0.1 of those after it."""
    train("Moving average", "update", total_episodes=8, num_ppo_epochs=1, ema_decay=0.9)
    (folder,) = tmp_path.glob("run*")
    before, after = load_file(ROOT / "toy/sft/model.safetensors"), load_file(folder / "model.safetensors")
    for name, x in load_file(folder / "ema/model.safetensors").items():
        assert torch.allclose(x, 0.9 * before[name] + 0.1 * after[name], atol=1e-7)
        assert not torch.equal(before[name], after[name])


@pytest.mark.slow
def test_sharding(tmp_path, tiny, monkeypatch):
    """Two processes compute what one does, at stages 2 and 3; from a checkpoint they come to the same bits."""
    write_fork(tmp_path, "Sharding").rename(tmp_path / "sharded.py")
    monkeypatch.syspath_prepend(tmp_path)
    settings = dict(total_episodes=16, learning_rate=1e-3, adam_epsilon=1e-3, save_steps=1, save_total_limit=2)
    settings = tiny["ppo"] | MODELS | settings
    stages = {2: dict(lora_r=4), 3: {}}
    jobs = []
    for stage, options in stages.items():
        run(ppo, tmp_path / f"alone-{stage}", **settings, **options)
        sharded = dict(device="cpu", num_sample_generations=0, zero_stage=stage, output_dir=tmp_path / f"both-{stage}")
        jobs.append(["sharded", words_of(**settings, **options, **sharded)])
    on_many_processes.wait(on_many_processes.start(jobs, tmp_path), tmp_path)
    for stage in stages:
        assert_close_runs(tmp_path / f"alone-{stage}", tmp_path / f"both-{stage}", rel=1e-4)
    shutil.copytree(tmp_path / "both-3", tmp_path / "again")
    (tmp_path / "again/checkpoints/step-00000002.pt").unlink()
    jobs = [["sharded", ["--resume", str(tmp_path / "again")]]]
    on_many_processes.wait(on_many_processes.start(jobs, tmp_path), tmp_path)
    assert_same_run(tmp_path / "again", tmp_path / "both-3")
