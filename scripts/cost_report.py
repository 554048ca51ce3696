"""Print how the cost model does: `python -m scripts.cost_report [--rows]`.

Reads configs/predicted_figures.json, which `python -m scripts.fit_costs --write` writes; nothing is
fitted again. `--rows` adds every row. docs/costs.md describes the model.
"""

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import numpy as np

from scripts.cost_errors import Judged, errors_of, without_boards, without_networks
from scripts.cost_result import Everything, Prediction, read_fit
from scripts.cost_rows import Case

# Likely reasons of rows that are off by more than 35 %: the first that holds.
_REASONS: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    (
        "CPU and memory were slowed too: the board idles at less than at full clocks",
        lambda c: c.measure == "power" and c.board.clocks is not None,
    ),
    (
        "the DLA draws as much in FP16 as in INT8, at a thirteenth of the rate",
        lambda c: c.measure == "power" and c.engine == "dla0" and c.precision == "fp16",
    ),
    (
        "perhaps run in smaller batches: the same query took half in later rounds",
        lambda c: c.batch == 8 and "v2.0" in c.source,
    ),
    (
        "MLPerf v3.0: in v3.1 the same board was 1.2 times as fast (GPU), with DLAs 1.6 to 1.8",
        lambda c: c.network == "retinanet_resnext50" and "v3.0" in c.source,
    ),
    (
        "DLA clocks of the run not stated: half of Super's would explain it",
        lambda c: c.network == "retinanet_resnext50" and c.engine == "gpu+2dla",
    ),
    (
        "torchvision of its time joined two tensors a layer; no copies of all maps",
        lambda c: c.network.startswith("densenet") and c.device == "jetson-nano",
    ),
    (
        "an input of the artifact's solver; poolings and normalisations may overlap",
        lambda c: c.network.startswith("googlenet:") and "dla" in c.engine,
    ),
    (
        "8 MB streamed at twice the rate of the larger matrices; the source rounds",
        lambda c: c.network == "alexnet:fc8",
    ),
    (
        "a small classifier: its kernels are shorter than those of the detectors in the fit",
        lambda c: c.network in ("resnet18", "resnet50", "mobilenet_v2") and c.engine == "gpu",
    ),
)


def main() -> None:
    """Print the report of the shipped fit."""
    parser = argparse.ArgumentParser(description="Print how the cost model does.")
    parser.add_argument("--rows", action="store_true", help="print every row, too")
    arguments = parser.parse_args()
    fit_run = read_fit()
    print(summary(fit_run))
    if arguments.rows:
        print(every_row(fit_run))


def summary(fit_run: Everything) -> str:
    """Return the report without its rows, in Markdown."""
    times, checks = fit_run.times, fit_run.checks
    parts = [
        _counts(fit_run),
        _tables("Reached on the fitted rows", times, lambda p: p.ratio),
        _outside("Each device left out in turn", times, lambda p: p.without_device),
        _outside("Each model left out in turn", times, lambda p: p.without_model, by_model=True),
        _tables("Rows that no fit has seen", checks, lambda p: p.ratio, CHECK_WORDS),
        _intervals(fit_run),
        _worst(fit_run),
        _applications(fit_run),
        _contention(fit_run),
        _energy(fit_run),
        _constants(fit_run),
    ]
    return "\n".join(parts)


CHECK_WORDS = """\
`configs/published_checks.csv`: two more devices of trtutils (Xavier NX, Orin NX; power modes not
stated, taken at the highest), YOLO11 of Ultralytics on Orin NX and Orin Nano Super, three small
classifiers on Orin Nano Super, RetinaNet on both DLA cores of AGX Orin, MLPerf on Orin NX (clocks
not stated, taken at those of Super), Xavier NX and RetinaNet on AGX Orin, and classifiers of
torch2trt on Jetson Nano and Xavier NX.
"""


def _counts(fit_run: Everything) -> str:
    reasons = Counter(row.reason for row in fit_run.unused)
    used = len(fit_run.times) + sum(p.case.measure == "power" for p in fit_run.power)
    lines = [
        "## Rows used and left out\n",
        f"{len(fit_run.times)} rows of time and {len(fit_run.power)} of power are used "
        f"({used} together), {sum(reasons.values())} are left out or checked apart:\n",
        "| rows | why |\n|---:|---|",
        *[f"| {count} | {reason} |" for reason, count in reasons.most_common()],
    ]
    return "\n".join(lines) + "\n"


def _line(name: str, ratios: Sequence[float]) -> str:
    errors = [abs(r - 1) for r in ratios]
    return (
        f"| {name} | {len(errors)} | {median(errors):.1%} | {np.quantile(errors, 0.9):.1%} | "
        f"{sum(e <= 0.35 for e in errors) / len(errors):.1%} | {median(ratios):.2f} |"
    )


HEAD = (
    "| rows of | number | median error | error of 90 % at most | within 35 % "
    "| median of predicted / published |\n|---|---:|---:|---:|---:|---:|"
)


