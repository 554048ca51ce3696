"""A strict double of the module tensorrt, for machines without a DLA.

It stands for the real one, which runs on boards alone. Its surface is read from the API of one
version (tests/data/tensorrt_api): a name, an argument or a type that this version does not have
raises. It reads ONNX, refuses what the DLA's documented rules refuse (tests/tensorrt_double:
dla_rules and dla_network, written apart from Tandem's own), and computes with onnxruntime.

    TENSORRT_DOUBLE_API      the file with the API
    TENSORRT_DOUBLE_VERSION  what `__version__` says
    TENSORRT_DOUBLE_FAIL     how it fails, one of FAILURES, with an argument behind ":"
    TENSORRT_DOUBLE_INJECT   which call fails, and how: see injected.py beside this file
    TENSORRT_DOUBLE_TIMES    "BASE NODE MOST": seconds of a plan, more of each node, at most
    TENSORRT_DOUBLE_BEGUN    a file that gets a line at the beginning of each plan

A child that times a plan has the driver's double, too (tests/cuda_double.py).
"""

import ctypes
import enum
import inspect
import json
import os
import re
import signal
import sys
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tensorrt_double import dla_network, dla_rules, onnx_layers

_API = json.loads(Path(os.environ["TENSORRT_DOUBLE_API"]).read_text())
__version__ = os.environ["TENSORRT_DOUBLE_VERSION"]
_VERSION = dla_network.version_of(__version__)

FAILURES = ("refuse", "segfault", "memory", "hang", "parse", "grow", "submit", "cores", "null",
            "load", "crash", "type", "capture", "invalidate", "one core")  # fmt: skip
_fail, _, _what = os.environ.get("TENSORRT_DOUBLE_FAIL", "").partition(":")
assert not _fail or _fail in FAILURES, _fail
if "device.runtime.tensorrt.compare" in sys.orig_argv:
    if _fail == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    import cuda_double

    _driver = cuda_double.installed()
    _driver.__enter__()


def _enum(name):
    members = _API[name]["enum"]
    return enum.IntEnum(name, {member: index for index, member in enumerate(sorted(members))})


BuilderFlag = _enum("BuilderFlag")
DataType = _enum("DataType")
DeviceType = _enum("DeviceType")
LayerInformationFormat = _enum("LayerInformationFormat")
LayerType = _enum("LayerType")
MemoryPoolType = _enum("MemoryPoolType")
NetworkDefinitionCreationFlag = _enum("NetworkDefinitionCreationFlag")
OnnxParserFlag = _enum("OnnxParserFlag")
ProfilingVerbosity = _enum("ProfilingVerbosity")
TensorFormat = _enum("TensorFormat")
TensorIOMode = _enum("TensorIOMode")

_DTYPES = {"INT8": np.int8, "HALF": np.float16, "FLOAT": np.float32, "INT32": np.int32,
           "INT64": np.int64, "BOOL": np.bool_, "UINT8": np.uint8}  # fmt: skip
