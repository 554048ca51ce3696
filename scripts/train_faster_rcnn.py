"""Train Faster R-CNN on generated pictures, and compare Tandem's builds with PyTorch's own runs.

    python -m scripts.train_faster_rcnn FOLDER [--seconds 150] [--side 800] [--profile h200]
        [--precisions fp16 int8] [--runs 50] [--data 12] [--tests 24] [--json]

With random weights a detector's scores say little of what INT8 loses. This one learns coloured
shapes (scripts/networks/shape_scenes.py) from random weights until it finds most of them: minutes
on a GPU. Then it is exported, built with the default search, and run beside PyTorch in FP16: time,
boxes, scores, and which nodes are not where they could be, with the reason.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from device.engine.manifest import Manifest
from device.errors import TandemError
from device.session import open_session
from scripts.networks.faster_rcnn import OUTPUTS, export, image
from scripts.networks.shape_scenes import CLASSES, Scene, scene
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.quantize.loss.judge import loss_text
from toolkit.quantize.ranges.data import Source

TRAIN_SEED, TEST_SEED, DATA_SEED = 1, 2, 3
BATCH = 8
PEAK_RATE = 3e-4  # of AdamW
WARM_UP = 0.05  # of the time
MIN_SCORE = 0.5  # of the detections that are compared and counted
IOUS = (0.5, 0.9)
Outputs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Agreement:
    """Detections of PyTorch that another run has, too: the same class, IoU of `iou` or more."""

    expected: int
    found: int
    worst_score_difference: float
    worst_corner_difference: float


def agreement(expected: Outputs, actual: Outputs, iou: float = IOUS[-1]) -> Agreement:
    """Compare detections, each of `actual` used once, best first. Corners in pixels."""
    free = list(range(len(actual["scores"])))
    score_differences, corner_differences = [0.0], [0.0]
    count = 0
    for box, label, score in zip(*(expected[name] for name in OUTPUTS), strict=True):
        overlaps = [
            _iou(box, actual["boxes"][at]) if actual["labels"][at] == label else 0.0 for at in free
        ]
        if not overlaps or max(overlaps) < iou:
            continue
        at = free.pop(int(np.argmax(overlaps)))
        count += 1
        score_differences.append(abs(float(score) - float(actual["scores"][at])))
        corner_differences.append(float(np.abs(box - actual["boxes"][at]).max()))
    return Agreement(
        len(expected["scores"]), count, max(score_differences), max(corner_differences)
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


def median_ms(work: Callable[[], object], runs: int) -> float:
    """Return the median time of `work`, after two runs that are not counted."""
    times = []
    for _ in range(runs + 2):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1000)
    return statistics.median(times[2:])


@dataclass(frozen=True, slots=True)
class Training:
    """What a training came to; the loss is that of one of its last batches."""

    steps: int
    seconds: float
    loss: float


@dataclass(frozen=True, slots=True)
class Match:
    """Detections of PyTorch in FP32 that a run has, too, by IoU, over all test scenes.

    `truth`: share of the shapes that it finds at IoU 0.5. `extra`: its detections beyond those.
    """

    expected: int
    found: Mapping[float, int]
    extra: int
    worst_score_difference: float
    truth: float


def make_detector(backbone: str = "resnet50", side: int = 800) -> Any:  # noqa: ANN401
    """Return torchvision's detector of CLASSES with random weights and BatchNorm."""
    import torch

    from scripts.torchvision_operators import import_torchvision

    import_torchvision()
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    torch.manual_seed(0)
    features = resnet_fpn_backbone(
        backbone_name=backbone, weights=None, norm_layer=torch.nn.BatchNorm2d, trainable_layers=5
    )
    return FasterRCNN(features, num_classes=1 + len(CLASSES), min_size=side, max_size=side)


