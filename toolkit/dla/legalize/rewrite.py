"""Rewrites, the sites where they are tried, and what legalization reports."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from device.engine.manifest import Precision
from toolkit.dla.legalize.graph_rewriter import GraphRewriter
from toolkit.dla.rules.ops import ops
from toolkit.dla.rules.rule import Certainty, Verdict
from toolkit.graph.node_view import NodeView, TensorView
from toolkit.graph.rewriter import Reason, Replacement

__all__ = ["Applied", "Cut", "Declined", "Legalized", "Outcome", "Rewrite", "Site", "ops"]


@dataclass(frozen=True, slots=True)
class Site:
    """A node at which a rewrite is tried, and the rewriter that it adds nodes through.

    `excluded` are nodes whose new form the DLA refused: a rewrite of several leaves them out.
    """

    node: ir.Node
    view: NodeView
    rewriter: GraphRewriter
    excluded: frozenset[ir.Node] = frozenset()

    @property
    def data(self) -> ir.Value:
        """The first input."""
        value = self.node.inputs[0]
        assert value is not None
        return value

    @property
    def output(self) -> ir.Value:
        """The first output."""
        return self.node.outputs[0]

    def replaced_by(self, value: ir.Value) -> Replacement[ir.Node]:
        """Let `value` stand for the first output; return the replacement."""
        self.rewriter.replace_uses(self.output, value)
        return self.rewriter.replacement()

    def value(self, index: int) -> ir.Value | None:
        """The input at `index`, None where it is left out."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def array(self, index: int) -> NDArray[Any] | None:
        """The input at `index` where it is constant, else None."""
        return constant_of(self.value(index))

    def integers(self, name: str, index: int) -> tuple[int, ...] | None:
        """Integers given as attribute `name` or as constant input `index`; None: neither."""
        attribute = self.view.attribute(name)
        if isinstance(attribute, tuple):
            return tuple(int(item) for item in attribute)
        if isinstance(attribute, int):
            return (attribute,)
        array = self.array(index)
        return None if array is None else tuple(int(item) for item in array.reshape(-1))


Outcome = Replacement[ir.Node] | Reason
"""What a rewrite makes of a site: the new nodes, or why its equation does not hold there."""


def constant_of(value: ir.Value | None) -> NDArray[Any] | None:
    """The elements of a value that is an initializer, else None."""
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()


def sizes(tensor: TensorView | ir.Value | None) -> tuple[int, ...] | None:
    """The shape of a tensor where every dimension is a known number, else None."""
    if tensor is None or tensor.shape is None:
        return None
    known = tuple(size for size in tensor.shape if isinstance(size, int))
    return known if len(known) == len(tensor.shape) else None


def image(tensor: TensorView | ir.Value | None) -> tuple[int, int, int, int] | None:
    """The shape N, C, H, W of a tensor of rank 4 and known size, else None."""
    shape = sizes(tensor)
    return None if shape is None or len(shape) != 4 else (shape[0], shape[1], shape[2], shape[3])


FLOATS = frozenset({"float32", "float16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One equation by which a node that the DLA refuses becomes nodes that it takes.

    `build` adds the nodes of a site, or returns why the equation does not hold there. `exact`:
    every number is the same, else the same to within float rounding. `reads`: tried on nodes that
    the DLA takes, too, where they read what a refused node of these operators makes. `first`: tried
    on the whole graph before the others, which would take its parts apart. `dtypes`: what its
    tensors may be. `precisions`: tried in these. `precision` is what INT8 must know: ranges are
    measured after legalising, so each new tensor gets its own.
    """

    id: str
    ops: frozenset[str]
    equation: str
    needs: str
    source: str
    build: Callable[[Site], Outcome]
    reads: frozenset[str] = frozenset()
    first: bool = False
    dtypes: frozenset[str] = FLOATS
    exact: bool = False
    precisions: tuple[Precision, ...] = ("fp16", "int8")
    precision: str = ""
    certainty: Certainty = "documented"


@dataclass(frozen=True, slots=True)
class Applied:
    """A rewrite that was applied: `verdict` is what kept `node` off the DLA before.

    `replaced` are the nodes that are gone, `nodes` those in their place, all of which the DLA
    takes but the `borders`: views and casts left where tensors enter or leave the new form.
    """

    rewrite: str
    node: str
    verdict: Verdict
    replaced: tuple[str, ...]
    nodes: tuple[str, ...]
    borders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Declined:
    """A rewrite that was tried on a refused node and not applied, and why."""

    rewrite: str
    node: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a head leaves the DLA for good: `node` makes a tensor that no DLA takes (rule G4).

    `tensors` are those to fetch there; `below` are the nodes after it, which are to stay on the
    GPU or the CPU together with it, whatever the rules would let back.
    """

    node: str
    tensors: tuple[str, ...]
    below: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Legalized:
    """The model after all rewrites, and what was done, not done, and where its heads are cut."""

    model: ir.Model
    applied: tuple[Applied, ...]
    refused: tuple[Declined, ...]
    cuts: tuple[Cut, ...]
