"""Illegal networks and settings: the double of TensorRT refuses them, as a board would."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from model_fixtures import save
from onnx import TensorProto, helper
from tensorrt_fixtures import install, prepare

from toolkit.engine.build import BuildOptions, build_engine
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions

CONV = helper.make_node("Conv", ["x", "w"], ["y"], name="node")
RELU = helper.make_node("Relu", ["c"], ["y"], name="relu")
IMAGE = (1, 32, 16, 16)
ONES = np.ones((32, 32, 1, 1), np.float32)


@dataclass(frozen=True)
class Case:
    """A network and its settings, legal but for one thing. `says`: part of the double's log."""

    says: str = ""
    nodes: tuple[onnx.NodeProto, ...] = (CONV,)
    x: tuple[int | str, ...] = IMAGE
    y: tuple[int | str, ...] = IMAGE
    weights: Mapping[str, np.ndarray] = field(default_factory=lambda: {"w": ONES})
    flags: tuple[str, ...] = ("FP16", "INT8")
    ranges: Mapping[str, float] = field(default_factory=lambda: {"x": 2.0, "c": 3.0, "y": 4.0})
    dtypes: tuple[str, str] = ("INT8", "INT8")
    formats: tuple[str, str] = ("CHW32", "CHW32")
    local_dram: int = 1 << 30
    typed: bool = False


def one(op: str, *operands: str, **attributes: object) -> tuple[onnx.NodeProto, ...]:
    return (helper.make_node(op, operands or ["x"], ["y"], name="node", **attributes),)


LEGAL = Case()
HALF = Case(flags=("FP16",), ranges={}, dtypes=("HALF", "HALF"), formats=("CHW16", "CHW16"))
POOLED = Case(nodes=one("MaxPool", kernel_shape=[1, 1]), weights={}, ranges={"x": 2.0, "y": 2.0})
SUM = Case(
    nodes=(helper.make_node("Relu", ["x"], ["c"], name="r"), *one("Add", "x", "c")), weights={}
)  # fmt: skip
HWC4 = Case(
    x=(1, 3, 16, 16), weights={"w": ONES[:, :3]}, formats=("DLA_HWC4", "CHW32"),
)  # fmt: skip

ILLEGAL = {
    "INT8 without ranges": replace(LEGAL, ranges={}, says="Missing scale"),
    "an INT8 tensor inside without a range": replace(
        LEGAL,
        nodes=(helper.make_node("Conv", ["x", "w"], ["c"], name="node"), RELU),
        ranges={"x": 2.0, "y": 4.0},
        flags=("INT8",),
        says="has no other",
    ),
    "a kernel of 40x40": replace(
        LEGAL, x=(1, 8, 64, 64), y=(1, 8, 25, 25), weights={"w": np.ones((8, 8, 40, 40))},
        says="kernel_shape (40, 40) is beyond [1, 32]",
    ),
    "Sin": replace(LEGAL, nodes=one("Sin"), weights={}, says="SIN"),
    "a batch of 5000": replace(
        LEGAL, nodes=one("Relu"), x=(5000, 4, 2, 2), y=(5000, 4, 2, 2), weights={},
        says="exceeds max batch size allowed of 4096",
    ),
    "a dynamic batch": replace(LEGAL, x=("N", *IMAGE[1:]), y=("N", *IMAGE[1:]), says="dynamic"),
    "ports of two dimensions": replace(
        LEGAL, nodes=one("Gemm", "x", "w"), x=(1, 32), y=(1, 32), weights={"w": ONES[..., 0, 0]},
        says="x has 2 dimensions",
    ),
    "FP16 without its flag": replace(HALF, flags=(), says="without the flag FP16"),
    "FP32 in strong types": replace(HALF, flags=(), typed=True, says="FP32"),
    "FP32 ports": replace(HALF, dtypes=("FLOAT", "FLOAT"), says="only supports FP16 and Int8"),
    "INT8 ports without the flag": replace(LEGAL, flags=("FP16",), says="without the flag INT8"),
    "an added constant": replace(
        LEGAL, nodes=one("Add", "x", "w"), weights={"w": ONES[:1]}, says="layer w is not supported"
    ),
    "a factor": replace(
        HALF, nodes=one("Mul", "x", "w"), weights={"w": ONES[:1]}, says="layer w is not supported"
    ),
    "CHW16 in INT8": replace(LEGAL, formats=("CHW16", "CHW32"), says="INT8 in format CHW16"),
    "CHW32 in FP16": replace(HALF, formats=("CHW16", "CHW32"), says="HALF in format CHW32"),
    "a linear input": replace(LEGAL, formats=("LINEAR", "CHW32"), says="in format LINEAR"),
    "an output in HWC4": replace(LEGAL, formats=("CHW32", "DLA_HWC4"), says="output in DLA_HWC4"),
    "32 channels in HWC4": replace(LEGAL, formats=("DLA_HWC4", "CHW32"), says="32 channels"),
    "HWC4 before Relu": replace(
        HWC4, nodes=one("Relu"), y=(1, 3, 16, 16), weights={}, says="is no convolution"
    ),
    "ranges around a pooling differ": replace(
        POOLED, ranges={"x": 2.0, "y": 4.0}, says="dynamic ranges differ"
    ),
    "ranges of a sum differ": replace(SUM, says="dynamic ranges differ"),
    "more between layers than the pool holds": replace(
        LEGAL, nodes=(helper.make_node("Conv", ["x", "w"], ["c"], name="node"), RELU),
        local_dram=4096, says="DLA_LOCAL_DRAM",
    ),
    "GlobalAveragePool": replace(
        LEGAL, nodes=one("GlobalAveragePool"), y=(1, 32, 1, 1), weights={},
        says="GlobalAveragePool is not supported on DLA",
    ),
}  # fmt: skip


