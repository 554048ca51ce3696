"""workload.toml: models that share one board, each at its rate, and services beside them.

[[model]]
path = "detector.onnx"      # beside the workload file, or absolute
rate_hz = 30
table = "detector.calib.json"   # which tensors have INT8 ranges; without it all are taken to

[[service]]
name = "vlm"
memory_mb = 3500
gpu_share = 0.4
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from device.toml_file import decode_toml
from toolkit.errors import PlanError
from toolkit.partition.planning.services import Service


class WorkloadModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model of a workload; `name` None takes the file's name without its ending.

    `inputs_as_nchw`: as in `toolkit.importers.source.ModelPath`.
    `settings`: its model.toml, for a pipeline of the plan; None: how it is fed and read is guessed.
    `rate_hz` None: frames come as fast as they go; all models of a workload have a rate, or none.
    """

    path: Path
    rate_hz: Annotated[float, Meta(gt=0.0, le=100_000.0)] | None = None
    name: Annotated[str, Meta(min_length=1)] | None = None
    table: Path | None = None
    shapes: dict[str, tuple[Annotated[int, Meta(ge=1)], ...]] = {}
    inputs_as_nchw: bool = False
    settings: Path | None = None

    @property
    def title(self) -> str:
        """The name under which the model is reported."""
        return self.name or self.path.stem


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The models and services of a workload file, in its order, the paths resolved."""

    model: Annotated[tuple[WorkloadModel, ...], Meta(min_length=1)]
    service: tuple[Service, ...] = ()


def load_workload(path: Path) -> Workload:
    """Read a workload file.

    Raises PlanError: it cannot be read, holds something else, or names a model twice.
    """
    try:
        workload = decode_toml(path.read_bytes(), Workload, _path)
    except OSError as err:
        raise PlanError(
            f"{path}: cannot read the workload ({err.strerror}): check the path"
        ) from err
    except (ValueError, NotImplementedError) as err:
        raise PlanError(
            f"{path}: not a workload ({err}): write [[model]] tables with path and rate_hz"
        ) from err
    services = [service.name for service in workload.service]
    titles = [*(model.title for model in workload.model), *services]
    if twice := next((title for title in titles if titles.count(title) > 1), None):
        kind = "models or services" if services else "models"
        raise PlanError(f"{path}: two {kind} are called {twice!r}: give one a name of its own")
    if len({model.rate_hz is None for model in workload.model}) > 1:
        raise PlanError(f"{path}: some models have a rate_hz and some not: give it to all or none")
    loads = [service.name for service in workload.service if service.gpu_share]
    if loads and workload.model[0].rate_hz is None:
        raise PlanError(
            f"{path}: the service {loads[0]!r} has a gpu_share, of which models are planned at"
            " their rates: give each a rate_hz"
        )
    models = tuple(_beside(path.parent, model) for model in workload.model)
    return msgspec.structs.replace(workload, model=models)


def _path(kind: type, value: object) -> Path:
    if kind is not Path or not isinstance(value, str):
        raise NotImplementedError(f"no {kind.__name__} from {value!r}")  # msgspec's word for it
    return Path(value)


def _beside(folder: Path, model: WorkloadModel) -> WorkloadModel:
    return msgspec.structs.replace(
        model,
        path=folder / model.path,
        table=None if model.table is None else folder / model.table,
        settings=None if model.settings is None else folder / model.settings,
    )
