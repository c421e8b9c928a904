"""What the pages in docs/ and the README say holds: commands, flags, defaults, links, names of functions, diffs."""

import ast
import dataclasses
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
from runs import run
from sources import ROOT, SCRIPTS, nodes_of, text_of

PLACES = ("benchmarks", "experiments", "tools", "tests", "tests/golden")
FOLDERS = (".", "docs", "docs/diffs", "lecture", "toy", "rewards", "exercises", *PLACES)
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
OTHER_TOOLS = {
    "--solutions": "pytest, in exercises/conftest.py",
    "--nproc-per-node": "torchrun",
    "--nnodes": "torchrun",
    "--rdzv-endpoint": "torchrun",
    "--index-url": "pip",
    "--to": "jupytext",
    "--exclude": "hf",
    "--private": "hf",
    "--help": "all",
    "--teacher": "a fork of docs/questions.md",
    "--gold-reward-fn": "the scripts until November 2026, with which runs on record were made",
}
of_pages = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


# --- Flags


def settings_of(node):
    """Flag -> (field, default) of the class Args; a default that is computed is None."""
    found = {}
    for field in node.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        name = field.target.id
        default = None
        if field.value is not None and not isinstance(field.value, (ast.Call, ast.JoinedStr)):
            default = ast.literal_eval(field.value)
        flag = name.replace("_", "-")
        found[f"--{flag}"] = name, default
        if isinstance(default, bool):
            found[f"--no-{flag}"] = name, default
    return found


def arguments(script):
    """Flag -> (field, default) of a program: the fields of its Args, its ALIASES, and what argparse is given."""
    found = {"--help": ("help", None)}
    aliases = {}
    for node in nodes_of(script):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("add", "add_argument"):
            found |= {word.value: (word.value, None) for word in node.args if isinstance(word, ast.Constant)}
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            found |= settings_of(node)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ALIASES":
            aliases = ast.literal_eval(node.value)
    return found | {alias: found[flag] for alias, flag in aliases.items()}


WITH_PROGRAMS = (*PLACES, "exercises", "exercises/bugs", "lecture", "toy/guess", "toy/shells")
PROGRAMS = [str(path.relative_to(ROOT)) for folder in WITH_PROGRAMS for path in (ROOT / folder).glob("*.py")]
ARGUMENTS = {path: arguments(path) for path in [*SCRIPTS, *PROGRAMS]}
ALL_FLAGS = set().union(*ARGUMENTS.values())


def code_lines(text):
    """All code of a page: lines of fenced blocks, with their continuations, and spans in backticks."""
    fence = re.compile(r"^```.*?\n(.*?)^```", re.M | re.S)
    lines = [line for block in fence.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return lines + re.findall(r"(?<!`)`([^`]+)`(?!`)", fence.sub("", text))


def flags_in(code):
    """The flags of a piece of code, in our spelling; what stands in quotes is for another program."""
    code = re.sub('"[^"]*"', '""', code)
    return [flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)]


@of_pages
def test_every_flag_exists(path):
    """In a command line of one of our programs it is a flag of that one; elsewhere of any, or another tool's."""
    for line in code_lines(text_of(path)):
        before = "(?<=python )|(?<=uv run )|(?<=trace.py )|(?<=stepwise.py )"  # the latter two hand flags on
        programs = re.findall(rf"(?:{before})([\w/]+\.py)", line)
        known = ALL_FLAGS | set(OTHER_TOOLS)
        if programs and "lecture/fork.py" not in programs:
            known = {flag for program in programs for flag in ARGUMENTS.get(program, {})}
        for flag in flags_in(line):
            assert flag in known, line


# --- The options of other trainers


