"""What a bundle says of itself: bundle.json, as values."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from device.update.agent_payload import AgentPayload
from device.update.members import (
    ENGINE,
    GOLDEN,
    LABELS,
    BundleFile,
    BundleModel,
    Sha256,
    Text,
)

ONE_MODEL, SEVERAL_MODELS, AGENT, SERVICE = 1, 2, 3, 4  # formats
BomWriter = Callable[["BundleInfo"], Path]
"""Gets what the bundle says of itself and its other members; returns the file that it wrote."""


class GoldenLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a board must reach on the golden inputs of one model, chosen when it was packed.

    `task`: what is counted, such as "objects"; `min_agreement`: the share of it that must agree;
    `min_sqnr_db`: of every output, in dB. `measured_agreement`, `measured_sqnr_db`: what the engine
    itself keeps when its inputs change by as little as another processor's rounding.
    """

    task: Text
    min_agreement: Annotated[float, Meta(ge=0.0, le=1.0)]
    min_sqnr_db: float
    measured_agreement: Annotated[float, Meta(ge=0.0, le=1.0)]
    measured_sqnr_db: float


class Golden(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Inputs with the outputs that each engine gave on the host, as `device.runtime.golden` reads
    them. `limits`: by the model's name, which is empty for an only one. In bundles without them
    `tolerance` holds: how far an output may be from them, as a share of its range."""

    samples: Annotated[int, Meta(ge=1, le=1000)]
    tolerance: Annotated[float, Meta(ge=0.0, le=1.0)]
    limits: dict[str, GoldenLimit] = {}


class BundleInfo(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """bundle.json: what the bundle is, which profile its engines are for, and its members.

    What follows may be missing. `models`: several, by the names of pipeline.toml. `executables`:
    the files of a service's payload that are programs. `hashes`: the
    SHA-256 of what it was made of, by "model", "data" and "table". `metrics`: what was measured of
    it, `measured_by`: how. Of several models the keys of these begin with the model's name and a
    dot. `requires`: the least that a board must have (`device.update.admission`).
    `min_version_floor`: the oldest version that may run where this one was live. `agent`: this is a
    release of the agent itself, whose members are wheels.
    """

    format: int
    name: Text
    version: Text
    profile: Text
    files: tuple[BundleFile, ...]
    models: tuple[BundleModel, ...] = ()
    executables: tuple[str, ...] = ()
    golden: Golden | None = None
    hashes: dict[Text, Sha256] = {}
    metrics: dict[Text, float] = {}
    measured_by: dict[Text, Text] = {}
    licence: str = ""
    requires: dict[Text, Text] = {}
    min_version_floor: str = ""
    agent: AgentPayload | None = None

    @property
    def is_service(self) -> bool:
        """Whether it holds a program of another runtime."""
        return self.format == SERVICE

    @property
    def runs(self) -> tuple[BundleModel, ...]:
        """The engines, each with its labels and golden inputs; the name of an only one is empty.
        A service and an agent have none."""
        if self.models or self.is_service or self.agent is not None:
            return self.models
        golden = GOLDEN if self.golden else ""
        return (BundleModel(name="", engine=ENGINE, labels=LABELS, golden=golden),)


class BundleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a bundle says of itself beside its names, see `BundleInfo`."""

    golden: Golden | None = None
    hashes: dict[str, str] = {}
    metrics: dict[str, float] = {}
    measured_by: dict[str, str] = {}
    licence: str = ""
    requires: dict[str, str] = {}
    min_version_floor: str = ""
