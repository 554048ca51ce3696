"""What a session runs one after the other: single segments, and chains of segments on the GPU."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from device.engine.file import Engine
from device.engine.manifest import Segment
from device.runtime.chain import SegmentChain
from device.runtime.executors.protocol import Array, Arrays, DeviceSegment, Executor, Sizes, Targets


@dataclass(frozen=True, slots=True)
class Stage:
    """A segment with its executor, or a chain of several. `name`: of the first segment."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    runner: Executor | SegmentChain

    @property
    def chain(self) -> SegmentChain | None:
        """The chain, None for a single segment."""
        return self.runner if isinstance(self.runner, SegmentChain) else None

    def run(self, inputs: Arrays, outputs: Targets, sizes: Sizes) -> dict[str, Array]:
        """Run; see `Executor.run`."""
        return self.runner.run(inputs, outputs, sizes)

    def arrays(self, sizes: Sizes) -> Mapping[str, Array]:
        """Return arrays that `run` takes without a copy; see `Executor.arrays`."""
        return self.runner.arrays(sizes)


def single_stages(segments: Sequence[Segment], executors: Sequence[Executor]) -> tuple[Stage, ...]:
    """Return a stage for each segment."""
    return tuple(
        Stage(segment.name, segment.inputs, segment.outputs, executor)
        for segment, executor in zip(segments, executors, strict=True)
    )


def open_stages(engine: Engine, executors: Sequence[Executor]) -> tuple[Stage, ...]:
    """Return the stages of an engine: segments in GPU memory that follow each other share a chain.

    A single segment of kernels has a graph with its own copies, and needs no chain. Raises
    SessionError if the driver refuses; nothing stays open then.
    """
    segments = engine.manifest.segments
    singles = single_stages(segments, executors)
    stages: list[Stage] = []
    try:
        for start, stop in _runs([executor.device is not None for executor in executors]):
            devices = [device for one in executors[start:stop] if (device := one.device)]
            alone = stop - start == 1 and executors[start].can_stay_on_gpu  # kernels
            if not devices or alone:
                stages += singles[start:stop]
                continue
            chain = open_chain(engine, segments[start:stop], devices)
            stages.append(Stage(segments[start].name, chain.inputs, chain.outputs, chain))
        keep_on_gpu(stages, engine.manifest.outputs)
    except BaseException:
        for stage in stages:
            if stage.chain is not None:
                stage.chain.close()
        raise
    return tuple(stages)


def keep_on_gpu(stages: Sequence[Stage], outputs: Collection[str]) -> None:
    """Leave tensors on the GPU that single segments of kernels pass to each other alone.

    Each inference of the later one comes after the earlier one is done, and before its next.
    `outputs`: those of the engine. Raises SessionError if the driver refuses.
    """
    kernels = {
        stage.name: stage.runner
        for stage in stages
        if not isinstance(stage.runner, SegmentChain) and stage.runner.can_stay_on_gpu
    }
    addresses: dict[str, int] = {}
    for stage in stages:
        device = kernels[stage.name].device if stage.name in kernels else None
        if device is None:
            continue
        for tensor in stage.outputs:
            readers = [reader.name for reader in stages if tensor in reader.inputs]
            if readers and tensor not in outputs and all(name in kernels for name in readers):
                addresses[tensor] = device.address(tensor)
    for stage in stages:
        outgoing = frozenset(tensor for tensor in stage.outputs if tensor in addresses)
        sources = {tensor: addresses[tensor] for tensor in stage.inputs if tensor in addresses}
        if outgoing or sources:
            kernels[stage.name].stay_on_gpu(outgoing, sources)


def open_chain(
    engine: Engine, segments: Sequence[Segment], devices: Sequence[DeviceSegment]
) -> SegmentChain:
    """Return a chain of consecutive segments. Raises SessionError if the driver refuses."""
    manifest = engine.manifest
    names = {segment.name for segment in segments}
    read = {t for one in manifest.segments if one.name not in names for t in one.inputs}
    needed = frozenset({*manifest.outputs, *read})
    return SegmentChain(str(engine.path), segments, devices, manifest.dims, needed)


def _runs(on_gpu: Sequence[bool]) -> list[tuple[int, int]]:
    """Return (start, stop) of every run of segments in GPU memory, and of each other segment."""
    runs: list[tuple[int, int]] = []
    for at, here in enumerate(on_gpu):
        if here and runs and runs[-1][1] == at and on_gpu[at - 1]:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs
