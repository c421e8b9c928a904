"""lecture/*.py as notebooks, in a real Jupyter kernel: there is no command line, and no __file__."""

import sys

import nbclient
import pytest
from sources import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from stepwise import make_notebook  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "ddpo"])
def test_a_notebook_runs(name, tiny, tmp_path):
    """As tools/stepwise.py makes it, in the folder of the file, for three steps; its last cell prints."""
    notebook = make_notebook(ROOT / f"lecture/{name}.py", [])
    [cell] = [cell for cell in notebook.cells if "args = Args()" in cell.source]
    cell.source = cell.source.replace("Args()", f"Args(**{tiny[name]}, output_dir={str(tmp_path / 'model')!r})")
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(ROOT / "lecture")}}).execute()
    assert [output for output in notebook.cells[-1].outputs if output.get("name") == "stdout"]
    assert list(tmp_path.rglob("*.safetensors"))
