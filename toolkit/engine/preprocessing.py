"""The preprocessing that an engine records: that of its calibration, or what the user states."""

from msgspec import UNSET, UnsetType

from calibration.table import CalibrationTable
from device.engine.preprocessing import Preprocessing, describe, differences
from toolkit.engine.options import BuildJob
from toolkit.errors import BuildError
from toolkit.quantize.preprocess.decide import as_stated, decide
from toolkit.quantize.ranges.data import input_specs


def engine_preprocessing(
    table: CalibrationTable | None, job: BuildJob
) -> Preprocessing | UnsetType:
    """Return how images become inputs of the engine; unset where nothing says it.

    Raises BuildError: the user states another preprocessing than that of the table.
    """
    recorded = UNSET if table is None else table.preprocessing
    stated = as_stated(job.options.ranges.preprocess)
    if job.options.data is not None or not stated.says_anything:
        return recorded
    decision = decide(stated, None, input_specs(job.graph))
    if decision is None:
        return recorded
    if recorded:
        different = differences(recorded, decision.value)
        if different:
            raise BuildError(
                "The calibration table was measured with another preprocessing than the one "
                f"stated: {', '.join(f'{name} {text}' for name, text in different.items())}; "
                f"calibrate again, or leave out what the table says already "
                f"({describe(recorded)})."
            )
        return recorded
    return decision.value
