"""The short form of a script, in lecture/, computes what the script computes.

Both run for three updates in float64, where the order of sums, the width of padding and the cut into micro-batches
change nothing beyond 1e-9. The two are written apart from each other, so that each is a check of the other.
"""

import json
import math
import re
import shutil
from functools import partial

import pytest
import torch
from float64 import float64, in_float64, load_in_float64
from runs import short_form, slow_but
from sources import ROOT, lines_of, load
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

ALL = dict(batch_size=8, total_episodes=24)
RL = ALL | dict(num_ppo_epochs=2, num_mini_batches=2, temperature=0.9, response_length=8, learning_rate=2e-3)
SCORED = RL | dict(kl_coef=0.3, missing_eos_penalty=0.4)
TEXTS = dict(batch_size=8, num_train_epochs=1.5, warmup_ratio=0.4, learning_rate=2e-3)  # 3 steps, the first at rate 0
SETTINGS = {  # away from the defaults
    "ppo": SCORED | dict(gamma=0.9, lam=0.8, cliprange=0.05, cliprange_value=0.02, vf_coef=0.7),
    "rloo": SCORED | dict(rloo_k=4, cliprange=0.05),
    "grpo": RL | dict(num_generations=4, epsilon=0.05, beta=0.3, scale_rewards="group", loss_type="grpo"),
    "sft": TEXTS | dict(lr_scheduler_type="linear", micro_batch_size=3, max_length=40),
    "reward_model": TEXTS | dict(lr_scheduler_type="linear", center_rewards_coefficient=0.1, max_length=30),
    "dpo": TEXTS | dict(lr_scheduler_type="cosine", beta=0.5),
    "ddpo": dict(num_epochs=3, sample_num_steps=4, sample_eta=0.8, sample_batch_size=4, sample_num_batches_per_epoch=2)
    | dict(train_batch_size=2, train_gradient_accumulation_steps=2, train_num_inner_epochs=2, train_clip_range=0.01)
    | dict(train_adv_clip_max=1.2, train_learning_rate=3e-4),
}
WORLDS = {"ddpo": ("shapes", "stable")}  # those of the others are toy and llama
OF_A_SEED = {  # instead, and besides
    ("grpo", 2): dict(scale_rewards="mean", loss_type="dr_grpo", response_length=36),  # some batches end before
    ("grpo", 3): dict(scale_rewards="none", loss_type="dapo", beta=0.0),
}
ROLLOUTS = dict(micro_batch_size=3, num_sample_generations=0, num_eval_prompts=0)
ON_TEXTS = ["sft", "reward_model", "dpo"]  # those that draw no responses
FULL = {  # what a short form does not have
    "ppo": ROLLOUTS,
    "rloo": ROLLOUTS,
    "grpo": ROLLOUTS,
    "sft": {},
    "reward_model": dict(micro_batch_size=8),
    "dpo": dict(micro_batch_size=3, max_prompt_length=40, dataset_test_split=None),
    "ddpo": {},
}
STABLE = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1, skip_prk_steps=True)
STABLE |= dict(_class_name="PNDMScheduler", clip_sample=False, set_alpha_to_one=False)  # Stable Diffusion 1.5's
INK = """
def ink(images, prompts, metadata):  # of one column, for each prompt another
    columns = [len(prompt) % 8 for prompt in prompts]
    return [image[0, :, i].mean().item() for image, i in zip(images, columns)]
"""


