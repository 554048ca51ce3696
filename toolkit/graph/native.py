"""ONNX's C++ code on models of others: in a child process with limits of memory and time.

Shape inference, the version converter and the checks of single nodes are C++ that a hostile model
can crash, keep busy for hours or let ask for terabytes. The child of `native_child` runs them. It
is started at first use, serves this process until it ends, and is started again after a crash.
"""

import atexit
import contextlib
import json
import math
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import onnx.checker
import onnx.shape_inference
import onnx.version_converter

from device.start.command import module_command
from toolkit.errors import ImportModelError
from toolkit.graph.max_memory import max_memory_bytes, size_text

MAX_CHILD_BYTES = 2 << 30  # graphs go there without their large weights
# For one call; the largest models take a few. The child counts what its processor did, so that a
# busy machine refuses no model; this process counts the wall clock, for a child that stands still.
MAX_CPU_SECONDS = 60
MAX_SECONDS = 600.0
MAX_START_SECONDS = 60.0
PIECE_BYTES = 1 << 20
READY = b"+"  # what the child says once it has started

# What ONNX raises, by the name that the child says.
ERRORS: Mapping[str, type[Exception]] = {
    "InferenceError": onnx.shape_inference.InferenceError,
    "ConvertError": onnx.version_converter.ConvertError,
    "ValidationError": onnx.checker.ValidationError,
    "ValueError": ValueError,
    "DecodeError": ValueError,  # C++ does not parse what Python has written
}
TOO_LONG = "TooLongError"  # the child: a node makes more integers than inference can carry
STEPS: Mapping[str, str] = {
    "infer": "ONNX's shape inference",
    "convert": "ONNX's version converter",
    "check": "ONNX's check of each node",
    "valid": "ONNX's checker",
    "evaluate": "ONNX's reference evaluator",
}


class MemoryLimitError(ImportModelError):
    """ONNX needs more memory for a model than it may take."""


class TooSlowError(ImportModelError):
    """ONNX takes longer for a model than it may."""


@dataclass(frozen=True, slots=True)
class BadNode:
    """A node that ONNX's definition of its operator does not allow, and why."""

    node: str
    op: str
    reason: str


def infer_shapes(proto: onnx.ModelProto, *, strict: bool, data_prop: bool) -> onnx.ModelProto:
    """Run `onnx.shape_inference.infer_shapes`.

    Raises what it raises, and ImportModelError: it crashed, or went beyond a limit.
    """
    try:
        answer = _call("infer", {"strict": strict, "data_prop": data_prop}, proto)
    except MemoryLimitError as err:
        if not data_prop:
            raise
        # What is carried along may be all that is large; the sizes then say which node it is.
        plain = _call("infer", {"strict": False, "data_prop": False}, proto)
        raise MemoryLimitError(f"{_largest(onnx.ModelProto.FromString(plain))}{err}") from err
    return onnx.ModelProto.FromString(answer)


def _largest(proto: onnx.ModelProto) -> str:
    """Name the node with the largest result, "" where no size is known."""
    sizes = {
        value.name: math.prod(max(1, dim.dim_value) for dim in value.type.tensor_type.shape.dim)
        for value in (*proto.graph.value_info, *proto.graph.output)
    }
    results = [(sizes.get(name, 0), node) for node in proto.graph.node for name in node.output]
    elements, node = max(results, key=lambda pair: pair[0], default=(0, onnx.NodeProto()))
    return f"node {node.name!r} ({node.op_type}) makes {elements} elements: " if elements else ""


