"""The DLA's rounding and saturation, written from its description."""


def rha(value: int, shift: int) -> int:
    size = (2 * abs(value) + 2**shift) // 2 ** (shift + 1)
    return size if value >= 0 else -size


def sat(value: int, bits: int) -> int:
    return max(-(2 ** (bits - 1)), min(2 ** (bits - 1) - 1, value))
