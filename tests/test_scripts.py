"""What holds the single files together: shared text, pinned packages, names that agree everywhere."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpo
import ppo
import reward_model
import rloo
import sft

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"ppo.py": ppo, "rloo.py": rloo, "dpo.py": dpo, "reward_model.py": reward_model, "sft.py": sft}
OWN = {"Args", "check_args", "train"}  # in several scripts, each with its own text


def definitions(name):
    """Top-level functions and classes of a script: name -> source."""
    source = (ROOT / name).read_text()
    return {
        node.name: ast.get_source_segment(source, node)
        for node in ast.parse(source).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }


def test_same_name_same_text():
    texts = {}
    for script in SCRIPTS:
        for name, text in definitions(script).items():
            if name not in OWN:
                texts.setdefault(name, {})[script] = text
    shared = {name: t for name, t in texts.items() if len(t) > 1}
    assert len(shared) >= 15
    drifted = [name for name, t in shared.items() if len(set(t.values())) > 1]
    assert not drifted, f"these have drifted apart: {drifted}"


def test_shared_arguments_have_the_same_help():
    """An argument of the same name means the same in every script; its default may differ where the comment says so."""
    own_words = {"cliprange", "exp_name", "seed", "dataset", "model", "num_sample_generations", "learning_rate", "prompt_column",
                 "dataset_train_split", "max_length", "per_device_train_batch_size", "num_train_epochs",
                 "gradient_accumulation_steps", "max_grad_norm", "lr_scheduler_type", "eval_steps", "ratio_threshold", "temperature", "response_length",
                 "max_prompt_length"}  # fmt: skip
    helps = {}
    for script in SCRIPTS:
        body = next(n for n in ast.parse((ROOT / script).read_text()).body if getattr(n, "name", "") == "Args").body
        for field, doc in zip(body, body[1:]):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(doc, ast.Expr), f"{script}: {field.target.id} has no sentence"
                helps.setdefault(field.target.id, set()).add(doc.value.value)
    assert not [name for name, texts in helps.items() if len(texts) > 1 and name not in own_words]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_argument_is_read(script):
    tree = ast.parse((ROOT / script).read_text())
    read = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    assert {f.name for f in dataclasses.fields(SCRIPTS[script].Args)} <= read


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_script_imports_another(script):
    names = {Path(s).stem for s in SCRIPTS} | {"toy", "make"}
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert not names & {m.split(".")[0] for m in modules}


@pytest.mark.parametrize("script", SCRIPTS)
def test_functions_fit_a_screen_and_are_documented(script):
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is longer than a screen"
            assert node.name.startswith("_") or ast.get_docstring(node), node.name


@pytest.mark.parametrize("script", SCRIPTS)
def test_inline_metadata_agrees_with_requirements(script):
    header = re.search(r"^# dependencies = \[\n(.*?)^# \]", (ROOT / script).read_text(), re.M | re.S)[1]
    inline = set(re.findall(r'"([^"]+)"', header))
    pinned = {line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()} - {""}
    beside = {
        p for p in pinned if p.split("==")[0] in ("pytest", "pytest-xdist", "hypothesis", "peft")
    }  # tests, and --lora-r
    assert inline == pinned - beside


@pytest.mark.parametrize("script", SCRIPTS)
def test_glossary_lists_every_metric(script):
    """The README's table has each logged name, so that no number on a dashboard is without a meaning."""
    readme = (ROOT / "README.md").read_text()
    assert not [name for name in SCRIPTS[script].METRICS if f"`{name}`" not in readme]


def test_importing_a_script_does_nothing():
    """No network, no device, no random number drawn."""
    code = (
        "import random, torch; random.seed(1); torch.manual_seed(1); a = random.getstate(), torch.get_rng_state()\n"
        "import ppo, rloo, dpo, sft, reward_model\n"
        "assert a[0] == random.getstate() and torch.equal(a[1], torch.get_rng_state())\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_alone_in_a_folder_starts(script, tmp_path):
    """Copied into an empty folder it still shows its help, and says in one sentence that the toy world is not there."""
    (tmp_path / script).write_text((ROOT / script).read_text())
    run = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and "--learning-rate" in run.stdout


def test_random_is_seeded_in_one_place():
    """start_run seeds; nothing else does, so that a fork can find it, but for the dropout of further processes (and
    dpo.py's answers, which are drawn with the same numbers each time)."""
    for script in SCRIPTS:
        has_dropout = script in ("sft.py", "reward_model.py", "dpo.py")
        assert len(re.findall(r"manual_seed\(|random\.seed\(", (ROOT / script).read_text())) == 2 + has_dropout
