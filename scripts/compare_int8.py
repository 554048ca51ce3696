"""Compare INT8 with FP32 at the outputs: Tandem beside onnxruntime's static quantisation.

    python scripts/compare_int8.py MODEL.onnx... [--pictures 32] [--draw 0] [--peer-entropy]

Every subject gets the same `--pictures` calibration pictures (`configs/scenes/calibration`) and is
judged on as many others (`configs/scenes/heldout`, over photographs of which calibration shows
none). Both go through `pipelines/stages/preprocess.py` once, and both sides get these arrays.
Figures of one output, over all unseen pictures taken as one vector:

    cosine = sum y y' / sqrt(sum y^2 sum y'^2)      SQNR = 10 log10(sum y^2 / sum (y' - y)^2) dB

y is the plain model in onnxruntime, y' what a user runs: of Tandem the engine for `laptop` through
`device.runtime.session`, of onnxruntime its Q/DQ model in onnxruntime. "INT8 products" counts the
nodes Conv, Gemm and MatMul whose two operands are INT8. `auto` of Tandem names the corrections that
it kept. `--draw` other than 0 takes other pictures, by chance. onnxruntime runs with
min-max, and with `--peer-entropy` by entropy too, which takes minutes for each network and finds
the same ranges (docs/accuracy_onnxruntime.md); each in three forms:

    symmetric    INT8 with zero point 0, weights per channel: the form that TensorRT takes
    asymmetric   UINT8 with any zero point, weights per channel: the most accurate it can do
    default      what `quantize_static` does if asked for nothing: INT8 with any zero point,
                 weights per tensor

Zero points other than 0 are for onnxruntime alone: TensorRT refuses them, and Tandem writes none.
"""

import argparse
import contextlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

import configs
from device.engine.file import open_engine
from device.engine.manifest import Portable
from device.runtime.exact_products import exact_session
from device.runtime.session import open_session
from pipelines.config import PreprocessConfig, load_model
from pipelines.stages.preprocess import preprocess
from pipelines.vision import cv2
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.quantize.ranges.measure import RangeOptions

Array = NDArray[Any]
Outputs = dict[str, Array]

SCENES = configs.ROOT / "scenes"
# ImageNet's, as the networks of torchvision and timm expect them.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PRODUCTS = ("Conv", "Gemm", "MatMul")
# Differences below this are equal at the precision that the table shows.
SAME_DB = 0.05

TANDEM, PEER = "Tandem", "onnxruntime"
SYMMETRIC, ASYMMETRIC, DEFAULT = "symmetric", "asymmetric", "default"


@dataclass(frozen=True, slots=True)
class Subject:
    """Who quantizes, by which method, in which form."""

    who: str
    method: str
    form: str


SUBJECTS: tuple[Subject, ...] = (
    Subject(TANDEM, "entropy", SYMMETRIC),
    Subject(TANDEM, "minmax", SYMMETRIC),
    Subject(TANDEM, "auto", SYMMETRIC),
    Subject(PEER, "entropy", SYMMETRIC),
    Subject(PEER, "minmax", SYMMETRIC),
    Subject(PEER, "entropy", ASYMMETRIC),
    Subject(PEER, "minmax", ASYMMETRIC),
    Subject(PEER, "entropy", DEFAULT),
    Subject(PEER, "minmax", DEFAULT),
)

