"""DPO: held to TRL's numbers, to the closed form of its gradient, and to what its arguments promise."""

import json
import math
import runpy
from types import SimpleNamespace

import pytest
import torch
from test_golden import close, golden, leaf, names
from test_train import ROOT, run
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo

SIDES = ("policy_chosen_logps", "policy_rejected_logps", "reference_chosen_logps", "reference_rejected_logps")


def settings(beta=0.1, loss_type="sigmoid", label_smoothing=0.0):
    """What dpo_loss asks of the arguments."""
    return SimpleNamespace(beta=beta, loss_type=loss_type, label_smoothing=label_smoothing)


# --- TRL's numbers


@pytest.mark.parametrize("name", names("trl07_dpo_*"))
def test_losses_of_trl(name):
    i, o = golden(name)
    args = settings(i["beta"], i["loss_type"], i["label_smoothing"])
    losses, chosen, rejected = dpo.dpo_loss(*(i[side] for side in SIDES), args)
    theirs = o["losses"]
    if i["loss_type"] == "kto_pair":  # TRL lists the chosen half and the rejected half; a pair's loss is their mean
        theirs = theirs.view(2, -1).mean(0)
    close(losses, theirs)
    close(chosen, o["chosen_rewards"])
    close(rejected, o["rejected_rewards"])


VARIANTS = json.loads((ROOT / "tests/golden/trl0711_dpo.json").read_text())["outputs"]["variants"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_trl(variant):
    """Losses, their mean, and its gradient with respect to the policy's log-probabilities."""
    i, o = golden("trl0711_dpo")
    kind, *rest = variant.split("|")
    beta, smoothing, free = (text.split("=")[1] for text in rest)
    chosen, rejected = (leaf(i[side]) for side in SIDES[:2])
    is_free = free == "True" and kind != "kto_pair"  # theirs has no effect on that one; ours refuses it
    ref = [torch.zeros_like(i[side]) if is_free else i[side] for side in SIDES[2:]]
    losses, chosen_rewards, rejected_rewards = dpo.dpo_loss(
        chosen, rejected, *ref, settings(float(beta), kind, float(smoothing))
    )
    theirs = o["variants"][variant]
    close(losses.mean().detach(), theirs["loss_mean"])
    losses.mean().backward()
    close(chosen.grad, theirs["grad_chosen"])
    close(rejected.grad, theirs["grad_rejected"])
    if free == "False":  # theirs keep the reference in the metrics where the loss leaves it out
        close((chosen_rewards > rejected_rewards).double().mean(), theirs["accuracy"])
        close((chosen_rewards - rejected_rewards).mean(), theirs["margin"])


def test_logps_of_trl():
    """Which logits belong to which token, and what a sum and a mean over labels are."""
    i, o = golden("trl0711_dpo")
    logits, labels = i["get_batch_logps"]["logits"], i["get_batch_logps"]["labels"]
    mask = labels[:, 1:] != -100
    logps = dpo.token_logprobs(logits[:, :-1], labels[:, 1:].clamp(min=0)).masked_fill(~mask, 0.0).sum(1)
    close(logps, o["get_batch_logps_sum"])
    close(logps / mask.sum(1), o["get_batch_logps_avg"])


# --- mathematics


def test_gradient_in_closed_form():
    """-beta * sigmoid(-beta * Delta) for the chosen, the negative of it for the rejected (DPO, after eq. 7)."""
    chosen, rejected, ref_chosen, ref_rejected = (torch.randn(6, dtype=torch.double) * 5 for _ in range(4))
    chosen, rejected = leaf(chosen), leaf(rejected)
    dpo.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, settings(0.3))[0].sum().backward()
    delta = (chosen - ref_chosen - rejected + ref_rejected).detach()
    close(chosen.grad, -0.3 * torch.sigmoid(-0.3 * delta))
    close(rejected.grad, 0.3 * torch.sigmoid(-0.3 * delta))


@pytest.mark.parametrize("beta, shift", [(0.1, 0.0), (1e-9, 3.0)])
def test_no_preference_is_log_2(beta, shift):
    """The policy is the reference, or beta is 0: the loss is log 2 whatever the labels, and no reward is higher."""
    logps = torch.randn(4, 5, dtype=torch.double)
    losses, chosen, rejected = dpo.dpo_loss(logps[0] + shift, logps[1], logps[0], logps[1], settings(beta))
    close(losses, torch.full((5,), math.log(2)), atol=1e-8)
    assert (chosen - rejected).abs().max() < 1e-8


def test_smoothing_is_a_mixture_of_labels():
    """Conservative DPO is the mean over labels that are wrong with that probability."""
    a, b, c, d = (torch.randn(5, dtype=torch.double) for _ in range(4))
    smooth = dpo.dpo_loss(a, b, c, d, settings(0.5, label_smoothing=0.2))[0]
    right, wrong = (dpo.dpo_loss(*x, settings(0.5))[0] for x in ((a, b, c, d), (b, a, d, c)))
    close(smooth, 0.8 * right + 0.2 * wrong)


