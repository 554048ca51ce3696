"""What a bundle says of itself, from the options of `tandem bundle`, and for gates."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from device.choices import list_choices
from device.engine.manifest import Manifest, Measurement
from device.errors import BundleError
from device.files import sha256_of
from device.update.admission import REQUIREMENTS
from device.update.bundle import BundleFacts, BundleInfo
from toolkit.fleet.rollout.gates import LICENCE, BundleStatements

PREDICTED_LATENCY = "predicted_latency_ms"
STATED = "stated with `tandem bundle --metric`"
MAX_TEXT = 200  # characters of a text in bundle.json
KINDS = ("model", "data", "table")
_OWN_LICENCE = re.compile(r"LicenseRef-[A-Za-z0-9.-]+\Z")


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
    figures = dict(_metric(text) for text in metrics)
    if licence:
        check_licence(licence)
    return BundleFacts(
        hashes=hashes,
        metrics=figures,
        measured_by=dict.fromkeys(figures, STATED),
        licence=licence,
        requires=wants,
        min_version_floor=min_version_floor,
    )


def check_licence(text: str) -> None:
    """Raise BundleError unless a text is an SPDX licence id or expression."""
    from cyclonedx.spdx import is_expression, is_supported_id

    if not (is_supported_id(text) or _OWN_LICENCE.match(text) or is_expression(text)):
        raise BundleError(
            f"`tandem bundle --license {text}`: this is no SPDX licence; write an id or expression "
            "of https://spdx.org/licenses, such as Apache-2.0 or LicenseRef-Ours"
        )


def with_provenance(facts: BundleFacts, manifests: Mapping[str, Manifest]) -> BundleFacts:
    """Return facts with what the engines say of their making; what is stated already stays.

    `manifests`: by model. Of several models each figure and hash begins with its model's name.
    """
    hashes: dict[str, str] = {}
    metrics: dict[str, float] = {}
    how: dict[str, str] = {}
    for model, manifest in manifests.items():
        prefix = f"{model}." if len(manifests) > 1 else ""
        for name, digest in _made_of(manifest).items():
            hashes[f"{prefix}{name}"] = digest
        for row in _figures(manifest):
            metrics[f"{prefix}{row.name}"] = row.value
            how[f"{prefix}{row.name}"] = shortened_text(row.how)
    licences = [manifest.provenance.licence or "" for manifest in manifests.values()]
    return msgspec.structs.replace(
        facts,
        hashes={**hashes, **facts.hashes},
        metrics={**metrics, **facts.metrics},
        measured_by={**how, **facts.measured_by},
        licence=facts.licence or _all_of(licences),
    )


def _all_of(licences: Sequence[str]) -> str:
    """Return the licence of what holds these parts, "" if that of one is not known.

    AND binds more tightly than OR.
    """
    several = list(dict.fromkeys(licences))
    if "" in several:
        return ""
    if len(several) > 1:
        several = [f"({text})" if " or " in text.lower() else text for text in several]
    return " AND ".join(several)


def shortened_text(text: str) -> str:
    """Return a text that bundle.json takes: one printable line of at most MAX_TEXT characters."""
    line = "".join(mark if mark.isprintable() else " " for mark in text)
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 3]}..."


def _made_of(manifest: Manifest) -> dict[str, str]:
    source, calibration = manifest.provenance, manifest.provenance.calibration
    hashes = {"model": source.model_sha256}
    if calibration is not None and not manifest.uncalibrated:
        hashes["data"] = calibration.data_sha256
        if calibration.table_sha256:
            hashes["table"] = calibration.table_sha256
    return hashes


def _figures(manifest: Manifest) -> Iterator[Measurement]:
    """Yield what the build has measured, and what its cost model predicts."""
    yield from manifest.provenance.measured or ()
    predicted_us = sum(row.predicted_us for row in manifest.plan)
    if predicted_us > 0.0:
        how = f"predicted, not measured: {len(manifest.plan)} nodes one after the other, no copies"
        value = float(f"{predicted_us / 1e3:.6g}")
        yield Measurement(name=PREDICTED_LATENCY, value=value, how=how)


def statements_of(info: BundleInfo) -> BundleStatements:
    """Return what a bundle says of itself, for gates."""
    texts = {**info.hashes, **({LICENCE: info.licence} if info.licence else {})}
    return BundleStatements(info.metrics, texts, tuple(model.name for model in info.models))


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
    """Return the SHA-256 of a file, or of a folder's files with their names, in order.

    Raises BundleError: it cannot be read.
    """
    try:
        if not path.is_dir():
            return sha256_of(path)
        digest = hashlib.sha256()
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            digest.update(f"{file.relative_to(path).as_posix()}\0{sha256_of(file)}\n".encode())
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _metric(text: str) -> tuple[str, float]:
    name, value = _pair(text, "--metric")
    try:
        number = float(value)
    except ValueError as error:
        raise _no_number(text, value) from error
    if not math.isfinite(number):
        raise _no_number(text, value)
    return name, number


def _no_number(text: str, value: str) -> BundleError:
    return BundleError(
        f"`tandem bundle --metric {text}`: {value!r} is no number, write for example map50=0.41"
    )


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise BundleError(f"`tandem bundle {option} {text}`: write NAME=VALUE")
    return name, value
