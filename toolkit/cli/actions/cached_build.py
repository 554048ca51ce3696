"""`tandem build`, which takes what it has built before from the cache.

The key is the hash of all that a build depends on. Builds that read what it does not see (plugins,
files that a model configuration names) and those that write more than the engine are done anew.
"""

import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from calibration.dataset import ARRAYS, PICTURES
from device.errors import TandemError
from device.runtime.exact_products import cpu_flags
from toolkit.cache import (
    BUILDING,
    code_version,
    key_of,
    package_version,
    read_entry,
    trim,
    write_entry,
)
from toolkit.cli.actions.outputs import need_folders, print_page_path, write_bytes
from toolkit.cli.command import given
from toolkit.cli.commands.build import Build
from toolkit.cli.options.choices import PREPROCESSINGS
from toolkit.importers.formats import format_of
from toolkit.importers.source import model_sha256
from toolkit.importers.tensorflow import find_interpreter

if TYPE_CHECKING:
    from toolkit.quantize.ranges.measure import Ranges

LOG = logging.getLogger(__name__)
REBUILD = "TANDEM_REBUILD"
MAX_BYTES = 1 << 31  # of an engine in the cache
MAX_CACHE_BYTES = 20 << 30  # of all entries, those used last
_DATA = PICTURES | ARRAYS
_WITH_RANGES = (None, "int8", "best", "fp8")
_OF_INT8_ALONE = frozenset(
    {"--budget", "--keep", "--equalise", "--round-weights", "--bias-correction", "--method"}
    | {"--resume", "--workers"}
)
_NO_PART = frozenset(
    {"out", "html", "as_json", "workers", "save_table", "resume", "data", "profile"}
)
_VERSIONS = (
    "from importlib.metadata import distributions as all_of\n"
    "print(sorted(f'{one.name} {one.version}' for one in all_of()))"
)
_WHERE = "engine: \0 ("  # in the place of the engine's path


class Built(msgspec.Struct, frozen=True):
    """What a build says, as text and as JSON, and the table that it has measured."""

    text: str
    json: str
    table: bytes | None


class _Entry(msgspec.Struct, frozen=True):
    built: Built
    engine: bytes


def build(options: Build) -> None:
    """Build, write the files and print the report. Raises TandemError, click.UsageError."""
    refuse(options)
    built, _ = build_cached(options)
    click.echo(built.json if options.as_json else built.text)
    print_page_path(options.html, as_json=options.as_json)


def from_cache(options: Build) -> Built | None:
    """Write the files of a build that was done before; None if it was not. Raises TandemError."""
    key = build_key(options)
    return None if key is None else _from_cache(key, options)


def build_cached(options: Build, measured: "dict[str, Ranges] | None" = None) -> tuple[Built, bool]:
    """Return what a build says, and whether it was done before. Raises TandemError.

    `measured`: calibrations of other builds, which this one takes and adds to.
    """
    key = build_key(options)
    built = None if key is None else _from_cache(key, options)
    if built is not None:
        return built, True
    from toolkit.cli.actions.build import build_now  # the compiler, which the cache does without
    from toolkit.cli.actions.calibration import workers_of

    with workers_of(options.calibration) as workers:
        built = build_now(options, workers, measured)
    # What was read may have changed meanwhile.
    if key and options.engine.stat().st_size < MAX_BYTES and build_key(options) == key:
        cached = Built(_moved(built.text, options, store=True), built.json, built.table)
        entry = _Entry(cached, options.engine.read_bytes())
        write_entry("engines", key, msgspec.msgpack.encode(entry))
        trim(MAX_CACHE_BYTES)
    return built, False


