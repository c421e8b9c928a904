"""X-ray of a run that samples texts: one web page in which every sampled token is coloured by its numbers.

    python tools/xray.py                 # writes xray.html, for any browser, into the newest run's folder in runs/
    python tools/xray.py runs/my-run     # into this folder
    python tools/xray.py --docs          # runs each of SCRIPTS as it is, for docs/xray/index.html

For each table that a run prints, it saves the tensors in samples/: `prompts` and `prompt_mask` (B, P), and `responses`
and `mask` (B, T). Each other tensor (B, T) becomes a colour, and each (B,) a number beside the text. Tokens that the
environment wrote, where `written` (B, T) is false, stay grey and have no numbers (agent.py).
The curves are from metrics.jsonl. A page is the viewer, xray.html, with the data in it. Data are shown as text, so a
model cannot insert HTML.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs/xray/index.html"
VIEWER = Path(__file__).resolve().with_name("xray.html")
PLACE = "<!-- data -->\n"  # where the viewer takes it
SCRIPTS = ("ppo", "rloo", "grpo")
# tensor -> its name on the page, whether it has both signs (else it is 0 or less), and its description
QUANTITIES = {
    "advantages": (
        "advantage",
        True,
        "How much better this token turned out than expected. Training makes orange tokens less likely and blue "
        "tokens more likely. (Where advantages are whitened, as in ppo.py by default, 0 is "
        "the mean of the whole batch.)",
    ),
    "log_ratio": (
        "log(policy/reference)",
        True,
        "How much likelier the policy has made this token than the reference, in nats; blue if likelier. "
        "For DPO, the sum over a response, times beta, is the reward for which the policy is the best one.",
    ),
    "rewards": (
        "reward",
        True,
        "The reward of the token: its KL times −kl_coef and, for the last one, the score. In a conversation with an "
        "environment, the reward of a turn, on its last token.",
    ),
    "kl": (
        "KL",
        True,
        "How far the policy moved from the reference at this token, in nats. The default estimate is the difference of "
        "the two log-probabilities, so it is negative where the token has become less likely.",
    ),
    "values": ("value", True, "The critic's prediction of the future rewards, made before this token."),
    "returns": ("return", True, "What the critic should have predicted: its value plus the advantage, unwhitened."),
    "old_logprobs": (
        "logprob",
        False,
        "The log-probability of this token for the policy that drew it: 0 is certain, −2.3 one chance in ten, −4.6 one "
        "in a hundred. The more violet, the more surprising.",
    ),
    "logprobs": (
        "logprob",
        False,
        "The log-probability of this token for the policy, at temperature 1: 0 is certain, −2.3 one chance in ten, "
        "−4.6 one in a hundred. The more violet, the more surprising.",
    ),
    "ref_logprobs": (
        "reference logprob",
        False,
        "The same for the reference, a frozen copy of the initial policy. Where it is far lower than the policy's, the "
        "policy has learned to write this token.",
    ),
}
# title of a chart -> pattern of the metrics in it
CURVES = {
    "score": r"(eval/)?(objective/scores|reward|rewards/.*/mean)",
    "KL to the reference": r"(eval/)?(objective/)?kl",
    "length in tokens": r"(eval/)?(val/response_length|completions/mean_length)",
    "loss on the test split": r"eval/loss",
    "accuracy on the test split": r"eval/(rewards/accuracies|mean_token_accuracy)",
}


def rounded(x: float | None) -> float | None:
    """Rounds to 4 significant digits, which halves the page; None if x is missing or not finite."""
    if x is None or not math.isfinite(x):
        return None
    return float(f"{x:.4g}")


def load_tokenizer(run: Path) -> AutoTokenizer:
    """The run's tokenizer. A run saves it at its end; until then it is that of the initial model."""
    if (run / "tokenizer_config.json").exists():
        return AutoTokenizer.from_pretrained(run)
    args = json.loads((run / "args.json").read_text())
    name = args["model"] or args["from_scratch"]
    is_ours = (ROOT / name).exists() and not Path(name).exists()
    return AutoTokenizer.from_pretrained(ROOT / name if is_ours else name)


