"""Fit the cost model to published figures: `python -m scripts.fit_costs [--write]`.

Reads configs/published_figures.csv, rebuilds the networks that its rows name, fits the constants
and prints the errors of predictions, also with every device and every model left out in turn.
`--write` puts the constants into configs/costs.toml and every prediction into
configs/predicted_figures.json, from which `python -m scripts.cost_report` prints the report.
Same rows, same constants: nothing is random.

`--report FILE` adds the networks that a board's selftest ran on its DLA (docs/board_kit.md).
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import tomli_w

import configs
from device.engine.manifest import Precision
from device.errors import TandemError
from device.profile import load_profile
from device.selftest.report import Report, read_report
from scripts.cost_errors import errors_file, errors_of
from scripts.cost_fit import (
    ARRAYS,
    DlaFit,
    DlaRows,
    Fitted,
    GpuRows,
    PowerDraw,
    board_of,
    fit_dla,
    fit_energy,
    fit_gpu,
    kernels_of,
    solve,
    together,
)
from scripts.cost_report import summary
from scripts.cost_result import (
    Application,
    Everything,
    Prediction,
    write_fit,
)
from scripts.cost_rows import (
    CHECKS,
    MODELS,
    Board,
    Case,
    raw_rows,
    read_applications,
    read_rows,
    report_rows,
)
from toolkit.partition.costs.bytes import moved_bytes
from toolkit.partition.costs.energy import EnergyParameters
from toolkit.partition.costs.errors import Errors
from toolkit.partition.costs.gpu import Array, GpuParameters

TIMES = ("latency", "rate")
P_contra = TypeVar("P_contra", contravariant=True)
P = TypeVar("P")
# Output of the groups of GoogLeNet at which HaX-CoNN marked outputs, in elements.
CUT_ELEMENTS = dict(
    zip(
        (10, 24, 38, 53, 67, 81, 95, 110, 124),
        (192 * 784, 256 * 784, 480 * 196, *(512 * 196,) * 3, 528 * 196, *(832 * 49,) * 2),
        strict=True,
    )
)


def main() -> None:
    """Fit, print, and write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write constants and predictions")
    parser.add_argument(
        "--report", type=Path, action="append", default=[], help="of a selftest: more rows"
    )
    arguments = parser.parse_args()
    try:
        reports = [read_report(path).report for path in arguments.report]
    except TandemError as error:
        parser.error(str(error))
    fit_run = fit_everything(reports)
    print(summary(fit_run))
    if arguments.write:
        (configs.ROOT / "costs.toml").write_text(constants_text(fit_run))
        errors = errors_file(errors_of(fit_run.times, fit_run.checks, fit_run.power))
        (configs.ROOT / "errors.json").write_bytes(errors_bytes(errors))
        write_fit(fit_run)


