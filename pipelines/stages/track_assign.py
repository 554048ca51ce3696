"""Which track takes which detection: the matching with the largest sum of weights, exactly.

Most tracks and detections overlap one of the others far more than all else: arrays decide these.
What is left is solved by shortest augmenting paths (Kuhn 1955; Jonker and Volgenant 1987) over the
edges that exist, in plain Python: it explores no more than the objects that overlap each other.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]


def assign(weights: NDArray[np.float32], least: float) -> Pairs:
    """Return rows and columns of the matching with the largest sum of `weights` [R, C].

    Only pairs with a weight above `least` >= 0 are matched; each counts by how far it is above, so
    that a row stays alone rather than take a pair from a better one.
    """
    gains = np.maximum(weights - np.float32(least), np.float32(0.0))
    if not gains.any():
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows, columns = _sure_pairs(gains)
    gains[rows] = 0.0
    gains[:, columns] = 0.0
    open_rows, open_columns = np.nonzero(gains)
    if not len(open_rows):
        return rows, columns
    edges: dict[int, list[tuple[int, float]]] = {}
    for row, column, gain in zip(
        open_rows.tolist(),
        open_columns.tolist(),
        gains[open_rows, open_columns].tolist(),
        strict=True,
    ):
        edges.setdefault(row, []).append((column, gain))
    matching = _Matching(edges)
    for row in edges:
        matching.add(row)
    pairs = np.array(list(matching.column_of.items()), np.int64).reshape(-1, 2)
    return np.concatenate([rows, pairs[:, 0]]), np.concatenate([columns, pairs[:, 1]])


def _sure_pairs(gains: NDArray[np.float32]) -> Pairs:
    """Return pairs that a best matching has, whatever becomes of the rest.

    Such a pair gains at least as much as the next best of its row and of its column together: a
    matching without it loses nothing by taking it in place of the two.
    """
    every_row, every_column = np.arange(gains.shape[0]), np.arange(gains.shape[1])
    column_of, row_of = gains.argmax(axis=1), gains.argmax(axis=0)
    best = gains[every_row, column_of]
    others = gains.copy()
    others[every_row, column_of] = 0.0
    next_of_row = others.max(axis=1)
    others = gains.copy()
    others[row_of, every_column] = 0.0
    next_of_column = others.max(axis=0)
    mutual = (row_of[column_of] == every_row) & (best > 0.0)
    sure = mutual & (best >= next_of_row + next_of_column[column_of])
    rows = np.flatnonzero(sure)
    return rows, column_of[rows]


class _Matching:
    """The best matching of the rows added so far, over edges `row -> [(column, gain > 0)]`.

    `high[row]` and `price[column]` are the dual variables: high + price >= gain on every edge, with
    equality on matched ones, and zero for what is free.
    """

    def __init__(self, edges: Mapping[int, Sequence[tuple[int, float]]]) -> None:
        self.column_of: dict[int, int] = {}
        self._row_of: dict[int, int] = {}
        self._edges = edges
        self._high = {row: max(gain for _, gain in options) for row, options in edges.items()}
        self._price: dict[int, float] = {}

    def add(self, start: int) -> None:
        """Match one more row along the cheapest path, to a free column or a row that is freed."""
        row_distance = {start: 0.0}
        column_distance: dict[int, float] = {}
        reached_from: dict[int, int] = {}
        queue: list[tuple[float, int]] = []
        best, freed_row, free_column = self._high[start], start, -1  # so far: it stays alone
        row: int | None = start
        while row is not None:
            for distance, column in self._steps(row, row_distance):
                if distance < column_distance.get(column, best):
                    column_distance[column] = distance
                    reached_from[column] = row
                    heapq.heappush(queue, (distance, column))
            distance, column = self._nearest(queue, row_distance)
            if distance >= best:
                break
            row = self._row_of.get(column)
            if row is None:
                best, freed_row, free_column = distance, -1, column
            else:
                row_distance[row] = distance
                if distance + self._high[row] < best:
                    best, freed_row = distance + self._high[row], row
        for row, distance in row_distance.items():
            self._high[row] -= max(0.0, best - distance)
        for column, distance in column_distance.items():
            self._price[column] = self._price.get(column, 0.0) + max(0.0, best - distance)
        if freed_row != start:
            last = free_column if free_column >= 0 else self.column_of.pop(freed_row)
            self._exchange(start, last, reached_from)

    def _steps(self, row: int, row_distance: Mapping[int, float]) -> Iterator[tuple[float, int]]:
        """Yield the columns of a row, with the distance of each from the start."""
        base = row_distance[row]
        for column, gain in self._edges[row]:
            # That of a column whose row was reached is final, whatever rounding says.
            if self._row_of.get(column) not in row_distance:
                slack = self._high[row] + self._price.get(column, 0.0) - gain
                yield base + max(0.0, slack), column

    def _nearest(
        self, queue: list[tuple[float, int]], row_distance: Mapping[int, float]
    ) -> tuple[float, int]:
        """Return the nearest column that was not reached yet, or one at an infinite distance."""
        while queue:
            distance, column = heapq.heappop(queue)
            if self._row_of.get(column) not in row_distance:
                return distance, column
        return math.inf, -1

    def _exchange(self, start: int, column: int, reached_from: Mapping[int, int]) -> None:
        """Match each row of a path, from its last column back to `start`, to the next column."""
        while True:
            row = reached_from[column]
            before = self.column_of.get(row, -1)
            self.column_of[row], self._row_of[column] = column, row
            if row == start:
                return
            column = before
