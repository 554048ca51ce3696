"""Checks of a bundle: every hash, the engines' own checks, and the fleet's signature."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from device.engine.file import open_engine
from device.errors import BundleError, TandemError
from device.update.bundle import LABELS, PIPELINE, BundleInfo, extract_bundle, read_folder_info
from pipelines.config import load_labels, load_pipeline
from toolkit.fleet.bundles.signature import verify_signature
from toolkit.fleet.bundles.unpacked import engine_members

HASHES, SIGNATURE = "hashes", "signature"


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
    engines = (_check(name, partial(_engine, folder / name, info)) for name in engine_members(info))
    return (
        hashes,
        *engines,
        _check(PIPELINE, partial(_pipeline, folder / PIPELINE)),
        _check(LABELS, partial(_labels, folder / LABELS)),
    )


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
        return f"{len(engine.manifest.segments)} segments for {profile}"


def _pipeline(path: Path) -> str:
    return f"pipeline {load_pipeline(path).name}"


def _labels(path: Path) -> str:
    return f"{len(load_labels(path))} labels"


def _signature(path: Path, trust: Path, repository: str) -> str:
    signature = verify_signature(path, trust, repository)
    return (
        f"{signature.target} in version {signature.version} of the targets, which hold until "
        f"{signature.expires}"
    )