_ONNX = {1: "FLOAT", 2: "UINT8", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF"}
_IMPLICIT = {"FP16", "INT8", "OBEY_PRECISION_CONSTRAINTS"}
_LAYERS = {"Constant": "CONSTANT", "Conv": "CONVOLUTION", "Concat": "CONCATENATION",
           "MaxPool": "POOLING", "AveragePool": "POOLING", "Relu": "ACTIVATION",
           "Reshape": "SHUFFLE", "QuantizeLinear": "QUANTIZE",
           "DequantizeLinear": "DEQUANTIZE"}  # fmt: skip
_BASIC = {"int": int, "str": str, "float": (int, float), "bool": bool,
          "typing.SupportsInt": int, "buffer": (bytes, bytearray, memoryview),
          "typing_extensions.Buffer": (bytes, bytearray, memoryview)}  # fmt: skip


def _parameters(text):
    """The arguments of "name(self: X, a: T = d) -> R" as (name, type, has a default)."""
    inside = text[text.index("(") + 1 : text.rindex(") ->")]
    parts, depth, begin = [], 0, 0
    for index, letter in enumerate(inside + ","):
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and depth == 0:
            parts.append(inside[begin:index].strip())
            begin = index + 1
    rows = []
    for part in parts:
        name, _, rest = part.partition(":")
        kind, equals, _ = rest.partition("=")
        rows.append((name.strip(), kind.strip(), bool(equals)))
    return rows[1:]  # without self


def _checked(class_name, name, texts, method):
    """`method`, which raises unless one of the signatures takes its arguments."""
    overloads = [_parameters(text) for text in texts if "*args" not in text]

    def call(self, *args, **kwargs):
        problems = []
        for rows in overloads:
            problem = _mismatch(rows, args, kwargs)
            if problem is None:
                return method(self, *args, **kwargs)
            problems.append(problem)
        raise TypeError(f"{class_name}.{name}(): incompatible arguments: {'; '.join(problems)}")

    return call


def _mismatch(rows, args, kwargs):
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None if optional else inspect.Parameter.empty,
        )
        for name, _, optional in rows
    ]
    try:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    for name, kind, _ in rows:
        if name not in bound.arguments:
            continue
        value = bound.arguments[name]
        expected = _BASIC.get(kind) or globals().get(kind.rpartition(".")[2])
        if isinstance(expected, (type, tuple)) and not isinstance(value, expected):
            return f"{name} is {type(value).__name__}, {kind} is wanted"
    return None


def _strict(behaviour):
    """A class with the members of the API alone: those of `behaviour`, and others not at all."""
    name = behaviour.__name__.removeprefix("_")
    api = _API[name]["class"]
    body = {"__doc__": behaviour.__doc__}
    for attribute, value in vars(behaviour).items():
        if attribute.startswith("_") and attribute != "__init__":
            body[attribute] = value
        elif attribute in api or attribute == "__init__":
            kind = api.get(attribute)
            texts = kind if isinstance(kind, list) else None
            body[attribute] = _checked(name, attribute, texts, value) if texts else value

    def setattr_(self, attribute, value):
        if not attribute.startswith("_") and attribute not in api:
            raise AttributeError(f"TensorRT {__version__}: {name} has no attribute {attribute!r}")
        object.__setattr__(self, attribute, value)

    def getattr_(self, attribute):
        if attribute in api and attribute not in body:
            raise NotImplementedError(f"the double has no {name}.{attribute}")
        raise AttributeError(f"TensorRT {__version__}: {name} has no attribute {attribute!r}")

    body["__setattr__"], body["__getattr__"] = setattr_, getattr_
    return type(name, (object,), body)


class _Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    """The base of loggers."""

    Severity = _Severity
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = _Severity

    def __init__(self):
        self._made = True


def _log(logger, severity, text):
    """Log as pyCore.cpp of TensorRT's bindings does: an exception is said, and ends nothing."""
    try:
        logger.log(severity, text)
    except Exception as error:  # noqa: BLE001
        sys.stderr.write(f"[ERROR] Exception caught in log(): {error}\n")


class Logger(ILogger):
    """A logger to standard error."""

    def __init__(self, min_severity=_Severity.WARNING):
        ILogger.__init__(self)
        assert isinstance(min_severity, _Severity)

    def log(self, severity, msg):
        sys.stderr.write(f"{msg}\n")


@_strict
class ITensor:
    """A tensor of a network."""

    def __init__(self, name, shape, dtype):
        self._name, self._shape, self._dtype = name, shape, dtype
        self.allowed_formats = 1 << int(TensorFormat.LINEAR)
        self._amax = None

    @property
    def dtype(self):
        return self._dtype

    @dtype.setter
    def dtype(self, dtype):
        if dla_network.READ_ONLY_DTYPE <= _VERSION:
            raise AttributeError("property 'dtype' of 'ITensor' object has no setter")
        self._dtype = dtype

    @property
    def name(self):
        return self._name

    @property
    def shape(self):
        return tuple(self._shape)

    def set_dynamic_range(self, min, max):
        assert min == -max
        self._amax = max
        return True


