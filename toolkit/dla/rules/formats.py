"""Memory formats of tensors that enter or leave the DLA: `FORMAT_RULES` is what a tensor must
fulfil for each. One that GPU and DLA share needs no reformat between them (DLA software FAQ): chw16
in FP16, chw32 in INT8."""

from dataclasses import dataclass
from typing import Literal

from device.engine.manifest import Precision
from toolkit.dla.rules.rule import FAQ, GUIDE_RUNTIME, HEADER, YES, AtMost, Fact, OneOf, Rule
from toolkit.graph.node_view import NodeView

Side = Literal["input", "output"]
FormatName = Literal["dla_linear", "dla_hwc4", "chw16", "chw32"]


@dataclass(frozen=True, slots=True)
class BoundaryTensor:
    """A tensor that enters or leaves a segment on the DLA, in one format.

    `readers`: nodes of the segment that read it; `reader_precision`: their precision.
    """

    name: str
    format: FormatName
    side: Side
    shape: tuple[int, ...]
    precision: Precision
    readers: tuple[NodeView, ...] = ()
    reader_precision: Precision | None = None

    @property
    def op(self) -> str:
        """The format, to which rules refer."""
        return self.format


def _precision(tensor: BoundaryTensor) -> tuple[Fact, ...]:
    return (Fact(tensor.precision, f"'{tensor.name}' in {tensor.precision}"),)


def _rank(tensor: BoundaryTensor) -> tuple[Fact, ...]:
    return (Fact(len(tensor.shape), f"rank {len(tensor.shape)} of '{tensor.name}'"),)


def _readers(tensor: BoundaryTensor) -> tuple[Fact, ...]:
    return tuple(Fact(view.op, f"read by {view.op} '{view.name}'") for view in tensor.readers)


def _groups(tensor: BoundaryTensor) -> tuple[Fact, ...]:
    convolutions = [view for view in tensor.readers if view.op == "Conv"]
    groups = [(view.integer("group", 1), view.name) for view in convolutions]
    return tuple(Fact(count, f"{count} groups of '{name}'") for count, name in groups)


HWC4 = frozenset({"dla_hwc4"})

# fmt: off
FORMAT_RULES: tuple[Rule[BoundaryTensor], ...] = (
    Rule(id="format.rank", ops=None, limit="tensors must be 4-D",
         facts=_rank,
         allowed=OneOf((4,)), source=HEADER),
    Rule(id="format.precision", ops=frozenset({"dla_linear", "dla_hwc4"}), limit="it must be {}",
         facts=_precision, allowed=OneOf(("fp16", "int8")), source=GUIDE_RUNTIME),
    Rule(id="chw16.precision", ops=frozenset({"chw16"}), limit="it must be {}",
         facts=_precision, allowed=OneOf(("fp16",)), source=GUIDE_RUNTIME),
    Rule(id="chw32.precision", ops=frozenset({"chw32"}), limit="it must be {}",
         facts=_precision, allowed=OneOf(("int8",)), source=GUIDE_RUNTIME),
    Rule(id="hwc4.side", ops=HWC4, limit="it must be an {}",
         facts=lambda tensor: (Fact(tensor.side, f"'{tensor.name}' is an {tensor.side}"),),
         allowed=OneOf(("input",)), source=GUIDE_RUNTIME),
    Rule(id="hwc4.channels", ops=HWC4, limit="there must be {} channels",
         facts=lambda tensor: tuple(Fact(c, f"{c} channels") for c in tensor.shape[1:2]),
         allowed=OneOf((1, 3, 4)), source=GUIDE_RUNTIME),
    Rule(id="hwc4.reader", ops=HWC4, limit="the first layer must be a {}",
         facts=_readers,
         allowed=OneOf(("Conv",)), source=GUIDE_RUNTIME),
    Rule(id="hwc4.precision", ops=HWC4, limit="it must have the precision of the first convolution",
         facts=lambda tensor: (Fact(tensor.reader_precision in (None, tensor.precision),
                              f"'{tensor.name}' in {tensor.precision}, convolution in "
                              f"{tensor.reader_precision}"),),
         allowed=YES, source=FAQ),
    Rule(id="hwc4.groups", ops=HWC4, limit="a convolution must have {} groups",
         facts=_groups, allowed=AtMost(4), source=HEADER),
)
# fmt: on
