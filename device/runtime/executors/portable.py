"""Runs a segment with onnxruntime on the CPU: on any machine, and as the reference for the others.

onnxruntime is imported only when a segment is opened.
"""

import platform
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt

from device.engine.file import Engine
from device.engine.manifest import Portable, Segment, TensorInfo
from device.errors import SessionError, shortened
from device.runtime.executors.protocol import Executor, SegmentContext

Array = npt.NDArray[Any]
Session = TypeVar("Session")

# onnxruntime's name of a tensor type, and ours.
_TYPES: dict[str, str] = {
    "tensor(bool)": "bool",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(int16)": "int16",
    "tensor(uint16)": "uint16",
    "tensor(float16)": "float16",
    "tensor(int32)": "int32",
    "tensor(uint32)": "uint32",
    "tensor(float)": "float32",
    "tensor(int64)": "int64",
    "tensor(uint64)": "uint64",
    "tensor(double)": "float64",
}

# Keys of onnxruntime's session configuration, with why.
_CONFIG: tuple[tuple[str, str], ...] = (
    # Waiting threads sleep: between two frames the board has better things to do than spin.
    ("session.intra_op.allow_spinning", "0"),
    ("session.inter_op.allow_spinning", "0"),
)
_EXACT_PRODUCTS = ("session.x64quantprecision", "1")
_FLOAT_PRODUCTS = ("session.disable_quant_qdq", "1")
# Rewrites of onnxruntime (1.31 at least) that change results: this one drops the lower bound of a
# Clip before Q where the scale is below about 1e-7, and with it the rectifier.
_DISABLED = ("ClipQuantRewrite",)
_FATAL = 4  # onnxruntime's log level for the whole process: its errors are raised to us anyway


def int8_products_saturate(machine: str, flags: frozenset[str]) -> bool:
    """Whether the CPU's fast INT8 products saturate at 16 bits: quick and wrong.

    So they do on x86 without VNNI. The exact way costs twice the time, so it is taken only there.
    """
    return machine in {"x86_64", "AMD64"} and not flags & {"avx512_vnni", "avx_vnni"}


def start_exact(start: Callable[[tuple[tuple[str, str], ...]], Session]) -> Session:
    """Start a session of onnxruntime whose INT8 products are exact on this CPU.

    `start` takes keys of the session's configuration. onnxruntime's exact products fail where
    nodes share weights: it stores them anew for each node under one name. There the nodes between
    Q/DQ pairs run in float, which is exact, too, and slower.
    """
    if not int8_products_saturate(platform.machine(), _cpu_flags()):
        return start(())
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail

    try:
        return start((_EXACT_PRODUCTS,))
    except Fail:
        return start((_EXACT_PRODUCTS, _FLOAT_PRODUCTS))