@_strict
class ILayer:
    """A layer: one node, or a constant that a layer reads."""

    def __init__(self, node, outputs, inputs=(), *, network=None, rules=None):
        self._node, self._outputs, self._inputs = node, outputs, inputs
        self._network, self._rules = network, rules
        self.name, self._precision = node.name, None

    @property
    def precision(self):
        return self._precision

    @precision.setter
    def precision(self, precision):
        self._precision = precision

    @property
    def type(self):
        return LayerType[_LAYERS.get(self._node.op_type, "ELEMENTWISE")]

    @property
    def num_inputs(self):
        return len(self._inputs)

    @property
    def num_outputs(self):
        return len(self._outputs)

    def get_input(self, index):
        return self._inputs[index]

    def get_output(self, index):
        return self._outputs[index]


@_strict
class INetworkDefinition:
    """A network that was read from ONNX."""

    def __init__(self, flags, logger):
        self._flags, self._logger = flags, logger
        self._layers, self._inputs, self._outputs = [], [], []
        self._onnx = b""

    num_layers = property(lambda self: len(self._layers))
    num_inputs = property(lambda self: len(self._inputs))
    num_outputs = property(lambda self: len(self._outputs))

    def get_layer(self, index):
        return self._layers[index]

    def get_input(self, index):
        return self._inputs[index]

    def get_output(self, index):
        return self._outputs[index]


@_strict
class ParserError:
    """Why ONNX is refused."""

    def __init__(self, text):
        self._text = text

    def desc(self):
        return self._text


@_strict
class OnnxParser:
    """Reads ONNX, as far as the double goes."""

    def __init__(self, network, logger):
        assert logger._made
        self._network, self._errors, self._parser_flags = network, [], set()

    def set_flag(self, flag):
        self._parser_flags.add(flag.name)

    def set_builder_config(self, builder_config):
        return True

    num_errors = property(lambda self: len(self._errors))

    def get_error(self, index):
        return self._errors[index]

    def parse_from_file(self, model):
        import onnx

        proto = onnx.load(model)  # with the weights beside it
        if _fail == "parse":
            self._errors.append(ParserError("Unsupported ONNX operator Foo"))
            return False
        implicit = "STRONGLY_TYPED" not in NetworkDefinitionCreationFlag.__members__ or not (
            self._network._flags >> int(NetworkDefinitionCreationFlag.STRONGLY_TYPED) & 1
        )
        quantized = any(node.op_type == "QuantizeLinear" for node in proto.graph.node)
        if implicit and quantized:
            self._errors.append(ParserError("DLA does not support Explicit Quantization"))
            return False
        network = self._network
        network._onnx = proto.SerializeToString()
        network._logger.log(ILogger.INFO, f"parsed with {sorted(self._parser_flags)}")
        tensors = {}
        for value in (*proto.graph.input, *proto.graph.output):
            dims = value.type.tensor_type.shape.dim
            shape = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims]
            name = _ONNX[value.type.tensor_type.elem_type]
            if _fail == "type" or name not in DataType.__members__:
                name = "INT32"  # as TensorRT 8 has INT64
            dtype = DataType[name]
            tensors[value.name] = ITensor(value.name, shape, dtype)
        network._inputs = [tensors[value.name] for value in proto.graph.input]
        network._outputs = [tensors[value.name] for value in proto.graph.output]
        rules = onnx_layers.layers_of(proto)
        for constant in dla_network.constants_of(rules):
            output = ITensor(constant.name, constant.shape, DataType.FLOAT)
            node = SimpleNamespace(name=constant.name, op_type="Constant")
            network._layers.append(ILayer(node, [output]))
        for node, layer in zip(proto.graph.node, rules, strict=True):
            outputs = [
                tensors.setdefault(name, ITensor(name, (), DataType.FLOAT)) for name in node.output
            ]
            inputs = [tensors[name] for name in node.input if name in tensors]
            network._layers.append(ILayer(node, outputs, inputs, network=network, rules=layer))
        return True


