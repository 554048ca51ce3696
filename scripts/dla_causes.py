"""What a DLA does to a detector in INT8 that a GPU does not, and how many points each cause costs.

    python -m scripts.dla_causes [--models robot-objects nudenet-320n] [--method entropy] [--json]

One set of ranges, one network, and the rules of the DLA one by one. The GPU rounds what its
convolutions, sums and concatenations read, each tensor with a scale of its own. `alone`: the points
that a cause takes from that; `left out`: the points that come back if the DLA has all other causes
but this one. The last causes are those of the DLA's integers (`device.dla_emulator`), on the graph
with all others. Everything before the first reshape is on the DLA, what follows in FP32.

robot-objects: mAP50-95 on the scenes that ship with Tandem. nudenet-320n, a YOLOv8n of others
(`python tests/fixtures/foreign_models.py`): F1 of its detections against those of FP32, on crops of
the photographs that ship with Tandem, at scores from 0.25 on.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

import configs
from calibration.samples import memory_dataset
from calibration.table import scale_of
from calibration.threshold import amax_by_method
from device.dla_emulator.arithmetic.rounding import half_away
from device.dla_emulator.forms import QuantizedBuffer
from device.dla_emulator.options import Emulation
from device.dla_emulator.segment_graph import graph_of
from device.dla_emulator.translate import translate
from scripts.dla_causes_subjects import SUBJECTS, Arrays, Subject, open_subject
from toolkit.evaluate.infer.onnx_runner import OnnxRunner
from toolkit.graph.subgraph import cut_model
from toolkit.quantize.observe import observe_graph
from toolkit.quantize.quantize import calibrated_tensors, quantize, with_operands
from toolkit.quantize.scales.rules import SCALE_RULES, unify_scales

Array = NDArray[Any]
Run = Callable[[Arrays], Arrays]
Reads = Callable[[ir.Node], tuple[int, ...]]
MOVES = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "Split", "Slice"})


@dataclass(frozen=True)
class Cause:
    """One rule of the DLA: nodes whose tensors share a scale, and operands that are rounded.

    `outputs`: what leaves the DLA is rounded, too; `widest`: with ranges of min-max; `joined`: with
    one scale for all that a concatenation joins then.
    """

    title: str
    ties: Callable[[ir.Node], bool] = lambda node: False
    reads: Reads = lambda node: ()
    outputs: bool = False
    widest: bool = False
    joined: bool = False


def _factor(of_sigmoid: bool) -> Reads:
    """Return the operands of products that are a sigmoid's result, or those that are not."""

    def reads(node: ir.Node) -> tuple[int, ...]:
        if node.op_type == "Sigmoid":
            return () if of_sigmoid else (0,)
        if node.op_type != "Mul":
            return ()
        producers = [value.producer() if value is not None else None for value in node.inputs]
        sigmoids = [one is not None and one.op_type == "Sigmoid" for one in producers]
        return tuple(index for index, is_one in enumerate(sigmoids) if is_one == of_sigmoid)

    return reads


CAUSES = (
    Cause("concatenations share one scale", lambda node: node.op_type == "Concat"),
    Cause("sums share one scale", lambda node: node.op_type in {"Add", "Sum", "Sub"}),
    Cause(
        "poolings, upsampling and splits keep the scale of their input",
        lambda node: node.op_type in MOVES,
        lambda node: (0,) if node.op_type in MOVES else (),
    ),
    Cause("convolutions are rounded before a sigmoid", reads=_factor(False)),
    Cause("sigmoids are rounded before a product", reads=_factor(True)),
    Cause(
        "both factors of a SiLU share one scale",
        lambda node: node.op_type == "Mul",
        lambda node: (0, 1) if node.op_type == "Mul" else (),
    ),
    Cause("what leaves is rounded, with ranges of min-max", outputs=True, widest=True),
    Cause("what leaves is rounded and clipped", outputs=True),
    Cause("boxes and scores leave with one scale", outputs=True, joined=True),
)
# Emulation on the graph with all causes above; the one before the first is onnxruntime.
INTEGERS = (
    ("halves are rounded away from zero", "ideal"),
    ("multipliers are 16 bits, one shift for all channels", "exact bias"),
    ("biases are 16 bits, the sigmoid is a table", "hardware"),
)


