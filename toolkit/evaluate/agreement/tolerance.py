"""When two tensors agree: |a - b| <= atol + rtol |b| for every element, as numpy.allclose."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from toolkit.errors import CompareError

# By the lower precision of the two sides. BF16 rounds 8 times as coarsely as FP16. INT8, FP8 and
# INT4 weights lose what their ranges and blocks say: there is no usual loss, so a pair with one is
# judged only by what the user states.
DEFAULTS: Mapping[str, tuple[float, float]] = {
    "fp32": (1e-4, 1e-3),
    "fp16": (1e-2, 1e-2),
    "bf16": (8e-2, 8e-2),
}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`atol` and `rtol` None: elements are not judged; `sqnr_db` None: neither is the SQNR."""

    atol: float | None
    rtol: float | None
    sqnr_db: float | None = None

    @property
    def judges(self) -> bool:
        """Whether anything can be beyond it."""
        return self.atol is not None or self.sqnr_db is not None

    @property
    def text(self) -> str:
        """The tolerance in words."""
        parts = []
        if self.atol is not None:
            parts.append(f"atol {self.atol:g}, rtol {self.rtol or 0:g}")
        if self.sqnr_db is not None:
            parts.append(f"SQNR of at least {self.sqnr_db:g} dB")
        return " and ".join(parts) or "none: figures only"


@dataclass(frozen=True, slots=True)
class Tolerances:
    """What the user states, by tensor; "" stands for all others."""

    atol: Mapping[str, float] = field(default_factory=dict)
    rtol: Mapping[str, float] = field(default_factory=dict)
    sqnr_db: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: str, precision: str, *, whole: bool = False) -> Tolerance:
        """Return the tolerance of a tensor; what is not stated is that of the precision.

        `whole`: it holds whole numbers or truth values (classes, indices), which are equal or not.
        One of atol and rtol alone leaves the other 0; a stated SQNR alone leaves elements unjudged.
        """
        atol, rtol = _stated(self.atol, name), _stated(self.rtol, name)
        sqnr_db = _stated(self.sqnr_db, name)
        if atol is None and rtol is None:
            usual = DEFAULTS.get(precision) if sqnr_db is None else None
            if usual is None:
                return Tolerance(None, None, sqnr_db)
            return Tolerance(0.0, 0.0, sqnr_db) if whole else Tolerance(*usual, sqnr_db)
        return Tolerance(atol or 0.0, rtol or 0.0, sqnr_db)

    def check_names(self, names: frozenset[str]) -> None:
        """Raise CompareError: a tolerance is stated for a tensor that is not compared."""
        for option, stated in (
            ("--atol", self.atol),
            ("--rtol", self.rtol),
            ("--min-sqnr", self.sqnr_db),
        ):
            unknown = next((name for name in stated if name and name not in names), None)
            if unknown is not None:
                raise CompareError(
                    f"{option} {unknown}: no such tensor is compared; there are "
                    f"{', '.join(sorted(names)[:8])}"
                )


def lower(a: str, b: str) -> str:
    """Return the lower of two precisions; those without a usual loss are the lowest."""
    unusual = next((name for name in (a, b) if name not in DEFAULTS), None)
    return unusual or max(a, b, key=list(DEFAULTS).index)


def _stated(values: Mapping[str, float], name: str) -> float | None:
    return values.get(name, values.get(""))
