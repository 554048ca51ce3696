"""The outputs of a DLA in a report, for `tandem compare --recorded`."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from device.array_files import read_npz
from device.errors import ArrayFileError
from device.selftest.engines import INPUT
from device.selftest.report import RECORDED, read_report
from toolkit.errors import BuildError

Arrays = dict[str, npt.NDArray[Any]]

_MAX_BYTES = 2**28  # of arrays; an entry of 64 MiB could unpack to more


def recorded_in(path: Path, engine_sha256: str) -> Arrays:
    """Return inputs and outputs that a report has of a reference engine.

    Raises ReportError: it is none; BuildError: it has none of this engine, or damaged ones.
    """
    file = read_report(path)
    rows = {row.engine_sha256: row for row in file.report.recorded if not row.problem}
    row = rows.get(engine_sha256)
    data = None if row is None else file.files.get(f"{RECORDED}{row.item}.npz")
    if row is None or data is None:
        known = ", ".join(row.item for row in rows.values()) or "none"
        raise BuildError(
            f"{path} has no outputs of this engine; it has those of {known}: unpack that engine "
            "from kit.zip of the kit."
        )
    try:
        arrays = read_npz(io.BytesIO(data), _MAX_BYTES)
    except ArrayFileError as error:
        raise BuildError(f"{path}: outputs of {row.item} are damaged ({error}).") from error
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            raise BuildError(f"{path}: {name!r} of {row.item} holds what is no number.")
    return {name.removeprefix(INPUT): array for name, array in arrays.items()}
