"""Build engines of the networks of `scripts/gpu_networks.py` in parallel.

    python -m scripts.gpu_builds FOLDER [--networks ...] [--batches ...] [--precisions ...]
        [--jobs 14]

Existing engines are kept. INT8 ranges (min-max) come from images that no timing uses, once per
network: tensors have the same names at every batch.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.pool import AsyncResult
from pathlib import Path

import numpy as np

from calibration.table import read_table, write_table
from scripts.gpu_networks import export, make_network, picture_size, pictures
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.ranges.measure import RangeOptions, measure_ranges

PROFILE = "h200"
NETWORKS = ("resnet50", "mobilenet_v2", "efficientnet_b0", "yolo8n", "vit_small")
BATCHES = (1, 8, 32, 128)
PRECISIONS = ("fp32", "fp16", "int8")
CALIBRATION_PICTURES = 8
CALIBRATION_SEED = 1


def engine_path(folder: Path, name: str, batch: int, precision: str) -> Path:
    """Return the path of the engine of a network."""
    return folder / f"{name}-{batch}-{precision}.engine"


def build_missing(
    folder: Path,
    networks: Sequence[str],
    batches: Sequence[int],
    precisions: Sequence[str],
    jobs: int,
    *,
    profile: str = PROFILE,
) -> None:
    """Build the missing engines of a folder in `jobs` processes; raises what a build raises.

    Networks are exported here, on the GPU, and their ONNX files stay beside the engines. `profile`
    is a name or the path of a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        running: list[AsyncResult[str]] = []
        for name in networks:
            missing = [
                (batch, precision)
                for batch in batches
                for precision in precisions
                if not engine_path(folder, name, batch, precision).exists()
            ]
            if not missing:
                continue
            network, size = make_network(name), picture_size(name)
            integers = any(precision == "int8" for _, precision in missing)
            for batch in sorted({batch for batch, _ in missing} | ({1} if integers else set())):
                export(network, batch, model_path(folder, name, batch), size)
            ranges = pool.apply_async(_find_ranges, (folder, name)) if integers else None
            print(f"{name}: exported after {time.monotonic() - began:.0f} s", flush=True)
            for precision in sorted(precisions):  # INT8 last: it waits for its ranges
                if precision == "int8" and ranges is not None:
                    ranges.get()
                running += [
                    pool.apply_async(_build, (folder, name, batch, precision, profile))
                    for batch, missing_precision in missing
                    if missing_precision == precision
                ]
        for build in running:
            print(build.get(), flush=True)
    print(f"built in {time.monotonic() - began:.0f} s")


def model_path(folder: Path, name: str, batch: int) -> Path:
    """Return the path of the ONNX file of a network."""
    return folder / f"{name}-{batch}.onnx"


def _ranges(folder: Path, name: str) -> Path:
    return folder / f"{name}.calib.json"


def _find_ranges(folder: Path, name: str) -> None:
    """Write the ranges of a network."""
    images = pictures(
        CALIBRATION_PICTURES, picture_size(name), np.random.default_rng(CALIBRATION_SEED)
    )
    imported = import_model(model_path(folder, name, 1))
    graph, _ = run_passes(imported.model)
    samples = [{"x": picture[None]} for picture in images]
    options = RangeOptions(method="minmax")
    ranges = measure_ranges(graph, samples, imported.sha256, options, lambda *_: None)
    write_table(_ranges(folder, name), ranges.table)


def _build(folder: Path, name: str, batch: int, precision: str, profile: str) -> str:
    """Write one engine; return its name, the time that it took, and what the build notes."""
    began = time.monotonic()
    path = engine_path(folder, name, batch, precision)
    table = read_table(_ranges(folder, name)) if precision == "int8" else None
    options = BuildOptions(precision=precision, table=table)
    notes = build_engine(model_path(folder, name, batch), profile, path, options).notes
    notes_text = "".join(f"\n  {note}" for note in notes)
    return f"{path.name}: {time.monotonic() - began:.0f} s{notes_text}"


def main() -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["fp16", "int8"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    build_missing(
        arguments.folder,
        arguments.networks,
        arguments.batches,
        arguments.precisions,
        arguments.jobs,
    )


if __name__ == "__main__":
    main()
