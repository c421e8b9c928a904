"""One update, line by line: a web page with the code on the left, and each line's results on the right.

    python tools/trace.py lecture/ppo.py                     # writes runs/trace/ppo.html, for any browser
    python tools/trace.py lecture/ppo.py --batch-size 2      # with settings of the file
    python tools/trace.py fork.py --against lecture/ppo.py   # also prints the first line where a number differs
    python tools/trace.py my_ppo.py --against ppo.py         # the same for a script and its fork
    python tools/trace.py --docs                             # writes the pages in docs/trace/

The file runs unchanged (recorder.py), with few short rows. Methods of a script's class Run are left out. The page is
one file and needs no network. Its template is trace.html; its style and the functions that draw tokens are those of the
X-ray's viewer, xray.html.
"""

import argparse
import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import torch
from recorder import Recorder, Value
from torch import Tensor
from xray import QUANTITIES, as_json, rounded

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs/trace"
TEMPLATE = Path(__file__).resolve().parent / "trace.html"
PAGES = ["sft", "reward_model", "ppo", "rloo", "grpo", "agent", "dpo", "ddpo"]
ROWS, COLUMNS, LIKELIEST = 8, 64, 5  # the page shows so many of a tensor


def model_of(names: dict):
    """The model that a file trains."""
    return names.get("policy", names.get("model"))


def size_of(names: dict, name: str) -> int | None:
    """A size in the model's configuration; None for a model of images."""
    return getattr(getattr(model_of(names), "config", None), name, None)


def letters(value: Value, names: dict) -> list[str]:
    """The shape of a tensor in the letters of the short files; a size without a letter as a number."""
    P = names.get("P")
    T = next(
        (x.shape[1] for x in map(names.get, ("responses", "stream")) if isinstance(x, Tensor) and x.dim() == 2), None
    )
    columns = {P + T: "P+T", T: "T", P: "P"} if isinstance(P, int) and T else {}
    rest = {size_of(names, "vocab_size"): "V", size_of(names, "hidden_size"): "D"}
    B = "B" if value.rows is None else "b"
    of_axis = [{names.get("B"): B}, columns, rest]
    return [str(of_axis[min(axis, 2)].get(n) or rest.get(n) or n) for axis, n in enumerate(value.x.shape)]


def commented(line: str) -> list[list[str]]:
    """The shapes in the comment of a line of code: `x = f(y)  # (B, T), (B,) each` has [B, T] and [B]."""
    found = re.findall(r"\(([\w+*/-]+(?:, ?[\w+*/-]+)*),?\)", line.partition("  # ")[2])
    return [re.split(", ?", shape) for shape in found]


def numbers(x: Tensor) -> list:
    """A tensor as nested lists; floats are rounded, booleans become 0 and 1."""
    if x.dim() > 1:
        return [numbers(y) for y in x]
    return [rounded(y) if isinstance(y, float) else int(y) for y in x.tolist()]


def likeliest(x: Tensor) -> list:
    """The most likely tokens for each row and position of logits (B, S, V) or a distribution (B, V), as lists of
    [token, number]. In cumulative probabilities, they are where the numbers rise most.
    """
    x = x[:, None] if x.dim() == 2 else x
    x = x[:ROWS, :COLUMNS]
    rises = torch.diff(x, dim=-1, prepend=torch.zeros_like(x[..., :1]))
    size = rises if (rises >= 0).all() else x
    best = size.topk(min(LIKELIEST, x.shape[-1]), -1).indices
    return [
        [[[int(k), rounded(float(y))] for k, y in zip(*cell)] for cell in zip(*row)]
        for row in zip(best, x.gather(-1, best))
    ]