def _cpu_flags() -> frozenset[str]:
    """The CPU's features as Linux names them; empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((row for row in text.splitlines() if row.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def why_not() -> str | None:
    """Return why segments cannot run this way here, or None if they can."""
    if find_spec("onnxruntime") is None:
        return "onnxruntime is not installed; pip install 'tandem-edge[portable]'"
    return None


def load(context: SegmentContext, implementation: Portable) -> Executor:
    """Load a segment; see `PortableExecutor`."""
    return PortableExecutor(
        context.engine,
        context.segment,
        implementation,
        context.tensors,
        context.options.threads,
    )


class PortableExecutor(Executor):
    """One segment in an onnxruntime session, on the CPU only.

    The weights are read from the engine file in place while the session is made; onnxruntime keeps
    its own copy of them, packed for the CPU.
    """

    def __init__(
        self,
        engine: Engine,
        segment: Segment,
        implementation: Portable,
        tensors: Mapping[str, TensorInfo],
        threads: int | None,
    ) -> None:
        """Load the segment; `threads` None leaves their number to onnxruntime.

        Raises SessionError if onnxruntime refuses the model or the model does not have the
        segment's inputs and outputs.
        """
        import onnxruntime

        self._runtime = onnxruntime
        self._errors = _error_types(onnxruntime)
        self._where = f"{engine.path}: segment {segment.name!r}"
        onnxruntime.set_default_logger_severity(_FATAL)
        try:
            self._session = start_exact(
                lambda keys: onnxruntime.InferenceSession(
                    engine.entry(implementation.model).tobytes(),
                    self._options(engine, implementation, threads, keys),
                    providers=["CPUExecutionProvider"],
                    enable_fallback=False,  # it would print to stdout and try the same again
                    disabled_optimizers=list(_DISABLED),
                )
            )
        except self._errors as error:
            raise SessionError(
                f"{self._where} cannot be loaded by onnxruntime: {_first_line(error)}"
            ) from error
        self._check("inputs", segment.inputs, self._session.get_inputs(), tensors)
        self._check("outputs", segment.outputs, self._session.get_outputs(), tensors)

    @property
    def description(self) -> str:
        """The version of onnxruntime."""
        return f"onnxruntime {self._runtime.__version__}, CPU"

    def run(
        self,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array | None],
        sizes: Mapping[str, int],
    ) -> dict[str, Array]:
        """Run the segment; see `Executor.run`. onnxruntime reads the sizes from the shapes."""
        wrap = self._runtime.OrtValue.ortvalue_from_numpy  # looks at the array, no copy
        try:
            binding = self._session.io_binding()
            for name, array in inputs.items():
                binding.bind_ortvalue_input(name, wrap(array))
            for name, target in outputs.items():
                if target is None:
                    binding.bind_output(name, "cpu")
                else:
                    binding.bind_ortvalue_output(name, wrap(target))
            self._session.run_with_iobinding(binding)
            values = dict(zip(outputs, binding.get_outputs(), strict=True))
        except self._errors as error:
            raise SessionError(
                f"{self._where} failed in onnxruntime: {_first_line(error)}"
            ) from error
        return {
            name: values[name].numpy() if target is None else target
            for name, target in outputs.items()
        }

    def _options(
        self,
        engine: Engine,
        implementation: Portable,
        threads: int | None,
        keys: tuple[tuple[str, str], ...],
    ) -> Any:  # noqa: ANN401
        options = self._runtime.SessionOptions()
        options.use_deterministic_compute = True
        options.intra_op_num_threads = threads or 0
        for key, value in (*_CONFIG, *keys):
            options.add_session_config_entry(key, value)
        # A model may name files with weights. No path can lie below a file, so none is ever read
        # (by onnxruntime 1.23, the floor in pyproject.toml, and newer; 1.19 ignores the setting).
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(engine.path)
        )
        # Not `add_initializer`, which would spare onnxruntime its copy: it breaks the runs of
        # models whose weights the optimizer transposes, as it swaps the old values back in.
        names = list(implementation.weights)
        values = [self._runtime.OrtValue.ortvalue_from_numpy(engine.entry(name)) for name in names]
        options.add_external_initializers(names, values)
        self._weights = values  # onnxruntime reads some of them in place for as long as it runs
        return options

    def _check(
        self,
        title: str,
        names: tuple[str, ...],
        nodes: list[Any],
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        """Compare what the model has with what the manifest says: the arena relies on it."""
        actual = {node.name: _TYPES.get(node.type, node.type) for node in nodes}
        stated = {name: tensors[name].dtype for name in names}
        if actual != stated:
            raise SessionError(
                f"{self._where} has the {title} {_pairs(stated)}, its model {_pairs(actual)}; "
                "build the engine again"
            )


def _pairs(types: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} ({dtype})" for name, dtype in sorted(types.items())) or "none"


def _error_types(runtime: Any) -> tuple[type[Exception], ...]:  # noqa: ANN401
    """What onnxruntime raises; its own exceptions have no base of their own."""
    state = runtime.capi.onnxruntime_pybind11_state
    members = (getattr(state, name) for name in dir(state))
    errors = [m for m in members if isinstance(m, type) and issubclass(m, Exception)]
    return (*errors, RuntimeError, ValueError, MemoryError)


def _first_line(error: Exception) -> str:
    return shortened(str(error).partition("\n")[0])