def _grouped(
    rows: Iterable[Prediction],
    key: Callable[[Case], str],
    value: Callable[[Prediction], float | None],
) -> list[str]:
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        number = value(row)
        if number is not None:
            groups[key(row.case)].append(number)
    return [_line(name, groups[name]) for name in sorted(groups)]


def _tables(
    title: str,
    rows: Sequence[Prediction],
    value: Callable[[Prediction], float | None],
    words: str = "",
) -> str:
    keys: tuple[Callable[[Case], str], ...] = (
        lambda c: "**all**",
        lambda c: f"engine {c.engine}",
        lambda c: f"device {c.device}",
        lambda c: f"precision {c.precision}",
        lambda c: f"source {c.family}",
        lambda c: f"model {c.network.split(':')[0]}",
    )
    lines = [line for key in keys for line in _grouped(rows, key, value)]
    return f"## {title}\n\n{words}\n{HEAD}\n" + "\n".join(lines) + "\n"


def _outside(
    title: str,
    rows: Sequence[Prediction],
    value: Callable[[Prediction], float | None],
    *,
    by_model: bool = False,
) -> str:
    def ratio(row: Prediction) -> float | None:
        number = value(row)
        return None if number is None else number / row.case.value

    lines = _grouped(rows, lambda c: "**all**", ratio)
    lines += _grouped(rows, lambda c: "GPU" if c.engine == "gpu" else "DLA", ratio)
    if by_model:
        lines += _grouped(rows, lambda c: f"model {c.network.split(':')[0]}", ratio)
    else:
        lines += _grouped(
            rows, lambda c: f"{'GPU' if c.engine == 'gpu' else 'DLA'} of {c.device}", ratio
        )
    words = "A generation of the DLA without rows takes the other's constants.\n"
    return f"## {title}\n\n{'' if by_model else words}\n{HEAD}\n" + "\n".join(lines) + "\n"


def _intervals(fit_run: Everything) -> str:
    """Return how many held-out rows of every board and source are within their interval."""
    errors = errors_of(fit_run.times, fit_run.checks, fit_run.power)
    return "\n".join(
        [
            "## Intervals\n",
            "`factor`: on the widths, with which 80 % of the rows would be within.\n",
            _inside("Boards left out", without_boards(errors)),
            _inside("Networks left out", without_networks(errors)),
        ]
    )


