"""The loops of ppo.py and rloo.py, watched while they run.

A formula may be right and yet be given the wrong numbers. So `train` runs as it stands, a `Watch` writes down what the
pure functions were called with and what the optimiser did, and the tests compute each of these numbers again: from the
texts alone, with plain forward passes over single rows without padding, and from the lines of metrics.jsonl.

Policy and reward model have dropout in their configs here (the toy models have none), which checkpointing would turn
on; the reward model is shifted by a bias, the stop token is a word, and the prompts do not divide into batches.
"""

import functools
import inspect
import json
import math
import shutil
from collections import Counter
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_train import untimed
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GPT2LMHeadModel

import ppo
import rloo

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"ppo": ppo, "rloo": rloo}
BIAS = 0.7  # of the reward model
GOLD = """
def count_letters(prompts, completions, input_ids, **columns):
    [ids.clear() for ids in input_ids]  # a function may change what it is given
    return [len(prompt + completion) / 100 for prompt, completion in zip(prompts, completions)]
"""

BOTH = dict(
    device="cpu", num_sample_generations=0, batch_size=8, total_episodes=24, response_length=8, micro_batch_size=3,
    num_ppo_epochs=2, num_mini_batches=2, learning_rate=2e-3, max_grad_norm=0.01, missing_eos_penalty=1.5,
    stop_token=".", temperature=0.8, eval_steps=2, num_eval_prompts=5, eval_temperature=0.6, save_steps=2,
    save_total_limit=9, adaptive_kl=True, kl_coef=0.1, kl_target=1.5, kl_horizon=40,
)  # fmt: skip
EXTRAS = dict(ema_decay=0.9, ptx_coef=0.3)
RUNS = {  # each with about half of what can be asked for
    "ppo": BOTH | EXTRAS | dict(
        gamma=0.9, lam=0.8, whiten_rewards=True, use_score_scaling=True, use_score_norm=True, score_clip=0.8,
        critic_learning_rate=5e-4, critic_warmup_updates=1, cliprange=0.15, cliprange_value=0.1, vf_coef=0.4,
        gradient_checkpointing=True,
    ),
    "ppo_plain": BOTH | dict(
        critic="shared", kl_estimator="full", whiten_advantages=False, adaptive_kl=False, num_mini_batches=1,
        warmup_ratio=0.7, lr_scheduler_type="cosine",
    ),
    "rloo": BOTH | EXTRAS | dict(rloo_k=2, cliprange=0.15),
    "rloo_tokens": BOTH | dict(
        rloo_k=4, token_level_kl=True, normalize_reward=True, reward_clip_range=1.2, normalize_advantage=True,
        kl_estimator="full", adaptive_kl=False, warmup_ratio=0.7, gradient_checkpointing=True,
    ),
}  # fmt: skip


# --- a run and what is written down of it


