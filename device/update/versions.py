"""Versions of releases and of a board's software, compared number by number."""

import itertools
import re

VERSION_PATTERN = r"^(\d{1,9}(\.\d{1,9}){0,7})?\Z"  # of a floor: numbers with dots, or none
_PARTS = re.compile(r"\d+|[A-Za-z]+")


def version_key(version: str) -> tuple[tuple[int, str], ...]:
    """Return a key by which versions are in order: 1.9 < 1.10-rc1 < 1.10 = 1.10.0 < 1.10.1.

    A word makes a version one that comes before the same without it; what follows "+" names a
    build and does not count.
    """
    parts = _PARTS.findall(version.strip().partition("+")[0].removeprefix("v"))
    numbers = [int(part) for part in itertools.takewhile(str.isdigit, parts)]
    words = parts[len(numbers) :]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    key = [(number, "") for number in numbers]
    # A word counts as less than the end, and the end as less than a further number.
    rest = [(-2, word) if not word.isdigit() else (int(word), "") for word in words]
    return (*key, *rest, (-1, ""))


def is_older(version: str, than: str) -> bool:
    """Whether a version comes before another one."""
    return version_key(version) < version_key(than)


def too_old(name: str, version: str, floor: str) -> str:
    """Return the sentence on a release that is below the floor of agent.toml."""
    return (
        f"the release {name} {version} is older than {floor}, the min_version of this device: "
        f"install {floor} or newer"
    )
