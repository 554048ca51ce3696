"""Calibrate side by side with onnxruntime.quantization: time and peak memory, in one run.

    python scripts/bench_calibration.py MODEL.onnx [--images 32 512] [--peer-images 32]

Every row runs in a separate process, for its own memory peak. Both sides get the same random images
and two threads. onnxruntime keeps every activation of every image in memory, so its rows run with
`--peer-images` only. "forward" is the plain model on the same images: the floor.

In the first table the clock starts after the imports of libraries and before the model is read, for
both sides; Tandem's child that checks models starts beside its imports, as in the command. The
second one has whole processes from start to end, `tandem calibrate` and a script that calls the
peer, on the same .npy file of `--peer-images` arrays: imports, reading and writing included, and
INT8 judged on held-out samples by Tandem alone. Processor time is changed less by a busy machine
than the clock. Each has run once before, with the bytecode of all modules written, as pip writes it
for what it installs.

The peer runs as `quantize_static` runs it: create_calibrator with the defaults of the method,
collect_data, compute_data. Its entropy calibrator has 128 bins by default, one for each level, so
that there is no threshold to search for; "entropy-2048" is the same with bins enough to search.
"""

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx

METHODS = ("minmax", "percentile", "entropy", "mse")
PEERS = {
    "minmax": ("minmax",),
    "percentile": ("percentile",),
    "entropy": ("entropy", "entropy-2048"),
}
"""The peer's calibrators beside ours; "entropy-2048" with as many bins as TensorRT's has."""
SEED = 7
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"

Times = tuple[float, float]
"""Seconds of the clock and of processors."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--images", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--peer-images", type=int, default=32)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS[:3])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--peer-on", type=Path, help=argparse.SUPPRESS)  # the peer's whole process
    arguments = parser.parse_args()
    if arguments.peer_on is not None:
        peer_on_file(arguments.model, arguments.methods[0], arguments.peer_on)
        return
    os.environ.pop(NO_BYTECODE, None)
    measure("tandem", tandem, arguments.model, "minmax", 1)  # bytecode, as pip writes it
    rows = [measure("forward", forward, arguments.model, "", arguments.peer_images)]
    for method in arguments.methods:
        for peer_method in PEERS.get(method, ()):
            rows.append(
                measure("onnxruntime", peer, arguments.model, peer_method, arguments.peer_images)
            )
        rows += [
            measure("tandem", tandem, arguments.model, method, count) for count in arguments.images
        ]
    commands = measure_commands(arguments.model, arguments.methods, arguments.peer_images)
    if arguments.json:
        print(json.dumps({"functions": rows, "commands": commands}))
        return
    heads = f"{'s':>8} {'CPU s':>8} {'peak MB':>8} {'times ours':>10}"
    print(f"{'who':12} {'method':13} {'images':>6} {heads}")
    ours = {(r["method"], r["images"]): r["seconds"] for r in rows if r["who"] == "tandem"}
    for row in rows:
        base = ours.get((str(row["method"]).partition("-")[0], row["images"]))
        ratio = f"{row['seconds'] / base:.1f}x" if row["who"] == "onnxruntime" and base else ""
        print(
            f"{row['who']:12} {row['method']:13} {row['images']:6d} {row['seconds']:8.2f} "
            f"{row['cpu_s']:8.2f} {row['peak_mb']:8.0f} {ratio:>10}"
        )
    print(f"\n{'process':18} {'method':13} {heads}")
    ours_cpu = {row["method"]: row["cpu_s"] for row in commands if row["who"] != "onnxruntime"}
    for row in commands:
        ratio = f"{row['cpu_s'] / ours_cpu[row['method']]:.1f}x"
        print(
            f"{row['who']:18} {row['method']:13} {row['seconds']:8.2f} {row['cpu_s']:8.2f} "
            f"{row['peak_mb']:8.0f} {ratio if row['who'] == 'onnxruntime' else '':>10}"
        )


def measure_commands(model: Path, methods: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Return a row for each whole process: the peer's, and the command's, by method."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data, table = Path(folder) / "arrays.npy", Path(folder) / "table.json"
        np.save(
            data, np.concatenate([array for s in samples(model, count) for array in s.values()])
        )
        for method in methods:
            commands = {
                "onnxruntime": [__file__, str(model), "--methods", method, "--peer-on", str(data)],
                "tandem calibrate": [
                    *("-m", "toolkit.cli", "calibrate", str(model), "--data", str(data)),
                    *("--method", method, "--accept-loss", "-q", "-o", str(table)),
                ],
            }
            rows += [
                {"who": who, "method": method, "images": count, **measure_process(command)}
                for who, command in commands.items()
                if who != "onnxruntime" or method in PEERS
            ]
    return rows


def measure_process(arguments: Sequence[str]) -> dict[str, float]:
    """Run Python with arguments twice; return the second wall clock, processor time, peak memory.

    Children that it waits for count.
    """
    environment = {k: v for k, v in os.environ.items() if k != NO_BYTECODE}
    for _ in range(2):
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(arguments)} ended with status {process.returncode}")
    return {
        "seconds": round(time.perf_counter() - start, 3),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_mb": round(usage.ru_maxrss / 1024, 1),
    }


def measure(
    who: str, work: Callable[[Path, str, int], Times], model: Path, method: str, images: int
) -> dict[str, Any]:
    """Run `work` in a fresh process and return its seconds, clock and processor, and its peak
    resident memory."""
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_child, args=(send, work, model, method, images)
    )
    process.start()
    send.close()
    try:
        (seconds, cpu_s), peak_mb = receive.recv()
    except EOFError as err:
        raise SystemExit(f"{who} {method} with {images} images ended without a result") from err
    process.join()
    return {
        "who": who,
        "method": method,
        "images": images,
        "seconds": round(seconds, 3),
        "cpu_s": round(cpu_s, 3),
        "peak_mb": round(peak_mb, 1),
    }


def _child(
    send: Connection,
    work: Callable[[Path, str, int], Times],
    model: Path,
    method: str,
    images: int,
) -> None:
    times = work(model, method, images)
    send.send((times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def now() -> Times:
    """The clocks of this process."""
    return time.perf_counter(), time.process_time()


def since(start: Times) -> Times:
    """What has passed on both clocks."""
    wall, cpu = now()
    return wall - start[0], cpu - start[1]


def input_of(model: Path) -> tuple[str, tuple[int, ...]]:
    """The name and the shape of the first input."""
    value = onnx.load(model, load_external_data=False).graph.input[0]
    return value.name, tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def samples(model: Path, count: int) -> Iterator[dict[str, np.ndarray]]:
    """The same random images for all subjects, generated one at a time."""
    name, shape = input_of(model)
    for number in range(count):
        rng = np.random.default_rng([SEED, number])
        yield {name: rng.standard_normal(shape, dtype=np.float32)}


def forward(model: Path, method: str, count: int) -> Times:
    """The plain model in onnxruntime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    start = now()
    for sample in samples(model, count):
        session.run(None, sample)
    return since(start)


