"""The loops of sft.py, reward_model.py and dpo.py, watched from outside and done once more by hand.

A watched run says which texts each optimiser step was given. With those, `replay` trains a copy of the model in the
plainest way there is: one unpadded text at a time, formulas from the papers, torch's own AdamW. Every line of
metrics.jsonl must agree with it, and the saved model with the last line. Most models here have dropout, as real ones do
and those of the toy world do not.
"""

import functools
import json
import math
import shutil
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_train import ROOT, run, untimed
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

import dpo
import reward_model
import sft

# --- the world: models, texts


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "toy/sft")


@pytest.fixture(scope="module")
def models(tokenizer, tmp_path_factory):
    """Folders of tiny models with random weights: `plain` has no dropout, `dropout` and `llama` have much of it."""
    folder = tmp_path_factory.mktemp("models")
    tokens = dict(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, initializer_range=0.2)
    sizes = tokens | dict(n_embd=16, n_layer=2, n_head=2, n_positions=64)
    torch.manual_seed(7)
    for name, p in (("plain", 0.0), ("dropout", 0.3)):
        model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=p, embd_pdrop=p, attn_pdrop=p))
        if p:  # texts are to end now and then
            model.transformer.ln_f.bias.data += 8 * model.lm_head.weight[0].detach()
        model.config.initializer_range = 0.02  # as usual, of what is added to it later
        model.save_pretrained(folder / name)
    sizes = tokens | dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    llama = LlamaConfig(**sizes, max_position_embeddings=64, attention_dropout=0.5)
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    for name in ("plain", "dropout", "llama"):
        tokenizer.save_pretrained(folder / name)
    return folder


def toy_rows(name, split, n):
    """The first n rows of a part of the toy data."""
    return [json.loads(line) for line in (ROOT / f"toy/data/{name}/{split}.jsonl").read_text().splitlines()[:n]]


def write_data(folder, train, validation, test=()):
    """A dataset with these rows; returns its folder."""
    folder.mkdir()
    for split, rows in (("train", train), ("validation", validation), ("test", test)):
        if rows:
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


# --- a run, watched


@dataclass
class Watch:
    """What a run shows from outside: the texts of each optimiser step, and the weights before the first."""

    steps: list = field(default_factory=list)  # of each, a list of forward passes, which are lists of texts
    passes: list = field(default_factory=list)  # those since the last step
    modes: set = field(default_factory=set)  # whether the model was in training mode, in passes with a gradient
    before: list | None = None

    def __enter__(self):
        self.hook, self.patch = register_optimizer_step_pre_hook(self.note_step), pytest.MonkeyPatch()
        for body in (GPT2Model, LlamaModel):
            self.patch.setattr(body, "forward", self.noted(body.forward))
        return self

    def __exit__(self, *_):
        self.hook.remove(), self.patch.undo()

    def noted(self, forward):
        """The forward pass of a model's body; where a gradient follows, its texts are noted without their padding."""

        @functools.wraps(forward)
        def call(body, *args, **kwargs):
            if torch.is_grad_enabled():
                ids, mask = kwargs.get("input_ids", args[0] if args else None), kwargs["attention_mask"].bool()
                self.modes.add(body.training)
                self.passes.append([tuple(row[real].tolist()) for row, real in zip(ids, mask)])
            return forward(body, *args, **kwargs)

        return call

    def note_step(self, optimizer, *_):
        """Called before each step."""
        if self.before is None:
            self.before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        self.steps.append(self.passes)
        self.passes = []


def watched(module, folder, **settings):
    """A finished run: its settings as train() left them, its folder, its lines, and what the watch saw."""
    with Watch() as watch:
        lines = run(module, folder, **settings)
    args = json.loads((folder / "args.json").read_text())
    args = SimpleNamespace(**{name: args[name] for name in vars(module.Args())})
    texts = [[text for texts in step for text in texts] for step in watch.steps]
    return SimpleNamespace(args=args, folder=folder, lines=lines, watch=watch, texts=texts)


def rate(kind, i, n, warmup):
    """Share of the learning rate in step i (from 0) of n: a line up to 1, then down, straight or along a cosine."""
    if i < warmup:
        return i / warmup
    done = (i - warmup) / (n - warmup)
    return {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[kind]


def replay(run, model, read_step, evaluate):
    """Makes the steps of a run by hand; each line must say what they say.

    read_step(model, texts) gives the loss and the stats of a step, evaluate(model) those of the test split.
    """
    args, n, clipped = run.args, len(run.lines), 0
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=args.weight_decay)
    assert len(run.texts) == n
    for i, (texts, line) in enumerate(zip(run.texts, run.lines)):
        loss, stats = read_step(model, texts)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        clipped += norm > args.max_grad_norm
        for p in model.parameters():
            p.grad *= min(1.0, args.max_grad_norm / norm)
        lr = args.learning_rate * rate(args.lr_scheduler_type, i, n, int(args.warmup_ratio * n))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step(), optimizer.zero_grad()
        stats |= {"step": i + 1, "lr": lr, "loss": loss.item(), "grad_norm": norm}
        if (i + 1) % args.eval_steps == 0 or i + 1 == n:
            stats |= evaluate(model)
        agree(line, stats)
        assert any(name.startswith("eval/") for name in line) == any(name.startswith("eval/") for name in stats)
    assert 0 < clipped < n  # or the test would not see whether the gradient is clipped


