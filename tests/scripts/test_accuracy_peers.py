"""The comparison with other quantisers judges all by the same samples."""

import sys
from pathlib import Path

import numpy as np
import pytest
from model_fixtures import small_convnet

from scripts import accuracy_peers


def test_a_seed_is_a_row_and_a_peer_that_cannot_run_says_why(
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = small_convnet(tmp_path / "convnet.onnx", rng)
    peer = "raise SystemExit('the peer is not installed')"
    monkeypatch.setattr("scripts.accuracy_peers.PEERS", {"nncf": peer})
    arguments = [str(path), "--peer", f"nncf={sys.executable}", "--seeds", "3", "4"]
    monkeypatch.setattr("sys.argv", ["accuracy_peers", *arguments])
    accuracy_peers.main()
    heading, _, *rows = capsys.readouterr().out.splitlines()
    assert heading == "| model | seed | Tandem | onnxruntime | nncf |"
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [row[:2] for row in cells] == [["convnet", "3"], ["convnet", "4"]]
    for row in cells:
        assert float(row[2]) > 10
        assert float(row[3]) > 10
        assert row[4] == "the peer is not installed"
