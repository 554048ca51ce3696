"""What a bundle holds and says of itself: the view that `tandem bundle inspect` shows."""

import msgspec
from msgspec import UNSET

from device.engine.arithmetic import arithmetic_of
from device.engine.file import Engine
from device.engine.manifest import CalibrationInfo
from device.engine.purposes import bytes_by_purpose
from device.update.bundle import PIPELINE, BundleFile, Golden
from pipelines.config import PipelineConfig, load_labels, load_pipeline
from pipelines.sources.uri import redact
from toolkit.fleet.bundles.facts import hash_of
from toolkit.fleet.bundles.signature import Signature, read_signature, repository_of
from toolkit.fleet.bundles.unpacked import Unpacked, label_members


class TensorView(msgspec.Struct, frozen=True, kw_only=True):
    """An input or output of an engine; unknown dimensions are "?"."""

    name: str
    dtype: str
    shape: tuple[str, ...]


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the bundle.

    `processors`: segments on each; `sizes`: bytes by what they are for; `data_sha256` and `method`
    of the calibration are empty without one. `uncalibrated`: its INT8 ranges were made up.
    """

    member: str
    bytes: int
    model: str
    model_sha256: str
    precision: str
    calibration: CalibrationInfo | None
    uncalibrated: bool
    inputs: tuple[TensorView, ...]
    outputs: tuple[TensorView, ...]
    processors: dict[str, int]
    sizes: dict[str, int]
    versions: dict[str, str]


class PipelineView(msgspec.Struct, frozen=True, kw_only=True):
    """The pipeline: where frames come from, how outputs are read, and where results go; of a
    service the command line that it runs."""

    name: str
    sources: tuple[str, ...]
    decoders: tuple[str, ...]
    sinks: tuple[str, ...]
    command: tuple[str, ...] = ()


class BundleView(msgspec.Struct, frozen=True, kw_only=True):
    """All of it.

    `labels`: class names by member. `signature` is read where the bundle lies in a repository, and
    not verified.
    """

    path: str
    sha256: str
    bytes: int
    name: str
    version: str
    profile: str
    jetpack: str
    tensorrt: str
    members: tuple[BundleFile, ...]
    engines: tuple[EngineView, ...]
    pipeline: PipelineView
    labels: dict[str, tuple[str, ...]]
    golden: Golden | None
    hashes: dict[str, str]
    metrics: dict[str, float]
    measured_by: dict[str, str]
    licence: str
    requires: dict[str, str]
    min_version_floor: str
    signature: Signature | None


def describe(bundle: Unpacked) -> BundleView:
    """Return the view of a bundle. Raises TandemError: a member cannot be read."""
    info = bundle.info
    versions: dict[str, str] = {}
    for engine in bundle.engines.values():
        versions |= engine.manifest.provenance.versions
    repository = repository_of(bundle.path)
    return BundleView(
        path=str(bundle.path),
        sha256=hash_of(bundle.path),
        bytes=bundle.path.stat().st_size,
        name=info.name,
        version=info.version,
        profile=info.profile,
        jetpack=versions.get("jetpack", ""),
        tensorrt=versions.get("tensorrt", ""),
        members=info.files,
        engines=tuple(_engine(name, engine) for name, engine in bundle.engines.items()),
        pipeline=_pipeline(load_pipeline(bundle.folder / PIPELINE)),
        labels={name: load_labels(bundle.folder / name) for name in label_members(info)},
        golden=info.golden,
        hashes=info.hashes,
        metrics=info.metrics,
        measured_by=info.measured_by,
        licence=info.licence,
        requires=info.requires,
        min_version_floor=info.min_version_floor,
        signature=None if repository is None else read_signature(bundle.path, repository),
    )


def _engine(name: str, engine: Engine) -> EngineView:
    manifest = engine.manifest
    processors: dict[str, int] = {}
    for segment in manifest.segments:
        processors[segment.processor] = processors.get(segment.processor, 0) + 1
    tensors = {
        tensor.name: TensorView(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tuple("?" if dim is None else str(dim) for dim in tensor.shape),
        )
        for tensor in manifest.tensors
    }
    source = manifest.provenance
    return EngineView(
        member=name,
        bytes=engine.path.stat().st_size,
        model=source.model,
        model_sha256=source.model_sha256,
        precision=arithmetic_of(manifest),
        calibration=source.calibration,
        uncalibrated=manifest.uncalibrated,
        inputs=tuple(tensors[tensor] for tensor in manifest.inputs),
        outputs=tuple(tensors[tensor] for tensor in manifest.outputs),
        processors=processors,
        sizes=bytes_by_purpose(manifest, engine.entries),
        versions=source.versions,
    )


def _pipeline(config: PipelineConfig) -> PipelineView:
    return PipelineView(
        name=config.name,
        sources=tuple(redact(source.uri) for source in config.cameras),
        decoders=tuple(
            _kind(model.decode) for model in config.networks if model.decode is not UNSET
        ),
        sinks=tuple(_kind(sink) for sink in config.sinks),
        command=() if config.service is UNSET else config.service.command,
    )


def _kind(value: msgspec.Struct) -> str:
    return str(value.__struct_config__.tag)