@pytest.fixture(scope="session")
def worlds(tmp_path_factory, uneven):
    """worlds(script, name) -> settings: models whose responses often end within eight tokens, data and a reward.

    In the toy world EOS is the full stop, with which texts end, and the padding, too; its models have dropout, and that
    of sft.py is drawn at random. The tiny Llama, drawn at random, has seventeen tokens, and reads texts of the shell
    game. sft.py is also given a text without a prompt. The shapes are drawn by the toy pipeline, once with Stable
    Diffusion's schedule.
    """
    folder = tmp_path_factory.mktemp("worlds")
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=17)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    tokenizer.eos_token = tokenizer.pad_token = "."
    cups = AutoTokenizer.from_pretrained(ROOT / "toy/shells/base")
    sizes |= dict(pad_token_id=1, eos_token_id=cups.eos_token_id)
    config = LlamaConfig(**sizes, num_labels=1, initializer_range=0.3)
    kinds = {"model": AutoModelForCausalLM, "reward_model": AutoModelForSequenceClassification}
    torch.manual_seed(0)
    for role, auto_class in kinds.items():
        toy = auto_class.from_pretrained(ROOT / "toy" / {"model": "sft"}.get(role, role))
        toy.config.embd_pdrop = toy.config.resid_pdrop = 0.1
        for part in (toy, tokenizer):
            part.save_pretrained(folder / "toy" / role)
        for part in (auto_class.from_config(config), cups):
            part.save_pretrained(folder / "llama" / role)
        config.reward_bias = 0.7
    (folder / "reward.py").write_text("def length(completions, **_):\n    return [len(x) % 7 / 7 for x in completions]")
    (folder / "ink.py").write_text(INK)
    shutil.copytree(ROOT / "toy/shapes/sd", folder / "stable")
    (folder / "stable/scheduler/scheduler_config.json").write_text(json.dumps(STABLE))

    few = folder / "prompts"  # so few that even groups of four responses take them in two passes
    few.mkdir()
    (few / "train.jsonl").write_text("\n".join(lines_of("toy/data/prompts/train.jsonl")[:5]))
    data = {"toy": str(few), "llama": uneven("prompts", 64)}

    files = {"toy": "toy/data/preferences/train.jsonl", "llama": f"{uneven('sft', 12)}/train.jsonl"}
    for world, file in files.items():
        pairs = [json.loads(line) for line in lines_of(file)[:12]]
        for i, pair in enumerate(pairs):
            pair.setdefault("chosen", pair.get("completion"))
            pair.setdefault("completion", pair["chosen"])
            pair.setdefault("rejected", f" {i % 4 + 1}" * (i % 9 + 1))
            pair["margin"] = i % 3 / 4
        for name in ("pairs", "texts"):
            (folder / world / name).mkdir()
            (folder / world / name / "train.jsonl").write_text("\n".join(map(json.dumps, pairs)))
            pairs[3]["prompt"] = ""  # from here on; without one, dpo.py looks for what two texts share
            pairs[5]["prompt"] = " ".join([pairs[5]["prompt"]] * 40)  # nor is there room for its completion

    def settings(script: str, world: str) -> dict[str, str]:
        if script in ON_TEXTS:
            key = "from_scratch" if (script, world) == ("sft", "toy") else "model"
            file = "texts" if script == "sft" else "pairs"
            return {key: f"{folder}/{world}/model", "dataset": f"{folder}/{world}/{file}"}
        if script == "ddpo":
            pipelines = {"shapes": ROOT / "toy/shapes/sd", "stable": folder / "stable"}
            return {"model": str(pipelines[world]), "reward_fn": f"{folder}/ink.py:ink"}
        given = {"model": f"{folder}/{world}/model", "dataset": data[world]}
        if script == "grpo":
            return given | {"reward_fn": f"{folder}/reward.py:length"}
        return given | {"reward_model": f"{folder}/{world}/reward_model"}

    return settings


def watched(names: dict, responses: list, images: list) -> None:
    """Has the script write down what it draws, up to the stop token: mask and responses meet in one function.

    Of images it writes down how likely each step was, now and when it was drawn.
    """
    if "response_mask" not in names:
        if "policy_loss" in names:
            loss = names["policy_loss"]
            names["policy_loss"] = lambda *inputs: (images.extend(x.detach() for x in inputs[:2]), loss(*inputs))[1]
        return
    plain = names["response_mask"]

    def response_mask(tokens, stops):
        mask, ended = plain(tokens, stops)
        responses.append([row[real].tolist() for row, real in zip(tokens, mask)])
        return mask, ended

    names["response_mask"] = response_mask


def batches_as_they_come(shuffled, pairs, args):
    """The batches of all passes in shuffled order, whatever the lengths of their pairs; and how many make a pass."""
    size = args.batch_size
    orders = [shuffled(len(pairs), args.seed, number) for number in range(math.ceil(args.num_train_epochs))]
    return [order[i : i + size] for order in orders for i in range(0, len(pairs), size)], math.ceil(len(pairs) / size)


