"""Makes a notebook of a short file, in which you can stop between the steps of an update.

    python tools/stepwise.py lecture/ppo.py      # writes lecture/ppo.ipynb, for Jupyter, VS Code or Colab
    python tools/stepwise.py lecture/ppo.py --batch-size 4 --output-dir runs/mine    # with settings

The cells are those of the file. Before the loop, the first update has one cell for each step (1. Sample, 2. Score,
...), so you can look at any tensor in between. The loop does the other updates. The file is not changed.
"""

import argparse
import ast
import re
import textwrap
from pathlib import Path

import jupytext
from nbformat.v4 import new_code_cell


def steps_of(source: str) -> list[str]:
    """The cells of the first update: the body of a cell's loop, split at the comments that number the steps."""
    loop = next(node for node in ast.parse(source).body if isinstance(node, ast.For))
    lines = source.splitlines()
    body = textwrap.dedent("\n".join(lines[loop.lineno : loop.end_lineno]))
    counter = loop.target.id
    first = f"{counter} = 1  # the first update, step by step; the loop below does the others\nbar = trange(0)\n"
    cells = [cell.strip("\n") for cell in re.split(r"^(?=# \d\. )", body, flags=re.M)]
    return ["\n".join(lines[: loop.lineno - 1]) + f"\n{first}{cells[0]}", *cells[1:]]


def rest_of(source: str) -> str:
    """The loop of a cell, from the second pass on."""
    loop = next(node for node in ast.parse(source).body if isinstance(node, ast.For))
    head, *body = source.splitlines()[loop.lineno - 1 :]
    return "\n".join([head.replace("trange(1, ", "trange(2, "), *body])


def make_notebook(file: Path, settings: list[str]):
    """Makes the notebook of a file, with settings as on a command line."""
    notebook = jupytext.read(file)
    cells = []
    for cell in notebook.cells:
        if "args = Args()" in cell.source and settings:
            cell.source = cell.source.replace("args = Args()", f"args = tyro.cli(Args, args={settings})", 1)
        if cell.source.startswith("wandb.init("):
            cells += [new_code_cell(source) for source in [*steps_of(cell.source), rest_of(cell.source)]]
        else:
            cells.append(cell)
    notebook.cells = cells
    return notebook


def main() -> None:
    """Reads the command line and writes the notebook."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Other settings are the file's own.")
    parser.add_argument("file", type=Path, help="a file of lecture/, or a fork of one")
    parser.add_argument("--output", type=Path, help="by default beside the file, where it finds toy/")
    args, settings = parser.parse_known_args()
    output = args.output or args.file.with_suffix(".ipynb")
    jupytext.write(make_notebook(args.file, settings), output)
    print(f"saved as {output}")


if __name__ == "__main__":
    main()
