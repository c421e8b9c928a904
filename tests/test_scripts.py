"""What holds the single files together: shared text, pinned packages, names that agree everywhere."""

import ast
import dataclasses
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from io import StringIO
from itertools import groupby
from pathlib import Path

import pytest
import torch
from sources import ROOT, SCRIPTS, defined_in, lines_of, nodes_of, source_of, text_of, tree_of
from test_train import GOLD, run

MODULES = {script: importlib.import_module(Path(script).stem) for script in SCRIPTS}
LAST_LINE = "# === The algorithm ends here."
BEFORE_THE_END = "\n# --- The same text in every script"
SHARED = {  # in which scripts a function or method has the same text; another's of that name differs on purpose
    "ppo rloo grpo dpo sft reward_model ddpo": """
        UserError require explain setting_up hub_answers on_disk locate load_split read_column shuffled make_seed
        autocast all_reduce clip_gradient check_values read_checkpoint machine printable peak_memory_mb write_card
        draw_curves read_command_line Terminal main Run.__init__ Run.open_folder Run.start_wandb Run.__enter__ Run.heed
        Run.__exit__ Run.resume_command Run.show_commands Run.steps Run.clock Run.write Run.is_due Run.save Run.stop
        Run.restore""",
    "ppo rloo grpo dpo sft reward_model": """
        apply_template load_model load_tokenizer use_bfloat16 add_adapter context_length load_data pad make_schedule
        set_learning_rates shard tie split reshard start_run keep_freed_memory check_unused save_model Run.keep_samples Run.is_turn
        Run.warn Run.table Run.finish""",
    "ppo rloo grpo dpo reward_model ddpo": "all_gather",
    "ppo rloo grpo dpo sft": "gathered",
    "ppo rloo grpo dpo ddpo": "make_reference load_function",
    "ppo rloo grpo dpo": """
        Rollout.inputs response_mask sample_categorical OneTypeCache sample response_forward token_logprobs
        adapter_off function_reward check_padding turn_off_dropout""",
    "ppo rloo grpo reward_model": "read_reward",
    "ppo rloo grpo ddpo": "batch",
    "ppo rloo grpo": """
        Rollout.select Rollout.by_length Rollout.map sample_batch token_logprobs_and_entropy compute_logprobs
        kl_estimate score_responses weighted_sum penalize_missing_eos mini_batches policy_forward reward_stats report
        show_samples describe warn_about load_policy find_stop_token load_reward_model same_tokens make_reward
        model_reward load_prompts encode_prompts choose_sizes check_first_ratio encode_prompt""",
    "ppo rloo ddpo": "policy_loss",
    "ppo rloo": """
        score_reference response_kl full_kl masked_mean masked_var masked_whiten rollout_stats evaluate adapt_kl_coef
        pretrain_gradient load_pretrain_texts follow""",
    "rloo grpo": "repeat equal_groups make_optimizer",
    "dpo sft reward_model": """
        as_turns with_eos shard_rows micro_batches choose_sizes make_optimizer""",
    "dpo reward_model": "encode_conversation load_pairs read_pairs keep_different length_grouped_batch",
    "sft reward_model": "check_causal separate_dropout",
}


def definitions(script):
    """Top-level functions and classes, and the methods of Rollout and Run, whose fields are a script's own, by name."""
    named = dict(defined_in(script))
    for name in {"Rollout", "Run"} & set(named):
        methods = [n for n in named.pop(name).body if isinstance(n, ast.FunctionDef)]
        named |= {f"{name}.{method.name}": method for method in methods}
    return {name: source_of(script, node) for name, node in named.items()}


def test_shared_text():
    """What is listed is the same word for word, and what is the same is listed, so that it stays so."""
    where = defaultdict(list)
    for script in SCRIPTS:
        for name, text in definitions(script).items():
            where[name, text].append(Path(script).stem)
    same = {(name, " ".join(scripts)) for (name, _), scripts in where.items() if len(scripts) > 1}
    listed = {(name, scripts) for scripts, names in SHARED.items() for name in names.split()}
    assert not listed - same, f"these have drifted apart, or are gone: {sorted(listed - same)}"
    assert not same - listed, f"these are the same, and not listed: {sorted(same - listed)}"