def agree(line, stats):
    """A line of metrics.jsonl has these numbers."""
    for name, value in stats.items():
        assert line[name] == pytest.approx(value, rel=2e-3, abs=5e-4), f"step {line['step']}: {name}"


def each_row_once(run, rows, batch_size, grouped=True):
    """Every pass shows each row once, in mixed order, if grouped in batches of like length. Rows are tuples."""
    per_pass = math.ceil(len(rows) / batch_size)
    assert len(run.lines) == math.ceil(run.args.num_train_epochs * per_pass)
    for i, line in enumerate(run.lines):
        assert line["epoch"] == pytest.approx((i + 1) / per_pass)
    whole = [run.texts[i : i + per_pass] for i in range(0, len(run.texts) - per_pass + 1, per_pass)]
    assert whole
    for batches in whole:
        assert sorted(len(batch) for batch in batches) == sorted([batch_size] * (per_pass - 1)
            + [len(rows) - batch_size * (per_pass - 1)])  # fmt: skip
        assert Counter(text for batch in batches for text in batch) == Counter(rows)
        spans = sorted((min(map(len, batch)), max(map(len, batch))) for batch in batches)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])) == (grouped or len(set(map(len, rows))) == 1)
    if grouped:
        order = [min(map(len, batch)) for batch in whole[0]]
        assert order not in (sorted(order), sorted(order, reverse=True))
        rest = [set(batch) for batch in run.texts[per_pass:]]
        assert rest != [set(batch) for batch in whole[0]][: len(rest)] or not rest
    else:  # mixed anew in each pass
        one, two = (set(map(frozenset, run.texts[i : i + per_pass])) for i in (0, per_pass))
        assert not two <= one and frozenset(rows[:batch_size]) not in one


def at_most(run, size):
    """No forward pass of a step has more rows than that; where there are more, they come in several."""
    sizes = [[len(texts) for texts in step] for step in run.watch.steps]
    assert max(max(step) for step in sizes) == size and max(len(step) for step in sizes) > 1


def evaluations(run, prefix="eval/"):
    """The steps whose lines have an evaluation."""
    return [line["step"] for line in run.lines if any(name.startswith(prefix) for name in line)]


# --- by hand: one text, unpadded


def read_text(model, ids, start, temperature=1.0):
    """Log-probabilities of a text's tokens from `start` on, and which were likeliest. Nothing predicts the first."""
    start = max(start, 1)
    logits, tokens = model(torch.tensor([ids])).logits[0, start - 1 : -1].float() / temperature, list(ids[start:])
    return logits.log_softmax(-1)[range(len(tokens)), tokens], logits.argmax(-1) == torch.tensor(tokens)


def ids_of(tokenizer, prompt, text):
    """Prompt and text, encoded apart, and EOS: (prompt, text)."""
    start = tokenizer(prompt)["input_ids"] if prompt else []
    return start, tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]


# --- sft.py


SFT = dict(per_device_train_batch_size=3, gradient_accumulation_steps=2, learning_rate=1e-2, weight_decay=0.3,
           num_train_epochs=1.75, warmup_ratio=0.3, eval_steps=4, max_length=36)  # fmt: skip


@pytest.fixture(scope="module")
def completions(tmp_path_factory):
    """Texts with and without a prompt, one of which is all prompt within max_length."""
    rows, tests = toy_rows("sft", "train", 28), toy_rows("sft", "validation", 11)
    for row in [*rows[::4], *tests[::3]]:
        row["prompt"], row["completion"] = "", row["prompt"] + row["completion"]
    rows[1]["prompt"] = rows[1]["prompt"] * 9
    return SimpleNamespace(
        rows=rows, tests=tests, folder=write_data(tmp_path_factory.mktemp("texts") / "data", rows, tests)
    )


def labelled(tokenizer, rows, length):
    """{ids: number of the first label} of rows with prompt and completion, cut to a length; none without a label."""
    found = {}
    for row in rows:
        prompt, completion = ids_of(tokenizer, row["prompt"], row["completion"])
        if len(prompt) < length:
            found[tuple(prompt + completion)[:length]] = len(prompt)
    return found


def sft_step(first_label):
    """Reads the texts of a step, or of the test split: mean loss over labels, and what is logged beside it."""

    def read(model, texts):
        parts = [read_text(model, ids, first_label[ids]) for ids in texts]
        logps, hits = (torch.cat(x) for x in zip(*parts))
        return -logps.mean(), {"mean_token_accuracy": hits.float().mean().item(), "num_tokens": len(logps)}

    return read


def sft_evaluation(first_label, eos):
    """What sft.py should log of the test split."""

    @torch.no_grad()
    def evaluate(model):
        loss, stats = sft_step(first_label)(model, list(first_label))
        ends = [read_text(model, ids, start)[0][-1] for ids, start in first_label.items() if ids[-1] == eos]
        return {
            "eval/loss": loss.item(),
            "eval/perplexity": math.exp(loss),
            "eval/mean_token_accuracy": stats["mean_token_accuracy"],
            "eval/eos_loss": -sum(ends).item() / len(ends),
        }

    return evaluate


def replay_sft(run, model, rows, tests, eos):
    """Replays a run of sft.py; num_tokens is a sum over the run."""
    total, read = 0, sft_step(rows)

    def read_step(model, texts):
        nonlocal total
        loss, stats = read(model, texts)
        total += stats["num_tokens"]
        return loss, stats | {"num_tokens": total}

    replay(run, model, read_step, sft_evaluation(tests, eos))


