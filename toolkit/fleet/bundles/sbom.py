"""The bill of materials of a bundle, as CycloneDX 1.6 in JSON, by CycloneDX's own library.

Models, data, tables, engines and the other members with their hashes; what the engines were made
with; what the board needs. The same bundle gives the same bytes: the serial number is derived from
the content, and there is no time in it.
"""

import hashlib
import uuid
from collections.abc import Iterator, Mapping
from importlib.metadata import version

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from device.engine.arithmetic import arithmetic_of
from device.engine.manifest import Manifest
from device.update.admission import REQUIREMENTS
from device.update.bundle import BOM, BundleInfo

NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://cyclonedx.org/tandem/bundle")
PACKAGES: Mapping[str, str] = {  # made the engine, under these licences
    "onnx": "Apache-2.0",
    "onnx-ir": "Apache-2.0",
    "onnxscript": "MIT",
    "tandem-edge": "Apache-2.0",
    "triton": "MIT",
}
# What the board brings -> its title, and what it is.
PLATFORMS: Mapping[str, tuple[str, ComponentType]] = {
    "cuda": ("CUDA", ComponentType.FRAMEWORK),
    "jetpack": ("JetPack", ComponentType.OPERATING_SYSTEM),
    "tensorrt": ("TensorRT", ComponentType.FRAMEWORK),
}
# Kind of an implementation in an engine -> what runs it on the board.
RUNTIMES: Mapping[str, str] = {
    "portable": "onnxruntime",
    "cuda": "NVIDIA driver (libcuda)",
    "tensorrt": "TensorRT",
    "tensorrt_gpu": "TensorRT",
}


def bill_of_materials(info: BundleInfo, manifests: Mapping[str, Manifest]) -> bytes:
    """Return the document. `info`: with or without the bill itself; `manifests`: of its engines, by
    their members."""
    bom = Bom(serial_number=uuid.UUID(int=0))
    # The library writes the time of its start unless there is none.
    bom.metadata.timestamp = None  # type: ignore[assignment]
    root = _bundle(info)
    bom.metadata.component = root
    bom.metadata.tools.components.add(
        Component(
            name="tandem-edge", version=version("tandem-edge"), type=ComponentType.APPLICATION,
            bom_ref="tool", licenses=_licences(PACKAGES["tandem-edge"]),
        )
    )  # fmt: skip
    members = {entry.name: _member(entry.name, entry.sha256) for entry in info.files
               if entry.name != BOM}  # fmt: skip
    needs: dict[Component, list[Component]] = {root: list(members.values())}
    for name, manifest in manifests.items():
        sources = [*_sources(name, manifest), *_packages(manifest), *_platforms(manifest)]
        needs[members[name]] = sources
        members[name].properties.update(_engine_properties(manifest))
    for whole, parts in needs.items():
        bom.components.update(parts)
        below = [Dependency(part.bom_ref) for part in parts]
        bom.dependencies.add(Dependency(whole.bom_ref, below))
    content = JsonV1Dot6(bom).output_as_string(indent=1)
    bom.serial_number = uuid.uuid5(NAMESPACE, hashlib.sha256(content.encode()).hexdigest())
    return (JsonV1Dot6(bom).output_as_string(indent=1) + "\n").encode()


def _bundle(info: BundleInfo) -> Component:
    """Return the release itself, with what it says of itself."""
    needed = {
        f"requires:{name}": least for name, least in info.requires.items() if name in REQUIREMENTS
    }
    measured = {f"metric:{name}": repr(value) for name, value in info.metrics.items()}
    how = {f"measured-by:{name}": text for name, text in info.measured_by.items()}
    hashes = {f"sha256:{name}": digest for name, digest in info.hashes.items()}
    stated = {"profile": info.profile, "version-floor": info.min_version_floor}
    return Component(
        name=info.name,
        version=info.version,
        type=ComponentType.APPLICATION,
        bom_ref="bundle",
        licenses=_licences(info.licence),
        properties=_properties({**stated, **needed, **measured, **how, **hashes}),
    )


def _member(name: str, sha256: str) -> Component:
    return Component(
        name=name, type=ComponentType.FILE, bom_ref=f"file:{name}", hashes=[_sha256(sha256)]
    )


def _sources(engine: str, manifest: Manifest) -> Iterator[Component]:
    """Yield what an engine was made of: model, data, table."""
    source, calibration = manifest.provenance, manifest.provenance.calibration
    yield Component(
        name=source.model,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=f"model of {engine}",
        hashes=[_sha256(source.model_sha256)],
        licenses=_licences(source.licence or ""),
    )
    if calibration is None or manifest.uncalibrated:
        return
    yield Component(
        name="calibration data",
        type=ComponentType.DATA,
        bom_ref=f"data of {engine}",
        hashes=[_sha256(calibration.data_sha256)],
        properties=_properties({"samples": str(calibration.samples)}),
    )
    if calibration.table_sha256:
        yield Component(
            name="calibration table",
            type=ComponentType.DATA,
            bom_ref=f"table of {engine}",
            hashes=[_sha256(calibration.table_sha256)],
            properties=_properties({"method": calibration.method}),
        )


def _packages(manifest: Manifest) -> Iterator[Component]:
    for name, number in manifest.provenance.versions.items():
        if name in PACKAGES:
            yield _package(name, number)


def _package(name: str, number: str) -> Component:
    return Component(
        name=name,
        version=number,
        type=ComponentType.LIBRARY,
        bom_ref=f"pkg:pypi/{name}@{number}",
        purl=PackageURL("pypi", None, name, number),
        licenses=_licences(PACKAGES[name]),
        scope=ComponentScope.EXCLUDED,  # it made the engine, and is not in it
    )


def _platforms(manifest: Manifest) -> Iterator[Component]:
    """Yield what the board must bring: what the engine was made for, and what runs it."""
    versions = manifest.provenance.versions
    for key, (title, kind) in PLATFORMS.items():
        if key in versions:
            yield Component(
                name=title,
                version=versions[key],
                type=kind,
                bom_ref=f"board:{title}@{versions[key]}",
                scope=ComponentScope.REQUIRED,
            )
    kinds = {
        str(implementation.__struct_config__.tag)
        for segment in manifest.segments
        for implementation in segment.implementations
    }
    for runtime in sorted({RUNTIMES[kind] for kind in kinds if kind in RUNTIMES}):
        if runtime != "TensorRT" or "tensorrt" not in versions:
            yield Component(
                name=runtime,
                type=ComponentType.FRAMEWORK,
                bom_ref=f"board:{runtime}",
                scope=ComponentScope.OPTIONAL,  # the session takes the best one that is there
            )


def _engine_properties(manifest: Manifest) -> list[Property]:
    passes = ", ".join(manifest.provenance.passes)
    precision = arithmetic_of(manifest)
    return _properties({"profile": manifest.profile, "precision": precision, "passes": passes})


def _properties(values: Mapping[str, str]) -> list[Property]:
    return [Property(name=f"tandem:{name}", value=text) for name, text in values.items() if text]


def _licences(text: str) -> list[License]:
    """Return a licence by its SPDX id or expression, or as the text that it is."""
    return [LicenseFactory().make_from_string(text)] if text else []


def _sha256(digest: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=digest)