def test_the_end_of_all_scripts_is_the_same():
    """From the line that says so: functions of ppo.py in its order, but for those that a script does not need."""
    ends = {script: text_of(script).split(BEFORE_THE_END) for script in SCRIPTS}
    assert all(len(parts) == 2 for parts in ends.values())
    names = {script: re.findall(r"^(?:def|class|    def) (\w+)", parts[1], re.M) for script, parts in ends.items()}
    for script in SCRIPTS:
        needed = {"require", "Run", "start_run", "main"} | ({"load_model"} if script != "ddpo.py" else set())
        assert needed <= set(names[script])
        assert names[script] == [name for name in names["ppo.py"] if name in names[script]], script


def helps(script):
    """Setting -> the comment beside or above its field."""
    (body,) = (node.body for node in tree_of(script).body if getattr(node, "name", "") == "Args")
    lines, found = text_of(script).splitlines(), {}
    for node in body:
        above, beside = lines[node.lineno - 2].strip(), lines[node.lineno - 1].partition("  # ")[2]
        found[node.target.id] = beside or (above.startswith("# ") and above.removeprefix("# ").removeprefix("---"))
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_has_its_sentence(script, capsys, monkeypatch):
    """--help shows each setting with its comment, and before that of the first in a part of Args the part's heading."""
    monkeypatch.setattr(sys, "argv", [script, "--help"]), monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        MODULES[script].read_command_line()
    shown = " ".join(re.sub(r"[│|╭╮╰╯─]", " ", capsys.readouterr().out).split())
    sentences = helps(script)
    for name in [field.name for field in dataclasses.fields(MODULES[script].Args) if field.init]:
        assert sentences[name], f"{name} has no sentence"
        assert f"--{name.replace('_', '-')}" in shown and " ".join(sentences[name].split())[:40] in shown, name
    headings = re.findall(r"^    # (--- .*)", text_of(script), re.M)[:-1]  # the last is of what is computed
    assert len(headings) > 5 and not [heading for heading in headings if " ".join(heading.split()) not in shown]