def entry(value: Value, names: dict, layouts: list) -> dict:
    """The page's data on a tensor: all numbers, images, the most likely tokens, or three numbers of many."""
    x = value.x
    found = {"shape": letters(value, names), "size": list(x.shape)}
    layout = {"rows": value.rows}
    for name, y in (("tokens", value.tokens), ("mask", value.mask)):
        if y is not None and x.dim() > 1 and y.shape == x.shape[:2]:
            layout[name] = y[:ROWS, :COLUMNS].int().tolist()
    if layout not in layouts:
        layouts.append(layout)
    found["layout"] = layouts.index(layout)
    if x.dim() > 1 and x.shape[-1] == size_of(names, "vocab_size"):
        return found | {"top": likeliest(x)}
    if x.dim() >= 4 and max(x.shape[-2:]) <= 16:  # images: rows of pictures
        pictures = x.flatten(1, -3)[:ROWS, :COLUMNS]
        return found | {"pictures": [[numbers(y.double().round(decimals=2)) for y in row] for row in pictures]}
    if x.dim() > 2 or (x.dim() == 2 and value.tokens is None and x.shape[1] > COLUMNS):
        return found | {"summary": [rounded(float(f(x.double()))) for f in (torch.min, torch.mean, torch.max)]}
    if x.dim() == 0:
        x = x.reshape(1)
    x = x[:, None] if x.dim() == 1 else x
    is_token = value.tokens is not None and torch.equal(value.tokens, value.x)
    return found | {"x": numbers(x[:ROWS, :COLUMNS]), "kind": "token" if is_token else str(x.dtype)[6:]}


def places(recorder: Recorder) -> dict:
    """For each function and name: the lines that assign it, and the lines that read it, among those that ran."""
    found: dict = {}
    for step in recorder.steps:
        names = found.setdefault(step.place, {})
        for kind, those in (("made", step.made), ("read", step.read)):
            for name in those:
                names.setdefault(name.partition("[")[0], {"made": [], "read": []})[kind].append(step.line)
    return {
        place: {name: {kind: sorted(set(lines)) for kind, lines in both.items()} for name, both in names.items()}
        for place, names in found.items()
    }


def read_record(recorder: Recorder, title: str, command: str) -> dict:
    """All data of the page."""
    layouts: list = []
    values = [entry(value, recorder.names, layouts) for value in recorder.values]
    source = recorder.text.splitlines()
    for step in recorder.steps:  # the letters in the file's comments take precedence
        for x in step.made.values():
            for shape in commented(source[recorder.end(step.line) - 1]):
                if isinstance(x, int) and len(shape) == len(values[x]["size"]):
                    values[x]["shape"] = shape
                    break
    tokenizer = recorder.names.get("tokenizer") or getattr(model_of(recorder.names), "tokenizer", None)
    ids = {k for layout in layouts for row in layout.get("tokens", []) for k in row}
    ids |= {k for value in values for row in value.get("top", []) for cell in row for k, _ in cell}
    ids |= {k for value in values if value.get("kind") == "token" for row in value["x"] for k in row}
    names = {name.partition("[")[0] for step in recorder.steps for name in step.made}
    return {
        "title": title,
        "command": command,
        "settings": " ".join(recorder.words),
        "source": source,
        "ends": {line: recorder.end(line) for line in {step.line for step in recorder.steps}},
        "steps": [[step.line, step.place, step.parent, step.read, step.made] for step in recorder.steps],
        "values": values,
        "layouts": layouts,
        "tokens": {k: tokenizer.decode([k]) for k in sorted(ids)} if tokenizer else {},
        "places": places(recorder),
        "texts": {name: text for name, (_, _, text) in QUANTITIES.items() if name in names},
    }


@dataclass
class Difference:
    """The first step of a fork at which a number differs."""

    step: int
    name: str
    ours: int | str  # number of a value, or a text
    theirs: int | str


def differing(x: Tensor, y: Tensor) -> str:
    """Describes the first number in which two tensors differ by more than rounding; empty if there is none."""
    if x.shape != y.shape:
        return f" has the shape {tuple(x.shape)}, and had {tuple(y.shape)}"
    x, y = x.double(), y.double()
    places = (~torch.isclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True)).nonzero().tolist()
    if not places:
        return ""
    place = tuple(places[0])
    return f"{list(place) if place else ''} is {x[place]:.4g}, and was {y[place]:.4g}"


