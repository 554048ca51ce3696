"""Inference on arrays in CUDA shared memory: inputs are read and outputs written on the GPU."""

from collections.abc import Mapping
from math import prod

from device.engine.manifest import TensorInfo
from device.runtime.cuda.device_array import DeviceArray
from device.runtime.session import Session
from pipelines.serving.instances import Runner
from pipelines.serving.protocol import Array

ALIGNMENT = 256  # what cuMemAlloc gives; plans of TensorRT bind addresses as they are


def takes_device_arrays(runner: Runner) -> bool:
    """True if every segment of an engine reads and writes the GPU's memory."""
    executors = runner.executors if isinstance(runner, Session) else ()
    return bool(executors) and all(executor.device is not None for executor in executors)


def infer_on_gpu(
    session: Session, feeds: Mapping[str, DeviceArray], targets: Mapping[str, DeviceArray]
) -> dict[str, Array | DeviceArray]:
    """Run an engine on device arrays. An output is written to the bytes of its target where it fits
    there, and comes back on the host otherwise. Raises SessionError."""
    sizes = {
        dim: size
        for tensor in session.inputs
        for dim, size in zip(tensor.shape, feeds[tensor.name].shape, strict=True)
    }
    used = list(feeds.values())
    outputs: dict[str, DeviceArray] = {}
    for tensor in session.outputs:
        array = _array_at(targets.get(tensor.name), tensor, sizes)
        if array is not None and not any(_overlap(array, one) for one in used):
            outputs[tensor.name] = array
            used.append(array)
    results = session.infer_on_device(feeds, outputs)
    return {name: array if name in outputs else array.numpy() for name, array in results.items()}


def _array_at(
    target: DeviceArray | None, tensor: TensorInfo, sizes: Mapping[int | str | None, int]
) -> DeviceArray | None:
    """Return the array of an output at its target, None where it does not fit there."""
    shape = [dim if isinstance(dim, int) else sizes.get(dim) for dim in tensor.shape]
    known = tuple(size for size in shape if size is not None)
    if target is None or target.address % ALIGNMENT or None in tensor.shape:
        return None
    if len(known) < len(shape) or not prod(known):
        return None
    array = DeviceArray.within(target, target.address, known, tensor.dtype)
    return array if array.nbytes <= target.nbytes else None


def _overlap(first: DeviceArray, second: DeviceArray) -> bool:
    begin = max(first.address, second.address)
    return begin < min(first.address + first.nbytes, second.address + second.nbytes)