def scenes(side: int, count: int, seed: int, device: str) -> list[Scene]:
    """Return `count` scenes, the same for each seed and kind of device."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    return [scene(side, generator) for _ in range(count)]


def train(network: Any, side: int, device: str, seconds: float, batch: int = BATCH) -> Training:  # noqa: ANN401
    """Train for a time, with a warm-up and a cosine decay of the rate; leave it in evaluation."""
    import torch

    network.to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=PEAK_RATE, weight_decay=1e-3)
    generator = torch.Generator(device).manual_seed(TRAIN_SEED)
    begin, steps, latest = time.monotonic(), 0, 0.0
    while steps == 0 or time.monotonic() - begin < seconds:
        done = min((time.monotonic() - begin) / max(seconds, 1e-9), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * _rate(done)
        drawn = [scene(side, generator) for _ in range(batch)]
        pictures = [one.picture for one in drawn]
        targets = [{"boxes": one.boxes, "labels": one.labels} for one in drawn]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = sum(network(pictures, targets).values())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimizer.step()
        steps += 1
        if steps % 50 == 1:
            latest = float(loss.detach())
            _say(f"step {steps}, {time.monotonic() - begin:.0f} s, loss {latest:.3f}")
    spent = time.monotonic() - begin
    network.eval()
    return Training(steps, spent, latest)


def _rate(done: float) -> float:
    """Return the learning rate at a share of the time, in units of the peak."""
    if done < WARM_UP:
        return (done + 1e-3) / WARM_UP
    return 0.5 * (1 + float(np.cos(np.pi * (done - WARM_UP) / (1 - WARM_UP)))) + 1e-3


def _torch_runs(
    network: Any,  # noqa: ANN401
    tests: Sequence[Scene],
    device: str,
    *,
    half: bool,
) -> Iterator[Outputs]:
    """Yield PyTorch's detections in each scene; `half`: with autocast to FP16."""
    import torch

    for one in tests:
        with torch.no_grad(), torch.autocast(device, torch.float16, enabled=half):
            (result,) = network([one.picture])
        yield {name: result[name].float().cpu().numpy() for name in OUTPUTS}


def confident(outputs: Outputs) -> Outputs:
    """Return the detections with a score of MIN_SCORE or more."""
    keep = np.asarray(outputs["scores"]) >= MIN_SCORE
    return {name: np.asarray(outputs[name])[keep] for name in OUTPUTS}


def matched(
    tests: Sequence[Scene], expected: Sequence[Outputs], actual: Sequence[Outputs]
) -> Match:
    """Compare the confident detections of all scenes with PyTorch's.

    A box that PyTorch has with MIN_SCORE or more is found if the run has it with any score.
    """
    matched = dict.fromkeys(IOUS, 0)
    total, worst, extra = 0, 0.0, 0
    for exact, outputs in zip(expected, actual, strict=True):
        reference = confident(exact)
        total += len(reference["scores"])
        for iou in IOUS:
            same = agreement(reference, outputs, iou)
            matched[iou] += same.found
            if iou == IOUS[0]:
                worst = max(worst, same.worst_score_difference)
        detections = confident(outputs)
        extra += len(detections["scores"]) - agreement(detections, exact, IOUS[0]).found
    return Match(total, matched, extra, worst, _truth_found(tests, actual))


def _truth_found(tests: Sequence[Scene], actual: Sequence[Outputs]) -> float:
    """Return the share of the shapes that are found with MIN_SCORE or more and IoU 0.5 or more."""
    total = count = 0
    for one, outputs in zip(tests, actual, strict=True):
        truth = {
            "boxes": one.boxes.cpu().numpy(),
            "labels": one.labels.cpu().numpy(),
            "scores": np.ones(len(one.labels), np.float32),
        }
        total += len(truth["scores"])
        count += agreement(truth, confident(outputs), IOUS[0]).found
    return count / max(total, 1)


def run_engine(path: Path, tests: Sequence[Scene], runs: int) -> dict[str, Any]:
    """Return the time, the segments and the detections of an engine in each scene."""
    with open_session(path) as session:
        feeds, outputs = session.arrays()
        actual = []
        for one in tests:
            feeds["image"][...] = one.picture.cpu().numpy()
            actual.append({n: a.copy() for n, a in session.infer(feeds, outputs).items()})
        time_ms = median_ms(lambda: session.infer(feeds, outputs), runs)
        times_ms = session.segment_times_ms(feeds)
        segments = [
            {"segment": r.segment, "runs": r.implementation, "ms": times_ms[r.segment]}
            for r in session.reports
        ]
    return {"ms": time_ms, "segments": segments, "actual": actual}


def not_on_gpu(manifest: Manifest) -> dict[str, int]:
    """Return how many nodes run on the CPU, by operator and reason."""
    rows = Counter(
        f"{row.op}: {row.reason}" for row in manifest.plan if row.processor not in ("gpu", "dla")
    )
    return dict(rows.most_common())


