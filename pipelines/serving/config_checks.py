"""What a model configuration asks for that this server refuses, and what has no effect here."""

from collections.abc import Iterator, Mapping
from typing import Any

from device.errors import ConfigError

Config = Any  # a message that is made at run time

# Fields that change what a model computes, or who may replace its files.
REFUSED: Mapping[str, str] = {
    "batch_input": "inputs that are computed from a batch are not given to the model",
    "batch_output": "outputs are split by rows alone",
    "input.allow_ragged_batch": "requests of different shapes are not joined into one batch",
    "input.is_shape_tensor": "the values of an input are no shapes here",
    "output.is_shape_tensor": "the values of an output are no shapes here",
    "input.is_non_linear_format_io": "tensors are row-major",
    "output.is_non_linear_format_io": "tensors are row-major",
    "model_operations": "libraries of operators are not loaded",
    "model_repository_agents": "agents are not run, so their checks would be left out",
}

# Fields that tell Triton how to run a model: answers are the same without them.
WITHOUT_EFFECT = frozenset({
    "cc_model_filenames", "dynamic_batching.preserve_ordering", "input.format",
    "instance_group.gpus", "instance_group.host_policy", "instance_group.kind",
    "instance_group.passive", "instance_group.profile", "instance_group.rate_limiter",
    "metric_tags", "model_metrics", "optimization", "parameters", "response_cache", "runtime",
})  # fmt: skip


def fields_without_effect(config: Config) -> set[str]:
    """Return the fields of a configuration that this server does not use."""
    names = WITHOUT_EFFECT | ({"model_warmup"} if config.HasField("sequence_batching") else set())
    return set(_fields(config)) & names


def _fields(config: Config) -> Iterator[str]:
    """Yield the fields that are set to other than their default, and theirs, as OUTER.INNER."""
    for field, content in config.ListFields():
        yield field.name
        for row in content if hasattr(content, "append") else [content]:
            if hasattr(row, "ListFields"):
                yield from (f"{field.name}.{inner.name}" for inner, _ in row.ListFields())


def check_config(config: Config) -> None:
    """Raise ConfigError, with the name of the field: this server cannot do what a completed
    configuration asks for."""
    where = f"the configuration of model {config.name!r}"
    for name in _fields(config):
        if name in REFUSED:
            raise ConfigError(f"{where} has {name}: {REFUSED[name]}. Remove it.")
    rows, largest = config.dynamic_batching, max(1, config.max_batch_size)
    for size in rows.preferred_batch_size:
        if not 1 <= size <= largest:
            raise ConfigError(
                f"{where} has dynamic_batching.preferred_batch_size {size}: it must be 1 to"
                f" {largest} (max_batch_size)."
            )
    levels = rows.priority_levels
    if levels and not 1 <= rows.default_priority_level <= levels:
        raise ConfigError(
            f"{where} has dynamic_batching.default_priority_level {rows.default_priority_level}:"
            f" it must be 1 to {levels} (priority_levels)."
        )
    for level in rows.priority_queue_policy:
        if not 1 <= level <= levels:
            raise ConfigError(
                f"{where} has dynamic_batching.priority_queue_policy of level {level}: levels are"
                f" 1 to {levels} (priority_levels)."
            )