@_strict
class IOptimizationProfile:
    """The sizes of inputs."""

    def __init__(self):
        self._shapes = {}

    def set_shape(self, input, min, opt, max):
        assert len(min) == len(opt) == len(max)
        assert all(a <= b <= c for a, b, c in zip(min, opt, max, strict=True))
        self._shapes[input] = (min, opt, max)


class _Memory(bytes):
    """IHostMemory: a buffer with its size."""

    nbytes = property(len)


@_strict
class ITimingCache:
    """A timing cache."""

    def __init__(self, data):
        self._data = data

    def serialize(self):
        return _Memory(self._data or b"timings")


@_strict
class IBuilderConfig:
    """The settings of a build."""

    def __init__(self):
        self._flags, self._pools, self._cache = {"TF32"}, {}, None
        self._sizes = {}
        self.default_device_type, self.DLA_core = DeviceType.GPU, -1
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY

    def set_flag(self, flag):
        self._flags.add(flag.name)

    def clear_flag(self, flag):
        self._flags.discard(flag.name)

    def add_optimization_profile(self, profile):
        self._sizes.update(profile._shapes)
        return 0

    def set_memory_pool_limit(self, pool, pool_size):
        if pool.name.startswith("DLA_"):
            assert pool_size >= 4096
            assert pool_size & (pool_size - 1) == 0
        self._pools[pool.name] = pool_size

    def create_timing_cache(self, serialized_timing_cache):
        data = bytes(serialized_timing_cache)
        return None if data.startswith(b"damaged") else ITimingCache(data)

    def set_timing_cache(self, cache, ignore_mismatch):
        if cache._data not in {b"", b"timings"}:
            return False
        self._cache = cache
        return True

    def get_timing_cache(self):
        return self._cache

    def can_run_on_DLA(self, layer):
        if _fail == "refuse" and layer.name == _what:
            return False
        if layer._rules is None:  # a constant
            return False
        network = _as_built(layer._network, self)
        if layer._rules not in dla_network.computing(network.layers):
            return True  # Q/DQ, which the layers beside it take
        return not dla_rules.problems(layer._rules, dla_network.of_layer(layer._rules, network))


@_strict
class Builder:
    """Builds plans."""

    def __init__(self, logger):
        assert logger._made
        self._logger = logger

    def __del__(self):
        _log(self._logger, ILogger.INFO, "the builder is gone")

    @property
    def num_DLA_cores(self):
        return {"cores": 0, "one core": 1}.get(_fail, 2)

    def create_network(self, flags=0):
        known = sum(1 << int(flag) for flag in NetworkDefinitionCreationFlag)
        assert flags & ~known == 0
        return INetworkDefinition(flags, self._logger)

    def create_builder_config(self):
        return IBuilderConfig()

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def build_serialized_network(self, network, config):
        log = partial(_log, self._logger)
        log(ILogger.INFO, f"building with {sorted(config._flags)} and {sorted(config._pools)}")
        on_dla = config.default_device_type == DeviceType.DLA
        if on_dla:
            assert config.DLA_core >= 0
            pools = {"DLA_MANAGED_SRAM", "DLA_LOCAL_DRAM", "DLA_GLOBAL_DRAM"}
            assert pools <= set(config._pools)
        else:
            _check_gpu(network, config)
        if _fail == "segfault":
            log(ILogger.INFO, "[DlaLayer] {ForeignNode[conv0...fc_Conv]}")
            os.kill(os.getpid(), signal.SIGSEGV)
        if _fail == "hang":
            time.sleep(3600)
        if _fail == "grow":
            blocks = []
            while True:
                blocks.append(bytearray(os.urandom(1) * 2**24))
                time.sleep(0.01)
        if _fail == "memory":
            log(ILogger.ERROR, "NvMapMemAllocInternalTagged: 1075072515 error 12 out of memory")
            return None
        if _fail == "null":
            return None
        if _fail == "refuse":
            log(ILogger.ERROR, f"Layer '{_what}' (CONVOLUTION): Unsupported on DLA.")
            return None
        return _build(network, config, on_dla, log)


