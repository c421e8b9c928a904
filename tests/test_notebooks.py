"""lecture/*.py as notebooks, in a real Jupyter kernel: there is no command line, and no __file__."""

import signal
import sys

import nbclient
import pytest
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
    assert [output for output in notebook.cells[-1].outputs if output.get("name") == "stdout"]
    assert list(tmp_path.rglob("*.safetensors"))