def first_difference(fork: Recorder, original: Recorder) -> Difference | None:
    """Walks through both records side by side. Lines that only one file has are skipped, unless they change a name that
    both files have."""
    lines = [recorder.text.splitlines() for recorder in (fork, original)]
    same: dict[int, int] = {}  # line of the fork -> line of the original
    rewritten = set()
    for kind, a, b, c, d in SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        if kind == "equal" or (kind == "replace" and b - a == d - c):
            same |= dict(zip(range(a + 1, b + 1), range(c + 1, d + 1)))
            rewritten |= set(range(a + 1, b + 1)) if kind == "replace" else set()
    targets = set(same.values())

    def below(recorder: Recorder) -> dict[int | None, list[int]]:
        found: dict = {}
        for number, step in enumerate(recorder.steps):
            found.setdefault(step.parent, []).append(number)
        return found

    children = below(fork), below(original)

    def differs(x: int | str, y: int | str) -> bool:
        if isinstance(x, str) or isinstance(y, str):
            return x != y
        return differing(fork.values[x].x, original.values[y].x) != ""

    def walk(ours: list[int], theirs: list[int]) -> Difference | None:
        last: dict[str, int | str] = {}  # values of the original's names
        ours, theirs = list(ours), list(theirs)
        while ours:
            i = ours[0]
            step = fork.steps[i]
            if step.line not in same or not theirs:
                changed = {
                    name: last[name] for name in step.made if name in last and differs(step.made[name], last[name])
                }
                if changed:
                    name = next(iter(changed))
                    return Difference(i, name, step.made[name], changed[name])
                ours.pop(0)
                continue
            other = original.steps[theirs[0]]
            if other.line not in targets:
                last |= other.made
                theirs.pop(0)
                continue
            if other.line != same[step.line]:
                return Difference(i, "the next line", f"{step.line}", f"{other.line}")
            j = theirs.pop(0)
            ours.pop(0)
            span = range(step.line, fork.end(step.line) + 1)
            if rewritten.isdisjoint(span) and (inner := walk(children[0].get(i, []), children[1].get(j, []))):
                return inner
            for name, x in step.made.items():
                if name in other.made and differs(x, other.made[name]):
                    return Difference(i, name, x, other.made[name])
            last |= other.made
        return None

    return walk(children[0][None], children[1][None])


def shared(viewer: str) -> list[str]:
    """The parts of the X-ray's viewer that this page uses: its style, and the functions that draw a token."""
    return re.findall(r"/\* shared: .*? \*/\n(.*?)/\* to here \*/", viewer, re.S)


def make_page(data: dict) -> str:
    """Fills style, functions and data into the template."""
    style, functions = shared(TEMPLATE.with_name("xray.html").read_text("utf-8"))
    page = TEMPLATE.read_text("utf-8")
    for place, text in (("/* style */", style), ("/* functions */", functions), ("/* data */", as_json(data))):
        page = page.replace(place, text)
    return page


def compare(fork: Recorder, original: Recorder, data: dict) -> str:
    """Adds the first difference to the page's data; returns a description."""
    found = first_difference(fork, original)
    if found is None:
        return "All numbers of this update are those of the original."
    step = fork.steps[found.step]
    code = fork.text.splitlines()[step.line - 1].strip()
    data["difference"] = {"step": found.step, "name": found.name, "original": original.file.name}
    if isinstance(found.ours, str) or isinstance(found.theirs, str):
        text = f" is {found.ours}, and was {found.theirs}"
        data["difference"]["text"] = f"{found.theirs}"
    else:
        text = differing(fork.values[found.ours].x, original.values[found.theirs].x)
        data["difference"]["value"] = len(data["values"])
        data["values"].append(entry(original.values[found.theirs], original.names, data["layouts"]))
    return f"{fork.file.name}:{step.line}, in {step.place}: {code}\n  {found.name}{text}"


def main() -> None:
    """Reads the command line and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Other settings are the file's own.")
    parser.add_argument("file", type=Path, nargs="?", help="a file of lecture/, a script, or a fork of one")
    parser.add_argument("--against", type=Path, help="another such file: print the first line with another number")
    parser.add_argument("--output", type=Path, help="the page to write; by default runs/trace/NAME.html")
    parser.add_argument("--docs", action="store_true", help="write the pages of docs/trace/")
    args, words = parser.parse_known_args()
    torch.set_num_threads(1)  # so that equal machines give equal numbers
    if args.docs:
        for page in PAGES:
            name = f"lecture/{page}.py"
            data = read_record(Recorder(ROOT / name).run(), name, f"python tools/trace.py {name}")
            (DOCS / f"{page}.html").write_text(make_page(data | {"pages": PAGES}), "utf-8")
        return
    if args.file is None:
        parser.error("name a file, such as lecture/ppo.py")
    recorder = Recorder(args.file.resolve(), words).run()
    command = " ".join(["python tools/trace.py", str(args.file), *words])
    data = read_record(recorder, str(args.file), command)
    if args.against:
        print(compare(recorder, Recorder(args.against.resolve(), words).run(), data))
    output = args.output or ROOT / f"runs/trace/{args.file.stem}.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(make_page(data), "utf-8")
    print(f"saved as {output}: open it in a browser")


if __name__ == "__main__":
    main()
