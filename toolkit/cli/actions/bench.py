"""Measure an engine with the options of `tandem bench`. It needs what a board has, no onnx."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.text import Text

from device.array_files import read_arrays
from device.engine.arithmetic import arithmetic_of
from device.engine.file import open_engine
from device.engine.manifest import UNCALIBRATED, Manifest
from device.errors import ArrayFileError
from toolkit.cli.actions.outputs import NOT_TIMED, need_folders, print_page_path
from toolkit.cli.commands.bench import Bench
from toolkit.cli.pages.bench_page import bench_page
from toolkit.errors import BenchError
from toolkit.evaluate.bench.measure import BenchOptions, Measured, measure
from toolkit.evaluate.bench.report import BenchResult, bench_builtins, bench_table
from toolkit.evaluate.bench.state import readings, versions
from toolkit.html.page import write_page
from toolkit.machine import this_machine

MAX_INPUT_BYTES = 1 << 32  # of all inputs of one inference


def bench(options: Bench) -> None:
    """Measure an engine and print the result. Raises TandemError, click.UsageError."""
    if options.input and (options.shapes or options.batch):
        raise click.UsageError("--input has shapes of its own; leave out --shape and --batch.")
    need_folders(options.html)
    result, manifest = _measure(options)
    if options.html is not None:
        _write_page(result, options.html)
    if options.as_json:
        click.echo(json.dumps(bench_builtins(result)))
    else:
        console = Console()
        if manifest.uncalibrated:
            console.print(Text(UNCALIBRATED, style="bold red"))
        console.print(bench_table(result, manifest))
    print_page_path(options.html, as_json=options.as_json)


def _measure(options: Bench) -> tuple[BenchResult, Manifest]:
    machine = this_machine()
    state: dict[str, str] = {}  # read while the engine runs
    bench_options = BenchOptions(
        duration_s=options.duration,
        iterations=options.iterations,
        warmup_s=options.warmup,
        streams=options.streams,
        shapes=options.shapes,
        batch=options.batch,
        profile=options.profile,
        timing_cache=options.timing_cache,
        executor=options.executor,
    )
    with open_engine(options.engine) as engine:
        measured = measure(
            engine,
            bench_options,
            _read_inputs(options.input) if options.input else None,
            lambda: state.update(readings(machine)),
        )
        manifest = engine.manifest
        result = BenchResult(
            engine=str(options.engine),
            sha256=engine.sha256,
            profile=manifest.profile,
            precision=arithmetic_of(manifest),
            measured=measured,
            machine=state,
            versions=versions(machine),
            notes=_notes(measured, options.timing_cache),
        )
        return result, manifest


def _notes(measured: Measured, timing_cache: Path | None) -> tuple[str, ...]:
    """Return what a machine without a GPU does not measure."""
    if measured.gpu:
        return ()
    times = "no segment runs on a GPU here, so there are no times of one"
    return (times,) if timing_cache is None else (times, NOT_TIMED.format(cache=timing_cache))


def _read_inputs(path: Path) -> Mapping[str, np.ndarray]:
    """Read arrays by name from a .npz file; raises BenchError."""
    try:
        arrays = read_arrays(path, MAX_INPUT_BYTES)
    except (OSError, ArrayFileError) as error:
        raise BenchError(
            f"{path} cannot be read as .npz ({error}); write one with numpy.savez"
        ) from error
    if not isinstance(arrays, dict):
        raise BenchError(f"{path} holds one array without a name; write it with numpy.savez")
    return arrays


def _write_page(result: BenchResult, path: Path) -> None:
    """Write the page of a measurement: graph and roofline too where onnx is installed."""
    if find_spec("onnx_ir") is None:
        write_page(path, bench_page(result, None))
        return
    from toolkit.cli.pages.engine_card import engine_facts

    with open_engine(Path(result.engine)) as engine:
        write_page(path, bench_page(result, engine_facts(engine)))