def saved(folder):
    """The model that a run has left, dropout off."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def sft_run(models, completions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft") / "run"
    return watched(sft, folder, model=str(models / "plain"), dataset=completions.folder, **SFT)


def test_sft_by_hand(sft_run, models, completions, tokenizer):
    """Each step, with accumulation, clipping, weight decay and schedule; the evaluations; the model that is saved."""
    rows, tests = (labelled(tokenizer, x, SFT["max_length"]) for x in (completions.rows, completions.tests))
    lengths = Counter(map(len, rows))
    assert len(rows) == 27 and 3 < lengths[36] < 20 and list(rows.values()).count(0) == 7  # cut, and without a prompt
    each_row_once(sft_run, list(rows), 6, grouped=False)
    at_most(sft_run, 3)
    assert evaluations(sft_run) == [4, 8, 9]
    replay_sft(sft_run, saved(models / "plain"), rows, tests, tokenizer.eos_token_id)
    agree(sft_run.lines[-1], sft_evaluation(tests, tokenizer.eos_token_id)(saved(sft_run.folder)))
    before = 0
    for line in sft_run.lines:  # tokens of the step, twice
        now, before = line["num_tokens"] - before, line["num_tokens"]
        assert line["perf/tokens_per_second"] * line["time/step"] == pytest.approx(now)


def test_packing_by_hand(models, completions, tokenizer, tmp_path):
    """Blocks are the joined texts cut evenly, if they have a label; that of a block's first token is not predicted."""
    length = 32
    rows = [ids_of(tokenizer, row["prompt"], row["completion"]) for row in completions.rows]
    tokens = [token for prompt, end in rows for token in prompt + end]
    ours = [label for prompt, end in rows for label in [False] * len(prompt) + [True] * len(end)]
    starts = range(0, len(tokens) - len(tokens) % length, length)
    starts = [start for start in starts if any(ours[start + 1 : start + length])]  # one block is all prompt
    blocks = [tuple(tokens[start : start + length]) for start in starts]
    fits = lambda row: sum(map(len, ids_of(tokenizer, row["prompt"], row["completion"]))) <= length  # noqa: E731
    tests = [row for row in completions.tests if fits(row)]
    assert len(tests) > 3
    data = write_data(tmp_path / "data", completions.rows, tests)
    settings = SFT | dict(packing=True, max_length=length, num_train_epochs=1.5)
    packed = watched(sft, tmp_path / "run", model=str(models / "plain"), dataset=data, **settings)
    each_row_once(packed, blocks, 6, grouped=False)

    def read_step(model, texts):
        logps = []
        for ids in texts:
            start = starts[blocks.index(ids)]
            logps.append(read_text(model, ids, 0)[0][ours[start + 1 : start + length]])
        return -torch.cat(logps).mean(), {}

    evaluate = sft_evaluation(labelled(tokenizer, tests, length), tokenizer.eos_token_id)
    replay(packed, saved(models / "plain"), read_step, evaluate)
    assert packed.lines[0]["num_tokens"] < sum(len(ids) - 1 for ids in packed.texts[0])


@pytest.fixture(scope="module")
def sft_dropout(models, completions, tmp_path_factory):
    """A run with dropout, without tables of samples and with them."""
    settings = SFT | dict(model=str(models / "dropout"), dataset=completions.folder, save_steps=3, save_total_limit=3)
    folder = tmp_path_factory.mktemp("sft")
    return [watched(sft, folder / str(n), num_sample_generations=n, **settings) for n in (0, 4)]


def test_sft_has_dropout_in_training_alone(sft_dropout, models, completions, tokenizer):
    rows, tests = (labelled(tokenizer, x, SFT["max_length"]) for x in (completions.rows, completions.tests))
    for one in sft_dropout:
        loss, _ = sft_step(rows)(saved(models / "dropout"), one.texts[0])
        assert abs(one.lines[0]["loss"] - loss.item()) > 0.01
        assert one.watch.modes == {True}  # also after evaluations and tables
        agree(one.lines[-1], sft_evaluation(tests, tokenizer.eos_token_id)(saved(one.folder)))


def test_sample_tables_change_nothing(sft_dropout, models):
    """Neither what training draws nor the generation config that is saved."""
    without, with_tables = sft_dropout
    assert untimed(without.lines) == untimed(with_tables.lines)
    for one in sft_dropout:
        ours, theirs = (GenerationConfig.from_pretrained(x).to_dict() for x in (one.folder, models / "dropout"))
        assert ours == theirs


def resumed_is_the_same(module, whole, tmp_path):
    """A run killed after its first checkpoint, in the middle of a pass, goes on to the same lines and weights."""
    copy = tmp_path / "resumed"
    shutil.copytree(whole.folder, copy)
    for file in [*copy.glob("*.safetensors"), *sorted(copy.glob("checkpoints/*.pt"))[1:]]:
        file.unlink()
    settings = vars(whole.args) | dict(resume=str(copy))
    skipped = ("output_dir", "device")
    lines = run(module, copy, **{name: x for name, x in settings.items() if name not in skipped})
    assert untimed(lines) == untimed(whole.lines)
    for file in whole.folder.glob("*.safetensors"):
        a, b = load_file(file), load_file(copy / file.name)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_resumed_sft_run_draws_the_same_dropout(sft_dropout, tmp_path):
    """Also in the pass that begins after it has resumed; num_tokens goes on."""
    resumed_is_the_same(sft, sft_dropout[0], tmp_path)


