"""What holds the single files together: shared text, settings that are read, pinned packages, names of metrics."""

import ast
import dataclasses
import os
import random
import re
import shutil
import signal
import socket
import sys
from collections import defaultdict

import pytest
import torch
from runs import GOLD, NAMES, ON_PROMPTS, run, script, slow_but
from sources import ROOT, SCRIPTS, defined_in, lines_of, load, nodes_of, source_of, text_of

MARK = "the same text in all scripts"  # in the line after which functions are shared
SHORT = [name for name in NAMES if (ROOT / f"lecture/{name}.py").exists()]
OWN_BODY = {  # functions that are others in lecture/, which has no micro-batches, bfloat16 and large vocabularies
    "ppo": {"sample", "token_logprobs"},
    "rloo": {"sample", "token_logprobs"},
    "grpo": {"sample", "token_logprobs"},
    "sft": {"encode", "token_logprobs"},
    "dpo": {"encode", "token_logprobs", "completion_logps"},
    "reward_model": {"encode", "pair_rewards", "read_reward"},
    "agent": {"play", "token_logprobs", "policy_loss"},
}
OWN_ARGUMENTS = {  # of functions that the other scripts on prompts have, too
    ("ppo.py", "update.update"),  # takes the critic
    ("agent.py", "evaluate.evaluate"),  # the environment gives the rewards
    ("agent.py", "policy_loss.policy_loss"),  # has two bounds, as grpo.py's surrogate_loss
}


def test_functions_behind_the_mark_have_the_same_text_in_all_scripts():
    """Those of ppo.py wherever they stand, those of others where they stand behind the mark, too."""
    texts = defaultdict(set)
    of_ppo = set()
    for file in SCRIPTS:
        start = 1 + next(i for i, line in enumerate(lines_of(file)) if MARK in line)
        for name, node in defined_in(file).items():
            of_ppo |= {name} if file == "ppo.py" and node.lineno > start else set()
            if node.lineno > start or name in of_ppo:
                texts[name].add(source_of(file, node))
    assert {name for name in texts if len(texts[name]) > 1} == set()


def arguments(file):
    """The arguments of each function and method of a file, with their types and defaults."""
    parts = [(owner, part) for owner, node in defined_in(file).items() for part in (node, *node.body)]
    functions = [(owner, part) for owner, part in parts if isinstance(part, ast.FunctionDef)]
    return {f"{x}.{f.name}": (ast.unparse(f.args), f.returns and ast.unparse(f.returns)) for x, f in functions}


def test_functions_of_one_name_take_the_same_arguments():
    """A loop that is copied from one script on prompts to another means the same there."""
    kinds = defaultdict(set)
    for file in SCRIPTS:
        if file[:-3] in ON_PROMPTS:
            for name, found in arguments(file).items():
                kinds[name] |= {found} if (file, name) not in OWN_ARGUMENTS else set()
    assert {name for name in kinds if len(kinds[name]) > 1} == set()


def bodies(file):
    """The body of each function at the top of a file, without docstrings."""
    functions = [node for node in ast.parse(text_of(file)).body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                del node.body[0]
    return {function.name: ast.dump(function) for function in functions}


@pytest.mark.parametrize("name", SHORT)
def test_the_short_file_has_the_bodies_of_the_script(name):
    short, long = bodies(f"lecture/{name}.py"), bodies(f"{name}.py")
    assert {x for x in short.keys() & long.keys() if short[x] != long[x]} == OWN_BODY.get(name, set())


@pytest.mark.parametrize("file", SCRIPTS)
def test_every_setting_is_read(file):
    loads = {node.attr for node in nodes_of(file) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    assert {field.name for field in dataclasses.fields(script(file[:-3]).Args)} <= loads


@pytest.mark.parametrize("file", SCRIPTS)
def test_packages_named_in_a_script_have_the_versions_of_requirements(file):
    header = re.search(r"^# dependencies = \[(.*?)\]\n", text_of(file), re.MULTILINE | re.DOTALL)[1]
    pinned = {line.split("#")[0].strip() for line in lines_of("requirements.txt")} - {""}
    named = set(re.findall(r'"([^"]+)"', header))
    assert named <= pinned and {"torch", "transformers", "tyro"} <= {package.split("==")[0] for package in named}
    imported = {node.module or "" for node in nodes_of(file) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes_of(file) if isinstance(node, ast.Import) for alias in node.names}
    known = {package.split("==")[0] for package in pinned} - {"peft"}  # which --lora-r needs alone
    assert {module.split(".")[0] for module in imported} & known <= {package.split("==")[0] for package in named}


@pytest.mark.parametrize("name", slow_but(["ppo", "grpo"], NAMES))
def test_a_scripts_page_names_every_metric(name, tiny, tmp_path):
    settings = tiny[name] | dict(eval_steps=1, beta=0.1, reward_fn=(GOLD,))
    settings = {key: x for key, x in settings.items() if key in vars(script(name).Args())}
    if name == "ddpo":
        settings.pop("reward_fn")
    logged, *others = map(set, run(name, tmp_path / "out", **settings))
    assert all(other == logged for other in others)
    own = {"ppo": "metrics", "rloo": "metrics", "grpo": "metrics"}.get(name, name)  # three scripts share a page
    pages = [f"docs/{own}.md", *(["docs/metrics.md"] if name == "agent" else [])]  # "as in grpo.py"
    rows = [line.split("|")[1] for page in pages for line in lines_of(page) if line.startswith(("| `", "| **`"))]
    known = re.findall(r"`([\w/@]+)`", " ".join(rows))
    named = {re.sub(r"\brewards/\w+/(?=mean|std)", "rewards/NAME/", key.replace("@4", "@G")) for key in logged}
    assert not named - set(known)


# --- Before a run


def test_importing_a_script_does_nothing(monkeypatch):
    """No network, no device, no random number, no signal, no variable of the environment."""

    def state():
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        numbers = random.getstate(), torch.get_rng_state().tolist()
        variables = {name: x for name, x in os.environ.items() if name != "GOMP_SPINCOUNT"}
        return numbers, handlers, variables, torch.get_num_threads(), torch.cuda.is_initialized()

    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("it asks the network"))
    before = state()
    for file in SCRIPTS:
        load(file, "imported")
        assert before == state(), file


@pytest.mark.parametrize("name", NAMES)
def test_a_script_alone_in_a_folder_starts(name, tmp_path, monkeypatch):
    """It imports nothing of ours, and ends for want of a model."""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    ours = [str(path) for path in (ROOT, ROOT / "tests", ROOT / "toy")]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if path not in ("", *ours))])
    for other in [*(file[:-3] for file in SCRIPTS), "toy", "make"]:
        monkeypatch.delitem(sys.modules, other, raising=False)
    module = load(tmp_path / f"{name}.py", "alone")
    with pytest.raises((Exception, SystemExit), match="toy/|rewards/"):
        module.train(module.Args(output_dir=str(tmp_path / "out"), device="cpu"))
    assert {path.name for path in tmp_path.iterdir()} <= {f"{name}.py", "__pycache__", "out"}
    monkeypatch.chdir(ROOT)
