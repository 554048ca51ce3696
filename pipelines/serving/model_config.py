"""config.pbtxt of a model: read, completed from what the engine says, and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format

from device.engine.manifest import DimRange
from device.errors import ConfigError
from pipelines.serving.config_checks import check_config
from pipelines.serving.messages import message
from pipelines.serving.protocol import BF16, BY_CONFIG, DATATYPES

CONFIG = "config.pbtxt"
Config = Any  # a message that is made at run time

ENSEMBLE = "ensemble"
UNLIMITED = 2**31 - 1
DEFAULT_BATCH = 4  # Triton's, of models that take any

Dim = int | DimRange | str | None  # any size: a symbol of the model, or None


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of what runs: `datatype` as arrays have it, `dims` with the batch."""

    name: str
    datatype: str
    dims: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class ModelPort:
    """An input or output as clients see it, without the batch.

    `inner`: the shape that the model takes, where config.pbtxt reshapes; `converted`: BF16 outside,
    FP32 inside.
    """

    name: str
    datatype: str
    dims: tuple[Dim, ...]
    inner: tuple[int, ...] | None = None
    converted: bool = False
    optional: bool = False
    labels: tuple[str, ...] = ()

    def shape(self) -> list[int]:
        """The dimensions, -1 where the size is not fixed."""
        return [dim if isinstance(dim, int) else -1 for dim in self.dims]


