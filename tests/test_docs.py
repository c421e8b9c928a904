"""What the pages in docs/ and the README say holds: commands, flags, defaults, links, names of functions, diffs."""

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from sources import ROOT, SCRIPTS, defined_in, nodes_of, text_of

FOLDERS = (".", "docs", "docs/diffs", "toy", "rewards", "benchmarks", "exercises", "tests", "tests/golden")
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
OTHER_TOOLS = {
    "--solutions": "pytest, in exercises/conftest.py",
    "--nproc-per-node": "torchrun",
    "--nnodes": "torchrun",
    "--rdzv-endpoint": "torchrun",
    "--index-url": "pip",
    "--exclude": "hf",
    "--private": "hf",
    "--help": "all",
}
OPTIONS = json.loads(text_of("tests/golden/option_names.json"))
SECTIONS = [name for name in OPTIONS if name != "source"]
SKELETON = ["What it is", "Usage", "What is logged", "Implementation details", "Results", "When it does not learn",
            "Three sweeps"]  # fmt: skip
ANSWERS = ("`--", "always", "computed", "function `", "library: ", "not yet", "left out")


def arguments(script):
    """Flag -> (field, default) of a script: the fields of its Args, its ALIASES, and what argparse is given."""
    found, aliases = {"--help": ("help", None)}, {}
    for node in nodes_of(script):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("add", "add_argument"):
            found |= {a.value: (a.value, None) for a in node.args if isinstance(a, ast.Constant)}
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for field in (f for f in node.body if isinstance(f, ast.AnnAssign) and not isinstance(f.value, ast.Call)):
                flag, default = field.target.id.replace("_", "-"), ast.literal_eval(field.value)
                flags = [f"--{flag}"] + [f"--no-{flag}"] * isinstance(default, bool)
                found |= dict.fromkeys(flags, (field.target.id, default))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ALIASES":
            aliases = ast.literal_eval(node.value)
    return found | {alias: found[flag] for alias, flag in aliases.items()}


OTHER = [str(p.relative_to(ROOT)) for folder in ("benchmarks", "docs") for p in ROOT.glob(f"{folder}/*.py")]
ARGUMENTS = {path: arguments(path) for path in [*SCRIPTS, *OTHER]}
ALL_FLAGS = set().union(*ARGUMENTS.values())


def code_lines(text):
    """All code of a page: lines of fenced blocks, with their continuations, and spans in backticks."""
    fence = re.compile(r"^```.*?\n(.*?)^```", re.M | re.S)
    lines = [line for block in fence.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return lines + re.findall(r"(?<!`)`([^`\n]+)`(?!`)", fence.sub("", text))


def flags_in(code):
    """The flags of a piece of code, in our spelling; what stands in quotes is for another program."""
    code = re.sub('"[^"]*"', '""', code)
    return [flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)]


def rows(section):
    """The table rows of a section of options.md, as lists of cells; the heads of tables are left out."""
    page = text_of("docs/options.md")
    body = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in body.splitlines() if line.startswith("|")]
    heads = {i + step for i, row in enumerate(cells) if set("".join(row)) == {"-"} for step in (-1, 0)}
    return [row for i, row in enumerate(cells) if i not in heads]


def names(row):
    """The options of others that a row answers."""
    return re.findall(r"`(\w+)`", row[0])


def equal(text, value):
    """Whether a cell shows a value: numbers in any spelling, on and off, none or what decides it, pairs."""
    text = text.strip("`").split(" (code")[0]
    if value is None or isinstance(value, bool):
        words = {None: ("None", "none", "by size"), True: ("True", "on"), False: ("False", "off")}
        return text in words[value]
    if isinstance(value, str):
        return text == (value or "–")
    parts, wanted = text.split(), value if isinstance(value, tuple) else (value,)
    return len(parts) == len(wanted) and all(float(a) == b for a, b in zip(parts, wanted))


def our_default(row):
    """(flag, its default as written) of an answer such as `--seed` (1); None for answers of other kinds."""
    found = re.match(r"`(--[\w-]+)`(?: \((.*?)\))?$", row[2])
    return found and found.groups()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_option_has_one_row(section):
    listed = [name for row in rows(section) for name in names(row)]
    assert sorted(listed) == sorted(OPTIONS[section])


@pytest.mark.parametrize("section", SECTIONS)
def test_no_answer_is_empty(section):
    for row in rows(section):
        assert len(row) == 4 and all(row), row
        assert row[2].startswith(ANSWERS), row


@pytest.mark.parametrize("section", [name for name in SECTIONS if isinstance(OPTIONS[name], dict)])
def test_their_defaults_are_those_of_their_documentation(section):
    for row in rows(section):
        shown = row[1].split(", ")
        shown = shown * len(names(row)) if len(shown) == 1 else shown
        assert len(shown) == len(names(row)), row
        for text, name in zip(shown, names(row)):
            assert equal(text, OPTIONS[section][name]), row


@pytest.mark.parametrize("section", SECTIONS)
def test_our_defaults_are_those_of_the_scripts(section):
    """And where a row says that all is the same, name and default are."""
    for row in rows(section):
        is_same = row[3] == "same" or row[3].startswith("same.")
        if not our_default(row):
            assert not is_same, row
            continue
        flag, shown = our_default(row)
        known = [ARGUMENTS[script][flag] for script in SCRIPTS if flag in ARGUMENTS[script]]
        assert shown and any(equal(shown, default) for _, default in known), row
        if is_same:
            assert names(row) == [flag[2:].replace("-", "_")], row
            assert any(equal(row[1], default) for _, default in known), row


