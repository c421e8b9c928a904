"""The toy worlds are made again, byte for byte."""

import runpy
from pathlib import Path

import pytest
from toy import make

TOY = Path(__file__).resolve().parent.parent / "toy"


@pytest.mark.slow
def test_the_same_bytes_each_time(tmp_path):
    make.write_data(tmp_path / "data")
    make.write_base(tmp_path / "base", tmp_path / "data")
    written = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert len(written) == 9
    assert not [str(p) for p in written if (tmp_path / p).read_bytes() != (TOY / p).read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("world, made", [("shells", "data base"), ("guess", "prompts base"), ("shapes", "data")])
def test_the_other_worlds_are_made_again_byte_for_byte(world, made, tmp_path):
    program = runpy.run_path(str(TOY / world / "make.py"))
    for part in made.split():
        program[f"write_{part}"](tmp_path / ("base" if part == "base" else "data"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for file in files:
        assert file.read_bytes() == (TOY / world / file.relative_to(tmp_path)).read_bytes(), file