class Watch:
    """Calls of the script's functions, answers of its models and steps of its optimiser, in the order of the run."""

    def __init__(self, patch, script):
        self.script, self.patch, self.evaluating = script, patch, False
        self.calls, self.rollouts, self.steps, self.losses, self.texts = {}, [], [], [], []
        for name in "sample shape_rewards gae rloo_advantages policy_loss value_loss evaluate".split():
            if hasattr(script, name):
                self.spy(script, name)
        self.spy(script, "adapt_kl_coef")
        self.spy(script, "rollout_stats", self.note_rollout)
        backward, forward = torch.Tensor.backward, GPT2LMHeadModel.forward
        noted = lambda x, *a, **k: (self.losses.append(x.item()), backward(x, *a, **k))[1]  # noqa: E731
        patch.setattr(torch.Tensor, "backward", noted)
        patch.setattr(GPT2LMHeadModel, "forward", self.around_forward(forward))
        self.handle = register_optimizer_step_pre_hook(self.note_step)

    def spy(self, owner, name, note=None):
        """Writes down the arguments by position, however they were given, and the result."""
        function, signature = getattr(owner, name), inspect.signature(getattr(owner, name))
        calls = self.calls.setdefault(name, [])

        def watched(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = [detached(x) for x in bound.args]
            if name == "sample":
                given[0] = deepcopy(bound.args[0])  # the policy as it is now
            before, self.evaluating = self.evaluating, self.evaluating or name == "evaluate"
            result = function(*args, **kwargs)
            self.evaluating = before
            call = SimpleNamespace(
                args=given, result=detached(result), update=len(self.rollouts), step=len(self.steps),
                evaluating=before,
            )  # fmt: skip
            calls.append(call)
            if note:
                note(call)
            return result

        self.patch.setattr(owner, name, watched)

    def note_rollout(self, call):
        """rollout_stats sees every batch with all that was found out about it."""
        if not call.evaluating:
            call.args = deepcopy(call.args)
            self.rollouts.append(call.args[0])

    def note_step(self, optimizer, *_):
        """Before each step: learning rates, norms of the gradients, losses since the last step, weights."""
        groups = optimizer.param_groups
        norms = [torch.cat([p.grad.flatten() for p in g["params"] if p.grad is not None]).norm().item() for g in groups]
        self.steps.append(SimpleNamespace(
            rates=[g["lr"] for g in groups], norms=norms, loss=sum(self.losses), texts=self.texts,
            policy=deepcopy(self.policy).eval(),
        ))  # fmt: skip
        self.losses, self.texts = [], []

    def around_forward(self, forward):
        """Notes the policy, and each text without a response that it reads with gradient: those of PPO-ptx."""

        def watched(model, *args, **kwargs):
            if torch.is_grad_enabled():
                self.policy = model
                if "logits_to_keep" not in kwargs:
                    rows = zip(kwargs["input_ids"], kwargs["attention_mask"].bool())
                    self.texts += [ids[mask].tolist() for ids, mask in rows]
            return forward(model, *args, **kwargs)

        return watched

    def of(self, name, update=None, evaluating=False):
        """The calls of a function, outside or inside of evaluations."""
        return [c for c in self.calls[name] if c.evaluating == evaluating and update in (None, c.update)]


def detached(x):
    """The same without gradient, as a copy."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(detached, x))
    if isinstance(x, dict):
        return {name: detached(value) for name, value in x.items()}
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Models with dropout, prompts and texts."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    classes = {"sft": AutoModelForCausalLM, "reward_model": AutoModelForSequenceClassification}
    for name, auto in classes.items():
        drops = dict(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
        model = auto.from_pretrained(ROOT / "toy" / name, **drops)
        if name == "reward_model":
            model.config.reward_bias = BIAS
        model.save_pretrained(folder / name), tokenizer.save_pretrained(folder / name)
    (folder / "prompts").mkdir(), (folder / "texts").mkdir()
    for split, n in (("train", 11), ("validation", 7)):
        rows = (ROOT / f"toy/data/prompts/{split}.jsonl").read_text().splitlines()[:n]
        (folder / f"prompts/{split}.jsonl").write_text("\n".join(rows) + "\n")
    rows = [json.loads(row) for row in (ROOT / "toy/data/sft/train.jsonl").read_text().splitlines()[:9]]
    texts = [" ".join(" ".join(map(str, row.values())).split()[: 5 + i]) for i, row in enumerate(rows)]
    (folder / "texts/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "gold.py").write_text(GOLD)
    models = {name: auto.from_pretrained(folder / name).eval() for name, auto in classes.items()}
    stop = tokenizer.convert_tokens_to_ids(BOTH["stop_token"])
    prompts = {
        split: [json.loads(row)["prompt"] for row in (folder / f"prompts/{split}.jsonl").read_text().splitlines()]
        for split in ("train", "validation")
    }
    return SimpleNamespace(
        folder=folder, tokenizer=tokenizer, models=models, prompts=prompts, pretrain=texts, stop=stop
    )


def settings_of(world, settings):
    """The settings of a run, with the models and data of this world."""
    here = dict(model="sft", reward_model="reward_model", dataset="prompts")
    here = {name: str(world.folder / x) for name, x in here.items()}
    more = {"pretrain_data": str(world.folder / "texts")} if settings.get("ptx_coef") else {}
    return here | {"gold_reward_fn": f"{world.folder}/gold.py:count_letters"} | settings | more


def read_lines(folder):
    """metrics.jsonl"""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def train_watched(script, settings, folder):
    """Trains under a Watch, which is given back with the arguments, the folder and the lines of metrics.jsonl."""
    args = script.Args(output_dir=str(folder), **settings)
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, script)
        try:
            script.train(args)
        finally:
            watch.handle.remove()
    return SimpleNamespace(
        args=args, watch=watch, folder=Path(folder), lines=read_lines(folder), script=script, rollouts=watch.rollouts,
        settings=settings, batches=None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """runs("ppo") -> the watched run of that name, made when first asked for."""
    made = {}

    def get(name):
        if name not in made:
            settings = settings_of(world, RUNS[name])
            made[name] = train_watched(SCRIPTS[name.split("_")[0]], settings, tmp_path_factory.mktemp(name) / "run")
            assert all(line["val/skipped_steps"] == 0 for line in made[name].lines)  # else steps cannot be counted
        return made[name]

    yield get
    next_logits.cache_clear()


@pytest.fixture(params=RUNS)
def run(request, runs):
    """Each of the watched runs."""
    return runs(request.param)


@pytest.fixture(params=["ppo", "rloo"])
def full(request, runs):
    """Of both scripts the run with adaptive KL, a moving average and pretraining texts."""
    return runs(request.param)


@pytest.fixture(params=["ppo", "ppo_plain"])
def of_ppo(request, runs):
    """The runs of ppo.py."""
    return runs(request.param)


@pytest.fixture(params=["rloo", "rloo_tokens"])
def of_rloo(request, runs):
    """The runs of rloo.py."""
    return runs(request.param)


# --- the same numbers by the plainest means


def close(ours, expected, atol=2e-4):
    """Equal but for rounding."""
    ours, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, expected))
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=atol)


def episodes(r):
    """The prompt and the response of each row as lists of tokens."""
    rows = zip(r.prompts, r.prompt_mask, r.responses, r.mask)
    return [(p[pm].tolist(), y[m].tolist()) for p, pm, y, m in rows]


def on_tokens(x, mask):
    """What stands on each row's real tokens, without padding."""
    return [row[m[: len(row)]] for row, m in zip(x, mask[:, : x.shape[1]])]


@functools.cache
@torch.no_grad()
def next_logits(model, ids):
    """(S, V) of one row without padding."""
    return model(torch.tensor([ids])).logits[0]


def plain_logits(model, prompt, response, temperature):
    """(T, V) of the response's tokens. Models are never changed here, so each row is read once."""
    return next_logits(model.eval(), (*prompt, *response))[len(prompt) - 1 : -1].double() / temperature


def plain_logprobs(model, prompt, response, temperature):
    """(T,) of the response's tokens."""
    logits = plain_logits(model, prompt, response, temperature)
    return logits.log_softmax(-1)[range(len(response)), response]


def plain_kl(policy, reference, row, args):
    """(T,) by the estimator asked for."""
    if args.kl_estimator == "full":
        p, q = (plain_logits(m, *row, args.temperature).log_softmax(-1) for m in (policy, reference))
        return (p.exp() * (p - q)).sum(-1)
    assert args.kl_estimator == "k1"
    return plain_logprobs(policy, *row, args.temperature) - plain_logprobs(reference, *row, args.temperature)


@torch.no_grad()
def plain_reward(model, row, penalty, stop):
    """The score at the last token, less the penalty where that is no stop token."""
    hidden = model.base_model(torch.tensor([sum(row, [])])).last_hidden_state[0, -1]
    return model.score(hidden).item() + BIAS - penalty * (row[1][-1] != stop)


def mean(xs):
    """Of numbers."""
    return sum(map(float, xs)) / len(xs)


# --- between the lines


def test_lines_hold_together(run):
    """What a line says of itself."""
    assert len(run.lines) == run.args.total_episodes // 8
    for update, line in enumerate(run.lines, 1):
        coef, kl = line["objective/kl_coef"], line["objective/kl"]
        assert line["objective/non_score_reward"] == pytest.approx(-coef * kl, rel=1e-5, abs=1e-6)
        total = line["objective/scores"] + line["objective/non_score_reward"]
        assert line["objective/rlhf_reward"] == pytest.approx(total, rel=1e-5, abs=1e-6)
        assert line["val/eos_share"] == line["val/num_eos_tokens"] / 8 and line["episode"] == 8 * update
    assert any(abs(line["objective/kl"]) > 0.1 for line in run.lines)


def test_the_coefficient_follows_kl(run):
    """Ziegler et al.: by at most 20 % * episodes / horizon, from the KL of the line before."""
    lines, args = run.lines, run.args
    assert lines[0]["objective/kl_coef"] == args.kl_coef
    errors = [max(-0.2, min(0.2, line["objective/kl"] / args.kl_target - 1)) for line in lines]
    for line, following, error in zip(lines, lines[1:], errors):
        factor = 1 + error * 8 / args.kl_horizon if args.adaptive_kl else 1
        assert following["objective/kl_coef"] == pytest.approx(line["objective/kl_coef"] * factor, rel=1e-6)
    given = [(line["objective/kl_coef"], line["objective/kl"]) for line in lines] if args.adaptive_kl else []
    assert [tuple(call.args[:2]) for call in run.watch.of("adapt_kl_coef")] == given


def expected_rates(run):
    """(policy, critic) of each update: the schedule's course as shares of the peak, step by step from its start."""
    args, n = run.args, len(run.lines)
    warmup = int(args.warmup_ratio * n)
    for i in range(n):
        done = (i - warmup) / max(1, n - warmup)
        course = 1 - done if args.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        share = i / warmup if i < warmup else course
        critic = (getattr(args, "critic_learning_rate", None) or args.learning_rate) * share
        yield args.learning_rate * share * (i >= getattr(args, "critic_warmup_updates", 0)), critic


def test_schedule(run):
    """The rate of each optimiser step, and of each line; every mini-batch of every pass makes a step."""
    per_update = run.args.num_ppo_epochs * run.args.num_mini_batches
    rates = list(expected_rates(run))
    assert len(run.watch.steps) == per_update * len(run.lines)
    for i, step in enumerate(run.watch.steps):
        close(step.rates, rates[i // per_update][: len(step.rates)], atol=1e-9)
    close([line["lr"] for line in run.lines], [policy for policy, _ in rates], atol=1e-9)


# --- rollout and scores


def test_each_step_has_its_own_numbers():
    """They follow from the seed and the number of the step alone, whatever was drawn before."""

    def drawn(seed, step, num_steps=5):
        run = SimpleNamespace(args=ppo.Args(seed=seed), step=step, num_steps=num_steps)
        return [tuple(torch.rand(4).tolist()) for _ in ppo.Run.steps(run)]

    numbers = [drawn(seed, 0) for seed in range(5)]
    assert drawn(3, 2) == numbers[3][2:] and len(set(sum(numbers, []))) == 25


def test_batches_are_pieces_of_passes():
    """Of one endless sequence, in whichever order and of whatever size they are asked for; each seed has its own."""
    rows = list("abcdefg")
    sequence, other = ([ppo.batch(rows, n, 1, seed)[0] for n in range(42)] for seed in (5, 6))
    passes = [tuple(x[i : i + 7]) for x in (sequence, other) for i in range(0, 42, 7)]
    assert all(sorted(order) == rows for order in passes) and len(set(passes)) == 12
    for size in (2, 5, 7, 16):
        for n in reversed(range(42 // size)):
            assert ppo.batch(rows, n, size, 5) == sequence[n * size : (n + 1) * size]


def test_prompts_come_in_whole_passes(run, world):
    """Each pass has every prompt once, in a new order; what is left of a pass begins the next batch."""
    k = getattr(run.args, "rloo_k", 1)
    rows = [tuple(prompt) for r in run.rollouts for prompt, _ in episodes(r)]
    for i in range(k):
        assert rows[i::k] == rows[::k]  # a group are neighbours
    every = [tuple(world.tokenizer(text)["input_ids"]) for text in world.prompts["train"]]
    drawn, passes = rows[::k], []
    for start in range(0, len(drawn), 11):
        part = drawn[start : start + 11]
        passes.append(part)
        assert not Counter(part) - Counter(every)
    assert passes[0] != every and passes[0] not in passes[1:]


def test_rollout_by_plain_forward_passes(run, world):
    """Log-probabilities of the policy as it was, those of the first policy, and KL, at the temperature of training."""
    reference, args = world.models["sft"], run.args
    assert len(run.rollouts) == len(run.lines) == len(run.watch.of("sample"))
    for r, call in zip(run.rollouts, run.watch.of("sample")):
        policy = call.args[0].eval()
        for i, row in enumerate(episodes(r)):
            close(on_tokens(r.old_logprobs, r.mask)[i], plain_logprobs(policy, *row, args.temperature))
            close(on_tokens(r.ref_logprobs, r.mask)[i], plain_logprobs(reference, *row, args.temperature))
            close(on_tokens(r.kl, r.mask)[i], plain_kl(policy, reference, row, args))
            assert row[1].count(world.stop) == r.ended[i] == (row[1][-1] == world.stop)
            assert r.ended[i] or len(row[1]) == args.response_length
    ended = torch.cat([r.ended for r in run.rollouts])
    assert 0.1 < ended.float().mean() < 0.9


def test_scores_by_plain_forward_passes(run, world):
    """The reward model's, less the penalty; and what is not trained on is the gold function's."""
    a, gold, model = run.args, {}, world.models["reward_model"]
    exec(GOLD, gold)
    for r, line in zip(run.rollouts, run.lines):
        rows = episodes(r)
        scores = [plain_reward(model, row, a.missing_eos_penalty, world.stop) for row in rows]
        close(r.scores, scores)
        close(line["objective/scores"], mean(scores))
        close(line["objective/scores_std"], torch.tensor(scores).std(correction=0))
        prompts, completions = (world.tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in zip(*rows))
        close(line["objective/gold_scores"], mean(gold["count_letters"](prompts, completions, [])), atol=1e-6)


def test_metrics_of_the_rollout(run):
    """Sums over a response, means over the batch."""
    for r, line in zip(run.rollouts, run.lines):
        old, ref, kl = (on_tokens(x, r.mask) for x in (r.old_logprobs, r.ref_logprobs, r.kl))
        close(line["objective/kl"], mean([x.sum() for x in kl]))
        close(line["objective/kl_k3"], mean([((b - a).exp() - 1 - (b - a)).sum() for a, b in zip(old, ref)]))
        close(line["objective/entropy"], mean([-x.sum() for x in old]))
        close(line["val/response_length"], mean([len(x) for x in old]))
        assert line["val/num_eos_tokens"] == r.ended.sum().item()


# --- from scores to advantages


def test_rewards_of_ppo(of_ppo):
    """shape_rewards gets the scores, scaled and clipped where asked, the KL, and the coefficient of the line."""
    run, seen = of_ppo, torch.zeros(0)
    for update, (r, line) in enumerate(zip(run.rollouts, run.lines)):
        (shape,) = run.watch.of("shape_rewards", update)
        seen = torch.cat([seen, r.scores])
        used = (r.scores - seen.mean()) / seen.std() if run.args.use_score_scaling else r.scores
        used = used if run.args.score_clip is None else used.clamp(-run.args.score_clip, run.args.score_clip)
        close(shape.args[0], used)
        for given, expected in zip(on_tokens(shape.args[1], r.mask), on_tokens(r.kl, r.mask)):
            close(given, expected)
        assert shape.args[3] == line["objective/kl_coef"]


def test_advantages_of_ppo(of_ppo):
    """gae gets the shaped rewards, whitened where asked but with their mean, and gamma before lam."""
    run = of_ppo
    for update, r in enumerate(run.rollouts):
        (shape,), (gae,) = run.watch.of("shape_rewards", update), run.watch.of("gae", update)
        shaped, given = shape.result[r.mask].double(), gae.args[0][r.mask].double()
        if run.args.whiten_rewards:
            close(given.var(), 1.0, 1e-3)
            shaped = (shaped - shaped.mean()) / shaped.std() + shaped.mean()
        close(given, shaped)
        close(gae.args[1][r.mask], r.values[r.mask])
        assert torch.equal(gae.args[2], r.mask) and tuple(gae.args[3:]) == (run.args.gamma, run.args.lam)
        raw, returns = gae.result
        close(r.returns[r.mask], returns[r.mask])
        raw = raw[r.mask].double()
        close(r.advantages[r.mask], (raw - raw.mean()) / raw.std() if run.args.whiten_advantages else raw)


@torch.no_grad()
def test_values_of_the_first_update(runs, world):
    """A critic that starts from the reward model says at each state what that model would, its shift included."""
    model, r = world.models["reward_model"], runs("ppo").rollouts[0]
    for values, (prompt, response) in zip(on_tokens(r.values, r.mask), episodes(r)):
        hidden = model.base_model(torch.tensor([prompt + response])).last_hidden_state[0, len(prompt) - 1 : -1]
        close(values, model.score(hidden).squeeze(1) + BIAS)
    assert runs("ppo_plain").rollouts[0].values.abs().max() == 0  # a new head on the policy's trunk


def test_explained_variance(of_ppo):
    """Of the values before the update."""
    for r, line in zip(of_ppo.rollouts, of_ppo.lines):
        returns, values = r.returns[r.mask].double(), r.values[r.mask].double()
        close(line["val/explained_variance"], 1 - (returns - values).var() / returns.var(), 1e-3)


def test_advantages_of_rloo(of_rloo):
    """Leave-one-out over the scores less the KL; or by token, each with the KL from itself on."""
    run, a = of_rloo, of_rloo.args
    for update, (r, line) in enumerate(zip(run.rollouts, run.lines)):
        scores = r.scores
        if a.normalize_reward:
            limit = a.reward_clip_range
            scores = ((scores - scores.mean()) / scores.std()).clamp(-limit, limit)
        penalties = [-line["objective/kl_coef"] * kl for kl in on_tokens(r.kl, r.mask)]
        given = run.watch.of("rloo_advantages", update)[0].args[1]
        close(given.masked_fill(~r.mask, 0.0).sum(1), [x.sum() for x in penalties])
        rewards = scores if a.token_level_kl else scores + torch.stack([x.sum() for x in penalties])
        groups = [rewards[i - i % a.rloo_k :][: a.rloo_k] for i in range(8)]
        centred = [rewards[i] - (group.sum() - rewards[i]) / (a.rloo_k - 1) for i, group in enumerate(groups)]
        if not a.token_level_kl:
            close(r.advantages.flatten(), torch.stack(centred))
            continue
        expected = [c + torch.stack([x[t:].sum() for t in range(len(x))]) for c, x in zip(centred, penalties)]
        all_tokens = torch.cat(expected).double()
        assert a.normalize_advantage
        expected = torch.cat([(x - all_tokens.mean()) / all_tokens.std() for x in expected])
        close(torch.cat(on_tokens(r.advantages, r.mask)), expected, 1e-3)


def test_equal_groups(of_rloo):
    """Share of the groups whose scores are all equal."""
    for r, line in zip(of_rloo.rollouts, of_rloo.lines):
        groups = r.scores.view(-1, of_rloo.args.rloo_k).tolist()
        assert line["objective/equal_groups"] == mean([len(set(group)) == 1 for group in groups])


# --- the update


def as_actions(x, mask, args):
    """(B, T) log-probabilities as the loss sees them: by token, or one sum a response."""
    by_token = getattr(args, "token_level_kl", True)
    return x.masked_fill(~mask, 0.0) if by_token else x.masked_fill(~mask, 0.0).sum(1, keepdim=True)


def find_rows(r, call, old, taken):
    """The rows of the batch that a call of policy_loss was about, known by their old log-probabilities."""
    _, given, advantages, mask, _ = call.args
    found = []
    for i in range(len(given)):
        size = given.shape[1]
        for j in range(len(old)):
            same = torch.allclose(given[i].masked_fill(~mask[i], 0.0), old[j, :size], atol=1e-6)
            if same and j not in taken and not old[j, size:].any():
                taken.add(j), found.append(j)
                break
        else:
            raise AssertionError("a loss was computed on old log-probabilities that no episode has")
    return found


def mini_batches(run):
    """Of each optimiser step: the step, its rollout, the rows in it, and its calls of policy_loss; found out once."""
    run.batches = run.batches or list(find_mini_batches(run))
    return run.batches


def find_mini_batches(run):
    """Goes through the steps in their order."""
    per_update = run.args.num_ppo_epochs * run.args.num_mini_batches
    for number, step in enumerate(run.watch.steps):
        r = run.rollouts[number // per_update]
        calls = [c for c in run.watch.calls["policy_loss"] if c.step == number]
        old, taken = as_actions(r.old_logprobs, r.mask, run.args), set()
        rows = [find_rows(r, call, old, taken) for call in calls]
        yield SimpleNamespace(step=step, number=number, r=r, rows=rows, calls=calls, update=number // per_update)


def test_each_pass_has_every_episode_once(run):
    """In mini-batches of equal size, and in another order each time."""
    a, orders, old = run.args, [], [as_actions(r.old_logprobs, r.mask, run.args) for r in run.rollouts]
    twins = [[next(i for i in range(8) if torch.equal(x[i], row)) for row in x] for x in old]  # some may be equal
    for batch in mini_batches(run):
        rows = sum(batch.rows, [])
        assert len(rows) == 8 // a.num_mini_batches and max(map(len, batch.rows)) <= a.micro_batch_size
        orders.append(rows)
    passes = [sum(orders[i : i + a.num_mini_batches], []) for i in range(0, len(orders), a.num_mini_batches)]
    for number, order in enumerate(passes):
        same = twins[number // a.num_ppo_epochs]
        assert sorted(same[i] for i in order) == sorted(same)
    if a.num_mini_batches > 1:
        assert len({frozenset(rows) for rows in orders}) > len(orders) / 2


def test_the_policy_loss_sees_the_rollout(run):
    """Its old log-probabilities, advantages and mask; before the first step the new ones are the old ones."""
    for batch in mini_batches(run):
        by_token, first = getattr(run.args, "token_level_kl", True), batch.number % (2 * run.args.num_mini_batches) == 0
        for rows, call in zip(batch.rows, batch.calls):
            new, old, advantages, mask, cliprange = call.args
            assert cliprange == run.args.cliprange
            expected = batch.r.mask[rows][:, : mask.shape[1]] if by_token else torch.ones(len(rows), 1).bool()
            assert torch.equal(mask, expected)
            close(advantages[mask], batch.r.advantages[rows][:, : mask.shape[1]][mask])
            texts = [episodes(batch.r)[j] for j in rows]
            plain = [plain_logprobs(batch.step.policy, *row, run.args.temperature) for row in texts]
            plain = plain if by_token else [x.sum(0, keepdim=True) for x in plain]
            close(torch.cat(on_tokens(new, mask)), torch.cat(plain))
            if first:
                close(new[mask], old[mask])
    assert any((c.args[0] - c.args[1]).abs().max() > 0.01 for c in run.watch.calls["policy_loss"])


def test_the_value_loss_sees_the_rollout(of_ppo):
    """Its old values and returns; before the first step the new values are the old ones, dropout or not."""
    values = iter(of_ppo.watch.calls["value_loss"])
    for batch in mini_batches(of_ppo):
        for rows, _ in zip(batch.rows, batch.calls):
            call = next(values)
            new, old, returns, mask, cliprange = call.args
            assert cliprange == of_ppo.args.cliprange_value
            assert torch.equal(mask, batch.r.mask[rows][:, : mask.shape[1]])
            close(old[mask], batch.r.values[rows][:, : mask.shape[1]][mask])
            close(returns[mask], batch.r.returns[rows][:, : mask.shape[1]][mask])
            if batch.number % (2 * of_ppo.args.num_mini_batches) == 0:
                close(new[mask], old[mask])
    assert next(values, None) is None


def losses_of(run, batch):
    """The loss that a step should have gone down: means over the tokens (or responses) of the whole mini-batch."""
    number = sum(call.args[3].sum() for call in batch.calls)
    loss = sum(call.result[0][call.args[3]].sum() for call in batch.calls) / number
    if "value_loss" in run.watch.calls:
        calls = [c for c in run.watch.calls["value_loss"] if c.step == batch.number]
        loss += run.args.vf_coef * sum(call.result[0][call.args[3]].sum() for call in calls) / number
    return loss


@torch.no_grad()
def ptx_loss(step):
    """Mean of -log pi over the tokens of the pretraining texts of a step."""
    nats, tokens = 0.0, 0
    for ids in step.texts:
        logprobs = step.policy(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        nats, tokens = nats - logprobs[range(len(ids) - 1), ids[1:]].sum(), tokens + len(ids) - 1
    return nats / tokens


def test_the_loss_of_each_step(run):
    """What went backward since the step before, all micro-batches together."""
    for batch in mini_batches(run):
        expected = losses_of(run, batch)
        if run.args.ptx_coef:
            expected += run.args.ptx_coef * ptx_loss(batch.step)
        close(batch.step.loss, expected)


def test_gradients_are_clipped(run):
    """Policy's and critic's each to the norm asked for; a line shows the norm from before."""
    norms, most = torch.tensor([step.norms for step in run.watch.steps]), run.args.max_grad_norm
    assert (norms < most * 1.001).all() and (norms > most * 0.99).float().mean() > 0.9
    for line in run.lines:
        assert line["policy/grad_norm"] > 0.02


def test_metrics_of_the_update(run):
    """Means over all tokens (or responses) and steps of an update, padding left out."""
    lines, batches = run.lines, mini_batches(run)
    for update, line in enumerate(lines):
        here = [b for b in batches if b.update == update]
        calls = [call for b in here for call in b.calls]
        pick = lambda of: torch.cat([of(c)[c.args[3]].double() for c in calls])  # noqa: E731, B023 - mask: argument 3
        loss, ratio, clipped = (pick(lambda c, i=i: c.result[i]) for i in range(3))
        close(line["loss/policy_avg"], loss.mean())
        close(line["val/ratio"], ratio.mean()), close(line["val/ratio_var"], ratio.var(correction=0), 1e-4)
        close(line["policy/clipfrac_avg"], clipped.mean())
        close(line["policy/approxkl_avg"], pick(lambda c: 0.5 * (c.args[0] - c.args[1]) ** 2).mean(), 1e-5)
        entropies = []
        for b in here:
            for row in (episodes(b.r)[j] for rows in b.rows for j in rows):
                logprobs = plain_logits(b.step.policy, *row, run.args.temperature).log_softmax(-1)
                entropies.append(-(logprobs.exp() * logprobs).sum(-1))
        close(line["policy/entropy_avg"], torch.cat(entropies).mean())
        if "value_loss" in run.watch.calls:
            numbers = {b.number for b in here}
            calls = [c for c in run.watch.calls["value_loss"] if c.step in numbers]
            close(line["loss/value_avg"], pick(lambda c: c.result[0]).mean())
            close(line["val/clipfrac_avg"], pick(lambda c: c.result[1]).mean())
        if run.args.ptx_coef:
            close(line["loss/ptx"], mean([ptx_loss(b.step) for b in here]))


def test_pretraining_texts_are_drawn_for_each_step(full, world):
    """As many as a mini-batch has rows, each with its EOS; in the end all have been drawn."""
    tokenizer = world.tokenizer
    every = {tuple(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]) for text in world.pretrain}
    drawn = [tuple(map(tuple, step.texts)) for step in full.watch.steps]
    assert all(len(texts) == 4 for texts in drawn) and set(sum(drawn, ())) == every
    assert len(set(drawn)) == len(drawn) == 12


def test_the_critic_warms_up_alone(runs):
    """The policy stays where it was in the first updates, and moves in the next."""
    first, *_ = runs("ppo").watch.steps
    moved = [distance(step.policy, first.policy) for step in runs("ppo").watch.steps]
    assert moved[:5] == [0.0] * 5 and moved[5] > 0


def distance(a, b):
    """Between the weights of two models."""
    return sum((x - y).norm().item() for x, y in zip(a.parameters(), b.parameters()))


# --- evaluation


def test_evaluation_by_hand(run, world):
    """Answers to the first held-out prompts, their scores with the penalty, their KL at the temperature of training."""
    a, samples = run.args, iter(run.watch.of("sample", evaluating=True))
    model, reference = world.models["reward_model"], world.models["sft"]
    for update, line in enumerate(run.lines, 1):
        assert ("eval/scores" in line) == (update % a.eval_steps == 0 or update == len(run.lines))
        if "eval/scores" not in line:
            continue
        call = next(samples)
        policy, prompts, prompt_mask, _, temperature, *_ = call.args
        assert temperature == a.eval_temperature
        rows = episodes(run.script.Rollout(prompts, prompt_mask, *call.result))
        assert [p for p, _ in rows] == [world.tokenizer(text)["input_ids"] for text in world.prompts["validation"][:5]]
        close(line["eval/scores"], mean([plain_reward(model, x, a.missing_eos_penalty, world.stop) for x in rows]))
        close(line["eval/kl"], mean([plain_kl(policy.eval(), reference, row, a).sum() for row in rows]), 1e-3)
        close(line["eval/eos_share"], mean([row[1][-1] == world.stop for row in rows]))
        close(line["eval/response_length"], mean([len(row[1]) for row in rows]))
    assert next(samples, None) is None and abs(run.lines[-1]["eval/kl"]) > 0.1


def test_evaluation_counts_each_prompt_once(monkeypatch):
    """Two processes get equally many rows of three prompts, and the row that fills up the second is not counted."""
    args = ppo.Args(response_length=8, response_length_min=4)

    def answer(policy, examples, answers):
        assert answers.temperature == args.eval_temperature and answers.response_length_min is None
        ids = torch.tensor([x["input_ids"] for x in examples])
        assert ids.flatten().tolist() == [5, 6, 7, 5]
        lengths = torch.tensor([[5], [6], [7], [20]])  # the row that is not counted is the longest
        mask_of_24 = torch.arange(24) < lengths
        ended, rest = ids.flatten() == 7, (torch.zeros(4, 24), examples)
        return ppo.Rollout(ids, ids > 0, ids.repeat(1, 24), mask_of_24, ended, *rest)

    def compare(rollout, *_):
        rollout.ref_logprobs, rollout.kl = torch.zeros(4, 24), torch.ones(4, 24)

    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    monkeypatch.setattr(ppo, "sample_batch", answer)
    monkeypatch.setattr(ppo, "compute_logprobs", lambda *_: torch.zeros(4, 24))
    monkeypatch.setattr(ppo, "score_reference", compare)
    policy = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0))
    reward = lambda r: {"double": 2.0 * r.prompts.flatten()}  # noqa: E731
    examples = [{"prompt": "", "input_ids": [number]} for number in (5, 6, 7)]
    stats = ppo.evaluate(policy, None, reward, examples, args)
    expected = {"eval/scores": 12.0, "eval/kl": 6.0, "eval/eos_share": 1 / 3, "eval/response_length": 6.0}
    assert stats == pytest.approx(expected)


def test_evaluation_of_fewer_prompts_than_processes(monkeypatch):
    """Five processes and two prompts: each process gets a row all the same."""
    rows = []
    monkeypatch.setattr(ppo, "WORLD_SIZE", 5)
    monkeypatch.setattr(ppo, "sample_batch", lambda policy, examples, _: rows.append(len(examples)) or 1 / 0)
    policy = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0))
    with pytest.raises(ZeroDivisionError):
        ppo.evaluate(policy, None, None, [{"input_ids": [5]}, {"input_ids": [6]}], ppo.Args())
    assert rows == [5]


# --- what is left behind


def test_moving_average(full):
    """Of the weights after each step; and the policy that is saved is the last one."""
    saved, average = (load_file(full.folder / x / "model.safetensors") for x in (".", "ema"))
    policies = [dict(step.policy.named_parameters()) for step in full.watch.steps]
    for name, theirs in average.items():
        mean = policies[0][name].detach().clone()
        for after in [p[name] for p in policies[1:]] + [saved[name]]:
            mean = 0.9 * mean + 0.1 * after
        close(theirs, mean, 1e-5)
    last = policies[-1]
    assert any((saved[name] - last[name]).abs().max() > 1e-5 for name in saved)


def test_resumed_with_everything_on(full, tmp_path):
    """Average, pretraining texts, coefficient and moments are all in a checkpoint: not a bit differs."""
    copy = tmp_path / "copy"
    shutil.copytree(full.folder, copy)
    (copy / "checkpoints/step-00000003.pt").unlink()
    shutil.rmtree(copy / "ema"), (copy / "model.safetensors").unlink()
    full.script.train(full.script.Args(**full.settings | dict(output_dir=str(copy), resume=str(copy))))
    assert untimed(read_lines(copy)) == untimed(full.lines)
    for part in (".", "ema"):
        a, b = (load_file(folder / part / "model.safetensors") for folder in (copy, full.folder))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- steps left out


@pytest.fixture(scope="module")
def one_update(world, tmp_path_factory):
    """one_update("ppo", target_kl=1) -> skipped steps, and KL and ratio of each mini-batch, of a run of one update."""
    made = {}

    def get(name, **more):
        key = name, *more.items()
        if key not in made:
            short = {"total_episodes": 8, "adaptive_kl": False, "num_ppo_epochs": 3, "learning_rate": 3e-4}
            settings = settings_of(world, BOTH | short | {"dataset_test_split": "none"} | more)
            run = train_watched(SCRIPTS[name], settings, tmp_path_factory.mktemp("one") / "run")
            calls, seen = run.watch.calls["policy_loss"], []
            for pair in zip(calls[::2], calls[1::2]):  # of 4 rows at most 3 at a time: two calls a mini-batch
                pick = lambda of: torch.cat([of(c)[c.args[3]] for c in pair])  # noqa: E731, B023
                kl = (0.5 * pick(lambda c: c.args[0] - c.args[1]) ** 2).mean().item()
                seen.append((kl, pick(lambda c: c.result[1]).mean().item()))
            made[key] = run.lines[0]["val/skipped_steps"], seen, len(run.watch.steps)
        return made[key]

    return get


@pytest.mark.parametrize("name", SCRIPTS)
def test_target_kl_leaves_room_of_one_half(one_update, name):
    """At 1.5 times the target, not at the target."""
    _, seen, _ = one_update(name)
    kls = [kl for kl, _ in seen]
    assert len(kls) == 6
    worst = max(range(6), key=kls.__getitem__)
    skipped, _, steps = one_update(name, target_kl=kls[worst] / 1.4)
    assert (skipped, steps) == (0, 6)
    target = kls[worst] / 1.6
    stop = next(i for i, kl in enumerate(kls) if kl > 1.5 * target)
    skipped, _, steps = one_update(name, target_kl=target)
    assert (skipped, steps) == (6 - stop, stop) and stop > 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_ratio_threshold_leaves_out_single_steps(one_update, name):
    """The mini-batches whose mean ratio is above, and no others."""
    threshold = 1.001
    skipped, seen, steps = one_update(name, ratio_threshold=threshold)
    beyond = sum(ratio > threshold for _, ratio in seen)
    assert len(seen) == 6 and skipped == beyond and steps == 6 - beyond and 0 < beyond < 6


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_policy_that_samples_otherwise_is_caught(world, tmp_path, monkeypatch, name):
    """Dropout in the update but not in the rollout: the first ratio is off, and the run stops and says so."""
    forward = GPT2LMHeadModel.forward

    def with_dropout(*args, **kwargs):
        output = forward(*args, **kwargs)
        if torch.is_grad_enabled():
            output.logits = torch.dropout(output.logits, 0.05, True)
        return output

    monkeypatch.setattr(GPT2LMHeadModel, "forward", with_dropout)
    settings = settings_of(world, BOTH | {"total_episodes": 8, "dataset_test_split": "none"})
    with pytest.raises(SCRIPTS[name].UserError, match="ratio pi/pi_old is off"):
        SCRIPTS[name].train(SCRIPTS[name].Args(output_dir=str(tmp_path), **settings))


@pytest.mark.parametrize("name", SCRIPTS)
def test_errors_of_the_first_ratio_do_not_cancel(world, tmp_path, monkeypatch, name):
    """Each token's is looked at: old log-probabilities too high and too low in turn are not right on the whole."""
    script, sample_batch = SCRIPTS[name], SCRIPTS[name].sample_batch

    def sample_wrongly(*args):
        r = sample_batch(*args)
        r.old_logprobs += torch.tensor([0.01, -0.01]).repeat(4)
        return r

    monkeypatch.setattr(script, "sample_batch", sample_wrongly)
    settings = settings_of(world, BOTH | {"total_episodes": 8, "dataset_test_split": "none", "stop_token": "none"})
    with pytest.raises(script.UserError, match="ratio pi/pi_old is off by 0.01 "):
        script.train(script.Args(output_dir=str(tmp_path), **settings | {"missing_eos_penalty": None}))


def test_the_limit_of_a_response_includes_both_ends(world, monkeypatch):
    """From --response-length-min to --response-length."""
    policy, drawn = torch.nn.Module(), set()
    policy.tokenizer = world.tokenizer

    def sample(policy, prompts, prompt_mask, uniforms, *_):
        drawn.add(uniforms.shape[1])
        return prompts, prompt_mask, prompt_mask.any(1), uniforms

    monkeypatch.setattr(ppo, "sample", sample)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(40):
            ppo.sample_batch(policy, [{"input_ids": [5, 6]}], ppo.Args(response_length=8, response_length_min=7))
    assert drawn == {7, 8}
