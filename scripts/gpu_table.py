"""The tables of docs/performance.md from the JSON files of `scripts/bench_gpu.py`.

    python -m scripts.gpu_table RUN.json [RUN.json ...]

Runs are merged; the last one of duplicate cells counts. They must be of one GPU: a floor uses the
ceilings of the run of its cell.
"""

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

NAMES = {
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNetV2",
    "efficientnet_b0": "EfficientNet-B0",
    "yolo8n": "YOLOv8n-style",
    "vit_small": "ViT-S",
}
OURS = ("fp16", "int8")
COMPILED = "compiled"  # the peer that ratios are to


class Ceilings(msgspec.Struct, frozen=True):
    """Measured peaks of a GPU: GEMM in TFLOP/s (INT8: TOP/s), memory in TB/s; its SMs."""

    fp16_tflops: float
    int8_tops: float
    memory_tbps: float
    sms: int = 0


class Cell(msgspec.Struct, frozen=True):
    """One subject on one network: its error against FP32, its time, and the floor of both.

    `error` is None where an output is not finite: JSON has no such number.
    """

    network: str
    batch: int
    subject: str
    error: float | None
    time_us: float
    floor_us: float

    @property
    def key(self) -> tuple[str, int, str]:
        """The identity of the cell."""
        return self.network, self.batch, self.subject

    @property
    def error_text(self) -> str:
        """The error with one decimal, or what stands for none."""
        return "not finite" if self.error is None else f"{self.error:.1e}"


class Layer(msgspec.Struct, frozen=True):
    """One operation of an engine by itself: `floor_us` is its roofline."""

    network: str
    batch: int
    precision: str
    kernel: str
    nodes: tuple[str, ...]
    time_us: float
    floor_us: float


class Run(msgspec.Struct, frozen=True):
    """The measurements of one run of the benchmark."""

    ceilings: Ceilings
    cells: tuple[Cell, ...]
    layers: tuple[Layer, ...] = ()


Cells = Mapping[tuple[str, int, str], Cell]


def merged(runs: Sequence[Run]) -> Cells:
    """Return all cells of several runs by network, batch and subject; later ones count."""
    return {cell.key: cell for run in runs for cell in run.cells}


def ratios(cells: Cells, subject: str, peer: str) -> dict[tuple[str, int], float]:
    """Return how many times faster a subject is than a peer, by network and batch."""
    return {
        (name, batch): cells[name, batch, peer].time_us / cell.time_us
        for (name, batch, whose), cell in cells.items()
        if whose == subject and (name, batch, peer) in cells
    }


def means(cells: Cells, subject: str, peer: str) -> list[str]:
    """Summarize how often and by what factor a subject is faster than a peer."""
    all_ratios = ratios(cells, subject, peer)
    lines = []
    for only in (None, *sorted({batch for _, batch in all_ratios})):
        chosen = [ratio for (_, batch), ratio in all_ratios.items() if only in (None, batch)]
        if not chosen:
            continue
        where = "all batches" if only is None else f"batch {only}"
        mean = math.exp(statistics.fmean(map(math.log, chosen)))
        lines.append(
            f"{subject} against {peer}, {where}: "
            f"geometric mean {mean:.2f}x, least {min(chosen):.2f}x, {len(chosen)} cells"
        )
    return lines


def tables(cells: Cells) -> list[str]:
    """Return both tables, if they have rows, and the ratios to the peers."""
    lines = []
    for table in (half_table(cells), integer_table(cells)):
        if len(table) > 2:
            lines += ["", *table]
    lines.append("")
    for subject in OURS:
        for peer in (COMPILED, "eager"):
            lines += means(cells, subject, peer)
    return lines


def half_table(cells: Cells) -> list[str]:
    """Return the table of FP16: ours, both peers, the ratio, the floor, the errors."""
    lines = [
        "| network | batch | ours FP16 | compiled | eager | ours to compiled | floor | times floor "
        "| error | error of compiled |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, batch, first in _rows(cells, "fp16"):
        cell = cells[name, batch, "fp16"]
        compiled, eager = (cells.get((name, batch, peer)) for peer in (COMPILED, "eager"))
        columns = (
            NAMES.get(name, name) if first else "",
            batch,
            _time(cell),
            _time(compiled),
            _time(eager),
            _ratio(compiled, cell),
            _floor(cell),
            f"{cell.time_us / cell.floor_us:.1f}",
            cell.error_text,
            "" if compiled is None else compiled.error_text,
        )
        lines.append(_row(columns))
    return lines


def integer_table(cells: Cells) -> list[str]:
    """Return the table of INT8: ours, pictures a second, against FP16 of both, floor and error."""
    lines = [
        "| network | batch | ours INT8 | pictures/s | to compiled FP16 | to our FP16 | floor "
        "| times floor | error |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, batch, first in _rows(cells, "int8"):
        cell = cells[name, batch, "int8"]
        columns = (
            NAMES.get(name, name) if first else "",
            batch,
            _time(cell),
            f"{batch / cell.time_us * 1e6:.0f}",
            _ratio(cells.get((name, batch, COMPILED)), cell),
            _ratio(cells.get((name, batch, "fp16")), cell),
            _floor(cell),
            f"{cell.time_us / cell.floor_us:.1f}",
            cell.error_text,
        )
        lines.append(_row(columns))
    return lines


def _rows(cells: Cells, subject: str) -> list[tuple[str, int, bool]]:
    """Return networks and batches that a subject was timed on; True where a network begins."""
    order = [*NAMES, *sorted({name for name, _, _ in cells} - set(NAMES))]
    groups = sorted(
        ((name, batch) for name, batch, whose in cells if whose == subject),
        key=lambda group: (order.index(group[0]), group[1]),
    )
    return [
        (name, batch, not index or groups[index - 1][0] != name)
        for index, (name, batch) in enumerate(groups)
    ]


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _time(cell: Cell | None) -> str:
    return "" if cell is None else f"{cell.time_us:.0f}"


def _floor(cell: Cell) -> str:
    return f"{cell.floor_us:.0f}"


def _ratio(peer: Cell | None, cell: Cell) -> str:
    return "" if peer is None else f"{peer.time_us / cell.time_us:.2f}x"


def main() -> None:
    """Print the tables and the means of the runs on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    arguments = parser.parse_args()
    runs = [msgspec.json.decode(path.read_bytes(), type=Run) for path in arguments.runs]
    for path, run in zip(arguments.runs, runs, strict=True):
        print(f"{path.name}: {run.ceilings}")
    print("\n".join(tables(merged(runs))))


if __name__ == "__main__":
    main()
