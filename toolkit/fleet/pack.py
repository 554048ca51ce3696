"""Pack a bundle: engine, pipeline and labels, once they are known to fit together."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device.engine.file import open_engine, write_engine
from device.engine.purposes import entries_read, without_portable
from device.errors import BundleError, PipelineError
from device.update.bundle import BundleFacts, BundleInfo, Golden, write_bundle
from pipelines.config import load_labels, load_pipeline
from pipelines.sinks.files import check_release
from pipelines.stages.fit import check_fit
from pipelines.stages.preprocess_check import check_preprocessing
from toolkit.fleet.golden import TOLERANCE, golden_of


@dataclass(frozen=True, slots=True)
class Packed:
    """A bundle that was written.

    `uncalibrated`: the engine's INT8 ranges were never measured. `warning`: images are fitted into
    the input otherwise than in the calibration. `left_out_bytes`: how much smaller than its file
    the engine is in the bundle.
    """

    info: BundleInfo
    uncalibrated: bool
    warning: str | None
    left_out_bytes: int


def pack_bundle(
    output: Path,
    *,
    engine: Path,
    pipeline: Path,
    labels: Path,
    name: str,
    version: str,
    portable: bool = False,
    golden: int | Path | None = None,
    facts: BundleFacts | None = None,
) -> Packed:
    """Check the three files against each other, then write the bundle.

    `golden`: so many random inputs, or the pictures of a folder, go into the bundle with the
    outputs that the engine gives here; `facts`: what else the bundle says of itself. Without
    `portable`, GPU segments leave their portable implementation behind. The same inputs give the
    same bytes. Raises TandemError before anything is written: a file that cannot be used
    (EngineError, ConfigError), or an engine that does not fit (BundleError).
    """
    config, classes = load_pipeline(pipeline), load_labels(labels)
    with open_engine(engine) as opened:
        manifest = opened.manifest
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    inputs, outputs = (
        [tensors[tensor] for tensor in names] for names in (manifest.inputs, manifest.outputs)
    )
    try:
        check_fit(config, inputs, outputs, classes, manifest.dims)
        check_release(config)
        warning = check_preprocessing(config, manifest.preprocessing)
    except PipelineError as error:
        raise BundleError(
            f"{engine} does not fit {pipeline} and {labels}, so no bundle was written: {error}"
        ) from error
    facts = facts or BundleFacts()
    with ExitStack() as stack:
        packed_engine = engine if portable else stack.enter_context(_for_board(engine, output))
        golden_file = None
        if golden is not None:
            golden_file, samples = stack.enter_context(golden_of(engine, config, golden, output))
            facts = msgspec.structs.replace(
                facts, golden=Golden(samples=samples, tolerance=TOLERANCE)
            )
        info = write_bundle(
            output,
            engine=packed_engine,
            pipeline=pipeline,
            labels=labels,
            name=name,
            version=version,
            profile=manifest.profile,
            golden=golden_file,
            facts=facts,
        )
        left_out_bytes = engine.stat().st_size - packed_engine.stat().st_size
    return Packed(info, manifest.uncalibrated, warning, left_out_bytes)


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
