"""The toy world is what it says it is: the same bytes each time, varied, with a gold score that reads English."""

import runpy
from pathlib import Path

import pytest

from toy import make

TOY = Path(__file__).resolve().parent.parent / "toy"


def test_the_same_rows_each_time(tmp_path):
    """make.py writes the first twentieth of what is in the repository, on this machine too."""
    make.write_data(tmp_path, {name: (train // 20, 0) for name, (train, _) in make.SIZES.items()})
    for name, (size, _) in make.SIZES.items():
        written = (tmp_path / name / "train.jsonl").read_bytes()
        assert written.count(b"\n") == size // 20
        assert (TOY / "data" / name / "train.jsonl").read_bytes().startswith(written), name


@pytest.mark.slow
def test_the_same_bytes_each_time(tmp_path):
    make.write_data(tmp_path / "data")
    make.write_base(tmp_path / "base", tmp_path / "data")
    written = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert len(written) == 9
    assert not [str(p) for p in written if (tmp_path / p).read_bytes() != (TOY / p).read_bytes()]


@pytest.mark.parametrize(
    "better, worse",
    [
        ("The film is not bad.", "The film is bad."),
        ("The film is never dull.", "The film is never clever."),
        ("It is dull, but the music is lovely.", "The music is lovely, but it is dull."),
        ("Despite its dull start, it is lovely.", "It is dull. It is lovely."),
        ("It is lovely.", "It is lovely. It is lovely. It is lovely. It is lovely. It is lovely."),
        ("The story is lovely.", "lovely wonderful superb brilliant lovely wonderful superb brilliant"),
    ],
)
def test_gold_score_reads_english(better, worse):
    assert make.gold_text_score(better) > make.gold_text_score(worse) + 0.05


@pytest.mark.parametrize(
    "world, made", [("shells", ["data", "base"]), ("guess", ["prompts", "base"]), ("shapes", ["data"])], ids=str
)
def test_the_other_worlds_are_made_again_byte_for_byte(world, made, tmp_path):
    program = runpy.run_path(str(TOY / world / "make.py"))
    for part in made:
        program[f"write_{part}"](tmp_path / ("base" if part == "base" else "data"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for file in files:
        assert file.read_bytes() == (TOY / world / file.relative_to(tmp_path)).read_bytes(), file
