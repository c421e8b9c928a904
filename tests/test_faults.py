"""The list of planted faults stays usable. To plant them: python tests/plant_faults.py"""

import ast

import pytest
from plant_faults import plant, read_faults
from sources import text_of, tree_of

FAULTS = read_faults()


def statements(script: str) -> list[tuple[int, int]]:
    """The first and last line of each statement at the top of a script, decorators included."""
    places = []
    for node in tree_of(script).body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        places.append((first, node.end_lineno))
    return places


@pytest.mark.parametrize("script", sorted({fault["script"] for fault in FAULTS}))
def test_faults_can_be_planted(script):
    """Each one's text stands in the script exactly once, the script with it is still Python, its tests are there.

    Only the statements that a fault changes are parsed again: a function or a class, not the whole script.
    """
    source = text_of(f"{script}.py")
    tops = statements(f"{script}.py")
    for fault in (fault for fault in FAULTS if fault["script"] == script):
        planted = plant(source, fault).splitlines()
        more = len(planted) - len(source.splitlines())
        first = source[: source.index(fault["old"])].count("\n") + 1
        last = first + fault["old"].rstrip("\n").count("\n")
        changed = [(a, b) for a, b in tops if a <= last and first <= b]
        assert changed, fault["name"]
        lines = planted[changed[0][0] - 1 : changed[-1][1] + more]
        try:
            ast.parse("\n".join(lines))
        except SyntaxError as error:
            pytest.fail(f"{script}: {fault['name']}: {error}")
        for test in fault["tests"]:
            file, *names = test.split("[")[0].split("::")
            assert all(f"def {name}(" in text_of(file) for name in names), fault["name"]


def test_names_are_unique():
    """A fault is found by its name."""
    assert len({(fault["script"], fault["name"]) for fault in FAULTS}) == len(FAULTS)