def convert_version(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Run `onnx.version_converter.convert_version`. Raises as `infer_shapes`."""
    return onnx.ModelProto.FromString(_call("convert", {"opset": opset}, proto))


def check_model(proto: onnx.ModelProto) -> None:
    """Run `onnx.checker.check_model` without its full check. Raises as `infer_shapes`."""
    _call("valid", {}, proto)


def evaluate(
    proto: onnx.ModelProto, *, cpu_seconds: float, max_bytes: int
) -> Mapping[str, onnx.TensorProto]:
    """Run a graph of constants in ONNX's reference evaluator; return its results by name.

    Raises as `infer_shapes`, and RuntimeError: the evaluator fails, or gives more than `max_bytes`.
    """
    limit = min(cpu_seconds, MAX_CPU_SECONDS)
    answer = _call("evaluate", {"max_bytes": max_bytes}, proto, limit)
    return {tensor.name: tensor for tensor in onnx.GraphProto.FromString(answer).initializer}


def bad_nodes(proto: onnx.ModelProto) -> tuple[BadNode, ...]:
    """Return the nodes of the graph that contradict their operators; all types must be noted.

    Raises ImportModelError: ONNX crashed, or went beyond a limit.
    """
    return tuple(BadNode(*row) for row in json.loads(_call("check", {}, proto)))


class _Child:
    """The child process. It belongs to the process that started it, not to forks of that."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            module_command("toolkit.graph.native_child", str(limit_bytes)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # NumPy would start more, for nothing
        )
        atexit.register(self.end)
        self._is_ready = False

    def wait(self) -> None:
        """Return when it takes requests; raises ImportModelError: it does not start."""
        if self._is_ready:
            return
        try:
            _read(self._pipe(), len(READY), time.monotonic() + MAX_START_SECONDS)
        except (EOFError, TimeoutError) as err:
            self.end()
            raise ImportModelError(
                f"the child process that runs ONNX does not start within "
                f"{size_text(self.limit_bytes)} and {MAX_START_SECONDS:.0f} s; "
                "raise the limit with `tandem build --max-memory`"
            ) from err
        self._is_ready = True

    def _pipe(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def usable(self, limit_bytes: int) -> bool:
        is_same = self.owner == os.getpid() and self.limit_bytes == limit_bytes
        return is_same and self.process.poll() is None

    def end(self) -> None:
        atexit.unregister(self.end)
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


_LOCK = threading.Lock()
_children: list[_Child] = []


def _call(
    step: str,
    options: Mapping[str, object],
    proto: onnx.ModelProto,
    cpu_seconds: float = MAX_CPU_SECONDS,
) -> bytes:
    request = json.dumps({"step": step, "cpu_seconds": cpu_seconds, **options}).encode()
    data = proto.SerializeToString()
    with _LOCK:
        child = _child()
        child.wait()
        try:
            status, answer = _exchange(child, request, data)
        except (EOFError, BrokenPipeError, ConnectionError) as err:
            code = child.process.wait()
            _drop(child)
            if code == -signal.SIGPROF:
                raise _too_slow(step, cpu_seconds) from err
            raise ImportModelError(
                f"{STEPS[step]} ended with status {code} on the model; "
                "it is damaged: export it again"
            ) from err
        except TimeoutError as err:
            _drop(child)
            raise _too_slow(step, MAX_SECONDS) from err
        except BaseException:  # interrupted: the rest of the answer would answer the next call
            _drop(child)
            raise
        if status == "MemoryError":
            _drop(child)
            raise MemoryLimitError(
                f"{STEPS[step]} needs more than {size_text(child.limit_bytes)} for the model; "
                f"give smaller sizes with --shape{_more(child.limit_bytes)}"
            )
    if status == TOO_LONG:
        raise ImportModelError(answer.decode(errors="replace"))
    if status != "ok":
        raise ERRORS.get(status, RuntimeError)(answer.decode(errors="replace"))
    return answer


def _too_slow(step: str, seconds: float) -> TooSlowError:
    return TooSlowError(
        f"{STEPS[step]} took longer than {seconds:.0f} s on the model; "
        "it is damaged or too large: export it again, or in parts"
    )


def _more(limit_bytes: int) -> str:
    below = limit_bytes < MAX_CHILD_BYTES
    return (
        ", or raise the limit with `tandem build --max-memory`" if below else ", or export it again"
    )


def start() -> None:
    """Start the child now, for a model that is read soon: it imports onnx beside this process."""
    with _LOCK:
        _child()


def _child() -> _Child:
    limit_bytes = min(max_memory_bytes(), MAX_CHILD_BYTES)
    if _children and not _children[0].usable(limit_bytes):
        _drop(_children[0])
    if not _children:
        _children.append(_Child(limit_bytes))
    return _children[0]


def _drop(child: _Child) -> None:
    _children.clear()
    child.end()


def _exchange(child: _Child, request: bytes, data: bytes) -> tuple[str, bytes]:
    assert child.process.stdin is not None
    assert child.process.stdout is not None
    until = time.monotonic() + MAX_SECONDS
    sizes = len(request).to_bytes(8, "little") + len(data).to_bytes(8, "little")
    for part in (sizes + request + data[:PIECE_BYTES], memoryview(data)[PIECE_BYTES:]):
        _write(child.process.stdin.fileno(), part)
    head = _read(child.process.stdout.fileno(), 16, until)
    status_bytes, answer_bytes = (int.from_bytes(head[at : at + 8], "little") for at in (0, 8))
    status = _read(child.process.stdout.fileno(), status_bytes, until)
    return status.decode(), _read(child.process.stdout.fileno(), answer_bytes, until)


def _write(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:PIECE_BYTES]) :]


def _read(descriptor: int, count: int, until: float) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        if not readable:
            raise TimeoutError
        part = os.read(descriptor, min(PIECE_BYTES, count - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
