"""Where the nodes of a graph lie: rows from top to bottom, as data flows.

The layered method of Sugiyama, Tagawa and Toda (1981): a row is the longest path from a source, an
edge over several rows gets a lane in each, rows are ordered by the means of their neighbours, and
each row then lies as near to its neighbours as the widths allow (least squares).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

GAP_X, GAP_Y, LANE = 18.0, 34.0, 14.0
SWEEPS = 6
Point = tuple[float, float]
Slot = int  # nodes first, then lanes


@dataclass(frozen=True, slots=True)
class Layout:
    """Centres of the nodes, and for each edge the points that it passes, with the size of all."""

    centres: tuple[Point, ...]
    routes: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def lay_out(sizes: Sequence[Point], edges: Sequence[tuple[int, int]]) -> Layout:
    """Place nodes of the given widths and heights; edges run from a lower to a higher number."""
    rank = _ranks(len(sizes), edges)
    lanes, chains = _lanes(rank, edges)
    rank_of = [*rank, *(row for _, row in lanes)]
    rows: list[list[Slot]] = [[] for _ in range(max(rank_of, default=-1) + 1)]
    for slot, row in enumerate(rank_of):
        rows[row].append(slot)
    widths = [width for width, _ in sizes] + [LANE] * len(lanes)
    links = [pair for chain in chains for pair in pairwise(chain)]
    x = _across(rows, widths, _neighbours(len(rank_of), links))
    origin = min((x[s] - widths[s] / 2 for s in range(len(x))), default=0.0) - GAP_X
    x = [value - origin for value in x]
    tops, heights = _down(rows, sizes)
    middle = [tops[row] + heights[row] / 2 for row in rank_of]
    routes = []
    for chain in chains:
        points: list[Point] = []
        for slot in chain:
            half = heights[rank_of[slot]] / 2
            if slot < len(sizes):
                half = sizes[slot][1] / 2
            points += [(x[slot], middle[slot] - half), (x[slot], middle[slot] + half)]
        routes.append(tuple(points[1:-1]))
    return Layout(
        centres=tuple((x[slot], middle[slot]) for slot in range(len(sizes))),
        routes=tuple(routes),
        width=max((x[s] + widths[s] / 2 for s in range(len(x))), default=0.0) + GAP_X,
        height=(tops[-1] + heights[-1] if tops else 0.0) + GAP_Y,
    )


def _ranks(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    rank = [0] * count
    for source, target in sorted(edges):
        rank[target] = max(rank[target], rank[source] + 1)
    return rank


def _lanes(
    rank: Sequence[int], edges: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], list[list[Slot]]]:
    """Return the lanes as (source, row), and for each edge the slots that it passes.

    Edges from one node share lanes.
    """
    number: dict[tuple[int, int], Slot] = {}
    chains = []
    for source, target in edges:
        chain = [source]
        for row in range(rank[source] + 1, rank[target]):
            chain.append(number.setdefault((source, row), len(rank) + len(number)))
        chains.append([*chain, target])
    return list(number), chains


def _neighbours(
    count: int, links: Sequence[tuple[Slot, Slot]]
) -> tuple[list[list[Slot]], list[list[Slot]]]:
    above: list[list[Slot]] = [[] for _ in range(count)]
    below: list[list[Slot]] = [[] for _ in range(count)]
    for source, target in dict.fromkeys(links):
        above[target].append(source)
        below[source].append(target)
    return above, below


def _across(
    rows: list[list[Slot]],
    widths: Sequence[float],
    neighbours: tuple[list[list[Slot]], list[list[Slot]]],
) -> list[float]:
    """Order every row, and return the middles of all slots."""
    x = [0.0] * len(widths)
    for row in rows:
        _place(row, dict.fromkeys(row, 0.0), widths, x)
    for sweep in range(SWEEPS):
        near = neighbours[sweep % 2]
        for row in rows if sweep % 2 == 0 else reversed(rows):
            ideal = {slot: _mean([x[n] for n in near[slot]], x[slot]) for slot in row}
            row.sort(key=ideal.__getitem__)
            _place(row, ideal, widths, x)
    return x


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _place(
    row: Sequence[Slot], ideal: Mapping[Slot, float], widths: Sequence[float], x: list[float]
) -> None:
    """Set the middles of a row: in its order, without overlap, nearest to the ideal ones.

    Without the widths it is a regression to values that do not fall, solved by merging blocks.
    """
    offset, offsets = 0.0, []
    for before, slot in zip([None, *row], row, strict=False):
        if before is not None:
            offset += (widths[before] + widths[slot]) / 2 + GAP_X
        offsets.append(offset)
    blocks: list[tuple[float, int]] = []  # sum and count
    for slot, shift in zip(row, offsets, strict=True):
        total, count = ideal[slot] - shift, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            earlier = blocks.pop()
            total, count = total + earlier[0], count + earlier[1]
        blocks.append((total, count))
    for slot, shift, base in zip(row, offsets, _spread(blocks), strict=True):
        x[slot] = base + shift


def _spread(blocks: Sequence[tuple[float, int]]) -> Iterator[float]:
    for total, count in blocks:
        yield from [total / count] * count


def _down(
    rows: Sequence[Sequence[Slot]], sizes: Sequence[Point]
) -> tuple[list[float], list[float]]:
    """Return the top and the height of every row."""
    tops, heights, y = [], [], GAP_Y
    for row in rows:
        height = max((sizes[slot][1] for slot in row if slot < len(sizes)), default=0.0)
        tops.append(y)
        heights.append(height)
        y += height + GAP_Y
    return tops, heights
