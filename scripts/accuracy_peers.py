"""INT8 of Tandem beside onnxruntime, NNCF and AIMET: same samples, same judge, several seeds.

    python scripts/accuracy_peers.py mtcnn-rnet --peer nncf=NNCF/bin/python

Models and samples are those of `scripts/accuracy_models.py`; every seed draws others. Each peer
gets the graph as Tandem imports it and the samples for the ranges, and writes a Q/DQ model, which
onnxruntime runs on the samples that judge. NNCF (preset performance) and AIMET (INT8 both) run in
environments of their own, by the Python that `--peer` names. As they are, they give scales to the
channels of activations before depthwise layers (NNCF), unsigned integers (NNCF) and zero points
(AIMET), which no engine of TensorRT takes. `nncf-trt` and `aimet-trt` are told its form: signed,
symmetric, one scale for each activation. So is onnxruntime's quantiser, with min-max. Tandem is
`auto`, which keeps nodes in floating point; peers are told to keep the same, so that the share of
the multiplications in floating point is that of Tandem, or more by rules of their own. Figures are
the SQNR of the worst output in dB.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

sys.path.insert(0, str(Path(__file__).parents[1]))

from device.errors import TandemError
from device.runtime.exact_products import exact_session
from scripts.accuracy_models import (
    SCENES,
    Sample,
    Subject,
    _only,
    _run,
    _silent,
    draw,
    read_pictures,
    subjects,
)
from scripts.compare_int8 import PEER_FORMS, SYMMETRIC
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.loss.judge import judge
from toolkit.quantize.loss.parts import split_outputs
from toolkit.quantize.ranges.measure import RangeOptions, Ranges, measure_ranges
from toolkit.quantize.trials.trial import TrialModel

TANDEM, ORT = "Tandem", "onnxruntime"
_READ = """
import json, sys, numpy as np, onnx
model, data, floats = onnx.load(sys.argv[1]), np.load(sys.argv[2]), json.loads(sys.argv[4])
names = [value.name for value in model.graph.input]
count = len(data[names[0]])
samples = [{name: data[name][i] for name in names} for i in range(count)]
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A quantiser in an environment of its own.

    `program` reads model.onnx, samples.npz and the nodes that stay in floating point (JSON), and
    writes a Q/DQ model.
    """

    package: str
    module: str
    program: str


_NNCF = (
    _READ
    + """
import nncf
from nncf.common.hardware import qspaces
from nncf.quantization import advanced_parameters as advanced
performance = nncf.QuantizationPreset.PERFORMANCE
options = advanced.AdvancedQuantizationParameters()
if TRT:
    for space in (qspaces.q8_a, qspaces.q8_a_ch, qspaces.q8_a_sym):
        object.__setattr__(space, "signedness_to_force", True)
    options.activations_quantization_params = advanced.QuantizationParameters(per_channel=False)
quantized = nncf.quantize(
    model,
    nncf.Dataset(samples),
    preset=performance,
    subset_size=count,
    ignored_scope=nncf.IgnoredScope(names=floats, validate=False),
    advanced_parameters=options,
)
onnx.save(quantized, sys.argv[3])
"""
)
_AIMET = (
    _READ
    + """
from aimet_onnx.quantsim import QuantizationSimModel
providers = ["CPUExecutionProvider"]
sim = QuantizationSimModel(
    model, param_type="int8", activation_type="int8", dummy_input=samples[0], providers=providers
)
operations = sim.connected_graph.ordered_ops
int8 = [operation for operation in operations if operation.name not in floats]
read = {tensor.name for operation in int8 for tensor in operation.inputs}
for operation in operations:
    if operation.name in floats:
        for tensor in (*operation.inputs, *operation.outputs):
            if tensor.name in sim.qc_quantize_op_dict and tensor.name not in read:
                sim.qc_quantize_op_dict[tensor.name].enabled = False
for quantizer in sim.qc_quantize_op_dict.values():
    if TRT and quantizer.enabled:
        quantizer.use_symmetric_encodings = True
        quantizer.use_strict_symmetric = quantizer.use_unsigned_symmetric = False
