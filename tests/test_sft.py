"""sft.py: encoding, packing, batches, and a whole run by hand."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from numbers_of_others import golden
from replay import EOS, SETTINGS, agree, evaluated, ids_of, read_text, replay
from replay import note_sizes, saved, toy_rows, write_data, write_model
from runs import run, untimed
from safetensors.torch import load_file
from sources import ROOT
from transformers import AutoTokenizer

import sft

# --- pack


@pytest.mark.parametrize("case, has_eos, passes", [("one_buffer", 1, 1), ("no_concat_token", 0, 1), ("infinite", 1, 2)])
def test_packing_against_trl07(case, has_eos, passes):
    """Blocks of constant length against TRL 0.7.11; its endless stream is two passes joined, cut off at 12 blocks."""
    i, o = golden("trl0711_sft_packing")
    theirs = o["packing"][case]
    theirs = theirs["first_12"] if case == "infinite" else theirs["packed"]
    rows = [i["tokenized"][text].tolist() + [i["eos_id"]] * has_eos for text in i["texts"] * passes]
    blocks = sft.pack([(row, row) for row in rows], i["seq_length"])
    assert [ids for ids, _ in blocks][:12] == theirs.tolist() and all(ids == labels for ids, labels in blocks)


# --- batches


def test_texts_of_all_lengths_meet_in_a_batch_in_which_they_are_sorted():
    lengths = torch.randint(1, 100, (100,)).tolist()
    batches = [sft.random_batch(lengths, number, 10, seed=1) for number in range(10)]
    assert sorted(sum(batches, [])) == list(range(100))
    read = [[lengths[row] for row in batch] for batch in batches]
    assert all(batch == sorted(batch) for batch in read)
    assert sum(batch[-1] - batch[0] > 50 for batch in read) >= 8


# --- a run by hand


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts with and without a prompt, one of which is all prompt within max_length."""
    rows = toy_rows("sft", "train", 28)
    tests = toy_rows("sft", "validation", 11)
    for row in [*rows[::4], *tests[::3]]:
        row["completion"] = row["prompt"] + row["completion"]
        row["prompt"] = ""
    rows[1]["prompt"] *= 9
    folder = write_data(tmp_path_factory.mktemp("texts") / "data", train=rows, validation=tests)
    return SimpleNamespace(rows=rows, tests=tests, folder=folder)


def labelled(rows, length):
    """[(ids, number of the first label)] of rows, cut to a length; none without a label."""
    found = []
    for row in rows:
        prompt, completion = ids_of(row["prompt"], row["completion"])
        if len(prompt) < length:
            found.append(((prompt + completion)[:length], len(prompt)))
    return found


def evaluation(rows):
    @torch.no_grad()
    def evaluate(model, is_last=True):
        read = [read_text(model, ids, start) for ids, start in rows]
        logprobs, hits = (torch.cat(parts) for parts in zip(*read))
        ends = [x[-1] for (x, _), (ids, _) in zip(read, rows) if ids[-1] == EOS]
        return {
            "eval/loss": -logprobs.mean().item(),
            "eval/perplexity": math.exp(-logprobs.mean()),
            "eval/mean_token_accuracy": hits.float().mean().item(),
            "eval/eos_loss": -torch.stack(ends).mean().item(),
        }

    return evaluate


def replay_sft(lines, settings, rows, tests, read_row):
    """read_row(model, row) gives log-probabilities and hits at the labels of a row, (ids, what its labels are)."""
    defaults = vars(sft.Args())
    args = SimpleNamespace(**defaults | settings, per_pass=math.ceil(len(rows) / 6))
    num_tokens = 0

    def read_step(model, batch):
        nonlocal num_tokens
        logprobs, hits = (torch.cat(parts) for parts in zip(*(read_row(model, row) for row in batch)))
        num_tokens += len(hits)
        return -logprobs.mean(), {"mean_token_accuracy": hits.float().mean().item(), "num_tokens": num_tokens}

    lengths = [len(ids) for ids, _ in rows]
    by_random = lambda number: [rows[i] for i in sft.random_batch(lengths, number, 6, args.seed)]  # noqa: E731
    replay(args, lines, saved(args.model), by_random, read_step, evaluation(tests))


