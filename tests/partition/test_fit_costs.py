"""The fit: every published row accounted for, and constants found again from times made by them."""

import csv
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from selftest_reports import network, on_dla, report

from device.errors import ConfigError
from device.profile import load_profile
from device.selftest.report import Report, write_report
from scripts import fit_costs
from scripts.cost_fit import (
    DlaFit,
    DlaRows,
    GpuRows,
    fit_dla,
    fit_gpu,
    kernels_of,
    solve,
    together,
    weights,
)
from scripts.cost_report import summary
from scripts.cost_rows import BOARDS, CHECKS, FIGURES, MODELS, PARTS, Board, Case, read_rows
from scripts.fit_costs import model_of
from scripts.networks import NETWORKS
from toolkit.partition.costs.gpu import GpuParameters
from toolkit.partition.costs.hardware import Clocks

TRUE_GPU = GpuParameters(
    array_efficiency=0.7,
    fp32_share=0.5,
    separable_efficiency=0.3,
    output_cycles=0.2,
    curve_cycles=0.15,
    bandwidth_share=0.6,
    kernel_cycles=9000.0,
    graph_share=0.3,
    launch_kilocycles=30.0,
    call_kilocycles=400.0,
)
TRUE_DLA = DlaFit(
    array_efficiency=0.6,
    fp16_share=0.4,
    bandwidth_share_v1=0.3,
    bandwidth_share_v2=0.5,
    layer_us_v1=15.0,
    layer_us_v2=6.0,
    submission_us=30.0,
    crossing_us=50.0,
)


def case(network, engine="gpu", board="agx-orin-64gb", **given) -> Case:
    held = {"precision": "int8", "batch": 1, "side": None, "measure": "latency", "source": "made"}
    held |= {
        "line": 0,
        "value": 1.0,
        "dla_batch": 1,
        "device": board,
        "board": Board(profile=board),
    }
    return Case(network=network, engine=engine, **(held | given))


def gpu_cases() -> list[Case]:
    cases = [
        case(network, board=board, precision=precision, source=source, batch=batch)
        for network, batch in (("mobilenet_v2", 1), ("resnet18", 1), ("resnet18", 8))
        for board in ("agx-orin-64gb", "orin-nano-8gb", "agx-xavier-32gb")
        for precision in ("fp32", "fp16", "int8")
        for source in ("made", "MLPerf of somebody")
    ]
    cases += [case("yolov8n", board=b, side=s) for b in BOARDS_MADE for s in (160, 640)]
    called = ("shufflenet_v2", "densenet121", "resnet18", "vgg16")
    return [*cases, *[case(n, board="agx-xavier-32gb", source="torch2trt") for n in called]]


BOARDS_MADE = ("agx-orin-64gb", "orin-nano-8gb")


def timed(rows, given, spread=0.0):
    """Return the cases of `rows` with values that the model makes, off by a random factor."""
    noise = np.exp(np.random.default_rng().normal(0, spread, len(rows.cases)))
    values = rows.predicted(given) * noise
    return [replace(c, value=float(v)) for c, v in zip(rows.cases, values, strict=True)]


def test_every_published_row_is_used_or_left_out_once_with_a_reason():
    for path in (FIGURES, CHECKS):
        cases, unused = read_rows(path)
        with path.open(newline="") as file:
            count = len(list(csv.DictReader(file)))
        lines = [c.line for c in cases] + [row.line for row in unused]
        assert sorted(lines) == list(range(2, count + 2))
        assert all(row.reason for row in unused)


def test_most_rows_of_time_with_a_known_network_are_used():
    cases, _ = read_rows()
    assert sum(c.measure in ("latency", "rate") for c in cases) > 500
    assert {c.network for c in cases} <= set(NETWORKS) | set(PARTS)
    assert set(MODELS.values()) <= set(NETWORKS) | set(PARTS)