# --- encoding


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "toy/sft")


def test_prompt_and_completions(tokenizer):
    pair = dpo.encode_preference("The film", " is good.", " is bad.", tokenizer)
    assert pair.prompt == tokenizer("The film")["input_ids"]
    assert pair.chosen == tokenizer(" is good.")["input_ids"] + [tokenizer.eos_token_id]
    ended = dpo.encode_preference("The film", " is good." + tokenizer.eos_token, " is bad.", tokenizer)
    assert ended == pair  # one EOS is enough


def test_whole_texts_share_their_beginning(tokenizer):
    pair = dpo.encode_preference("", "The film is good.", "The film is bad.", tokenizer)
    assert tokenizer.decode(pair.prompt) == "The film is"
    assert tokenizer.decode(pair.chosen) == " good." + tokenizer.eos_token
    apart = dpo.encode_preference("", "Good.", "Bad.", tokenizer)
    assert apart.prompt == [tokenizer.bos_token_id or tokenizer.eos_token_id]
    assert tokenizer.decode(apart.rejected) == "Bad." + tokenizer.eos_token


def test_messages(tokenizer):
    chat = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    chat.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    turn = lambda role, content: [{"role": role, "content": content}]  # noqa: E731
    start, good, bad = turn("user", "How is it?"), turn("assistant", "Good."), turn("assistant", "Bad.")
    three = [("", start + good, start + bad), (start, good, bad), (start, "Good.", "Bad.")]
    pairs = [dpo.encode_preference(*row, chat) for row in three]
    assert pairs[0] == pairs[1] == pairs[2]
    assert chat.decode(pairs[0].prompt).startswith("user: How is it?" + chat.eos_token + "assistant:")
    assert pairs[0].chosen[-1] == chat.eos_token_id and chat.decode(pairs[0].chosen).count(chat.eos_token) == 1


@pytest.mark.parametrize("mode, prompt", [("keep_end", [3, 4]), ("keep_start", [1, 2])])
def test_cut_to_fit(mode, prompt):
    pair = dpo.Preference([1, 2, 3, 4], [5, 6, 7], [5, 6, 8])
    args = SimpleNamespace(max_prompt_length=2, truncation_mode=mode)
    assert dpo.cut_to_fit(pair, 4, args) == dpo.Preference(prompt, [5, 6], [5, 6])
    assert dpo.cut_to_fit(pair, 7, args) == pair


def test_pairs_that_a_cut_makes_equal_are_dropped(tmp_path, capsys):
    rows = [("The film", " is good.", " is bad."), ("The film", " is good, really good.", " is good, really bad.")]
    lines = [json.dumps(dict(zip(("prompt", "chosen", "rejected"), row))) for row in rows]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    run(dpo, tmp_path / "out", dataset=str(tmp_path / "pairs.jsonl"), max_length=6, max_prompt_length=2)
    said = capsys.readouterr().out
    assert "dropped 1 of 2 pairs: both texts are the same (0), or become so when cut to --max-length 6 (1)" in said
    assert "cut 1 of 2 pairs" in said
    with pytest.raises(dpo.UserError, match="dropped 2 of 2 pairs: both texts are the same"):
        run(dpo, tmp_path / "none", dataset=str(tmp_path / "pairs.jsonl"), max_length=3, max_prompt_length=2)


# --- reading


@pytest.fixture(scope="module")
def policy(tokenizer):
    policy = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft").eval()
    policy.tokenizer = tokenizer
    return policy


@pytest.fixture(scope="module")
def pairs(tokenizer):
    with open(ROOT / "toy/data/preferences/validation.jsonl") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(9))]
    return [dpo.encode_preference(row["prompt"], row["chosen"], row["rejected"], tokenizer) for row in rows]


