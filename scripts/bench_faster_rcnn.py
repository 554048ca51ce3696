"""Faster R-CNN with a ResNet-50-FPN backbone: time and boxes beside PyTorch's own run of it.

    python -m scripts.bench_faster_rcnn FOLDER [--profile h200] [--precisions fp16 fp32]
        [--side 800] [--backbone resnet50] [--runs 50] [--compile] [--kernels 10] [--json]

Builds what is not in FOLDER. Weights are random (scripts/networks/faster_rcnn.py), so that the
boxes mean nothing, but they are the same in each program. PyTorch runs on the GPU if it has one.
`--kernels`: the slowest operations of each segment, each by itself, with the nodes they compute.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from device.engine.manifest import Precision
from device.session import Session, open_session
from scripts.networks.faster_rcnn import OUTPUTS, export, image, make_network
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.quantize.ranges.options import RangeOptions

CALIBRATION_IMAGES = 4
CALIBRATION_METHOD = "percentile:99.999"
LAYER_RUNS = 5
SAME_IOU = 0.9  # of two boxes that are the same detection
Outputs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Agreement:
    """Detections of PyTorch that another run has, too: the same class, IoU of `iou` or more."""

    expected: int
    found: int
    worst_score_difference: float
    worst_corner_difference: float


def agreement(expected: Outputs, actual: Outputs, iou: float = SAME_IOU) -> Agreement:
    """Compare detections, each of `actual` used once, best first. Corners in pixels."""
    free = list(range(len(actual["scores"])))
    score_differences, corner_differences = [0.0], [0.0]
    found = 0
    for box, label, score in zip(*(expected[name] for name in OUTPUTS), strict=True):
        overlaps = [
            _iou(box, actual["boxes"][at]) if actual["labels"][at] == label else 0.0 for at in free
        ]
        if not overlaps or max(overlaps) < iou:
            continue
        at = free.pop(int(np.argmax(overlaps)))
        found += 1
        score_differences.append(abs(float(score) - float(actual["scores"][at])))
        corner_differences.append(float(np.abs(box - actual["boxes"][at]).max()))
    return Agreement(
        len(expected["scores"]), found, max(score_differences), max(corner_differences)
    )


def _iou(first: np.ndarray, second: np.ndarray) -> float:
    low, high = np.maximum(first[:2], second[:2]), np.minimum(first[2:], second[2:])
    common = float(np.prod(np.maximum(high - low, 0)))
    both = float(np.prod(first[2:] - first[:2]) + np.prod(second[2:] - second[:2])) - common
    return common / both if both > 0 else float(np.array_equal(first, second))


def run_torch(
    network: Any,  # noqa: ANN401
    side: int,
    device: str,
    *,
    half: bool = False,
) -> Outputs:
    """Return PyTorch's detections in the test image; `half`: with autocast to FP16."""
    import torch

    with torch.no_grad(), torch.autocast(device, torch.float16, enabled=half):
        (result,) = network([torch.from_numpy(image(side)).to(device)])
    return {name: result[name].cpu().numpy() for name in OUTPUTS}


def build_missing(folder: Path, arguments: argparse.Namespace) -> dict[str, Path]:
    """Return the engine of each precision, built now unless it is there."""
    stem = f"faster-rcnn-{arguments.backbone}-{arguments.side}"
    model = folder / f"{stem}.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        print(f"exporting {model}", file=sys.stderr)
        export(make_network(arguments.backbone, arguments.side), arguments.side, model)
    engines: dict[str, Path] = {}
    for precision in arguments.precisions:
        path = folder / f"{stem}-{arguments.profile}-{precision}.engine"
        engines[precision] = path
        if path.exists():
            continue
        print(f"building {path}", file=sys.stderr)
        options = _options(precision, arguments.side)
        build_engine(model, arguments.profile, path, options)
    return engines


def _options(precision: Precision, side: int) -> BuildOptions:
    """INT8 has the ranges of one method: the search for better ones takes many minutes at 800."""
    if precision != "int8":
        return BuildOptions(precision=precision)
    data = [{"image": image(side, seed=2 + at)} for at in range(CALIBRATION_IMAGES)]
    ranges = RangeOptions(method=CALIBRATION_METHOD, keep="none")
    return BuildOptions(precision=precision, data=data, ranges=ranges, accept_loss=True)


def median_ms(work: Callable[[], object], runs: int) -> float:
    """Return the median time of `work`, after two runs that are not counted."""
    times = []
    for _ in range(runs + 2):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1000)
    return statistics.median(times[2:])


