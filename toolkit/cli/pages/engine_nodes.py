"""The nodes of an engine file: edges, shapes and work, from the ONNX form of its segments."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from device.engine.arithmetic import BFLOAT16_STEP, INT4_KERNELS
from device.engine.cuda_manifest import Cuda, Launch
from device.engine.file import Engine
from device.engine.manifest import Manifest, NodePlacement, Portable, Precision, Segment
from toolkit.graph.node_view import NodeView, views
from toolkit.graph.passes.shapes import propagate_shapes
from toolkit.partition.costs.bytes import tensor_bytes
from toolkit.partition.costs.float8 import read_as_stored

PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})  # what matrix units compute
DEQUANTIZE = "DequantizeLinear"
_FLOAT_OF_PLACE: Mapping[str, Precision] = {"cpu": "fp32", "portable": "fp32"}


@dataclass(frozen=True, slots=True)
class EngineNode:
    """A node of the plan with what its ONNX form tells.

    `place`: its processor, or "portable" where a GPU segment has no kernels. `computes`: the type
    that it computes in, as people call it: BF16, FP8 or INT4 weights, too. `after`: nodes whose
    results it reads, through Q and DQ. `operations`: 2 for each multiply-accumulate. `moved_bytes`:
    its inputs, weights and outputs at its precision. Both are None where shapes do not tell them.
    `kernels`: functions of its first tactic; `shares`: the nodes that they compute with it.
    """

    row: NodePlacement
    place: str
    precision: Precision
    computes: str
    after: tuple[str, ...]
    shapes: tuple[str, ...]
    operations: int | None
    moved_bytes: int | None
    live_bytes: int | None
    kernels: tuple[str, ...]
    tactics: int
    shares: tuple[str, ...]


def read_nodes(engine: Engine) -> tuple[EngineNode, ...]:
    """Return the nodes of an open engine in running order. Raises EngineError."""
    manifest = engine.manifest
    seen = [view for s in manifest.segments for view in _views(engine, s)]
    by_name = {view.name: view for view in seen}
    maker = {tensor.name: view.name for view in seen for tensor in view.outputs}
    planned = {row.node for row in manifest.plan}
    places = {segment.name: place_of(segment) for segment in manifest.segments}
    launched = {
        node: (op.nodes, _functions(cuda, op.tactics[0].launches), len(op.tactics))
        for segment in manifest.segments
        if segment.processor == "gpu"
        for cuda in segment.implementations
        if isinstance(cuda, Cuda)
        for op in cuda.works
        for node in op.nodes
    }
    precision_of = {
        row.node: _precision(by_name.get(row.node), manifest, places[row.segment], by_name, maker)
        for row in manifest.plan
    }
    half = "BF16" if BFLOAT16_STEP in manifest.provenance.passes else "FP16"
    _, float8 = read_as_stored(seen)
    live = _live_bytes(manifest, by_name, maker, precision_of)
    nodes = []
    for row in manifest.plan:
        view = by_name.get(row.node)
        shares, kernels, tactics = launched.get(row.node, ((), (), 0))
        nodes.append(
            EngineNode(
                row=row,
                place=places[row.segment],
                precision=(precision := precision_of[row.node]),
                computes=_narrow_form(row, kernels, float8)
                or (half if precision == "fp16" else precision.upper()),
                after=_after(view, by_name, maker, planned) if view else (),
                shapes=tuple(tensor.text for tensor in view.outputs) if view else (),
                operations=None if view is None or view.macs is None else 2 * view.macs,
                moved_bytes=_moved(view, precision) if view else None,
                live_bytes=live.get(row.node),
                kernels=kernels,
                tactics=tactics,
                shares=tuple(name for name in shares if name != row.node),
            )
        )
    return tuple(nodes)


@dataclass(frozen=True, slots=True)
class ReadTensors:
    """The planned nodes of an engine by name, and which of them read a result.

    An output of the engine has the reader "".
    """

    views: Mapping[str, NodeView]
    readers: Mapping[str, set[str]]
    _passed: Mapping[str, str]

    def source(self, tensor: str) -> str:
        """Return the tensor that Q and DQ made this one of."""
        while tensor in self._passed:
            tensor = self._passed[tensor]
        return tensor


def read_tensors(engine: Engine) -> ReadTensors:
    """Return the nodes of an open engine and who reads their results. Raises EngineError."""
    manifest = engine.manifest
    planned = {row.node for row in manifest.plan}
    seen = [view for s in manifest.segments for view in _views(engine, s)]
    passed = {
        tensor.name: view.reads[0]
        for view in seen
        if view.name not in planned and view.reads
        for tensor in view.outputs
    }
    tensors = ReadTensors({view.name: view for view in seen if view.name in planned}, {}, passed)
    readers: dict[str, set[str]] = {name: {""} for name in map(tensors.source, manifest.outputs)}
    for view in tensors.views.values():
        for name in view.reads:
            readers.setdefault(tensors.source(name), set()).add(view.name)
    return ReadTensors(tensors.views, readers, passed)


def place_of(segment: Segment) -> str:
    """Return where a segment runs: its processor, or "portable" on a GPU without kernels."""
    has_kernels = any(isinstance(item, Cuda) for item in segment.implementations)
    return "portable" if segment.processor == "gpu" and not has_kernels else segment.processor


def _views(engine: Engine, segment: Segment) -> tuple[NodeView, ...]:
    """Return the nodes of the ONNX form of a segment, with the shapes that ONNX infers."""
    form = next((item for item in segment.implementations if isinstance(item, Portable)), None)
    if form is None:
        return ()
    model = ir.from_proto(onnx.load_from_string(engine.entry(form.model).tobytes()))
    for name in form.weights:
        value = model.graph.initializers[name]
        value.const_value = ir.tensor(engine.entry(name), name=name)
    propagate_shapes(model)
    return views(model.graph)


def _functions(cuda: Cuda, launches: Iterable[Launch]) -> tuple[str, ...]:
    return tuple(cuda.kernels[launch.kernel].function for launch in launches)


def _after(
    view: NodeView, by_name: Mapping[str, NodeView], maker: Mapping[str, str], planned: set[str]
) -> tuple[str, ...]:
    """Return the planned nodes that a node reads from; others between are passed through."""
    names: dict[str, None] = {}
    stack, visited = list(view.reads), set[str]()
    while stack:
        source = maker.get(stack.pop())
        if source is None or source in visited:
            continue
        visited.add(source)
        if source in planned:
            names[source] = None
        else:
            stack += by_name[source].reads
    return tuple(names)


def _precision(
    view: NodeView | None,
    manifest: Manifest,
    place: str,
    by_name: Mapping[str, NodeView],
    maker: Mapping[str, str],
) -> Precision:
    """Return in which precision a node computes; INT8 is told by the DQ that it reads from."""
    stated = manifest.provenance.precision
    if stated == "int8":
        sources = (by_name.get(maker.get(name, "")) for name in (view.reads if view else ()))
        if any(source is not None and source.op == DEQUANTIZE for source in sources):
            return "int8"
        return _FLOAT_OF_PLACE.get(place, "fp16")
    return _FLOAT_OF_PLACE.get(place, stated)


def _narrow_form(row: NodePlacement, kernels: Sequence[str], float8: Collection[str]) -> str:
    """Return in which form that no precision names a product reads its operands, "" if in none."""
    if row.node in float8:
        return "FP8"
    is_int4 = row.op in PRODUCTS and not INT4_KERNELS.isdisjoint(kernels)
    return "INT4 weights" if is_int4 else ""


def _moved(view: NodeView, precision: Precision) -> int | None:
    """Return the bytes of inputs, weights and outputs, None where a shape is not known."""
    tensors = [tensor for tensor in (*view.inputs, *view.outputs) if tensor is not None]
    sizes = [tensor_bytes(tensor, precision) for tensor in tensors]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _live_bytes(
    manifest: Manifest,
    by_name: Mapping[str, NodeView],
    maker: Mapping[str, str],
    precision_of: Mapping[str, Precision],
) -> dict[str, int]:
    """Return the bytes of all results that are still needed while each node runs.

    A result lives from its node to the last node that reads it; outputs live to the end. Nodes
    without known shapes count 0.
    """
    order = [row.node for row in manifest.plan]
    last = {name: index for index, name in enumerate(order)}
    planned = set(order)
    for index, name in enumerate(order):
        if name in by_name:
            for source in _after(by_name[name], by_name, maker, planned):
                last[source] = max(last[source], index)
    for name, end in _outputs(manifest, by_name, maker, planned, len(order) - 1):
        last[name] = end
    live = [0] * len(order)
    for index, name in enumerate(order):
        if name in by_name:
            sizes = (tensor_bytes(t, precision_of[name]) for t in by_name[name].outputs)
            size = sum(size or 0 for size in sizes)
            for at in range(index, last[name] + 1):
                live[at] += size
    return dict(zip(order, live, strict=True))


def _outputs(
    manifest: Manifest,
    by_name: Mapping[str, NodeView],
    maker: Mapping[str, str],
    planned: set[str],
    end: int,
) -> Iterator[tuple[str, int]]:
    for output in manifest.outputs:
        source = maker.get(output)
        if source is None:
            continue
        names = (source,) if source in planned else _after(by_name[source], by_name, maker, planned)
        yield from ((name, end) for name in names)