def test_logps_are_those_of_each_text_alone(policy, pairs):
    """No padding, no neighbour, nothing cut: plain passes over one text at a time; for ipo their means."""
    sums = dpo.completion_logps(policy, pairs, dpo.Args())
    means = dpo.completion_logps(policy, pairs, dpo.Args(loss_type="ipo"))
    for side, summed, mean in zip(("chosen", "rejected"), sums, means):
        for i, pair in enumerate(pairs):
            end = getattr(pair, side)
            ids = torch.tensor([pair.prompt + end])
            with torch.no_grad():
                logprobs = policy(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[-len(end) :, 0]
            torch.testing.assert_close(summed[i].detach(), logprobs.sum(), rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(mean[i].detach(), logprobs.mean(), rtol=1e-4, atol=1e-4)


def test_padding_holds_nothing(policy, pairs, monkeypatch):
    """Another pad token, and no number changes."""
    before = dpo.completion_logps(policy, pairs, dpo.Args())
    monkeypatch.setattr(policy, "tokenizer", SimpleNamespace(pad_token_id=17))
    for a, b in zip(before, dpo.completion_logps(policy, pairs, dpo.Args())):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_cutting_a_batch_changes_nothing(policy, pairs):
    ref = torch.randn(9, 2) * 3 - 30

    def statistics_and_gradient(micro_batch):
        policy.zero_grad()
        stats = dpo.mini_batch_gradient(policy, pairs, ref, dpo.Args(micro_batch_size=micro_batch))
        return stats, torch.cat([p.grad.flatten() for p in policy.parameters()])

    stats, gradient = statistics_and_gradient(9)
    for size in (1, 4):
        cut_stats, cut_gradient = statistics_and_gradient(size)
        assert cut_stats == pytest.approx(stats, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(cut_gradient, gradient, rtol=1e-3, atol=1e-5)


def test_the_reference_is_read_once(policy, pairs, monkeypatch):
    """And what it has said of a pair stays with the pair, in whatever batch it comes back."""
    args, calls, read = dpo.Args(micro_batch_size=9), [], dpo.completion_logps
    monkeypatch.setattr(dpo, "completion_logps", lambda *a: calls.append(1) or read(*a))
    known = torch.full((9, 2), math.nan)
    first = dpo.read_reference([3, 1, 8], known, pairs, policy, policy_copy(policy), args)
    again = dpo.read_reference([8, 3], known, pairs, policy, None, args)
    assert len(calls) == 1 and torch.equal(again, first[[2, 0]])
    free = dpo.Args(reference_free=True)
    assert not dpo.read_reference([0, 1], known, pairs, policy, None, free).any()


def policy_copy(policy):
    """A frozen copy."""
    return dpo.make_reference(dpo.Args(), policy)


# --- runs


@pytest.fixture(scope="module")
def lines(tmp_path_factory, tiny):
    """The metrics of a run of two passes."""
    return run(dpo, tmp_path_factory.mktemp("run"), eval_steps=1, num_train_epochs=2, **tiny["dpo"])


def test_first_step(lines):
    """The policy is its reference: loss log 2, all rewards 0, no KL."""
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert lines[0]["rewards/chosen"] == pytest.approx(0, abs=1e-4)
    assert lines[-1]["rewards/margins"] != 0 and lines[0]["val/response_length"] > 1
    assert lines[-1]["objective/kl"] != 0


def test_precomputed_is_the_same(lines, tmp_path, tiny):
    """But for the KL, since the reference is gone."""
    again = run(dpo, tmp_path, precompute_ref=True, num_train_epochs=2, **tiny["dpo"])
    assert "objective/kl" in lines[-1] and "objective/kl" not in again[-1]
    for x, y in zip(lines, again, strict=True):
        for name in ("loss", "rewards/margins", "logps/chosen", "grad_norm"):
            assert x[name] == pytest.approx(y[name], rel=1e-3, abs=1e-4)


def test_adapter(tmp_path, tiny):
    """The reference is the policy without its adapter, which starts as nothing."""
    lines = run(dpo, tmp_path, **tiny["dpo"] | dict(lora_r=2, learning_rate=1e-2))
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(lines[-1]["rewards/margins"]) > 1e-4
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (tmp_path / "adapter_model.safetensors").exists() and merged.num_parameters() > 4e5


@pytest.fixture(scope="module")
def clear_pairs(tmp_path_factory):
    """A folder with pairs of the toy data whose gold scores are 4 apart or more, the better text the chosen one."""
    folder, gold_score = tmp_path_factory.mktemp("pairs"), runpy.run_path(str(ROOT / "toy/make.py"))["gold_score"]
    for split, size in (("train", 256), ("validation", 100)):
        lines = (ROOT / f"toy/data/preferences/{split}.jsonl").read_text("utf-8").splitlines()[:1400]
        rows = [json.loads(line) for line in lines]
        prompts = [row["prompt"] for row in rows]
        good, bad = (gold_score(prompts, [row[side] for row in rows]) for side in ("chosen", "rejected"))
        pairs = []
        for row, a, b in zip(rows, good, bad):
            chosen, rejected = (row["chosen"], row["rejected"])[:: 1 if a > b else -1]
            pairs += [dict(prompt=row["prompt"], chosen=chosen, rejected=rejected)] if abs(a - b) >= 4 else []
        assert len(pairs) >= size
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs[:size]))
    return str(folder)


def learned(output, seed, data, **settings):
    """After 32 steps: margin of unseen pairs, and gold score of responses to their prompts.

    Over three seeds these were 0.23 to 0.32 and 0.50 to 1.05; with the loss's sign turned, -0.03 and -0.09 at best.
    """
    settings = dict(dataset=data, batch_size=8, learning_rate=5e-4, num_train_epochs=1) | settings
    last = run(dpo, output, seed=seed, gold_reward_fn="toy/make.py:gold_score", **settings)[-1]
    return last["eval/rewards/margins"], last["objective/gold_scores"]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_dpo_learns(seed, tmp_path, clear_pairs):
    """Unseen pairs are told apart, and sampled responses become better."""
    margin, gold = learned(tmp_path, seed, clear_pairs)
    assert margin > 0.1 and gold > 0.3, (margin, gold)


def test_dpo_unlearns_with_the_sign_turned(tmp_path, clear_pairs, monkeypatch):
    """The test above can fail."""
    loss = dpo.dpo_loss
    turned = lambda a, b, c, d, args: (loss(b, a, d, c, args)[0], *loss(a, b, c, d, args)[1:])  # noqa: E731
    monkeypatch.setattr(dpo, "dpo_loss", turned)
    margin, gold = learned(tmp_path, 1, clear_pairs)
    assert margin < -0.05 and gold < 0, (margin, gold)


# --- wrong input


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (dict(beta=0.0), "--beta 0.0: Input should be greater than 0"),
        (dict(label_smoothing=0.5), "--label-smoothing 0.5: Input should be less than 0.5"),
        (dict(beta=math.nan), "--beta nan: Input should be a finite number"),
        (dict(label_smoothing=0.1, loss_type="ipo"), "--loss-type ipo has none"),
        (dict(reference_free=True, loss_type="kto_pair"), "needs the reference"),
        (dict(max_length=100, max_prompt_length=100), "leaves no room for a completion in 100 tokens"),
        (dict(chosen_column="best"), "has no column 'best'; it has prompt, chosen, rejected"),
        (dict(model="./such"), "'./such': there is no such file or folder"),
        (dict(dataset="toy/data/sft"), "has no column 'chosen'"),
    ],
)
def test_one_sentence(wrong, sentence, tmp_path, tiny):
    with pytest.raises(dpo.UserError, match=sentence):
        run(dpo, tmp_path / "out", **tiny["dpo"] | wrong)
    assert not (tmp_path / "out").exists()


