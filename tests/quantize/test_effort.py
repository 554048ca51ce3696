"""How often a search runs a model: less where one run takes long."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from model_fixtures import save
from onnx import helper

from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.ranges.split import MAX_VALIDATION, MIN_SAMPLES
from toolkit.quantize.trials import effort
from toolkit.quantize.trials.effort import affordable_runs, affordable_samples
from toolkit.quantize.trials.keep import MAX_RUNS

MACS = 16 * 16 * 8 * 3  # of the model


@pytest.fixture
def model(tmp_path: Path) -> ir.Model:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "conv")]
    weights = {"w": np.ones((8, 3, 1, 1), np.float32)}
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 16, 16]}, {"y": [1, 8, 16, 16]}, weights)
    return run_passes(import_model(path).model)[0]


@pytest.mark.parametrize(
    ("work", "runs", "samples"),
    [
        (MACS * 1e6, MAX_RUNS, MAX_VALIDATION),
        (MACS * 800, 800, MAX_VALIDATION),
        (MACS * 799, 799, MAX_VALIDATION),
        (MACS * 199, 199, 7),
        (MACS * 100, 100, 4),
        (MACS * 75, 75, 3),
        (MACS * 74, 74, 3),
        (1.0, 1, 3),
    ],
)
def test_a_model_that_computes_more_is_run_less(
    work: float, runs: int, samples: int, model: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effort, "MAX_WORK", work)
    assert affordable_runs(model, MAX_RUNS) == runs
    assert affordable_samples(model, MAX_VALIDATION, MIN_SAMPLES // 2) == samples


def test_a_model_of_unknown_work_has_the_largest_search(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": [4]}, {"y": [4]}, {}
    )
    model = import_model(path).model
    assert affordable_runs(model, MAX_RUNS) == MAX_RUNS
    assert affordable_samples(model, MAX_VALIDATION, 3) == MAX_VALIDATION
