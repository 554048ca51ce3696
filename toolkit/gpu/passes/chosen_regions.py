"""Regions that are sampled from one of several maps: only those that are chosen cost time.

    Where(mask, RoiAlign(x, boxes, images), other)  ->  RoiAlign(x, boxes, images, mask, other)

with a mask of one number for each region.
"""

from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph


def _choose_regions(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    if op.kind != "Where":
        return None
    mask, sampled, other = op.inputs
    align = graph.sole_producer(sampled, "RoiAlign")
    shape = graph.network.shapes[op.outputs[0]]
    by_region = (shape[0], *(1 for _ in shape[1:]))
    if align is None or len(align.inputs) != 3 or graph.network.shapes.get(mask) != by_region:
        return None
    if sampled in graph.network.scales or graph.network.shapes[sampled] != shape:
        return None
    rewriter.add(op, "RoiAlign", (*align.inputs, mask, other), op.outputs[0], align.attributes)
    return rewriter.replacement(align)


CHOSEN_REGION_RULES: tuple[Rule, ...] = (_choose_regions,)