# --- reward_model.py


REWARD = dict(per_device_train_batch_size=3, gradient_accumulation_steps=2, learning_rate=1e-2, weight_decay=0.3,
              num_train_epochs=1.75, warmup_ratio=0.3, eval_steps=4, max_length=36, save_steps=3,
              save_total_limit=3)  # fmt: skip


@pytest.fixture(scope="module")
def preferences(tmp_path_factory):
    """Pairs with margins, with and without a prompt; the two texts of one are the same within max_length."""
    rows, tests = toy_rows("preferences", "train", 28), toy_rows("preferences", "validation", 12)
    for i, row in enumerate(rows):
        row["margin"] = (i % 4) / 2
    for row in [*rows[::4], *tests[::3]]:
        for side in ("chosen", "rejected"):
            row[side] = row["prompt"] + row[side]
        row["prompt"] = ""
    rows[1]["prompt"] = rows[1]["prompt"] * 9
    more = toy_rows("preferences", "validation", 20)[12:]
    for row in [*tests, *more]:
        row["margin"] = 0.75
    folder = write_data(tmp_path_factory.mktemp("pairs") / "data", rows, tests, more)
    return SimpleNamespace(rows=rows, tests=tests, more=more, folder=folder)


def encoded(tokenizer, rows, length):
    """[(ids of the chosen text, of the rejected one, margin)], cut to a length; none that are then equal."""
    found = []
    for row in rows:
        chosen, rejected = (
            tuple(sum(ids_of(tokenizer, row["prompt"], row[side]), []))[:length] for side in ("chosen", "rejected")
        )
        if chosen != rejected:
            found.append((chosen, rejected, row.get("margin", 0.0)))
    return found


def longest_first(pairs):
    """Of each pair the longer text, by which pairs are put into batches."""
    return [max(pair[:2], key=len) for pair in pairs]


def pairs_of(run, pairs, key=lambda text: text):
    """The steps of a run as lists of pairs, each step's texts all used up; `key` is what a text is known by."""
    of_text = {key(text): pair for pair in pairs for text in pair[:2]}
    assert len(of_text) == 2 * len(pairs)
    steps = []
    for texts in run.texts:
        found = Counter(of_text[key(text)] for text in texts)
        assert set(found.values()) == {2}
        assert Counter(map(key, texts)) == Counter(key(text) for pair in found for text in pair[:2])
        steps.append(list(found))
    return steps


def pairs_once(run, pairs, batch_size, key=lambda text: text):
    """As each_row_once, of pairs."""
    steps, longest = pairs_of(run, pairs, key), dict(zip(pairs, longest_first(pairs)))
    as_rows = SimpleNamespace(args=run.args, lines=run.lines, texts=[[longest[pair] for pair in s] for s in steps])
    each_row_once(as_rows, list(longest.values()), batch_size)


def reward(model, ids):
    """The reward at the last token of a text."""
    hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
    return hidden @ model.score.weight[0] + getattr(model.config, "reward_bias", 0.0)


def rewards(model, pairs):
    """Those of all chosen and of all rejected texts."""
    return (torch.stack([reward(model, pair[side]) for pair in pairs]) for side in (0, 1))


def calibration_error(differences):
    """Ten bins of |difference|, as equal as can be: distance of predicted from observed share of right pairs."""
    ordered = sorted(differences, key=abs)
    size, more = divmod(len(ordered), 10)
    error = 0.0
    for i in range(10):
        part = [ordered.pop(0) for _ in range(size + (i < more))]
        predicted = sum(1 / (1 + math.exp(-abs(x))) for x in part)
        error += abs(predicted - sum(x > 0 for x in part))
    return error / len(differences)


def reward_evaluation(pairs, training_pairs=None):
    """What reward_model.py should log of the test split; with training pairs, after their mean reward was made 0."""

    @torch.no_grad()
    def evaluate(model):
        shift = -torch.cat([*rewards(model, training_pairs)]).mean() if training_pairs else 0.0
        chosen, rejected = rewards(model, pairs)
        both, gap = torch.cat([chosen, rejected]) + shift, chosen - rejected
        return {
            "eval/loss": (1 + (-gap).exp()).log().mean().item(),
            "eval/accuracy": sum(chosen > rejected).item() / len(pairs),
            "eval/margin": gap.mean().item(),
            "eval/calibration_error": calibration_error(gap.tolist()),
            "eval/mean_reward": both.mean().item(),
            "eval/std_reward": (both.square().sum() - both.sum() ** 2 / len(both)).div(len(both) - 1).sqrt().item(),
        }

    return evaluate


