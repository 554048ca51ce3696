"""The ONNX backend suite through the GPU path: one test at a time, as values.

    case -> model file -> import, passes, one GPU segment -> lowering -> run -> comparison

An engine is compiled for constant parameters: the shape of a Reshape, the axes of a reduction, the
weights of a convolution. The suite feeds many of them as inputs. A test that is not covered is
tried again with such inputs (rows of PARAMETERS) as constants, and its outcome is marked `fixed`.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx.version_converter
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from toolkit.errors import BuildError, ImportModelError, first_line
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.target import GpuTarget
from toolkit.graph.extract import extract_segments
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.importers.opset import MIN_OPSET, OLDEST_OPSET

Array = np.ndarray[Any, Any]
Status = Literal["passed", "not covered", "wrong", "error"]
Run = Callable[[KernelProgram, Mapping[str, Array]], Mapping[str, Array]]
"""Runs a lowered segment: in Triton's interpreter, or on a GPU."""

KINDS = ("node", "real", "simple", "pytorch-converted", "pytorch-operator")
CONSTANTS_ALONE = 4  # the first IR version whose constants need not be inputs too
ORIN = GpuTarget(sm=87, sm_count=16)
_LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"

# Operator -> positions of parameter inputs: attributes in older opsets, inputs that decide the
# shape of the result, packed weights.
PARAMETERS: Mapping[str, tuple[int, ...]] = {
    "AffineGrid": (1,),
    "BatchNormalization": (1, 2, 3, 4),
    "CenterCropPad": (1,),
    "Clip": (1, 2),
    "ConstantOfShape": (0,),
    "Conv": (1, 2),
    "ConvInteger": (1, 2, 3),
    "ConvTranspose": (1, 2),
    "CumProd": (1,),
    "CumSum": (1,),
    "DequantizeLinear": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "GRU": (1, 2, 3, 4),
    "Gemm": (1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 4, 7),
    "LayerNormalization": (1, 2),
    "MatMulInteger": (2, 3),
    "MaxUnpool": (2,),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1, 2),
    "Pad": (1, 2, 3),
    "QLinearConv": (1, 2, 3, 4, 5, 6, 7, 8),
    "QLinearMatMul": (1, 2, 4, 5, 6, 7),
    "QuantizeLinear": (1, 2),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3, 4),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A test of the suite: its model and (inputs, expected outputs) sets, and its tolerances."""

    name: str
    kind: str
    rtol: float
    atol: float
    model: onnx.ModelProto
    data: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators of its graph, each once, in order."""
        return tuple(dict.fromkeys(node.op_type for node in self.model.graph.node))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a test; `fixed`: with parameters as constants; `reasons`: why it failed."""

    status: Status
    fixed: bool = False
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """A test as one lowered segment; `data`: (feeds, expected outputs) of each data set."""

    program: KernelProgram
    outputs: tuple[str, ...]
    data: tuple[tuple[Mapping[str, Array], tuple[Any, ...]], ...]


def load_cases(kinds: Sequence[str] = KINDS) -> dict[str, Callable[[], Case]]:
    """Return the tests by name, `kind/name`; each is read when called."""
    cases: dict[str, Callable[[], Case]] = {}
    for kind in kinds:
        for test in load_model_tests(kind=kind):
            cases[f"{kind}/{test.name}"] = lambda test=test, kind=kind: _read(test, kind)
    return dict(sorted(cases.items()))


def run_case(case: Case, run: Run, gpu: GpuTarget = ORIN) -> Outcome:
    """Run a test unchanged, and if that is not covered, with its parameters as constants.

    `gpu`: the target of the kernels; it need not be present unless `run` needs it.
    """
    outcome = _attempt(case, run, gpu)
    if outcome.status != "not covered":
        return outcome
    fixed = with_parameters(case)
    if fixed is None:
        return outcome
    second = _attempt(fixed, run, gpu)
    return replace(second, fixed=True)


def with_parameters(case: Case) -> Case | None:
    """Return the test with parameter inputs as constants; None if there are none.

    None also if no input would remain: a GPU would have nothing to compute.
    """
    names = _fed(case.model)
    read = {
        name
        for node in case.model.graph.node
        for index, name in enumerate(node.input)
        if index in PARAMETERS.get(node.op_type, ())
    }
    fixed = [index for index, name in enumerate(names) if name in read]
    if not fixed or len(fixed) == len(names) or len(case.data) != 1:
        return None
    inputs, expected = case.data[0]
    if not all(isinstance(inputs[index], np.ndarray) for index in fixed):
        return None
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    model.ir_version = max(model.ir_version, CONSTANTS_ALONE)
    for index in fixed:
        model.graph.initializer.append(numpy_helper.from_array(inputs[index], names[index]))
        (entry,) = (
            graph_input for graph_input in model.graph.input if graph_input.name == names[index]
        )
        model.graph.input.remove(entry)
    remaining = tuple(value for index, value in enumerate(inputs) if index not in fixed)
    return Case(case.name, case.kind, case.rtol, case.atol, model, ((remaining, expected),))


def prepare(case: Case, gpu: GpuTarget) -> Ready:
    """Lower a test's model as one GPU segment in FP32.

    Raises ImportModelError, BuildError: the build refuses the model; NotCoveredError: kernels do.
    """
    names = _fed(case.model)
    data = tuple(
        (dict(zip(names, inputs, strict=False)), expected) for inputs, expected in case.data
    )
    if not all(isinstance(value, np.ndarray) for feeds, _ in data for value in feeds.values()):
        raise NotCoveredError("an input is not a tensor; kernels take tensors")
    shapes = {name: np.shape(value) for name, value in data[0][0].items()} if data else {}
    with tempfile.TemporaryDirectory(prefix="tandem-backend-") as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(_raised(case.model), path)
        open_shapes = {name: shapes[name] for name in _open(case.model) if name in shapes}
        imported = import_model(path, shapes=open_shapes)
    if imported.bfloat16:
        raise NotCoveredError("a tensor has type BFLOAT16; engines have FP32 in its place")
    graph, _ = run_passes(imported.model)
    nodes = {str(node.name): "gpu0" for node in graph.graph}
    (segment,) = extract_segments(graph, nodes, ["gpu0"])
    program = lower_segment(segment.model, gpu=gpu, precision="fp32")
    return Ready(program, tuple(str(value.name) for value in graph.graph.outputs), data)


def _attempt(case: Case, run: Run, gpu: GpuTarget) -> Outcome:
    try:
        ready = prepare(case, gpu)
    except NotCoveredError as error:
        # The cause of a failed function expansion says more than the operator.
        cause = error.__cause__ if isinstance(error.__cause__, NotCoveredError) else error
        reasons = dict.fromkeys(cause.reasons.values())
        return Outcome("not covered", reasons=tuple(reasons) or (str(error),))
    except (ImportModelError, BuildError) as error:
        return Outcome("not covered", reasons=(str(error),))
    except Exception as error:  # noqa: BLE001  (the outcome records any exception)
        return Outcome("error", reasons=(f"while lowering: {_root_cause(error)}",))
    for feeds, expected in ready.data:
        try:
            results = run(ready.program, feeds)
            outputs = [results[name] for name in ready.outputs]
        except Exception as error:  # noqa: BLE001
            return Outcome("error", reasons=(f"while running: {_root_cause(error)}",))
        try:
            Runner.assert_similar_outputs(expected, outputs, rtol=case.rtol, atol=case.atol)
        except AssertionError as error:
            return Outcome("wrong", reasons=(" ".join(str(error).split())[:300],))
    return Outcome("passed")


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def _raised(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a model older than the importer reads to the first supported opset."""
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    if opset is None or opset >= OLDEST_OPSET:
        return model
    try:
        model.ir_version = max(model.ir_version, CONSTANTS_ALONE)
        return onnx.version_converter.convert_version(model, MIN_OPSET)
    except (RuntimeError, ValueError, onnx.version_converter.ConvertError) as error:
        raise ImportModelError(
            f"its opset {opset} cannot be raised to {MIN_OPSET}: {first_line(error)}"
        ) from error


