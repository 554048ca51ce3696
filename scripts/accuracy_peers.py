"""INT8 of Tandem beside onnxruntime, NNCF and AIMET: same samples, same judge, several seeds.

    python scripts/accuracy_peers.py mtcnn-rnet --peer nncf=NNCF/bin/python

Models and samples are those of `scripts/accuracy_models.py`; every seed draws others. Each peer
gets the graph as Tandem imports it and the samples for the ranges, and writes a Q/DQ model, which
onnxruntime runs on the samples that judge. NNCF (preset performance) and AIMET (INT8 both) run in
environments of their own, by the Python that `--peer` names; onnxruntime's quantiser with min-max,
in the form of TensorRT. Tandem is `auto`, which keeps nodes in floating point; peers keep none but
by their own rules. Figures are the SQNR of the worst output in dB.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

sys.path.insert(0, str(Path(__file__).parents[1]))

from device.runtime.exact_products import exact_session
from scripts.accuracy_models import (
    SCENES,
    Sample,
    Subject,
    _only,
    _run,
    draw,
    measure,
    read_pictures,
    subjects,
)
from scripts.compare_int8 import PEER_FORMS, SYMMETRIC
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.loss.judge import judge
from toolkit.quantize.loss.parts import split_outputs
from toolkit.quantize.trials.trial import TrialModel

TANDEM, ORT = "Tandem", "onnxruntime"
_READ = """
import sys, numpy as np, onnx
model, data = onnx.load(sys.argv[1]), np.load(sys.argv[2])
names = [value.name for value in model.graph.input]
count = len(data[names[0]])
samples = [{name: data[name][i] for name in names} for i in range(count)]
"""
PEERS: Mapping[str, str] = {
    "nncf": _READ
    + """
import nncf
performance = nncf.QuantizationPreset.PERFORMANCE
made = nncf.quantize(model, nncf.Dataset(samples), preset=performance, subset_size=count)
onnx.save(made, sys.argv[3])
""",
    "aimet": _READ
    + """
from aimet_onnx.quantsim import QuantizationSimModel
providers = ["CPUExecutionProvider"]
sim = QuantizationSimModel(
    model, param_type="int8", activation_type="int8", dummy_input=samples[0], providers=providers
)
sim.compute_encodings(samples)
onnx.save(sim.to_onnx_qdq(), sys.argv[3])
""",
}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--seeds", type=int, nargs="*", default=[20, 21, 22])
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--judges", type=int, default=8)
    arguments = parser.parse_args()
    pythons = dict(peer.split("=", 1) for peer in arguments.peer)
    if unknown := sorted(pythons.keys() - PEERS.keys()):
        sys.exit(f"--peer {unknown[0]} is none of {', '.join(PEERS)}")
    pictures = read_pictures(SCENES)
    names = (TANDEM, ORT, *pythons)
    print(f"| model | seed | {' | '.join(names)} |\n|---|--:|{'--:|' * len(names)}", flush=True)
    for subject in subjects(arguments.models):
        for seed in arguments.seeds:
            count = arguments.samples + arguments.judges
            samples = draw(subject.inputs, pictures, count, seed)
            parts = samples[: arguments.samples], samples[arguments.samples :]
            figures = compare(subject, pythons, *parts)
            cells = (text if isinstance(text, str) else f"{text:.1f}" for text in figures)
            print(f"| {subject.name} | {seed} | {' | '.join(cells)} |", flush=True)


def compare(
    subject: Subject, pythons: Mapping[str, str], calibration: list[Sample], judges: list[Sample]
) -> list[float | str]:
    """Return the SQNR in dB of Tandem, onnxruntime and the peers, or why there is none."""
    imported = import_model(subject.path, shapes={item.name: item.shape for item in subject.inputs})
    graph, _ = run_passes(imported.model)
    plain = TrialModel(graph)
    feeds = {str(value.name) for value in graph.graph.inputs}
    fed, unseen = ([_only(sample, feeds) for sample in part] for part in (calibration, judges))
    exact = [_run(plain, {}, sample, frozenset(plain.nodes)) for sample in unseen]
    (row,) = measure(subject, ["auto"], calibration, judges)
    figures: list[float | str] = [row.error or row.sqnr_db]
    with tempfile.TemporaryDirectory() as folder:
        model, data = Path(folder, "model.onnx"), Path(folder, "data.npz")
        onnx.save(ir.to_proto(graph), model)
        arrays = {name: np.stack([sample[name] for sample in fed]) for name in sorted(feeds)}
        np.savez(data, **arrays)  # type: ignore[arg-type]  # NumPy's stubs take no mapping
        for name in (ORT, *pythons):
            written = Path(folder, f"{name}.onnx")
            try:
                if name == ORT:
                    _quantize_static(model, fed, written)
                else:
                    command = [pythons[name], "-c", PEERS[name], *map(str, (model, data, written))]
                    subprocess.run(command, check=True, capture_output=True, text=True)
                session = exact_session(str(written), ort.SessionOptions())
            except subprocess.CalledProcessError as err:
                figures.append(err.stderr.strip().splitlines()[-1][:60])
                continue
            outputs = [output.name for output in session.get_outputs()]
            results = (dict(zip(outputs, session.run(None, s), strict=True)) for s in unseen)
            actual = [split_outputs(plain.parts, one) for one in results]
            losses = judge(plain.parts, exact, actual, basis="held out").losses
            figures.append(min(loss.value for loss in losses if loss.metric.unit == "dB"))
    return figures


def _quantize_static(model: Path, samples: Sequence[Sample], written: Path) -> None:
    """Write what onnxruntime's quantiser makes, by min-max in the form of TensorRT."""
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
        def __init__(self) -> None:
            self._samples = iter(samples)

        def get_next(self) -> Sample | None:
            return next(self._samples, None)

    quantize_static(
        model,
        written,
        Reader(),
        calibrate_method=CalibrationMethod.MinMax,
        **PEER_FORMS[SYMMETRIC],
    )


if __name__ == "__main__":
    main()
