"""Measure an engine with the options of `tandem bench`. It needs what a board has, no onnx."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from device.array_files import read_arrays
from device.engine.file import open_engine
from device.engine.manifest import Manifest
from device.errors import ArrayFileError
from toolkit.cli.options.timings import not_timed
from toolkit.cli.pages.bench_page import bench_page
from toolkit.errors import BenchError
from toolkit.evaluate.bench.measure import BenchOptions, Measured, measure
from toolkit.evaluate.bench.report import BenchResult
from toolkit.evaluate.bench.state import readings, versions
from toolkit.html.page import write_page
from toolkit.machine import this_machine

MAX_INPUT_BYTES = 1 << 32  # of all inputs of one inference


def bench_engine(
    path: Path, options: BenchOptions, inputs: Path | None
) -> tuple[BenchResult, Manifest]:
    """Measure an engine; `inputs`: .npz of arrays by name, None: random ones."""
    machine = this_machine()
    state: dict[str, str] = {}  # read while the engine runs
    with open_engine(path) as engine:
        measured = measure(
            engine,
            options,
            read_inputs(inputs) if inputs else None,
            lambda: state.update(readings(machine)),
        )
        manifest = engine.manifest
        result = BenchResult(
            engine=str(path),
            sha256=engine.sha256,
            profile=manifest.profile,
            precision=manifest.provenance.precision,
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
    return (times,) if timing_cache is None else (times, not_timed(timing_cache))


def read_inputs(path: Path) -> Mapping[str, np.ndarray]:
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


def write_bench_page(result: BenchResult, path: Path) -> None:
    """Write the page of a measurement: graph and roofline too where onnx is installed."""
    if find_spec("onnx_ir") is None:
        write_page(path, bench_page(result, None))
        return
    from toolkit.cli.pages.engine_card import engine_facts

    with open_engine(Path(result.engine)) as engine:
        write_page(path, bench_page(result, engine_facts(engine)))
