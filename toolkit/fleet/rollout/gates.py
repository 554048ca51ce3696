"""Gates: what a group must have measured before the next one begins, and what a bundle must say.

    p95_latency_ms<30, score_agreement>0.98, errors<1%
    task_score>=0.9, agreement>98%, licence in [MIT, Apache-2.0], bundle.map50>=0.4

A comma-separated list of NAME OPERATOR NUMBER, or NAME in [TEXT, ...]. A figure of devices holds if
it holds for each of the group's live devices; `errors` is a share of all their frames together.
`bundle.NAME` is what the bundle says of itself, the names in BUNDLE_METRICS and BUNDLE_TEXTS do
without `bundle.`. Where the bundle holds several models, each must say it and pass;
`bundle.MODEL.NAME` asks one alone.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from device.choices import list_choices
from device.protocol.documents import Measured
from toolkit.errors import RolloutError

Comparison = Literal["<", "<=", ">", ">=", "in"]
COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
BUNDLE = "bundle."
# What builds measure, as bundles name it; the shares of them may be given in percent.
BUNDLE_METRICS = (
    "task_score", "task_score_drop", "agreement", "sqnr_db", "score_drop", "score_rise",
    "detection_drop", "ranking", "lines", "mask_iou", "predicted_latency_ms",
)  # fmt: skip
BUNDLE_SHARES = frozenset({"task_score", "agreement", "ranking", "lines", "mask_iou"})
LICENCE = "licence"
HASHES = frozenset({"model", "data", "table"})  # SHA-256 of what a bundle was made of
BUNDLE_TEXTS: Mapping[str, str] = {LICENCE: LICENCE, "license": LICENCE} | {
    name: name for name in HASHES
}
MIN_HASH_DIGITS = 12  # of the beginning of a SHA-256 in a gate
_GATE = re.compile(
    r"\s*(?P<name>[A-Za-z_][\w.]*)\s*(?P<compare><=|>=|<|>)\s*"
    r"(?P<limit>[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)\s*(?P<percent>%?)\s*\Z"
)
_CHOICE = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]*)\s+in\s*\[(?P<choices>[^\[\]]*)\]\s*\Z")
_COMMA = re.compile(r",(?![^\[\]]*\])")  # one that is in no brackets
_HASH = re.compile(rf"[0-9a-f]{{{MIN_HASH_DIGITS},64}}\Z")


def _of_frames(value: Callable[[Measured], float]) -> Callable[[Measured], float | None]:
    """Return a figure that is only known once there were frames."""
    return lambda measured: value(measured) if measured.frames > 0 else None


def _agreement(measured: Measured) -> float | None:
    """Return the agreement on live frames, else that on golden inputs."""
    shadow, golden = measured.shadow_agreement, measured.golden_agreement
    return golden if shadow is None else shadow


# Name -> the figure of one device, None if it has not measured it. `errors` is pooled instead.
FIGURES: Mapping[str, Callable[[Measured], float | None]] = {
    "p50_latency_ms": _of_frames(lambda measured: measured.latency_p50_ms),
    "p95_latency_ms": _of_frames(lambda measured: measured.latency_p95_ms),
    "fps": _of_frames(lambda measured: measured.fps),
    "frames": lambda measured: float(measured.frames),
    "temperature_c": lambda measured: measured.temperature_c,
    "score_agreement": _agreement,
    "golden_agreement": lambda measured: measured.golden_agreement,
    "shadow_agreement": lambda measured: measured.shadow_agreement,
    "shadow_frames": lambda measured: float(measured.shadow_frames),
}
POOLED = "errors"
# Measured before or in the trial of a pipeline alone.
AGREEMENT_GATES = ("score_agreement", "golden_agreement", "shadow_agreement", "shadow_frames")
SHARES = frozenset({POOLED, "score_agreement", "golden_agreement", "shadow_agreement"})


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One gate; `limit` is a share for what is given in percent, `choices` are what is in [...]."""

    name: str
    compare: Comparison
    limit: float = 0.0
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.compare == "in":
            return f"{self.name} in [{', '.join(self.choices)}]"
        if self.name == POOLED:
            return f"{self.name}{self.compare}{self.limit * 100:g}%"
        return f"{self.name}{self.compare}{self.limit:g}"

    def holds(self, value: float) -> bool:
        """Whether a number passes."""
        return self.compare != "in" and COMPARE[self.compare](value, self.limit)

    def holds_text(self, text: str) -> bool:
        """Whether a text passes; of a hash its beginning is compared."""
        if self.name.removeprefix(BUNDLE) in HASHES:
            return any(text.startswith(choice) for choice in self.choices)
        return text in self.choices


