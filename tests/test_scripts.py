"""What holds the single files together: shared text, help, pinned packages, names that agree everywhere."""

import ast
import dataclasses
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from runs import GOLD, run
from sources import ROOT, SCRIPTS, defined_in, lines_of, load, nodes_of, source_of, text_of

MODULES = {script: importlib.import_module(Path(script).stem) for script in SCRIPTS}
# What bears the same name in several scripts has the same text, but for these, which differ on purpose
OF_THE_ALGORITHM = """
    Args train update Rollout.by_length response_forward policy_forward rollout_stats evaluate report
    model_reward read_reward show_samples first_pass read_logprobs load_policy load_reward_model make_optimizer check_args choose_sizes encode_pairs as_pairs
    encode_pair
    default_rate"""
OF_IMAGES = """
    join add_adapter sample_batch policy_loss warn_about make_reward_fns function_reward load_prompts check_first_ratio
    start Run.tensors save_model"""


def definitions(script):
    """Functions and classes at the top of a script, and the methods of Run and Rollout, whose fields are its own."""
    named = dict(defined_in(script))
    for name in {"Run", "Rollout"} & set(named):
        methods = [node for node in named.pop(name).body if isinstance(node, ast.FunctionDef)]
        named |= {f"{name}.{method.name}": method for method in methods}
    return {name: source_of(script, node) for name, node in named.items()}


def differing(scripts):
    """The names that do not have the same text in all of the scripts."""
    texts = defaultdict(set)
    for script in scripts:
        for name, text in definitions(script).items():
            texts[name].add(text)
    return {name for name in texts if len(texts[name]) > 1}


def test_shared_text():
    of_texts = [script for script in SCRIPTS if script != "ddpo.py"]
    assert differing(of_texts) <= set(OF_THE_ALGORITHM.split())
    assert differing(SCRIPTS) <= set(OF_THE_ALGORITHM.split()) | set(OF_IMAGES.split())


# --- The short files

# What bears the same name in lecture/ and in the script has the same body, but for these
OF_THE_SHORT_FILE = {
    "sft": "",
    "reward_model": "read_reward pair_rewards",
    "dpo": "completion_logps",
    "ppo": "sample",
    "rloo": "sample",
    "grpo": "sample",
    "ddpo": "",
}


def bodies(file):
    """The body of each function at the top of a file, without docstrings and annotations."""
    functions = [node for node in ast.parse(text_of(file)).body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        function.decorator_list, function.returns = [], None
        for node in ast.walk(function):
            if isinstance(node, ast.arg):
                node.annotation = None
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                del node.body[0]
    return {function.name: ast.dump(function) for function in functions}


@pytest.mark.parametrize("name", OF_THE_SHORT_FILE)
def test_the_short_file_has_the_bodies_of_the_script(name):
    short, script = bodies(f"lecture/{name}.py"), bodies(f"{name}.py")
    differing = {function for function in set(short) & set(script) if short[function] != script[function]}
    assert differing <= set(OF_THE_SHORT_FILE[name].split())


# --- Settings


def fields_of(script):
    return [field.name for field in dataclasses.fields(MODULES[script].Args)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_argument_is_read(script):
    loads = [node for node in nodes_of(script) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
    assert set(fields_of(script)) <= {node.attr for node in loads}


@pytest.mark.parametrize("script", SCRIPTS)
def test_aliases_lead_to_flags(script):
    flags = {f"--{name.replace('_', '-')}" for name in fields_of(script)}
    aliases = MODULES[script].ALIASES
    assert set(aliases.values()) <= flags
    assert not set(aliases) & flags


# --- Packages and metrics


@pytest.mark.parametrize("script", SCRIPTS)
def test_inline_metadata_agrees_with_requirements(script):
    header = re.search(r"^# dependencies = \[\n(.*?)^# \]", text_of(script), re.MULTILINE | re.DOTALL)[1]
    inline = set(re.findall(r'"([^"]+)"', header))
    pinned = {line.split("#")[0].strip() for line in text_of("requirements.txt").splitlines()} - {""}
    beside = {"pytest", "pytest-xdist", "hypothesis", "peft", "httpx2", "scipy"}  # tests, --lora-r, tools
    beside |= {"jupytext", "nbclient", "ipykernel"}  # the short files as notebooks
    beside |= {"math-verify", "vaderSentiment"}  # rewards/maths.py, rewards/sentiment.py
    beside |= {"rich"} if script == "ddpo.py" else {"diffusers"}  # ddpo.py shows images, and no tables
    assert inline == {package for package in pinned if package.split("==")[0] not in beside}


ALL_METRICS = {  # settings under which a script logs everything that it can
    "ppo.py": {"ptx_coef": 1.0},
    "rloo.py": {"ptx_coef": 1.0},
    "grpo.py": {"beta": 0.1},
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_glossary_lists_every_metric(script, tiny, tmp_path):
    """A script's page has each logged name, so that no number on a dashboard is without a meaning."""
    settings = tiny[Path(script).stem] | ALL_METRICS.get(script, {})
    if script != "ddpo.py":
        settings["eval_steps"] = 1
    if "reward_fn" in fields_of(script) and script != "ddpo.py":
        settings["reward_fn"] = (GOLD,)
    if "ptx_coef" in settings:
        (tmp_path / "texts.jsonl").write_text('{"text": "The cat sat on the mat."}\n' * 8)
        settings["pretrain_data"] = str(tmp_path / "texts.jsonl")
    logged, *others = map(set, run(MODULES[script], tmp_path / "out", **settings))
    assert all(other == logged for other in others)
    pages = [f"docs/{Path(script).stem}.md"]
    if script in ("rloo.py", "grpo.py"):
        pages.append("docs/ppo.md")  # "as in ppo.py"
    rows = [line.split("|")[1] for page in pages for line in lines_of(page) if line.startswith(("| `", "| **`"))]
    known = re.findall(r"`([\w/@]+)`", " ".join(rows))
    named = {re.sub(r"\brewards/\w+/(?=mean|std)", "rewards/NAME/", name.replace("@4", "@G")) for name in logged}
    assert not named - set(known)


# --- What happens before a run


def test_importing_a_script_does_nothing(monkeypatch):
    """No network, no device, no random number, no signal, no variable of the environment."""

    def state():
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        numbers = random.getstate(), torch.get_rng_state().tolist()
        variables = {name: x for name, x in os.environ.items() if name != "GOMP_SPINCOUNT"}
        return numbers, handlers, variables, torch.get_num_threads(), torch.cuda.is_initialized()

    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("it asks the network"))
    before = state()
    for script in SCRIPTS:
        load(script, "imported")
        assert before == state(), script


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_alone_in_a_folder_starts(script, tmp_path, monkeypatch):
    """Copied into an empty folder it imports nothing of ours; it ends for want of a model or data."""
    shutil.copy(ROOT / script, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script])
    ours = [str(path) for path in (ROOT, ROOT / "tests", ROOT / "toy")]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if path not in ("", *ours))])
    for other in [*SCRIPTS, "toy.py", "make.py"]:
        monkeypatch.delitem(sys.modules, Path(other).stem, raising=False)
    module = load(tmp_path / script, "alone")
    with pytest.raises((Exception, SystemExit), match="toy/|find them"):
        module.main()
    assert set(os.listdir(tmp_path)) - {"__pycache__"} == {script}