def build_key(options: Build) -> str | None:
    """Return the hash of all that a build depends on, None if it cannot be known.

    Raises TandemError: a file is not there.
    """
    measured = options.measure_on or options.measured
    if os.environ.get(REBUILD) or options.html or options.calibration.resume or measured:
        return None
    preprocess = options.calibration.preprocess.preprocess
    if options.source.plugins or preprocess not in (None, *PREPROCESSINGS):
        return None
    read = [path for path in (options.model, options.ranges.table) if path is not None]
    if any(not path.exists() or _has_external_data(path) for path in read):
        return None  # the build says what is missing
    if options.data is not None and not options.data.exists():
        return None
    exporter = _exporter(options.model)
    if exporter is None:
        return None
    parts = [code_version(), platform.python_version(), platform.machine()]
    parts += [f"{name} {package_version(name) or 'none'}" for name in BUILDING]
    parts.append(exporter)
    if options.data is not None:  # ranges are measured in floating point
        from pipelines.vision import cv2

        parts += [*sorted(cpu_flags()), cv2.getBuildInformation()]
        parts.append(options.data.name + _content(options.data, _DATA, options.calibration.samples))
    parts += _parts(options)
    profile = Path(options.profile)
    parts.append(profile.name + (_content(profile) if names_file(options.profile) else ""))
    return key_of(*parts)


def names_file(profile: str) -> bool:
    """Whether `load_profile` takes this for the path of a file, not for a shipped profile."""
    return Path(profile).suffix == ".toml" or len(Path(profile).parts) != 1


def refuse(options: Build) -> None:
    """Refuse options that contradict each other or have no effect. Raises click.UsageError."""
    ranges, data, precision = options.ranges, options.data, options.precision
    of_ranges, of_data = _calibration_options(options)
    of_int8 = [row for row in (*of_ranges, *of_data) if row[0] in _OF_INT8_ALONE]
    judges = options.int4_weights is not None or precision == "bf16"
    others = (
        (options.int4_weights is not None, "--int4-weights measures none", of_ranges),
        (precision == "fp8", "--precision fp8 takes the largest magnitudes", of_int8),
        (precision == "bf16", "--precision bf16 has none", (*of_ranges, *of_int8)),
    )
    sources = (
        ("--data", not judges and data),
        ("--table", ranges.table),
        ("--dummy-ranges", ranges.dummy_ranges),
    )
    rows: list[tuple[object, str]] = [
        (ranges.table and (data or ranges.save_table),
         "--table replaces --data and --save-table; give one or the other."),
        (ranges.dummy_ranges and (data or ranges.table),
         "--dummy-ranges replaces --data and --table; give one or the other."),
        *((value and data is None, f"{option} belongs to calibration; give --data with it.")
          for option, value in (*of_ranges, *of_data)),
        *((value and chosen,
           f"{option} is about the ranges of INT8, and {instead}; leave out one of them.")
          for chosen, instead, refused in others for option, value in refused),
        *((value and precision not in _WITH_RANGES,
           f"{option} gives INT8 its ranges; --precision {precision} has no use for it.")
          for option, value in sources),
        (options.measure_on and (options.kernels.timings or options.dims),
         "--measure-on times the kernels of fixed sizes; leave out --timing-cache and --dim."),
        (options.measure_on and options.measured,
         "--measure-on replaces --measured; give one or the other."),
    ]  # fmt: skip
    for contradicts, text in rows:
        if contradicts:
            raise click.UsageError(text)


_Given = tuple[tuple[str, object], ...]  # options and their values


def _calibration_options(options: Build) -> tuple[_Given, _Given]:
    """Return the options that are about ranges, and those that are about data."""
    calibration = options.calibration
    of_ranges = (
        ("--save-table", options.ranges.save_table),
        ("--budget", calibration.budget),
        ("--keep", calibration.keep),
        ("--equalise", calibration.equalise),
        ("--round-weights", calibration.round_weights),
        ("--bias-correction", calibration.bias_correction),
        ("--keep-float", calibration.keep_float),
        ("--method", given("method")),
    )
    of_data = (
        ("--samples", calibration.samples),
        ("--resume", calibration.resume),
        ("--workers", calibration.workers),
        ("--accept-loss", calibration.accept_loss and not options.ranges.table),
        ("--strict", calibration.preprocess.strict),
    )
    return of_ranges, of_data


