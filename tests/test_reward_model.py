"""reward_model.py: its head, calibration, batches, and a whole run by hand."""

import json
import math
import warnings
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from replay import EOS, SETTINGS, TOKENIZER, agree, evaluated, ids_of, replay
from replay import note_sizes, toy_rows, write_data, write_model
from runs import run, watch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import reward_model

# --- functions


def test_reward_head_begins_with_the_deviation_of_the_n_details():
    head = torch.nn.Linear(99, 400)
    reward_model.init_reward_head(head)
    assert head.weight.std().item() == pytest.approx(0.1, rel=0.02)  # 1 / sqrt(99 + 1)


# --- by hand


@pytest.fixture(scope="module")
def preferences(tmp_path_factory):
    """Pairs with margins, with and without a prompt; the two texts of one are the same within max_length."""
    rows = toy_rows("preferences", "train", 28)
    tests = toy_rows("preferences", "validation", 12)
    for i, row in enumerate(rows):
        row["margin"] = (i % 4) / 2
    for row in tests:
        row["margin"] = 0.75
    for row in [*rows[::4], *tests[::3]]:
        for side in ("chosen", "rejected"):
            row[side] = row["prompt"] + row[side]
        row["prompt"] = ""
    rows[1]["prompt"] *= 9
    folder = write_data(tmp_path_factory.mktemp("pairs") / "data", train=rows, validation=tests)
    return SimpleNamespace(rows=encoded(rows), tests=encoded(tests), folder=folder)


def encoded(rows, length=36):
    """Pairs cut to a length; none that are then equal."""
    found = []
    for row in rows:
        chosen, rejected = (sum(ids_of(row["prompt"], row[side]), [])[:length] for side in ("chosen", "rejected"))
        if chosen != rejected:
            found.append(reward_model.Pair(chosen, rejected, row["margin"]))
    return found


def reward(model, ids):
    hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
    return hidden @ model.score.weight[0] + getattr(model.config, "reward_bias", 0.0)


def rewards(model, pairs):
    chosen = [reward(model, pair.chosen) for pair in pairs]
    rejected = [reward(model, pair.rejected) for pair in pairs]
    return torch.stack(chosen), torch.stack(rejected)


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


def evaluation(tests, pairs=()):
    """What reward_model.py should log of the test split; in the end after the mean reward of all pairs was made 0."""

    @torch.no_grad()
    def evaluate(model, is_last=True):
        shift = 0.0
        if pairs and is_last:
            shift = -torch.cat(rewards(model, pairs)).mean()
        chosen, rejected = rewards(model, tests)
        both = torch.cat([chosen, rejected]) + shift
        gap = chosen - rejected
        return {
            "eval/loss": (1 + (-gap).exp()).log().mean().item(),
            "eval/accuracy": (chosen > rejected).float().mean().item(),
            "eval/margin": gap.mean().item(),
            "eval/calibration_error": calibration_error(gap.tolist()),
            "eval/mean_reward": both.mean().item(),
            "eval/std_reward": both.std().item(),
        }

    return evaluate


