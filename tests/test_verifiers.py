"""rewards/: right answers, wrong ones, and what people's models have been found to write."""

import importlib
import json
import re
from io import BytesIO

import numpy as np
import pytest
import torch
from by_hand import toy_rows
from PIL import Image
from sources import ROOT, load, text_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertTokenizer, DistilBertConfig

from rewards import jpeg, python_code, verifiers


def one(function, completion, **columns):
    (reward,) = function(prompts=["?"], completions=[completion], **{name: [x] for name, x in columns.items()})
    return reward


# Each part has a function and lines: text ; text | answer, in JSON | reward. \n and \u0000 stand for characters.
TABLE = r"""right_number
so 6 * 12 = 72\n#### 72 ; hence \boxed{72} | 72 | 1
#### $1,234.50\nthanks ; \boxed{7}, no: \boxed{1{,}234.5} | "#### 1{,}234.5" | 1
\boxed{\frac{3}{4}} | "3/4" | 1
#### 18 | "Natalia sold 48/2 = <<48/2=24>>24\n#### 18" | 1
#### −7 ; #### -$7 ; #### –7\u00a0… ; \boxed{－7} | -7 | 1
#### 42。 ; #### 42， ; \boxed{\u200e42।} ; ####\u200b ４２ ; #### \u0664\u0662\u06d4 | 42 | 1
#### ４２．５％ ; #### \u202e\u0664\u0662\u066b\u0665 ; #### 42.5 | ["x", ["\u200f42.5。", null]] | 1
#### 42 | "a parabola" | null
#### 42 | [[], null, true] | null
72 ; #### ; #### 71 ; #### 1e999999999 ; \boxed{72 ; #### 72 apples and 3 pears ; #### __import__('os') | 72 | 0
#### 72,5 ; #### 7$2 ; \boxed{7\frac{2}{1}} ; #### 7，2 ; #### 7\u00a02 ; #### 72² ; \boxed{72!} | 72 | 0

last_number
18 + 17 = 35. ; 有3，4，答案是３５。 ; The answer is 35, I think. | [34, 35] | 1
The answer is $1,035.00, I think. ; about 1\,035 ; it is $1{,}035.00. | 1035 | 1
it falls to -5° ; x − 3 = −5. ; it lost -$5 | -5 | 1
20-5 ; between $3$-$5$. ; (1,\,5) | 5 | 1
so 1 / 2 ; \frac{3}{4}\frac{1}{2} | "1/2" | 1
x = -\frac{1}{2} | "-1/2" | 1
1\frac{1}{2} | "11/2" | 0
\boxed{\frac{1}{2}} ; 2, or else 36 ; the answer is 3 ; 2.5 ; 6.02e2 | 2 | 0

exact_match
72 ; 72\u00a0 | 72.0 | 1
None | null | null
nan | NaN | null
caf\u00e9 ; caf\u200be\u0301 | "cafe\u0301" | 1
한 ; \u1112\u1161\u11ab | "한" | 1
New York ; New\u00a0York\u200f | ["York", ["New York", null]] | 1
true ; True | true | 1
York ; x2 ; True | ["New York", ["x²", false]] | 0

one_sentence
The cat sat down. ; He said "go home." ; The cat weighs 3.5 kg… ; Quel beau chat\u00a0! » ; What did you say?! | 1
\u200fהחתול ישב כאן.\u200f ; هل جلست القطة هنا؟ ; Կատուն նստեց գորգի վրա։ ; ድመቷ፡ምንጣፉ፡ላይ፡ተቀመጠች። | 1
他说：“我回家了。” ; 彼は「もう帰る！」 ; แมวนั่งอยู่บนเสื่อ ; बिल्ली चटाई पर बैठी। ; ឆ្មាអង្គុយលើកន្ទេល។ | 1
Good morning. ; The cat sat. It slept. ; 1. The cat sat ; The cat sat.\nIt slept. ; The cat sat down | 0
猫坐下了。它睡着了。 ; 你好!我很好. ; 好吧。 ; 猫が座った ; बिल्ली बैठी। वह सो गई। | 0"""