def fit_everything(reports: Sequence[Report] = ()) -> Everything:
    """Run every fit and every check; `reports`: of selftests, for more rows."""
    cases, unused = read_rows()
    for report in reports:
        more, skipped = report_rows(report)
        cases += more
        unused += skipped
    raw = raw_rows()
    gpu_rows = GpuRows([c for c in cases if c.engine == "gpu" and c.measure in TIMES])
    dla_rows = DlaRows([c for c in cases if c.engine in ("dla0", "2dla") and c.measure in TIMES])
    crossings = tuple(_crossings(raw))
    crossing_us = median(value for _, value, _ in crossings)
    gpu, gpu_fit = fit_gpu(gpu_rows)
    dla, dla_fit = fit_dla(dla_rows, crossing_us)
    contention, contention_fit, errors = _fit_contention(raw)
    both = [c for c in cases if c.engine == "gpu+2dla" and c.measure in TIMES]
    drawn, ratios = _drawn(cases, raw, gpu, dla)
    energy, energy_fit = fit_energy(
        [(row, case.value) for row, case in drawn],
        [(d, g, rate, seen) for _, _, d, g, rate, seen in ratios],
    )
    checks, _ = read_rows(CHECKS)
    gpu_checks = GpuRows([c for c in checks if c.engine == "gpu"])
    return Everything(
        gpu=gpu,
        gpu_fit=gpu_fit,
        dla=dla,
        dla_fit=dla_fit,
        contention=contention,
        contention_fit=contention_fit,
        contention_errors=errors,
        energy=energy,
        energy_fit=energy_fit,
        crossing_us=crossing_us,
        crossings=crossings,
        times=(
            *_with_shares(
                _predictions(gpu_rows, gpu, lambda keep: fit_gpu(gpu_rows, keep, gpu)[0]),
                gpu_rows,
                gpu,
            ),
            *_predictions(dla_rows, dla, lambda keep: fit_dla(dla_rows, crossing_us, keep, dla)[0]),
            *_combined(both, gpu, dla),
        ),
        power=tuple(Prediction(case, row.watts(energy)) for row, case in drawn),
        ratios=tuple(
            (name, mode, rate * g.watts(energy, idle=False) / d.watts(energy, idle=False), seen)
            for name, mode, d, g, rate, seen in ratios
        ),
        checks=(
            *_with_shares(_predicted(gpu_checks, gpu), gpu_checks, gpu),
            *_predicted(DlaRows([c for c in checks if c.engine in ("dla0", "2dla")]), dla),
            *_combined([c for c in checks if c.engine == "gpu+2dla"], gpu, dla),
        ),
        applications=tuple(_applications(gpu, dla)),
        unused=tuple(unused),
    )


def _applications(gpu: GpuParameters, dla: DlaFit) -> Iterable[Application]:
    """Predict what the networks of whole applications do alone."""
    for case in read_applications():
        rate = 1e3 / case.value

        def alone(case: Case, precision: Precision) -> float:
            rows = DlaRows([replace(case, precision=precision)])
            return 1e3 / float(rows.predicted(dla)[0])

        on_gpu = GpuRows([replace(case, engine="gpu", batch=8)])
        _, moved = _work_of(case)
        yield Application(
            case=case,
            published_rate=rate,
            dla_rate=alone(case, "int8"),
            dla_fp16_rate=alone(case, "fp16"),
            gpu_rate=1e3 / float(on_gpu.predicted(gpu)[0]),
            memory_share=moved * rate / 1e6 / board_of(case.board).bandwidth,
        )


class Rows(Protocol[P_contra]):
    """Rows of one engine: `GpuRows` or `DlaRows`."""

    cases: tuple[Case, ...]

    def predicted(self, given: P_contra, /) -> Array:
        """Return ms of each case."""
        ...


def _predictions(rows: Rows[P], parameters: P, refit: Callable[[Array], P]) -> Iterable[Prediction]:
    """Predict all rows, also with their device or their model left out of the fit."""
    fitted = rows.predicted(parameters)
    held_out = []
    for names in (
        [case.device for case in rows.cases],
        [model_of(case.network) for case in rows.cases],
    ):
        values = np.zeros(len(names))
        for name in sorted(set(names)):
            excluded = np.array([n == name for n in names])
            values[excluded] = rows.predicted(refit(1.0 - excluded))[excluded]
        held_out.append(values)
    for index, case in enumerate(rows.cases):
        yield Prediction(
            case, float(fitted[index]), float(held_out[0][index]), float(held_out[1][index])
        )


def _predicted(rows: Rows[P], parameters: P) -> Iterable[Prediction]:
    for case, value in zip(rows.cases, rows.predicted(parameters), strict=True):
        yield Prediction(case, float(value))


def _with_shares(
    predictions: Iterable[Prediction], rows: GpuRows, parameters: GpuParameters
) -> Iterable[Prediction]:
    for prediction, shares in zip(predictions, rows.shares(parameters), strict=True):
        yield replace(prediction, shares=shares)


def model_of(network: str) -> str:
    """Return the model that a network or a part of one belongs to."""
    name = network.split(":", maxsplit=1)[0]
    return "resnet34" if name == "resnet34_backbone" else name