def classifier(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()


def cut_off(shown, pairs, *_):
    """Which of the two texts of each pair have lost an EOS."""
    return [(len(a.chosen) > len(b.chosen), len(a.rejected) > len(b.rejected)) for a, b in zip(pairs, shown)]


def without_eos(pair, cut):
    """The pair with one text, both or none cut off."""
    sides = [ids[:-1] if x else ids for ids, x in zip((pair.chosen, pair.rejected), cut)]
    return replace(pair, chosen=sides[0], rejected=sides[1])


def test_an_eos_that_is_all_stays():
    pair = reward_model.Pair([EOS], [5, EOS], 0.0)
    assert reward_model.drop_eos([pair], TOKENIZER, 1.0) == [replace(pair, rejected=[5])]


def test_the_end_of_a_text_says_nothing_about_its_pair():
    """Each text loses its EOS by itself, so that all four kinds of pairs occur, in their proportions."""
    torch.manual_seed(1)
    pairs = [reward_model.Pair([5, EOS], [6, EOS], 0.0)] * 4000
    counts = Counter(cut_off(reward_model.drop_eos(pairs, TOKENIZER, 0.25), pairs))
    assert set(counts) == {(False, False), (False, True), (True, False), (True, True)}
    assert counts[True, True] / 4000 == pytest.approx(1 / 16, abs=0.02)
    assert counts[True, False] / 4000 == pytest.approx(3 / 16, abs=0.03)


def ids_of_text(text):
    return [*TOKENIZER(text)["input_ids"], EOS]


def test_rules_that_need_no_model():
    """The longer text is right in one pair and wrong in two; the complete sentence in one, and two are ties."""
    texts = [(" The film is great.", " The"), (" The film", " The film is great"), (" A", " The film is great")]
    pairs = [reward_model.Pair(ids_of_text(a), ids_of_text(b)) for a, b in texts]
    longer, ends = reward_model.rule_accuracies(pairs, TOKENIZER).values()
    assert longer == pytest.approx(1 / 3) and ends == pytest.approx((1 + 0.5 + 0.5) / 3)
    with pytest.warns(UserWarning, match="longer"):
        reward_model.warn_if_no_better(0.3, {"the longer text": 1 / 3})
    with warnings.catch_warnings(action="error"):
        reward_model.warn_if_no_better(0.4, {"the longer text": 1 / 3})


def test_small_data_get_small_batches():
    """At least a hundred steps, where batches of four or more make them; at most 64 rows."""
    for rows in range(1, 20_000, 97):
        size = reward_model.default_batch_size(rows)
        assert 4 <= size <= 64
        assert rows / size >= 100 or size == 4
        assert rows / (2 * size) < 100 or size == 64


def test_the_calibration_that_is_printed(capsys):
    """A line for each bin, in order: predicted, observed, number of pairs."""
    bins = reward_model.calibration(torch.tensor([0.1, -0.1, 2.0, 2.0]))
    reward_model.show_calibration(SimpleNamespace(bar=SimpleNamespace(write=print)), bins)
    rows = [[float(x) for x in line.split()] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [pytest.approx(row, abs=0.006) for row in bins] and len(rows) == 4


def test_reward_model_by_hand(preferences, tmp_path, monkeypatch):
    """Half of the pairs without EOS, the loss with margins and centring; and the model that is saved."""
    model = write_model(tmp_path / "plain", "plain")
    settings = SETTINGS | dict(eos_dropout=0.5, center_rewards_coefficient=0.05, max_grad_norm=4.0, model=model)
    settings |= dict(dataset=preferences.folder, num_sample_generations=1)
    sizes = note_sizes(monkeypatch)
    heads, drawn = [], []  # the head that the run began with; of each step who lost an EOS
    watch(monkeypatch, reward_model, "init_reward_head", lambda _, head: heads.append(head.weight.detach().clone()))
    watch(monkeypatch, reward_model, "drop_eos", lambda *given: drawn.append(cut_off(*given)))
    lines = run(reward_model, tmp_path / "run", **settings)
    assert set(sizes) == {6}  # both texts of three pairs
    pairs = preferences.rows
    lengths = [max(len(pair.chosen), len(pair.rejected)) for pair in pairs]
    assert len(pairs) == 27 and max(lengths) == 36
    assert 20 < sum(sum(map(sum, some)) for some in drawn) < 76
    args = SimpleNamespace(**vars(reward_model.Args()) | settings, per_pass=5)

    def batch(number):
        rows = reward_model.length_grouped_batch(lengths, number, 6, args.seed)
        return [without_eos(pairs[i], cut) for i, cut in zip(rows, drawn[number], strict=True)]

    def read_step(model, batch):
        chosen, rejected = rewards(model, batch)
        margin = torch.tensor([pair.margin for pair in batch])
        gap = chosen - rejected
        losses = (1 + (margin - gap).exp()).log() + 0.05 * (chosen + rejected) ** 2
        return losses.mean(), {"accuracy": (gap > 0).float().mean().item(), "margin": gap.mean().item()}

    by_hand = classifier(model)
    by_hand.score.weight.data.copy_(heads[0])
    replay(args, lines, by_hand, batch, read_step, evaluation(preferences.tests, pairs))
    after = classifier(tmp_path / "run")
    agree(evaluated(lines[-1]), evaluation(preferences.tests)(after))
    assert torch.cat(rewards(after, pairs)).mean().item() == pytest.approx(0, abs=1e-4)
    assert after.config.reward_bias == 0  # a weight has taken the shift
    assert after.config.pad_token_id == TOKENIZER.pad_token_id
    (table,) = (tmp_path / "run/samples").iterdir()
    chosen, rejected = rewards(after, preferences.tests[:4])
    shown = load_file(table)["rewards"]  # before the shift
    assert (shown[:, 0] - shown[:, 1]).tolist() == pytest.approx((chosen - rejected).tolist(), abs=1e-4)


@pytest.mark.parametrize("kind, more", [("llama", {"eos_dropout": 1.0}), ("plain", {"lora_r": 2, "lora_alpha": 8.0})])
def test_rewards_are_centred_without_a_bias_to_move(kind, more, preferences, tmp_path):
    """A norm without bias, or an adapter that leaves it frozen: the config says the shift, and the model is as good.

    The Llama has dropout, which is off in evaluations.
    """
    model = write_model(tmp_path / "model", kind)
    lines = run(reward_model, tmp_path / "run", **SETTINGS | more, model=model, dataset=preferences.folder)
    folder = tmp_path / ("run/merged" if "lora_r" in more else "run")
    after = classifier(folder)
    agree(evaluated(lines[-1]), evaluation(preferences.tests)(after))
    assert torch.cat(rewards(after, preferences.rows)).mean().item() == pytest.approx(0, abs=1e-4)
    assert abs(after.config.reward_bias) > 0.01
    saved = json.loads((tmp_path / "run/args.json").read_text())
    reward_model.train(reward_model.Args(**saved | {"resume": str(tmp_path / "run")}))  # nothing is left to do
    assert classifier(folder).config.reward_bias == after.config.reward_bias
