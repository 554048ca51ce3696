"""A finished plan, loaded on one DLA core or on the GPU."""

from collections.abc import Mapping
from typing import Any

from device.errors import SessionError
from device.runtime.cuda.context import Stream
from device.runtime.executors.protocol import LoadRefusedError


class LoadedPlan:
    """TensorRT's objects for one plan on one DLA core, or on the GPU (`core` None)."""

    def __init__(self, where: str, data: bytes, core: int | None) -> None:
        """Deserialize the plan. `where`: the segment's name in errors.

        Raises LoadRefusedError: there is no such core, or TensorRT does not load the plan.
        """
        import tensorrt as trt

        self.core = core
        self._where = where
        self._runtime: Any = trt.Runtime(trt.Logger(trt.Logger.ERROR))
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
            if not self._execution.set_input_shape(name, shape):
                raise SessionError(
                    f"{self._where}: TensorRT does not take the shape {shape} of input {name!r}"
                )

    def enqueue(self, addresses: Mapping[str, int], stream: Stream) -> None:
        """Enqueue the plan with its ports at these addresses.

        Raises SessionError: TensorRT does not take it.
        """
        for name, address in addresses.items():
            if not self._execution.set_tensor_address(name, address):
                raise SessionError(f"{self._where}: its plan has no input or output {name!r}")
        if not self._execution.execute_async_v3(stream.handle.value or 0):
            place = "the GPU" if self.core is None else f"DLA core {self.core}"
            raise SessionError(f"{self._where} failed: TensorRT does not enqueue it on {place}")

    def close(self) -> None:
        """Release the plan: context, engine, runtime."""
        del self._execution, self._engine, self._runtime


def core_count() -> int:
    """Return the number of DLA cores that TensorRT finds."""
    import tensorrt as trt

    return int(trt.Runtime(trt.Logger(trt.Logger.ERROR)).num_DLA_cores)
