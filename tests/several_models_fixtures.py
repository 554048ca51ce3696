"""Pipelines of several models: a detector of squares, and one of their shades."""

from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, save
from video_fixtures import (
    SIZE,
    Blocks,
)

from device.engine.manifest import DimRange, TensorInfo
from pipelines.config import PipelineConfig, parse_pipeline

DETECTOR = """
[[models]]
name = "detector"
engine = "colours.engine"
labels = "labels.txt"
[models.preprocess]
width = 64
height = 64
[models.decode]
kind = "ltrb_grid"
boxes = "boxes"
scores = "scores"
strides = [8]
score_threshold = 0.5
"""


SHADE = """
[[models]]
name = "shade"
engine = "shade.engine"
labels = "shades.txt"
{keys}
[models.preprocess]
width = 8
height = 8
resize = "stretch"
[models.decode]
kind = "{kind}"
{decode}
"""


ON_RED = SHADE.format(
    keys='on = "detector"\nclasses = ["red"]\nmax_crops = 2',
    kind="classification",
    decode='scores = "p"\nsoftmax = false',
)


HEAD = 'name = "yard"\n[source]\nuri = "{uri}"\nframes = "every"\n'


SHADES = ("dark", "bright")


class ShadeClassifier:
    """Says whether the mean of an 8x8 image is above 0.32, and counts what it is asked."""

    inputs = (TensorInfo(name="image", dtype="float32", shape=("batch", 3, 8, 8)),)
    outputs = (TensorInfo(name="p", dtype="float32", shape=("batch", 2)),)
    dims = (DimRange(name="batch", min=1, opt=2, max=2),)
    reports = (Blocks(processor="dla0", runs_on=("dla0",)),)

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def infer(self, feeds: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        images = feeds["image"]
        self.sizes.append(len(images))
        bright = np.clip(images.mean((1, 2, 3)) * 3.125 - 0.5, 0.0, 1.0).astype(np.float32)
        return {"p": np.stack([1.0 - bright, bright], 1)}


def config_of(text: str, uri: object = "test://") -> PipelineConfig:
    return parse_pipeline(HEAD.format(uri=uri) + text, Path("yard.toml"))


def pictures(folder: Path, *squares: Mapping[tuple[int, int], tuple[int, int, int]]) -> Path:
    """Write a dark picture for each mapping of cells to colours (BGR)."""
    folder.mkdir()
    for number, cells in enumerate(squares):
        image = np.full((SIZE, SIZE, 3), 30, np.uint8)
        for (column, row), colour in cells.items():
            image[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = colour
        cv2.imwrite(str(folder / f"{number:03}.png"), image)
    return folder


PALE, DEEP, GREEN = (90, 90, 250), (5, 5, 230), (20, 230, 20)  # two reds: means 143 and 80


SPARE = '[[models]]\nname = "small"\nreplaces = "detector"\nengine = "small.engine"\n'


def shade_model(path: Path) -> Path:
    """Write an ONNX classifier of 8x8 images: dark or bright, for any batch."""
    weight = np.zeros((3, 2), np.float32)
    weight[:] = [-10.0, 10.0]
    nodes = [
        helper.make_node("GlobalAveragePool", ["image"], ["means"]),
        helper.make_node("Flatten", ["means"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w", "b"], ["p"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "shades",
        [value("image", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [value("p", TensorProto.FLOAT, ["N", 2])],
        [
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(np.array([9.6, -9.6], np.float32), "b"),
        ],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
