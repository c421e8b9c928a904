"""The toy worlds are made again, byte for byte."""

import runpy
from pathlib import Path

import pytest

TOY = Path(__file__).resolve().parent.parent / "toy"


WORLDS = [(".", "data base"), ("shells", "data base"), ("guess", "prompts base"), ("shapes", "data")]


@pytest.mark.slow
@pytest.mark.parametrize("world, made", WORLDS)
def test_the_same_bytes_each_time(world, made, tmp_path):
    program = runpy.run_path(str(TOY / world / "make.py"))
    for part in made.split():
        data = [tmp_path / "data"] if (world, part) == (".", "base") else []
        program[f"write_{part}"](tmp_path / ("base" if part == "base" else "data"), *data)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for file in files:
        assert file.read_bytes() == (TOY / world / file.relative_to(tmp_path)).read_bytes(), file
