"""Writes the folder of a student: functions to fill in, tests, training scripts, data and pages, without solutions.

    python exercises/release.py students/ada --student "Ada Lovelace"
    python exercises/mark.py students/ada          # when the folder comes back

The folder needs nothing outside of it. Three things differ from the repository:

  scripts    ppo.py, grpo.py and dpo.py are those of lecture/, but import what the exercises ask for from functions.py
  mistakes   the results of mistakes.py are stored in mistakes.json, since its functions are almost solutions
  numbers    those of the questions in handout.md are drawn from the name, the same each time (mark.py)
"""

import argparse
import ast
import json
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import grading
import test_functions
from capstone import ROOT, RUNS, path_of
from mark import FUNCTIONS, draw, number_table, right_answers, with_table

FILES = {  # file or folder of the repository -> its place in the student's folder
    "exercises/README.md": "README.md",
    "exercises/handout.md": "handout.md",
    "exercises/questions.md": "questions.md",
    "exercises/functions.py": "functions.py",
}
SAME_PLACE = """
exercises/test_functions.py exercises/test_training.py exercises/grading.py exercises/conftest.py exercises/pytest.ini
exercises/capstone.py exercises/capstone.json exercises/train.py tools/seeds.py rewards/verifiers.py LICENSE
toy/gold_score.py toy/lexicon.txt toy/sft toy/reward_model toy/data/prompts toy/data/preferences
toy/shells/make.py toy/shells/sft toy/shells/data/prompts
"""
FILES |= {file: file for file in SAME_PLACE.split()}
PAGES = ("sft", "reward_model", "ppo", "rloo", "grpo", "dpo")  # their section "What it is" becomes algorithms.md
PACKAGES = "torch transformers datasets tyro wandb matplotlib rich tqdm scipy pytest".split()
FOR_TEACHERS = ("For a class", "Solutions")  # sections of README.md that are left out


def skeleton(text: str) -> str:
    """A script of lecture/ without the functions of the exercises, which it imports from functions.py."""
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS]
    lines = text.splitlines()
    for node in reversed(nodes):
        lines[node.lineno - 1 : node.end_lineno] = [f"# {node.name}: yours, in functions.py"]
    text = "\n".join(lines) + "\n"
    text = re.sub(r"(: yours, in functions.py)\n+(?=# \w+: yours)", r"\1\n", text)
    text = text.replace("../", "the full ").replace("python lecture/", "python ")
    text = re.sub(r", in short: .*", ", with your functions.", text, count=1)
    text = text.replace("\nimport time\n", "\nimport sys\nimport time\n", 1)
    place = re.search(r"^TOY = .*\n", text, re.M).end()
    names = "".join(f"    {name},\n" for name in sorted(node.name for node in nodes))
    path = "sys.path.append(str(HERE))  # for programs that start this file from elsewhere\n"
    return f"{text[:place]}{path}from functions import (\n{names})\n{text[place:]}"


def without_sections(page: str, titles: tuple[str, ...]) -> str:
    """A page without the sections of these titles."""
    parts = re.split(r"^(?=## )", page, flags=re.M)
    return (
        "".join(part for part in parts if not part.startswith(tuple(f"## {title}" for title in titles))).rstrip() + "\n"
    )


def relinked(page: str, source: str, place: str) -> str:
    """A page with its links changed for the student's folder. A link to a file that is not there becomes plain text."""

    def link(found: re.Match) -> str:
        words, target = found.groups()
        file, _, anchor = target.partition("#")
        if "://" in target or not file:
            return found[0]
        file = os.path.normpath(Path(source).parent / file).replace(os.sep, "/")
        if file not in FILES:
            return words
        return f"[{words}]({os.path.relpath(FILES[file], Path(place).parent or '.')}{'#' * bool(anchor)}{anchor})"

    return re.sub(r"\[([^][]+)\]\(([^)\s]+)\)", link, page)


