"""How a model or a file is read and a page is written: options of most commands of the compiler."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from toolkit.cli.command import NEW_FILE, PATH, option
from toolkit.cli.options.choices import complete_profile

V = TypeVar("V")

_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


def profile_option(default: str | None = None, group: str = "") -> Any:  # noqa: ANN401
    """Return the field `profile`, which must be given where there is no default."""
    return option(
        "See `tandem profiles`.",
        group=group, default=default, required=default is None, complete=complete_profile,
    )  # fmt: skip


def jetpack_option(group: str) -> Any:  # noqa: ANN401
    """Return the field `jetpack`."""
    return option("JetPack version on the board. [default: newest with its DLA]", group=group)


def shapes_option(text: str = "Fix an input's shape.") -> Any:  # noqa: ANN401
    """Return the field `shapes`, by the names of inputs."""
    return option(text, "--shape", multiple=True, parse=parse_shapes, metavar="NAME=DIMS")


def layout_option() -> Any:  # noqa: ANN401
    """Return the field `inputs_as_nchw`."""
    return option(
        "Give a TensorFlow or Keras model inputs [N,C,H,W] in place of its own [N,H,W,C]."
    )


def memory_option() -> Any:  # noqa: ANN401
    """Return the field `max_memory`; the option sets the limit of this process."""
    return option(
        "Most memory that the model may take on this machine, such as 8GiB or 500MiB. "
        "[default: half of the machine's]", parse=_set_max_memory, metavar="SIZE",
    )  # fmt: skip


def plugins_option() -> Any:  # noqa: ANN401
    """Return the field `plugins`, of `toolkit.plugins.Plugin`, whose module loads onnx."""
    return option(
        "Custom operators (docs/plugins.md). The file is executed.",
        "--plugin", type=PATH, multiple=True, parse=_load_plugins, metavar="FILE.py",
    )  # fmt: skip


def html_option(content: str, group: str = "") -> Any:  # noqa: ANN401
    """Return the field `html`; `content`: what the page shows."""
    text = f"Write an HTML page: {content}."
    return option(text, type=NEW_FILE, metavar="FILE", group=group)


def engines_option(text: str, *flags: str) -> Any:  # noqa: ANN401
    """Return a field of engines by the names of models."""
    return option(text, *flags, multiple=True, parse=parse_engines, metavar="NAME=FILE")


def timing_cache_option(text: str) -> Any:  # noqa: ANN401
    """Return the field `timing_cache`, a file that a run writes."""
    return option(text, "--timing-cache", type=PATH)


def executor_option() -> Any:  # noqa: ANN401
    """Return the field `executor`, of what runs an engine's segments."""
    return option("What runs engines: the best there is, or OpenVINO on the CPU.", default="auto")


def parse_named(
    value: str, separator: str, read: Callable[[str], V], example: str
) -> tuple[str, V]:
    """Read NAME=VALUE; `read` raises ValueError. `example`: the form, and a case of it."""
    name, _, text = value.rpartition(separator)
    try:
        return name, read(text)
    except ValueError as err:
        raise click.BadParameter(f"{value!r} is not {example}") from err


def parse_shapes(values: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Read NAME=1x3x224x224, any number of times, into input name -> shape."""

    def read(text: str) -> tuple[int, ...]:
        return tuple(int(size) for size in text.split("x"))

    shapes = {}
    for value in values:
        name, shape = parse_named(value, "=", read, "NAME=DIMS, such as images=1x3x224x224")
        if not name:
            raise click.BadParameter(f"{value!r} names no input; write NAME=DIMS")
        shapes[name] = shape
    return shapes


def parse_engines(values: tuple[str, ...]) -> dict[str, Path]:
    """Read NAME=FILE, any number of times, into files by the model's name."""
    engines = {}
    for value in values:
        name, _, path = value.partition("=")
        if not (name and path):
            raise click.BadParameter(f"{value!r} is not NAME=FILE, such as detector=yolo.engine")
        engines[name] = Path(path)
    return engines


def parse_size(value: str) -> int:
    """Return the bytes of a size. Raises click.BadParameter."""
    match = re.fullmatch(r"([0-9]{1,7})(MiB|GiB)", value)
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is not a size such as 8GiB or 500MiB")
    return int(match[1]) * _UNITS[match[2]]


def _set_max_memory(value: str | None) -> int | None:
    if value is None:
        return None
    from toolkit.graph.max_memory import set_max_memory

    limit = parse_size(value)
    set_max_memory(limit)
    click.get_current_context().call_on_close(lambda: set_max_memory(None))
    return limit


def _load_plugins(paths: tuple[Path, ...]) -> tuple[Any, ...]:
    if not paths:
        return ()
    from toolkit.plugins.load import load_plugins

    return tuple(plugin for path in paths for plugin in load_plugins(path))


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is read, for a build, a plan and a calibration alike."""

    shapes: dict[str, tuple[int, ...]] = shapes_option()
    inputs_as_nchw: bool = layout_option()
    max_memory: int | None = memory_option()
    plugins: tuple[Any, ...] = plugins_option()