class Built:
    """A network in the double, with its plan and log."""

    def __init__(self, trt: ModuleType, case: Case, folder: Path) -> None:
        self.lines: list[str] = []
        logger = make_logger(trt, self.lines)
        self._builder = trt.Builder(logger)
        flags = ["STRONGLY_TYPED"] if case.typed else []
        self.network = self._builder.create_network(
            sum(1 << int(trt.NetworkDefinitionCreationFlag[name]) for name in flags)
        )
        path = save(
            folder / "m.onnx", case.nodes, {"x": case.x}, {"y": case.y},
            {name: array.astype(np.float32) for name, array in case.weights.items()},
            opset=17, dtype=TensorProto.FLOAT,
        )  # fmt: skip
        assert trt.OnnxParser(self.network, logger).parse_from_file(str(path))
        self.config = self._builder.create_builder_config()
        self.config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        for flag in (*case.flags, "DIRECT_IO"):
            self.config.set_flag(trt.BuilderFlag[flag])
        self.config.default_device_type, self.config.DLA_core = trt.DeviceType.DLA, 0
        pools = {"DLA_MANAGED_SRAM": 1 << 20, "DLA_LOCAL_DRAM": case.local_dram,
                 "DLA_GLOBAL_DRAM": 1 << 29}  # fmt: skip
        for pool, size in pools.items():
            self.config.set_memory_pool_limit(trt.MemoryPoolType[pool], size)
        ports = (self.network.get_input(0), self.network.get_output(0))
        for port, dtype, form in zip(ports, case.dtypes, case.formats, strict=True):
            port.dtype = trt.DataType[dtype]
            port.allowed_formats = 1 << int(trt.TensorFormat[form])
        layers = [self.network.get_layer(at) for at in range(self.network.num_layers)]
        for tensor in (ports[0], *(layer.get_output(0) for layer in layers)):
            if tensor.name in case.ranges:
                tensor.set_dynamic_range(-case.ranges[tensor.name], case.ranges[tensor.name])
        self.can_run = {layer.name: self.config.can_run_on_DLA(layer) for layer in layers}
        self.plan = self._builder.build_serialized_network(self.network, self.config)


def make_logger(trt: ModuleType, lines: list[str]) -> object:
    class Logger(trt.ILogger):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: object, msg: str) -> None:
            lines.append(msg)

    return Logger()


@pytest.fixture
def trt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("10.3.0", tmp_path, monkeypatch)


