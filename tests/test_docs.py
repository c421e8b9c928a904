"""What the pages in docs/ and the README say holds: commands, flags, defaults, links, names of functions, diffs."""

import ast
import importlib
import re
import shlex
import sys
from itertools import chain
from pathlib import Path

import pytest
from sources import ROOT, SCRIPTS, load, nodes_of, text_of

sys.path.insert(0, str(ROOT / "experiments"))
import record  # noqa: E402
import tables  # noqa: E402

PLACES = ("benchmarks", "experiments", "tools", "recipes", "tests", "tests/golden")
FOLDERS = (".", "docs", "docs/diffs", "docs/findings", "lecture", "toy", "rewards", "exercises", *PLACES)
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
OTHER_TOOLS = "--solutions --nproc-per-node --nnodes --rdzv-endpoint --index-url --no-compile --with-requirements --to"
OTHER_TOOLS = {*OTHER_TOOLS.split(), "--exclude", "--private", "--help"}  # torchrun, pip, uv, jupytext, hf
of_pages = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


# --- Flags


def arguments(script):
    """The flags of a program: the fields of its Args, their aliases, and what argparse is given."""
    found = {"--help"}
    for node in nodes_of(script):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("add", "add_argument", "alias"):
            found |= {word.value for word in node.args if isinstance(word, ast.Constant)}
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            names = [field.target.id.replace("_", "-") for field in node.body if isinstance(field, ast.AnnAssign)]
            found |= {f"--{prefix}{name}" for name in names for prefix in ("", "no-")}
    return found


WITH_PROGRAMS = (*PLACES, "exercises", "exercises/bugs", "lecture", "toy/guess", "toy/shells")
PROGRAMS = [str(path.relative_to(ROOT)) for folder in WITH_PROGRAMS for path in (ROOT / folder).glob("*.py")]
ARGUMENTS = {path: arguments(path) for path in [*SCRIPTS, *PROGRAMS]}
# The settings of the tasks that pages name, in reasoning_gym
ARGUMENTS["recipes/tasks.py"] |= {"--max-terms", "--max-digits", "--max-words"}
# What it hands on to the short file
ARGUMENTS["exercises/train.py"] |= set().union(*(ARGUMENTS[f"lecture/{name}.py"] for name in ("ppo", "grpo", "dpo")))
# The settings that the forks of docs/diffs/questions.md add to a short file
OF_FORKS = re.findall(r"^\+    (\w+): ", text_of("docs/diffs/questions.md"), re.M)
ALL_FLAGS = set().union(*ARGUMENTS.values(), (f"--{name.replace('_', '-')}" for name in OF_FORKS))


def code_lines(text):
    """All code of a page: lines of fenced blocks, with their continuations, and spans in backticks."""
    fence = re.compile(r"^```.*?\n(.*?)^```", re.M | re.S)
    blocks = [block.replace("\\\n", " ").replace(" && ", "\n") for block in fence.findall(text)]
    lines = [line for block in blocks for line in block.splitlines()]
    return lines + re.findall(r"(?<!`)`([^`]+)`(?!`)", fence.sub("", text))


def flags_in(code):
    """The flags of a piece of code, in our spelling; what stands in quotes is for another program."""
    code = re.sub('"[^"]*"', '""', code)
    return [flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)]


@of_pages
def test_every_flag_exists(path):
    """In a command line of one of our programs it is a flag of that one; elsewhere of any, or another tool's."""
    if path.name == "CHANGELOG.md":  # it names those that are gone
        return
    for line in code_lines(text_of(path).replace("python fork.py", "python ppo.py")):  # a fork of that
        before = "(?<=python )|(?<=uv run )|(?<=trace.py )|(?<=stepwise.py )"  # the latter two hand flags on
        programs = re.findall(rf"(?:{before})([\w/]+\.py)", line)
        known = ALL_FLAGS | set(OTHER_TOOLS)
        if programs and "lecture/fork.py" not in programs:
            known = set().union(*(ARGUMENTS.get(program, ()) for program in programs))
        for flag in flags_in(line):
            assert flag in known, line