def read_samples(file: Path, tokenizer: AutoTokenizer) -> list[dict]:
    """The page's data on the responses in one file of tensors."""
    tensors = load_file(file)
    if "responses" not in tensors:
        sys.exit(f"error: {file} has no responses: X-rays are for runs of {', '.join(SCRIPTS)}")
    if "logprobs" in tensors and "ref_logprobs" in tensors:
        tensors["log_ratio"] = tensors["logprobs"] - tensors["ref_logprobs"]
    responses, mask, prompts, prompt_mask = map(tensors.pop, ("responses", "mask", "prompts", "prompt_mask"))
    written = tensors.pop("written", mask)
    B, T = responses.shape
    colours = {}
    numbers = {}
    for name, x in tensors.items():
        if not x.is_floating_point():
            continue
        if x.shape in ((B, T), (B, 1)):  # (B, 1): all tokens of a response have the same number
            colours[name] = x.expand(B, T)
        elif x.shape == (B,):
            numbers[name] = x
    names = sorted(numbers, key=lambda name: name != "scores")  # the score comes first

    def of_tokens(x: Tensor, i: int) -> list[float | None]:
        return [rounded(number) if own else None for number, own in zip(x[i][mask[i]].tolist(), written[i][mask[i]])]

    return [
        {
            "update": int(file.stem.split("-")[1]),
            "prompt": tokenizer.decode(prompts[i][prompt_mask[i]]),
            "tokens": [tokenizer.decode(token) for token in responses[i][mask[i]]],
            "told": (~written[i][mask[i]]).nonzero().flatten().tolist(),  # the environment's tokens
            "scores": {name: rounded(numbers[name][i].item()) for name in names},
            "columns": {name: of_tokens(x, i) for name, x in colours.items()},
        }
        for i in range(B)
    ]


def read_curves(metrics: list[dict]) -> list[dict]:
    """The charts that have data. Equal lines, such as a score and its only reward, are drawn once."""
    curves = []
    for title, pattern in CURVES.items():
        lines = {}
        for name in dict.fromkeys(name for row in metrics for name in row):
            points = [rounded(row.get(name)) for row in metrics]
            if re.fullmatch(pattern, name) and any(points) and points not in lines.values():
                lines[name] = points
        if lines:
            curves.append({"title": title, "lines": lines})
    return curves


def describe(name: str, samples: list[dict]) -> dict:
    """A colour's name, kind and description. Unknown tensors are shown, too, since a rollout may have new fields."""
    found = [x for sample in samples for x in sample["columns"].get(name, []) if x is not None]
    unknown = (name.replace("_", " "), any(x > 0 for x in found), f"The tensor {name} of the run's samples.")
    label, signed, text = QUANTITIES.get(name, unknown)
    return {"name": name, "label": label, "signed": signed, "text": text}


def read_run(run: Path) -> dict:
    """All data of the page on a run."""
    files = sorted((run / "samples").glob("step-*.safetensors"))
    if not files:
        sys.exit(f"error: {run / 'samples'} has no files: the run has printed no table yet, or {run} is not a run")
    tokenizer = load_tokenizer(run)
    samples = [sample for file in files for sample in read_samples(file, tokenizer)]
    names = {name for sample in samples for name in sample["columns"]}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "run": run.resolve().name,
        "is_trained_by_reward": not names.isdisjoint(("advantages", "log_ratio")),
        "samples": samples,
        "quantities": [
            describe(name, samples) for name in [*QUANTITIES, *sorted(names - set(QUANTITIES))] if name in names
        ],
        "curves": read_curves(metrics),
        "last": max(len(metrics), samples[-1]["update"]),
    }


def newest_run() -> Path:
    """The folder in runs/ with the newest table of samples."""
    files = sorted(Path("runs").glob("**/samples/step-*.safetensors"), key=lambda file: file.stat().st_mtime)
    if not files:
        sys.exit("error: no run in runs/ has printed a table: name the folder of a run")
    return files[-1].parent.parent


def as_json(data: dict) -> str:
    """Data as JSON for a page's script; < is escaped, since it could end the script."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def as_script(name: str, data: dict) -> str:
    """Data in the form that the viewer reads."""
    return f"<script>runs.set({json.dumps(name)}, {as_json(data)})</script>\n"


def fill_in(scripts: str) -> str:
    """The viewer with data."""
    return VIEWER.read_text("utf-8").replace(PLACE, scripts)


def make_page(run: Path) -> str:
    """The page of a run."""
    return fill_in(as_script("run", read_run(run)))


def make_docs() -> None:
    """Writes docs/xray/index.html, from a default run of each script, with fewer tables to keep the page small."""
    scripts = []
    for script in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, script)
            flags = ["--num-sample-generations", "4", "--output-dir", run]
            subprocess.run([sys.executable, ROOT / f"{script}.py", *flags], check=True, cwd=ROOT)
            scripts.append(as_script(script, read_run(run) | {"run": f"python {script}.py"}))
    DOCS.write_text(fill_in("".join(scripts)), "utf-8")


def main() -> None:
    """Reads the command line and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="the folder of a run; by default the newest in runs/")
    parser.add_argument("--output", type=Path, help="the page to write; by default xray.html in that folder")
    parser.add_argument("--docs", action="store_true", help="run the scripts, and write docs/xray/index.html")
    args = parser.parse_args()
    if args.docs:
        return make_docs()
    run = args.run or newest_run()
    output = args.output or run / "xray.html"
    output.write_text(make_page(run), "utf-8")
    print(f"saved as {output}")


if __name__ == "__main__":
    main()