def test_sft_by_hand(texts, tmp_path, monkeypatch):
    """Each step, with accumulation, clipping, weight decay and schedule; the evaluations; the model that is saved."""
    settings = SETTINGS | dict(model=write_model(tmp_path / "plain", "plain"), dataset=texts.folder)
    sizes = note_sizes(monkeypatch)
    lines = run(sft, tmp_path / "run", **settings)
    assert set(sizes) == {3}
    rows, tests = (labelled(x, 36) for x in (texts.rows, texts.tests))
    starts = [start for _, start in rows]
    assert len(rows) == 27 and starts.count(0) == 7  # cut, and without a prompt
    replay_sft(lines, settings, rows, tests, lambda model, row: read_text(model, *row))
    agree(evaluated(lines[-1]), evaluation(tests)(saved(tmp_path / "run")))
    before = 0
    for line in lines:  # tokens of the step
        assert line["perf/tokens_per_second"] * line["time/step"] == pytest.approx(line["num_tokens"] - before)
        before = line["num_tokens"]


def test_packing_by_hand(texts, tmp_path):
    """Blocks are the joined texts cut evenly, if they have a label; that of a block's first token is not predicted."""
    length = 32
    tokens = []
    is_label = []
    for row in texts.rows:
        prompt, end = ids_of(row["prompt"], row["completion"])
        tokens += prompt + end
        is_label += [False] * len(prompt) + [True] * len(end)
    blocks = []
    for start in range(0, len(tokens) - length + 1, length):
        labels = is_label[start + 1 : start + length]
        if any(labels):  # one block is all prompt
            blocks.append((tokens[start : start + length], labels))
    tests = [row for row in texts.tests if sum(map(len, ids_of(row["prompt"], row["completion"]))) <= length]
    data = write_data(tmp_path / "data", train=texts.rows, validation=tests)
    model = write_model(tmp_path / "plain", "plain")
    settings = SETTINGS | dict(packing=True, max_length=length, num_train_epochs=1.5, model=model, dataset=data)
    lines = run(sft, tmp_path / "run", **settings)

    def read_row(model, row):
        ids, labels = row
        return [x[labels] for x in read_text(model, ids, 0)]

    replay_sft(lines, settings, blocks, labelled(tests, length), read_row)


def test_tables_of_samples(texts, tmp_path):
    """They change no number, though the model has dropout; and their tensors are those of three prompts, which end
    where the labels begin, or after eight tokens."""
    settings = SETTINGS | dict(model=write_model(tmp_path / "dropout", "dropout"), dataset=texts.folder)
    without = run(sft, tmp_path / "without", **settings)
    with_tables = run(sft, tmp_path / "with", num_sample_generations=4, **settings)
    assert untimed(without) == untimed(with_tables)
    tests, policy = labelled(texts.tests, 36), saved(tmp_path / "with")
    agree(evaluated(with_tables[-1]), evaluation(tests)(policy))
    shown = load_file(max((tmp_path / "with/samples").iterdir()))
    assert len(shown["prompts"]) == 3
    for i, (ids, start) in enumerate(tests[:3]):
        prompt = shown["prompts"][i, shown["prompt_mask"][i]].tolist()
        assert prompt == ids[: start or min(8, len(ids) // 2)]
        answer = shown["responses"][i, shown["mask"][i]].tolist()
        assert EOS not in answer[:-1] and (answer[-1] == EOS or shown["mask"][i].all())
        logprobs, _ = read_text(policy, prompt + answer, len(prompt))
        assert shown["logprobs"][i, : len(answer)].tolist() == pytest.approx(logprobs.tolist(), abs=1e-4)


def test_a_tokenizer_without_a_padding_token(tmp_path, tiny):
    """As GPT-2's: EOS stands for it, from scratch, too."""
    shutil.copytree(ROOT / "toy/base", tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "base")
    policy = sft.load_policy(sft.Args(from_scratch=str(tmp_path / "base"), device="cpu"))
    assert policy.tokenizer.pad_token == policy.tokenizer.eos_token
    assert run(sft, tmp_path / "out", **tiny["sft"] | dict(from_scratch=str(tmp_path / "base")))


@pytest.mark.parametrize("num_tokens, blocks", [(7, 1), (8, 2), (9, 2), (11, 2), (12, 3)])
def test_the_last_block_is_kept_if_it_is_full(num_tokens, blocks):
    """What does not fill a block is left out, and nothing else."""
    ids = list(range(num_tokens))
    packed = sft.pack([(ids[:5], ids[:5]), (ids[5:], ids[5:])], 4)
    assert [block for block, _ in packed] == [ids[i : i + 4] for i in range(0, 4 * blocks, 4)]
