"""What executors of TensorRT's plans have in common: the plan's place, loading and the end."""

from collections.abc import Iterator
from contextlib import contextmanager

from device.engine.tensorrt_manifest import TensorRT, TensorRTGpu
from device.errors import SessionError
from device.runtime.cuda.context import Context
from device.runtime.cuda.driver import CudaError
from device.runtime.executors.loaded import LoadedPlan
from device.runtime.executors.protocol import Executor, LoadRefusedError, SegmentContext
from device.runtime.tensorrt.board import read_board
from device.runtime.tensorrt.plans import Plan, default_folder, find_plan, read_plan


def plan_of(context: SegmentContext, implementation: TensorRT | TensorRTGpu) -> Plan:
    """Return a segment's place in the store. Raises SessionError: none is for this TensorRT."""
    folder = context.options.plans or default_folder()
    return find_plan(folder, context.engine, context.segment, implementation, read_board())


class PlanExecutor(Executor):
    """A segment in a CUDA context, with plans that TensorRT has loaded there."""

    def __init__(self, context: SegmentContext) -> None:
        """Open the context. Raises LoadRefusedError: the driver refuses."""
        self._where = context.where
        self._closed = False
        self._plans: tuple[LoadedPlan, ...] = ()
        self._tensors = {
            name: context.tensors[name]
            for name in (*context.segment.inputs, *context.segment.outputs)
        }
        try:
            self._cuda = Context()
        except CudaError as error:
            raise LoadRefusedError(f"the GPU refuses: {error}") from error

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Load within this context; if that fails, all is released."""
        try:
            self._cuda.activate()  # TensorRT loads a plan into the context that is current
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, CudaError):
                raise LoadRefusedError(f"the GPU refuses: {error}") from error
            raise

    def _load_plan(self, place: Plan, *cores: int | None) -> tuple[LoadedPlan, ...]:
        """Load a plan on each of these DLA cores, or on the GPU for None."""
        data = read_plan(place)
        if data is None:  # it was there when the kind was asked for a misfit
            raise LoadRefusedError("its plan is gone: prepare the engine again")
        return tuple(LoadedPlan(self._where, data, core) for core in cores)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError(f"{self._where} is closed; open a new session")

    def close(self) -> None:
        """Release the plans, then the memory and the stream."""
        if self._closed:
            return
        self._closed = True
        for plan in self._plans:
            plan.close()
        self._cuda.close()
