"""Runs a segment with onnxruntime on the CPU: on any machine, and as the reference for the others.

onnxruntime is imported only when a segment is opened.
"""

from collections.abc import Mapping
from typing import Any

from device.engine.file import Engine
from device.engine.manifest import Portable, Segment, TensorInfo
from device.errors import SessionError, shortened
from device.install_advice import why_missing
from device.runtime.exact_products import exact_session
from device.runtime.executors.protocol import (
    Array,
    Arrays,
    Executor,
    SegmentContext,
    Sizes,
    Targets,
)

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
# A rewrite of onnxruntime (1.31 at least) that changes results: it drops the lower bound of a Clip
# before Q where the scale is below about 1e-7, and with it the rectifier.
_DISABLED = ("ClipQuantRewrite",)
_FATAL = 4  # onnxruntime's log level for the whole process: its errors are raised to us anyway


def why_not() -> str | None:
    """Return why segments cannot run this way here, or None if they can."""
    return why_missing("onnxruntime", "portable")


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
            self._session = exact_session(
                engine.entry(implementation.model).tobytes(),
                self._options(engine, implementation, threads),
                _DISABLED,
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

    def run(self, inputs: Arrays, outputs: Targets, sizes: Sizes) -> dict[str, Array]:
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

    def _options(self, engine: Engine, implementation: Portable, threads: int | None) -> Any:  # noqa: ANN401
        options = self._runtime.SessionOptions()
        options.use_deterministic_compute = True
        options.intra_op_num_threads = threads or 0
        for key, value in _CONFIG:
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
