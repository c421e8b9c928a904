"""Runs one update of a file, and records what each line does to the tensors.

The file is not changed: Python calls a function before each line (`sys.settrace`), which compares the variables before
and after a line. The code above the loop runs without this; then one pass of the longest loop is recorded, and the run
ends. The loop is at the top level of a short file, and in the function `train` of a script. tools/trace.py draws the
record.
"""

import ast
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, is_dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType
from unittest import mock

import datasets
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
# names of tensors of tokens, and of masks
TOKENS = ("ids", "input_ids", "targets", "responses", "stream", "tokens", "prompts", "drawn")
MASKS = ("mask", "real", "attention_mask", "prompt_mask")
ROW_NUMBERS = ("rows", "i", "index")  # what the loops over mini-batches and micro-batches call their row numbers
FEW = {  # settings that make an update small enough to read; those that a file lacks are left out
    "batch_size": 4,
    "rloo_k": 2,
    "num_generations": 4,
    "micro_batch_size": 2,
    "response_length": 22,
    "sample_num_steps": 4,
    "sample_batch_size": 2,
    "sample_num_batches_per_epoch": 1,
    "train_batch_size": 2,
    "train_gradient_accumulation_steps": 1,
    "warmup_ratio": 0.0,
}
GROUPS = {  # for groups: two with different scores, one with a long answer, and a ratio that is not 1
    "batch_size": 8,
    "num_ppo_epochs": 2,
    "seed": 14,
}


class Seen(Exception):
    """One pass of the loop is recorded."""


@dataclass
class Value:
    """A tensor at one moment, and the meaning of its rows and columns."""

    x: Tensor
    rows: list[int] | None  # their numbers in the batch, inside the loop over mini-batches
    tokens: Tensor | None  # of its columns
    mask: Tensor | None  # false on padding


@dataclass
class Step:
    """A statement that ran. The steps of functions that it calls come after it."""

    line: int
    place: str  # the function, or "loop"
    parent: int | None  # the step that called the function
    read: dict[str, int | str] = field(default_factory=dict)  # name -> number of its value, or a text
    made: dict[str, int | str] = field(default_factory=dict)


@dataclass
class Call:
    """A function call in progress."""

    frame: object
    statement: ast.stmt | None = None  # the current one
    step: int | None = None  # the number of its step
    before: dict = field(default_factory=dict)  # the variables before it


def is_in(inner: ast.stmt | None, outer: ast.stmt) -> bool:
    """Whether a statement is part of the body of another."""
    return inner is not None and outer.lineno < inner.lineno <= outer.end_lineno


def tensors_in(name: str, x) -> dict[str, Tensor]:
    """The tensors in a variable, by the expression for each. A list of tensors is joined to one tensor."""
    if isinstance(x, Tensor):
        return {name: x.detach()}
    if isinstance(x, Mapping):
        return {f"{name}[{key!r}]": y.detach() for key, y in x.items() if isinstance(y, Tensor)}
    if isinstance(x, (list, tuple)) and x and all(isinstance(y, Tensor) for y in x):
        if isinstance(x, tuple):
            return {f"{name}[{i}]": y.detach() for i, y in enumerate(x)}
        parts = [y.detach() for y in x]
        if all(y.dim() == 2 and y.shape[1] == 1 for y in parts):
            return {name: torch.cat(parts, 1)}  # one column for each token so far
        return {name: torch.stack(parts)} if len({y.shape for y in parts}) == 1 else {}
    return {}


def identity(x) -> object:
    """A value that changes exactly when a variable is assigned again, or changed in place."""
    if isinstance(x, Tensor):
        return id(x), x._version
    if isinstance(x, Mapping):
        return tuple((key, identity(y)) for key, y in x.items() if isinstance(y, (Tensor, float)))
    if isinstance(x, (list, tuple)):
        return tuple(map(identity, x)) if len(x) <= 64 else id(x)
    return x if isinstance(x, (bool, int, float, str)) else None


def plain(x) -> str | None:
    """The text of a value that is not a tensor: of numbers, texts, and lists of them."""
    if isinstance(x, (list, tuple)) and x and all(isinstance(y, (int, float, str)) for y in x):
        return f"{list(x[:8])!r}"[:-1] + (", …]" if len(x) > 8 else "]")
    if isinstance(x, float):
        return f"{x:.4g}"
    if isinstance(x, dict) and x and all(isinstance(y, float) for y in x.values()):
        return ", ".join(f"{key} {y:.4g}" for key, y in x.items())
    return repr(x) if isinstance(x, (bool, int, str)) else None


def reads(statement: ast.stmt) -> list[str]:
    """The names that a statement reads; if it has a body, those in its head."""
    if isinstance(statement, ast.FunctionDef):
        return []
    head = statement
    if isinstance(statement, ast.For):
        head = statement.iter
    if isinstance(statement, (ast.If, ast.While)):
        head = statement.test
    names = [node for node in ast.walk(head) if isinstance(node, (ast.Name, ast.Attribute))]
    changed = getattr(statement, "target", None) if isinstance(statement, ast.AugAssign) else None
    return list(dict.fromkeys(ast.unparse(node) for node in names if isinstance(node.ctx, ast.Load) or node is changed))