@dataclass(frozen=True)
class Row:
    """A cause and the points that it takes alone and gives back; None: not asked."""

    cause: str
    points: float
    alone: float | None = None
    left_out: float | None = None


class Experiment:
    """One detector with ranges, cut at the end of the DLA."""

    def __init__(self, subject: Subject, method: str) -> None:
        """Measure ranges and cut the graph."""
        self._subject = subject
        graph = subject.graph
        known = frozenset(str(v.name) for v in graph.graph.inputs) | _dla_tensors(graph)
        borders = _borders(graph, known)
        self._part = cut_model(graph, None, borders)
        self._tail = OnnxRunner(cut_model(graph, borders, None), "the tail")
        self._borders = borders
        self._joined = [
            names
            for node in graph.graph
            if node.op_type == "Concat"
            for names in [[str(v.name) for v in node.inputs if v is not None]]
            if set(names) <= set(borders)
        ]
        tensors = calibrated_tensors(self._part)
        observed = observe_graph(graph, memory_dataset(subject.data), tensors)
        amax = amax_by_method(observed.histograms, [method, "minmax"])
        self._amax = with_operands(self._part, amax[method])
        self._widest = with_operands(self._part, amax["minmax"])

    def fp32(self) -> float:
        """Return the points of the network itself."""
        part = OnnxRunner(self._part, "FP32")
        return self._subject.points(lambda feeds: self._tail.run(part.run(feeds)))

    def points(self, causes: Sequence[Cause], arithmetic: str = "") -> float:
        """Return the points with some causes; `arithmetic` "" is onnxruntime's."""
        model, amax = self._quantized(causes)
        run = emulated(model, arithmetic) if arithmetic else OnnxRunner(model, "INT8").run
        rounded = half_away if arithmetic else np.rint
        outputs = any(cause.outputs for cause in causes)
        wide = all(cause.widest for cause in causes if cause.outputs)
        ranges = {name: self._widest[name] if wide else amax[name] for name in self._borders}
        if any(cause.joined for cause in causes):
            for names in self._joined:
                ranges.update(dict.fromkeys(names, max(ranges[name] for name in names)))

        def infer(feeds: Arrays) -> Arrays:
            results = run(feeds)
            if outputs:
                results = {
                    name: _int8(results[name], scale_of(ranges[name]), rounded) for name in results
                }
            return self._tail.run(results)

        return self._subject.points(infer)

    def _quantized(self, causes: Sequence[Cause]) -> tuple[ir.Model, Mapping[str, float]]:
        nodes = list(self._part.graph)
        tied = {str(node.name) for node in nodes if any(cause.ties(node) for cause in causes)}
        rules = [rule for rule in SCALE_RULES if rule.kind == "tie"]
        amax = unify_scales(self._part, self._amax, tied, rules).amax
        reads = {}
        for node in nodes:
            indices = sorted({index for cause in causes for index in cause.reads(node)})
            if indices:
                reads[str(node.name)] = tuple(indices)
        segments = {str(node.name): "dla0.0" for node in nodes}
        return quantize(self._part, amax, segments, frozenset(), operands=reads).model, amax


def emulated(model: ir.Model, arithmetic: str) -> Run:
    """Return a Q/DQ graph in the DLA's arithmetic."""
    emulation = Emulation("fast", arithmetic)  # type: ignore[arg-type]
    segment = translate(graph_of(ir.to_proto(model), _nothing_outside), "the network", emulation)

    def run(feeds: Arrays) -> Arrays:
        values: dict[str, Array] = dict(feeds)
        for operation in segment.operations:
            values[operation.output] = operation.run([values[name] for name in operation.inputs])
        results = {}
        for name, form in segment.outputs.items():
            scale = np.float32(form.scale) if isinstance(form, QuantizedBuffer) else np.float32(1)
            results[name] = values[form.buffer].astype(np.float32) * scale
        return results

    return run


