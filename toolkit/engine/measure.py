"""Measure the INT8 ranges of a model without building it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from toolkit.engine.frontend import run_frontend
from toolkit.engine.int8_ranges import to_measure
from toolkit.engine.options import BuildOptions
from toolkit.engine.read import read_model
from toolkit.engine.target import HOST, choose_target
from toolkit.errors import BuildError, about
from toolkit.importers.onnx import ModelSource, OpenModel, open_model
from toolkit.plugins import Plugin
from toolkit.progress import Progress
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.measure import RangeOptions, Ranges, observe_shard
from toolkit.quantize.ranges.table_file import has_qdq


@dataclass(frozen=True, slots=True)
class CalibrateRequest:
    """What to calibrate; `profile` None: the graph as it is, without rewrites for a DLA.

    `accept_loss`: keep the ranges even if INT8 loses too much.
    """

    model: ModelSource
    data: Source
    profile: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    plugins: tuple[Plugin, ...] = ()
    options: RangeOptions = field(default_factory=RangeOptions)
    accept_loss: bool = False


def measure_model(request: CalibrateRequest, report: Progress) -> tuple[Ranges, str]:
    """Measure the ranges of a model; second, its name.

    Raises TandemError: the model is quantized already, the data cannot be used, or INT8 loses too
    much.
    """
    model, options = _opened(request, report)
    with about(model.path.name):
        target = choose_target(request.profile or HOST)
        ranges = run_frontend(model, target, options, report).ranges
    assert ranges is not None  # of data
    return ranges, model.path.name


def measure_shard(request: CalibrateRequest, index: int, count: int, report: Progress) -> bytes:
    """Observe one shard of the data, counted from 0 (`toolkit.quantize.ranges.shards`).

    Raises TandemError as `measure_model`.
    """
    model, options = _opened(request, report)
    with about(model.path.name):
        front = read_model(model, choose_target(request.profile or HOST), options, report)
        front, ranges = to_measure(front)
        return observe_shard(
            front.prepared.model, request.data, front.imported.sha256, ranges, report,
            index=index, count=count,
        )  # fmt: skip


def _opened(request: CalibrateRequest, report: Progress) -> tuple[OpenModel, BuildOptions]:
    model = open_model(request.model, plugins=request.plugins, report=report)
    name = model.path.name
    with about(name):
        if has_qdq(model.model):
            raise BuildError(
                f"{name} is quantized already: `tandem ranges` takes the ranges that its Q/DQ "
                "hold; to measure others give the plain model (`tandem ranges ... --plain`)."
            )
    options = BuildOptions(
        precision="int8",
        data=request.data,
        ranges=request.options,
        accept_loss=request.accept_loss,
        shapes=request.shapes,
        plugins=request.plugins,
        kernels=False,
    )
    return model, options