def variables(frame) -> dict:
    """A function's variables by name; the tensors of a dataclass by names such as rollout.mask."""
    found = {}
    for name, x in frame.f_locals.items():
        if is_dataclass(x) and not isinstance(x, type):
            found |= {f"{name}.{key}": y for key, y in vars(x).items() if isinstance(y, Tensor)}
        found[name] = x
    return found


class Recorder:
    """The steps of one pass through the loop of a file."""

    def __init__(self, file: Path, words: list[str] = ()):
        self.file = file
        self.text = file.read_text("utf-8")
        self.tree = ast.parse(self.text)
        self.words = words
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.statements: dict[int, ast.stmt] = {}  # line -> the innermost statement on it
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt):
                last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
                first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
                for line in range(first, max(last, node.lineno) + 1):
                    self.statements[line] = node
        functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        self.place = functions.get("train", self.tree)  # what contains the loop
        loops = [node for node in self.place.body if isinstance(node, ast.For)]
        if not loops:
            sys.exit(f"error: {file} has no loop at its top level, nor in a function `train`")
        self.loop = max(loops, key=lambda node: node.end_lineno - node.lineno)
        self.mini_batches = [
            node
            for part in (self.loop, functions.get("update", ast.Module([])))
            for node in ast.walk(part)
            if isinstance(node, ast.For) and getattr(node.target, "id", "") in ROW_NUMBERS
        ]
        self.open: list[Call] = []  # the first has the loop, the last is the innermost
        self.numbers: dict[object, int] = {}  # identity of a tensor -> number of its value
        self.alive = []  # keeps tensors, since Python may give a deleted one's id to another
        has_toy = any(Path(folder, "toy").exists() for folder in file.parents[:2])
        folder = ROOT / "lecture" if self.place is self.tree else ROOT
        home = file if has_toy else folder / file.name  # a fork may be in any folder
        self.names: dict = {"__name__": "__main__", "__file__": str(home)}

    def run(self) -> "Recorder":
        """Runs the code above the loop, then records one pass of the loop."""
        fields = {
            node.target.id
            for top in self.tree.body
            if isinstance(top, ast.ClassDef) and top.name == "Args"
            for node in top.body
            if isinstance(node, ast.AnnAssign)
        }
        few = FEW | (GROUPS if "num_generations" in fields else {})
        settings = [(name, x) for name, x in few.items() if name in fields]
        self.words = [word for name, x in settings for word in (f"--{name.replace('_', '-')}", str(x))] + [*self.words]
        load = datasets.load_dataset

        def load_some(*args, **options):  # encoding all rows would take longer than the update
            data = load(*args, **options)
            return data.select(range(min(64, len(data))))

        script = ModuleType("traced")  # a script's dataclasses look up their types in a module
        sys.modules[script.__name__] = script
        is_short = self.place is self.tree
        script.__dict__.update(self.names if is_short else self.names | {"__name__": script.__name__})
        self.names = script.__dict__
        above = self.tree.body[: self.tree.body.index(self.loop)] if is_short else self.tree.body
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch("datasets.load_dataset", load_some),
            mock.patch.object(sys, "argv", [self.file.name, *self.words]),
            redirect_stdout(StringIO()),
        ):
            sys.argv += ["--output-dir", f"{folder}/model"] if "output_dir" in fields else []
            exec(compile(ast.Module(above, []), self.file, "exec"), self.names)
            if "read_rows" in self.names:
                script.read_rows = lambda *args, read=script.read_rows: read(*args)[:64]
            code = compile(ast.Module([self.loop], []), self.file, "exec")
            previous = sys.gettrace()
            sys.settrace(self.on_call)
            try:
                exec(code, self.names) if is_short else script.train(script.read_command_line())
            except Seen:
                pass
            finally:
                sys.settrace(previous)
                self.open.clear()
        for value in self.values:  # tensors from before the mask was computed have padding, too
            for mask in [self.names.get(name) for name in MASKS]:
                if value.mask is None and value.tokens is not None and isinstance(mask, Tensor):
                    if value.rows is None and value.x.shape[:2] == mask.shape:
                        value.mask = mask.bool()
        return self

    def end(self, line: int) -> int:
        """The last line of the statement that begins in a line; if it has a body, the last line of its head."""
        statement = self.statements[line]
        return line if hasattr(statement, "body") else statement.end_lineno

    def on_call(self, frame, event, arg):
        """Called when a function begins. If the function is in the file, its lines are recorded, too."""
        code = frame.f_code
        if code.co_filename != str(self.file):
            return None
        if not self.open:
            return self.on_line if code.co_name == getattr(self.place, "name", "<module>") else None
        if code.co_name[0] == "<" or code.co_qualname.startswith("Run."):  # Run keeps checkpoints and files
            return None
        self.open.append(Call(frame))
        self.begin(self.statements[code.co_firstlineno], {})  # records its arguments
        return self.on_line

    def on_line(self, frame, event, arg):
        """Called before a line runs, and when a function returns."""
        if not self.open:
            if event != "line" or self.statements.get(frame.f_lineno) is not self.loop:
                return self.on_line
            self.open.append(Call(frame))
        call = self.open[-1]
        if event == "line":
            statement = self.statements[frame.f_lineno]
            if statement is not call.statement:
                self.finish()
                if isinstance(statement, ast.With):  # it assigns nothing, and Python visits it twice
                    call.statement = None
                    return self.on_line
                if statement is self.loop and self.steps:
                    self.names = self.names | self.known(frame)
                    raise Seen
                self.begin(statement, self.look(frame))
        elif event == "return":
            self.finish()
            if len(self.open) > 1 and arg is not None:
                step = self.steps[call.step]
                for name, x in ({} if isinstance(arg, Mapping) else tensors_in("returned", arg)).items():
                    step.made[name] = self.number(name, x, identity(x))
            self.open.pop()
        return self.on_line

    def look(self, frame) -> dict:
        """The identities of a function's variables."""
        return {name: identity(x) for name, x in variables(frame).items() if name[0] != "_"}

    def begin(self, statement: ast.stmt, before: dict) -> None:
        """Records a statement that is about to run, and the tensors that it reads."""
        call = self.open[-1]
        name = call.frame.f_code.co_name
        parent = self.open[-2].step if len(self.open) > 1 else None
        step = Step(statement.lineno, "loop" if parent is None else name, parent)
        call.statement, call.step, call.before = statement, len(self.steps), before
        self.steps.append(step)
        own = variables(call.frame)
        for name in reads(statement):
            if name in own:
                step.read |= self.written(name, own[name])

    def finish(self) -> None:
        """Records what the last statement has made."""
        call = self.open[-1]
        if call.statement is None:
            return
        for name, x in variables(call.frame).items():
            if name[0] != "_" and call.before.get(name, ()) != identity(x):
                self.steps[call.step].made |= self.written(name, x, True)

    def written(self, name: str, x, plainly: bool = False) -> dict[str, int | str]:
        """Records a variable: the numbers of its tensors or, if it has none, its text."""
        found = tensors_in(name, x)
        if found:
            keys = [identity(x)] if len(found) == 1 else [(identity(x), key) for key in found]
            self.alive.append(x)
            return {key: self.number(key, y, k) for (key, y), k in zip(found.items(), keys)}
        text = plain(x) if plainly else None
        return {name: text} if text else {}

    def number(self, name: str, x: Tensor, key) -> int:
        """The number of a tensor's value; a new value is recorded."""
        if key not in self.numbers:
            self.alive.append(x)
            self.numbers[key] = len(self.values)
            rows, tokens, mask = self.around(x)
            if name in TOKENS and not x.is_floating_point():
                tokens = x.clone()
            self.values.append(Value(x.clone(), rows, tokens, mask))
        return self.numbers[key]

    def shuffled(self) -> Tensor | None:
        """The row numbers of the mini-batch or micro-batch, while the loop over them runs."""
        for call in reversed(self.open):
            for node in reversed(self.mini_batches):
                if is_in(call.statement, node):
                    numbers = call.frame.f_locals.get(node.target.id)
                    return numbers if isinstance(numbers, Tensor) and numbers.dim() == 1 else None

    def known(self, frame) -> dict:
        """A function's variables; the tensors of its dataclasses under their own names, those of the newest."""
        return {name.rpartition(".")[2]: x for name, x in variables(frame).items()}

    def around(self, x: Tensor) -> tuple:
        """Returns the row numbers of a new tensor, the tokens of its columns, and the mask of its real tokens."""
        numbers = self.shuffled()
        rows = numbers.tolist() if numbers is not None and x.dim() and len(x) == len(numbers) else None
        if x.dim() < 2 or x.shape[1] == 1:
            return rows, None, None
        B, C = x.shape[:2]
        found = {"tokens": {}, "mask": {}}  # for each width, from the innermost function
        for call in reversed(self.open):
            own = self.known(call.frame)
            parts = [own.get("prompts"), *tensors_in("responses", own.get("responses")).values()]
            if len(parts) == 2 and isinstance(parts[0], Tensor) and len(parts[0]) == len(parts[1]):
                parts.append(torch.cat(parts, 1))
            for kind, candidates in {
                "tokens": [*(own.get(name) for name in TOKENS), *parts],
                "mask": [own.get(name) for name in MASKS],
            }.items():
                for y in candidates:
                    if isinstance(y, Tensor) and y.dim() == 2 and not y.is_floating_point():
                        y = y[rows] if call is self.open[0] and rows and len(y) > max(rows) else y
                        if len(y) == B:
                            found[kind].setdefault(y.shape[1], y)
        # with one column less than tokens, a column belongs to the token after it
        both = [kinds[C] if C in kinds else kinds[C + 1][:, 1:] if C + 1 in kinds else None for kinds in found.values()]
        return rows, *(y if y is None else y.clone() for y in both)