def test_shared_arguments_have_the_same_help():
    """An argument of the same name means the same in every script; the words of some tell of the script's own part."""
    own_words = {
        "cliprange", "ratio_threshold", "max_grad_norm", "learning_rate", "lr_scheduler_type",
        "batch_size", "micro_batch_size", "per_device_train_batch_size", "num_train_epochs", "model",
        "chosen_column", "rejected_column", "prompt_column", "max_length", "max_prompt_length", "seed", "eval_steps",
        "save_steps", "num_sample_generations", "num_eval_prompts", "response_length", "temperature", "lora_r",
        "loss_type", "beta", "num_ppo_epochs", "kl_coef", "reward_fn",
    }  # fmt: skip
    texts = {}
    for script in SCRIPTS:
        for name, words in helps(script).items():
            texts.setdefault(name, set()).add(words)
    assert not [name for name, words in texts.items() if len(words) > 1 and name not in own_words]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_argument_is_read(script):
    read = {n.attr for n in nodes_of(script) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    assert {f.name for f in dataclasses.fields(MODULES[script].Args)} <= read


@pytest.mark.parametrize("script", SCRIPTS)
def test_settings_are_written_into_copies_alone(script):
    """Whoever was given them before sees what the user asked for. (read_command_line is who makes them.)"""
    writers = set()
    for function in (node for node in nodes_of(script) if isinstance(node, ast.FunctionDef)):
        targets = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
        is_writer = any(ast.unparse(target.value) == "args" for target in targets)
        writers |= {function.name} if is_writer and "args = copy(args)" not in ast.unparse(function) else set()
    assert writers == {"read_command_line"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_name_is_used(script):
    """No function, class or import is left over. (Methods are those of Run in every script, used or not.)"""
    imports = [n for n in tree_of(script).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = set(defined_in(script)) | {a.asname or a.name for n in imports for a in n.names}
    words = Counter(re.findall(r"\w+", text_of(script)))
    assert not [name for name in names if words[name.split(".")[0]] < 2]


@pytest.mark.parametrize("script", SCRIPTS)
def test_aliases_lead_to_flags(script):
    module = MODULES[script]
    flags = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(module.Args) if field.init}
    assert set(module.ALIASES.values()) <= flags and not set(module.ALIASES) & flags


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_script_imports_another(script):
    names = {Path(s).stem for s in SCRIPTS} | {"toy", "make"}
    for node in nodes_of(script):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert not names & {m.split(".")[0] for m in modules}


@pytest.mark.parametrize("script", SCRIPTS)
def test_functions_fit_a_screen_and_are_documented(script):
    for node in nodes_of(script):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is longer than a screen"
            assert node.name.startswith("_") or ast.get_docstring(node), node.name
        if isinstance(node, ast.ClassDef) and node.name != "Args":
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("script", SCRIPTS)
def test_layout(script):
    """The algorithm comes first, in less than half of the file; lines fit a screen."""
    lines = lines_of(script)
    (end,) = (number for number, line in enumerate(lines, 1) if line.startswith(LAST_LINE))
    assert end < len(lines) / 2
    blank = max(len(list(group)) for line, group in groupby(lines) if not line)
    assert blank <= 2 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("script", SCRIPTS)
def test_lines_are_not_squeezed(script):
    """Tokens per line, without comments and layout. CleanRL has 8; how many there are in all is nowhere counted."""
    layout = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
    tokens = tokenize.generate_tokens(StringIO(text_of(script)).readline)
    number = sum(tokenize.tok_name[token.type] not in layout for token in tokens)
    assert number / sum(bool(line.strip()) for line in lines_of(script)) <= 9.6


@pytest.mark.parametrize("script", SCRIPTS)
def test_inline_metadata_agrees_with_requirements(script):
    header = re.search(r"^# dependencies = \[\n(.*?)^# \]", text_of(script), re.M | re.S)[1]
    inline = set(re.findall(r'"([^"]+)"', header))
    pinned = {line.split("#")[0].strip() for line in text_of("requirements.txt").splitlines()} - {""}
    beside = ("pytest", "pytest-xdist", "hypothesis", "peft", "httpx2")  # tests, --lora-r, benchmarks/winrate.py
    beside += ("rich",) if script == "ddpo.py" else ("diffusers",)  # which shows images, and no tables
    beside = {p for p in pinned if p.split("==")[0] in beside}
    assert inline == pinned - beside


ALL_METRICS = {  # settings under which a script logs everything that it can
    "ppo.py": {"gold_reward_fn": GOLD, "ptx_coef": 1.0},
    "rloo.py": {"gold_reward_fn": GOLD, "ptx_coef": 1.0},
    "grpo.py": {"gold_reward_fn": GOLD, "beta": 0.1},
    "dpo.py": {"gold_reward_fn": GOLD},
    "reward_model.py": {},
    "sft.py": {},
    "ddpo.py": {"gold_reward_fn": "toy/shapes/make.py:same_shape"},
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_glossary_lists_every_metric(script, tiny, tmp_path):
    """A script's page has each logged name, so that no number on a dashboard is without a meaning."""
    (tmp_path / "texts.jsonl").write_text('{"text": "The cat sat on the mat."}\n' * 8)
    settings = tiny[Path(script).stem] | ALL_METRICS[script] | ({} if script == "ddpo.py" else {"eval_steps": 1})
    settings |= {"total_episodes": 16} if "total_episodes" in settings else {}
    if "ptx_coef" in settings:
        settings["pretrain_data"] = str(tmp_path / "texts.jsonl")
    logged, *others = map(set, run(MODULES[script], tmp_path / "out", **settings))
    assert all(other == logged for other in others)
    pages = [f"docs/{Path(script).stem}.md"] + ["docs/ppo.md"] * (script in ("rloo.py", "grpo.py"))  # "as in ppo.py"
    lines = [line for page in pages for line in text_of(page).splitlines()]
    rows = [line.split("|")[1] for line in lines if line.startswith("| `")]
    logged = {re.sub(r"^rewards/\w+/(?=mean|std)", "rewards/NAME/", re.sub(r"@4$", "@G", name)) for name in logged}
    assert not logged - set(re.findall(r"`([\w/@]+)`", " ".join(rows)))


def load(path, name, monkeypatch):
    """A script, executed anew under another name."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_importing_a_script_does_nothing(monkeypatch):
    """No network, no device, no random number drawn, no signal taken; and nothing is written, or put into the settings
    of the process, but for what threads are to do while they wait."""

    def state():
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        variables = {name: x for name, x in os.environ.items() if name != "GOMP_SPINCOUNT"}
        numbers = random.getstate(), torch.get_rng_state().tolist()
        return numbers, handlers, variables, torch.get_num_threads(), torch.cuda.is_initialized()

    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("it asks the network"))
    before = state()
    for script in SCRIPTS:
        load(ROOT / script, "imported", monkeypatch)
        assert before == state(), script


@pytest.mark.slow
def test_importing_all_scripts_draws_no_number():
    """Nor do the libraries that they import (but for rich, for its links)."""
    code = (
        "import random, rich.style, torch; random.seed(1); torch.manual_seed(1)\n"
        "a = random.getstate(), torch.get_rng_state()\n"
        "import ppo, rloo, grpo, dpo, sft, reward_model, ddpo\n"
        "assert a[0] == random.getstate() and torch.equal(a[1], torch.get_rng_state())\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def check_sentence(script, code, error):
    """One sentence says what is not there."""
    assert code == 2 and error.startswith(f"{script}: error: ") and len(error.splitlines()) == 1 and "toy/" in error


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_alone_in_a_folder_starts(script, tmp_path, monkeypatch, capsys):
    """Copied into an empty folder it imports nothing of ours, and says in one sentence what is not there."""
    shutil.copy(ROOT / script, tmp_path)
    monkeypatch.chdir(tmp_path), monkeypatch.setattr(sys, "argv", [script])
    here = [str(path) for path in (ROOT, ROOT / "tests", ROOT / "toy")]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if path not in ("", *here))])
    for other in [*SCRIPTS, "toy.py", "make.py"]:
        monkeypatch.delitem(sys.modules, Path(other).stem, raising=False)
    with pytest.raises(SystemExit) as end:
        load(tmp_path / script, "alone", monkeypatch).main()
    check_sentence(script, end.value.code, capsys.readouterr().err)
    assert os.listdir(tmp_path) == [script]


@pytest.mark.slow
def test_a_script_alone_in_a_folder_starts_as_a_program(tmp_path):
    shutil.copy(ROOT / "ppo.py", tmp_path)
    done = subprocess.run([sys.executable, "ppo.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    check_sentence("ppo.py", done.returncode, done.stderr)


def test_random_numbers_are_seeded_where_a_fork_finds_it():
    """At the start and at each step, for the order of each pass; besides, for the dropout of further processes, and for
    texts and images that are drawn with the same numbers each time."""
    own = {"sft.py": {"separate_dropout", "show_samples"}, "reward_model.py": {"separate_dropout"}}
    own |= {"dpo.py": {"respond"}, "ddpo.py": {"draw_images"}, "grpo.py": {"answer"}}
    for script in SCRIPTS:
        functions = [node for node in nodes_of(script) if isinstance(node, ast.FunctionDef)]
        seeded = {f.name for f in functions if re.search(r"(manual_|set_|random\.)seed\(|rng_state", ast.unparse(f))}
        assert seeded == {"start_run", "steps", "shuffled"} | own.get(script, set()), script