def test_rows_come_out_as_their_sources_state_them():
    by_line = {c.line: c for c in read_rows()[0]}
    latency = by_line[439]  # cuDLA: YOLOv5s at 672x672, batch 1, GPU at 1275 MHz, 1.82 ms
    assert (latency.network, latency.side, latency.value) == ("yolov5s", 672, 1.82)
    assert latency.board.clocks == Clocks(gpu_mhz=1275, dla_mhz=1331, emc_mhz=3200)
    rate = by_line[381]  # DLA-SW: 285 images/s of both DLAs
    assert (rate.engine, rate.measure, rate.value) == ("2dla", "rate", 1000 / 285)
    both = by_line[935]  # MLPerf: GPU batch 64, DLA batch 32
    assert (both.engine, both.batch, both.dla_batch) == ("gpu+2dla", 64, 32)
    slow = by_line[1021]  # MLPerf MaxQ: clocks in the notes
    assert slow.board.clocks.gpu_mhz == 930.75


@pytest.mark.parametrize("kind", ["", "guessed"])
def test_a_row_that_does_not_say_how_it_came_about_is_refused(tmp_path, kind):
    path = tmp_path / "rows.csv"
    lines = FIGURES.read_text().splitlines(keepends=True)[:2]
    path.write_text("".join(lines))
    assert len(read_rows(path)[0]) == 1
    path.write_text("".join(lines).replace(",measured,", f",{kind},"))
    with pytest.raises(ConfigError, match=rf"rows\.csv, line 2: kind is '{kind}'.*configured"):
        read_rows(path)


def test_targets_leave_the_fit_and_the_judgement():
    with FIGURES.open(newline="") as file:
        rows = dict(enumerate(csv.DictReader(file), start=2))
    expected = [line for line, row in rows.items() if row["metric"] == "fps_expected"]
    assert len(expected) == 24
    assert {rows[line]["kind"] for line in expected} == {"configured"}
    assert not {rows[c.line]["kind"] for c in read_rows()[0]} & {"configured"}


def test_a_call_through_torch2trt_adds_its_price():
    plain, called = (
        GpuRows([case("vgg16", board="agx-xavier-32gb", source=source)]).predicted(TRUE_GPU)[0]
        for source in ("made", "torch2trt")
    )
    assert called - plain == pytest.approx(400 / 2265.6, rel=1e-3)  # kilocycles, MHz


def test_every_board_is_a_profile_with_that_mode():
    for board in BOARDS.values():
        profile = load_profile(board.profile)
        assert board.mode is None or profile.power_mode(board.mode)


def test_the_fit_finds_the_constants_that_made_the_times():
    rows = GpuRows(gpu_cases())
    gpu_rows = GpuRows(timed(rows, TRUE_GPU))
    actual, _ = fit_gpu(gpu_rows)
    for name in TRUE_GPU.__dataclass_fields__:
        assert getattr(actual, name) == pytest.approx(getattr(TRUE_GPU, name), rel=0.02), name


def test_a_tenth_of_wild_rows_hardly_moves_the_fit():
    rows = GpuRows(gpu_cases())
    cases = timed(rows, TRUE_GPU, spread=0.03)
    wild = [replace(c, value=c.value * 3) if i % 10 == 0 else c for i, c in enumerate(cases)]
    actual, _ = fit_gpu(GpuRows(wild))
    again = rows.predicted(actual) / rows.predicted(TRUE_GPU)
    assert np.median(np.abs(again - 1)) < 0.1


def dla_cases() -> list[Case]:
    return [
        case(network, engine, board, precision=precision)
        for network in ("resnet18", "googlenet", "mobilenet_v2", "alexnet")
        for engine in ("dla0", "2dla")
        for board in ("agx-orin-64gb", "agx-xavier-32gb")
        for precision in ("int8", "fp16")
    ]


def test_the_fit_of_the_dla_predicts_what_made_the_times():
    rows = DlaRows(dla_cases())
    actual, _ = fit_dla(DlaRows(timed(rows, TRUE_DLA)), TRUE_DLA.crossing_us)
    assert rows.predicted(actual) == pytest.approx(rows.predicted(TRUE_DLA), rel=0.05)