def time_torch(
    arguments: argparse.Namespace, device: str, expected: Outputs
) -> list[dict[str, Any]]:
    """Return PyTorch's rows by mode: FP32 and FP16 (autocast), as it is and compiled."""
    import torch

    network = make_network(arguments.backbone, arguments.side).to(device)
    picture = torch.from_numpy(image(arguments.side)).to(device)

    def run(model: Any, half: bool) -> None:  # noqa: ANN401
        with torch.no_grad(), torch.autocast(device, torch.float16, enabled=half):
            model([picture])
        if device == "cuda":
            torch.cuda.synchronize()

    rows: list[dict[str, Any]] = []
    modes = {"eager": network}
    if arguments.compile:
        # The backbone and the head of proposals; what follows has sizes that data decide.
        network.backbone.compile()
        network.rpn.head.compile()
        modes["compile"] = network
    for name, model in modes.items():
        for half in (False, True) if device == "cuda" else (False,):
            work = lambda m=model, h=half: run(m, h)  # noqa: E731
            row = {
                "program": f"PyTorch {name}, {'FP16' if half else 'FP32'}",
                "ms": median_ms(work, arguments.runs),
            }
            actual = run_torch(model, arguments.side, device, half=half)
            rows.append({**row, **asdict(agreement(expected, actual))})
    return rows


def slowest_operations(session: Session, count: int) -> list[dict[str, Any]]:
    """Return the slowest operations of each segment on the GPU, and how many there are in all."""
    rows: list[dict[str, Any]] = []
    for report, executor in zip(session.reports, session.executors, strict=True):
        if executor.profiler is None:
            continue
        layers = executor.profiler.layer_times(LAYER_RUNS)
        phases = executor.profiler.phases(LAYER_RUNS)
        rows.append(
            {
                "segment": report.segment,
                "operations": len(layers),
                "sum_us": sum(layer.time_us for layer in layers),
                **{
                    name: statistics.median(getattr(phase, name) for phase in phases)
                    for name in ("copy_in_us", "compute_us", "copy_out_us")
                },
                "slowest": [
                    {
                        "us": layer.time_us,
                        "kernels": " ".join(layer.kernels),
                        "nodes": " ".join((*layer.nodes[:1], *layer.nodes[-1:])),
                    }
                    for layer in sorted(layers, key=lambda layer: -layer.time_us)[:count]
                ],
            }
        )
    return rows


def main() -> None:
    """Print a row for each program."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", default="h200")
    parser.add_argument("--precisions", nargs="+", default=["fp16"])
    parser.add_argument("--side", type=int, default=800)
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--compile", action="store_true", help="torch.compile, too")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="the N slowest")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    engines = build_missing(arguments.folder, arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    expected = run_torch(make_network(arguments.backbone, arguments.side), arguments.side, "cpu")
    rows: list[dict[str, Any]] = []
    for precision, path in engines.items():
        with open_session(path) as session:
            feeds, outputs = session.arrays()
            feeds["image"][...] = image(arguments.side)
            actual = session.infer(feeds, outputs)
            rows.append(
                {
                    "program": f"Tandem {precision}",
                    "ms": median_ms(lambda s=session, f=feeds: s.infer(f), arguments.runs),
                    "segments": [
                        {"segment": r.segment, "runs": r.implementation,
                         "ms": session.segment_times_ms(feeds)[r.segment]}
                        for r in session.reports
                    ],
                    **asdict(agreement(expected, actual)),
                    "kernels": slowest_operations(session, arguments.kernels)
                    if arguments.kernels else [],
                }
            )  # fmt: skip
    rows += time_torch(arguments, device, expected)
    if arguments.json:
        print(json.dumps({"device": device, "rows": rows}))
        return
    for row in rows:
        print(f"{row['program']:24} {row['ms']:9.2f} ms{_found(row)}")
        for part in row.get("segments", ()):
            print(f"    {part['segment']:20} {part['ms']:9.2f} ms  {part['runs']}")
        for part in row.get("kernels", ()):
            copies = f"{part['copy_in_us']:.0f} us in, {part['copy_out_us']:.0f} us out"
            print(
                f"  {part['segment']}: kernels {part['compute_us']:.0f} us, {part['operations']} "
                f"operations one by one {part['sum_us']:.0f} us; copies {copies}"
            )
            for one in part["slowest"]:
                print(f"    {one['us']:9.1f} us  {one['kernels']:24} {one['nodes']}")


def _found(row: Mapping[str, Any]) -> str:
    if "expected" not in row:
        return ""
    return (
        f"  {row['found']} of {row['expected']} boxes of PyTorch's FP32, scores within "
        f"{row['worst_score_difference']:.3f}, corners within "
        f"{row['worst_corner_difference']:.2f} pixels"
    )


if __name__ == "__main__":
    main()