def _fed(model: onnx.ModelProto) -> tuple[str, ...]:
    constant = {tensor.name for tensor in model.graph.initializer}
    return tuple(
        graph_input.name for graph_input in model.graph.input if graph_input.name not in constant
    )


def _open(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the inputs without a static shape."""

    def is_open(value: onnx.ValueInfoProto) -> bool:
        tensor = value.type.tensor_type
        return not tensor.HasField("shape") or not all(
            dim.HasField("dim_value") for dim in tensor.shape.dim
        )

    fed = set(_fed(model))
    return tuple(
        graph_input.name
        for graph_input in model.graph.input
        if graph_input.name in fed and is_open(graph_input)
    )


def _read(test: TestCase, kind: str) -> Case:
    """Read a test's model and data sets from memory or from the files of the onnx wheel."""
    if test.model is not None:
        assert test.data_sets is not None
        data = tuple((_arrays(inputs), _arrays(outputs)) for inputs, outputs in test.data_sets)
        return Case(test.name, kind, test.rtol, test.atol, test.model, data)
    if test.model_dir is None:
        return _read_light(test, kind)
    folder = Path(test.model_dir)
    model = onnx.load(folder / "model.onnx")
    sets = sorted(folder.glob("test_data_set*"))
    data = tuple(
        (
            _files(set_folder, "input", model.graph.input),
            _files(set_folder, "output", model.graph.output),
        )
        for set_folder in sets
    )
    return Case(test.name, kind, test.rtol, test.atol, model, data)


def _read_light(test: TestCase, kind: str) -> Case:
    """Read a network of the wheel: the suite feeds a ramp and ships the outputs."""
    assert test.url is not None
    path = _LIGHT / Path(test.url).name
    model = onnx.load(path)
    (name,) = _fed(model)
    (entry,) = (graph_input for graph_input in model.graph.input if graph_input.name == name)
    ramp = Runner.generate_dummy_data(entry, name=test.model_name)
    outputs = tuple(
        numpy_helper.to_array(onnx.load_tensor(path.with_name(f"{path.stem}_output_{index}.pb")))
        for index in range(len(model.graph.output))
    )
    return Case(test.name, kind, test.rtol, test.atol, model, (((ramp,), outputs),))


def _arrays(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_array(value) for value in values)


def _array(value: Any) -> Any:  # noqa: ANN401  (sequences are lists)
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _files(folder: Path, kind: str, kinds: Sequence[onnx.ValueInfoProto]) -> tuple[Any, ...]:
    count = len(list(folder.glob(f"{kind}_*.pb")))
    return tuple(_value(folder / f"{kind}_{at}.pb", kinds[at].type) for at in range(count))


def _value(path: Path, kind: onnx.TypeProto) -> Any:  # noqa: ANN401  (sequences are lists)
    if kind.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes()))
    return numpy_helper.to_array(onnx.load_tensor(path))
