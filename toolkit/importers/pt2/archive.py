"""A .pt2 file is looked through before `torch.export.load` reads it.

PyTorch's own reader takes the parts out, so that what is checked is what it will load.
"""

import io
import json
import re
import zipfile
from collections.abc import Container
from pathlib import Path
from typing import Any

from toolkit.errors import ImportModelError, first_line
from toolkit.importers.pt2.program import find_suspect

# Parts that hold no code: names, programs, raw tensors, text; pickles are tried first.
PLAIN_PARTS = re.compile(
    r"archive_format|archive_version|byteorder|(\.data/)?(version|serialization_id)|extra/.*"
    r"|\.format_version|\.storage_alignment"
    r"|models/[^/]+\.json|data/(weights|constants)/[^/]+_config\.json"
    r"|data/weights/weight_\d+|data/constants/tensor_\d+"
    r"|data/(weights|constants|sample_inputs)/[^/]+\.pt"
)
SHOWN_CHARACTERS = 120


def refuse_code(path: Path, torch: Any) -> None:  # noqa: ANN401  (a module)
    """Refuse a .pt2 with which `torch.export.load`, or the export of its program, could run code.

    Raises ImportModelError: it is damaged, of the old format, has pickles of other objects than
    tensors, libraries or sources, or text that PyTorch would evaluate and that is not harmless.
    """
    _refuse_old_format(path)
    try:
        reader = torch._C.PyTorchFileReader(str(path))
        records = [str(record) for record in reader.get_all_records()]
        operators = frozenset(torch._C._dispatch_get_all_op_names())
        for record in records:
            _refuse_record(path.name, record, reader, torch, operators)
    except (RuntimeError, ValueError, AttributeError) as err:
        raise ImportModelError(
            f"{path.name} is not a complete file of torch.export.save ({first_line(err)}); "
            "make or copy it again."
        ) from err


def _refuse_old_format(path: Path) -> None:
    """Refuse what torch.export.load would read as a file of PyTorch 2.7, with other pickles."""
    try:
        with zipfile.ZipFile(path) as archive:
            is_old = "version" in archive.namelist()
    except (OSError, zipfile.BadZipFile):  # refused by PyTorch's reader, with its reason
        return
    if is_old:
        raise ImportModelError(
            f"{path.name} has the format of PyTorch 2.7 and older, which is made of pickles; "
            "make it again with PyTorch 2.8 or newer."
        )


def _refuse_record(
    name: str,
    record: str,
    reader: Any,  # noqa: ANN401  (torch's)
    torch: Any,  # noqa: ANN401  (a module)
    operators: Container[str],
) -> None:
    if not PLAIN_PARTS.fullmatch(record):
        _refuse_pickle(name, record)
    if record.endswith(".pt") and not _is_tensors(torch, reader.get_record(record)):
        _refuse_pickle(name, record)
    if not record.endswith(".json"):
        return
    content = json.loads(reader.get_record(record).decode())
    if record.endswith("_config.json"):
        rows = content.get("config", {})
        if any(row.get("use_pickle") for row in rows.values()):
            _refuse_pickle(name, record)
    if suspect := find_suspect(content, operators):
        value = repr(suspect.value)
        shown = value if len(value) <= SHOWN_CHARACTERS else f"{value[:SHOWN_CHARACTERS]}..."
        raise ImportModelError(
            f"{name}: {suspect.field or 'a key'} in {record!r} is {shown}, but Tandem lets only "
            f"{suspect.allowed} pass there, because PyTorch could run it as code; where you trust "
            "the file, load it in Python and give the program to tandem.build."
        )


def _refuse_pickle(name: str, record: str) -> None:
    raise ImportModelError(
        f"{name} holds code or a pickle of other objects than tensors in {record!r}, and reading "
        "it could run any code; export the program again without custom objects, or load it in "
        "Python and give it to tandem.build."
    )


def _is_tensors(torch: Any, content: bytes) -> bool:  # noqa: ANN401  (a module)
    try:
        torch.load(io.BytesIO(content), weights_only=True) if content else None
    except Exception:  # noqa: BLE001  (whatever its restricted unpickler says)
        return False
    return True
