"""Time decoders from outputs of a network to results: python -m scripts.bench_decoders [--json].

Outputs are random, with about 60 objects above the threshold as in a busy frame; each figure is the
median of `--runs` frames on one core.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import (
    DecodeConfig,
    Detr,
    Segmentation,
    UltralyticsDetect,
    UltralyticsObb,
    UltralyticsPose,
    UltralyticsSegment,
    Yolov5,
)
from pipelines.stages.decode import View, decode, view_of
from pipelines.stages.preprocess import fit
from pipelines.vision import cv2

CELLS, SIDE, OBJECTS = 8400, 640, 60
GOAL_MS = {"ultralytics_detect": 0.43}  # whole post-processing, 84 x 8400

Outputs = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Case:
    """A decoder and outputs for it."""

    name: str
    config: DecodeConfig
    make: Callable[[np.random.Generator], Outputs]


def _scores(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Random scores below the threshold, but for OBJECTS cells (the last axis)."""
    scores = rng.uniform(0.0, 0.2, shape).astype(np.float32)
    cells = rng.choice(shape[-1], OBJECTS, replace=False)
    scores[rng.integers(0, shape[0], OBJECTS), cells] = rng.uniform(0.3, 0.95, OBJECTS)
    return scores


def _head(rng: np.random.Generator, classes: int, extras: int) -> NDArray[np.float32]:
    centres = rng.uniform(40, SIDE - 40, (2, CELLS))
    sides = rng.uniform(20, 80, (2, CELLS))
    rest = rng.normal(size=(extras, CELLS))
    return np.concatenate([centres, sides, _scores(rng, classes, CELLS), rest])[None].astype(
        np.float32
    )


def _yolov5(rng: np.random.Generator) -> Outputs:
    rows = rng.uniform(0.0, 1.0, (25200, 85)).astype(np.float32)
    rows[:, :2], rows[:, 2:4] = rng.uniform(40, 600, (25200, 2)), rng.uniform(20, 80, (25200, 2))
    rows[:, 4] = _scores(rng, 1, 25200)[0]
    return {"output0": rows[None]}


def _detr(rng: np.random.Generator) -> Outputs:
    logits = rng.normal(-4.0, 1.0, (1, 300, 80)).astype(np.float32)
    logits[0, :OBJECTS, 0] = 2.0
    return {"logits": logits, "pred_boxes": rng.uniform(0.2, 0.6, (1, 300, 4)).astype(np.float32)}


CASES = (
    Case("ultralytics_detect", UltralyticsDetect(), lambda rng: {"output0": _head(rng, 80, 0)}),
    Case(
        "ultralytics_segment",
        UltralyticsSegment(),
        lambda rng: {
            "output0": _head(rng, 80, 32),
            "output1": rng.normal(size=(1, 32, 160, 160)).astype(np.float32),
        },
    ),
    Case("ultralytics_pose", UltralyticsPose(), lambda rng: {"output0": _head(rng, 1, 51)}),
    Case("ultralytics_obb", UltralyticsObb(), lambda rng: {"output0": _head(rng, 15, 1)}),
    Case("yolov5", Yolov5(), _yolov5),
    Case("detr", Detr(), _detr),
    Case(
        "segmentation",
        Segmentation(output="o"),
        lambda rng: {"o": rng.normal(size=(1, 21, 320, 320)).astype(np.float32)},
    ),
)


def measure(case: Case, view: View, runs: int) -> tuple[float, int]:
    """Return the median time of a frame in ms and the number of results in the last one."""
    outputs = case.make(np.random.default_rng(0))
    times, decoded = [], None
    for _ in range(runs + 5):
        begin = time.perf_counter()
        decoded = decode(outputs, case.config, view)
        times.append(time.perf_counter() - begin)
    scores: Any = getattr(decoded, "scores", ())
    return median(times[5:]) * 1e3, len(scores)


def main() -> None:
    """Time every case and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=200, help="frames of each case")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    preprocess = PreprocessConfig(width=SIDE, height=SIDE)
    view = view_of(fit(1080, 1920, preprocess), (1080, 1920, 3), preprocess)
    rows = []
    for case in CASES:
        time_ms, count = measure(case, view, arguments.runs)
        rows.append({"decoder": case.name, "ms": round(time_ms, 3), "results": count,
                     "goal_ms": GOAL_MS.get(case.name)})  # fmt: skip
        if not arguments.json:
            goal = f", goal {GOAL_MS[case.name]}" if case.name in GOAL_MS else ""
            print(f"{case.name:20} {time_ms:7.3f} ms, {count} results{goal}", flush=True)
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