def _combined(cases: Sequence[Case], gpu: GpuParameters, dla: DlaFit) -> Iterable[Prediction]:
    """Predict rows in which GPU and both DLA cores share the images, from single rates."""
    gpu_alone = GpuRows([replace(c, engine="gpu") for c in cases]).predicted(gpu)
    dla_alone = DlaRows([replace(c, engine="2dla") for c in cases]).predicted(dla)
    for case, gpu_ms, dla_ms in zip(cases, gpu_alone, dla_alone, strict=True):
        both_ms = together(float(gpu_ms), float(dla_ms))
        yield Prediction(case, both_ms)


def _crossings(raw: Sequence[dict[str, str]]) -> Iterable[tuple[int, float, float]]:
    """Yield (line, microseconds without the copying, as published) of transitions on the DLA."""
    bandwidth = board_of(Board(profile="agx-xavier-32gb")).bandwidth
    for line, row in enumerate(raw, start=2):
        if row["metric"] == "transition_cost_ms" and row["kind"] == "measured":
            layer = int(row["notes"].split("layer index ")[1].split(";")[0])
            if row["engine"] == "DLA0":
                copied = 2 * 2 * CUT_ELEMENTS[layer] / bandwidth
                yield line, float(row["value"]) * 1e3 - copied, float(row["value"]) * 1e3


def _fit_contention(
    raw: Sequence[dict[str, str]],
) -> tuple[tuple[float, float, float], Fitted, tuple[float, ...]]:
    """Fit the slowdown to the hundred cells of PCCS; return the errors of its factor too."""
    peak = load_profile("agx-xavier-32gb").memory.bandwidth_gbps.value
    cells = [row for row in raw if row["metric"] == "achieved_bw_gbps"]
    own_demand = np.array([float(row["input"].split()[1]) for row in cells]) / peak
    others = np.array([float(row["notes"].split("demand ")[1].split()[0]) for row in cells]) / peak
    slowdowns = own_demand * peak / np.array([float(row["value"]) for row in cells])

    def factor(values: Array) -> Array:
        return np.asarray(
            1 + values[2] * np.maximum(0, own_demand - values[0]) * np.minimum(others, values[1])
        )

    fitted = solve(lambda v: np.log(factor(v) / slowdowns), (0.2, 0.4, 5.0), (1.0, 1.0, 100.0))
    values = (fitted.values[0], fitted.values[1], fitted.values[2])
    return values, fitted, tuple(abs(factor(np.array(values)) / slowdowns - 1))


def _work_of(case: Case) -> tuple[float, float]:
    """Return multiply-accumulates and bytes of one image of a case on the GPU."""
    kernels = kernels_of(case, case.batch)
    macs = sum(k.head.macs or 0 for k in kernels if k.kind == "matrix")
    moved = sum(sum(moved_bytes(k, case.precision)) for k in kernels)
    return macs / case.batch, moved / case.batch


def _drawing(case: Case, gpu: GpuParameters, dla: DlaFit) -> PowerDraw:
    """Return the busy processors of a case, at the predicted rates."""
    uses_gpu = "gpu" in case.engine
    cores = 2 if "2dla" in case.engine else int(case.engine == "dla0")
    rate = replace(case, measure="rate", value=1.0)
    macs, moved = _work_of(case)
    gpu_s = 0.0
    if uses_gpu:
        gpu_s = 1e3 / float(GpuRows([replace(rate, engine="gpu")]).predicted(gpu)[0])
    dla_s = 0.0
    if cores:
        engine: Any = "2dla" if cores == 2 else "dla0"
        dla_s = 1e3 / float(DlaRows([replace(rate, engine=engine)]).predicted(dla)[0])
    return PowerDraw(
        board=board_of(case.board),
        gpu=uses_gpu,
        cores=cores,
        precision=case.precision,
        gpu_macs=macs * gpu_s,
        dla_macs=macs * dla_s,
        gpu_bytes=moved * gpu_s,
        dla_bytes=moved * dla_s,
    )