def algorithms() -> str:
    """One page from the sections "What it is" of the algorithms' pages."""
    parts = ["# The algorithms\n\nThe formulas of each page of the course.\n"]
    for name in PAGES:
        page = (ROOT / f"docs/{name}.md").read_text("utf-8")
        title = re.search(r"^# (.*)", page, re.M)[1]
        section = re.search(r"^## What it is\n(.*?)(?=^## )", page, re.M | re.S)[1]
        section = re.sub(r"\[([^][]+)\]\([^)\s]+\)", r"\1", section)
        parts.append(f"## {title}\n\n{section.strip()}\n")
    return "\n".join(parts)


def stored_mistakes() -> dict[str, dict]:
    """The results of all common mistakes, to six digits, as grading.py reads them."""
    found = {}

    def note(student, name, outputs, cases, read=None, clean=()):
        read = read or grading.partial(grading.read_outputs, outputs)
        rows = grading.results_of_mistakes(name, read, cases)
        found[name] = {sentence: [plain(row) for row in of_cases] for sentence, of_cases in rows.items()}
        raise InterruptedError  # what follows needs a student

    def plain(results: dict) -> dict:
        return {output: rounded(x.tolist()) for output, x in results.items()}

    def rounded(x):
        return [rounded(y) for y in x] if isinstance(x, list) else float(f"{x:.7g}")

    with mock.patch.object(test_functions, "grade", note):
        for name in FUNCTIONS:
            try:
                getattr(test_functions, f"test_{name}")(None)
            except InterruptedError:
                pass
    return found


def blank_answers(student: str) -> str:
    """answers.toml with the student's name, and a line for each question."""
    lines = [
        "# Your numbers of problem 2, to three digits: remove the # of a line, and write the number.",
        f"student = {json.dumps(student, ensure_ascii=False)}  # the numbers in handout.md are drawn from it: leave it",
        *(f"# {name} = 0.0" for name in right_answers(draw(student))),
    ]
    return "\n".join(lines) + "\n"


def release(folder: Path, student: str) -> None:
    """Writes the folder."""
    folder.mkdir(parents=True)
    for source, place in FILES.items():
        source, place = ROOT / source, folder / place
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place)
    tests = (ROOT / "exercises/test_functions.py").read_text("utf-8")
    for file in (ROOT / "tests/golden").iterdir():
        if file.stem in tests or f"{file.stem[:-1]}{{n}}" in tests:
            (folder / "tests/golden").mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / "tests/golden")

    def write(name: str, text: str) -> None:
        (folder / name).write_text(text, "utf-8")

    for source, place in FILES.items():
        if place.endswith(".md"):
            text = without_sections((ROOT / source).read_text("utf-8"), FOR_TEACHERS)
            write(place, relinked(text, source, place))
    readme, handout = (folder / "README.md", folder / "handout.md")
    title, _, rest = readme.read_text("utf-8").partition("\n")
    write(
        "README.md", f"{title}\n\nThis is the folder of {student}. The assignment is [handout.md](handout.md).\n{rest}"
    )
    write("handout.md", with_table(handout.read_text("utf-8"), "numbers", number_table(draw(student))))
    write("algorithms.md", algorithms())
    write("answers.toml", blank_answers(student))
    write("exercises/mistakes.json", json.dumps(stored_mistakes()) + "\n")
    functions = (folder / "functions.py").read_text("utf-8")
    write("functions.py", re.sub(r"^ *Solution: .*\n", "", functions, flags=re.M))
    for script in RUNS:
        write(f"{script}.py", skeleton(path_of(script).read_text("utf-8")))
    pages = ("requirements.txt", "requirements-more.txt")
    packages = [line for page in pages for line in (ROOT / page).read_text("utf-8").splitlines() if line[0] != "#"]
    write("requirements.txt", "".join(f"{x.split()[0]}\n" for x in packages if x.split("==")[0] in PACKAGES))


def main() -> None:
    """Reads the command line and writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--student", required=True, help="the student's name, from which the numbers are drawn")
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} exists")
    release(args.folder, args.student)
    print(f"{args.folder}: the folder of {args.student}")


if __name__ == "__main__":
    main()
