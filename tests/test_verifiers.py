"""rewards/: right answers, wrong ones, and what people's models have been found to write."""

import importlib
from io import BytesIO

import pytest
import torch
from PIL import Image

from rewards import jpeg, python_code, verifiers


def one(function, completion, **columns):
    (reward,) = function(prompts=["?"], completions=[completion], **{name: [x] for name, x in columns.items()})
    return reward


RIGHT = r"""
so 6 * 12 = 72 #### 72 | 72
#### $1,234.50 thanks | 1234.5
hence \boxed{72} | 72
\boxed{\frac{3}{4}} | 3/4
\boxed{5}, no: \boxed{7} | 7
#### 18 | Natalia sold 48/2 = <<48/2=24>>24 #### 18
\boxed{1{,}000} | #### 1{,}000
#### −3 | -3
#### -$7 | -7
"""


@pytest.mark.parametrize("line", RIGHT.strip().splitlines())
def test_right_numbers(line):
    text, answer = (part.replace(" ####", "\n####").replace(" thanks", "\nthanks") for part in line.split(" | "))
    assert one(verifiers.right_number, text, answer=answer) == 1
    assert one(verifiers.right_number, [{"role": "assistant", "content": text}], answer=answer) == 1


WRONG = r"""
72
####
#### 71
#### 1e999999999
\boxed{72
#### 72 apples and 3 pears
#### __import__('os')
#### 72,5
#### 7$2
\boxed{7\frac{2}{1}}
"""
LONG = ["", "#### \x00", "#### " + "9" * 10**6, "\\boxed{" * 10**4, "#### " + "0" * 198 + "725"]


@pytest.mark.parametrize("text", WRONG.strip().splitlines() + LONG)
def test_wrong_numbers(text):
    """None of them raises, or takes any time."""
    assert one(verifiers.right_number, text, answer=72) == 0.0


LAST = """
18 + 17 = 35. | 35 | 1
The answer is $1,035.00, I think. | 1035 | 1
20-5 | 5 | 1
it falls to -5° | -5 | 1
x − 3 = −5. | -5 | 1
it is $1{,}234.50. | 1234.5 | 1
\\boxed{\\frac{1}{2}} | 2 | 0
so 1 / 2 | 1/2 | 1
x = -\\frac{1}{2} | -1/2 | 1
it lost -$7 | -7 | 1
about 1\\,234 | 1234 | 1
1\\frac{1}{2} | 11/2 | 0
between $5$-$6$. | 6 | 1
(1,\\,2) | 2 | 1
\\frac{1}{2}\\frac{3}{4} | 3/4 | 1
6.02e23 | 23 | 0
35, or else 36 | 35 | 0
the answer is 3 | 35 | 0
35.5 | 35 | 0
"""


@pytest.mark.parametrize("line", LAST.strip().splitlines())
def test_the_last_number_of_a_text(line):
    text, answer, reward = line.split(" | ")
    assert one(verifiers.last_number, text, answer=answer) == int(reward)
    assert one(verifiers.last_number, text + "9" * 10**5, answer=answer) == 0


SENTENCES = """
The cat sat down. | 1
He said "go home." | 1
Good morning. | 0
The cat sat. It slept. | 0
1. The cat sat | 0
The cat sat.\\nIt slept. | 0
"""


@pytest.mark.parametrize("line", SENTENCES.strip().splitlines())
def test_one_sentence(line):
    text, _, reward = line.rpartition(" | ")
    assert one(verifiers.one_sentence, text.replace("\\n", "\n")) == int(reward)


def test_polarity():
    """A rule with a lexicon: kind words are positive, their negation and unkind words are not."""
    sentiment = pytest.importorskip("vaderSentiment") and importlib.import_module("rewards.sentiment")
    kind, unkind, negated, plain = [
        one(sentiment.polarity, [{"role": "assistant", "content": f"The sea is {words}."}])
        for words in ("wonderful", "terrible", "not wonderful", "wet")
    ]
    assert kind > 0.4 and unkind < -0.4 and negated < 0 and abs(plain) < 0.2


def test_a_friendly_sentence():
    """Each broken rule costs a third: a second sentence, no end, another topic, a long word twice."""
    sentiment = pytest.importorskip("vaderSentiment") and importlib.import_module("rewards.sentiment")
    score = lambda text: one(sentiment.friendly_sentence, text, thing="sea")  # noqa: E731
    assert (
        score("The sea is wet.") == 0 and score("I love the sea!") == one(sentiment.polarity, "I love the sea!") > 0.4
    )
    assert score("The sea is wet. It is deep.") == score("The sea is") == score("It is wet.") == pytest.approx(-1 / 3)
    assert score("The sea is water, all water.") == pytest.approx(-1 / 3)
    assert score("It is wet") == pytest.approx(-2 / 3)


def test_a_row_without_a_number_to_compare_with():
    assert one(verifiers.right_number, "#### 3", answer=None) is None
    assert one(verifiers.right_number, "#### 3", answer="a parabola") is None
    assert one(verifiers.exact_match, "None", answer=None) is None and one(verifiers.exact_match, "3 ", answer=3) == 1
    assert one(verifiers.exact_match, "72", answer=72.0) == 1  # as a column with gaps is read
    assert one(verifiers.countdown, "", target=None, nums=None) is None


