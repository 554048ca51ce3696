"""The step `dla`: a reference engine on the DLA; its outputs come back for the emulator."""

from pathlib import Path

from device.engine.file import open_engine
from device.selftest.engines import (
    INPUT,
    finish,
    golden,
    npz,
    open_on_board,
    segment_rows,
    unpack_engine,
)
from device.selftest.kit import Kit
from device.selftest.report import RECORDED, RecordedRow

_FINISH_S = 80.0


def run(kit: Kit, kit_folder: Path, folder: Path, item: str) -> RecordedRow:
    """Run one reference engine and keep what it gives. Raises SessionError: it cannot run here."""
    path = unpack_engine(kit_folder, folder, item)
    feeds, _ = golden(kit_folder, folder, item)
    with open_engine(path) as engine:
        finished = finish(engine, folder, _FINISH_S)
        with open_on_board(engine, folder) as session:
            outputs = session.infer(feeds)
            rows = segment_rows(engine, session, {}, finished)
        elsewhere = next(
            (row for row in rows
             if row.processor.startswith("dla") and row.implementation != "tensorrt"), None
        )  # fmt: skip
        if elsewhere is not None:
            return RecordedRow(
                item=item,
                engine_sha256=engine.sha256,
                segments=rows,
                problem=f"segment {elsewhere.name} did not run on the DLA: {elsewhere.reason}",
            )
        target = folder / RECORDED / f"{item}.npz"
        target.parent.mkdir(exist_ok=True)
        arrays = {**outputs, **{f"{INPUT}{name}": array for name, array in feeds.items()}}
        target.write_bytes(npz(arrays))
        return RecordedRow(item=item, engine_sha256=engine.sha256, segments=rows)