def classifier(folder, weights=None):
    """A reward model, dropout off, with the weights that a run began with if they are given."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    for p, x in zip(model.parameters(), weights or (), strict=weights is not None):
        p.data.copy_(x)
    return model


@pytest.fixture(scope="module")
def reward_run(models, preferences, tmp_path_factory):
    """Half of the pairs without EOS, the loss with margins and centring."""
    folder = tmp_path_factory.mktemp("reward_model") / "run"
    settings = REWARD | dict(eos_dropout=0.5, center_rewards_coefficient=0.05, max_grad_norm=4.0)
    return watched(reward_model, folder, model=str(models / "plain"), dataset=preferences.folder, **settings)


def test_reward_model_by_hand(reward_run, models, preferences, tokenizer):
    pairs, tests = (encoded(tokenizer, x, REWARD["max_length"]) for x in (preferences.rows, preferences.tests))
    assert len(pairs) == 27 and any(len(pair[0]) == 36 for pair in pairs) and any(pair[2] for pair in pairs)
    eos = tokenizer.eos_token_id
    key = lambda text: text[:-1] if text[-1] == eos else text  # noqa: E731
    pairs_once(reward_run, pairs, 6, key)
    at_most(reward_run, 6)
    assert evaluations(reward_run) == [4, 8, 9]
    steps = iter(pairs_of(reward_run, pairs, key))
    with_eos = Counter()

    def read_step(model, texts):
        losses, gaps, shown = [], [], {key(text): text for text in texts}
        for chosen, rejected, margin in next(steps):
            had = {text[-1] == eos for text in (chosen, rejected)}
            has = {shown[key(text)][-1] == eos for text in (chosen, rejected)}
            with_eos[True in has] += had == {True}
            assert has in (had, {False})  # both texts keep what they had, or neither
            a, b = (reward(model, shown[key(text)]) for text in (chosen, rejected))
            losses.append((1 + (margin - (a - b)).exp()).log() + 0.05 * (a + b) ** 2)
            gaps.append((a - b).item())
        stats = {"accuracy": sum(gap > 0 for gap in gaps) / len(gaps), "margin": sum(gaps) / len(gaps)}
        return sum(losses) / len(losses), stats

    left = iter([False, False, True])  # rewards are centred before the last evaluation
    evaluate = lambda model: reward_evaluation(tests, pairs if next(left) else None)(model)  # noqa: E731
    replay(reward_run, classifier(models / "plain", reward_run.watch.before), read_step, evaluate)
    assert min(with_eos[True], with_eos[False]) > 5
    agree(reward_run.lines[-1], reward_evaluation(tests)(classifier(reward_run.folder)))


def test_rewards_are_centred_on_the_training_texts(reward_run, preferences, tokenizer):
    """In the saved model, over whole texts; and it says which token is padding."""
    model = classifier(reward_run.folder)
    with torch.no_grad():
        both = torch.cat([*rewards(model, encoded(tokenizer, preferences.rows, REWARD["max_length"]))])
    assert both.mean().item() == pytest.approx(0, abs=1e-4) and both.std() > 0.01
    assert model.config.pad_token_id == tokenizer.pad_token_id and model.config.id2label == {0: "reward"}


def test_a_new_head_starts_small(reward_run):
    """Standard deviation 1/sqrt(D+1), D = 16: the rewards of the first step are about +-1."""
    (head,) = [x for x in reward_run.watch.before if x.shape == (1, 16)]
    assert 0.5 < head.std() * math.sqrt(17) < 1.6


def test_a_resumed_reward_run_is_the_same(reward_run, tmp_path):
    resumed_is_the_same(reward_model, reward_run, tmp_path)


ADAPTER = dict(lora_r=2, lora_alpha=8.0, learning_rate=5e-2)


def only_adapted(run, base):
    """Of the saved whole model, the layers with an adapter alone have moved; the weights of both in one dict."""
    before, after = (load_file(folder / "model.safetensors") for folder in (base, run.folder / "merged"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("c_attn.weight" in name for name in moved)
    assert not any(".lora_" in name or "base_layer" in name for name in after)


def test_sft_adapter_by_hand(models, completions, tokenizer, tmp_path):
    """What is saved as a whole model is what was trained; and a run that was killed ends in the same bits."""
    settings = SFT | ADAPTER | dict(model=str(models / "plain"), dataset=completions.folder, save_steps=3)
    run = watched(sft, tmp_path / "run", save_total_limit=3, **settings)
    resumed_is_the_same(sft, run, tmp_path)
    only_adapted(run, models / "plain")
    tests = labelled(tokenizer, completions.tests, SFT["max_length"])
    agree(run.lines[-1], sft_evaluation(tests, tokenizer.eos_token_id)(saved(run.folder / "merged")))
    start = sft_evaluation(tests, tokenizer.eos_token_id)(saved(models / "plain"))
    assert run.lines[-1]["eval/loss"] < start["eval/loss"] - 0.05


def test_reward_adapter_by_hand(models, preferences, tokenizer, tmp_path):
    """The head is trained whole, and saved with the adapter; what centres the rewards is in the config."""
    settings = REWARD | ADAPTER | dict(model=str(models / "plain"), dataset=preferences.folder)
    run = watched(reward_model, tmp_path / "run", **settings)
    resumed_is_the_same(reward_model, run, tmp_path)
    only_adapted(run, models / "plain")
    pairs, tests = (encoded(tokenizer, x, REWARD["max_length"]) for x in (preferences.rows, preferences.tests))
    model = classifier(run.folder / "merged")
    agree(run.lines[-1], reward_evaluation(tests)(model))
    with torch.no_grad():
        assert torch.cat([*rewards(model, pairs)]).mean().item() == pytest.approx(0, abs=1e-4)
    head = next(x for x in run.watch.before if x.shape == (1, 16))
    assert not torch.equal(head, model.score.weight) and model.config.pad_token_id == tokenizer.pad_token_id


def test_an_adapter_of_random_weights_is_refused(tmp_path):
    with pytest.raises(sft.UserError, match="--lora-r trains an adapter of a pretrained model"):
        run(sft, tmp_path, lora_r=2)


def test_all_eos_dropped(models, preferences, tokenizer, tmp_path):
    """In training alone. And the reward of a model whose last norm has no bias is centred too, with dropout off."""
    settings = REWARD | dict(eos_dropout=1.0, dataset_test_split="test", max_length=60)
    run = watched(reward_model, tmp_path, model=str(models / "llama"), dataset=preferences.folder, **settings)
    eos = tokenizer.eos_token_id
    assert run.watch.modes == {True} and not any(eos in text for texts in run.texts for text in texts)
    pairs, tests = (encoded(tokenizer, x, 60) for x in (preferences.rows, preferences.more))
    assert sum(text[-1] == eos for pair in tests for text in pair[:2]) > len(tests)
    model = classifier(run.folder)
    agree(run.lines[-1], reward_evaluation(tests)(model))
    with torch.no_grad():
        assert torch.cat([*rewards(model, pairs)]).mean().item() == pytest.approx(0, abs=1e-4)
    assert abs(model.config.reward_bias) > 0.01
    reward_model.train(reward_model.Args(**vars(run.args) | dict(resume=str(tmp_path))))  # nothing is left to do
    assert classifier(tmp_path).config.reward_bias == model.config.reward_bias


def test_no_eos_dropped(models, preferences, tokenizer, tmp_path):
    """Every text as it is; and no evaluation where none is asked for, in a single pass."""
    settings = REWARD | dict(dataset_test_split="none", num_train_epochs=2.0, max_length=60)
    run = watched(reward_model, tmp_path, model=str(models / "dropout"), dataset=preferences.folder, **settings)
    pairs_once(run, encoded(tokenizer, preferences.rows, 60), 6)
    assert run.watch.modes == {True} and not evaluations(run)


# --- dpo.py


DPO = dict(per_device_train_batch_size=3, gradient_accumulation_steps=2, learning_rate=1e-2, weight_decay=0.3,
           num_train_epochs=1.75, warmup_ratio=0.3, eval_steps=4, max_length=30, max_prompt_length=4, save_steps=3,
           save_total_limit=3, num_eval_prompts=7, response_length=8)  # fmt: skip


@pytest.fixture(scope="module")
def choices(tmp_path_factory):
    """Pairs with a prompt each; those of one are the same where they are cut."""
    rows, tests = toy_rows("preferences", "train", 28), toy_rows("preferences", "validation", 12)
    rows[1]["rejected"] = rows[1]["chosen"] = rows[1]["chosen"] * 9
    rows[1]["rejected"] += " Bad."
    folder = tmp_path_factory.mktemp("choices")
    short = [[row for row in x if max(map(len, row.values())) < 130] for x in (rows, tests)]
    whole = [[{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in x] for x in short]
    return SimpleNamespace(
        rows=rows, tests=tests, folder=write_data(folder / "data", rows, tests),
        short=short, whole=write_data(folder / "whole", *whole),
    )  # fmt: skip


def cut_pairs(tokenizer, rows, length, prompt_length, keep_end=True):
    """[(prompt, chosen, rejected)] of rows, within a length; those that are then equal are left out."""
    found = []
    for row in rows:
        prompt, chosen = ids_of(tokenizer, row["prompt"], row["chosen"])
        rejected = ids_of(tokenizer, row["prompt"], row["rejected"])[1]
        if len(prompt) + max(len(chosen), len(rejected)) > length:
            prompt = prompt[-prompt_length:] if keep_end else prompt[:prompt_length]
        room = length - len(prompt)
        if chosen[:room] != rejected[:room]:
            found.append((tuple(prompt), tuple(chosen[:room]), tuple(rejected[:room])))
    return found


def shared_beginning(tokenizer, rows):
    """[(prompt, chosen, rejected)] of rows without a prompt: it is what the two texts have in common."""
    found = []
    for row in rows:
        texts = [tokenizer(row["prompt"] + row[side])["input_ids"] + [0] for side in ("chosen", "rejected")]
        n = next(i for i, (a, b) in enumerate(zip(*texts)) if a != b)
        found.append((tuple(texts[0][:n]), tuple(texts[0][n:]), tuple(texts[1][n:])))
    return found


def logp(model, prompt, completion, mean=False):
    """Log-probability of a completion, summed over its tokens, or their mean."""
    logps, _ = read_text(model, prompt + completion, len(prompt))
    return logps.mean() if mean else logps.sum()


def pair_loss(args, gap):
    """The loss of a pair whose log-ratios differ by the gap."""
    if args.loss_type == "hinge":
        return torch.relu(1 - args.beta * gap)
    if args.loss_type == "ipo":
        return (gap - 0.5 / args.beta) ** 2
    right, s = torch.sigmoid(args.beta * gap), args.label_smoothing
    return -(1 - s) * right.log() - s * (1 - right).log()


def dpo_step(args, reference, known):
    """Reads pairs: their mean loss, and what is logged beside it. `known` keeps what the reference has said."""

    def read_reference(pair):
        if args.reference_free:
            return 0.0, 0.0
        if pair not in known:
            with torch.no_grad():
                known[pair] = [logp(reference, pair[0], end, args.loss_type == "ipo").item() for end in pair[1:]]
        return known[pair]

    def read(model, pairs):
        losses, names = [], ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen",
                             "logps/rejected", "rewards/margins")  # fmt: skip
        sums = torch.zeros(len(names))
        for pair in pairs:
            a, b = (logp(model, pair[0], end, args.loss_type == "ipo") for end in pair[1:])
            ref_a, ref_b = read_reference(pair)
            losses.append(pair_loss(args, (a - ref_a) - (b - ref_b)))
            a, b, ours, theirs = a.item(), b.item(), args.beta * (a.item() - ref_a), args.beta * (b.item() - ref_b)
            sums += torch.tensor([ours, theirs, ours > theirs, a, b, ours - theirs])
        stats = dict(zip(names, (sums / len(pairs)).tolist()))
        if abs(stats["rewards/chosen"]) + abs(stats["rewards/rejected"]) < 1e-4:  # a tie, which rounding decides
            del stats["rewards/accuracies"]
        return sum(losses) / len(losses), stats

    return read


def dpo_evaluation(read, tests):
    """What dpo.py should log of the pairs of the test split."""

    @torch.no_grad()
    def evaluate(model):
        loss, stats = read(model, tests)
        names = ("rewards/accuracies", "rewards/margins")
        assert stats["rewards/accuracies"] > 0
        return {"eval/loss": loss.item()} | {f"eval/{name}": stats[name] for name in names}

    return evaluate


def replay_dpo(run, model, reference, pairs, tests):
    """Replays a run of dpo.py; returns what evaluates a model on the test pairs."""
    read, steps = dpo_step(run.args, reference, {}), iter(pairs_of(run, texts_of(pairs)))
    prompts = {(p + a, p + b): (p, a, b) for p, a, b in pairs}
    evaluate = dpo_evaluation(read, tests)
    replay(run, model, lambda model, _: read(model, [prompts[pair] for pair in next(steps)]), evaluate)
    return evaluate


def texts_of(pairs):
    """Prompt and completion of each pair as one text: [(chosen, rejected)]."""
    return [(prompt + chosen, prompt + rejected) for prompt, chosen, rejected in pairs]


def watched_dpo(folder, **settings):
    """A run, and all that it has sampled: [(prompts, responses), ...] without padding."""
    sampled, sample = [], dpo.sample

    def noted(policy, prompts, prompt_mask, *rest, **more):
        drawn = sample(policy, prompts, prompt_mask, *rest, **more)
        rows = lambda x, mask: [tuple(row[real.bool()].tolist()) for row, real in zip(x, mask)]  # noqa: E731
        sampled.append((rows(prompts, prompt_mask), rows(drawn[0], drawn[1])))
        return drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpo, "sample", noted)
        run = watched(dpo, folder, **settings)
    run.sampled = sampled
    return run


GOLD_REWARD = """
def score(prompts, completions, **columns):
    return [float(len(prompt + completion)) for prompt, completion in zip(prompts, completions)]
