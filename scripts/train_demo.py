"""Train the demo detector "robot-objects" and write everything that ships with it.

    python scripts/train_demo.py       # some minutes; 64 GB of memory on the host and on the GPU
    python scripts/train_demo.py --scenes 512 --epochs 1 --batch 16 --held-out 40 --out /tmp/try

Steps: draw the scenes on all cores (`training_scenes.py`); train; export ONNX and compare it with
PyTorch; measure mAP50 on held-out scenes in FP32 and in INT8, both by ONNX Runtime; write the
model, its description, its card and the calibration and held-out pictures under `--out`.

Every random choice is seeded and PyTorch runs its deterministic algorithms: the same machine and
versions give the same weights (two short runs on a CPU did, to the byte; GPUs were not compared).
No weights are selected on the held-out scenes: they are the moving average at the last step.

The network: Conv + BatchNorm + ReLU with residual Adds, a feature pyramid up and down again, and
on each of the strides 8, 16 and 32 one branch for boxes and one for scores. A cell answers with
its distances to the four sides of an object, in strides. Cells are matched to objects by task
alignment (Feng et al., TOOD, 2021): score times IoU^6 picks the cells and grades their targets.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# cuBLAS reads it at its first call; without it, its results may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import cv2
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch program gives it
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)
from torch import Tensor, nn

from scripts.training_scenes import (
    CALIBRATION_SEED,
    HELD_OUT_SEED,
    OBJECT_SIZE,
    TRAIN_SEED,
    draw_scene,
)
from toolkit.demo.scenes.backgrounds import HELD_OUT_PHOTOGRAPHS, load_backgrounds
from toolkit.demo.scenes.canvas import MIN_VISIBLE
from toolkit.demo.scenes.moving import Scene
from toolkit.demo.scenes.objects import CLASSES

Floats = npt.NDArray[np.float32]
Image = npt.NDArray[np.uint8]

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
NAME = "robot-objects"
SIZE = 320
STRIDES = (8, 16, 32)
MOST_OBJECTS = 8  # per scene; draw_scene places at most 7
SHARD = 4096  # scenes per tensor: one tensor of all would need 64-bit indices on the GPU
CALIBRATION_PICTURES, SHIPPED_PICTURES = 64, 100
SCORE_THRESHOLD = 0.35
JPEG_QUALITY = {"calibration": 85, "heldout": 90}

# --- the network --------------------------------------------------------------------------------

# Every count is a multiple of 8 (most of 32): the widths in which tensor cores and DLA compute.
STEM = (16, 32)
STAGES = ((64, 2), (128, 2), (160, 1))  # channels, residual blocks; at strides 8, 16, 32
NECK, HEAD = 64, 32
REACH = 8.0  # strides from a cell to a side; bounds the range of `boxes`, hence its INT8 step


class ConvUnit(nn.Sequential):
    """Conv + BatchNorm + ReLU; BatchNorm disappears into the Conv on export."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03),
            nn.ReLU(inplace=True),
        )


class Residual(nn.Module):
    """Two convolutions through half the channels, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.shrink = ConvUnit(channels, channels // 2)
        self.grow = ConvUnit(channels // 2, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Keep shape [n, channels, h, w]."""
        return x + self.grow(self.shrink(x))


