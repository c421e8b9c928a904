"""Writes the model card of a run, README.md, with its curves, curves.png: for a model that goes to the hub.

    python tools/card.py runs/mine

In the curves, dots are training, and a line is held out. (tools/xray.py shows curves and samples in a browser.)
"""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pandas

ROOT = Path(__file__).resolve().parent.parent
# metrics that have a panel
CURVES = r"scores?$|^(eval/)?reward(_mean)?$|/mean$|loss$|accurac(y|ies)$|/(chosen|rejected)$"
CURVES += r"|objective/kl$|eos_share$|length$"


def draw(folder: Path) -> None:
    """Writes curves.png: a panel for each metric of CURVES, over the steps."""
    if not find_spec("matplotlib"):
        sys.exit("error: the curves need matplotlib: pip install -r requirements-more.txt")
    lines = pandas.read_json(folder / "metrics.jsonl", lines=True).astype(float)
    first = lines.loc[0].dropna().index
    has_step_0 = first.str.match("eval/|perf/").all()  # an evaluation before the first update
    lines.index += 0 if has_step_0 else 1
    curves = (
        lines.filter(regex=CURVES).dropna(axis=1, how="all").interpolate(limit_area="inside")
    )  # between evaluations
    pairs = [(name, f"eval/{name}") for name in curves if f"eval/{name}" in curves]  # in one panel
    styles = ["-" if name.startswith("eval/") else "." for name in curves]
    axes = curves.plot(subplots=pairs or True, layout=(-1, 3), figsize=(15, 8), style=styles, xlabel="step")
    axes.flat[0].figure.savefig(folder / "curves.png", bbox_inches="tight")


def write_card(folder: Path) -> None:
    """Writes README.md: the hub's keys of models and data that are on the hub, and what was trained on what."""
    settings = json.loads((folder / "args.json").read_text())
    card = "---\nlibrary_name: transformers\n"
    for key, name in {"base_model": "model", "datasets": "dataset"}.items():
        value = settings.get(name)
        if value and not Path(value).exists():
            card += f"{key}: [{value}]\n"
    card += f"---\nTrained from {settings.get('model') or 'scratch'} on {settings['dataset']}.\n"
    card += f"\nRevision: {settings['revision']}."
    card += " Settings: args.json. Metrics: metrics.jsonl.\n\n![curves](curves.png)\n"
    (folder / "README.md").write_text(card.replace(f"{ROOT}/", ""))


def main() -> None:
    """Writes the card of one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of a run")
    folder = parser.parse_args().folder
    draw(folder)
    write_card(folder)
    print(f"written: {folder}/README.md and {folder}/curves.png")


if __name__ == "__main__":
    main()