"""


@pytest.fixture(scope="module")
def dpo_settings(models, choices, tmp_path_factory):
    """The DPO paper's loss, label smoothing, a gold reward."""
    gold = tmp_path_factory.mktemp("gold") / "gold.py"
    gold.write_text(GOLD_REWARD)
    return DPO | dict(model=str(models / "dropout"), dataset=choices.folder, beta=0.3, label_smoothing=0.1,
                      gold_reward_fn=f"{gold}:score", max_grad_norm=3.0)  # fmt: skip


@pytest.fixture(scope="module")
def dpo_run(dpo_settings, tmp_path_factory):
    return watched_dpo(tmp_path_factory.mktemp("dpo") / "run", **dpo_settings)


@pytest.fixture(scope="module")
def lora_run(dpo_settings, tmp_path_factory):
    """An adapter, whose policy without it is the reference."""
    lora = dict(lora_r=2, lora_alpha=8.0, learning_rate=5e-2)
    return watched_dpo(tmp_path_factory.mktemp("dpo") / "lora", **dpo_settings | lora)


def test_dpo_by_hand(dpo_run, models, choices, tokenizer):
    """Each step, without dropout; the evaluations; the model that is saved."""
    pairs, tests = (cut_pairs(tokenizer, x, 30, 4) for x in (choices.rows, choices.tests))
    assert len(pairs) == 27 and any(len(pair[0]) == 4 for pair in pairs) and any(len(pair[0]) > 4 for pair in pairs)
    pairs_once(dpo_run, texts_of(pairs), 6)
    at_most(dpo_run, 6)
    assert evaluations(dpo_run) == evaluations(dpo_run, "objective/") == [4, 8, 9]
    reference = saved(models / "dropout")
    evaluate = replay_dpo(dpo_run, saved(models / "dropout"), reference, pairs, tests)
    agree(dpo_run.lines[-1], evaluate(saved(dpo_run.folder)))


