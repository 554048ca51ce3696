"""Arithmetic on the sizes of tensors."""


def ceil_div(size: int, block: int) -> int:
    """Return how many blocks hold `size` elements."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (opt(size) - 1).bit_length()


def opt(size: int) -> int:
    """Return the size that blocks are chosen for."""
    return int(size)