def _drawn(
    cases: Sequence[Case], raw: Sequence[dict[str, str]], gpu: GpuParameters, dla: DlaFit
) -> tuple[list[tuple[PowerDraw, Case]], list[tuple[str, str, PowerDraw, PowerDraw, float, float]]]:
    """Return the rows of power, and the ratios of work for each joule of DLA and GPU."""
    rows = []
    time_of = {
        (c.source, c.network, c.batch, c.engine): c.value for c in cases if c.measure == "latency"
    }
    for case in cases:
        if case.measure == "power":
            rows.append((_drawing(case, gpu, dla), case))
        elif case.measure == "energy":
            time = time_of[case.source, case.network, case.batch, case.engine]
            watts = replace(case, measure="power", value=case.value / time)
            rows.append((_drawing(watts, gpu, dla), watts))
    for line, row in enumerate(raw, start=2):
        board = Board(profile="agx-orin-64gb")
        if row["model"] == "idle" or (
            row["engine"] == "DLA0+DLA1" and row["metric"] == "board_power_w"
        ):
            case = _power_case(line, row, board)
            if row["model"] == "idle":
                nothing = PowerDraw(board_of(board), False, 0, "int8", 0, 0, 0, 0)
                rows.append((nothing, replace(case, engine="dla0")))
            else:
                rows.append((_drawing(case, gpu, dla), case))
    return rows, [_rail_ratio(line, row, gpu, dla) for line, row in _rails(raw)]


def _power_case(line: int, row: dict[str, str], board: Board) -> Case:
    return Case(
        line=line,
        source=row["source"],
        device=board.profile,
        board=board,
        network="resnet50",
        side=None,
        batch=1,
        dla_batch=1,
        precision="int8",
        engine="2dla",
        measure="power",
        value=float(row["value"]),
    )


def _rails(raw: Sequence[dict[str, str]]) -> Iterable[tuple[int, dict[str, str]]]:
    return (
        (line, row)
        for line, row in enumerate(raw, start=2)
        if row["metric"] == "perf_per_watt_ratio" and row["precision"] == "INT8 dense"
    )


def _rail_ratio(
    line: int, row: dict[str, str], gpu: GpuParameters, dla: DlaFit
) -> tuple[str, str, PowerDraw, PowerDraw, float, float]:
    """Return both engines without memory traffic, and the rate of the DLA relative to the GPU."""
    board = Board(profile="agx-orin-64gb", mode=row["power_mode"])
    batch = int(row["batch"].split("GPU ")[1]) if "GPU" in row["batch"] else 1
    case = replace(_power_case(line, row, board), network=MODELS[row["model"]], measure="rate")
    on_gpu = replace(case, engine="gpu", batch=batch)
    gpu_ms = float(GpuRows([on_gpu]).predicted(gpu)[0])
    dla_ms = float(DlaRows([case]).predicted(dla)[0])
    drawn = [replace(_drawing(c, gpu, dla), gpu_bytes=0.0, dla_bytes=0.0) for c in (case, on_gpu)]
    return row["model"], row["power_mode"], drawn[0], drawn[1], gpu_ms / dla_ms, float(row["value"])


def _constant(value: float, error: float | None, source: str, note: str = "") -> dict[str, Any]:
    spread = None if error is None else float(f"{np.exp(error):.3g}")
    confidence = "low" if spread is None or spread > 1.5 else "medium" if spread > 1.15 else "high"
    entry: dict[str, Any] = {
        "value": float(f"{value:.4g}"),
        "source": source,
        "confidence": confidence,
    }
    if spread is not None:
        entry["spread"] = spread
    return entry | ({"note": note} if note else {})


_NOTES = {
    "gpu.array_efficiency": "With the largest tile; smaller ones have less by their reuse.",
    "gpu.kernel_cycles": "Scales with the clock of the GPU: no constant part was found.",
    "gpu.graph_share": "From MLPerf, whose single-stream runs are CUDA graphs.",
    "gpu.launch_kilocycles": (
        "From ShuffleNets and DenseNets through torch2trt on AGX Xavier, JetPack 4."
    ),
    "gpu.call_kilocycles": "Of torch2trt; Ultralytics' inference times have no such part.",
    "gpu.fp32_share": "TensorRT uses TF32 where the GPU has it, but not in every layer.",
    "dla.fp16_share": (
        "Of the prior rate in toolkit/dla/cycles. One network in FP16, and heads of one."
    ),
    "dla.submission_us": "Hardly told apart from crossings by the rows: held near its start.",
    "dla.crossing_us": "Held near the median of HaX-CoNN's transitions.",
    "energy.idle_w": "AGX Orin developer kit; other boards: configs/power.toml.",
}


