"""Ranges of another tool clip nothing that a model puts out: its last layers stay off the DLA."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import configs
from calibration.trt_cache import cache_of, write_cache
from device.errors import TandemError
from toolkit.cli.main import tandem
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions
from toolkit.quantize.loss.parts import bounded_tensors, output_layers
from toolkit.quantize.quantize import calibrated_tensors
from toolkit.quantize.ranges.table_file import read_ranges

MODEL = configs.ROOT / "models" / "robot-objects.onnx"
BOXES = {f"/detector/heads.{level}/box/box.1/Conv" for level in range(3)}
AMAX = 0.5  # below what boxes and scores reach


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration cache of TensorRT with one range for all."""
    graph, _ = run_passes(import_model(MODEL).model)
    path = tmp_path_factory.mktemp("cache") / "foreign.cache"
    write_cache(path, cache_of(dict.fromkeys(calibrated_tensors(graph), AMAX), "100300"))
    return path


def built(cache: Path, folder: Path, *, accept_loss: bool) -> BuildResult:
    options = BuildOptions(
        table=read_ranges(cache).table,
        plan=PlanOptions(forced=Forced(dla=("all",))),
        precision="int8",
        kernels=False,
        accept_loss=accept_loss,
    )
    return build_engine(MODEL, "orin-nx-16gb", folder / "m.engine", options)


def test_the_layers_that_give_boxes_are_the_last_and_scores_have_a_bound() -> None:
    graph, _ = run_passes(import_model(MODEL).model)
    assert output_layers(graph).keys() == BOXES
    assert {"/Sigmoid_output_0", "scores"} <= bounded_tensors(graph)


def test_last_layers_stay_off_the_dla_and_the_build_says_their_price(
    cache: Path, tmp_path: Path
) -> None:
    result = built(cache, tmp_path, accept_loss=False)
    rows = {row.node: row for row in result.plan.placements}
    assert {node for node, row in rows.items() if row.rule == "K1"} == BOXES
    assert all(rows[node].processor == "gpu" for node in BOXES)
    (note,) = [note for note in result.notes if "of another tool" in note]
    assert "the 3 nodes kept in floating point" in note
    assert "us a frame predicted" in note
    assert "`tandem build --accept-loss`" in note
    ranges = {tensor.name: tensor.scale for tensor in result.manifest.tensors}
    scores = [scale for name, scale in ranges.items() if "Sigmoid" in name and scale is not None]
    assert len(scores) == 3
    assert scores == pytest.approx([1 / 127] * len(scores))


def test_who_accepts_the_loss_has_them_on_the_dla(cache: Path, tmp_path: Path) -> None:
    result = built(cache, tmp_path, accept_loss=True)
    rows = {row.node: row for row in result.plan.placements}
    assert all(rows[node].processor.startswith("dla") for node in BOXES)
    assert not any("of another tool" in note for note in result.notes)


def test_accepting_a_loss_needs_ranges(cache: Path, tmp_path: Path) -> None:
    command = ["build", str(MODEL), "-o", str(tmp_path / "m.engine"), "--accept-loss"]
    refused = CliRunner().invoke(tandem, command)
    assert refused.exit_code == 2
    assert "--accept-loss belongs to calibration" in refused.output
    accepted = CliRunner().invoke(tandem, [*command, "--table", str(cache)])
    assert not isinstance(accepted.exception, TandemError)
    assert accepted.exit_code == 0, accepted.output


@pytest.mark.parametrize(
    "options",
    [
        ("--table", "none.json", "--precision", "fp16"),
        ("--dummy-ranges", "--precision", "fp32"),
        ("--method", "entropy"),
        ("--strict",),
    ],
)
def test_what_a_build_has_no_use_for_is_refused(options: tuple[str, ...]) -> None:
    done = CliRunner().invoke(tandem, ["build", "none.onnx", *options])
    assert done.exit_code == 2
    assert f"Error: {options[0]} " in done.output
