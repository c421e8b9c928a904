"""lecture/*.py as notebooks, in a real Jupyter kernel: there is no command line, and no __file__."""

import re
import signal
import sys

import nbclient
import pytest
from runs import short_form
from sources import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from stepwise import make_notebook  # noqa: E402

FILES = [path for path in sorted((ROOT / "lecture").glob("*.py")) if path.stem not in ("fork", "before")]
AGENT = dict(batch_size=8, total_episodes=24, num_generations=4)


@pytest.fixture
def same_signals():
    """nbclient leaves Python's own handler of Ctrl-C, which what runs in the background of a shell does not have."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_runs(file, tiny, tmp_path, same_signals):
    """As tools/stepwise.py makes it, in the folder of the file, for three steps; its last cell prints."""
    settings = AGENT if file.stem == "agent" else {k: v for k, v in tiny[file.stem].items() if k != "num_eval_prompts"}
    notebook = make_notebook(file, [])
    [cell] = [cell for cell in notebook.cells if "args = Args()" in cell.source]
    cell.source = cell.source.replace("Args()", f"Args(**{settings}, output_dir={str(tmp_path / 'model')!r})")
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(file.parent)}}).execute()
    assert len(notebook.cells) >= 6
    assert [output for output in notebook.cells[-1].outputs if output.get("name") == "stdout"]
    assert list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["ppo", "ddpo"])
def test_a_notebook_can_stop_between_the_steps(name, tiny, tmp_path):
    """The first update in a cell for each step, the rest in the loop: the metrics are those of the file."""
    file = ROOT / f"lecture/{name}.py"
    settings = {k: v for k, v in tiny[name].items() if k != "num_eval_prompts"}
    histories = []
    for text in (file.read_text("utf-8"), "\n".join(cell.source for cell in make_notebook(file, []).cells)):
        with short_form(name, **settings, output_dir=tmp_path / str(len(histories))) as names:
            exec(compile(text, file, "exec"), names)
        histories.append(names["history"])
    assert histories[0] == histories[1] and len(histories[0]) > 1
    steps = [cell.source for cell in make_notebook(file, []).cells if re.match(r"# \d\. ", cell.source)]
    assert len(steps) == len(re.findall(r"^    # \d\. ", file.read_text("utf-8"), re.M)) > 1