def lines():
    """(function, text, answer, reward) of each text in the table."""
    for name, *rows in map(str.splitlines, TABLE.split("\n\n")):
        for texts, *answer, reward in (row.split(" | ") for row in rows):
            for text in texts.replace("\\n", "\n").split(" ; "):
                text = re.sub(r"\\u(....)", lambda code: chr(int(code[1], 16)), text)
                yield name, text, json.loads(answer[0]) if answer else None, json.loads(reward)


@pytest.mark.parametrize("name", ["right_number", "last_number", "exact_match", "one_sentence"])
def test_what_a_reader_sees_is_compared(name):
    function = getattr(verifiers, name)
    for part, text, answer, reward in lines():
        if part == name:
            assert one(function, text, answer=answer) == reward, text
            assert one(function, [{"role": "assistant", "content": text}], answer=answer) == reward, text


LONG = ["", "#### \x00", "#### " + "9" * 10**6, "\\boxed{" * 10**4, "#### " + "0" * 198 + "725", "。 " * 10**5]


def test_long_texts_earn_nothing_at_once():
    for name in ("right_number", "last_number", "exact_match", "one_sentence"):
        assert [one(getattr(verifiers, name), text, answer=72) for text in LONG] == [0.0] * len(LONG)


def test_sentiment():
    """Each rule that a friendly sentence breaks costs a third: a second sentence, no end, another topic, a long word
    twice."""
    sentiment = pytest.importorskip("vaderSentiment") and importlib.import_module("rewards.sentiment")
    message = [{"role": "assistant", "content": "The sea is terrible."}]
    assert one(sentiment.polarity, message) == one(sentiment.polarity, "The sea is terrible.") < -0.4
    score = lambda text: one(sentiment.friendly_sentence, text, thing="sea")  # noqa: E731
    assert score("I love the sea!") == one(sentiment.polarity, "I love the sea!") > 0.4 > score("The sea is wet.") == 0
    assert score("The sea is wet. It is deep.") == score("The sea is") == score("It is wet.") == pytest.approx(-1 / 3)
    assert score("The sea is water, all water.") == pytest.approx(-1 / 3)
    assert score("It is wet") == pytest.approx(-2 / 3)


COUNTDOWN = [
    ("<answer>8 / 3 * 3</answer>", 8, [8, 3, 3], 1),  # exact, where floats may miss
    ("<answer>1</answer> no, <answer>2 + 1</answer>", 3, [1, 2], 1),  # the last one
    ("<answer>1 + 2</answer>", "3", ["1", "2"], 1),  # columns of texts
    ("<answer>4 + 5</answer>", 9, [1, 2, 3], 0),  # other numbers
    ("<answer>1 + 2 + 3 + 3</answer>", 9, [1, 2, 3], 0),  # one twice
    ("<answer>12 + 3</answer>", 15, [1, 2, 3], 0),  # digits joined
    ("<answer>\u200b1\u00a0+ 2</answer>", 3, [1, 2], 1),  # as a reader sees it
    ("", None, None, None),
]
ODD = ["9**9**9**9", "__import__('os').system('true')", "1 if 1 else 2", "7(3)", "１ + ２", "\x00", "1+\n2", ""]
ODD += ["(" * 190, "(" * 10**5, "-" * 190 + "1", "1" * 190 + "*1"]
COUNTDOWN += [(f"<answer>{text}</answer>", 3, [1, 2], 0) for text in ODD]  # what hangs, ends or fools an `eval`


def test_countdown():
    for text, target, nums, reward in COUNTDOWN:
        assert one(verifiers.countdown, text, target=target, nums=nums) == reward, text[:50]


TAGS = {
    "? | <think>a b</think> <answer>3</answer>": 1,
    "Assistant: <think> | a</think><answer>3</answer>": 1,
    "? | <answer>3</answer><think>a</think>": 0,
    "? | <think>a</think><answer>3</answer> and more": 0,
    "? | <think>a</think><think>b</think><answer>3</answer>": 0,
}


def test_tags():
    for text, reward in TAGS.items():
        prompt, answer = text.split(" | ")
        assert verifiers.tagged(prompts=[prompt], completions=[answer.replace(" ", "\n")]) == [reward]


