"""Checks of a bundle: every hash, the engines' own checks, and the fleet's signature."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from device.engine.checksums import NO_CHECKSUMS
from device.engine.file import open_engine
from device.errors import BundleError, TandemError
from device.update.bundle import BOM, PIPELINE, BundleInfo, extract_bundle, read_folder_info
from pipelines.config import load_labels, load_pipeline
from toolkit.fleet.bundles.signature import verify_signature
from toolkit.fleet.bundles.unpacked import engine_members, label_members

HASHES, SIGNATURE = "hashes", "signature"
FILE = "file"  # type of a component that is one


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A check; `detail` says what was checked, or what is wrong."""

    name: str
    passed: bool
    detail: str


def verify_contents(path: Path, folder: Path) -> tuple[Check, ...]:
    """Return the checks of a bundle's members. It is unpacked into `folder`, which is made.

    Where a hash does not fit, nothing further is looked at.
    """
    hashes = _check(HASHES, partial(_hashes, path, folder))
    if not hashes.passed:
        return (hashes,)
    info = read_folder_info(folder)
    if info.agent is not None:
        return (hashes,)
    engines = (_check(name, partial(_engine, folder / name, info)) for name in engine_members(info))
    return (
        hashes,
        *engines,
        _check(PIPELINE, partial(_pipeline, folder / PIPELINE)),
        *(_check(name, partial(_labels, folder / name)) for name in label_members(info)),
        *(_check(BOM, partial(_bom, folder / BOM, info)) for entry in info.files[-1:]
          if entry.name == BOM),
    )  # fmt: skip


def check_signature(path: Path, trust: Path, repository: str) -> Check:
    """Return whether signatures lead from a trusted root to the bundle; see `verify_signature`."""
    return _check(SIGNATURE, partial(_signature, path, trust, repository))


def _check(name: str, run: Callable[[], str]) -> Check:
    try:
        return Check(name=name, passed=True, detail=run())
    except TandemError as error:
        return Check(name=name, passed=False, detail=str(error))


def _hashes(path: Path, folder: Path) -> str:
    info = extract_bundle(path, folder)
    return f"{len(info.files)} files, {sum(entry.bytes for entry in info.files)} bytes"


def _engine(path: Path, info: BundleInfo) -> str:
    with open_engine(path) as engine:
        profile = engine.manifest.profile
        if profile != info.profile:
            raise BundleError(
                f"{path.name} is built for {profile}, the bundle says {info.profile}: pack it again"
            )
        engine.verify()
        checked = f"{len(engine.entries)} sections checked" if engine.checksums else NO_CHECKSUMS
        return f"{len(engine.manifest.segments)} segments for {profile}; {checked}"


def _pipeline(path: Path) -> str:
    return f"pipeline {load_pipeline(path).name}"


def _labels(path: Path) -> str:
    return f"{len(load_labels(path))} labels"


class _Hash(msgspec.Struct):
    content: str


class _Component(msgspec.Struct):
    name: str
    type: str
    hashes: tuple[_Hash, ...] = ()


class _Bom(msgspec.Struct):
    components: tuple[_Component, ...] = ()


def _bom(path: Path, info: BundleInfo) -> str:
    """Compare the files of the bill of materials with the bundle's own."""
    try:
        components = msgspec.json.decode(path.read_bytes(), type=_Bom).components
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{BOM} cannot be read: {error}") from error
    listed = {
        row.name: tuple(digest.content for digest in row.hashes)
        for row in components
        if row.type == FILE
    }
    contained = {entry.name: (entry.sha256,) for entry in info.files if entry.name != BOM}
    if wrong := sorted(
        name for name in {*listed, *contained} if listed.get(name) != contained.get(name)
    ):
        raise BundleError(
            f"{BOM} does not list {', '.join(wrong)} as the bundle holds it: it is that of another "
            "bundle, pack it again"
        )
    return f"{len(components)} components"


def _signature(path: Path, trust: Path, repository: str) -> str:
    signature = verify_signature(path, trust, repository)
    return (
        f"{signature.target} in version {signature.version} of the targets, which hold until "
        f"{signature.expires}"
    )