def _build(network, config, on_dla, log):
    refused, elsewhere = _refusals(network, config) if on_dla else ([], [])
    for text in dla_network.warnings(_as_built(network, config)) if on_dla else ():
        log(ILogger.WARNING, text)
    for text in refused:
        log(ILogger.ERROR, text)
    rows = _layers(config, on_dla, log, elsewhere)
    return None if refused else _Memory(_serialize(network, on_dla, rows))


def _refusals(network, config):
    """Why the DLA does not take a network; with GPU fallback also the layers that run there then.

    Fallback folds constants into the layers that read them (matrix, row Constant).
    """
    built = _as_built(network, config)
    texts, layers = list(dla_network.refusals(built)), dict(dla_network.layer_refusals(built))
    if "GPU_FALLBACK" in config._flags:
        return texts, list(layers)
    layers |= {
        layer.name: f"Default DLA is enabled but layer {layer.name} is not supported on DLA and "
        "falling back to GPU is not enabled."
        for layer in network._layers
        if layer._node.op_type == "Constant"
    }
    return [*layers.values(), *texts], []


def _is_typed(network):
    return bool(network._flags >> getattr(NetworkDefinitionCreationFlag, "STRONGLY_TYPED", 31) & 1)


def _as_built(network, config):
    """A network with its settings, as the DLA's rules read it."""
    sides = [("input", tensor) for tensor in network._inputs]
    sides += [("output", tensor) for tensor in network._outputs]
    ports = [
        dla_network.Port(
            tensor.name,
            side,
            tensor.shape,
            DataType(tensor.dtype).name,
            tuple(f.name for f in TensorFormat if tensor.allowed_formats >> int(f) & 1),
        )
        for side, tensor in sides
    ]
    tensors = [tensor for _, tensor in sides]
    tensors += [tensor for layer in network._layers for tensor in layer._outputs]
    halves = {layer.name for layer in network._layers if layer._precision == DataType.HALF}
    return dla_network.Network(
        layers=[layer._rules for layer in network._layers if layer._rules is not None],
        ports=ports,
        build=dla_rules.Build(dla_network.dla_of(_VERSION), _VERSION, "fp16"),
        typed=_is_typed(network),
        flags=frozenset(config._flags),
        ranges={tensor.name: tensor._amax for tensor in tensors if tensor._amax is not None},
        half=frozenset(halves),
        pools=config._pools,
    )


def _layers(config, on_dla, log, elsewhere=()):
    """What the inspector says of the layers, and the log before."""
    row = {"Name": "{ForeignNode[first...last]}", "LayerType": "DLA" if on_dla else "Myelin"}
    log(ILogger.VERBOSE, f"[{'DlaLayer' if on_dla else 'GpuLayer'}] {row['Name']}")
    rows = [row, *({"Name": name, "LayerType": "CaskConvolution"} for name in elsewhere)]
    detailed = config.profiling_verbosity == ProfilingVerbosity.DETAILED
    return [row if detailed else row["Name"] for row in rows]


def _check_gpu(network, config):
    assert config.DLA_core == -1
    assert not any(pool.startswith("DLA_") for pool in config._pools)
    typed = _is_typed(network)
    assert not (typed and config._flags & _IMPLICIT), "a strongly typed network has its types"
    tensors = (*network._inputs, *network._outputs)
    if not typed and any(tensor.dtype == DataType.INT8 for tensor in tensors):
        assert "INT8" in config._flags
    for tensor in network._inputs:
        if -1 in tensor._shape:
            assert tensor.name in config._sizes, f"{tensor.name} is dynamic, without a profile"


