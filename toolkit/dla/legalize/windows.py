"""How a long axis is cut into steps of short windows: the arithmetic behind cascades.

A step (k, before, after) pads an axis and reduces blocks of k, so n becomes (n + before + after)/k.
"""

from functools import lru_cache

MAX_POOL_WINDOW = 8  # longest pooling window of the DLA, rule pool.window

Step = tuple[int, int, int]


@lru_cache(maxsize=4096)
def exact_steps(size: int) -> tuple[Step, ...] | None:
    """The fewest windows of at most 8 whose product is `size`; None: it has a larger prime."""
    best: tuple[Step, ...] | None = () if size == 1 else None
    for window in range(MAX_POOL_WINDOW, 1, -1):
        further_steps = exact_steps(size // window) if size % window == 0 else None
        if further_steps is not None and (best is None or len(further_steps) + 1 < len(best)):
            best = ((window, 0, 0), *further_steps)
    return best


def padded_steps(size: int) -> tuple[Step, ...]:
    """The fewest windows of at most 8 that reduce `size` to 1, with as little padding as can be."""
    return _padded(size)[2]


def inflation(size: int, steps: tuple[Step, ...]) -> float:
    """By how much the steps pad: the product of the windows over the size; 1 is exact."""
    product = 1
    for window, _, _ in steps:
        product *= window
    return product / size


@lru_cache(maxsize=16384)
def _padded(size: int) -> tuple[int, int, tuple[Step, ...]]:
    """Return the number of steps, the product of their windows, and the steps."""
    if size == 1:
        return 0, 1, ()
    best: tuple[int, int, tuple[Step, ...]] | None = None
    for window in range(MAX_POOL_WINDOW, 1, -1):
        pad = -size % window
        if size + pad >= size * window:  # nothing gained
            continue
        count, product, further_steps = _padded((size + pad) // window)
        step = (window, pad // 2, pad - pad // 2)
        candidate = (count + 1, product * window, (step, *further_steps))
        if best is None or candidate[:2] < best[:2]:
            best = candidate
    assert best is not None  # a window of 2 halves any size
    return best


def paired(rows: tuple[Step, ...], columns: tuple[Step, ...]) -> tuple[tuple[Step, Step], ...]:
    """The steps of both axes side by side; the shorter list ends in windows of 1."""
    identity: Step = (1, 0, 0)
    count = max(len(rows), len(columns))
    longer = [steps + (identity,) * (count - len(steps)) for steps in (rows, columns)]
    return tuple(zip(longer[0], longer[1], strict=True))