@pytest.mark.parametrize(
    ("text", "target", "nums", "reward"),
    [
        ("<think>hm</think><answer>(1 + 2) * 3</answer>", 9, [1, 2, 3], 1),
        ("<answer>8 / 3 * 3</answer>", 8, [8, 3, 3], 1),  # exact, where floats may miss
        ("<answer>1</answer> no, <answer>2 + 1</answer>", 3, [1, 2], 1),  # the last one
        ("<answer>1 + 2</answer>", "3", ["1", "2"], 1),  # columns of texts
        ("<answer>4 + 5</answer>", 9, [1, 2, 3], 0),  # other numbers
        ("<answer>1 + 2 + 3 + 3</answer>", 9, [1, 2, 3], 0),  # one twice
        ("<answer>12 + 3</answer>", 15, [1, 2, 3], 0),  # digits joined
        ("<answer>(1 + 2) * 3", 9, [1, 2, 3], 0),
    ],
)
def test_countdown(text, target, nums, reward):
    assert one(verifiers.countdown, text, target=target, nums=nums) == reward


NO_ARITHMETIC = """
9**9**9**9
__import__('os').system('true')
1 if 1 else 2
7(3)
１ + ２
"""
ODD = ["(" * 190, "(" * 10**5, "-" * 190 + "1", "1" * 190 + "*1", "", " ", "\x00", "1+\n2"]


@pytest.mark.parametrize("expression", NO_ARITHMETIC.strip().splitlines() + ODD)
def test_nothing_but_arithmetic_is_worked_out(expression):
    """What hangs, ends or fools an `eval` earns 0 at once."""
    assert one(verifiers.countdown, f"<answer>{expression}</answer>", target=3, nums=[1, 2]) == 0


TAGS = """
? | <think>a b</think> <answer>3</answer> | 1
Assistant: <think> | a</think><answer>3</answer> | 1
<think> | <think>a</think><answer>3</answer> | 0
? | <answer>3</answer><think>a</think> | 0
? | <think>a</think><answer>3</answer> and more | 0
? | <think>a</think><think>b</think><answer>3</answer> | 0
"""


@pytest.mark.parametrize("line", TAGS.strip().splitlines())
def test_tags(line):
    prompt, text, reward = line.split(" | ")
    for space in (" ", "\n"):
        assert verifiers.tagged(prompts=[prompt], completions=[text.replace(" ", space)]) == [int(reward)]


def test_repetition_penalty():
    """-(1 - different / all)."""
    assert one(verifiers.repetition_penalty, "a b c d") == 0
    assert one(verifiers.repetition_penalty, "a b") == one(verifiers.repetition_penalty, "") == 0
    assert one(verifiers.repetition_penalty, "a a a a a") == pytest.approx(-(1 - 1 / 3))
    assert one(verifiers.repetition_penalty, "A b c a B c") == pytest.approx(-(1 - 3 / 4))


def test_overlong_penalty():
    """DAPO, eq. 13: longest 10, buffer 4."""
    penalty = verifiers.overlong_penalty(10, 4)
    lengths = [0, 6, 7, 8, 9, 10, 11, 50]
    assert penalty(completion_ids=[[0] * n for n in lengths]) == [0, 0, -0.25, -0.5, -0.75, -1, -1, -1]


PROGRAMS = [
    ("Here:\n```python\ndef f(x):\n    return x\n```\nDone.", 1, 1),
    ("```python\ndef f(: pass\n```\n```python\ndef f(): pass\n```", 1, 1),  # the last one
    ("```python\nimport os; os.abort()\n```", 1, 0),  # it is not run
    ("```python\n'\\d'\n```", 1, 0),
    ("def f(): pass", 0, 0),
    ("```python\n\x00\n```", 0, 0),
    ("```python\n'\ud800'\n```", 0, 0),
    ("```python\n" + "9" * 5000 + "\n```", 0, 0),
    ("```python\n" + "x = 1\n" * 10**5 + "```", 0, 0),
    *((f"```python\n{piece * 9000}1\n```", 0, 0) for piece in ("(", "-", "[", "{1:", "f'{")),
]


@pytest.mark.parametrize("text, parses, defines", PROGRAMS)
def test_programs(text, parses, defines, recwarn):
    """Nothing is run, and nothing raises, warns or takes any time."""
    assert one(python_code.parses, text) == parses and one(python_code.defines, text, entry_point="f") == defines
    assert one(python_code.parses, [{"role": "assistant", "content": text}]) == parses and not recwarn
    assert one(python_code.defines, text, entry_point=None) is None


def test_kilobytes_of_a_jpeg():
    """As Pillow writes it with quality 95; compressibility is the same with the other sign."""
    images = torch.rand(2, 3, 64, 64) * torch.tensor([1.0, 0.1]).view(2, 1, 1, 1)
    sizes = []
    for image in images:
        file = BytesIO()
        pixels = (255 * image).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(file, "JPEG", quality=95)
        sizes.append(len(file.getvalue()) / 1000)
    assert sizes[0] > 2 * sizes[1]
    assert jpeg.incompressibility(images, [""] * 2, [""] * 2) == sizes
    assert jpeg.compressibility(images, [""] * 2, [""] * 2) == [-size for size in sizes]
