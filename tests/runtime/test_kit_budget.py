"""The run of a kit on the double with build times of real boards."""

import json
from pathlib import Path

import cuda_double
import numpy as np
import pytest
from model_fixtures import small_convnet

from device.selftest.report import read_report
from scripts import kit_budget
from toolkit.board_kit.make import KitRequest, NetworkModel, make_kit
from toolkit.importers.onnx import ModelBytes


def test_a_plan_takes_the_time_that_it_is_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = small_convnet(tmp_path / "m.onnx", np.random.default_rng(5))
    network = NetworkModel("m", ModelBytes("m.onnx", path.read_bytes()), "ab" * 32)
    request = KitRequest("orin-nx-16gb", networks=[network], demo=False)
    with cuda_double.interpreted_cubins():
        make_kit(tmp_path / "kit", request, lambda _: None)
    listed = json.loads((tmp_path / "kit/kit.json").read_text())
    networks = [row for row in listed["networks"] if row["variant"] == "dla"]
    listed |= {name: [] for name, rows in listed.items() if isinstance(rows, list)}
    listed["networks"] = networks
    (tmp_path / "kit/kit.json").write_text(json.dumps(listed))
    out = tmp_path / "r.tandem-report"
    words = ["--kit", str(tmp_path / "kit"), "--out", str(out), "--times", "1.5", "0", "9"]
    assert kit_budget.main(words) == 0
    (network_row,) = read_report(out).report.networks
    finished = [s.finished_s for s in network_row.segments if s.processor.startswith("dla")]
    assert finished
    assert all(seconds >= 1.5 for seconds in finished)
    assert "networks: 1 of 1 in" in capfd.readouterr().out