def test_a_generation_without_rows_takes_the_values_of_the_other():
    rows = DlaRows(dla_cases())
    dla_rows = DlaRows(timed(rows, TRUE_DLA))
    keep = np.array([float(c.device == "agx-orin-64gb") for c in dla_rows.cases])
    actual, _ = fit_dla(dla_rows, TRUE_DLA.crossing_us, keep)
    assert actual.layer_us_v1 == actual.layer_us_v2
    assert actual.bandwidth_share_v1 == actual.bandwidth_share_v2


def test_equal_kernels_are_priced_once_and_summed_alike():
    cases = gpu_cases()[:6]
    whole = GpuRows(cases)
    assert len(whole.work.bytes) < len(whole.kind)
    single = [float(GpuRows([c]).predicted(TRUE_GPU)[0]) for c in cases]
    assert whole.predicted(TRUE_GPU) == pytest.approx(single)


def test_groups_of_rows_weigh_alike():
    cases = [case("resnet18", source="trtutils")] * 9 + [case("resnet18", source="JEDI")]
    actual = weights(cases, lambda c: c.family)
    assert actual[9] == pytest.approx(3 * actual[0])
    assert np.mean(actual**2) == pytest.approx(1)


def test_solving_finds_a_product_within_its_bounds():
    x = np.random.default_rng().uniform(1, 10, 50)
    actual = solve(lambda v: np.log(v[0] * x ** v[1]) - np.log(2 * x**0.5), (1, 1), (10, 10))
    assert actual.values == pytest.approx((2, 0.5), rel=1e-3)
    bound = solve(lambda v: np.log(v[0]) - np.log(np.full(9, 5.0)), (1,), (3,))
    assert bound.values[0] == pytest.approx(3, rel=1e-3)


def test_engines_together_add_their_rates():
    assert 1 / together(0.25, 0.5) == pytest.approx(1 / 0.25 + 1 / 0.5)


def test_parts_count_as_their_model():
    assert {model_of(n) for n in ("resnet34:conv2", "resnet34_backbone")} == {"resnet34"}
    assert len(kernels_of(case("alexnet:fc6"), 64)) == 1  # a product with its rectifier


def board_report() -> Report:
    """A selftest's: a network on the DLA ten times slower than any, and rows of no use."""
    slow = msgspec.structs.replace(
        network("resnet18", "aa", "dla", on_dla("conv0")), median_ms=15.0, item="resnet18-int8-dla"
    )
    return report(slow, network("resnet18", "aa", "gpu"), network("mine", "bb", "dla"))


def test_the_command_gives_the_fit_the_reports_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.tandem-report"
    write_report(path, board_report(), {})
    fitted: list[Sequence[Report]] = []
    monkeypatch.setattr(fit_costs, "fit_everything", fitted.append)
    monkeypatch.setattr(fit_costs, "summary", lambda _: "the summary")
    monkeypatch.setattr(sys, "argv", ["fit_costs", "--report", str(path), "--report", str(path)])
    fit_costs.main()
    assert fitted == [[board_report(), board_report()]]
    assert capsys.readouterr().out == "the summary\n"
    path.write_bytes(b"no report")
    with pytest.raises(SystemExit):
        fit_costs.main()
    assert str(path) in capsys.readouterr().err


@pytest.mark.slow
def test_a_report_of_a_board_is_fitted_with_the_published_rows() -> None:
    fit_run = fit_costs.fit_everything([board_report()])
    (row,) = [p for p in fit_run.times if p.case.source == "selftest of a board"]
    assert (row.case.network, row.case.engine, row.case.value) == ("resnet18", "dla0", 15.0)
    assert row.case.board.mode == "MAXN"
    assert 0 < row.predicted < 15.0
    # Its device and its model are left out in turn, as those of published rows.
    assert row.without_device != row.predicted
    assert row.without_model != row.predicted
    published = len(read_rows()[0])
    assert 0 < len(fit_run.times) <= published + 1
    left_out = [r.reason for r in fit_run.unused if "-int8-" in r.reason]
    assert left_out == [
        "resnet18-int8-gpu: not a run on the DLA",
        "mine-int8-dla: its graph is not public",
    ]
    text = summary(fit_run)
    assert "mine-int8-dla: its graph is not public" in text