@dataclass(frozen=True, slots=True)
class GateResult:
    """A gate on a group: what breaks it, or which devices have not measured it yet."""

    gate: Gate
    broken: str = ""
    missing: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether it holds, and every device has measured it."""
        return not self.broken and not self.missing


def parse_gates(text: str) -> tuple[Gate, ...]:
    """Return the gates in a text; RolloutError names the part that is wrong."""
    if not text.strip():
        return ()
    return tuple(_parse_gate(part, text) for part in _COMMA.split(text))


def _parse_gate(part: str, text: str) -> Gate:
    choice = _CHOICE.match(part)
    if choice is not None:
        return _parse_choice(choice["name"], choice["choices"], part.strip())
    match = _GATE.match(part)
    if match is None:
        raise RolloutError(
            f"{part.strip()!r} in the gates {text!r} is no gate: write NAME, one of < <= > >=, and "
            "a number, for example p95_latency_ms<30, or licence in [MIT, Apache-2.0]"
        )
    name, limit = match["name"], float(match["limit"])
    if name in BUNDLE_TEXTS:
        raise RolloutError(
            f"{name} in the gate {part.strip()!r} is a text: write {name} in [ONE, ANOTHER]"
        )
    plain = name.removeprefix(BUNDLE).rpartition(".")[2]  # without a model's name
    is_share = name in SHARES or plain in BUNDLE_SHARES
    if name in BUNDLE_METRICS:
        name = f"{BUNDLE}{name}"
    if name not in FIGURES and name != POOLED and not name.startswith(BUNDLE):
        choices = list_choices(name, (*FIGURES, POOLED, *BUNDLE_METRICS, *BUNDLE_TEXTS))
        raise RolloutError(
            f"there is no figure {name!r} for a gate: take one of {choices}, or {BUNDLE}NAME for "
            "what the bundle says of itself"
        )
    if match["percent"]:
        if not is_share:
            raise RolloutError(f"{name} in the gate {part.strip()!r} is no share: leave out the %")
        limit /= 100.0
    if is_share and not 0.0 <= limit <= 1.0:
        raise RolloutError(
            f"the gate {part.strip()!r} compares {name}, a share, with {limit:g}: write 0 to 1, or "
            "0% to 100%"
        )
    return Gate(name=name, compare=msgspec.convert(match["compare"], Comparison), limit=limit)


def _parse_choice(name: str, text: str, part: str) -> Gate:
    """Return the gate NAME in [TEXT, ...]."""
    fact = BUNDLE_TEXTS.get(name.removeprefix(BUNDLE))
    choices = tuple(choice.strip() for choice in text.split(","))
    if fact is None:
        raise RolloutError(
            f"there is no text {name!r} for the gate {part!r}: take one of "
            f"{list_choices(name, BUNDLE_TEXTS)}"
        )
    if not all(choices):
        raise RolloutError(f"the gate {part!r} has an empty choice: write {name} in [ONE, ANOTHER]")
    if fact in HASHES and (wrong := [choice for choice in choices if not _HASH.match(choice)]):
        raise RolloutError(
            f"{wrong[0]!r} in the gate {part!r} is no SHA-256: write {MIN_HASH_DIGITS} to 64 of "
            "its hexadecimal digits, in lower case, from the beginning"
        )
    return Gate(name=f"{BUNDLE}{fact}", compare="in", choices=choices)


@dataclass(frozen=True, slots=True)
class BundleStatements:
    """What a bundle says of itself: figures, and texts by LICENCE and HASHES.

    `models`: the names of several. Then the names of what is said of one begin with its name and a
    dot.
    """

    metrics: Mapping[str, float]
    texts: Mapping[str, str]
    models: tuple[str, ...] = ()


def check_bundle_gates(gates: Sequence[Gate], release: str, statements: BundleStatements) -> None:
    """Raise RolloutError if a bundle does not pass the gates on what it says of itself."""
    if broken := broken_by_bundle(gates, statements):
        raise RolloutError(f"{release} is not rolled out: {'; '.join(broken)}")


def broken_by_bundle(gates: Sequence[Gate], statements: BundleStatements) -> tuple[str, ...]:
    """Return a sentence for each gate on the bundle that it does not pass."""
    sentences: list[str] = []
    for gate in gates:
        if gate.name.startswith(BUNDLE):
            sentences += (
                _broken(gate, statements.texts, statements.models, gate.holds_text)
                if gate.compare == "in"
                else _broken(gate, statements.metrics, statements.models, gate.holds)
            )
    return tuple(sentences)


Stated = TypeVar("Stated", float, str)


def _broken(
    gate: Gate, stated: Mapping[str, Stated], models: Sequence[str], holds: Callable[[Stated], bool]
) -> list[str]:
    """Return what is stated and does not hold, and what is not stated and should be."""
    name = gate.name.removeprefix(BUNDLE)
    names = [name] if name in stated or not models else [f"{model}.{name}" for model in models]
    if not any(one in stated for one in names):
        names = [name]
    known = ", ".join(sorted(stated)) or "nothing"
    return [
        f"the bundle's {one} is {_text(stated[one])}, the gate is {gate}"
        if one in stated
        else f"the bundle does not say its {one} (it says: {known})"
        for one in names
        if one not in stated or not holds(stated[one])
    ]


def _text(value: float | str) -> str:
    return repr(value) if isinstance(value, str) else f"{value:g}"


def judge_gates(
    gates: Sequence[Gate], measured: Mapping[str, Measured | None]
) -> tuple[GateResult, ...]:
    """Judge the gates on the figures of a group's live devices, by their ids."""
    return tuple(
        _judge_errors(gate, measured) if gate.name == POOLED else _judge_each(gate, measured)
        for gate in gates
        if not gate.name.startswith(BUNDLE)
    )


def _judge_each(gate: Gate, measured: Mapping[str, Measured | None]) -> GateResult:
    figure = FIGURES[gate.name]
    missing, broken = [], []
    for device, values in measured.items():
        value = None if values is None else figure(values)
        if value is None:
            missing.append(device)
        elif not gate.holds(value):
            broken.append((value, device))
    if not broken:
        return GateResult(gate, missing=tuple(missing))
    worst, device = max(broken) if gate.compare in ("<", "<=") else min(broken)
    others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
    return GateResult(gate, broken=f"{gate.name} is {worst:g} on {device}{others}, not {gate}")


def _judge_errors(gate: Gate, measured: Mapping[str, Measured | None]) -> GateResult:
    frames = errors = 0
    missing = []
    for device, values in measured.items():
        if values is None or values.frames + values.errors == 0:
            missing.append(device)
        else:
            frames += values.frames + values.errors
            errors += values.errors
    if frames == 0 or gate.holds(errors / frames):
        return GateResult(gate, missing=tuple(missing))
    share = f"{errors} of {frames} frames ({100 * errors / frames:.2g}%)"
    return GateResult(gate, broken=f"errors are {share}, not {gate}")
