"""Pack a bundle: engines, pipeline and labels, once they are known to fit together."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device.engine.file import open_engine, write_engine
from device.engine.manifest import Manifest
from device.engine.purposes import entries_read, without_portable
from device.errors import BundleError, PipelineError
from device.update.bundle import (
    BomWriter,
    BundleFacts,
    BundleInfo,
    Golden,
    GoldenLimit,
    ModelSource,
    write_bundle,
    write_bundle_of_models,
)
from device.update.members import MAX_MODELS
from pipelines.config import PipelineConfig, load_labels, load_pipeline
from pipelines.open_models import ModelFiles
from pipelines.sinks.files import check_release
from pipelines.stages.fit import EngineFacts, check_engines
from toolkit.fleet.bundles.facts import with_provenance
from toolkit.fleet.bundles.golden import TOLERANCE, golden_of
from toolkit.fleet.bundles.sbom import bill_of_materials


@dataclass(frozen=True, slots=True)
class Packed:
    """A bundle that was written.

    `uncalibrated`: the models whose INT8 ranges were never measured. `warnings`: images are fitted
    into an input otherwise than in the calibration. `left_out_bytes`: how much smaller than their
    files the engines are in the bundle.
    """

    info: BundleInfo
    uncalibrated: tuple[str, ...]
    warnings: tuple[str, ...]
    left_out_bytes: int


def pack_bundle(
    output: Path,
    *,
    pipeline: Path,
    files: Mapping[str, ModelFiles],
    name: str,
    version: str,
    portable: bool = False,
    golden: int | Path | None = None,
    facts: BundleFacts | None = None,
) -> Packed:
    """Check the files against each other, then write the bundle.

    `files`: of each model of the pipeline, the first one first. `golden`: so many random inputs, or
    the pictures of a folder, go into the bundle with the outputs that each engine gives here;
    `facts`: what else the bundle says of itself. Without `portable`, GPU segments leave their
    portable implementation behind. The same inputs give the same bytes. Raises TandemError before
    anything is written: a file that cannot be used (EngineError, ConfigError), or engines that do
    not fit (BundleError).
    """
    config = load_pipeline(pipeline)
    if config.kind == "serve" and golden is not None:
        raise BundleError(
            f"{pipeline} is of kind 'serve', which has no decoder to compare golden outputs by:"
            " leave out --golden"
        )
    manifests = {}
    for model, members in files.items():
        with open_engine(members.engine) as opened:
            opened.verify()
            manifests[model] = opened.manifest
    profile = _profile(files, manifests)
    warnings = _check(config, pipeline, files, manifests)
    facts = facts or BundleFacts()
    with ExitStack() as stack:
        slim = _Slim(output, stack)
        sources = []
        limits: dict[str, GoldenLimit] = {}
        for network in config.networks:
            members = files[network.name]
            engine = members.engine if portable else slim.engine(members.engine)
            golden_file = None
            if golden is not None:
                golden_file, samples, limit = stack.enter_context(
                    golden_of(members.engine, network, golden, output)
                )
                limits[network.name if config.models[1:] else ""] = limit
                facts = msgspec.structs.replace(
                    facts, golden=Golden(samples=samples, tolerance=TOLERANCE, limits=limits)
                )
            sources.append(ModelSource(network.name, engine, members.labels, golden_file))
        facts = with_provenance(facts, manifests)
        packed = manifests
        if not portable:
            packed = {model: without_portable(whole) for model, whole in manifests.items()}
        release = _Release(name, version, profile, facts, bom_writer(output, stack, packed))
        info = _write(output, sources, pipeline, release)
    uncalibrated = tuple(model for model, row in manifests.items() if row.uncalibrated)
    return Packed(info, uncalibrated, warnings, slim.left_out_bytes)


def _profile(files: Mapping[str, ModelFiles], manifests: Mapping[str, Manifest]) -> str:
    """Return the profile of all engines. Raises BundleError: they are for several."""
    (first, manifest), *others = manifests.items()
    for model, another in others:
        if another.profile != manifest.profile:
            raise BundleError(
                f"{files[first].engine} is an engine for {manifest.profile}, and"
                f" {files[model].engine} one for {another.profile}: build all engines of a bundle"
                " for one profile"
            )
    return manifest.profile


def _check(
    config: PipelineConfig,
    pipeline: Path,
    files: Mapping[str, ModelFiles],
    manifests: Mapping[str, Manifest],
) -> tuple[str, ...]:
    """Return what is to be warned of. Raises BundleError: the files do not fit together."""
    engines = {}
    for model, manifest in manifests.items():
        tensors = {tensor.name: tensor for tensor in manifest.tensors}
        engines[model] = EngineFacts(
            [tensors[name] for name in manifest.inputs],
            [tensors[name] for name in manifest.outputs],
            load_labels(files[model].labels),
            manifest.dims,
            manifest.preprocessing,
        )
    if len(files) > MAX_MODELS:
        raise BundleError(
            f"{pipeline} has {len(files)} [[models]], a bundle holds {MAX_MODELS} at most: deploy"
            " fewer"
        )
    try:
        warnings = check_engines(config, engines) if config.kind == "frames" else []
        check_release(config)
    except PipelineError as error:
        (first, *others) = files.values()
        which = f"{pipeline} and its engines do not fit together"
        if not others:
            which = f"{first.engine} does not fit {pipeline} and {first.labels}"
        raise BundleError(f"{which}, so no bundle was written: {error}") from error
    return tuple(warnings)


@dataclass(frozen=True, slots=True)
class _Release:
    """What a bundle is called and says of itself; `bom` writes its bill of materials."""

    name: str
    version: str
    profile: str
    facts: BundleFacts
    bom: BomWriter


def _write(
    output: Path, sources: Sequence[ModelSource], pipeline: Path, release: _Release
) -> BundleInfo:
    names = {"name": release.name, "version": release.version, "profile": release.profile}
    if len(sources) > 1:
        return write_bundle_of_models(
            output, models=sources, pipeline=pipeline, facts=release.facts, bom=release.bom, **names
        )
    (only,) = sources
    return write_bundle(
        output, engine=only.engine, pipeline=pipeline, labels=only.labels, golden=only.golden,
        facts=release.facts, bom=release.bom, **names,
    )  # fmt: skip


def bom_writer(output: Path, stack: ExitStack, manifests: Mapping[str, Manifest]) -> BomWriter:
    """Return what writes the bill of materials into a file beside `output`, which `stack` deletes.

    `manifests`: of the engines as they are in the bundle, by model.
    """

    def write(info: BundleInfo) -> Path:
        path = output.with_name(f".{output.name}.{secrets.token_hex(8)}.json")
        stack.callback(path.unlink, missing_ok=True)
        only = next(iter(manifests), "")  # an only model has no name in the bundle
        by_member = {run.engine: manifests[run.name or only] for run in info.runs}
        path.write_bytes(bill_of_materials(info, by_member))
        return path

    return write


class _Slim:
    """Engines without the portable form of their GPU segments, each made once."""

    def __init__(self, output: Path, stack: ExitStack) -> None:
        self.left_out_bytes = 0
        self._output = output
        self._stack = stack
        self._smaller: dict[Path, Path] = {}

    def engine(self, path: Path) -> Path:
        """Return what goes into the bundle: the engine itself, or a smaller file."""
        if path not in self._smaller:
            slim = self._stack.enter_context(_for_board(path, self._output))
            self.left_out_bytes += path.stat().st_size - slim.stat().st_size
            self._smaller[path] = slim
        return self._smaller[path]


@contextmanager
def _for_board(engine: Path, output: Path) -> Iterator[Path]:
    """Yield the engine without the portable form of its GPU segments: a file beside `output`."""
    with open_engine(engine) as opened:
        manifest = without_portable(opened.manifest)
        if manifest == opened.manifest:
            yield engine
            return
        slim = output.with_name(f".{output.name}.{secrets.token_hex(8)}.engine")
        try:
            names = entries_read(manifest)
            write_engine(slim, manifest, {name: opened.entry(name) for name in names})
            yield slim
        finally:
            slim.unlink(missing_ok=True)
