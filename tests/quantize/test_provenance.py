"""What an engine says of its making: hashes, licence, and what was measured, never invented."""

import hashlib
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from model_fixtures import small_convnet
from msgspec import UNSET

from calibration.budget import BudgetResult
from calibration.table import read_table
from device.engine.file import encode_manifest, open_engine
from device.update.bundle import BundleFacts
from toolkit.build import BuildOptions, build_engine
from toolkit.cli.manifest_text import manifest_text
from toolkit.engine.provenance import NAMES, loss_measurements, score_measurements
from toolkit.fleet.bundles.facts import with_provenance
from toolkit.quantize.loss.judge import Judgement
from toolkit.quantize.loss.metrics import (
    AGREEMENT,
    DETECTION_DROP,
    METRICS,
    SQNR,
    Metric,
    OutputLoss,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = small_convnet(tmp_path_factory.mktemp("model") / "m.onnx", np.random.default_rng(1))
    proto = onnx.load(path)
    onnx.helper.set_model_props(proto, {"License": "Apache-2.0"})
    onnx.save(proto, path)
    return path


def samples(count: int = 6) -> list[dict[str, np.ndarray]]:
    chance = np.random.default_rng(2)
    return [{"x": chance.random((1, 3, 32, 32), np.float32)} for _ in range(count)]


def test_a_calibrated_engine_says_what_the_build_has_measured(model: Path, tmp_path: Path) -> None:
    table = tmp_path / "t.json"
    options = BuildOptions(
        precision="int8", data=samples(), save_table=table, accept_loss=True, kernels=False
    )
    result = build_engine(model, "laptop", tmp_path / "m.engine", options)
    with open_engine(result.path) as engine:
        assert engine.manifest == result.manifest
    source = result.manifest.provenance
    assert source.calibration is not None
    assert source.calibration.table_sha256 == hashlib.sha256(table.read_bytes()).hexdigest()
    assert source.licence == "Apache-2.0"
    assert result.loss is not None
    measured = {row.name: row.value for row in source.measured or ()}
    worst = {
        name: [loss.value for loss in result.loss.losses if loss.metric.name == title]
        for title, name in NAMES.items()
    }
    expected = {name: values for name, values in worst.items() if values}
    assert measured.keys() == expected.keys() >= {"sqnr_db"}
    assert measured["sqnr_db"] == pytest.approx(min(expected["sqnr_db"]), rel=1e-5)
    text = manifest_text(result.manifest)
    assert "licence of the model: Apache-2.0" in text
    assert "measured sqnr_db" in text
    again = build_engine(model, "laptop", tmp_path / "again.engine", options)
    assert again.path.read_bytes() == result.path.read_bytes()
    # The same ranges from the file: nothing is measured, so nothing is said.
    given = BuildOptions(precision="int8", table=read_table(table), accept_loss=True, kernels=False)
    second = build_engine(model, "laptop", tmp_path / "second.engine", given).manifest.provenance
    assert second.measured is UNSET
    assert second.calibration is not None
    assert second.calibration.table_sha256 == source.calibration.table_sha256


@pytest.mark.parametrize("dummy", [False, True])
def test_what_was_not_measured_is_absent(model: Path, tmp_path: Path, dummy: bool) -> None:
    options = BuildOptions(precision="int8" if dummy else "fp32", dummy_ranges=dummy, kernels=False)
    manifest = build_engine(model, "laptop", tmp_path / "m.engine", options).manifest
    assert manifest.provenance.measured is UNSET
    text = encode_manifest(manifest)
    assert "measured" not in json.loads(text)["provenance"]
    assert "table_sha256" not in text


def test_licences_of_several_models_all_hold(model: Path, tmp_path: Path) -> None:
    engine = build_engine(
        model, "laptop", tmp_path / "m.engine", BuildOptions(precision="fp32", kernels=False)
    )

    def under(*licences: str) -> str:
        manifests = {}
        for number, licence in enumerate(licences):
            source = msgspec.structs.replace(engine.manifest.provenance, licence=licence or UNSET)
            manifests[f"m{number}"] = msgspec.structs.replace(engine.manifest, provenance=source)
        return with_provenance(BundleFacts(), manifests).licence

    assert under("MIT OR Apache-2.0", "BSD-3-Clause") == "(MIT OR Apache-2.0) AND BSD-3-Clause"
    assert under("MIT OR Apache-2.0", "MIT OR Apache-2.0") == "MIT OR Apache-2.0"
    assert under("MIT", "", "MIT") == ""  # that of the second is not known
    assert (under("MIT", "GPL-2.0-only"), under("", "")) == ("MIT AND GPL-2.0-only", "")


def loss(metric: Metric, value: float, part: str = "y") -> OutputLoss:
    return OutputLoss(part, metric, value, 1)


def test_the_worst_output_counts_and_a_figure_without_a_number_is_left_out() -> None:
    losses = (
        loss(SQNR, 30.0), loss(SQNR, 12.5, "z"), loss(SQNR, math.inf, "w"),
        loss(DETECTION_DROP, 0.01), loss(DETECTION_DROP, 0.04, "z"), loss(AGREEMENT, math.nan),
    )  # fmt: skip
    rows = {row.name: row for row in loss_measurements(Judgement(losses, 8, "engine"))}
    assert {name: row.value for name, row in rows.items()} == {
        "sqnr_db": 12.5, "detection_drop": 0.04,
    }  # fmt: skip
    assert rows["sqnr_db"].how == (
        "SQNR of output z, INT8 against FP32, on 8 samples with the final ranges"
    )


def test_every_figure_of_merit_has_a_name() -> None:
    assert set(NAMES) == {metric.name for metric in METRICS}
    assert len(set(NAMES.values())) == len(NAMES)


def budget(value: float, limit: float = 0.0, float_value: float = 80.0) -> BudgetResult:
    return BudgetResult(frozenset(), float_value, value, value, limit, 1.0, (), (), complete=True)


def test_a_score_of_the_task_is_one_only_if_a_budget_has_measured_it() -> None:
    rows = {row.name: row.value for row in score_measurements("map50", budget(78.5))}
    assert rows == {"task_score": 0.785, "task_score_drop": 0.015}
    assert not list(score_measurements("sqnr", budget(30.0)))
    assert not list(score_measurements("map50", budget(60.0, limit=70.0)))
    assert not list(score_measurements("map50", budget(math.nan)))