def test_our_answers_are_those_of_the_scripts():
    """Defaults and aliases in the tables of options.md."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text_of("docs/options.md").splitlines()]
    answers = [row[1:] for row in cells if len(row) == 3 and row[0].startswith("`")]
    assert answers
    for answer, difference in answers:
        flag = re.match(r"`(--[\w-]+)`", answer)
        known = [ARGUMENTS[script] for script in SCRIPTS if flag and flag[1] in ARGUMENTS[script]]
        for shown in re.findall(r"^`[\w-]+` \((.*?)\)$", answer):
            assert any(equal(shown, flags[flag[1]][1]) for flags in known), answer
        for alias in re.findall(r"alias `(--[\w-]+)`", difference):
            assert any(flags.get(alias) == flags[flag[1]] for flags in known), alias


def equal(text, value):
    """Whether a cell shows a value: numbers in any spelling, on and off, none or what decides it, pairs."""
    if value is None or isinstance(value, (bool, str)):
        return text == {None: "none", True: "on", False: "off"}.get(value, value)
    wanted = value if isinstance(value, tuple) else (value,)
    if all(isinstance(x, str) for x in wanted):
        return text == " ".join(wanted)
    return [float(part) for part in text.split()] == [float(x) for x in wanted]


# --- Links and formulas


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


@of_pages
def test_formulas_are_rendered(path):
    """GitHub refuses a macro, and its Markdown takes marks out of inline formulas, so that they stand in blocks."""
    text = text_of(path)
    assert "\\operatorname" not in text
    assert not re.findall(r"\$[^$`\n]*(?:}_{|\\[,;!])[^$`\n]*\$", re.sub(r"```.*?```", "", text, flags=re.S))


# --- Commands


def commands(text):
    """The command lines of a text that start one of the main scripts, with continuations joined, without comments."""
    fence = re.compile(r"^```bash\n(.*?)^```", re.M | re.S)
    lines = [line for block in fence.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if re.match(r"python \w+\.py( |$)", line)]


def read(command, monkeypatch):
    """Module and settings of a command line."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", command)
    module = importlib.import_module(Path(command[0]).stem)
    return module, module.read_command_line()


def words_of(args):
    """All texts among the settings."""
    values = []
    for value in vars(args).values():
        values += value if isinstance(value, tuple) else [value]
    return [value for value in values if isinstance(value, str)]


@of_pages
def test_commands_are_understood(path, monkeypatch):
    """By the script itself: each value has the right type; and files of this repository that they name are there."""
    for _, *command in commands(text_of(path)):
        if "--resume" in command:  # which needs the run
            continue
        _, args = read(command, monkeypatch)
        for word in words_of(args):
            assert not word.startswith(("toy/", "docs/", "rewards/")) or Path(word.split(":")[0]).exists(), word


def needs_nothing(command):
    """Whether a command starts from the toy world alone."""
    is_own = {"--model", "--resume", "--dataset", "--from-scratch"} & set(command)
    is_missing = any("my_" in word or "classifier" in word for word in command)
    return not is_own and not is_missing


OFFLINE = set()
for page in PAGES:
    before_the_sweeps = text_of(page).split("## Three sweeps")[0]  # which only turn a number
    OFFLINE |= {" ".join(words[1:]) for words in commands(before_the_sweeps) if needs_nothing(words)}


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(OFFLINE))
def test_commands_that_need_nothing_run(command, tiny, tmp_path, monkeypatch):
    """For three steps."""
    module, args = read(shlex.split(command), monkeypatch)
    kept = dict(tiny[module.__name__])
    for name in ("learning_rate", "num_generations", "rloo_k"):
        kept.pop(name, None)
    if module.__name__ == "grpo":
        kept["batch_size"] = 2 * args.num_generations
    settings = dataclasses.asdict(args) | kept
    settings.pop("output_dir")
    assert run(module, tmp_path / "run", **settings)


def test_diffs_are_fresh():
    """Else run docs/diffs/make.py."""
    spec = importlib.util.spec_from_file_location("make_diffs", ROOT / "docs/diffs/make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    for before, after in make.STEPS:
        page = text_of(f"docs/diffs/{before}-{after}.md")
        assert page == make.page(before, after), f"docs/diffs/{before}-{after}.md is old: run docs/diffs/make.py"


# --- Version


def test_there_is_one_version():
    """In each script, which may be copied alone, in CITATION.cff, and at the head of CHANGELOG.md."""
    places = {script: r'^VERSION = "(.+?)"' for script in SCRIPTS}
    places |= {"CITATION.cff": r'^version: "(.+)"', "CHANGELOG.md": r"^## (.+)"}
    found = {file: re.findall(pattern, text_of(file), re.M)[:1] for file, pattern in places.items()}
    assert all(version == found["CITATION.cff"] != [] for version in found.values()), found
