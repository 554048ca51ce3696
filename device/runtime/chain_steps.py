"""What a chain of segments on one GPU stream does in one inference: a pure plan of steps.

A segment of kernels has its inputs and outputs in C order, at places of its own workspace. A
segment on the DLA has them in the formats of its ports, wherever it is told. A tensor goes from
place to place on the GPU; what the host gives or takes is uploaded and downloaded once.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from device.engine.tensorrt_manifest import Port

Format = tuple[str, str, float | None]
"""Of a port: element type, layout, scale. C order is None."""

Kind = Literal["upload", "download", "copy", "enter", "leave", "use", "run"]
CHAIN = ""
CALLER = "caller"


@dataclass(frozen=True, slots=True)
class TensorBuffer:
    """Memory on the GPU for a tensor: that of a segment, of the CHAIN, or of the CALLER."""

    owner: str
    tensor: str


@dataclass(frozen=True, slots=True)
class Member:
    """A segment of a chain: the formats of its inputs and outputs, in order.

    `captured`: its work can be a part of a CUDA graph; that of a DLA and of some plans cannot.
    """

    name: str
    inputs: tuple[tuple[str, Format | None], ...]
    outputs: tuple[tuple[str, Format | None], ...]
    captured: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One step. "enter" and "leave" are the kernels of a port of `segment`.

    "use" tells a DLA segment once where its input lies; it costs nothing in an inference.
    """

    kind: Kind
    tensor: str = ""
    segment: str = ""
    source: TensorBuffer | None = None
    target: TensorBuffer | None = None

    @property
    def with_caller(self) -> bool:
        """Whether it reads or writes the caller's memory."""
        return any(
            place is not None and place.owner == CALLER for place in (self.source, self.target)
        )


@dataclass(frozen=True, slots=True)
class Borders:
    """The tensors that enter and leave a chain: over the host, or at addresses of the caller."""

    host_inputs: Collection[str] = ()
    caller_inputs: Collection[str] = ()
    host_outputs: Collection[str] = ()
    caller_outputs: Collection[str] = ()


@dataclass(slots=True)
class _Known:
    """Where tensors are so far, by format; a place in here is not overwritten any more."""

    places: dict[tuple[str, Format | None], TensorBuffer] = field(default_factory=dict)
    made_by: dict[str, str] = field(default_factory=dict)

    def packed(self, tensor: str) -> TensorBuffer | None:
        """Return a place where the tensor lies in any port's format."""
        rows = ((key, place) for key, place in self.places.items() if key[0] == tensor)
        return next((place for (_, form), place in rows if form is not None), None)


def format_of(port: Port) -> Format:
    """Return the format of a port."""
    return port.dtype, port.format, port.scale


def plan_steps(members: Sequence[Member], borders: Borders) -> tuple[Step, ...]:
    """Return the steps of one inference, in order."""
    steps: list[Step] = []
    known = _Known()
    for tensor in borders.caller_inputs:
        known.places[tensor, None] = TensorBuffer(CALLER, tensor)
    for tensor in borders.host_inputs:
        readers = [m for m in members if tensor in dict(m.inputs)]
        if len(readers) > 1 or any(dict(m.inputs)[tensor] is not None for m in readers):
            place = TensorBuffer(CHAIN, tensor)
            steps.append(Step("upload", tensor, target=place))
            known.places[tensor, None] = place
    for member in members:
        for tensor, form in member.inputs:
            steps += _feed(known, member.name, tensor, form)
        steps.append(Step("run", segment=member.name))
        for tensor, form in member.outputs:
            known.places[tensor, form] = TensorBuffer(member.name, tensor)
            known.made_by[tensor] = member.name
    for tensor in borders.caller_outputs:
        steps += _bring(known, tensor, TensorBuffer(CALLER, tensor))
    for tensor in borders.host_outputs:
        if (tensor, None) not in known.places:
            steps += _to_chain(known, tensor)
        steps.append(Step("download", tensor, source=known.places[tensor, None]))
    return tuple(steps)


def in_graphs(steps: Sequence[Step], members: Sequence[Member]) -> Iterator[tuple[Step, ...]]:
    """Yield the steps of an inference in runs: each is captured as one CUDA graph, or stands alone.

    Alone are tasks of the DLA and plans that are not captured, and what reads or writes the
    caller's memory: its addresses change from inference to inference, and a graph's do not. "use"
    is left out.
    """
    captured = {member.name: member.captured for member in members}
    graph: list[Step] = []
    for step in steps:
        if step.kind == "use":
            continue
        if step.with_caller or (step.kind == "run" and not captured[step.segment]):
            if graph:
                yield tuple(graph)
            yield (step,)
            graph = []
        else:
            graph.append(step)
    if graph:
        yield tuple(graph)


def _feed(known: _Known, segment: str, tensor: str, form: Format | None) -> Iterator[Step]:
    """Yield what brings a tensor to a segment that reads it in a format.

    A segment of kernels overwrites its inputs' places later, so these are not known places.
    """
    segment_buffer = TensorBuffer(segment, tensor)
    if form is None:
        if (tensor, None) in known.places or known.packed(tensor) is not None:
            yield from _bring(known, tensor, segment_buffer)
        else:
            yield Step("upload", tensor, target=segment_buffer)
        return
    if (tensor, form) in known.places:
        yield Step("use", tensor, segment, source=known.places[tensor, form])
        return
    if (tensor, None) not in known.places:
        yield from _to_chain(known, tensor)
    yield Step("enter", tensor, segment, known.places[tensor, None], segment_buffer)
    known.places[tensor, form] = segment_buffer


def _to_chain(known: _Known, tensor: str) -> Iterator[Step]:
    """Yield what brings a tensor in C order to the chain's memory."""
    place = TensorBuffer(CHAIN, tensor)
    yield from _bring(known, tensor, place)
    known.places[tensor, None] = place


def _bring(known: _Known, tensor: str, target: TensorBuffer) -> Iterator[Step]:
    """Yield what brings a tensor in C order to a place."""
    source = known.places.get((tensor, None))
    if source is not None:
        yield Step("copy", tensor, source=source, target=target)
        return
    packed = known.packed(tensor)
    assert packed is not None  # the chain makes it, or the host gives it in C order
    yield Step("leave", tensor, known.made_by[tensor], packed, target)