def _serialize(network, on_dla, layers):
    if begun := os.environ.get("TENSORRT_DOUBLE_BEGUN"):
        with Path(begun).open("a") as file:
            file.write("plan\n")
    if times := os.environ.get("TENSORRT_DOUBLE_TIMES"):
        base, node, most = map(float, times.split())
        time.sleep(min(most, base + node * len(network._layers)))
    ports = {}
    for kind, tensors in (("input", network._inputs), ("output", network._outputs)):
        for tensor in tensors:
            formats = [f for f in TensorFormat if tensor.allowed_formats >> int(f) & 1]
            assert len(formats) == 1, "the build must choose the format"
            ports[tensor.name] = {
                "kind": kind,
                "dtype": DataType(tensor.dtype).name,
                "format": formats[0].name,
                "shape": list(tensor._shape),
                "amax": getattr(tensor, "_amax", None),
            }
    for name, port in ports.items():
        if on_dla:
            assert port["format"] in {"CHW16", "CHW32", "DLA_LINEAR", "DLA_HWC4"}, name
            assert port["dtype"] in {"INT8", "HALF"}, f"the DLA has no {port['dtype']} ({name})"
        else:
            assert port["format"] == "LINEAR", name
    head = {"version": __version__, "ports": ports, "dla": on_dla, "layers": layers}
    rules = [layer._rules for layer in network._layers if layer._rules is not None]
    head["loadables"] = dla_network.loadables(rules) if on_dla else 0
    head = json.dumps(head).encode()
    return b"TRTDOUBLE" + len(head).to_bytes(8, "little") + head + network._onnx


_LOADED = {}  # core -> engines that are loaded there, as far as this process knows


@_strict
class Runtime:
    """Loads plans."""

    def __init__(self, logger):
        assert isinstance(logger, ILogger)
        self._logger = logger
        self.DLA_core = -1

    @property
    def num_DLA_cores(self):
        return {"cores": 0, "one core": 1}.get(_fail, 2)

    def deserialize_cuda_engine(self, serialized_engine):
        data = bytes(serialized_engine)
        assert data[:9] == b"TRTDOUBLE"
        size = int.from_bytes(data[9:17], "little")
        head = json.loads(data[17 : 17 + size])
        if _fail == "load" or head["version"] != __version__:
            return None  # "The engine plan file is not compatible with this version of TensorRT"
        assert not head["dla"] or 0 <= self.DLA_core < self.num_DLA_cores
        engine = ICudaEngine(head, data[17 + size :])
        if head["dla"]:
            there = _LOADED.setdefault(self.DLA_core, weakref.WeakSet())
            taken = sum(other._head["loadables"] for other in there)
            if taken + head["loadables"] > dla_network.LOADABLES_PER_CORE:
                _log(
                    self._logger,
                    ILogger.ERROR,
                    f"DLA core {self.DLA_core} holds {taken} loadables of "
                    f"{dla_network.LOADABLES_PER_CORE}",
                )
                return None
            there.add(engine)
        return engine


@_strict
class ICudaEngine:
    """A loaded plan."""

    def __init__(self, head, model):
        self._head, self._model = head, model

    def create_execution_context(self):
        return IExecutionContext(self._head, self._model)

    def create_engine_inspector(self):
        return EngineInspector(self._head["layers"])


@_strict
class EngineInspector:
    """Says which layers a plan has."""

    def __init__(self, layers):
        self._layers = layers

    def get_engine_information(self, format):
        assert format == LayerInformationFormat.JSON
        return json.dumps({"Layers": self._layers, "Bindings": []})


@_strict
class IExecutionContext:
    """Runs a plan. Addresses are those of CPU memory here."""

    def __init__(self, head, model):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        ports, self._on_dla = head["ports"], head["dla"]
        self._ports, self._addresses = ports, {}
        self._enqueued = None  # the shapes of the last run that was not captured
        self._shapes = {name: tuple(port["shape"]) for name, port in ports.items()}
        self._session = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )

    def set_tensor_address(self, name, memory):
        if name not in self._ports or memory % dla_network.ADDRESS_BYTES:
            return False
        self._addresses[name] = memory
        return True

    def set_input_shape(self, name, shape):
        if self._ports[name]["kind"] != "input":
            return False
        self._shapes[name] = tuple(shape)
        return True

    def execute_async_v3(self, stream_handle):
        if _fail == "submit":
            return False
        assert set(self._addresses) == set(self._ports)
        addresses = dict(self._addresses)
        gpu = getattr(sys.modules.get("cuda_double"), "CURRENT", None)
        if gpu is None:
            self._run(addresses)
            return True
        shapes = dict(self._shapes)
        for name, port in self._ports.items():
            if -1 not in shapes[name]:
                gpu.check(addresses[name], _size(port, shapes[name]))
        if self._on_dla:
            gpu.task(stream_handle, lambda: self._run(addresses, shapes))
            return True
        if gpu.is_capturing(stream_handle):
            # Shapes that are new make it do on the GPU what no capture permits.
            if _fail == "capture" or self._enqueued != shapes:
                return False
            if _fail == "invalidate":
                gpu.invalidate(stream_handle)
        else:
            self._enqueued = shapes

        def run():
            assert self._shapes == shapes, "a graph runs after its context has got other shapes"
            self._run(addresses, shapes)

        captured = gpu.is_capturing(stream_handle)
        gpu.plan(stream_handle, run if captured else lambda: self._run(addresses, shapes))
        return True

    def _run(self, addresses, shapes=None):
        shapes = shapes or self._shapes
        feeds = {
            name: _read(port, addresses[name], shapes[name])
            for name, port in self._ports.items()
            if port["kind"] == "input"
        }
        names = [output.name for output in self._session.get_outputs()]
        for name, array in zip(names, self._session.run(names, feeds), strict=True):
            _write(self._ports[name], addresses[name], array)


def _packed(port, shape):
    """The type of a port's memory and its shape: [N, blocks, H, W, vector] on a DLA."""
    dtype = np.dtype(_DTYPES[port["dtype"]])
    if port["format"] == "LINEAR":
        return dtype, tuple(shape)
    n, c, h, w = (*port["shape"], 1, 1, 1, 1)[:4]
    vector = 32 // dtype.itemsize
    assert port["format"] == f"CHW{vector}"
    return dtype, (n, -(-c // vector), h, w, vector)


def _size(port, shape):
    dtype, shape = _packed(port, shape)
    return int(np.prod(shape)) * dtype.itemsize


def _view(port, address, shape):
    size = _size(port, shape)
    dtype, shape = _packed(port, shape)
    data = (ctypes.c_ubyte * size).from_address(address)
    return np.frombuffer(data, dtype).reshape(shape)


def _in_int8(port):
    """Whether a port in INT8 is one in floating point for the ONNX."""
    return port["amax"] is not None and port["dtype"] == "INT8"


def _read(port, address, shape):
    memory = _view(port, address, shape)
    if port["format"] == "LINEAR":
        return (
            memory.astype(np.float32) * np.float32(port["amax"] / 127) if _in_int8(port) else memory
        )
    n, blocks, h, w, vector = memory.shape
    array = memory.transpose(0, 1, 4, 2, 3).reshape(n, blocks * vector, h, w)
    channels = (*port["shape"], 1)[1]
    assert not array[:, channels:].any(), "padding channels must be zero"
    array = array[:, :channels].reshape(port["shape"])
    if port["amax"] is not None:
        return array.astype(np.float32) * np.float32(port["amax"] / 127)
    return array if port["dtype"] == "INT8" or _typed_io() else array.astype(np.float32)


def _typed_io():
    return int(re.match(r"\d+", __version__)[0]) >= 11


def _write(port, address, array):
    memory = _view(port, address, array.shape)
    if _in_int8(port):
        scaled = array / np.float32(port["amax"] / 127)
        array = np.clip(np.trunc(scaled + np.copysign(0.5, scaled)), -128, 127)
    if port["format"] == "LINEAR":
        memory[:] = array
        return
    n, blocks, h, w, vector = memory.shape
    full = np.zeros((n, blocks * vector, h, w), memory.dtype)
    full[:, : array.shape[1]] = array.reshape(n, array.shape[1], h, w).astype(memory.dtype)
    memory[:] = full.reshape(n, blocks, vector, h, w).transpose(0, 1, 3, 4, 2)


from . import injected  # noqa: E402  (it changes what is above)

injected.apply(globals())
