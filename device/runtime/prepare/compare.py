"""The child process that times a plan against the kernels of its segment, on the same inputs.

`python -m device.runtime.prepare.compare REQUEST` writes one JSON line to standard output. Both
are warmed up, and run by turns, so that a clock that changes meanwhile changes both.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from device.engine.file import Engine, open_engine
from device.engine.manifest import Segment, TensorInfo
from device.errors import TandemError
from device.runtime.executors import cuda, tensorrt_gpu
from device.runtime.executors.protocol import Executor, LoadOptions, SegmentContext
from device.runtime.prepare.build import leave_with
from device.runtime.tensorrt.request import Times, TimesRequest

Array = npt.NDArray[Any]

MAX_ROUNDS, MIN_ROUNDS, RUNS = 20, 2, 5
MAX_SECONDS = 3.0  # of rounds that begin
_SEED = 17


def main(argv: list[str]) -> None:
    """Time the segment of the request in the file `argv[1]`; this does not return."""
    request = msgspec.json.decode(Path(argv[1]).read_bytes(), type=TimesRequest)
    try:
        with open_engine(request.engine) as engine:
            segments = {segment.name: segment for segment in engine.manifest.segments}
            times = time_both(engine, segments[request.segment], Path(request.plans))
    except TandemError as error:
        times = Times(problem=str(error))
    except ImportError as error:
        times = Times(problem=f"TensorRT cannot be loaded: {error}")
    leave_with(times)


def time_both(engine: Engine, segment: Segment, plans: Path) -> Times:
    """Return the medians of a segment that has a plan and kernels, at the usual sizes.

    Raises SessionError: one of them cannot be loaded or fails.
    """
    import tensorrt  # noqa: F401  (its libraries before those of a context)

    tensors = {tensor.name: tensor for tensor in engine.manifest.tensors}
    context = SegmentContext(engine, segment, tensors, LoadOptions(plans=plans))
    by_tag = {str(i.__struct_config__.tag): i for i in segment.implementations}
    sizes = {dim.name: dim.opt for dim in engine.manifest.dims}
    feeds = _feeds([tensors[name] for name in segment.inputs], sizes)
    plan = tensorrt_gpu.load(context, by_tag[tensorrt_gpu.TAG])  # type: ignore[arg-type]
    try:
        kernels = cuda.load(context, by_tag[cuda.TAG])  # type: ignore[arg-type]
        try:
            return _time(plan, kernels, segment, feeds, sizes)
        finally:
            kernels.close()
    finally:
        plan.close()


def _time(
    plan: Executor,
    kernels: Executor,
    segment: Segment,
    feeds: Mapping[str, Array],
    sizes: Mapping[str, int],
) -> Times:
    plan_us: list[float] = []
    kernels_us: list[float] = []
    for executor in (plan, kernels):
        executor.run(feeds, dict.fromkeys(segment.outputs), sizes)
    for executor in (plan, kernels):  # the warm-up
        _round(executor)
    begin_s = time.monotonic()
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.monotonic() - begin_s > MAX_SECONDS:
            break
        plan_us += _round(plan)
        kernels_us += _round(kernels)
    return Times(tensorrt_us=median(plan_us), cuda_us=median(kernels_us))


def _round(executor: Executor) -> Sequence[float]:
    assert executor.profiler is not None  # both run on the GPU
    return executor.profiler.compute_us(RUNS)


def _feeds(inputs: list[TensorInfo], sizes: Mapping[str, int]) -> dict[str, Array]:
    """Return random inputs; integers other than INT8 are zeros, which every index may be."""
    random = np.random.default_rng(_SEED)
    feeds: dict[str, Array] = {}
    for tensor in inputs:
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim or 0 for dim in tensor.shape)
        dtype = np.dtype(tensor.dtype)
        if dtype.kind == "f":
            feeds[tensor.name] = random.standard_normal(shape).astype(dtype)
        elif dtype == np.int8:
            feeds[tensor.name] = random.integers(-127, 128, shape).astype(dtype)
        else:
            feeds[tensor.name] = np.zeros(shape, dtype)
    return feeds


if __name__ == "__main__":
    main(sys.argv)
