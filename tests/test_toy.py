"""The toy world is what it says it is: the same bytes each time, varied, with a gold score that reads English."""

import runpy
from pathlib import Path

import pytest
from sources import load

from toy import gold_score, make

shapes = load("toy/shapes/make.py", "make_shapes")
TOY = Path(__file__).resolve().parent.parent / "toy"


@pytest.mark.slow
def test_the_same_bytes_each_time(tmp_path):
    make.write_data(tmp_path / "data")
    make.write_base(tmp_path / "base", tmp_path / "data")
    written = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert len(written) == 9
    assert not [str(p) for p in written if (tmp_path / p).read_bytes() != (TOY / p).read_bytes()]


BETTER = {
    "The film is not bad.": "The film is bad.",
    "It is dull, but the music is lovely.": "The music is lovely, but it is dull.",
    "It is lovely.": "It is lovely. It is lovely. It is lovely. It is lovely. It is lovely.",
    "The story is lovely.": "lovely wonderful superb brilliant lovely wonderful superb brilliant",
}


def test_gold_score_reads_english():
    for better, worse in BETTER.items():
        assert gold_score.gold_text_score(better) > gold_score.gold_text_score(worse) + 0.05


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