def _inside(title: str, rows: Iterable[Judged]) -> str:
    """Return a table of the rows within, and of the median width, by board and source."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for error, spread in rows:
        bound = spread.low if error.ratio < 1 else spread.high
        row = (math.log(error.ratio) / math.log(bound), 2 * spread.half)
        board = f"{'GPU' if error.part == 'gpu' else 'DLA'} of {error.case.device}"
        for name in ("**all**", board, f"{board}: {error.case.family}"):
            groups[name].append(row)
    lines = []
    for name, group in sorted(groups.items()):
        within = sum(distance <= 1 for distance, _ in group)
        lines.append(
            f"| {name} | {len(group)} | {within} | {within / len(group):.0%} "
            f"| {median(width for _, width in group):.0%} "
            f"| {np.quantile([distance for distance, _ in group], 0.8):.2f} |"
        )
    head = "| rows of | number | within | share | median width | factor |\n"
    return f"### {title}\n\n{head}|---|---:|---:|---:|---:|---:|\n" + "\n".join(lines) + "\n"


def _applications(fit_run: Everything) -> str:
    """Say what bounds the rates of whole applications."""
    lines = [
        f"{app.case.network} {app.case.side} on {app.case.device}, both DLA cores: "
        f"{app.published_rate:.0f} frames/s published; the DLA alone does {app.dla_rate:.0f} in "
        f"INT8 ({app.dla_fp16_rate:.0f} in FP16), the GPU {app.gpu_rate:.0f}, and the network's "
        f"traffic is {app.memory_share:.0%} of the memory's peak. Neither DLA nor memory is the "
        "bound by the model. Its four channels of about 27 frames/s would fit cameras of 30, whose "
        "rate the source does not state. A rate of a whole application says nothing of the DLA.\n"
        for app in fit_run.applications
    ]
    return "## Whole applications\n\n" + "\n".join(lines)


def _reason(case: Case) -> str:
    return next((why for why, holds in _REASONS if holds(case)), "no reason found")


def _worst(fit_run: Everything) -> str:
    predictions = [*fit_run.times, *fit_run.power, *fit_run.checks]
    outliers = sorted(
        (p for p in predictions if abs(p.ratio - 1) > 0.35), key=lambda p: -abs(p.ratio - 1)
    )
    rows = [
        f"| {'check ' if p in fit_run.checks else ''}{p.case.line} | {p.case.device} "
        f"| {_what(p.case)} | {p.case.value:.3g} | {p.predicted:.3g} | {p.ratio:.2f} "
        f"| {_reason(p.case)} |"
        for p in outliers
    ]
    head = (
        "| line | device | row | published | predicted | ratio | likely reason |\n"
        "|---:|---|---|---:|---:|---:|---|"
    )
    return (
        f"## The {len(outliers)} rows that are off by more than 35 %\n\n{head}\n"
        + "\n".join(rows)
        + "\n"
    )


def _what(case: Case) -> str:
    side = f" {case.side}" if case.side else ""
    return f"{case.network}{side} b{case.batch} {case.precision} {case.engine} {case.measure}"


def _contention(fit_run: Everything) -> str:
    errors = fit_run.contention_errors
    crossings = ", ".join(f"{value:.0f}" for _, _, value in fit_run.crossings)
    return (
        "## Contention and crossings\n\n"
        f"On the {len(errors)} cells of PCCS (AGX Xavier) the slowdown is off by "
        f"{median(errors):.1%} at the median and {max(errors):.1%} at most. Rates of the GPU and "
        "both DLA cores together (engine gpu+2dla above) are the sum of single rates: published "
        "sums show hardly any contention there.\n\n"
        f"Transitions on the DLA as HaX-CoNN measured them, in us: {crossings}; without the "
        f"copying their median is {fit_run.crossing_us:.0f}.\n"
    )


def _energy(fit_run: Everything) -> str:
    power = [
        f"| {p.case.line} | {_what(p.case) if p.case.value > 8 else 'idle'} | "
        f"{_clocks(p.case)} | {p.case.value:.1f} | {p.predicted:.1f} | {p.ratio:.2f} |"
        for p in fit_run.power
    ]
    ratios = [
        f"| {model} | {mode} | {seen:.1f} | {predicted:.1f} | {predicted / seen:.2f} |"
        for model, mode, predicted, seen in fit_run.ratios
    ]
    return (
        "## Energy\n\nPower in W, all on AGX Orin; MLPerf measures at the wall.\n\n"
        "| line | row | clocks | published | predicted | ratio |\n|---:|---|---|---:|---:|---:|\n"
        + "\n".join(power)
        + "\n\nWork for each joule, DLA over GPU, on their own rails:\n\n"
        "| model | mode | published | predicted | ratio |\n|---|---|---:|---:|---:|\n"
        + "\n".join(ratios)
        + "\n"
    )


def _clocks(case: Case) -> str:
    if case.board.clocks is not None:
        clocks = case.board.clocks
        return f"GPU {clocks.gpu_mhz or 'max'}, DLA {clocks.dla_mhz or 'max'}"
    return case.board.mode or "highest"


def _constants(fit_run: Everything) -> str:
    rows = []
    for group, values, fit in (
        ("gpu", fit_run.gpu, fit_run.gpu_fit),
        ("dla", fit_run.dla, fit_run.dla_fit),
        ("energy", fit_run.energy, fit_run.energy_fit),
    ):
        for name, error in zip(values.__dataclass_fields__, fit.errors, strict=True):
            spread = 2.718281828**error
            rows.append(f"| {group}.{name} | {getattr(values, name):.4g} | {spread:.2f} |")
    for name, value, error in zip(
        ("free_share", "full_share", "slope"),
        fit_run.contention,
        fit_run.contention_fit.errors,
        strict=True,
    ):
        rows.append(f"| contention.{name} | {value:.4g} | {2.718281828**error:.2f} |")
    head = "| constant | value | may be off by a factor of |\n|---|---:|---:|"
    words = (
        "The factor is the fit's standard error; rows of one source are not independent, so that "
        "the truth is wider.\n"
    )
    return f"## Constants\n\n{words}\n{head}\n" + "\n".join(rows) + "\n"


def every_row(fit_run: Everything) -> str:
    """Return a table of every row of the fit and the checks, in Markdown."""
    head = (
        "| line | source | device | clocks | row | published | predicted | ratio "
        "| without device | without model |\n"
        "|---:|---|---|---|---|---:|---:|---:|---:|---:|"
    )

    def line(p: Prediction, number: str) -> str:
        outside = [
            "" if value is None else f"{value / p.case.value:.2f}"
            for value in (p.without_device, p.without_model)
        ]
        return (
            f"| {number} | {p.case.family} | {p.case.device} | {_clocks(p.case)} "
            f"| {_what(p.case)} | {p.case.value:.4g} | {p.predicted:.4g} | {p.ratio:.2f} "
            f"| {outside[0]} | {outside[1]} |"
        )

    times = [line(p, str(p.case.line)) for p in sorted(fit_run.times, key=lambda p: p.case.line)]
    checks = [line(p, str(p.case.line)) for p in fit_run.checks]
    return (
        "## Row by row\n\nms of a run (latency) or of an image (rate). `line` is that of "
        "`configs/published_figures.csv`; the last two columns are the ratio when the row's "
        "device, or its model, was left out of the fit.\n\n"
        f"{head}\n" + "\n".join(times) + "\n\n### Rows that no fit has seen\n\n`line` is that of "
        f"`configs/published_checks.csv`.\n\n{head}\n" + "\n".join(checks) + "\n"
    )


if __name__ == "__main__":
    main()
