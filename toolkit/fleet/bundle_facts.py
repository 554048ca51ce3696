"""What a bundle says of itself, from the options of `tandem bundle`, and for gates."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from device.choices import list_choices
from device.errors import BundleError
from device.update.admission import REQUIREMENTS
from device.update.bundle import BundleFacts, BundleInfo
from toolkit.fleet.rollout.gates import LICENCE

KINDS = ("model", "data", "table")
_READ_BYTES = 1024 * 1024


def bundle_facts(
    *,
    metrics: Sequence[str] = (),
    requires: Sequence[str] = (),
    made_of: Sequence[str] = (),
    licence: str = "",
    min_version_floor: str = "",
) -> BundleFacts:
    """Return the facts. `metrics`, `requires`, `made_of`: NAME=VALUE. Raises BundleError."""
    wants = dict(_pair(text, "--requires") for text in requires)
    for name in wants:
        if name not in REQUIREMENTS:
            raise BundleError(
                f"`tandem bundle --requires {name}=...`: a board has no {name}, use one of "
                f"{list_choices(name, REQUIREMENTS)}"
            )
    hashes = {}
    for text in made_of:
        kind, path = _pair(text, "--made-of")
        if kind not in KINDS:
            raise BundleError(
                f"`tandem bundle --made-of {text}`: {kind!r} is none of {', '.join(KINDS)}"
            )
        hashes[kind] = hash_of(Path(path))
    return BundleFacts(
        hashes=hashes,
        metrics=dict(_metric(text) for text in metrics),
        licence=licence,
        requires=wants,
        min_version_floor=min_version_floor,
    )


def texts_of(info: BundleInfo) -> dict[str, str]:
    """Return what a bundle says of itself in words, for gates: its licence and hashes."""
    return {**info.hashes, **({LICENCE: info.licence} if info.licence else {})}


def golden_source(text: str) -> int | Path:
    """Return a number of random inputs, or the folder of pictures that a text names."""
    if text.isdecimal():
        return int(text)
    folder = Path(text)
    if not folder.is_dir():
        raise BundleError(
            f"`tandem bundle --golden {text}`: this is neither a number nor a folder of pictures"
        )
    return folder


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file, or of a folder's files with their names, in order."""
    digest = hashlib.sha256()
    try:
        if path.is_dir():
            for file in sorted(file for file in path.rglob("*") if file.is_file()):
                name = file.relative_to(path).as_posix()
                digest.update(f"{name}\0{hash_of(file)}\n".encode())
        else:
            with path.open("rb") as opened:
                while part := opened.read(_READ_BYTES):
                    digest.update(part)
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _metric(text: str) -> tuple[str, float]:
    name, value = _pair(text, "--metric")
    try:
        return name, float(value)
    except ValueError as error:
        raise BundleError(
            f"`tandem bundle --metric {text}`: {value!r} is no number, write for example map50=0.41"
        ) from error


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise BundleError(f"`tandem bundle {option} {text}`: write NAME=VALUE")
    return name, value
