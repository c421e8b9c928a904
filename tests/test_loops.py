"""The loops of ppo.py and rloo.py, done once more by hand.

A formula may be right and yet be given the wrong numbers. So `train` runs as it stands, in float64, while the tokens it
draws and the orders of its mini-batches are written down. With these, `Plain` makes the same updates in the plainest
way there is: one row at a time, without padding, cache, masks or micro-batches, formulas from the papers. Every number
of metrics.jsonl must agree with it, and in the end all weights.

Policy and reward model have dropout in their configs here, as real ones do; the reward model is shifted by a bias, the
stop token is a word, and the prompts do not divide into batches.
"""

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from float64 import float64, load_in_float64
from replay import share_of_rate
from runs import lines_of, watch
from safetensors.torch import load_file
from sources import ROOT, lines_of as lines_of_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

BIAS = 0.7  # of the reward model
GOLD = """
def count_letters(prompts, completions, **columns):
    return [len(prompt + completion) / 100 for prompt, completion in zip(prompts, completions)]
"""

BOTH = dict(
    batch_size=8,
    total_episodes=24,
    response_length=8,
    micro_batch_size=3,
    num_ppo_epochs=2,
    num_mini_batches=2,
    learning_rate=2e-3,
    max_grad_norm=0.01,
    missing_eos_penalty=1.5,
    stop_token=(".",),
    temperature=0.8,
    eval_steps=2,
    num_eval_prompts=5,
    eval_temperature=0.6,
    reward_weights=(1.0, 0.0),
    kl_coef=0.1,
)
EXTRAS = dict(adaptive_kl=True, kl_horizon=40, ema_decay=0.9, ptx_coef=0.3)
RUNS = {  # each with about half of what can be asked for
    "ppo": dict(
        kl_target=3.6,  # near the KL of this run: else the controller moves by its bounds alone
        gamma=0.9,
        lam=0.8,
        whiten_rewards=True,
        use_score_scaling=True,
        use_score_norm=True,
        score_clip=0.8,
        critic_learning_rate=5e-4,
        critic_warmup_updates=1,
        cliprange=0.15,
        cliprange_value=0.1,
        vf_coef=0.4,
        gradient_checkpointing=True,
    ),
    "ppo_plain": dict(
        critic="shared",
        kl_estimator="full",
        whiten_advantages=False,
        num_mini_batches=1,
        warmup_ratio=0.7,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
    ),
    "rloo": dict(kl_target=9.0, rloo_k=2, cliprange=0.15),
    "rloo_tokens": dict(
        rloo_k=4,
        token_level_kl=True,
        normalize_reward=True,
        reward_clip_range=1.2,
        normalize_advantage=True,
        kl_estimator="full",
        warmup_ratio=0.7,
        gradient_checkpointing=True,
    ),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Models with dropout, prompts and texts: a function from the name of a run to its settings."""
    folder = tmp_path_factory.mktemp("world")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    drops = dict(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    policy = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft", **drops)
    reward_model = AutoModelForSequenceClassification.from_pretrained(ROOT / "toy/reward_model", **drops)
    reward_model.config.reward_bias = BIAS
    for name, model in (("sft", policy), ("reward_model", reward_model)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for split, n in (("train", 11), ("validation", 7)):
        (folder / "prompts").mkdir(exist_ok=True)
        rows = lines_of_file(f"toy/data/prompts/{split}.jsonl")[:n]
        (folder / f"prompts/{split}.jsonl").write_text("\n".join(rows))
    rows = map(json.loads, lines_of_file("toy/data/sft/train.jsonl")[:9])
    words = [f"{row['prompt']}{row['completion']}".split()[: 5 + i] for i, row in enumerate(rows)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": " ".join(text)}) for text in words))
    (folder / "gold.py").write_text(GOLD)

    def settings(name):
        more = BOTH | RUNS[name]
        if name in ("ppo", "rloo"):
            more |= EXTRAS | {"pretrain_data": f"{folder}/texts.jsonl"}
        return more | dict(
            model=f"{folder}/sft",
            reward_model=f"{folder}/reward_model",
            dataset=f"{folder}/prompts",
            reward_fn=("reward_model", f"{folder}/gold.py:count_letters"),
        )

    return settings


# --- by hand


def mean(numbers):
    return sum(map(float, numbers)) / len(numbers)


def whiten(parts, shift=True):
    """Tensors of different lengths, as one with variance 1."""
    joined = torch.cat(parts)
    whitened = (joined - joined.mean()) / (joined.var() + 1e-8).sqrt()
    if not shift:
        whitened = whitened + joined.mean()
    return whitened.split([len(part) for part in parts])


def discounted(numbers, decay):
    """(n,) for each number the sum of it and of what follows, each weighed by decay to the power of its distance."""
    n = len(numbers)
    return torch.stack([sum(decay ** (s - t) * numbers[s] for s in range(t, n)) for t in range(n)])


class Plain:
    """A run by hand. A row is (prompt, response), two lists of token ids without padding."""

    def __init__(self, args, noted):
        self.args = args
        self.noted = noted
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.stop = self.tokenizer.convert_tokens_to_ids(args.stop_token[0])
        load = dict(dtype=torch.float64)
        self.policy = AutoModelForCausalLM.from_pretrained(args.model, **load).eval()
        self.reference = deepcopy(self.policy)
        self.ema = deepcopy(self.policy)
        self.reward_model = AutoModelForSequenceClassification.from_pretrained(args.reward_model, **load).eval()
        self.is_ppo = hasattr(args, "gamma")
        self.by_token = self.is_ppo or args.token_level_kl
        self.kl_coef = args.kl_coef
        self.history = []  # of scores
        groups = [{"params": list(self.policy.parameters())}]
        if self.is_ppo:
            self.make_critic()
            groups.append({"params": self.critic_parameters})
        self.optimizer = torch.optim.AdamW(groups, weight_decay=args.weight_decay)

    def make_critic(self):
        """The reward model, shift included; or a head of zeros on the policy's trunk."""
        self.body = self.policy.base_model
        self.head = torch.nn.Linear(self.body.config.hidden_size, 1)
        self.critic_parameters = list(self.head.parameters())
        if self.args.critic == "shared":
            torch.nn.init.zeros_(self.head.weight)
            torch.nn.init.zeros_(self.head.bias)
        else:
            self.body = deepcopy(self.reward_model.base_model)
            self.head.weight.data = self.reward_model.score.weight.data.clone()
            torch.nn.init.constant_(self.head.bias, BIAS)
            self.critic_parameters += self.body.parameters()

    def logprobs(self, model, row, temperature=None):
        """(T, V) of all tokens in place of those of the response."""
        prompt, response = row
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        return (logits / (temperature or self.args.temperature)).log_softmax(-1)

    def of_tokens(self, logprobs, row):
        return logprobs[range(len(row[1])), row[1]]

    def values(self, row):
        """(T,) of the states before each token."""
        hidden = self.body(torch.tensor([row[0] + row[1]])).last_hidden_state[0]
        return self.head(hidden[len(row[0]) - 1 : -1]).squeeze(1)

    def kl(self, row):
        """(T,) by the estimator asked for."""
        p = self.logprobs(self.policy, row)
        q = self.logprobs(self.reference, row)
        if self.args.kl_estimator == "full":
            return (p.exp() * (p - q)).sum(-1)
        return self.of_tokens(p - q, row)

    def learned_reward(self, row):
        """At the last token."""
        hidden = self.reward_model.base_model(torch.tensor([row[0] + row[1]])).last_hidden_state[0, -1]
        return self.reward_model.score(hidden).item() + BIAS

    def gold_reward(self, row):
        texts = self.tokenizer.batch_decode(row, skip_special_tokens=True)
        return len("".join(texts)) / 100

    @torch.no_grad()
    def look(self, rows):
        """All that is found out about rows before anything is learnt from them."""
        batch = SimpleNamespace(rows=rows, kl=[self.kl(row) for row in rows])
        batch.old = [self.of_tokens(self.logprobs(self.policy, row), row) for row in rows]
        batch.ref = [self.of_tokens(self.logprobs(self.reference, row), row) for row in rows]
        batch.rewards = {
            "reward_model": [self.learned_reward(row) for row in rows],
            "count_letters": [self.gold_reward(row) for row in rows],
        }
        ended = [row[1][-1] == self.stop for row in rows]
        batch.scores = torch.tensor(batch.rewards["reward_model"])
        batch.scores -= self.args.missing_eos_penalty * ~torch.tensor(ended)
        k3 = [(ref - old).exp() - 1 - (ref - old) for old, ref in zip(batch.old, batch.ref)]
        kl = mean([x.sum() for x in batch.kl])
        score = batch.scores.mean().item()
        batch.stats = {
            "objective/kl": kl,
            "objective/kl_k3": mean([x.sum() for x in k3]),
            "objective/kl_coef": self.kl_coef,
            "objective/entropy": -mean([x.sum() for x in batch.old]),
            "objective/non_score_reward": -self.kl_coef * kl,
            "objective/rlhf_reward": score - self.kl_coef * kl,
            "objective/scores": score,
            "objective/scores_std": batch.scores.std(correction=0).item(),
            "val/num_eos_tokens": sum(ended),
            "val/eos_share": mean(ended),
            "val/response_length": mean([len(row[1]) for row in rows]),
        }
        for name, rewards in batch.rewards.items():
            batch.stats[f"rewards/{name}/mean"] = mean(rewards)
            batch.stats[f"rewards/{name}/std"] = torch.tensor(rewards).std().item()
        return batch

    @torch.no_grad()
    def ppo_advantages(self, batch):
        """Fills in values, returns and advantages, a tensor for each row."""
        args = self.args
        batch.values = [self.values(row) for row in batch.rows]
        scores = batch.scores
        if args.use_score_scaling:
            self.history += scores.tolist()
            everything = torch.tensor(self.history)
            scores = (scores - everything.mean()) / everything.std()
        if args.score_clip:
            scores = scores.clamp(-args.score_clip, args.score_clip)
        rewards = [-self.kl_coef * kl for kl in batch.kl]
        for reward, score in zip(rewards, scores):
            reward[-1] += score
        if args.whiten_rewards:
            rewards = whiten(rewards, shift=False)
        batch.advantages = []
        for reward, values in zip(rewards, batch.values):
            later = [*values[1:], 0.0]
            deltas = [r + args.gamma * v - value for r, v, value in zip(reward, later, values)]
            batch.advantages.append(discounted(deltas, args.gamma * args.lam))
        batch.returns = [a + v for a, v in zip(batch.advantages, batch.values)]
        residual = torch.cat(batch.returns) - torch.cat(batch.values)
        batch.stats["val/explained_variance"] = 1 - (residual.var() / torch.cat(batch.returns).var()).item()
        if args.whiten_advantages:
            batch.advantages = whiten(batch.advantages)

    @torch.no_grad()
    def rloo_advantages(self, batch):
        """Fills in advantages: a number for each row, or for each of its tokens."""
        args = self.args
        k = args.rloo_k
        scores = batch.scores
        groups = scores.view(-1, k).tolist()
        batch.stats["objective/equal_groups"] = mean([len(set(group)) == 1 for group in groups])
        if args.normalize_reward:
            limit = args.reward_clip_range
            scores = ((scores - scores.mean()) / scores.std()).clamp(-limit, limit)
        penalties = [-self.kl_coef * kl for kl in batch.kl]
        if not self.by_token:
            scores = scores + torch.stack([x.sum() for x in penalties])
        centred = []
        for i, score in enumerate(scores):
            first = i - i % k
            others = [scores[j] for j in range(first, first + k) if j != i]
            centred.append(score - sum(others) / (k - 1))
        batch.advantages = [x[None] for x in centred]
        if self.by_token:
            batch.advantages = [c + discounted(x, 1.0) for c, x in zip(centred, penalties)]
        if args.normalize_advantage:
            batch.advantages = whiten(batch.advantages)

    def policy_loss(self, batch, i):
        """Losses of the actions of row i, and what is logged of them and of its tokens."""
        row = batch.rows[i]
        all_logprobs = self.logprobs(self.policy, row)
        new = self.of_tokens(all_logprobs, row)
        old = batch.old[i]
        if not self.by_token:
            new = new.sum(0, keepdim=True)
            old = old.sum(0, keepdim=True)
        ratio = (new - old).exp()
        nearest = ratio.clamp(1 - self.args.cliprange, 1 + self.args.cliprange)
        unclipped = -batch.advantages[i] * ratio
        clipped = -batch.advantages[i] * nearest
        losses = torch.max(unclipped, clipped)
        stats = {
            "loss/policy_avg": losses,
            "val/ratio": ratio,
            "policy/clipfrac_avg": clipped > unclipped,
            "policy/approxkl_avg": 0.5 * (new - old) ** 2,
            "policy/entropy_avg": -(all_logprobs.exp() * all_logprobs).sum(-1),
        }
        return losses, stats

    def value_loss(self, batch, i):
        values = self.values(batch.rows[i])
        old = batch.values[i]
        near = torch.max(torch.min(values, old + self.args.cliprange_value), old - self.args.cliprange_value)
        plain = (values - batch.returns[i]) ** 2
        clipped = (near - batch.returns[i]) ** 2
        losses = 0.5 * torch.max(plain, clipped)
        return losses, {"loss/value_avg": losses, "val/clipfrac_avg": clipped > plain}

    def pretrain_loss(self):
        """Mean of -log pi over the tokens of the texts that were drawn, each with its EOS."""
        texts = [json.loads(line)["text"] for line in Path(self.args.pretrain_data).read_text().splitlines()]
        logprobs = []
        drawn = self.noted.drawn.pop(0)
        assert len(drawn) == self.args.batch_size // self.args.num_mini_batches
        for i in drawn:
            first, *ids = self.tokenizer(texts[i])["input_ids"] + [self.tokenizer.eos_token_id]
            row = ([first], ids)
            logprobs.append(self.of_tokens(self.logprobs(self.policy, row, 1.0), row))
        return -torch.cat(logprobs).mean()

    def step(self, batch, rows, logged):
        losses = []
        value_losses = [torch.zeros(1)]
        for i in rows:
            loss, stats = self.policy_loss(batch, i)
            losses.append(loss)
            if self.is_ppo:
                loss, more = self.value_loss(batch, i)
                value_losses.append(loss)
                stats |= more
            for name, x in stats.items():
                logged.setdefault(name, []).append(x.detach().double())
        loss = torch.cat(losses).mean()
        if self.is_ppo:
            loss = loss + self.args.vf_coef * torch.cat(value_losses[1:]).mean()
        if self.args.ptx_coef:
            ptx_loss = self.pretrain_loss()
            logged.setdefault("loss/ptx", []).append(ptx_loss.detach()[None])
            loss = loss + self.args.ptx_coef * ptx_loss
        self.optimizer.zero_grad()
        loss.backward()
        for name, group in zip(("policy/grad_norm", "val/grad_norm"), self.optimizer.param_groups):
            norm = torch.cat([p.grad.flatten() for p in group["params"]]).norm()
            logged.setdefault(name, []).append(norm[None])
            for p in group["params"]:
                p.grad *= min(1.0, self.args.max_grad_norm / norm)
        self.optimizer.step()
        with torch.no_grad():
            for average, p in zip(self.ema.parameters(), self.policy.parameters()):
                average.copy_(self.args.ema_decay * average + (1 - self.args.ema_decay) * p)

    def update(self, number, num_updates):
        args = self.args
        batch = self.look(self.noted.next_rows(self, args.temperature))
        if self.is_ppo:
            self.ppo_advantages(batch)
        else:
            self.rloo_advantages(batch)
        warmup = int(args.warmup_ratio * num_updates)
        share = share_of_rate(args.lr_scheduler_type, number - 1, num_updates, warmup)
        rates = [args.learning_rate * share]
        if self.is_ppo:
            rates.append((args.critic_learning_rate or args.learning_rate) * share)
            if number <= args.critic_warmup_updates:
                rates[0] = 0.0
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate
        logged = {}
        for _ in range(args.num_ppo_epochs):
            order = self.noted.orders.pop(0)
            for rows in order.split(args.batch_size // args.num_mini_batches):
                self.step(batch, rows.tolist(), logged)
        stats = batch.stats | {name: torch.cat(parts).mean().item() for name, parts in logged.items()}
        stats["val/ratio_var"] = torch.cat(logged["val/ratio"]).var(correction=0).item()
        stats |= {"val/skipped_steps": 0, "policy/first_ratio_error": 0, "rewards/unscored": 0}
        stats["lr"] = rates[0]
        stats["episode"] = number * args.batch_size
        if not self.is_ppo:
            stats["val/clipfrac_avg"] = 0
        if number % args.eval_steps == 0 or number == num_updates:
            answers = self.look(self.noted.next_rows(self, args.eval_temperature))
            for name in ("objective/scores", "val/eos_share", "val/response_length"):
                stats[f"eval/{name.split('/')[1]}"] = answers.stats[name]
            stats |= {f"eval/rewards/{name}/mean": mean(rewards) for name, rewards in answers.rewards.items()}
            stats["eval/log_ratio"] = mean([(old - ref).sum() for old, ref in zip(answers.old, answers.ref)])
        if args.adaptive_kl:  # Ziegler et al.: by at most 20 % * episodes / horizon
            error = max(-0.2, min(0.2, stats["objective/kl"] / args.kl_target - 1))
            self.kl_coef *= 1 + error * args.batch_size / args.kl_horizon
        return stats


# --- a run, noted


class Noted:
    """What a run draws: responses, orders of mini-batches, pretraining texts; and what it leaves."""

    def __init__(self, script, settings, folder, monkeypatch):
        self.rollouts = []
        self.orders = []
        self.drawn = []
        module = load_in_float64(script, monkeypatch)

        def note_batch(r, *_):
            rows = zip(r.prompts, r.prompt_mask, r.responses, r.mask, r.old_logprobs)
            self.rollouts.append([(p[a].tolist(), y[b].tolist(), x[b]) for p, a, y, b, x in rows])

        def note_order(order, n, **options):
            if not options:
                self.orders.append(order)

        watch(monkeypatch, module, "sample_batch", note_batch)
        watch(monkeypatch, torch, "randperm", note_order)
        watch(monkeypatch, torch, "randint", lambda drawn, *_: self.drawn.append(drawn.tolist()))
        watch(monkeypatch, module.Run, "finish", lambda _, run: setattr(self, "memory", run.memory))
        self.args = module.Args(output_dir=str(folder), device="cpu", num_sample_generations=0, **settings)
        module.train(self.args)
        self.lines = lines_of(folder)

    def next_rows(self, plain, temperature):
        """The rows of the next rollout; their log-probabilities are those of the policy as it is, at a temperature."""
        rows = self.rollouts.pop(0)
        for prompt, response, logprobs in rows:
            row = (prompt, response)
            expected = plain.of_tokens(plain.logprobs(plain.policy, row, temperature), row)
            torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)
            assert plain.stop not in response[:-1]
            assert response[-1] == plain.stop or len(response) == plain.args.response_length
        return [(prompt, response) for prompt, response, _ in rows]


def is_of_the_clock(name):
    return name.startswith(("time/", "perf/")) or name == "eps"


@pytest.mark.parametrize("name", RUNS)
def test_every_number_by_hand(name, world, tmp_path, monkeypatch):
    with float64():
        noted = Noted(name.split("_")[0], world(name), tmp_path / "run", monkeypatch)
        evaluated = [[prompt for prompt, _, _ in rows] for rows in noted.rollouts if len(rows) == 5]
        plain = Plain(noted.args, noted)
        texts = [json.loads(line)["prompt"] for line in lines_of_file("toy/data/prompts/validation.jsonl")[:5]]
        assert evaluated == [[plain.tokenizer(text)["input_ids"] for text in texts]] * 2
        for number, line in enumerate(noted.lines, 1):
            expected = plain.update(number, 3)
            line = {name: x for name, x in line.items() if not is_of_the_clock(name)}
            assert line == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert len(noted.lines) == 3 and not noted.rollouts and not noted.orders and not noted.drawn
        assert 0.1 < line["val/eos_share"] < 0.9 and abs(line["objective/kl"]) > 0.1
        assert noted.args.kl_coef * noted.memory.get("kl_factor", 1.0) == pytest.approx(plain.kl_coef)
        averages = [("ema", plain.ema)] if noted.args.ema_decay else []
        for folder, by_hand in [(".", plain.policy), *averages]:
            saved = load_file(tmp_path / "run" / folder / "model.safetensors")
            for name, p in by_hand.named_parameters():
                torch.testing.assert_close(saved[name], p.detach(), rtol=0, atol=1e-6, msg=name)