@pytest.mark.parametrize("section", SECTIONS)
def test_aliases_are_aliases(section):
    for row in rows(section):
        for alias in re.findall(r"alias `(--[\w-]+)`", row[3]):
            flag = our_default(row)[0]
            known = [ARGUMENTS[script] for script in SCRIPTS if flag in ARGUMENTS[script]]
            assert any(flags.get(alias) == flags[flag] for flags in known), row


def test_functions_that_stand_in_for_theirs_exist():
    scripts = {"RewardTrainer": "reward_model.py", "SFTTrainer": "sft.py", "DPOTrainer": "dpo.py"}
    for section in SECTIONS:
        defined = set(defined_in(scripts.get(section, "ppo.py")))
        for row in rows(section):
            if row[2].startswith("function"):
                assert set(re.findall(r"`(\w+)`", row[2])) <= defined, row


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_flag_exists(path):
    """In a command line of one of our scripts it is a flag of that script; elsewhere of any script, or another tool."""
    for line in code_lines(text_of(path)):
        script = re.search(r"(?:python|uv run) ([\w/]+\.py)", line)
        known = ARGUMENTS.get(script[1], {}) if script else ALL_FLAGS | set(OTHER_TOOLS)
        for flag in flags_in(line):
            assert flag in known, f"{path.name}: {flag} in {line!r}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(path)):
        if not target.startswith(("http://", "https://", "#")):
            assert (path.parent / target.split("#")[0]).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_formulas_are_rendered(path):
    """GitHub refuses a macro, and its Markdown takes marks out of inline formulas, so that they stand in blocks."""
    text = text_of(path)
    assert "\\operatorname" not in text
    assert not re.findall(r"\$[^$`\n]*(?:}_{|\\[,;!])[^$`\n]*\$", re.sub(r"```.*?```", "", text, flags=re.S))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_has_the_skeleton_and_names_functions_that_exist(script):
    """Each numbered detail names a function of the script that holds it."""
    text = text_of(f"docs/{Path(script).stem}.md")
    assert re.findall(r"^## (.*)", text, re.M)[: len(SKELETON)] == SKELETON
    details = text[text.index("## Implementation details") : text.index("## Results")]
    points = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", details, re.M | re.S)
    assert [int(number) for number, _ in points] == list(range(1, len(points) + 1)) and len(points) >= 8
    defined = set(defined_in(script))
    for _, point in points:
        held_by = set(re.findall(r"`([a-zA-Z_]+)(?:\.\w+)?`", " ".join(re.findall(r"\(([^()]*`[^()]*)\)", point))))
        assert held_by & defined, point


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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_understood(path, monkeypatch):
    """By the script itself: each value has the right type; and files of this repository that they name are there."""
    for _, *command in commands(text_of(path)):
        if "--resume" not in command:  # which needs the run
            _, args = read(command, monkeypatch)
            values = [x for value in vars(args).values() for x in (value if isinstance(value, tuple) else [value])]
            files = [x.split(":")[0] for x in values if isinstance(x, str) and x.startswith(("toy/", "docs/", "rewards/"))]
            assert all(Path(file).exists() for file in files), files


OFFLINE = sorted({" ".join(words[1:])  # without the sweeps, which only turn a number
                  for path in PAGES for words in commands(text_of(path).split("## Three sweeps")[0])
                  if not {"--model", "--resume", "--dataset", "--from-scratch"} & set(words)
                  and not any("my_" in word for word in words)})  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", OFFLINE)
def test_commands_that_need_nothing_run(command, tiny, tmp_path, monkeypatch):
    """Those that start from the toy world, for three steps."""
    module, args = read(shlex.split(command), monkeypatch)
    short = tiny[module.__name__]
    kept = {name: short[name] for name in short if name not in ("learning_rate", "num_generations", "rloo_k")}
    kept |= {"num_sample_generations": 0} if hasattr(args, "num_sample_generations") else {}
    if module.__name__ == "grpo":
        kept["batch_size"] = 2 * args.num_generations
    module.train(dataclasses.replace(args, output_dir=str(tmp_path / "run"), **kept))


def test_the_lengths_of_files_in_the_readme():
    """Those of the short forms to the line, those of the scripts to a hundred."""
    row = r"^\| \[`(lecture/\w+\.py)`\]\(.*?\), (\d+) lines \| \[`(\w+\.py)`\]\(.*?\), ([\d,]+) lines \|"
    rows = re.findall(row, text_of("README.md"), re.M)
    assert sorted(script for _, _, script, _ in rows) == sorted(SCRIPTS)
    for short, exactly, script, about in rows:
        assert short == f"lecture/{script}"
        assert abs(text_of(script).count("\n") - int(about.replace(",", ""))) <= 100, script
        assert text_of(short).count("\n") == int(exactly), short


def test_diffs_are_fresh():
    """Else run docs/diffs/make.py."""
    spec = importlib.util.spec_from_file_location("make_diffs", ROOT / "docs/diffs/make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    for before, after in make.STEPS:
        page = text_of(f"docs/diffs/{before}-{after}.md")
        assert page == make.page(before, after), f"docs/diffs/{before}-{after}.md is old: run docs/diffs/make.py"