PEER_METHODS = {"entropy": CalibrationMethod.Entropy, "minmax": CalibrationMethod.MinMax}
# Options of `quantize_static` besides the method.
PEER_FORMS: Mapping[str, dict[str, Any]] = {
    SYMMETRIC: {
        "per_channel": True,
        "activation_type": QuantType.QInt8,
        "weight_type": QuantType.QInt8,
        "extra_options": {"ActivationSymmetric": True, "WeightSymmetric": True},
    },
    ASYMMETRIC: {
        "per_channel": True,
        "activation_type": QuantType.QUInt8,
        "weight_type": QuantType.QInt8,
    },
    DEFAULT: {},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One output of one model by one subject.

    `corrections`: those that `auto` kept. `int8`, `products`: nodes, see above.
    """

    model: str
    output: str
    who: str
    method: str
    form: str
    cosine: float
    sqnr_db: float
    int8: int
    products: int
    seconds: float
    corrections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quantized:
    """Outputs of a subject on the unseen inputs, the graphs that it ran, and `Row.corrections`."""

    outputs: list[Outputs]
    graphs: list[onnx.GraphProto]
    corrections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Material:
    """A model with the inputs of all subjects, and the FP32 outputs on the unseen inputs."""

    name: str
    path: Path
    input: str
    calibration: tuple[Array, ...]
    unseen: tuple[Array, ...]
    exact: tuple[Outputs, ...]


def main() -> None:
    """Print the table and the verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models",
        type=Path,
        nargs="+",
        help="ONNX with one input [1,3,H,W] normalised as ImageNet's are, or a model's TOML file",
    )
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--draw", type=int, default=0, help="0: evenly spread; else a seed")
    parser.add_argument("--peer-entropy", action="store_true")
    parser.add_argument("--json", action="store_true", help="print rows and verdicts as JSON")
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)  # the peer warns of intended options
    subjects = [
        subject
        for subject in SUBJECTS
        if arguments.peer_entropy or (subject.who, subject.method) != (PEER, "entropy")
    ]
    rows = [
        row
        for path in arguments.models
        for row in _rows(_material(path, arguments.pictures, arguments.draw), subjects)
    ]
    verdicts = judge(rows)
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "verdicts": verdicts}))
        return
    print("\n".join((*table(rows), "", *verdicts)))


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [
        "| model | output | who | method | form | cosine | SQNR dB | int8 products |",
        "|---|---|---|---|---|--:|--:|--:|",
    ]
    return lines + [
        f"| {r.model} | {r.output} | {r.who} | {' + '.join((r.method, *r.corrections))} | {r.form} "
        f"| {r.cosine:.5f} "
        f"| {r.sqnr_db:.1f} | {r.int8} of {r.products} |"
        for r in rows
    ]


def judge(rows: Sequence[Row]) -> list[str]:
    """List where Tandem loses: by method in the symmetric form, then `auto` against all."""
    contests = (
        *(
            (f"{method} against onnxruntime's {method}, symmetric", method, (method,), (SYMMETRIC,))
            for method in PEER_METHODS
        ),
        ("auto against the best symmetric of onnxruntime", "auto", PEER_METHODS, (SYMMETRIC,)),
        ("auto against the best of onnxruntime in any form", "auto", PEER_METHODS, PEER_FORMS),
    )
    return [
        f"{title}: {_losses(rows, method, tuple(methods), tuple(forms))}"
        for title, method, methods, forms in contests
    ]


def _losses(
    rows: Sequence[Row], method: str, peer_methods: Sequence[str], forms: Sequence[str]
) -> str:
    lost = []
    ours = [row for row in rows if row.who == TANDEM and row.method == method]
    for our_row in ours:
        peers = [
            row
            for row in rows
            if (row.model, row.output, row.who) == (our_row.model, our_row.output, PEER)
            and row.method in peer_methods
            and row.form in forms
        ]
        if not peers:
            return "not run"
        best = max(peers, key=lambda row: row.sqnr_db)
        if best.sqnr_db - our_row.sqnr_db > SAME_DB:
            lost.append(
                f"{our_row.model} {our_row.output} by {best.sqnr_db - our_row.sqnr_db:.1f} dB "
                f"to {best.method} {best.form}"
            )
    return f"loses on {'; '.join(lost)}" if lost else f"loses on none of {len(ours)}"


