"""The members of a bundle: which there may be, in which order, and how large.

    one model       model.engine, pipeline.toml, labels.txt, golden.npz
    several models  NAME.engine, NAME.labels.txt, NAME.golden.npz of each, pipeline.toml
    a service       pipeline.toml, payload/PATH of each file of another runtime, by name

Last comes the bill of materials, sbom.cdx.json, which may be missing. A file that two models share
is there once, under the name of the first of them.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from device.errors import BundleError
from device.files import open_to_read
from device.protocol.documents import MAX_BLOB_BYTES
from device.update.agent_payload import WHEEL_SUFFIX

INFO = "bundle.json"
ENGINE = "model.engine"
PIPELINE = "pipeline.toml"
LABELS = "labels.txt"
GOLDEN = "golden.npz"
BOM = "sbom.cdx.json"
ENGINE_SUFFIX = ".engine"
PAYLOAD = "payload"  # folder of a service's files
MAX_MODELS = 16
MAX_PAYLOAD_FILES = 200  # each may be open at once
MAX_NAME_BYTES = 100  # of a member, by the form of the file
MAX_BUNDLE_BYTES = MAX_BLOB_BYTES  # what a device fetches

# The most bytes of a member: of one of these names, or with one of these ends.
LIMITS: Mapping[str, int] = {
    PIPELINE: 1024**2,
    ENGINE_SUFFIX: MAX_BUNDLE_BYTES - 4 * 1024**2,
    LABELS: 1024**2,
    GOLDEN: 64 * 1024**2,
    BOM: 1024**2,
    WHEEL_SUFFIX: 1024**3,
}
# Key of a model's row -> how the name of its member ends.
SUFFIXES: Mapping[str, str] = {
    "engine": ENGINE_SUFFIX,
    "labels": f".{LABELS}",
    "golden": f".{GOLDEN}",
}
REQUIRED = (ENGINE, PIPELINE, LABELS)  # of one model

_READ_BYTES = 1024 * 1024
# No name is hidden, empty, "." or "..": a member never leaves the folder.
_PAYLOAD_NAME = re.compile(rf"{PAYLOAD}(/[A-Za-z0-9_+=@,-][A-Za-z0-9._+=@,-]*)+\Z")

# Printable: names end up in logs and on terminals.
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Text = Annotated[str, Meta(max_length=200, pattern=r"^[^\x00-\x1f\x7f]+\Z")]
ModelName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]


class BundleFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One member of a bundle with its size and hash."""

    name: str
    bytes: Annotated[int, Meta(ge=0)]
    sha256: Sha256


class BundleModel(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One of several models: its name in pipeline.toml, and the members that are its files."""

    name: ModelName
    engine: str
    labels: str
    golden: str = ""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The files of one model that go into a bundle of several."""

    name: str
    engine: Path
    labels: Path
    golden: Path | None = None


def models_of(sources: Sequence[ModelSource]) -> tuple[tuple[BundleModel, ...], dict[str, Path]]:
    """Return the rows of models, and the file of each member, in order; equal files are one member.

    Raises OSError, and BundleError: a file is larger than its member may be.
    """
    members: dict[str, Path] = {}
    by_content: dict[tuple[str, str], str] = {}  # key and hash -> member
    rows = []
    for source in sources:
        names: dict[str, str] = {}
        for key, suffix in SUFFIXES.items():
            path: Path | None = getattr(source, key)
            if path is None:
                continue
            own_name = f"{source.name}{suffix}"
            content = (key, describe_file(own_name, path).sha256)
            names[key] = by_content.setdefault(content, own_name)
            members.setdefault(names[key], path)
        rows.append(BundleModel(name=source.name, **names))
    return tuple(rows), members


def expected_members(
    models: Sequence[BundleModel], where: Path, *, golden: bool
) -> tuple[str, ...]:
    """Return the members of a bundle in order. `models`: none for a bundle of one model.

    Raises BundleError: a model names a member that is neither its own nor one of a model before it.
    """
    if not models:
        return (*REQUIRED, GOLDEN) if golden else REQUIRED
    if not 2 <= len(models) <= MAX_MODELS:
        raise BundleError(f"{where} holds {len(models)} models, allowed are 2 to {MAX_MODELS}")
    if len({model.name for model in models}) < len(models):
        raise BundleError(f"{where} names a model twice")
    names: dict[str, None] = {}
    for model in models:
        for key, suffix in SUFFIXES.items():
            member: str = getattr(model, key)
            if key == "golden" and not golden:
                fits = not member
            else:
                is_shared = member in names and member.endswith(suffix)
                fits = is_shared or member == f"{model.name}{suffix}"
            if not fits:
                raise BundleError(f"{where} names {member!r} as {key} of the model {model.name!r}")
            if member:
                names[member] = None
    return (*names, PIPELINE)


def check_payload(names: Sequence[str], where: Path) -> None:
    """Raise BundleError unless members are the files of a payload, in order."""
    if not 1 <= len(names) <= MAX_PAYLOAD_FILES:
        raise BundleError(
            f"{where} has {len(names)} files in its payload, allowed are 1 to {MAX_PAYLOAD_FILES}"
        )
    for name in names:
        if not _PAYLOAD_NAME.match(name) or len(name) > MAX_NAME_BYTES:
            raise BundleError(
                f"{where} has the payload file {name!r}: its path may have {MAX_NAME_BYTES}"
                " characters at most, of letters, digits and ._+=@,- and no part of it may begin"
                " with a dot"
            )
    if list(names) != sorted(set(names)):
        raise BundleError(f"{where} does not name the files of its payload in order, each once")


def member_limit(member: str) -> int:
    """Return the most bytes that a member may have."""
    if member.startswith(f"{PAYLOAD}/"):
        return LIMITS[ENGINE_SUFFIX]
    return next(limit for end, limit in LIMITS.items() if member.endswith(end))


def describe_file(
    member: str, path: Path, *, follow: bool = True, between: Callable[[], None] = lambda: None
) -> BundleFile:
    """Return size and hash of a file that becomes, or is, a member. `follow`: or a link to one.

    `between` is called after each piece that was read.

    Raises OSError, and BundleError: it is larger than the member may be.
    """
    digest = hashlib.sha256()
    size, limit = 0, member_limit(member)
    too_large = f"{path} is larger than the {limit} bytes that {member} may have"
    with open_to_read(path, follow=follow) as file:
        if os.fstat(file.fileno()).st_size > limit:  # it may be sparse, and of any size
            raise BundleError(too_large)
        while part := file.read(_READ_BYTES):
            digest.update(part)
            size += len(part)
            if size > limit:
                raise BundleError(too_large)
            between()
    return BundleFile(name=member, bytes=size, sha256=digest.hexdigest())