def _from_cache(key: str, options: Build) -> Built | None:
    """Write the files of a build that was done before; None if it was not."""
    content = read_entry("engines", key)
    try:
        entry = None if content is None else msgspec.msgpack.decode(content, type=_Entry)
    except msgspec.DecodeError:
        return None
    table_path = options.ranges.save_table
    if entry is None or (table_path is not None and entry.built.table is None):
        return None
    need_folders(options.engine, table_path, model=options.model)
    write_bytes(options.engine, entry.engine)
    if table_path is not None and entry.built.table is not None:
        write_bytes(table_path, entry.built.table)
    LOG.info("%s was built before and is taken from the cache", options.engine)
    facts = json.loads(entry.built.json) | {"engine": str(options.engine)}
    text = _moved(entry.built.text, options, store=False)
    return Built(text, json.dumps(facts), entry.built.table)


def _moved(text: str, options: Build, *, store: bool) -> str:
    """Return a report without the engine's path, or with it."""
    here = f"engine: {options.engine} ("
    return text.replace(here, _WHERE) if store else text.replace(_WHERE, f"{here}from the cache, ")


def _parts(value: object) -> Iterator[str]:
    """Yield all that options say, and the contents of the files that they name."""
    for field in fields(value):  # type: ignore[arg-type]
        item = getattr(value, field.name)
        if field.name in _NO_PART:
            continue
        if is_dataclass(item):
            yield from _parts(item)
        elif isinstance(item, Path):  # the same in another checkout
            yield f"{field.name} {item.name} {_content(item)}"
        else:
            yield f"{field.name} {item!r}"


def _has_external_data(model: Path) -> bool:
    """Whether weights may stand in other files, which the key does not see."""
    if not model.is_file() or model.name == "saved_model.pb":
        return model.is_file()
    return format_of(model) is None and b"location" in model.read_bytes()


def _exporter(model: Path) -> str | None:
    """Return the versions of what makes ONNX of a model, None if they cannot be known."""
    kind = format_of(model)
    if kind is None or not kind.nhwc:
        return f"torch {package_version('torch') or 'none'}" if kind else ""
    try:
        python = find_interpreter(model.name)
        return subprocess.run(
            [python, "-c", _VERSIONS], capture_output=True, check=True, text=True
        ).stdout
    except (TandemError, OSError, subprocess.SubprocessError):
        return None


def _content(path: Path, kinds: frozenset[str] = frozenset(), samples: int | None = None) -> str:
    """Return the hash of a file or folder, which is read once for all builds of this process.

    `kinds`: the endings of what is read there; `samples`: how many files, spread as calibration
    does. What batches read beyond these is known by name, size and time.
    """
    names = [""]
    if path.is_dir():
        files = {one.relative_to(path).as_posix(): one for one in path.rglob("*")}
        if kinds:  # hidden files are no data
            files = {
                name: one
                for name, one in files.items()
                if one.suffix.lower() in kinds and "/." not in f"/{name}"
            }
        names = sorted(name for name, one in files.items() if one.is_file())
    states = [(name, (path / name).stat()) for name in names]
    return _hashed(path, tuple((name, s.st_size, s.st_mtime_ns) for name, s in states), samples)


@lru_cache(maxsize=256)
def _hashed(path: Path, states: tuple[tuple[str, int, int], ...], samples: int | None) -> str:
    """The hash of what is at a path as long as no file there changes."""
    count = min(len(states), samples or len(states))
    read = {number * len(states) // count for number in range(count)}
    return key_of(
        *(
            f"{state[0]} {model_sha256(path / state[0])}" if number in read else repr(state)
            for number, state in enumerate(states)
        )
    )