def peer(model: Path, method: str, count: int) -> Times:
    """onnxruntime.quantization's calibrators, as its documentation uses them."""
    import onnxruntime.quantization  # noqa: F401  (imported before the clock starts)

    start = now()
    calibrate_with_peer(model, method, samples(model, count))
    return since(start)


def peer_on_file(model: Path, method: str, data: Path) -> None:
    """The same on a file of arrays."""
    name, _ = input_of(model)
    arrays = np.load(data, mmap_mode="r")
    calibrate_with_peer(model, method, ({name: np.array(array[None])} for array in arrays))


def calibrate_with_peer(model: Path, method: str, data: Iterator[dict[str, np.ndarray]]) -> None:
    """Collect and compute ranges as `quantize_static` does."""
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod
    from onnxruntime.quantization.calibrate import create_calibrator

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(data, None)

    kinds = {
        "minmax": CalibrationMethod.MinMax,
        "percentile": CalibrationMethod.Percentile,
        "entropy": CalibrationMethod.Entropy,
    }
    name, _, bins = method.partition("-")
    with tempfile.TemporaryDirectory() as folder:
        calibrator = create_calibrator(
            model,
            augmented_model_path=str(Path(folder) / "augmented.onnx"),
            calibrate_method=kinds[name],
            extra_options={"num_bins": int(bins)} if bins else {},
        )
        calibrator.collect_data(Reader())
        calibrator.compute_data()


def tandem(model: Path, method: str, count: int) -> Times:
    """Our calibration, with the model's import and passes."""
    import onnxruntime  # noqa: F401  (imported before the clock starts)

    from toolkit.graph.native import start as start_child
    from toolkit.late_imports import import_late

    import_late()  # both as the command does
    start_child()
    from calibration.dataset import InputSpec, iterable_dataset
    from calibration.threshold import amax_by_method
    from toolkit.graph.passes import run_passes
    from toolkit.importers.onnx import import_model
    from toolkit.quantize.observe import observe_graph
    from toolkit.quantize.quantize import calibrated_tensors

    start = now()
    graph, _ = run_passes(import_model(model).model)
    data = iterable_dataset(samples(model, count), [InputSpec(*input_of(model))], None)
    observation = observe_graph(graph, data, calibrated_tensors(graph))
    amax_by_method(observation.histograms, [method])
    return since(start)


if __name__ == "__main__":
    main()
