"""The kit: what the host made for a selftest, in one zip file beside its list.

    kit.json    `Kit`: what there is, with the SHA-256 of `kit.zip`
    kit.zip     engines/NAME.engine, golden/NAME.npz, cases/ID.onnx, demo/...

Weights of networks repeat a short pattern: times do not depend on them, and they compress to next
to nothing.
"""

import hashlib
import zipfile
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from device.errors import TandemError
from device.selftest.report import Side, Variant

MAJOR = 1
LIST = "kit.json"
DATA = "kit.zip"
MAX_UNPACKED_BYTES = 4 * 2**30

Id = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$")]


class KitError(TandemError):
    """A kit is missing, damaged, or of another version."""


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the parts. A newer minor version may have more keys."""


class Reference(_Value, frozen=True, kw_only=True):
    """An engine with known outputs: engines/NAME.engine and golden/NAME.npz.

    The .npz holds inputs under "in:NAME" and outputs under "out:NAME". `limit`: the largest
    relative error of an output. `on`: the processor of its segments.
    """

    name: Id
    precision: str
    on: Literal["gpu", "dla"]
    limit: float


class NetworkCase(_Value, frozen=True, kw_only=True):
    """A network on one placement: engines/NAME.engine."""

    name: Id
    network: str
    variant: Variant
    precision: str
    model_sha256: str


class RuleCase(_Value, frozen=True, kw_only=True):
    """A node at the limit of a DLA rule or one beyond: cases/NAME.onnx, in float32.

    `half`: whether there is cases/NAME.half.onnx, in float16, for releases with typed networks.
    `expected`: what the rule table says of the node as a whole.
    """

    name: Id
    rule: str
    side: Side
    op: str
    precision: Literal["fp16", "int8"]
    certainty: str
    expected: bool
    half: bool


class TacticCase(_Value, frozen=True, kw_only=True):
    """A part of the tactics of engines/ENGINE.engine: those of each `parts`-th operation."""

    name: Id
    engine: Id
    part: Annotated[int, msgspec.Meta(ge=0, lt=4096)]
    parts: Annotated[int, msgspec.Meta(ge=1, le=4096)]


class Kit(_Value, frozen=True, kw_only=True):
    """What there is to prove on a board of one profile."""

    format: int = MAJOR
    tandem: str
    profile: str
    sha256: str
    references: tuple[Reference, ...] = ()
    rules: tuple[RuleCase, ...] = ()
    networks: tuple[NetworkCase, ...] = ()
    tactics: tuple[TacticCase, ...] = ()
    demo: bool = False

    def only(self, items: Collection[str]) -> "Kit":
        """Return the kit with these items alone. Raises KitError: it lacks one."""
        groups = ("references", "rules", "networks", "tactics")
        chosen = {
            group: tuple(case for case in getattr(self, group) if case.name in items)
            for group in groups
        }
        names = {case.name for cases in chosen.values() for case in cases}
        if missing := sorted(set(items) - names):
            raise KitError(f"the kit has no item {missing[0]!r}; give a job of this kit")
        return msgspec.structs.replace(self, **chosen)


class _Version(msgspec.Struct):
    format: int


def load_kit(folder: Path) -> Kit:
    """Read the list of a kit and check the digest of its data. Raises KitError."""
    path = folder / LIST
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=_Version).format
        kit = msgspec.json.decode(data, type=Kit) if version == MAJOR else None
        digest = hashlib.sha256((folder / DATA).read_bytes()).hexdigest()
    except OSError as error:
        raise KitError(
            f"{error.filename} cannot be read: {error.strerror}; copy the whole kit, or make one "
            "with `python -m scripts.make_board_kit`"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KitError(f"{path} is damaged: {error}; copy the kit again") from error
    if kit is None:
        raise KitError(
            f"{path} has format {version}, this Tandem reads {MAJOR}; make the kit with the Tandem "
            "that runs it"
        )
    if digest != kit.sha256:
        raise KitError(f"{folder / DATA} is not the one that {LIST} lists; copy the kit again")
    return kit


def open_packed(path: Path, folder: Path) -> Kit:
    """Unpack a kit that is one file into a folder; return its list. Raises KitError."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in (LIST, DATA):
                _unpack(archive, name, folder / name)
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise KitError(f"{path.name} cannot be read as a kit: {error}") from error
    return load_kit(folder)


def pack(folder: Path, path: Path) -> None:
    """Write a kit as one file; the same kit gives the same bytes. Raises OSError."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in (LIST, DATA):
            archive.writestr(zipfile.ZipInfo(name), (folder / name).read_bytes())


def unpack(folder: Path, names: Sequence[str], target: Path) -> None:
    """Unpack entries of a kit below `target`; those that are there stay. Raises KitError."""
    try:
        with zipfile.ZipFile(folder / DATA) as archive:
            for name in names:
                path = target / name
                if not path.exists():
                    _unpack(archive, name, path)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise KitError(f"{folder / DATA} cannot be unpacked: {error}") from error


def entries(folder: Path, start: str) -> tuple[str, ...]:
    """Return the names of a kit's entries that begin so. Raises KitError."""
    try:
        with zipfile.ZipFile(folder / DATA) as archive:
            return tuple(name for name in archive.namelist() if name.startswith(start))
    except (OSError, zipfile.BadZipFile) as error:
        raise KitError(f"{folder / DATA} cannot be read: {error}") from error


def _unpack(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise KitError(f"the kit holds {name!r}, which leads out of its folder")
    if archive.getinfo(name).file_size > MAX_UNPACKED_BYTES:
        raise KitError(f"{name} of the kit is larger than {MAX_UNPACKED_BYTES} bytes")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    with archive.open(name) as source, partial.open("wb") as file:
        while block := source.read(2**20):
            file.write(block)
    partial.replace(path)