def test_penalties_of_repetition_and_length():
    """-(1 - different / all) of the tokens, so that no spaces are needed; DAPO, eq. 13."""
    ids = [[1, 2, 3, 4], [1, 2], [], [1, 1, 1, 1, 1], [1, 2, 3, 1, 2, 3]]
    rewards = verifiers.repetition_penalty(completions=["喵喵喵喵喵"] * 5, completion_ids=ids)
    assert rewards == pytest.approx([0, 0, 0, 1 / 3 - 1, 3 / 4 - 1])
    ids = [[0] * n for n in (0, 6, 7, 8, 9, 10, 11, 50)]
    penalty = verifiers.overlong_penalty(longest=10, buffer=4)
    assert penalty(completion_ids=ids) == [0, 0, -0.25, -0.5, -0.75, -1, -1, -1]


PROGRAMS = [
    ("Here:\n```python\ndef f(x):\n    return x\n```\nDone.", 1, 1),
    ("```python\ndef f(: pass\n```\n```python\ndef f(): pass\n```", 1, 1),  # the last one
    ("```python\nimport os; os.abort()\n```", 1, 0),  # it is not run
    ("```python\n'\ud800'\n```", 0, 0),
    ("```python\n" + "x = 1\n" * 10**5 + "```", 0, 0),
    *((f"```python\n{piece * 9000}1\n```", 0, 0) for piece in ("(", "-", "[", "{1:", "f'{")),
]


def test_programs(recwarn):
    """Nothing is run, and nothing raises, warns or takes any time."""
    for text, parses, defines in PROGRAMS:
        assert one(python_code.parses, text) == parses and one(python_code.defines, text, entry_point="f") == defines
    assert one(python_code.defines, text, entry_point=None) is None and not recwarn


def test_formulas_as_a_reader_sees_them():
    maths = pytest.importorskip("math_verify") and importlib.import_module("rewards.maths")
    maths.SECONDS = 60  # of the clock, on any machine
    for text in ("答案是４２。", "\\boxed{42。}", "\\boxed{\u0664\u0662}"):
        assert one(maths.score, text, answer=["41", [42]]) == one(maths.score, text, answer="４２") == 1
    for text, answer in (("\\boxed{\\frac{1}{2}}", "It is $\\boxed{0.5}$."), ("\\boxed{2\\sqrt{3}}", "2\\sqrt{3}")):
        assert one(maths.score, text, answer=answer) == 1 and one(maths.score, "\\boxed{2}", answer=answer) == 0
    maths.SECONDS = 1
    for text in ("", "\\boxed{", "I do not know.", "\\boxed{9^{9^{9}}}"):
        assert one(maths.score, text, answer="0.5") == 0
    assert one(maths.score, "\\boxed{true}", answer=True) == 1 and one(maths.score, "42", answer=[[], None]) is None


def test_kilobytes_of_a_jpeg():
    """As Pillow writes it with quality 95; compressibility is the same with the other sign."""
    image = torch.rand(1, 3, 64, 64)
    file = BytesIO()
    Image.fromarray((255 * image[0]).round().byte().permute(1, 2, 0).numpy()).save(file, "JPEG", quality=95)
    size = len(file.getvalue()) / 1000
    assert jpeg.incompressibility(image, [""], [""]) == [size]
    assert jpeg.compressibility(image, [""], [""]) == [-size]


# --- rewards/classifier.py, on a small DistilBERT with three labels

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "is", "good", "bad", "."]
LABELS = ["NEGATIVE", "NEUTRAL", "POSITIVE"]


def test_the_score_is_the_logit_of_the_label(tmp_path):
    """In a copy with another model; whatever else is in a batch; the last text is longer than the model reads."""
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    labels = dict(id2label=dict(enumerate(LABELS)), label2id={name: i for i, name in enumerate(LABELS)})
    sizes = dict(dim=16, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=32, vocab_size=len(WORDS))
    classes, model = AutoModelForSequenceClassification, tmp_path / "model"
    classes.from_config(DistilBertConfig(**sizes, **labels)).save_pretrained(model)
    BertTokenizer(str(tmp_path / "vocab.txt"), model_max_length=32).save_pretrained(model)
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
        logits = classes.from_pretrained(model)(**inputs).logits
        expected.append(logits[0, LABELS.index("POSITIVE")].item())
    assert scores == pytest.approx(expected, abs=1e-5) and len(set(scores)) == 3


