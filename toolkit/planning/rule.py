"""The form of a DLA rule and of the verdict that comes of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from device.manifest import Precision
from toolkit.errors import PlanError
from toolkit.planning.node_view import NodeView

Generation = Literal["v1", "v2"]
Certainty = Literal["documented", "observed", "recalled"]
Version = tuple[int, ...]

FLOOR: Version = (0,)
NEWEST: Version = (9999,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One limit: which operators it binds, when, and the check that finds what breaks it.

    `ops` None binds every operator. `tensorrt` is the first version bound and the first one free.
    `hint` names the rewrite that helps, for all operators or by operator.
    """

    id: str
    ops: frozenset[str] | None
    limit: str
    check: Callable[[NodeView], str | None]
    source: str
    generations: tuple[Generation, ...] = ("v1", "v2")
    tensorrt: tuple[Version, Version] = (FLOOR, NEWEST)
    precisions: tuple[Precision, ...] = ("fp16", "int8")
    certainty: Certainty = "documented"
    hint: str | Mapping[str, str] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a node may not run on the DLA: the rule, its limit, what was found, and what helps."""

    rule: str
    node: str
    limit: str
    actual: str
    reason: str
    hint: str
    certainty: Certainty = "documented"


def parse_version(text: str) -> Version:
    """Return "8.6.2" as (8, 6, 2).

    Raises PlanError: the text is not numbers separated by dots.
    """
    parts = text.split(".")
    if not all(part.isdigit() for part in parts):
        raise PlanError(f"{text!r} is not a TensorRT version; write it like 10.3 or 8.6.2.")
    return tuple(int(part) for part in parts)
