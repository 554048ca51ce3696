"""What a model or an engine says of itself: inputs, outputs, metadata, and its last nodes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from device.engine.file import open_engine
from device.engine.manifest import Dim, TensorInfo
from toolkit.errors import GuessError
from toolkit.guess.names import numbers_of

if TYPE_CHECKING:
    import onnx_ir as ir

ENGINE_SUFFIX = ".engine"
TRANSPARENT = frozenset({"Identity", "Cast"})  # they say nothing of what is before them
DEFAULT_SIDE = 640  # of a dynamic input that nothing gives a size


@dataclass(frozen=True, slots=True)
class Producer:
    """The node that makes an output: its operator, and those that make its inputs.

    `of_layer`: its operand is what one layer gives (Gemm, Conv, or MatMul and a bias), or it is
    such a layer itself.
    """

    op: str
    before: tuple[str, ...] = ()
    of_layer: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known; an engine has no operators, producers and weights, and of the metadata the
    classes. `weights`: the names of the constants.

    `input_size`: (height, width) that the caller gave, or None; `usual_size`: that of the model's
    family, where that is known.
    """

    path: Path
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    producers: Mapping[str, Producer] = field(default_factory=dict)
    input_size: tuple[int, int] | None = None
    usual_size: tuple[int, int] | None = None
    weights: frozenset[str] = frozenset()

    @property
    def image(self) -> TensorInfo:
        """The input of rank 4, which takes the image; the first if there is none."""
        return next((info for info in self.inputs if len(info.shape) == 4), self.inputs[0])

    @property
    def layout(self) -> str:
        """The order of dimensions: "nhwc" where the channels are last."""
        shape = self.image.shape
        return "nhwc" if len(shape) == 4 and shape[3] in (1, 3) and shape[1] != 3 else "nchw"

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the input: its own, or where it is dynamic the caller's, that of the
        metadata (`imgsz`), that of its family or DEFAULT_SIDE."""
        height, width = self.declared_size
        exported = numbers_of(self.metadata.get("imgsz", ""))
        usual = self.usual_size or (DEFAULT_SIDE, DEFAULT_SIDE)
        usual = (exported[0], exported[1]) if len(exported) == 2 else usual
        fallback = self.input_size or usual
        return (
            height if isinstance(height, int) else fallback[0],
            width if isinstance(width, int) else fallback[1],
        )

    @property
    def size_is_assumed(self) -> bool:
        """True if nothing gives the size of a dynamic input."""
        dynamic = not all(isinstance(side, int) for side in self.declared_size)
        return dynamic and self.input_size is None and "imgsz" not in self.metadata

    @property
    def declared_size(self) -> tuple[Dim, Dim]:
        """(height, width) as the file has them."""
        shape = self.image.shape
        if len(shape) != 4:
            return None, None
        return (shape[1], shape[2]) if self.layout == "nhwc" else (shape[2], shape[3])

    @property
    def channels(self) -> Dim:
        """Channels of the image."""
        shape = self.image.shape
        return shape[3 if self.layout == "nhwc" else 1] if len(shape) == 4 else None

    def has_weights(self, *words: str) -> bool:
        """True if a word is in the name of a constant."""
        return any(word in name for name in self.weights for word in words)

    def output(self, name: str) -> TensorInfo | None:
        """Return an output by its name, without ":0"; None if there is none."""
        return next((o for o in self.outputs if o.name.removesuffix(":0") == name), None)


def read_facts(path: Path, input_size: tuple[int, int] | None = None) -> ModelFacts:
    """Read an ONNX model or an engine. Raises TandemError: it cannot be read, or has no input."""
    facts = _of_engine(path) if path.suffix == ENGINE_SUFFIX else _of_model(path, input_size)
    if not facts.inputs or not facts.outputs:
        raise GuessError(f"{path} has no input or no output: there is nothing to guess.")
    return facts


def _of_engine(path: Path) -> ModelFacts:
    with open_engine(path) as opened:
        manifest = opened.manifest
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    return ModelFacts(
        path,
        tuple(tensors[name] for name in manifest.inputs),
        tuple(tensors[name] for name in manifest.outputs),
        manifest.provenance.metadata or {},
    )


def _of_model(path: Path, input_size: tuple[int, int] | None) -> ModelFacts:
    import onnx_ir as ir

    from toolkit.graph.passes.shapes import propagate_shapes
    from toolkit.importers.onnx import read_model_file

    model = read_model_file(path).model
    graph = model.graph
    shapeless = [value for value in graph.outputs if not value.shape]
    for value in shapeless:
        value.shape = None  # converters of Paddle write that of a scalar
    if shapeless:
        propagate_shapes(model)

    def info(value: ir.Value) -> TensorInfo:
        dims = value.shape if value.shape is not None else ()
        shape = tuple(dim if isinstance(dim, int) else dim.value for dim in dims)
        dtype = "unknown" if value.dtype is None else ir.DataType(value.dtype).numpy().name
        return TensorInfo(name=value.name or "", dtype=dtype, shape=shape)

    def producer(value: ir.Value) -> Producer | None:
        node = value.producer()
        while node is not None and node.op_type in TRANSPARENT and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        if node is None:
            return None
        makers = [maker.producer() for maker in node.inputs if maker is not None]
        before = tuple(maker.op_type for maker in makers if maker is not None)
        first = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        return Producer(node.op_type, before, _is_layer(node) or _is_layer(first))

    producers = {value.name or "": producer(value) for value in graph.outputs}
    weights = set(graph.initializers)
    return ModelFacts(
        path,
        tuple(info(value) for value in graph.inputs if value.name not in weights),
        tuple(info(value) for value in graph.outputs),
        dict(model.metadata_props),
        frozenset(node.op_type for node in graph.all_nodes()),
        {name: node for name, node in producers.items() if node is not None},
        input_size,
        weights=frozenset(graph.initializers),
    )


def _is_layer(node: "ir.Node | None") -> bool:
    """True for Gemm and Conv, for a MatMul with a constant, and for the Add of its bias vector."""
    if node is None:
        return False
    constants = [value for value in node.inputs if value is not None and value.const_value]
    if node.op_type in ("Gemm", "Conv", "MatMul"):
        return bool(constants)
    makers = [value.producer() for value in node.inputs if value is not None]
    vector = any(value.const_value and len(value.const_value.shape) == 1 for value in constants)
    return (
        node.op_type == "Add"
        and vector
        and any(maker is not None and maker.op_type == "MatMul" for maker in makers)
    )