def build(model: Path, precision: Any, profile: str, data: Source) -> BuildResult:  # noqa: ANN401
    """Build with the default search; INT8 calibrates on `data`.

    An engine that loses too much is built all the same; the row says so. Raises TandemError.
    """
    out = model.with_name(f"{model.stem}-{precision}.engine")
    begin, step = time.monotonic(), ""

    def report(name: str, share: float) -> None:
        nonlocal step
        if name != step:
            step = name
            _say(f"{precision}: {time.monotonic() - begin:6.1f} s {name}")

    options = BuildOptions(
        precision=precision, data=data if precision == "int8" else None, accept_loss=True
    )
    return build_engine(model, profile, out, options, report)


def compare(
    arguments: argparse.Namespace,
    network: Any,  # noqa: ANN401
    device: str,
) -> list[dict[str, Any]]:
    """Return a row for PyTorch FP16 and for each build."""
    import torch

    tests = scenes(arguments.side, arguments.tests, TEST_SEED, device)
    expected = list(_torch_runs(network, tests, device, half=False))
    rows: list[dict[str, Any]] = []
    for half in (False, True) if device == "cuda" else (False,):
        actual = list(_torch_runs(network, tests, device, half=half))

        def work(half: bool = half) -> None:
            with torch.no_grad(), torch.autocast(device, torch.float16, enabled=half):
                network([tests[-1].picture])
            if device == "cuda":
                torch.cuda.synchronize()

        name = "PyTorch FP16 (autocast)" if half else "PyTorch FP32"
        row = {"program": name, "ms": median_ms(work, arguments.runs)}
        rows.append({**row, **asdict(matched(tests, expected, actual))})
        _say(row_text(rows[-1]))
    model = arguments.folder / "trained.onnx"
    export(network.cpu(), arguments.side, model)
    learn = scenes(arguments.side, arguments.data, DATA_SEED, device)
    data = [{"image": one.picture.cpu().numpy()} for one in learn]
    for precision in arguments.precisions:
        begin = time.monotonic()
        try:
            result = build(model, precision, arguments.profile, data)
        except TandemError as error:
            rows.append({"program": f"Tandem {precision}", "problem": str(error)})
            continue
        build_s = time.monotonic() - begin
        ran = run_engine(result.path, tests, arguments.runs)
        rows.append(
            {
                "program": f"Tandem {precision}",
                "ms": ran["ms"],
                **asdict(matched(tests, expected, ran["actual"])),
                "build_s": build_s,
                "segments": ran["segments"],
                "cpu": not_on_gpu(result.manifest),
                "kept": len(result.kept),
                "refused": [loss_text(loss) for loss in result.loss.broken] if result.loss else [],
                "report": result.report,
            }
        )
        _say(row_text(rows[-1]))
    return rows


def main() -> int:
    """Train, build, and print a row for each program."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="of training")
    parser.add_argument("--side", type=int, default=800)
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--profile", default="h200")
    parser.add_argument("--precisions", nargs="*", default=["fp16", "int8"])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--data", type=int, default=12, help="scenes to calibrate on")
    parser.add_argument("--tests", type=int, default=24, help="scenes that are compared")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = make_detector(arguments.backbone, arguments.side)
    training = train(network, arguments.side, device, arguments.seconds)
    _say(f"trained: {training}")
    rows = compare(arguments, network, device)
    if arguments.json:
        print(json.dumps({"device": device, "training": asdict(training), "rows": rows}))
        return 0
    for row in rows:
        print(row_text(row))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def row_text(row: Mapping[str, Any]) -> str:
    """Return a row as text."""
    if "problem" in row:
        return f"{row['program']:24} {row['problem']}"
    matched = ", ".join(f"{count} at IoU {iou:g}" for iou, count in row["found"].items())
    lines = [
        f"{row['program']:24} {row['ms']:8.2f} ms  of {row['expected']} boxes of PyTorch's FP32 "
        f"{matched}; {row['extra']} others; scores within {row['worst_score_difference']:.3f}; "
        f"finds {100 * row['truth']:.1f} % of the shapes"
    ]
    for part in row.get("segments", ()):
        lines.append(f"    {part['segment']:20} {part['ms']:9.2f} ms  {part['runs']}")
    if "build_s" in row:
        lines.append(f"    built in {row['build_s']:.0f} s, {row['kept']} nodes kept in FP16")
    for loss in row.get("refused", ()):
        lines.append(f"    a build without --accept-loss refuses it: {loss}")
    for reason, count in row.get("cpu", {}).items():
        lines.append(f"    {count:4} on the CPU, {reason}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
