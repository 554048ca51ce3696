"""Segments that a build leaves in floating point, against what the importer makes of their Q/DQ."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tensorrt_fixtures
from legalize_graphs import Net, node
from random_networks import Growing

from toolkit.engine import tensorrt
from toolkit.graph.extract import ExtractedSegment, extract_segments
from toolkit.graph.passes import run_passes
from toolkit.quantize.qdq.float_segment import float_segment
from toolkit.quantize.qdq.importer import PlainModel, import_qdq
from toolkit.quantize.qdq.writer import FloatWriter, QdqWriter
from toolkit.quantize.quantize import calibrated_tensors, quantize, with_operands


class Small(Growing):
    """A network of few weights."""

    CHANNELS, SIDES, WIDTHS = (3, 16), (9, 14), (8, 32)


def cut_network(seed: int) -> tuple[ExtractedSegment, ...]:
    """A random network with some inner outputs, cut twice at random, in INT8."""
    rng = np.random.default_rng(seed)
    model = run_passes(ir.from_proto(Small(rng).net().proto()))[0]
    inner = [value for node in model.graph for value in node.outputs if rng.random() < 0.15]
    model.graph.outputs.extend(value for value in inner if not value.is_graph_output())
    nodes = [str(node.name) for node in model.graph]
    first, second = sorted(rng.integers(len(nodes) + 1, size=2))
    names = ("gpu.0", "dla0.0", "gpu.1")
    segment_of = {
        node: names[int(index >= first) + int(index >= second)] for index, node in enumerate(nodes)
    }
    ranges = {name: float(rng.uniform(0.1, 9.0)) for name in calibrated_tensors(model)}
    keep = frozenset(node for node in nodes if rng.random() < 0.15)
    return quantized(model, ranges, segment_of, keep)


def quantized(
    model: ir.Model,
    ranges: Mapping[str, float],
    segment_of: Mapping[str, str],
    keep_float: frozenset[str] = frozenset(),
) -> tuple[ExtractedSegment, ...]:
    """The segments that have Q/DQ, with what they are in floating point."""
    amax, names = with_operands(model, ranges), tuple(dict.fromkeys(segment_of.values()))
    pieces, floating = (
        extract_segments(segment.model, segment.segment_of, names)
        for segment in (
            quantize(
                model, amax, segment_of, frozenset({"dla0.0"}), keep_float=keep_float, writer=writer
            )
            for writer in (QdqWriter, FloatWriter)
        )
    )
    return tuple(
        replace(piece, floating=second.model)
        for piece, second in zip(pieces, floating, strict=True)
        if any(node.op_type == "DequantizeLinear" for node in piece.model.graph)
    )


def content(plain: PlainModel) -> dict[str, Any]:
    """All that is known of a model but notes, as values that can be compared."""
    integers = {
        name: (weight.entry, weight.axis, np.asarray(weight.scales).tolist())
        for name, weight in plain.integers.items()
    }
    data = ir.to_proto(plain.model).SerializeToString(deterministic=True)
    return asdict(replace(plain, model=ir.Model(ir.Graph([], [], nodes=[]), ir_version=9))) | {
        "model": data,
        "integers": integers,
        "notes": (),
    }


def check(pieces: Sequence[ExtractedSegment]) -> None:
    assert pieces
    for piece in pieces:
        imported = import_qdq(piece.model, any_weight_scale=True, int8_borders=True)
        assert content(float_segment(piece)) == content(imported)


@pytest.mark.parametrize("seed", range(3, 13))
def test_a_segment_is_what_the_importer_makes_of_its_qdq(seed: int) -> None:
    check(cut_network(seed))


def test_an_operand_that_is_rounded_twice_has_the_larger_range() -> None:
    nodes = [node("Relu", "x", "r"), node("Exp", "x", "e"), node("Mul", "r e", "y")]
    model = run_passes(ir.from_proto(Net(nodes, {"x": (1, 4, 4, 4)}, {}).proto()))[0]
    segment_of = {str(n.name): "dla0.0" if n.op_type == "Relu" else "gpu.1" for n in model.graph}
    pieces = quantized(model, {"x": 3.0, "r": 6.0, "e": 2.0}, segment_of)
    assert float_segment(pieces[0]).amax["x"] == pytest.approx(6.0)
    check(pieces)


def test_a_build_imports_no_qdq_that_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tensorrt, "import_qdq")
    assert tensorrt_fixtures.build(tmp_path, precision="int8").is_file()
