"""Pack a bundle: engine, pipeline and labels, once they are known to fit together."""

from dataclasses import dataclass
from pathlib import Path

from device.engine.file import open_engine
from device.errors import BundleError, PipelineError
from device.update.bundle import BundleInfo, write_bundle
from pipelines.config import load_labels, load_pipeline
from pipelines.sinks.files import check_release
from pipelines.stages.fit import check_fit
from pipelines.stages.preprocess_check import check_preprocessing


@dataclass(frozen=True, slots=True)
class Packed:
    """A bundle that was written.

    `uncalibrated`: the engine's INT8 ranges were never measured. `warning`: images are fitted into
    the input otherwise than in the calibration.
    """

    info: BundleInfo
    uncalibrated: bool
    warning: str | None


def pack_bundle(
    output: Path, *, engine: Path, pipeline: Path, labels: Path, name: str, version: str
) -> Packed:
    """Check the three files against each other, then write the bundle.

    The same inputs give the same bytes. Raises TandemError before anything is written: a file that
    cannot be used (EngineError, ConfigError), or an engine that does not fit (BundleError).
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
    info = write_bundle(
        output,
        engine=engine,
        pipeline=pipeline,
        labels=labels,
        name=name,
        version=version,
        profile=manifest.profile,
    )
    return Packed(info, manifest.uncalibrated, warning)
