"""rewards/classifier.py, on a small DistilBERT with three labels that is made here."""

import pytest
import torch
from runs import run
from sources import load, text_of
from transformers import AutoModelForSequenceClassification, BertTokenizer, DistilBertConfig

import ppo

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "is", "good", "bad", "."]
LABELS = ["NEGATIVE", "NEUTRAL", "POSITIVE"]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    labels = dict(id2label=dict(enumerate(LABELS)), label2id={name: i for i, name in enumerate(LABELS)})
    sizes = dict(dim=16, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=32)
    config = DistilBertConfig(vocab_size=len(WORDS), **sizes, **labels)
    torch.manual_seed(0)
    folder = tmp_path / "model"
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    BertTokenizer(str(tmp_path / "vocab.txt"), model_max_length=32).save_pretrained(folder)
    return folder


def test_the_score_is_the_logit_of_the_label(model, tmp_path):
    """In a copy with another model, as the docstring advises; whatever else is in a batch; the last text is longer than the
    model reads."""
    file = tmp_path / "classifier.py"
    file.write_text(text_of("rewards/classifier.py").replace("lvwerra/distilbert-imdb", str(model)))
    classifier = load(file)
    prompts = ["the film is", "the film", "the film is good . "]
    completions = [" good .", " .", "the film is bad . " * 10]
    classifier.BATCH_SIZE = 2
    scores = classifier.score(prompts, completions)
    tokenizer = BertTokenizer.from_pretrained(model)
    expected = []
    for prompt, completion in zip(prompts, completions):
        inputs = tokenizer(prompt + completion, truncation=True, return_tensors="pt")
        logits = AutoModelForSequenceClassification.from_pretrained(model)(**inputs).logits
        expected.append(logits[0, LABELS.index("POSITIVE")].item())
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len(set(scores)) == 3


def test_ppo_points_to_it_for_a_model_with_several_labels(model, tmp_path, tiny):
    with pytest.raises(SystemExit, match="rewards/classifier.py"):
        run(ppo, tmp_path / "run", reward_model=str(model), **tiny["ppo"])