# --- Links


def headings(path):
    """The headings of a page, as GitHub names them in links."""
    text = re.sub(r"^```.*?^```", "", text_of(path), flags=re.M | re.S)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)", text, re.M)]


@of_pages
def test_every_link_leads_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(path)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, place = target.partition("#")
        file = path.parent / file if file else path
        assert file.exists(), target
        if place and file.suffix == ".md":
            assert place in headings(file.resolve()), target


# --- Commands


def commands(text):
    """The command lines of a text that start one of the main scripts, with continuations joined, without comments."""
    text = text.replace("python fork.py", "python ppo.py")  # a fork of that
    fence = re.compile(r"^```bash\n(.*?)^```", re.M | re.S)
    lines = [line for block in fence.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if re.match(r"python \w+\.py( |$)", line)]


def read(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", command)
    module = importlib.import_module(Path(command[0]).stem)
    return module, module.read_command_line()


@of_pages
def test_commands_are_understood(path, monkeypatch):
    """By the script itself: each value has the right type; and files of this repository that they name are there."""
    for _, *command in commands(text_of(path)):
        if "--resume" in command:  # which needs the run
            continue
        _, args = read(command, monkeypatch)
        values = [value if isinstance(value, tuple) else [value] for value in vars(args).values()]
        for word in map(str, chain(*values)):
            assert not word.startswith(("toy/", "docs/", "rewards/")) or Path(word.split(":")[0]).exists(), word


@pytest.mark.parametrize("command", load("lecture/before.py").RUNS.values())
def test_the_runs_of_the_course_are_understood(command, monkeypatch):
    if not command.startswith("lecture/"):
        assert read(shlex.split(command), monkeypatch)


def test_diffs_are_fresh():
    """Else run tools/diffs.py."""
    diffs = load("tools/diffs.py")
    for before, after in diffs.STEPS:
        page = text_of(f"docs/diffs/{before}-{after}.md")
        assert page == diffs.page(before, after), f"docs/diffs/{before}-{after}.md is old: run tools/diffs.py"


# --- Tables


def test_the_tables_are_those_of_the_results(monkeypatch):
    """Else run experiments/tables.py, or the program whose page it names."""
    pytest.importorskip("scipy", reason="pip install -r requirements-more.txt")
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit) as done:
        tables.main()
    assert done.value.code == 0


@pytest.mark.parametrize("group", record.read_toml())
def test_the_runs_are_commands_that_are_understood(group, monkeypatch):
    """Of each name one; short files have their own test, and forks other flags."""
    for one in {one.name: one for one in record.runs_of_group(group)}.values():
        if one.command and not one.command[0].startswith("lecture/") and "fork" not in one.options:
            _, args = read([*one.command, "--seed", str(one.seed)], monkeypatch)
            assert args.seed == one.seed


def test_every_run_on_record_is_in_runs_toml():
    """And the programs that it names are there."""
    names = {group: {one.name for one in record.runs_of_group(group)} for group in record.read_toml()}
    assert all(line["run"] in names[group] for group in names for line in record.read_record(group))
    for options in record.read_toml().values():
        programs = [options["by"], *(one["by"] for one in options["runs"] if "by" in one)]
        assert all((ROOT / f"experiments/{name}.py").exists() for name in programs)
        assert all((ROOT / command.split()[0]).exists() for command in options.get("needs", {}).values())


# --- Version


def test_there_is_one_version():
    """In CITATION.cff, and at the head of CHANGELOG.md."""
    places = {"CITATION.cff": r'^version: "(.+)"', "CHANGELOG.md": r"^## (.+)"}
    found = {file: re.findall(pattern, text_of(file), re.M)[:1] for file, pattern in places.items()}
    assert all(version == found["CITATION.cff"] != [] for version in found.values()), found
