"""DLA rules: the facts that they read, the values that they allow, where they apply."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from device.engine.manifest import Precision
from toolkit.errors import PlanError

Generation = Literal["v1", "v2"]
Certainty = Literal["documented", "observed", "recalled"]
Version = tuple[int, ...]
Value = bool | int | float | str | tuple[int, ...]

FLOOR: Version = (0,)
NEWEST: Version = (9999,)
ALL_PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")

# Sources.
GUIDE = "TensorRT DLA layer restrictions"
GUIDE_RUNTIME = "TensorRT guide, DLA runtime configuration"
GUIDE_85 = "TensorRT 8.5 developer guide"
HEADER = "NvInfer.h 10.3"
HEADER_85 = "NvInfer.h 8.5"
MATRIX = "DLA operator matrix, June 2024"
FAQ = "DLA software FAQ, June 2024"
ONNX_TABLE = "TensorRT ONNX operator table"
JETPACKS = "JetPack release notes"

INT8: tuple[Precision, ...] = ("int8",)
FP16: tuple[Precision, ...] = ("fp16",)
V1: tuple[Generation, ...] = ("v1",)
V2: tuple[Generation, ...] = ("v2",)


class Subject(Protocol):
    """What rules judge: a node, tensor, loadable, pool or core; `op`: its operator or kind."""

    @property
    def name(self) -> str:
        """The name in verdicts."""

    @property
    def op(self) -> str:
        """The operator or kind."""


S_contra = TypeVar("S_contra", bound=Subject, contravariant=True)


@dataclass(frozen=True, slots=True)
class Fact:
    """A value that a rule judges, and its text ("kernel 3x3")."""

    value: Value
    text: str


class Allowed(Protocol):
    """The values that a rule allows; its text follows "must be"."""

    def admits(self, value: Value) -> bool:
        """Return True if the value is allowed."""


@dataclass(frozen=True, slots=True)
class Within:
    """Numbers from `low` to `high`, both included; of a tuple, every one."""

    low: float
    high: float

    def admits(self, value: Value) -> bool:
        """Return True if a number, or every number of a tuple, is in the range."""
        numbers = value if isinstance(value, tuple) else (value,)
        return all(not isinstance(n, str) and self.low <= n <= self.high for n in numbers)

    def __str__(self) -> str:
        return f"in [{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class AtMost:
    """Numbers up to `high`."""

    high: float

    def admits(self, value: Value) -> bool:
        """Return True if a number is at most `high`."""
        return isinstance(value, (int, float)) and value <= self.high

    def __str__(self) -> str:
        return f"at most {self.high:g}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """Exactly these values."""

    values: tuple[Value, ...]

    def admits(self, value: Value) -> bool:
        """Return True if the value is one of them."""
        return value in self.values

    def __str__(self) -> str:
        *rest, last = (str(value) for value in self.values)
        return f"{', '.join(rest)} or {last}" if rest else last


@dataclass(frozen=True, slots=True)
class WithinOrLong:
    """Windows whose sides are all up to `side`, or that are 1 by one of `lengths`."""

    side: int
    lengths: tuple[int, ...]

    def admits(self, value: Value) -> bool:
        """Return True if the window (a tuple) is small, or 1 wide and of a listed length."""
        if not isinstance(value, tuple):
            return False
        small = all(1 <= number <= self.side for number in value)
        return small or (min(value) == 1 and max(value) in self.lengths)

    def __str__(self) -> str:
        return f"within {self.side}x{self.side}, or 1 by {OneOf(self.lengths)}"


@dataclass(frozen=True, slots=True)
class NotSquare:
    """Windows that are no squares with a side from `low` to `high`."""

    low: int
    high: int

    def admits(self, value: Value) -> bool:
        """Return True if the window (a tuple) has unequal sides or a side outside the range."""
        square = isinstance(value, tuple) and len(set(value)) == 1
        return not square or not (isinstance(value, tuple) and self.low <= value[0] <= self.high)

    def __str__(self) -> str:
        return f"no square of [{self.low}, {self.high}]"


YES = OneOf((True,))  # the fact is True or False
NEVER = OneOf(())  # every value is refused


@dataclass(frozen=True, slots=True)
class Situation:
    """The target of a build: DLA generation, TensorRT version and precision."""

    generation: Generation
    tensorrt: Version
    precision: Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[S_contra]):
    """A limit: the operators that it binds, where it applies, the facts and the allowed values.

    `ops` None binds every operator. `limit`: the text, "{}" in it is replaced by `allowed`.
    `facts` returns all values that `allowed` must admit; none: nothing to judge, or unknown (rule
    G5 refuses every node of unknown shape). `tensorrt`: the first version bound and the first one
    not bound. `hint`: the rewrite that helps, for all operators or by operator.
    """

    id: str
    ops: frozenset[str] | None
    limit: str
    facts: Callable[[S_contra], tuple[Fact, ...]]
    allowed: Allowed
    source: str
    generations: tuple[Generation, ...] = ("v1", "v2")
    tensorrt: tuple[Version, Version] = (FLOOR, NEWEST)
    precisions: tuple[Precision, ...] = ("fp16", "int8")
    certainty: Certainty = "documented"
    hint: str | Mapping[str, str] = ""

    @property
    def limit_text(self) -> str:
        """The text of the limit with the allowed values."""
        return self.limit.format(self.allowed)

    def binds(self, op: str) -> bool:
        """Return True if the rule binds an operator."""
        return self.ops is None or op in self.ops

    def why_inactive(self, situation: Situation) -> str:
        """Return why the rule does not apply in a situation, "" if it does."""
        first, end = self.tensorrt
        if situation.precision not in self.precisions:
            return f"precision {situation.precision}"
        if situation.generation not in self.generations:
            return f"DLA {situation.generation}"
        if not first <= situation.tensorrt < end:
            return f"TensorRT {version_text(situation.tensorrt)}"
        return ""

    def broken(self, subject: S_contra) -> Fact | None:
        """Return the first value that is not allowed, None if all are."""
        return next(
            (fact for fact in self.facts(subject) if not self.allowed.admits(fact.value)), None
        )

    def verdict(self, subject: S_contra) -> "Verdict | None":
        """Return why the rule refuses, None if it does not."""
        violation = self.broken(subject)
        if violation is None:
            return None
        return Verdict(
            rule=self.id,
            node=subject.name,
            limit=self.limit_text,
            actual=violation.text,
            reason=f"{violation.text}, but {self.limit_text}",
            hint=self.hint if isinstance(self.hint, str) else self.hint.get(subject.op, ""),
            certainty=self.certainty,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a node may not run on the DLA: the rule, its limit, the actual value, and a hint."""

    rule: str
    node: str
    limit: str
    actual: str
    reason: str
    hint: str
    certainty: Certainty = "documented"


def version_text(version: Version) -> str:
    """Return a version as text: 8.5.2."""
    return ".".join(map(str, version))


def parse_version(text: str) -> Version:
    """Return "8.6.2" as (8, 6, 2).

    Raises PlanError: the text is not numbers separated by dots.
    """
    parts = text.split(".")
    if not all(part.isdigit() for part in parts):
        raise PlanError(f"{text!r} is not a TensorRT version; write it like 10.3 or 8.6.2.")
    return tuple(int(part) for part in parts)