def run_full(script: str, settings: dict, folder, monkeypatch) -> tuple[list, list[dict], list]:
    """Responses, metrics and trained weights of the script; with these what was drawn, if it was images."""
    module = load_in_float64(script, monkeypatch)
    responses = []
    weights = []
    watched(vars(module), responses, weights)
    if "reward_fn" in settings:
        settings = settings | {"reward_fn": (settings["reward_fn"],)}

    def finish(run):
        if script == "reward_model":
            weights.append(torch.tensor(run.models["model"].config.reward_bias))
        weights.extend(p for group in run.optimizer.param_groups for p in group["params"])

    module.Run.finish = finish
    if hasattr(module, "length_grouped_batches"):  # a matter of speed, which the short forms leave out
        module.length_grouped_batches = partial(batches_as_they_come, module.shuffled)
    module.train(module.Args(**settings, **FULL[script], output_dir=str(folder / "full"), device="cpu"))
    return responses, [json.loads(line) for line in open(folder / "full/metrics.jsonl")], weights


def run_lecture(script: str, settings: dict, folder) -> tuple[list, list[dict], list]:
    """The same of its short form, cell by cell, as a notebook runs it."""
    file = f"lecture/{script}.py"
    responses, images = [], []
    watch = "def policy_loss" if script == "ddpo" else "def response_mask"
    with short_form(script, **settings, output_dir=folder / "lecture") as names:
        for cell in re.split("^(?=# %%)", in_float64(file), flags=re.M):
            exec(compile(cell, file, "exec"), names)
            if watch in cell:
                watched(names, responses, images)
    assert list((folder / "lecture").rglob("*.safetensors"))
    weights = [p for group in names["optimizer"].param_groups for p in group["params"]]
    if script == "reward_model":
        weights.insert(0, torch.tensor(names["model"].config.reward_bias))
    return responses, names["history"], images + weights


def rms_norm(self: LlamaRMSNorm, x: Tensor) -> Tensor:
    """The library's own rounds to float32."""
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


QUICK = [(script, "toy", 1) for script in ("ppo", "grpo", "sft", "reward_model", "dpo")]
CASES = [(s, world, seed) for s in SETTINGS for seed, world in enumerate(WORLDS.get(s, ("toy", "llama")), 1)]
CASES += [("grpo", "llama", 3)]


@pytest.mark.parametrize(("script", "world", "seed"), slow_but(QUICK, CASES))
def test_the_short_form_is_the_script(script, world, seed, worlds, tmp_path, monkeypatch):
    """Responses token for token; to 1e-8 every metric that both log, and all weights."""
    settings = SETTINGS[script] | OF_A_SEED.get((script, seed), {}) | worlds(script, world) | {"seed": seed}
    monkeypatch.setattr(LlamaRMSNorm, "forward", rms_norm)
    with float64():
        full = run_full(script, settings, tmp_path, monkeypatch)
        short = run_lecture(script, settings, tmp_path)
    assert short[0] == full[0]
    errors = {}
    for update, (a, b) in enumerate(zip(short[1], full[1], strict=True)):
        errors |= {(update, name): abs(a[name] - b[name]) / max(1, abs(b[name])) for name in a.keys() & b.keys()}
    for i, (a, b) in enumerate(zip(short[2], full[2], strict=True)):
        errors[i] = (a - b).abs().max().item()
    worst = max(errors, key=errors.get)
    print(f"{script} {world} {seed}: largest difference {errors[worst]:.1e}, {worst}")
    assert errors[worst] < 1e-8, (worst, errors[worst])
    assert len(full[1]) == 3


@pytest.mark.slow
def test_a_notebook_runs(tiny, tmp_path):
    """In a real Jupyter kernel, as tools/stepwise.py makes it, for three steps; its last cell prints."""
    nbclient = pytest.importorskip("nbclient", reason="pip install -r requirements-more.txt")
    notebook = load("tools/stepwise.py").make_notebook(ROOT / "lecture/ppo.py", [])
    [cell] = [cell for cell in notebook.cells if "args = Args()" in cell.source]
    cell.source = cell.source.replace("Args()", f"Args(**{tiny['ppo']}, output_dir={str(tmp_path / 'model')!r})")
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(ROOT / "lecture")}}).execute()
    assert [output for output in notebook.cells[-1].outputs if output.get("name") == "stdout"]
    assert list(tmp_path.rglob("*.safetensors"))
