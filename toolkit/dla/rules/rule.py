"""The form of a DLA rule (what it reads, what it allows, where it holds) and of its verdict."""

from collections.abc import Callable, Mapping, Sequence
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


class Judged(Protocol):
    """What rules can judge: it has a name, and `op` is the operator or kind that rules name."""

    @property
    def name(self) -> str:
        """The name that a verdict gives."""

    @property
    def op(self) -> str:
        """The operator or kind."""


S_contra = TypeVar("S_contra", bound=Judged, contravariant=True)


@dataclass(frozen=True, slots=True)
class Seen:
    """One value that a rule found, and how it is said ("kernel 3x3")."""

    value: Value
    text: str


class Allowed(Protocol):
    """The values that a rule lets pass; as text it follows "must be"."""

    def admits(self, value: Value) -> bool:
        """Tell whether a value passes."""


@dataclass(frozen=True, slots=True)
class Within:
    """Numbers from `low` to `high`, both included; of a tuple, every one."""

    low: float
    high: float

    def admits(self, value: Value) -> bool:
        """Tell whether a number, or every number of a tuple, lies in the range."""
        numbers = value if isinstance(value, tuple) else (value,)
        return all(not isinstance(n, str) and self.low <= n <= self.high for n in numbers)

    def __str__(self) -> str:
        return f"in [{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class AtMost:
    """Numbers up to `high`."""

    high: float

    def admits(self, value: Value) -> bool:
        """Tell whether a number is small enough."""
        return isinstance(value, (int, float)) and value <= self.high

    def __str__(self) -> str:
        return f"at most {self.high:g}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """Exactly these values."""

    values: tuple[Value, ...]

    def admits(self, value: Value) -> bool:
        """Tell whether a value is one of them."""
        return value in self.values

    def __str__(self) -> str:
        *most, last = (str(value) for value in self.values)
        return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True, slots=True)
class WithinOrLong:
    """Windows whose sides are all up to `side`, or that are 1 by one of `lengths`."""

    side: int
    lengths: tuple[int, ...]

    def admits(self, value: Value) -> bool:
        """Tell whether the window (a tuple) is small, or one wide and of a listed length."""
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
        """Tell whether the window (a tuple) has unequal sides or a side outside the range."""
        square = isinstance(value, tuple) and len(set(value)) == 1
        return not square or not (isinstance(value, tuple) and self.low <= value[0] <= self.high)

    def __str__(self) -> str:
        return f"no square of [{self.low}, {self.high}]"


YES = OneOf((True,))  # for what the text alone says
NEVER = OneOf(())  # whatever the rule reads keeps the node off the DLA


@dataclass(frozen=True, slots=True)
class Situation:
    """What a build is for: the DLA's generation, the TensorRT and the precision."""

    generation: Generation
    tensorrt: Version
    precision: Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[S_contra]):
    """One limit: which operators it binds, when, what it reads and what it allows.

    `ops` None binds every operator. `limit` says the limit, "{}" in it standing for `allowed`.
    `see` returns all values that `allowed` must admit; none: there is nothing to judge, or it is
    not known (rule G5 refuses every node of unknown shape). `tensorrt` is the first version bound
    and the first one free. `hint` names the rewrite that helps, for all operators or by operator.
    """

    id: str
    ops: frozenset[str] | None
    limit: str
    see: Callable[[S_contra], tuple[Seen, ...]]
    allowed: Allowed
    source: str
    generations: tuple[Generation, ...] = ("v1", "v2")
    tensorrt: tuple[Version, Version] = (FLOOR, NEWEST)
    precisions: tuple[Precision, ...] = ("fp16", "int8")
    certainty: Certainty = "documented"
    hint: str | Mapping[str, str] = ""

    @property
    def limit_text(self) -> str:
        """The limit in words, with what is allowed."""
        return self.limit.format(self.allowed)

    def binds(self, op: str) -> bool:
        """Tell whether the rule speaks of an operator at all."""
        return self.ops is None or op in self.ops

    def idle(self, situation: Situation) -> str:
        """Return why the rule does not hold in a situation, "" where it holds."""
        first, free = self.tensorrt
        if situation.precision not in self.precisions:
            return f"precision {situation.precision}"
        if situation.generation not in self.generations:
            return f"DLA {situation.generation}"
        if not first <= situation.tensorrt < free:
            return f"TensorRT {'.'.join(map(str, situation.tensorrt))}"
        return ""

    def broken(self, subject: S_contra) -> Seen | None:
        """Return the first value that is not allowed, None where all are."""
        return next((s for s in self.see(subject) if not self.allowed.admits(s.value)), None)

    def verdict(self, subject: S_contra) -> "Verdict | None":
        """Return why the rule refuses, None where it does not."""
        found = self.broken(subject)
        if found is None:
            return None
        return Verdict(
            rule=self.id,
            node=subject.name,
            limit=self.limit_text,
            actual=found.text,
            reason=f"{found.text}, but {self.limit_text}",
            hint=self.hint if isinstance(self.hint, str) else self.hint.get(subject.op, ""),
            certainty=self.certainty,
        )


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


def judge_subject(
    rules: Sequence[Rule[S_contra]], subject: S_contra, situation: Situation
) -> tuple[Verdict, ...]:
    """Return the verdicts of the rules that bind `subject` and hold in `situation`."""
    holding = (r for r in rules if r.binds(subject.op) and not r.idle(situation))
    found = (rule.verdict(subject) for rule in holding)
    return tuple(verdict for verdict in found if verdict is not None)


def parse_version(text: str) -> Version:
    """Return "8.6.2" as (8, 6, 2).

    Raises PlanError: the text is not numbers separated by dots.
    """
    parts = text.split(".")
    if not all(part.isdigit() for part in parts):
        raise PlanError(f"{text!r} is not a TensorRT version; write it like 10.3 or 8.6.2.")
    return tuple(int(part) for part in parts)