@pytest.mark.parametrize("name", ["dpo_run", "lora_run"])
def test_dpo_responses_by_hand(name, models, choices, tokenizer, request):
    """Their KL to the reference, from plain passes of the saved model; their lengths, ends and gold scores."""
    run = request.getfixturevalue(name)
    reference = saved(models / "dropout")
    policy = saved(run.folder / "merged" if run.args.lora_r else run.folder)
    prompts = [pair[0] for pair in cut_pairs(tokenizer, choices.tests, 30, 4)[:7]]
    assert len(run.sampled) == 3 and all(x == prompts for x, _ in run.sampled)
    assert run.sampled[0][1] != run.sampled[2][1]
    gaps = []
    with torch.no_grad():
        for prompt, response in zip(*run.sampled[-1]):
            ours, theirs = (read_text(m, prompt + response, len(prompt), 0.7)[0] for m in (policy, reference))
            gaps.append((ours - theirs).sum().item())
    assert sum(gaps) / 7 > 0.05
    responses = run.sampled[-1][1]
    assert 0 < sum(len(response) < 8 for response in responses) < 7
    completions = tokenizer.batch_decode(responses, skip_special_tokens=True)
    texts = [row["prompt"] + completion for row, completion in zip(choices.tests, completions)]  # of whole prompts
    agree(run.lines[-1], {
        "objective/kl": sum(gaps) / 7,
        "objective/gold_scores": sum(map(len, texts)) / 7,
        "val/eos_share": sum(tokenizer.eos_token_id in response for response in responses) / 7,
        "val/response_length": sum(map(len, responses)) / 7,
    })  # fmt: skip