class Head(nn.Module):
    """Boxes and class logits of one level, through separate branches and separate last convs."""

    def __init__(self) -> None:
        super().__init__()
        self.box = nn.Sequential(ConvUnit(NECK, HEAD), nn.Conv2d(HEAD, 4, 1))
        self.score = nn.Sequential(ConvUnit(NECK, HEAD), nn.Conv2d(HEAD, len(CLASSES), 1))
        nn.init.constant_(self.box[1].bias, 2.0)  # an object of 4 by 4 cells
        nn.init.constant_(self.score[1].bias, -math.log((1 - 0.01) / 0.01))  # 1 % are objects

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map [n, NECK, h, w] to [n, 4, h, w] strides and [n, classes, h, w] logits."""
        return self.box(x), self.score(x)


class Detector(nn.Module):
    """Images float32 [n, 3, 320, 320], RGB in 0..1, to boxes and logits of every level."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            ConvUnit(3, STEM[0], stride=2), ConvUnit(STEM[0], STEM[1], stride=2), Residual(STEM[1])
        )
        widths = (STEM[1], *(channels for channels, _ in STAGES))
        self.stages = nn.ModuleList(
            nn.Sequential(
                ConvUnit(widths[i], channels, stride=2),
                *(Residual(channels) for _ in range(blocks)),
            )
            for i, (channels, blocks) in enumerate(STAGES)
        )
        self.lateral = nn.ModuleList(ConvUnit(channels, NECK, 1) for channels, _ in STAGES)
        self.fuse_down = nn.ModuleList(ConvUnit(2 * NECK, NECK) for _ in STAGES[1:])
        self.shrink = nn.ModuleList(ConvUnit(NECK, NECK, stride=2) for _ in STAGES[1:])
        self.fuse_up = nn.ModuleList(ConvUnit(2 * NECK, NECK) for _ in STAGES[1:])
        self.heads = nn.ModuleList(Head() for _ in STAGES)

    def forward(self, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (boxes [n, 4, h, w], logits [n, classes, h, w]) for strides 8, 16 and 32."""
        x, levels = self.stem(images), []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            x = stage(x)
            levels.append(lateral(x))
        for i in (1, 0):  # coarse to fine
            up = F.interpolate(levels[i + 1], scale_factor=2.0, mode="nearest")
            levels[i] = self.fuse_down[i](torch.cat([up, levels[i]], 1))
        for i in (0, 1):  # and back
            down = self.shrink[i](levels[i])
            levels[i + 1] = self.fuse_up[i](torch.cat([down, levels[i + 1]], 1))
        return [head(level) for head, level in zip(self.heads, levels, strict=True)]


class Exported(nn.Module):
    """The detector with the outputs that ship: boxes [n, 4, 2100] and scores [n, 5, 2100]."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Flatten every level row by row and join the levels."""
        boxes, scores = [], []
        for stride, (box, logit) in zip(STRIDES, self.detector(images), strict=True):
            cells = (SIZE // stride) ** 2
            boxes.append(box.reshape(-1, 4, cells))
            scores.append(torch.sigmoid(logit).reshape(-1, len(CLASSES), cells))
        return torch.cat(boxes, 2), torch.cat(scores, 2)


def cell_grid() -> tuple[Floats, Floats]:
    """Centres [2100, 2] and strides [2100, 1] of all cells, in pixels."""
    centres, strides = [], []
    for stride in STRIDES:
        steps = (np.arange(SIZE // stride, dtype=np.float32) + 0.5) * stride
        y, x = np.meshgrid(steps, steps, indexing="ij")
        centres.append(np.stack([x.ravel(), y.ravel()], axis=1))
        strides.append(np.full((x.size, 1), stride, np.float32))
    return np.concatenate(centres), np.concatenate(strides)


# --- scenes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SceneSet:
    """Images uint8 [n, 320, 320, 3] RGB; labels float32 [n, MOST_OBJECTS, 5]: class, x1..y2.

    The class of an unused row is -1.
    """

    images: Image
    labels: Floats


def _label_rows(scene: Scene) -> Floats:
    rows = np.full((MOST_OBJECTS, 5), -1, np.float32)
    for row, b in zip(rows, scene.boxes, strict=False):
        row[:] = (b.class_id, b.x1, b.y1, b.x2, b.y2)
    return rows


def draw_set(seed: int, count: int, held_out: bool, workers: int) -> SceneSet:
    """Draw scenes 0..count of a set on `workers` processes, which share one block of memory."""
    photos = load_backgrounds(CONFIGS / "scenes" / "backgrounds", held_out)
    pixels = mmap.mmap(-1, count * SIZE * SIZE * 3)
    rows = mmap.mmap(-1, count * MOST_OBJECTS * 5 * 4)
    scenes = SceneSet(
        np.frombuffer(pixels, np.uint8).reshape(count, SIZE, SIZE, 3),
        np.frombuffer(rows, np.float32).reshape(count, MOST_OBJECTS, 5),
    )

    def draw_share(first: int) -> None:
        cv2.setNumThreads(1)
        for index in range(first, count, workers):
            scene = draw_scene(seed, index, photos, SIZE)
            scenes.images[index] = scene.image[..., ::-1]
            scenes.labels[index] = _label_rows(scene)

    context = multiprocessing.get_context("fork")  # children write into the mapped memory
    started = time.perf_counter()
    children = [context.Process(target=draw_share, args=(i,)) for i in range(workers)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise RuntimeError("a process that draws scenes failed; its traceback is above")
    seconds = time.perf_counter() - started
    print(f"drew {count} scenes in {seconds:.1f} s, {count / seconds:.0f} per second", flush=True)
    return scenes


# --- training -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parameters of a training run."""

    epochs: int
    batch: int
    rate: float = 2e-3
    decay: float = 0.03
    warmup: int = 300
    average: float = 0.9995
    box_weight: float = 5.0
    range_weight: float = 0.02
    candidates: int = 10  # cells per object


def corners(distances: Tensor, centres: Tensor, strides: Tensor) -> Tensor:
    """Turn distances [..., 4] in strides into x1, y1, x2, y2 in pixels."""
    left_top, right_bottom = (distances.clamp(min=0) * strides).split(2, dim=-1)
    return torch.cat([centres - left_top, centres + right_bottom], dim=-1)


def overlaps(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and generalised IoU of boxes [..., 4] that broadcast against each other."""
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(0)
    outer = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    shared, hull = inner.prod(-1), outer.prod(-1) + 1e-6
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - shared + 1e-6
    iou = shared / union
    return iou, iou - (hull - union) / hull


@torch.no_grad()
def assign(
    scores: Tensor, boxes: Tensor, labels: Tensor, grid: tuple[Tensor, Tensor], candidates: int
) -> tuple[Tensor, Tensor]:
    """Match cells to objects by task alignment.

    `scores` [n, a, classes] and `boxes` [n, a, 4] are predictions, `labels` [n, g, 5] the truth.
    Returns the object of every cell [n, a] and its target score [n, a], 0 where there is none.
    """
    centres, strides = grid
    truth, classes = labels[:, :, None, 1:], labels[..., 0].long()
    # A sliver thinner than a cell still gets cells: it counts as at least one fine cell wide.
    middle, half = (truth[..., :2] + truth[..., 2:]) / 2, (truth[..., 2:] - truth[..., :2]) / 2
    half = half.clamp(min=STRIDES[0] * 0.55)
    inside = ((centres - middle).abs() < half).all(-1)
    reach = torch.maximum(centres - truth[..., :2], truth[..., 2:] - centres).amax(-1)
    allowed = inside & (reach < REACH * strides[:, 0]) & (classes >= 0)[..., None]
    iou = overlaps(boxes[:, None], truth)[0]
    index = classes.clamp(min=0)[..., None].expand(-1, -1, scores.shape[1])
    score = scores.transpose(1, 2).gather(1, index)
    align = score.sqrt() * iou**6 * allowed
    least = align.topk(candidates, dim=-1).values[..., -1:]
    chosen = allowed & (align >= least)
    owner = (iou * chosen - (~chosen).float()).argmax(1)
    chosen &= owner[:, None] == torch.arange(labels.shape[1], device=owner.device)[:, None]
    align, best = align * chosen, (iou * chosen).amax(-1, keepdim=True)
    grade = align / (align.amax(-1, keepdim=True) + 1e-12) * best
    return owner, grade.amax(1)


def loss_of(
    levels: Sequence[tuple[Tensor, Tensor]],
    labels: Tensor,
    grid: tuple[Tensor, Tensor],
    recipe: Recipe,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score, box and range loss of a batch."""
    raw = torch.cat([b.float().flatten(2) for b, _ in levels], 2).transpose(1, 2)
    logits = torch.cat([s.float().flatten(2) for _, s in levels], 2).transpose(1, 2)
    boxes = corners(raw, *grid)
    owner, grade = assign(
        logits.detach().sigmoid(), boxes.detach(), labels, grid, recipe.candidates
    )
    truth = labels.gather(1, owner[..., None].expand(-1, -1, 5))
    target = F.one_hot(truth[..., 0].long().clamp(min=0), len(CLASSES)) * grade[..., None]
    total = grade.sum().clamp(min=1)
    score_loss = F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / total
    box_loss = ((1 - overlaps(boxes, truth[..., 1:])[1]) * grade).sum() / total
    # Cells without an object are free to say anything, and min-max calibration would believe them.
    spill = F.relu(raw - REACH) + F.relu(-raw)
    return score_loss, recipe.box_weight * box_loss, recipe.range_weight * spill.square().mean()


def augment(images: Tensor, labels: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mirror half of the batch and change its gain: uint8 [n, h, w, 3] to float [n, 3, h, w]."""
    mirrored = torch.rand(len(images), generator=source, device=images.device) < 0.5
    gain = 1 + 0.5 * (
        torch.rand((len(images), 3, 1, 1), generator=source, device=images.device) - 0.5
    )
    x = images.permute(0, 3, 1, 2).float() / 255
    x = torch.where(mirrored[:, None, None, None], x.flip(3), x) * gain
    flipped = torch.stack(
        [
            labels[..., 0],
            SIZE - labels[..., 3],
            labels[..., 2],
            SIZE - labels[..., 1],
            labels[..., 4],
        ],
        -1,
    )
    x = x.clamp(0, 1).contiguous(memory_format=torch.channels_last)
    return x, torch.where(mirrored[:, None, None], flipped, labels)


def batches(
    shards: Sequence[tuple[Tensor, Tensor]], size: int, source: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch: shards in random order, the scenes of each in random order, whole batches."""
    for i in torch.randperm(len(shards), generator=source, device=source.device).tolist():
        images, labels = shards[i]
        order = torch.randperm(len(images), generator=source, device=source.device)
        for chosen in order.split(size):
            if len(chosen) == size:
                yield augment(images[chosen], labels[chosen], source)


def update_average(average: nn.Module, model: nn.Module, step: int, decay: float) -> None:
    """Move the average towards the model, faster in the first steps."""
    keep = min(decay, (1 + step) / (10 + step))
    state = model.state_dict()
    for name, averaged in average.state_dict().items():
        if averaged.dtype.is_floating_point:
            averaged.lerp_(state[name], 1 - keep)
        else:
            averaged.copy_(state[name])


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Decay the weights of convolutions only."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": weights, "weight_decay": recipe.decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.99))


def schedule(step: int, steps: int, warmup: int) -> float:
    """Rise linearly, then fall along a cosine to 1 %."""
    rise = min(1.0, (step + 1) / warmup)
    return rise * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0))))


def train(scenes: SceneSet, recipe: Recipe, device: torch.device) -> Detector:
    """Train from random weights and return the moving average, on the CPU, for inference."""
    torch.manual_seed(0)
    source = torch.Generator(device).manual_seed(0)
    model = Detector().to(device, memory_format=torch.channels_last).train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    pieces = range(0, len(scenes.images), SHARD)
    shards = [
        tuple(torch.from_numpy(a[i : i + SHARD]).to(device) for a in (scenes.images, scenes.labels))
        for i in pieces
    ]
    grid = tuple(torch.from_numpy(a).to(device) for a in cell_grid())
    steps = recipe.epochs * sum(len(images) // recipe.batch for images, _ in shards)
    optimizer, step, started = make_optimizer(model, recipe), 0, time.perf_counter()
    for epoch in range(recipe.epochs):
        sums = torch.zeros(3, device=device)
        for images, labels in batches(shards, recipe.batch, source):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * schedule(
                    step, steps, min(recipe.warmup, steps // 4 + 1)
                )
            with torch.autocast(device.type, torch.bfloat16):
                levels = model(images)
            losses = torch.stack(loss_of(levels, labels, grid, recipe))
            optimizer.zero_grad(set_to_none=True)
            losses.sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            update_average(average, model, step, recipe.average)
            sums += losses.detach()
            step += 1
        score, box, spill = (sums / max(steps // recipe.epochs, 1)).tolist()
        print(
            f"epoch {epoch + 1}/{recipe.epochs}: score {score:.3f}, box {box:.3f}, "
            f"range {spill:.4f}, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    return average.cpu()


# --- measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageDetections:
    """Detections of one image: classes [k], scores [k], boxes [k, 4] in pixels."""

    classes: npt.NDArray[np.int64]
    scores: Floats
    boxes: Floats


def box_iou(a: Floats, b: Floats) -> Floats:
    """IoU [n, m] of boxes [n, 4] and [m, 4]."""
    low, high = (
        np.maximum(a[:, None, :2], b[None, :, :2]),
        np.minimum(a[:, None, 2:], b[None, :, 2:]),
    )
    shared = np.clip(high - low, 0, None).prod(-1)
    area_a, area_b = (a[:, 2:] - a[:, :2]).prod(-1), (b[:, 2:] - b[:, :2]).prod(-1)
    return np.asarray(shared / (area_a[:, None] + area_b[None] - shared + 1e-9), np.float32)


def decode(boxes: Floats, scores: Floats, threshold: float) -> ImageDetections:
    """Post-process one picture's boxes [4, a] and scores [classes, a]: threshold, then NMS 0.5."""
    centres, strides = cell_grid()
    classes, cells = np.nonzero(scores > threshold)
    order = np.argsort(-scores[classes, cells], kind="stable")[:1000]
    classes, cells = classes[order], cells[order]
    reach = np.maximum(boxes.T[cells], 0) * strides[cells]
    box = np.concatenate([centres[cells] - reach[:, :2], centres[cells] + reach[:, 2:]], axis=1)
    clash = (box_iou(box, box) > 0.5) & (classes[:, None] == classes[None])
    alive = np.ones(len(order), np.bool_)
    for i in range(len(order)):
        if alive[i]:
            alive[i + 1 :] &= ~clash[i, i + 1 :]
    picked = np.flatnonzero(alive)[:100]
    return ImageDetections(classes[picked], scores[classes[picked], cells[picked]], box[picked])


def average_precision(
    detections: Sequence[ImageDetections], labels: Floats, class_id: int
) -> float:
    """Area under the precision-recall curve of one class at IoU 0.5, all points."""
    rows: list[tuple[float, bool]] = []
    for image_detections, truth in zip(detections, labels, strict=True):
        of_class = image_detections.classes == class_id
        actual = truth[truth[:, 0] == class_id, 1:]
        free = np.ones(len(actual), np.bool_)
        order = np.argsort(-image_detections.scores[of_class], kind="stable")
        for box, score in zip(
            image_detections.boxes[of_class][order],
            image_detections.scores[of_class][order],
            strict=True,
        ):
            iou = box_iou(box[None], actual)[0] * free
            hit = bool(len(iou)) and float(iou.max()) >= 0.5
            if hit:
                free[int(iou.argmax())] = False
            rows.append((float(score), hit))
    hits = np.array([hit for _, hit in sorted(rows, key=lambda row: -row[0])], np.float64)
    recall = np.cumsum(hits) / max(np.count_nonzero(labels[..., 0] == class_id), 1)
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * envelope))


def precisions(detections: Sequence[ImageDetections], scenes: SceneSet) -> list[float]:
    """Average precision of every class."""
    return [average_precision(detections, scenes.labels, c) for c in range(len(CLASSES))]


def operating_point(detections: Sequence[ImageDetections], labels: Floats) -> tuple[float, float]:
    """Precision and recall at the score threshold that ships."""
    hits, claims = 0, 0
    for image_detections, truth in zip(detections, labels, strict=True):
        confident = image_detections.scores > SCORE_THRESHOLD
        claims += int(np.count_nonzero(confident))
        same = image_detections.classes[confident][:, None] == truth[None, :, 0]
        hits += int(
            np.any(
                same & (box_iou(image_detections.boxes[confident], truth[:, 1:]) >= 0.5), 0
            ).sum()
        )
    return hits / max(claims, 1), hits / max(int(np.count_nonzero(labels[..., 0] >= 0)), 1)


def detect(model: Path, scenes: SceneSet) -> list[ImageDetections]:
    """Run an ONNX model with ONNX Runtime over a scene set, down to a score of 0.01."""
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    detections = []
    for image in scenes.images:
        boxes, scores = session.run(["boxes", "scores"], {"images": to_input(image)})
        detections.append(decode(boxes[0], scores[0], 0.01))
    return detections


def measure(model: Path, scenes: SceneSet) -> list[float]:
    """Average precision of every class over a scene set."""
    return precisions(detect(model, scenes), scenes)


def to_input(image: Image) -> Floats:
    """RGB uint8 [320, 320, 3] to float32 [1, 3, 320, 320] in 0..1."""
    return np.ascontiguousarray(image.transpose(2, 0, 1)[None].astype(np.float32) / 255)


class _Pictures(CalibrationDataReader):
    def __init__(self, images: Image) -> None:
        self._inputs = iter([{"images": to_input(image)} for image in images])

    def get_next(self) -> dict[str, Floats] | None:
        return next(self._inputs, None)


def quantise(model: Path, quantised: Path, calibration: SceneSet) -> None:
    """Write a simple INT8 model: symmetric, min-max, weights per channel."""
    quantize_static(
        str(model),
        str(quantised),
        _Pictures(calibration.images),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.MinMax,
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
    )


# --- what ships ---------------------------------------------------------------------------------

DESCRIPTION = f"""\
name = "{NAME}"
file = "{NAME}.onnx"
labels = "{NAME}.labels.txt"
calibration = "../scenes/calibration"

[preprocess]
width = {SIZE}
height = {SIZE}
resize = "letterbox"          # or "stretch"
color = "rgb"                 # channel order that the network wants
scale = 0.00392156862745098   # value = (pixel * scale - mean) / std
mean = [0.0, 0.0, 0.0]
std = [1.0, 1.0, 1.0]
pad_value = 114               # letterbox border, in pixel units

[decode]
kind = "ltrb_grid"
boxes = "boxes"
scores = "scores"
strides = [8, 16, 32]
score_threshold = {SCORE_THRESHOLD}
iou_threshold = 0.5
max_detections = 100
"""

CARD = """\
# robot-objects

A small one-stage detector of five things that a robot meets: {classes}.
It ships so that every part of Tandem can be tried without a download. Its objects are drawn, not
photographed: it is a demo, not a product.

## Interface
* `images` float32 [1, 3, 320, 320]: RGB in 0..1, letterboxed with grey 114.
* `boxes` float32 [1, 4, 2100]: left, top, right, bottom distances from the centre of a cell, in
  strides; the decoder clamps them at 0. Cells go level by level (40x40, 20x20, 10x10), row by
  row; the centre of a cell is at (i + 0.5) strides.
* `scores` float32 [1, 5, 2100]: a probability per class. The threshold and the NMS per class
  (IoU 0.5) are the decoder's.

Conv (BatchNorm folded), ReLU, Add, Concat on channels and nearest 2x Resize; Sigmoid, Reshape and
Concat at the outputs. {parameters:,} parameters, {size:.2f} MB, ONNX opset {opset}.

## Data
{scenes:,} scenes drawn by `scripts/training_scenes.py` (seed {train_seed}) over {photographs}
photographs of `configs/scenes/backgrounds`: all but {held_out}. Held-out scenes
(seed {held_out_seed}) are drawn over those three only, so neither their objects nor their
backgrounds were seen in training.
No weights were selected on them: these are the moving average at the last step. The generator was:
an earlier model took too many things in these three photographs for objects, and the clutter in the
scenes was made richer for it.

## Measured
mAP50 (all-point average precision at IoU 0.5, ONNX Runtime on a CPU) over {pictures} held-out
scenes with {objects} objects:

| | {header} | all |
|---|{rule}---|
| FP32 | {fp32} |
| INT8 | {int8} |

At the score threshold that ships, {threshold}, FP32 has precision {precision:.3f} and recall
{recall:.3f}.

INT8 here is the plain static quantisation of ONNX Runtime: symmetric, min-max over the
{calibration} pictures of `configs/scenes/calibration`, one scale per activation tensor and per
weight channel. Over the {shipped} held-out pictures that ship (`configs/scenes/heldout`, saved as
JPEG once more) mAP50 is {shipped_fp32:.3f} in FP32 and {shipped_int8:.3f} in INT8.

## Training
`python scripts/train_demo.py --scenes {scenes} --epochs {epochs} --batch {batch}` on one {device}:
{drawing:.1f} minutes to draw the scenes on {workers} CPU cores, {minutes:.1f} minutes to train
in bfloat16 autocast with PyTorch {torch}. Every random choice is seeded.

## Limits
* The objects are synthetic. Real cones, balls, boxes, wheels and fiducials will be found less
  well; how much less was not measured.
* Objects were drawn {smallest:.0f} to {largest:.0f} pixels long in pictures of 320; other sizes
  were never shown. Objects of which less than {visible:.0%} can be seen carry no label.
* {photographs} photographs are few: unusual surroundings may give false detections.
"""


def export(model: Detector, path: Path) -> float:
    """Write ONNX and return the largest difference of its outputs from PyTorch's."""
    network = Exported(model.to(memory_format=torch.contiguous_format)).eval()
    example = torch.rand(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    torch.onnx.export(
        network,
        (example,),
        str(path),
        input_names=["images"],
        output_names=["boxes", "scores"],
        opset_version=17,
        dynamo=False,
    )
    onnx.checker.check_model(onnx.load(str(path)), full_check=True)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    onnx_outputs = session.run(["boxes", "scores"], {"images": example.numpy()})
    with torch.no_grad():
        torch_outputs = network(example)
    worst = max(
        float(np.abs(g - w.numpy()).max()) for g, w in zip(onnx_outputs, torch_outputs, strict=True)
    )
    if worst > 1e-4:
        raise RuntimeError(f"{path}: ONNX differs from PyTorch by {worst:.2e}, more than 1e-4")
    return worst


def write_pictures(folder: Path, scenes: SceneSet, count: int) -> SceneSet:
    """Save the first `count` scenes as JPEG and return them as a reader will see them."""
    folder.mkdir(parents=True, exist_ok=True)
    quality, seen = JPEG_QUALITY[folder.name], []
    for index, image in enumerate(scenes.images[:count]):
        path = str(folder / f"{index:03d}.jpg")
        cv2.imwrite(path, image[..., ::-1], (cv2.IMWRITE_JPEG_QUALITY, quality))
        seen.append(np.asarray(cv2.imread(path, cv2.IMREAD_COLOR), np.uint8)[..., ::-1])
    return SceneSet(np.stack(seen), scenes.labels[:count])


def write_truth(path: Path, scenes: SceneSet) -> None:
    """Save the labels of the shipped held-out pictures as JSON."""
    pictures = [
        {
            "file": f"heldout/{index:03d}.jpg",
            "boxes": [
                {"label": CLASSES[int(row[0])], "box": row[1:].tolist()}
                for row in rows
                if row[0] >= 0
            ],
        }
        for index, rows in enumerate(scenes.labels)
    ]
    lines = ",\n".join(json.dumps(picture) for picture in pictures)
    path.write_text(f'{{"classes": {json.dumps(CLASSES)}, "pictures": [\n{lines}\n]}}\n')


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the demo detector robot-objects.")
    parser.add_argument("--scenes", type=int, default=131072, help="training scenes to draw")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--held-out", type=int, default=500, help="held-out scenes to measure on")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=CONFIGS, help="where models/ and scenes/ go")
    return parser.parse_args()


def row(precisions: Sequence[float]) -> str:
    """Format one line of the card's table: every class, then the mean."""
    return " | ".join(f"{p:.3f}" for p in (*precisions, float(np.mean(precisions))))


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a run: average precision of every class, and minutes."""

    fp32: list[float]
    int8: list[float]
    shipped_fp32: list[float]
    shipped_int8: list[float]
    precision: float
    recall: float
    drawing: float
    training: float


def measure_all(
    path: Path,
    calibration: SceneSet,
    held_out: SceneSet,
    shipped: SceneSet,
    minutes: tuple[float, float],
) -> Measured:
    """Measure the exported model in FP32 and INT8 on both held-out sets."""
    detections = detect(path, held_out)
    precision, recall = operating_point(detections, held_out.labels)
    fp32 = precisions(detections, held_out)
    shipped_fp32 = measure(path, shipped)
    print(f"FP32: {' '.join(CLASSES)} all: {row(fp32)}", flush=True)
    print(f"precision {precision:.3f}, recall {recall:.3f} at {SCORE_THRESHOLD}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        quantised = Path(folder) / "int8.onnx"
        quantise(path, quantised, calibration)
        int8, shipped_int8 = measure(quantised, held_out), measure(quantised, shipped)
    print(f"INT8: {' '.join(CLASSES)} all: {row(int8)}", flush=True)
    return Measured(fp32, int8, shipped_fp32, shipped_int8, precision, recall, *minutes)


def write_card(
    path: Path, args: argparse.Namespace, held_out: SceneSet, shipped: SceneSet, measured: Measured
) -> None:
    """Fill the model card with the parameters and results of this run."""
    model = onnx.load(str(path))
    card = CARD.format(
        classes=", ".join(CLASSES),
        parameters=sum(math.prod(w.dims) for w in model.graph.initializer if len(w.dims) in (1, 4)),
        size=path.stat().st_size / 1e6,
        opset=model.opset_import[0].version,
        scenes=args.scenes,
        train_seed=TRAIN_SEED,
        photographs=len(load_backgrounds(CONFIGS / "scenes" / "backgrounds", held_out=False)),
        held_out=", ".join(f"`{name}`" for name in HELD_OUT_PHOTOGRAPHS),
        held_out_seed=HELD_OUT_SEED,
        pictures=args.held_out,
        objects=int(np.count_nonzero(held_out.labels[..., 0] >= 0)),
        header=" | ".join(CLASSES),
        rule="---|" * len(CLASSES),
        fp32=row(measured.fp32),
        int8=row(measured.int8),
        calibration=CALIBRATION_PICTURES,
        shipped=len(shipped.images),
        shipped_fp32=float(np.mean(measured.shipped_fp32)),
        shipped_int8=float(np.mean(measured.shipped_int8)),
        threshold=SCORE_THRESHOLD,
        precision=measured.precision,
        recall=measured.recall,
        epochs=args.epochs,
        batch=args.batch,
        device=torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU",
        workers=args.workers,
        drawing=measured.drawing,
        minutes=measured.training,
        torch=torch.__version__,
        smallest=OBJECT_SIZE[0],
        largest=OBJECT_SIZE[1],
        visible=MIN_VISIBLE,
    )
    path.with_suffix(".md").write_text(card)


def main() -> None:
    """Draw, train, export, measure, write."""
    args = parse()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    models, pictures = args.out / "models", args.out / "scenes"
    models.mkdir(parents=True, exist_ok=True)
    drawn = draw_set(CALIBRATION_SEED, CALIBRATION_PICTURES, False, args.workers)
    calibration = write_pictures(pictures / "calibration", drawn, CALIBRATION_PICTURES)
    held_out = draw_set(HELD_OUT_SEED, args.held_out, True, args.workers)
    shipped = write_pictures(pictures / "heldout", held_out, min(SHIPPED_PICTURES, args.held_out))
    write_truth(pictures / "heldout.json", shipped)
    clock = [time.perf_counter()]
    scenes = draw_set(TRAIN_SEED, args.scenes, False, args.workers)
    clock.append(time.perf_counter())
    model = train(scenes, Recipe(args.epochs, args.batch), torch.device(args.device))
    clock.append(time.perf_counter())
    path = models / f"{NAME}.onnx"
    print(f"ONNX and PyTorch differ by {export(model, path):.1e}", flush=True)
    path.with_suffix(".labels.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    path.with_suffix(".toml").write_text(DESCRIPTION)
    minutes = ((clock[1] - clock[0]) / 60, (clock[2] - clock[1]) / 60)
    measured = measure_all(path, calibration, held_out, shipped, minutes)
    write_card(path, args, held_out, shipped, measured)


if __name__ == "__main__":
    main()
