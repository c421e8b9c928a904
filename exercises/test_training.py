"""The capstone, after the exercises: each script whose functions are all done trains with them."""

import json

import capstone
import functions
import pytest
import test_functions
from grading import fail, place_of


@pytest.mark.capstone
@pytest.mark.parametrize("script", capstone.scripts())
def test_capstone(script, student, record_property, capsys):
    def say(sentence):
        record_property("said", f"capstone {script}: {sentence}")

    names = capstone.functions_of(capstone.path_of(script).read_text("utf-8"))
    needed = [name for name in names if hasattr(functions, name)]
    missing = [name for name in needed if not is_right(name, student)]
    if missing:
        say(f"not yet: these are missing, or wrong: {', '.join(missing)}")
        pytest.skip()
    ours = json.loads(capstone.OURS.read_text("utf-8"))[script]
    trouble = None
    try:
        with capsys.disabled():
            print(f"\nyour {script.upper()} trains, for less than a minute", flush=True)
            curve = capstone.train(script, {name: getattr(student, name) for name in needed})
    except ModuleNotFoundError as error:
        say(f"not yet: it needs {error.name} (pip install -r requirements.txt)")
        pytest.skip()
    except Exception as error:
        trouble = f"It stopped with {type(error).__name__}: {error}{place_of(error, student, capstone.path_of(script))}"
    if trouble:
        fail(trouble)
    reached, sentence = capstone.verdict(script, curve, ours)
    sentence += f". The curves: {capstone.draw(script, curve, ours)}"
    if not reached:
        fail(f"capstone {script}: {sentence}. Too little, although each function is right by itself.")
    say(sentence)


def is_right(name: str, student) -> bool:
    """Whether this exercise is done."""
    try:
        getattr(test_functions, f"test_{name}")(student)
    except (pytest.skip.Exception, pytest.fail.Exception):
        return False
    return True