def experiment_rows(experiment: Experiment) -> list[Row]:
    """Return the table of one detector."""
    rows = [Row("FP32", experiment.fp32())]  # first: a detector without truths is judged by it
    gpu = experiment.points(())
    rows.append(Row("INT8 as on a GPU", gpu))
    everything = experiment.points(CAUSES)
    for cause in CAUSES:
        alone = experiment.points((cause,))
        others = tuple(one for one in CAUSES if one is not cause)
        rows.append(Row(cause.title, alone, gpu - alone, experiment.points(others) - everything))
    rows.append(Row("all of these", everything, gpu - everything))
    before = everything
    for title, arithmetic in INTEGERS:
        points = experiment.points(CAUSES, arithmetic)
        rows.append(Row(title, points, before - points))
        before = points
    not_avoided = tuple(
        cause
        for cause in CAUSES
        if not cause.outputs and "sigmoid" not in cause.title and "SiLU" not in cause.title
    )
    title = "avoided: SiLU and what leaves in FP16, on the DLA's integers"
    rows.append(Row(title, experiment.points(not_avoided, "hardware")))
    return rows


def table(name: str, metric: str, rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    lines = [f"| {name}: {metric} | points | alone | left out |", "|---|--:|--:|--:|"]
    lines += [
        f"| {row.cause} | {cell(row.points)} | {cell(row.alone)} | {cell(row.left_out)} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--method", default="entropy", help="of the ranges, for GPU and DLA alike")
    parser.add_argument("--samples", type=int, default=16, help="to measure ranges on")
    parser.add_argument("--judged", type=int, default=24, help="pictures to judge on")
    parser.add_argument("--yolo", type=Path, default=configs.ROOT.parent / ".models"
        / "nudenet-3.4.2" / "nudenet" / "320n.onnx", help="file of nudenet-320n")  # fmt: skip
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.models:
        subject = open_subject(name, arguments.samples, arguments.judged, arguments.yolo)
        rows = experiment_rows(Experiment(subject, arguments.method))
        results[name] = [asdict(row) for row in rows]
        if not arguments.json:
            print(table(name, subject.metric, rows), flush=True)
    if arguments.json:
        print(json.dumps({"method": arguments.method, "models": results}))


def _dla_tensors(graph: ir.Model) -> frozenset[str]:
    """Return what nodes of maps alone compute: up to the first reshape on each way.

    A concatenation at the end, which joins boxes and scores, is left out.
    """
    known = {str(value.name) for value in graph.graph.inputs}
    for node in graph.graph:
        read = [value for value in node.inputs if value is not None and value.const_value is None]
        maps = all(len(value.shape or ()) == 4 for value in (*read, *node.outputs))
        plain = node.op_type not in {"Transpose", "Reshape", "Softmax", "Constant"}
        if maps and plain and read and all(str(value.name) in known for value in read):
            known |= {str(value.name) for value in node.outputs}
    ends = {
        str(node.outputs[0].name)
        for node in graph.graph
        if node.op_type == "Concat"
        and not any(str(use.node.outputs[0].name) in known for use in node.outputs[0].uses())
    }
    return frozenset(known - ends)


def _borders(graph: ir.Model, known: frozenset[str]) -> list[str]:
    """Return the tensors of the DLA that others read, in running order."""
    outputs = {str(value.name) for value in graph.graph.outputs}
    read = {
        str(value.name)
        for node in graph.graph
        if str(node.outputs[0].name) not in known
        for value in node.inputs
        if value is not None
    }
    produced = [str(value.name) for node in graph.graph for value in node.outputs]
    return [name for name in produced if name in known and (name in read or name in outputs)]


def _int8(x: Array, scale: float, rounded: Callable[[Array], Array]) -> Array:
    steps = np.clip(rounded(x.astype(np.float64) / scale), -128, 127)
    return np.asarray(steps * scale, np.float32)


def _nothing_outside(name: str) -> Array:
    raise KeyError(name)


if __name__ == "__main__":
    main()