sim.compute_encodings(samples)
onnx.save(sim.to_onnx_qdq(), sys.argv[3])
"""
)
PEERS: Mapping[str, Peer] = {
    f"{name}{suffix}": Peer(package, module, f"TRT = {is_trt}\n{program}")
    for name, package, module, program in (
        ("nncf", "nncf==3.4.0", "nncf", _NNCF),
        ("aimet", "aimet-onnx==2.42.0", "aimet_onnx", _AIMET),
    )
    for suffix, is_trt in (("", False), ("-trt", True))
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
    _check_peers(pythons)
    pictures = read_pictures(SCENES)
    names = ("in float", TANDEM, ORT, *pythons)
    print(f"| model | seed | {' | '.join(names)} |\n|---|--:|{'--:|' * len(names)}", flush=True)
    for subject in subjects(arguments.models):
        for seed in arguments.seeds:
            count = arguments.samples + arguments.judges
            samples = draw(subject.inputs, pictures, count, seed)
            parts = samples[: arguments.samples], samples[arguments.samples :]
            try:
                row = compare(subject, pythons, *parts)
            except TandemError as err:
                print(f"| {subject.name} | {seed} | {err} |{' |' * len(names[1:])}", flush=True)
                continue
            cells = (text if isinstance(text, str) else f"{text:.1f}" for text in row.figures)
            share = f"{row.float_share:.1%}"
            print(f"| {subject.name} | {seed} | {share} | {' | '.join(cells)} |", flush=True)


def _check_peers(pythons: Mapping[str, str]) -> None:
    """End with a sentence if a peer is unknown or its Python does not have it."""
    for name, python in pythons.items():
        if name not in PEERS:
            sys.exit(f"--peer {name} is none of {', '.join(PEERS)}")
        peer = PEERS[name]
        try:
            subprocess.run([python, "-c", f"import {peer.module}"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            sys.exit(
                f"--peer {name}: {python} cannot import {peer.module}. Make an environment for it: "
                f"`python -m venv {name} && {name}/bin/pip install {peer.package}`, and give "
                f"`--peer {name}={name}/bin/python`."
            )


@dataclass(frozen=True, slots=True)
class Compared:
    """`figures`: the SQNR in dB of Tandem, onnxruntime and the peers, or why there is none.

    `float_share`: of the multiplications, in floating point for all of them.
    """

    figures: tuple[float | str, ...]
    float_share: float


def compare(
    subject: Subject, pythons: Mapping[str, str], calibration: list[Sample], judges: list[Sample]
) -> Compared:
    """Quantise a model by Tandem, onnxruntime and the peers, and judge each.

    Raises TandemError: Tandem cannot calibrate it.
    """
    imported = import_model(subject.path, shapes={item.name: item.shape for item in subject.inputs})
    graph, _ = run_passes(imported.model)
    plain = TrialModel(graph)
    feeds = {str(value.name) for value in graph.graph.inputs}
    fed, unseen = ([_only(sample, feeds) for sample in part] for part in (calibration, judges))
    exact = [_run(plain, {}, sample, frozenset(plain.nodes)) for sample in unseen]
    ranges = measure_ranges(graph, fed, imported.sha256, RangeOptions("auto"), _silent)
    figures: list[float | str] = [_sqnr_db(plain, exact, _results(ranges, unseen))]
    with tempfile.TemporaryDirectory() as folder:
        model, data = Path(folder, "model.onnx"), Path(folder, "data.npz")
        onnx.save(ir.to_proto(graph), model)
        arrays = {name: np.stack([sample[name] for sample in fed]) for name in sorted(feeds)}
        np.savez(data, **arrays)  # type: ignore[arg-type]  # NumPy's stubs take no mapping
        floats = sorted(ranges.fit.keep_float)
        for name in (ORT, *pythons):
            written = Path(folder, f"{name}.onnx")
            try:
                if name == ORT:
                    _quantize_static(model, fed, floats, written)
                else:
                    paths = map(str, (model, data, written))
                    command = [pythons[name], "-c", PEERS[name].program, *paths, json.dumps(floats)]
                    subprocess.run(command, check=True, capture_output=True, text=True)
                session = exact_session(str(written), ort.SessionOptions())
            except subprocess.CalledProcessError as err:
                figures.append(err.stderr.strip().splitlines()[-1][:60])
                continue
            outputs = [output.name for output in session.get_outputs()]
            results = (dict(zip(outputs, session.run(None, s), strict=True)) for s in unseen)
            actual = [split_outputs(plain.parts, one) for one in results]
            figures.append(_sqnr_db(plain, exact, actual))
    return Compared(
        tuple(figures), 0.0 if ranges.float_nodes is None else ranges.float_nodes.float_share
    )


def _results(ranges: Ranges, samples: Sequence[Sample]) -> list[Sample]:
    fit = ranges.fit
    return [_run(fit.trial, fit.ranges, sample, fit.keep_float) for sample in samples]


def _sqnr_db(plain: TrialModel, exact: Sequence[Sample], actual: Sequence[Sample]) -> float:
    """Return the SQNR of the worst output in dB."""
    losses = judge(plain.parts, exact, actual, basis="held out").losses
    return min(loss.value for loss in losses if loss.metric.unit == "dB")


def _quantize_static(
    model: Path, samples: Sequence[Sample], floats: Collection[str], written: Path
) -> None:
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
        nodes_to_exclude=list(floats),
        calibrate_method=CalibrationMethod.MinMax,
        **PEER_FORMS[SYMMETRIC],
    )


if __name__ == "__main__":
    main()
