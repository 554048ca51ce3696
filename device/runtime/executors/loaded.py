"""A finished plan, loaded on one DLA core or on the GPU.

TensorRT's bindings raise what its C++ raises, return None for null pointers, and fail to import
where a library is missing. Of a plan that is loaded each of these is a LoadRefusedError, so that
another implementation of the segment runs; of one that runs it is a SessionError.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from device.errors import SessionError, TandemError
from device.runtime.cuda.context import Stream
from device.runtime.executors.protocol import LoadRefusedError
from device.runtime.tensorrt.messages import explain


class LoadedPlan:
    """TensorRT's objects for one plan on one DLA core, or on the GPU (`core` None)."""

    def __init__(self, where: str, data: bytes, core: int | None) -> None:
        """Deserialize the plan. `where`: the segment's name in errors.

        Raises LoadRefusedError: there is no such core, or TensorRT does not load the plan.
        """
        self.core = core
        self._where = where
        with refused("its plan is loaded"):
            self._load(data)

    def _load(self, data: bytes) -> None:
        import tensorrt as trt

        core = self.core
        self._runtime: Any = _runtime()
        if core is not None:
            cores = int(self._runtime.num_DLA_cores)
            if core >= cores:
                raise LoadRefusedError(f"it is for DLA core {core}, and this board has {cores}")
            self._runtime.DLA_core = core
        self._engine: Any = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise LoadRefusedError(
                f"TensorRT {trt.__version__} does not load its plan: run "
                "`tandem-agent prepare --again`"
            )
        self._execution: Any = self._engine.create_execution_context()
        if self._execution is None:
            raise LoadRefusedError(
                "the GPU has no room for its plan"
                if core is None
                else f"DLA core {core} has no room for its plan; a core holds 16 loadables, of all "
                "programs together"
            )

    def set_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Give inputs of dynamic sizes their shapes, until there are others.

        Raises SessionError: TensorRT does not take them.
        """
        for name, shape in shapes.items():
            with self._failing("takes a shape"):
                taken = self._execution.set_input_shape(name, shape)
            if not taken:
                raise SessionError(
                    f"{self._where}: TensorRT does not take the shape {shape} of input {name!r}"
                )

    def enqueue(self, addresses: Mapping[str, int], stream: Stream) -> None:
        """Enqueue the plan with its ports at these addresses.

        Raises SessionError: TensorRT does not take it.
        """
        for name, address in addresses.items():
            with self._failing("takes an address"):
                taken = self._execution.set_tensor_address(name, address)
            if not taken:
                raise SessionError(f"{self._where}: its plan has no input or output {name!r}")
        with self._failing("enqueues it"):
            taken = self._execution.execute_async_v3(stream.handle.value or 0)
        if not taken:
            place = "the GPU" if self.core is None else f"DLA core {self.core}"
            raise SessionError(f"{self._where} failed: TensorRT does not enqueue it on {place}")

    def close(self) -> None:
        """Release the plan: context, engine, runtime."""
        del self._execution, self._engine, self._runtime

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """Turn what TensorRT raises into a SessionError."""
        try:
            yield
        except Exception as error:  # C++ may raise anything
            raise SessionError(
                f"{self._where} failed: TensorRT raises {_text(error)} as it {doing}"
            ) from error


@contextmanager
def refused(doing: str) -> Iterator[None]:
    """Turn what TensorRT raises into a LoadRefusedError. `doing`: when, in its sentence."""
    try:
        yield
    except TandemError:
        raise
    except ImportError as error:
        known = explain([str(error)])
        raise LoadRefusedError(
            f"TensorRT cannot be loaded: {error}{f'; {known}' if known else ''}"
        ) from error
    except Exception as error:  # C++ may raise anything
        known = explain([str(error)])
        raise LoadRefusedError(
            f"TensorRT raises {_text(error)} as {doing}{f'; {known}' if known else ''}"
        ) from error


def core_count() -> int:
    """Return the number of DLA cores that TensorRT finds. Raises LoadRefusedError."""
    with refused("DLA cores are counted"):
        return int(_runtime().num_DLA_cores)


def _runtime() -> Any:  # noqa: ANN401
    import tensorrt as trt

    return trt.Runtime(trt.Logger(trt.Logger.ERROR))


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
