"""The bundles of the demo: a first release, a recalibrated one and a broken one."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from device.update.bundle import write_bundle
from pipelines.config import ModelConfig, PipelineConfig, SourceConfig
from pipelines.decode_config import LtrbGrid
from pipelines.sink_config import MqttSink
from toolkit.errors import BuildError

MISSING_OUTPUT = "boxes_of_another_model"


@dataclass(frozen=True, slots=True)
class Release:
    """One bundle on disk and the name that its events carry."""

    bundle: Path
    pipeline: str
    version: str


def pipeline_for(model: ModelConfig, name: str, source: SourceConfig) -> PipelineConfig:
    """Return the demo's pipeline: the source, the model's settings, an MQTT sink."""
    return PipelineConfig(
        name=name,
        source=source,
        preprocess=model.preprocess,
        decode=model.decode,
        sinks=(MqttSink(max_hz=60.0),),
    )


def broken(config: PipelineConfig) -> PipelineConfig:
    """Return a pipeline that reads an output which the engine lacks."""
    if not isinstance(config.decode, LtrbGrid):
        raise BuildError(f"The demo needs a detector; {config.name} decodes {config.decode!r}.")
    return replace(config, decode=replace(config.decode, boxes=MISSING_OUTPUT))


def write_release(
    folder: Path, config: PipelineConfig, *, engine: Path, labels: Path, version: str, profile: str
) -> Release:
    """Write pipeline.toml and the bundle of one release."""
    folder.mkdir(parents=True, exist_ok=True)
    pipeline = folder / f"pipeline-{version}.toml"
    pipeline.write_bytes(msgspec.toml.encode(config))
    bundle = folder / f"{config.name}.bundle"
    write_bundle(
        bundle,
        engine=engine,
        pipeline=pipeline,
        labels=labels,
        name=config.name,
        version=version,
        profile=profile,
    )
    return Release(bundle, config.name, version)
