"""The preprocessing that an engine records: that of its calibration, or what the user states."""

from msgspec import UNSET, UnsetType

from device.engine.preprocessing import Preprocessing, describe, differences
from toolkit.engine.frontend_result import Frontend
from toolkit.errors import BuildError
from toolkit.quantize.preprocess.decide import StatedPreprocessing, as_stated, decide, stated_over
from toolkit.quantize.preprocess.known import known_preprocessing
from toolkit.quantize.ranges.data import input_specs


def engine_preprocessing(front: Frontend) -> Preprocessing | UnsetType:
    """Return how images become inputs of the engine; unset where nothing says it.

    Raises BuildError: the user states another preprocessing than that of the table.
    """
    table = front.table
    recorded = UNSET if table is None else table.preprocessing
    stated = as_stated(front.options.ranges.preprocess)
    measured = front.options.data is not None and table is not None  # by what is stated
    if measured or not stated.says_anything:
        return recorded
    if recorded:
        _refuse_another(recorded, stated)
        return recorded
    hint = known_preprocessing(front.imported.name, front.imported.origin)
    decision = decide(stated, hint, input_specs(front.graph))
    return UNSET if decision is None else decision.value


def _refuse_another(recorded: Preprocessing, stated: StatedPreprocessing) -> None:
    different = differences(recorded, stated_over(recorded, stated))
    if different:
        changes = ", ".join(f"{name} {text}" for name, text in different.items())
        raise BuildError(
            f"The calibration table was measured with another preprocessing than the one stated: "
            f"{changes}; calibrate again, or leave out what the table says already "
            f"({describe(recorded)})."
        )