def imported(version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    install(version, folder, monkeypatch)
    import tensorrt

    return tensorrt


@pytest.mark.parametrize("case", [LEGAL, HALF, POOLED, HWC4], ids=["INT8", "FP16", "pool", "HWC4"])
def test_a_legal_network_is_built(case: Case, trt: ModuleType, tmp_path: Path) -> None:
    built = Built(trt, case, tmp_path)
    assert built.plan is not None, built.lines
    assert all(built.can_run.values())


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_network_is_refused_with_the_reason(
    name: str, trt: ModuleType, tmp_path: Path
) -> None:
    built = Built(trt, ILLEGAL[name], tmp_path)
    assert built.plan is None
    assert any(ILLEGAL[name].says in line for line in built.lines), built.lines


def test_a_tensor_without_a_range_leaves_int8_and_the_log_says_so(
    trt: ModuleType, tmp_path: Path
) -> None:
    inside = ILLEGAL["an INT8 tensor inside without a range"]
    built = Built(trt, replace(inside, flags=("FP16", "INT8")), tmp_path)
    assert built.plan is not None
    assert any(line.startswith("Missing scale and zero-point for tensor c") for line in built.lines)


def test_fallback_folds_constants_and_sends_other_layers_to_the_gpu(
    trt: ModuleType, tmp_path: Path
) -> None:
    folded = replace(ILLEGAL["an added constant"], flags=("FP16", "INT8", "GPU_FALLBACK"))
    assert places(trt, Built(trt, folded, tmp_path)) == ["DLA"]
    outside = replace(ILLEGAL["Sin"], flags=("FP16", "INT8", "GPU_FALLBACK"))
    assert places(trt, Built(trt, outside, tmp_path)) == ["DLA", "CaskConvolution"]


def places(trt: ModuleType, built: Built) -> list[str]:
    runtime = trt.Runtime(make_logger(trt, []))
    runtime.DLA_core = 0
    inspector = runtime.deserialize_cuda_engine(built.plan).create_engine_inspector()
    information = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    return [row["LayerType"] for row in information["Layers"]]


def test_a_layer_is_asked_before_the_build(trt: ModuleType, tmp_path: Path) -> None:
    assert Built(trt, ILLEGAL["Sin"], tmp_path).can_run == {"node": False}
    assert Built(trt, ILLEGAL["an added constant"], tmp_path).can_run == {"w": False, "node": True}


def test_a_core_holds_16_loadables_at_a_time(trt: ModuleType, tmp_path: Path) -> None:
    lines: list[str] = []
    runtime, plan = trt.Runtime(make_logger(trt, lines)), Built(trt, LEGAL, tmp_path).plan
    runtime.DLA_core = 0
    engines = [runtime.deserialize_cuda_engine(plan) for _ in range(16)]
    assert all(engine is not None for engine in engines)
    assert runtime.deserialize_cuda_engine(plan) is None
    assert "holds 16 loadables of 16" in lines[-1]
    runtime.DLA_core = 1
    assert runtime.deserialize_cuda_engine(plan) is not None
    runtime.DLA_core = 0
    del engines[0]
    assert runtime.deserialize_cuda_engine(plan) is not None


def test_an_address_that_is_not_aligned_is_not_taken(trt: ModuleType, tmp_path: Path) -> None:
    runtime = trt.Runtime(make_logger(trt, []))
    runtime.DLA_core = 0
    engine = runtime.deserialize_cuda_engine(Built(trt, LEGAL, tmp_path).plan)
    context = engine.create_execution_context()
    assert [context.set_tensor_address("x", 4096 + at) for at in (0, 64, 256)] == [
        True, False, True,
    ]  # fmt: skip


def test_the_type_of_a_tensor_is_not_set_from_11_1_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = imported("11.4.1", tmp_path, monkeypatch)
    with pytest.raises(AttributeError, match="'dtype' of 'ITensor' object has no setter"):
        Built(trt, replace(HALF, flags=(), typed=True), tmp_path)


def test_an_exception_of_a_logger_is_said_and_ends_nothing(
    trt: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    class Logger(trt.ILogger):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: object, msg: str) -> None:
            raise ValueError("I/O operation on closed file")

    builder = trt.Builder(Logger())
    del builder
    assert "Exception caught in log(): I/O operation on closed file" in capfd.readouterr().err


@pytest.mark.parametrize("version", ["8.6.1", "11.4.1"])
def test_an_engine_with_a_constant_operand_is_built_with_fallback_on_the_dla_alone(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    weights = {
        "w": rng.normal(size=(16, 16, 3, 3)).astype(np.float32) * np.float32(0.1),
        "s": rng.random((1, 16, 1, 1)).astype(np.float32) + np.float32(0.5),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1] * 4),
        helper.make_node("Sigmoid", ["c"], ["g"], name="sigmoid"),
        helper.make_node("Mul", ["g", "s"], ["y"], name="mul"),
    ]
    shape = (1, 16, 16, 16)
    model = save(tmp_path / "m.onnx", nodes, {"x": shape}, {"y": shape}, weights)
    data = [{"x": rng.normal(size=shape).astype(np.float32)} for _ in range(3)]
    options = BuildOptions(
        data=data, precision="int8", kernels=False, accept_loss=True,
        plan=PlanOptions(forced=Forced(dla=("all",))),
    )  # fmt: skip
    build_engine(model, "orin-nx-16gb", tmp_path / "m.engine", options)
    install(version, tmp_path, monkeypatch)
    row = prepare(tmp_path / "m.engine", tmp_path / "plans")
    assert (row.problem, row.refused_layers, row.fallback) == (None, (), True)