def _group(
    title: str, values: GpuParameters | DlaFit | EnergyParameters, fit: Fitted, source: str
) -> dict[str, Any]:
    """Return the constants of one table of costs.toml."""
    names = [field.name for field in fields(values)]
    return {
        name: _constant(getattr(values, name), error, source, _NOTES.get(f"{title}.{name}", ""))
        for name, error in zip(names, fit.errors, strict=True)
    }


def _contention(fit_run: Everything, source: str) -> dict[str, Any]:
    names = ("free_share", "full_share", "slope")
    return {
        name: _constant(value, error, source)
        for name, value, error in zip(
            names, fit_run.contention, fit_run.contention_fit.errors, strict=True
        )
    }


def constants_text(fit_run: Everything) -> str:
    """Return configs/costs.toml."""
    gpu_rows = sum(p.case.engine == "gpu" for p in fit_run.times)
    dla_rows = sum(p.case.engine in ("dla0", "2dla") for p in fit_run.times)
    fitted = sorted({p.case.device for p in fit_run.times if p.case.engine == "gpu"})
    by = "scripts/fit_costs.py, {} rows of configs/published_figures.csv"

    gpu = _group("gpu", fit_run.gpu, fit_run.gpu_fit, by.format(gpu_rows))
    dla = _group("dla", fit_run.dla, fit_run.dla_fit, by.format(dla_rows))
    for generation in ("v1", "v2"):
        dla[generation] = {
            name: dla.pop(f"{name}_{generation}") for name in ("bandwidth_share", "layer_us")
        }
    crossing = dla.pop("crossing_us")
    dla["arrays"] = _constant(
        ARRAYS, None, "configs/profiles: the peak of v2 is 4.0 times that of v1 a clock"
    )
    estimate = "estimate of the authors: nothing is published for these models"
    energy = _group(
        "energy",
        fit_run.energy,
        fit_run.energy_fit,
        by.format(len(fit_run.power)) + f" and {len(fit_run.ratios)} ratios",
    )
    constants = {
        "gpu": gpu,
        "dla": dla,
        "cpu": {
            "gmacs": _constant(20.0, None, estimate),
            "bandwidth_share": _constant(0.4, None, estimate),
            "node_us": _constant(5.0, None, estimate),
        },
        "crossing": {"us": crossing},
        "contention": _contention(fit_run, by.format(len(fit_run.contention_errors)) + " (PCCS)"),
        "energy": energy,
        "residuals": {
            name: _residuals([p for p in fit_run.times if p.case.engine in engines])
            for name, engines in (
                ("gpu", ("gpu",)),
                ("dla", ("dla0", "2dla")),
                ("gpu_and_dla", ("gpu+2dla",)),
            )
        }
        | {"power": _residuals(fit_run.power)},
        "fitted_devices": fitted,
        "fitted_sms": sorted({load_profile(device).sm or 0 for device in fitted}),
    }
    head = (
        "# Constants of the cost model. Written by scripts/fit_costs.py --write; do not edit.\n"
        "# spread: the factor by which a value may be off, from the fit. See docs/costs.md.\n\n"
    )
    return head + tomli_w.dumps(constants)


def errors_bytes(errors: Errors) -> bytes:
    """Return configs/errors.json, a row a line."""
    return msgspec.json.encode(errors).replace(b",[", b",\n[") + b"\n"


def _residuals(rows: Sequence[Prediction]) -> dict[str, Any]:
    errors = [abs(p.ratio - 1) for p in rows]
    return {
        "rows": len(rows),
        "median_error": round(median(errors), 4),
        "within_35": round(sum(e <= 0.35 for e in errors) / len(errors), 4),
    }


if __name__ == "__main__":
    main()
