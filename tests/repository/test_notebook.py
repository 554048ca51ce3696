"""The notebooks of examples/: they run from first to last cell, and are stored without outputs."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a notebook in a folder; return what it prints."""
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", path)
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}})
    client.execute()
    texts = ["".join(o.get("text", "") for o in c.get("outputs", [])) for c in notebook.cells]
    return "\n".join(texts)


@pytest.mark.slow
def test_it_compares_gpu_and_dla_and_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run("gpu_or_dla.ipynb", tmp_path, monkeypatch)
    assert all(words in text for words in ("this plan", "GPU only", "DLA with fallback"))
    assert "INT8, as the DLA" in text


def test_results_become_tables_pictures_and_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = run("results.ipynb", tmp_path, monkeypatch)
    assert "12 frames" in text
    assert "/image/compressed 12" in text
    assert "predicted_us cpu" in text
    assert (tmp_path / "seen.jpg").stat().st_size > 1000