def _rows(material: Material, subjects: Sequence[Subject]) -> Iterator[Row]:
    """All subjects on one model, with progress on standard error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for subject in subjects:
            start = time.perf_counter()
            make = _tandem if subject.who == TANDEM else _peer
            with contextlib.redirect_stdout(sys.stderr):  # the peer prints its progress
                result = make(material, subject, folder)
            seconds = time.perf_counter() - start
            int8, products = int8_products(result.graphs)
            for output in material.exact[0]:
                cosine, sqnr_db = closeness(
                    [outputs[output] for outputs in material.exact],
                    [outputs[output] for outputs in result.outputs],
                )
                yield Row(
                    material.name,
                    output,
                    subject.who,
                    subject.method,
                    subject.form,
                    cosine,
                    sqnr_db,
                    int8,
                    products,
                    round(seconds, 1),
                    result.corrections,
                )
                print(
                    f"{material.name} {output}: {subject.who} {subject.method} {subject.form} "
                    f"{sqnr_db:.1f} dB, {seconds:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )


def closeness(exact: Sequence[Array], outputs: Sequence[Array]) -> tuple[float, float]:
    """Cosine, and SQNR in dB, of all arrays taken as one vector."""
    reference = np.concatenate([array.reshape(-1) for array in exact]).astype(np.float64)
    actual = np.concatenate([array.reshape(-1) for array in outputs]).astype(np.float64)
    cosine = float(reference @ actual / np.sqrt((reference @ reference) * (actual @ actual)))
    noise = actual - reference
    with np.errstate(divide="ignore"):
        return cosine, float(10 * np.log10((reference @ reference) / (noise @ noise)))


def int8_products(graphs: Sequence[onnx.GraphProto]) -> tuple[int, int]:
    """Return (GEMMs and convolutions whose two operands are dequantized, all of them)."""
    int8 = products = 0
    for graph in graphs:
        producers = {output: node.op_type for node in graph.node for output in node.output}
        for node in graph.node:
            if node.op_type in PRODUCTS:
                products += 1
                int8 += all(producers.get(name) == "DequantizeLinear" for name in node.input[:2])
    return int8, products


def _material(path: Path, pictures: int, draw: int) -> Material:
    model_file, config = _model(path)
    session = _session(model_file)
    name = session.get_inputs()[0].name
    calibration = _inputs(SCENES / "calibration", config, pictures, draw)
    unseen = _inputs(SCENES / "heldout", config, pictures, draw)
    exact = tuple(_run(session, {name: image}) for image in unseen)
    return Material(path.stem, model_file, name, calibration, unseen, exact)


def _model(path: Path) -> tuple[Path, PreprocessConfig]:
    """The ONNX file, and how pictures become its input."""
    if path.suffix == ".toml":
        model = load_model(path)
        return path.parent / model.file, model.preprocess
    shape = _session(path).get_inputs()[0].shape
    height, width = shape[2:]
    return path, PreprocessConfig(width=width, height=height, mean=MEAN, std=STD)


def _inputs(folder: Path, config: PreprocessConfig, count: int, draw: int) -> tuple[Array, ...]:
    """`count` pictures of a folder as network inputs: spread evenly over it, or by chance."""
    files = sorted(folder.glob("*.jpg"))
    if count > len(files):
        sys.exit(f"{folder} holds {len(files)} pictures, not {count}: ask for fewer")
    chosen = [files[number * len(files) // count] for number in range(count)]
    if draw:
        chosen = [files[number] for number in np.random.default_rng(draw).permutation(len(files))]
    return tuple(preprocess(cv2.imread(str(file)), config)[0].copy() for file in chosen[:count])


def _tandem(material: Material, subject: Subject, folder: Path) -> Quantized:
    """Build the engine and run it."""
    path = folder / "tandem.engine"
    samples = [{material.input: image} for image in material.calibration]
    ranges = RangeOptions(method=subject.method)
    built = build_engine(material.path, "laptop", path, BuildOptions(data=samples, ranges=ranges))
    with open_session(path) as session:
        outputs = [session.infer({material.input: image}) for image in material.unseen]
    with open_engine(path) as engine:
        models = [
            onnx.load_from_string(engine.entry(implementation.model).tobytes())
            for segment in engine.manifest.segments
            for implementation in segment.implementations
            if isinstance(implementation, Portable)
        ]
    corrections = built.calibration.corrections if built.calibration is not None else ()
    applied = tuple(outcome.name for outcome in corrections if outcome.applied)
    return Quantized(outputs, [model.graph for model in models], applied)


def _peer(material: Material, subject: Subject, folder: Path) -> Quantized:
    """Pre-process and quantize as onnxruntime's documentation says, and run the result."""
    prepared, quantized = folder / "prepared.onnx", folder / "quantized.onnx"
    if not prepared.exists():
        quant_pre_process(str(material.path), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        str(prepared),
        str(quantized),
        _Reader(material),
        quant_format=QuantFormat.QDQ,
        calibrate_method=PEER_METHODS[subject.method],
        # The ranges are the same in every form; measured once, they are read from this file.
        calibration_cache_path=folder / f"{subject.method}.json",
        **PEER_FORMS[subject.form],
    )
    session = _session(quantized)
    outputs = [_run(session, {material.input: image}) for image in material.unseen]
    return Quantized(outputs, [onnx.load(str(quantized)).graph])


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """The calibration inputs, for onnxruntime's quantizer."""

    def __init__(self, material: Material) -> None:
        self._samples = iter([{material.input: image} for image in material.calibration])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._samples, None)


def _session(path: Path) -> ort.InferenceSession:
    """A session with exact INT8, with the settings of `device.runtime.executors.portable`."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return exact_session(str(path), options, ["ClipQuantRewrite"])


def _run(session: ort.InferenceSession, feeds: dict[str, Array]) -> Outputs:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


if __name__ == "__main__":
    main()
