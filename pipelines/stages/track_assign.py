"""Which track takes which detection: the matching with the largest sum of weights, exactly.

Overlaps are sparse: most tracks and detections have one candidate each, which arrays decide at once.
What is left is solved by shortest augmenting paths (Kuhn 1955; Jonker and Volgenant 1987) over the
edges that exist, in plain Python: it explores no more than the objects that overlap each other.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]


def assign(weights: NDArray[np.float32], least: float) -> Pairs:
    """Return rows and columns of the matching with the largest sum of `weights` [R, C].

    Only pairs with a weight above `least` >= 0 are matched; each counts by how far it is above, so
    that a row stays alone rather than take a pair from a better one.
    """
    rows, columns = np.nonzero(weights > least)
    if not len(rows):
        return rows, columns
    row_edges = np.bincount(rows, minlength=weights.shape[0])
    column_edges = np.bincount(columns, minlength=weights.shape[1])
    alone = (row_edges[rows] == 1) & (column_edges[columns] == 1)
    if alone.all():
        return rows, columns
    shared_rows, shared_columns = rows[~alone], columns[~alone]
    gains = weights[shared_rows, shared_columns] - least
    edges: dict[int, list[tuple[int, float]]] = {}
    for row, column, gain in zip(
        shared_rows.tolist(), shared_columns.tolist(), gains.tolist(), strict=True
    ):
        edges.setdefault(row, []).append((column, gain))
    solved = _match(edges)
    pairs = np.array(solved, np.int64).reshape(-1, 2)
    return (
        np.concatenate([rows[alone], pairs[:, 0]]),
        np.concatenate([columns[alone], pairs[:, 1]]),
    )


def _match(edges: dict[int, list[tuple[int, float]]]) -> Sequence[tuple[int, int]]:
    """Solve the sparse problem `row -> [(column, gain > 0)]`.

    `high[row]` and `price[column]` are the dual variables: high + price >= gain on every edge, with
    equality on matched ones, and zero for what is free.
    """
    high = {row: max(gain for _, gain in options) for row, options in edges.items()}
    price: dict[int, float] = {}
    row_of: dict[int, int] = {}
    column_of: dict[int, int] = {}
    for start in edges:
        _augment(start, edges, high, price, row_of, column_of)
    return list(column_of.items())


def _augment(
    start: int,
    edges: dict[int, list[tuple[int, float]]],
    high: dict[int, float],
    price: dict[int, float],
    row_of: dict[int, int],
    column_of: dict[int, int],
) -> None:
    """Match one more row along the cheapest path, which ends at a free column or frees a row."""
    row_distance = {start: 0.0}
    column_distance: dict[int, float] = {}
    reached_from: dict[int, int] = {}
    queue: list[tuple[float, int]] = []
    best, best_row, best_column = high[start], start, -1  # so far: leave the row itself alone
    row = start
    while True:
        base = row_distance[row]
        for column, gain in edges[row]:
            if row_of.get(column) in row_distance:  # its distance is final; rounding changes none
                continue
            distance = base + max(0.0, high[row] + price.get(column, 0.0) - gain)
            if distance < best and distance < column_distance.get(column, best):
                column_distance[column] = distance
                reached_from[column] = row
                heapq.heappush(queue, (distance, column))
        column = -1
        while queue:
            distance, column = heapq.heappop(queue)
            if distance == column_distance[column] and row_of.get(column) not in row_distance:
                break
            column = -1
        if column < 0 or distance >= best:
            break
        if column not in row_of:
            best, best_row, best_column = distance, -1, column
            break
        row = row_of[column]
        row_distance[row] = distance
        if distance + high[row] < best:
            best, best_row = distance + high[row], row
    for row, distance in row_distance.items():
        high[row] -= max(0.0, best - distance)
    for column, distance in column_distance.items():
        price[column] = price.get(column, 0.0) + max(0.0, best - distance)
    _flip(start, best_row, best_column, reached_from, row_of, column_of)


def _flip(
    start: int,
    freed_row: int,
    free_column: int,
    reached_from: dict[int, int],
    row_of: dict[int, int],
    column_of: dict[int, int],
) -> None:
    """Exchange the pairs along a path from `start` to a free column or to a row that is freed."""
    if freed_row == start:
        return
    column = free_column if free_column >= 0 else column_of.pop(freed_row)
    while True:
        row = reached_from[column]
        before = column_of.get(row, -1)
        column_of[row], row_of[column] = column, row
        if row == start:
            return
        column = before
