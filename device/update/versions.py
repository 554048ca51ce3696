"""Versions of releases, compared by their numbers: the floor of a board."""

import re

# Numbers with dots; what follows them (-rc1, +build) does not count.
VERSION_PATTERN = r"^(\d{1,9}(\.\d{1,9}){0,7})?\Z"
_NUMBERS = re.compile(r"v?(\d{1,9}(?:\.\d{1,9}){0,7})(?![\w.])")


def is_older(version: str, floor: str) -> bool:
    """Whether a version is below the floor, or cannot be compared with it; never without one."""
    if not floor:
        return False
    match = _NUMBERS.match(version)
    return match is None or _key(match[1]) < _key(floor)


def too_old(name: str, version: str, floor: str) -> str:
    """Return the sentence on a release that is below the floor."""
    return (
        f"the release {name} {version} is older than {floor}, the min_version of this device: "
        f"install {floor} or newer"
    )


def _key(version: str) -> tuple[int, ...]:
    numbers = [int(number) for number in version.split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
