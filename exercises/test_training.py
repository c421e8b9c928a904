"""The capstone, after the exercises: a script trains with your functions, once all of them are right."""

import json

import capstone
import pytest
import test_functions
from grading import fail, place_of


def is_right(name: str, student) -> bool:
    """Whether an exercise passes."""
    try:
        getattr(test_functions, f"test_{name}")(student)
    except (pytest.skip.Exception, pytest.fail.Exception):
        return False
    return True


@pytest.mark.capstone
@pytest.mark.parametrize("script", capstone.scripts())
def test_capstone(script, student, record_property, capsys):
    def not_yet(reason: str) -> None:
        record_property("result", f"capstone {script}: not yet: {reason}")
        pytest.skip()

    text = capstone.path_of(script).read_text("utf-8")
    needed = [name for name in capstone.functions_of(text) if hasattr(test_functions, f"test_{name}")]
    missing = [name for name in needed if not is_right(name, student)]
    if missing:
        not_yet(f"these are missing, or wrong: {', '.join(missing)}")
    own = {name: getattr(student, name) for name in needed}
    ours = json.loads(capstone.OURS.read_text("utf-8"))[script]
    trouble = lacking = ""
    try:
        with capsys.disabled():
            print(f"\nyour {script.upper()} trains, for less than a minute", flush=True)
            curve = capstone.train(script, own)
            picture = capstone.draw(script, curve, ours)
    except ModuleNotFoundError as error:
        lacking = error.name
    except Exception as error:
        place = place_of(error, student.__file__, str(capstone.path_of(script)))
        trouble = f"Your {script.upper()} stopped with {type(error).__name__}: {error}{place}"
    if lacking:
        not_yet(f"it needs {lacking} (requirements.txt, requirements-more.txt)")
    if trouble:
        fail(trouble)
    reached, sentence = capstone.verdict(script, curve, ours)
    sentence += f". The curves: {picture}"
    if not reached:
        fail(f"capstone {script}: {sentence}\nThat is too little, although each function is right by itself.")
    record_property("result", f"capstone {script}: {sentence}")
