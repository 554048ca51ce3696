"""Gates: what a group must have measured before the next one begins.

    p95_latency_ms<30, score_agreement>0.98, errors<1%, bundle.map50>=0.4

A comma-separated list of NAME OPERATOR NUMBER. A figure of devices holds if it holds for each of
the group's live devices; `errors` is a share of all their frames together. `bundle.NAME` is what
the bundle says of itself.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from device.choices import list_choices
from device.protocol.documents import Measured
from toolkit.errors import RolloutError

Comparison = Literal["<", "<=", ">", ">="]
COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
BUNDLE = "bundle."
_GATE = re.compile(
    r"\s*(?P<name>[A-Za-z_][\w.]*)\s*(?P<compare><=|>=|<|>)\s*"
    r"(?P<limit>[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)\s*(?P<percent>%?)\s*\Z"
)


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
SHARES = frozenset({POOLED, "score_agreement", "golden_agreement", "shadow_agreement"})


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One gate; `limit` is a share for what is given in percent."""

    name: str
    compare: Comparison
    limit: float

    def __str__(self) -> str:
        if self.name == POOLED:
            return f"{self.name}{self.compare}{self.limit * 100:g}%"
        return f"{self.name}{self.compare}{self.limit:g}"

    def holds(self, value: float) -> bool:
        """Whether a value passes."""
        return COMPARE[self.compare](value, self.limit)


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
    return tuple(_parse_gate(part, text) for part in text.split(","))


def _parse_gate(part: str, text: str) -> Gate:
    match = _GATE.match(part)
    if match is None:
        raise RolloutError(
            f"{part.strip()!r} in the gates {text!r} is no gate: write NAME, one of < <= > >=, and "
            "a number, for example p95_latency_ms<30"
        )
    name, limit = match["name"], float(match["limit"])
    if name not in FIGURES and name != POOLED and not name.startswith(BUNDLE):
        choices = list_choices(name, (*FIGURES, POOLED))
        raise RolloutError(
            f"there is no figure {name!r} for a gate: take one of {choices}, or {BUNDLE}NAME for "
            "what the bundle says of itself"
        )
    if match["percent"]:
        if name not in SHARES:
            raise RolloutError(f"{name} in the gate {part.strip()!r} is no share: leave out the %")
        limit /= 100.0
    if name in SHARES and not 0.0 <= limit <= 1.0:
        raise RolloutError(
            f"the gate {part.strip()!r} compares {name}, a share, with {limit:g}: write 0 to 1, or "
            "0% to 100%"
        )
    return Gate(name=name, compare=msgspec.convert(match["compare"], Comparison), limit=limit)


def broken_by_bundle(gates: Sequence[Gate], metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return a sentence for each gate on the bundle that its metrics do not pass."""
    sentences = []
    for gate in gates:
        if not gate.name.startswith(BUNDLE):
            continue
        name = gate.name.removeprefix(BUNDLE)
        if name not in metrics:
            known = ", ".join(sorted(metrics)) or "nothing"
            sentences.append(f"the bundle does not say its {name} (it says: {known})")
        elif not gate.holds(metrics[name]):
            sentences.append(f"the bundle's {name} is {metrics[name]:g}, the gate is {gate}")
    return tuple(sentences)


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