GOLD = {
    "raises": ("raise KeyError('x')", "gold.py:raises.* failed: KeyError: 'x'"),
    "none": ("return None", "gold.py:none.* failed: TypeError"),
    "word": ("return ['good' for _ in prompts]", "gold.py:word.* failed: ValueError"),
    "few": ("return [1.0] * (len(prompts) - 1)", "gave 1 rewards for 2 completions"),
    "missing": ("return [1.0 for _ in prompts]", "defines no function 'missing'"),
}


@pytest.mark.parametrize("name", GOLD)
def test_a_wrong_gold_function_fails_before_training(name, tmp_path, tiny):
    body, sentence = GOLD[name]
    (tmp_path / "gold.py").write_text(f"def {'other' if name == 'missing' else name}(prompts, **_):\n    {body}\n")
    with pytest.raises(dpo.UserError, match=sentence):
        run(dpo, tmp_path / "out", gold_reward_fn=f"{tmp_path}/gold.py:{name}", **tiny["dpo"])
    assert not (tmp_path / "out").exists()


def test_one_file_has_no_test_split(tmp_path):
    """KL and gold score are then those of answers to training prompts; with `none`, there are none."""
    rows = [dict(chosen="The film is good.", rejected="The film is bad."), dict(chosen="Fun.", rejected="Not.")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = dict(dataset=str(tmp_path / "pairs.jsonl"), gold_reward_fn="toy/make.py:gold_score")
    lines = run(dpo, tmp_path / "a", **settings)
    assert {"objective/kl", "objective/gold_scores", "val/eos_share"} <= lines[-1].keys()
    assert not [name for name in lines[-1] if name.startswith("eval/")]
    lines = run(dpo, tmp_path / "b", dataset_test_split="none", **settings)
    assert not [name for name in lines[-1] if name.startswith(("eval/", "objective/", "val/"))]


def test_batch_sizes():
    """TRL's two settings say both sizes; on a CPU many tokens go through the model a few at a time."""
    policy = SimpleNamespace(name_or_path="", num_parameters=lambda: 1)

    def sizes(num_pairs, fits_cpu, **settings):
        args = dpo.choose_sizes(dpo.Args(learning_rate=1.0, **settings), policy, num_pairs, fits_cpu)
        return args.steps_per_epoch, args.num_steps, args.batch_size, args.micro_batch_size

    assert sizes(30, 99, per_device_train_batch_size=3, gradient_accumulation_steps=4) == (3, 3, 12, 3)
    assert sizes(100, 5, num_train_epochs=1.5) == (2, 3, 64, 5)