def test_precomputed_reference_is_the_same(dpo_run, dpo_settings, tmp_path):
    """But for the KL, of which nothing is known once the reference is gone."""
    lines = run(dpo, tmp_path, **dpo_settings | dict(precompute_ref=True, save_steps=100))
    for line, other in zip(lines, dpo_run.lines, strict=True):
        theirs = {name: x for name, x in other.items() if not name.startswith(("time/", "perf/", "objective/kl"))}
        if abs(other["rewards/chosen"]) < 1e-4:
            del theirs["rewards/accuracies"]
        agree(line, theirs)
        assert "objective/kl" not in line


def test_adapter_by_hand(lora_run, models, choices, tokenizer):
    """merged/ is the model with its adapter; the reference, the model without, in training as in evaluation."""
    merged, reference = (saved(x) for x in (lora_run.folder / "merged", models / "dropout"))
    adapter = load_file(lora_run.folder / "adapter_model.safetensors")
    moved = 0
    for name, weight in merged.named_parameters():
        before = reference.get_parameter(name)
        found = {k.split("lora_")[1][0]: x for k, x in adapter.items() if f"{name.removesuffix('.weight')}.lora_" in k}
        if not found or not name.endswith(".weight"):
            assert torch.equal(weight, before)
            continue
        torch.testing.assert_close(weight, before + 8 / 2 * (found["B"] @ found["A"]).T, rtol=1e-5, atol=1e-6)
        moved += (weight - before).norm().item()
    assert moved > 0.1
    pairs, tests = (cut_pairs(tokenizer, x, 30, 4) for x in (choices.rows, choices.tests))
    read = dpo_step(lora_run.args, reference, {})
    agree(lora_run.lines[-1], dpo_evaluation(read, tests)(merged))
    prompts, beta = {(p + a, p + b): (p, a, b) for p, a, b in pairs}, lora_run.args.beta
    for line, batch in zip(lora_run.lines, pairs_of(lora_run, texts_of(pairs)), strict=True):
        _, stats = read(reference, [prompts[pair] for pair in batch])  # its log-probabilities are the reference's
        for side in ("chosen", "rejected"):
            ours = line[f"logps/{side}"] - line[f"rewards/{side}"] / beta
            assert ours == pytest.approx(stats[f"logps/{side}"], rel=1e-3)
    assert abs(lora_run.lines[-1]["rewards/margins"]) > 0.01


def test_a_resumed_adapter_is_the_same(lora_run, tmp_path):
    resumed_is_the_same(dpo, lora_run, tmp_path)


def test_ipo_with_checkpointing_by_hand(dpo_settings, models, choices, tokenizer, tmp_path):
    """Means over tokens; checkpointing needs training mode, which must not bring dropout back."""
    settings = dpo_settings | dict(loss_type="ipo", label_smoothing=0.0, gradient_checkpointing=True, max_grad_norm=4.5)
    run = watched_dpo(tmp_path, **settings)
    pairs, tests = (cut_pairs(tokenizer, x, 30, 4) for x in (choices.rows, choices.tests))
    replay_dpo(run, saved(models / "dropout"), saved(models / "dropout"), pairs, tests)


def test_no_reference_and_no_prompt_by_hand(dpo_settings, models, choices, tokenizer, tmp_path):
    """SLiC's hinge; what two texts have in common is their prompt."""
    more = dict(loss_type="hinge", label_smoothing=0.0, reference_free=True, max_grad_norm=6.4, gold_reward_fn=None,
                dataset=choices.whole, max_length=60, max_prompt_length=40)  # fmt: skip
    run = watched_dpo(tmp_path, **dpo_settings | more)
    pairs, tests = (shared_beginning(tokenizer, x) for x in choices.short)
    assert len(pairs) > 12
    replay_dpo(run, saved(models / "dropout"), None, pairs, tests)


def test_keep_start(dpo_settings, choices, tokenizer, tmp_path):
    """The beginning of a prompt that is cut; one pass, no evaluation."""
    settings = dpo_settings | dict(truncation_mode="keep_start", num_train_epochs=1.0, dataset_test_split="none")
    run = watched_dpo(tmp_path, **settings)
    pairs_once(run, texts_of(cut_pairs(tokenizer, choices.rows, 30, 4, keep_end=False)), 6)
    assert not evaluations(run) and not run.sampled
