"""The comparison with other quantisers judges all by the same samples."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from model_fixtures import small_convnet

from scripts import accuracy_peers
from scripts.accuracy_peers import Peer
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.ranges.measure import RangeOptions


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["accuracy_peers", *arguments])
    accuracy_peers.main()


def test_a_seed_is_a_row_and_a_peer_that_cannot_run_says_why(
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = small_convnet(tmp_path / "convnet.onnx", rng)
    peer = Peer("numpy", "numpy", "raise SystemExit('the model is too hard for it')")
    monkeypatch.setattr("scripts.accuracy_peers.PEERS", {"nncf": peer})
    _main(monkeypatch, str(path), "--peer", f"nncf={sys.executable}", "--seeds", "3", "4")
    heading, _, *rows = capsys.readouterr().out.splitlines()
    assert heading == "| model | seed | in float | Tandem | onnxruntime | nncf |"
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [row[:2] for row in cells] == [["convnet", "3"], ["convnet", "4"]]
    for row in cells:  # dB; 11 and more in 60 draws, 9.8 once; an unrelated output has about -3
        assert float(row[3]) > 3
        assert float(row[4]) > 3
        assert row[5] == "the model is too hard for it"


def test_peers_keep_the_nodes_that_tandem_keeps(
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A double of a peer keeps all in floating point, and says which nodes it was told to keep."""
    path = small_convnet(tmp_path / "convnet.onnx", rng)
    graph, _ = run_passes(import_model(path).model)
    nodes = sorted(str(node.name) for node in graph.graph)
    program = f"""
import pathlib, shutil, sys
pathlib.Path({str(tmp_path)!r}, "floats.json").write_text(sys.argv[4])
shutil.copy(sys.argv[1], sys.argv[3])
"""
    monkeypatch.setattr("scripts.accuracy_peers.PEERS", {"nncf": Peer("numpy", "numpy", program)})
    options = RangeOptions("minmax", keep_float=frozenset(nodes))
    monkeypatch.setattr("scripts.accuracy_peers.RangeOptions", lambda _: options)
    _main(monkeypatch, str(path), "--peer", f"nncf={sys.executable}", "--seeds", "3")
    assert json.loads((tmp_path / "floats.json").read_text()) == nodes
    *_, row = capsys.readouterr().out.splitlines()
    assert all(float(figure) > 100 for figure in row.strip("| ").split(" | ")[3:])


@pytest.mark.parametrize("python", [sys.executable, "no/such/python"])
def test_a_peer_that_is_not_installed_is_said_before_anything_is_measured(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer("some-peer==1.0", "no_such_peer", "")
    monkeypatch.setattr("scripts.accuracy_peers.PEERS", {"some": peer})
    words = "cannot import no_such_peer.*python -m venv some && some/bin/pip install some-peer==1.0"
    with pytest.raises(SystemExit, match=words):
        _main(monkeypatch, "ppocr-cls", "--peer", f"some={python}")
    with pytest.raises(SystemExit, match="--peer nncf is none of some"):
        _main(monkeypatch, "ppocr-cls", "--peer", f"nncf={python}")
