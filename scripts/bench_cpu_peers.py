"""Compares engines on this CPU with runtimes of others: `python -m scripts.bench_cpu_peers`.

Each model is built as an engine, in FP32 and in INT8. The others get the same network as ONNX (the
engine's own, with its Q/DQ), in processes of their own that take turns: onnxruntime as it comes,
and OpenVINO and TVM where they are installed:

    python -m venv openvino && openvino/bin/pip install -e '.[openvino]'
    python -m venv tvm && tvm/bin/pip install apache-tvm onnx numpy
    python -m scripts.bench_cpu_peers --openvino openvino/bin/python --tvm tvm/bin/python

The row tandem-openvino is the engine in a session with the executor of that name, and runs in
OpenVINO's environment. CPU milliseconds are those of all threads. A runtime that does not start is
named with its reason.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from subprocess import PIPE

import numpy as np
import onnx_ir as ir

from device.engine.file import open_engine
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.export.joined_network import joined_model

ROOT = Path(__file__).parents[1]
MODELS = (ROOT / "configs" / "models" / "robot-objects.onnx",)
ROUNDS = 3

# What each runtime does: `run(feeds)` returns the outputs. `path` is its file, `threads` the most.
LOADERS = {
    "tandem": """
from device.session import open_session
session = open_session(path, threads=threads)
run = lambda feeds: list(session.infer(feeds).values())
import onnxruntime
version = "onnxruntime " + onnxruntime.__version__
""",
    "tandem-openvino": """
from device.session import open_session
session = open_session(path, threads=threads, executor="openvino")
run = lambda feeds: list(session.infer(feeds).values())
version = session.reports[0].reason.partition("(")[2].partition(",")[0]
""",
    "onnxruntime": """
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = threads
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
run = lambda feeds: session.run(None, feeds)
version = onnxruntime.__version__
""",
    "openvino": """
import openvino
core = openvino.Core()
settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32"}
compiled = core.compile_model(core.read_model(path), "CPU", settings)
request = compiled.create_infer_request()
run = lambda feeds: list(request.infer(feeds).values())
version = openvino.__version__
""",
    "tvm": """
import os
os.environ["TVM_NUM_THREADS"] = str(threads)
import onnx, tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx
module = tvm.relax.get_pipeline("zero")(from_onnx(onnx.load(path)))
library = tvm.compile(module, target=tvm.target.Target({"kind": "llvm", "num-cores": threads}))
machine = relax.VirtualMachine(library, tvm.cpu())
def run(feeds):
    result = machine["main"](*[tvm.runtime.tensor(one) for one in feeds.values()])
    return [one.numpy() for one in ([result] if hasattr(result, "numpy") else result)]
version = tvm.__version__
""",
}
CHILD = """
import json, sys, time
import numpy as np
path, threads, inputs, outputs, seconds = json.loads(sys.argv[1])
feeds = dict(np.load(inputs))
{loader}
results = run(feeds)
np.savez(outputs, *results)
run(feeds)
print(json.dumps(version), flush=True)
for line in sys.stdin:
    times, cpu, begin = [], time.process_time(), time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times) < 3:
        start = time.perf_counter()
        run(feeds)
        times.append(time.perf_counter() - start)
    print(json.dumps([sorted(times)[len(times) // 2] * 1e3,
                      (time.process_time() - cpu) / len(times) * 1e3]), flush=True)
"""


@dataclass(frozen=True)
class Row:
    """What one runtime took for one model; `apart`: the largest difference of an output from
    onnxruntime's, as a share of its range. `problem`: why there are no figures."""

    model: str
    precision: str
    runtime: str
    version: str = ""
    p50_ms: float = 0.0
    cpu_ms: float = 0.0
    apart: float = 0.0
    problem: str = ""


def compare(
    model: Path, precision: str, pythons: dict[str, str], threads: int, seconds: float
) -> list[Row]:
    """Build an engine and measure it beside the others."""
    chance = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix="cpu-peers-") as name:
        folder = Path(name)
        int8 = precision == "int8"
        options = BuildOptions(precision=precision, dummy_ranges=int8, accept_loss=True)
        engine = folder / "model.engine"
        build_engine(model, "laptop", engine, options)
        with open_engine(engine) as opened:
            tensors = {one.name: one for one in opened.manifest.tensors}
            ir.save(joined_model(opened), folder / "model.onnx")
            feeds = {
                one: chance.random([int(size) for size in tensors[one].shape]).astype(  # type: ignore[arg-type]
                    tensors[one].dtype
                )
                for one in opened.manifest.inputs
            }
        np.savez(folder / "inputs.npz", **feeds)
        return _measure(folder, (model.stem, precision), pythons, threads, seconds)


def _measure(
    folder: Path, names: tuple[str, str], pythons: dict[str, str], threads: int, seconds: float
) -> list[Row]:
    children, rows = {}, []
    for runtime, python in pythons.items():
        is_ours = runtime.startswith("tandem")
        path = folder / ("model.engine" if is_ours else "model.onnx")
        words = (path, threads, folder / "inputs.npz", folder / f"{runtime}.npz", seconds)
        code, given = CHILD.format(loader=LOADERS[runtime]), json.dumps(list(map(_plain, words)))
        child = subprocess.Popen(
            [python, "-c", code, given], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT
        )
        assert child.stdout is not None
        first = child.stdout.readline()
        if first:
            children[runtime] = (child, json.loads(first), [])
        else:
            problem = child.communicate()[1].strip().splitlines()[-1:] or ["it said nothing"]
            rows.append(Row(*names, runtime, problem=problem[0][:200]))
    for _ in range(ROUNDS):
        for child, _, figures in children.values():
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            figures.append(json.loads(child.stdout.readline()))
    for runtime, (child, version, figures) in children.items():
        child.communicate()
        p50_ms, cpu_ms = (median(one[place] for one in figures) for place in (0, 1))
        apart = _apart(folder / f"{runtime}.npz", folder / "onnxruntime.npz")
        rows.append(Row(*names, runtime, version, p50_ms, cpu_ms, apart))
    return rows


def _plain(word: object) -> object:
    return str(word) if isinstance(word, Path) else word


def _apart(path: Path, reference: Path) -> float:
    ours, theirs = np.load(path), np.load(reference)
    return max(
        float(np.abs(ours[name] - theirs[name]).max() / (np.ptp(theirs[name]) or 1.0))
        for name in theirs.files
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Compare engines on this CPU with other runtimes.")
    parser.add_argument("models", nargs="*", type=Path, default=MODELS)
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--tvm", metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    pythons = {"tandem": sys.executable, "onnxruntime": sys.executable}
    if options.openvino:
        pythons |= {"tandem-openvino": options.openvino, "openvino": options.openvino}
    pythons |= {"tvm": options.tvm} if options.tvm else {}
    rows = [
        row
        for model in options.models
        for precision in ("fp32", "int8")
        for row in compare(model, precision, pythons, options.threads, options.seconds)
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    names = f"{'model':16} {'':5} {'runtime':15} {'version':22}"
    print(f"{names} {'p50 ms':>8} {'CPU ms':>8} {'apart':>8}")
    for row in rows:
        figures = row.problem or f"{row.p50_ms:8.2f} {row.cpu_ms:8.2f} {row.apart:8.1e}"
        print(f"{row.model:16} {row.precision:5} {row.runtime:15} {row.version[:22]:22} {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