ENDINGS = {  # what a template writes behind a message, and at the end of a conversation; what ends an answer
    "texts": ("", "", "<|end|>"),
    "a line": ("<|end|>\n", "", "<|end|>"),
    "Phi's": ("<|pad|>\n", "<|end|>", "<|pad|>"),
    "GLM's": ("", "", "<|end|>"),
    "a space": (" <|end|>\n", "", " <|end|>"),
}


@pytest.mark.parametrize("kind", ENDINGS)
def test_a_reward_model_as_a_function(kind, tmp_path, monkeypatch):
    """The rewards of answers that end, read by hand, row by row. The policy's own tokens are read if they are the same
    texts here."""
    is_chat = kind != "texts"
    of_message, of_talk, end = ENDINGS[kind]
    judge = AutoModelForSequenceClassification.from_pretrained(ROOT / "toy/reward_model")
    judge.config.reward_bias = 0.7
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    last = f"{{% if not add_generation_prompt %}}{of_talk}{{% endif %}}"
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}}{of_message}{{% endfor %}}{last}"
    for part in (judge, tokenizer):
        part.save_pretrained(tmp_path)
    rows = toy_rows("preferences", "validation", 5)
    asked, said = [row["prompt"] for row in rows], [row["chosen"] for row in rows]
    if is_chat:
        said = [text.strip() for text in said]
    tokens = dict(prompt_ids=[tokenizer(prompt + of_message)["input_ids"] for prompt in asked])
    tokens["completion_ids"] = [tokenizer(answer + end)["input_ids"] for answer in said]
    theirs = []
    for ids, new in zip(*tokens.values()):
        with torch.no_grad():
            theirs.append(judge.score(judge.base_model(torch.tensor([ids + new])).last_hidden_state[0, -1]) + 0.7)
    theirs = torch.cat(theirs)
    if is_chat:
        asked = [[{"role": "user", "content": text}] for text in asked]
        said = [[{"role": "assistant", "content": text}] for text in said]
    monkeypatch.setenv("REWARD_MODEL", str(tmp_path))
    module = load("rewards/model.py")
    ours = module.score(asked, said)
    torch.testing.assert_close(torch.tensor(ours), theirs, rtol=0, atol=1e-4)
    assert theirs.std() > 0.1
    monkeypatch.setattr(module, "encode_both", lambda *_: [5])
    columns = tokens | dict(prompts_text=[tokenizer.decode(ids) for ids in tokens["prompt_ids"]])
    assert module.score(asked, said, **columns) == pytest.approx(ours, abs=1e-5)
    for name, ids in tokens.items():  # one token is another
        changed = columns | {name: [[9, *row[1:]] for row in ids]}
        assert np.std(module.score(asked, said, **changed)) < 1e-5
    unknown = columns | dict(completion_ids=[[*ids[:-1], 9999] for ids in tokens["completion_ids"]])
    assert np.std(module.score(asked, said, **unknown)) < 1e-5
    if is_chat:  # without a chat template, messages are read in the policy's
        tokenizer.chat_template = None
        for part in (judge, tokenizer):
            part.save_pretrained(tmp_path / "plain")
        monkeypatch.setenv("REWARD_MODEL", str(tmp_path / "plain"))
        plain = load("rewards/model.py")
        assert plain.score(asked, said, **columns) == pytest.approx(ours, abs=1e-5)
        with pytest.raises(SystemExit, match="chat template"):
            plain.score(asked, said)
        monkeypatch.setenv("REWARD_MODEL", str(tmp_path))
    monkeypatch.setattr(module, "encode_both", lambda *_: [5] * 161)
    with pytest.raises(SystemExit, match="160"):
        module.score(asked, said)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
    halved = load("rewards/model.py").score(asked, said)
    assert halved != ours  # in bfloat16, but for the head
    torch.testing.assert_close(torch.tensor(halved), theirs, rtol=0, atol=0.03)