def read_config(path: Path) -> Config:
    """Return the configuration in a file. Raises ConfigError."""
    try:
        return parse_config(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def parse_config(text: str, where: object) -> Config:
    """Return the configuration in a text of `where`. Raises ConfigError."""
    try:
        return text_format.Parse(text, message("ModelConfig")())
    except text_format.ParseError as error:
        raise ConfigError(f"{where} is no model configuration: {error}.") from error


def parse_override(text: str) -> Config:
    """Return the configuration in the JSON of a load request. Raises ConfigError."""
    try:
        return json_format.Parse(text, message("ModelConfig")())
    except (json_format.ParseError, RecursionError) as error:
        raise ConfigError(f"the configuration in the request is not one: {error}.") from error


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file of a folder. Raises ConfigError: it is outside, also by a link."""
    try:
        if (folder / name).resolve().is_relative_to(folder.resolve()):
            return folder / name
    except (OSError, RuntimeError, ValueError):  # a loop of links, NUL
        pass
    raise ConfigError(f"the file {name!r} that a configuration names is not inside {folder}.")


def write_config(config: Config) -> str:
    """Return the text of config.pbtxt."""
    text: str = text_format.MessageToString(config)
    return text


def as_json(value: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a message as Triton's JSON has it: all fields, names of enums, numbers as numbers."""
    result: dict[str, Any] = {}
    for field in value.DESCRIPTOR.fields:
        entry = field.message_type
        here = getattr(value, field.name)
        if entry is not None and entry.GetOptions().map_entry:
            nested = entry.fields_by_name["value"].message_type is not None
            result[field.name] = {
                str(key): as_json(here[key]) if nested else here[key] for key in here
            }
        elif hasattr(here, "append"):  # repeated
            result[field.name] = [_plain(field, one) for one in here]
        elif (entry is None and field.containing_oneof is None) or value.HasField(field.name):
            result[field.name] = _plain(field, here)
    return result


def _plain(field: Any, value: Any) -> Any:  # noqa: ANN401
    if field.message_type is not None:
        return as_json(value)
    if field.enum_type is not None:
        number = field.enum_type.values_by_number.get(value)
        return value if number is None else number.name
    return value


def complete(
    config: Config, name: str, platform: str, inputs: Sequence[Port], outputs: Sequence[Port]
) -> Config:
    """Return the configuration with what it leaves out, read from the engine.

    A configuration without inputs and outputs is batched where all of them begin with one dynamic
    dimension. Raises ConfigError: it contradicts the engine, or asks
    for what this server cannot do.
    """
    full = message("ModelConfig")()
    full.CopyFrom(config)
    if full.name not in ("", name):
        raise ConfigError(
            f"the configuration names the model {full.name!r}; its folder is {name!r}."
        )
    full.name = name
    if full.model_transaction_policy.decoupled:
        raise ConfigError(
            f"model {name!r} is decoupled (model_transaction_policy): this server gives one answer"
            " to a request. Set decoupled to false."
        )
    if not full.platform and not full.backend:
        full.platform = platform
    if platform != ENSEMBLE:
        declared = full.max_batch_size > 0
        _complete_batch(full, batch_of(inputs, outputs, declared=declared))
        sequence = full.sequence_batching
        hidden = {row.name for row in sequence.control_input}
        hidden |= {name for row in sequence.state for name in (row.input_name, row.output_name)}
        for fields, ports in ((full.input, inputs), (full.output, outputs)):
            _complete_ports(full, fields, [port for port in ports if port.name not in hidden])
        if not full.instance_group:
            full.instance_group.add(name=f"{name}_0", count=1, kind="KIND_AUTO")
    if full.version_policy.WhichOneof("choice") is None:
        full.version_policy.latest.num_versions = 1
    check_config(full)
    return full


def _complete_batch(full: Config, largest: DimRange | None) -> None:
    if (
        not full.max_batch_size
        and not full.input
        and largest is not None
        and largest.min < largest.max
        and largest.step == 1
    ):
        full.max_batch_size = largest.max if largest.max < UNLIMITED else DEFAULT_BATCH
    if not 0 <= full.max_batch_size <= (largest.max if largest is not None else 0):
        limit = "has no batch" if largest is None else f"takes batches up to {largest.max}"
        raise ConfigError(
            f"model {full.name!r} has max_batch_size {full.max_batch_size}; its engine {limit}."
        )


def _complete_ports(full: Config, fields: Any, ports: Sequence[Port]) -> None:  # noqa: ANN401
    known, named = {port.name for port in ports}, {field.name for field in fields}
    if strangers := sorted(named - known):
        raise ConfigError(
            f"the configuration of model {full.name!r} has {strangers[0]!r}; the engine has"
            f" {', '.join(port.name for port in ports)}."
        )
    if named and fields is full.output:  # the other outputs are not shown
        return
    for port in ports:
        if port.name not in named:
            dims = port.dims[1:] if full.max_batch_size else port.dims
            fields.add(
                name=port.name,
                data_type=DATATYPES[port.datatype].config,
                dims=[dim if isinstance(dim, int) else -1 for dim in dims],
            )


def batch_of(inputs: Sequence[Port], outputs: Sequence[Port], *, declared: bool) -> DimRange | None:
    """Return the range of the first dimension, if all inputs and outputs have it in common.

    `declared`: the configuration says so, whatever the symbols; exporters give outputs their own.
    """
    if not all(port.dims for port in (*inputs, *outputs)):
        return None
    firsts = {port.dims[0] for port in (*inputs, *outputs)} - {None}
    if declared:
        firsts = {first for first in firsts if not isinstance(first, str)}
    if len(firsts) > 1:
        return None
    first = firsts.pop() if firsts else None
    if isinstance(first, int):
        return DimRange(name="batch", min=first, opt=first, max=first)
    if isinstance(first, DimRange):
        return first
    return DimRange(name="batch", min=1, opt=1, max=UNLIMITED)


def ports_of(
    config: Config, ports: Sequence[Port], which: str, folder: Path
) -> dict[str, ModelPort]:
    """Return what clients see of inputs or outputs. Raises ConfigError: the two do not agree."""
    known = {port.name: port for port in ports}
    batched = config.max_batch_size > 0
    result = {}
    for field in getattr(config, which):
        port = known[field.name]
        dims = port.dims[1:] if batched else port.dims
        datatype = BY_CONFIG.get(
            _plain(field.DESCRIPTOR.fields_by_name["data_type"], field.data_type)
        )
        converted = (datatype, port.datatype) == (BF16, "FP32")
        where = f"{which} {field.name!r} of model {config.name!r}"
        if datatype != port.datatype and not converted:
            raise ConfigError(
                f"{where} is {datatype} in its configuration, {port.datatype} inside."
            )
        inner = tuple(field.reshape.shape) if field.HasField("reshape") else None
        outer = tuple(field.dims)
        target = outer if which == "output" else inner or ()
        if inner is not None and target.count(-1) > 1:
            raise ConfigError(
                f"{where} becomes {list(target)} (reshape): one dimension may be -1,"
                f" {target.count(-1)} are."
            )
        if not fits(inner if inner is not None else outer, dims):
            raise ConfigError(
                f"{where} has {list(outer if inner is None else inner)} in its configuration,"
                f" {[dim if isinstance(dim, int) else -1 for dim in dims]} inside."
            )
        if inner is None:  # ranges say more than -1
            shown: tuple[Dim, ...] = tuple(
                mine if mine != -1 else dim for mine, dim in zip(outer, dims, strict=True)
            )
        else:
            shown = tuple(None if dim == -1 else dim for dim in outer)
        labels: tuple[str, ...] = ()
        if which == "output" and field.label_filename:
            labels = _labels(inside(folder, field.label_filename))
        result[field.name] = ModelPort(
            field.name, datatype or "", shown, inner, converted,
            which == "input" and field.optional, labels,
        )  # fmt: skip
    return result


def fits(shape: Sequence[int], dims: Sequence[Dim]) -> bool:
    """Whether a shape, which may have -1, is one of these dimensions."""
    return len(shape) == len(dims) and all(
        size == -1 or dim is None or isinstance(dim, str)
        or (size == dim if isinstance(dim, int) else in_range(size, dim))
        for size, dim in zip(shape, dims, strict=True)
    )  # fmt: skip


def in_range(size: int, dim: DimRange) -> bool:
    """Whether a dynamic dimension takes a size."""
    return dim.min <= size <= dim.max and size % dim.step == 0


def _labels(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the labels {path} cannot be read: {error}.") from error
