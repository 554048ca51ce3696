"""Compare two files for `tandem compare A B`, and bisect where they differ."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from device.engine.file import open_engine
from device.runtime.session import Dla
from toolkit.cli.pages.compare_page import agreement_page
from toolkit.cli.pages.engine_card import EngineFacts, engine_facts
from toolkit.errors import CompareError
from toolkit.evaluate.agreement.bisect import Bisection, Culprit
from toolkit.evaluate.agreement.compare import (
    Compared,
    Progress,
    Row,
    compare_sides,
    feeds_for,
    samples_for,
)
from toolkit.evaluate.agreement.report import (
    compared_builtins,
    compared_text,
    culprit_builtins,
    culprit_text,
)
from toolkit.evaluate.agreement.sides import EngineSide, ModelSide, Side, built_from, open_side
from toolkit.evaluate.agreement.tolerance import Tolerances
from toolkit.evaluate.infer.inputs import InputRequest
from toolkit.evaluate.infer.runner import Arrays, kind_of
from toolkit.evaluate.infer.saved import save_samples
from toolkit.html.page import write_page
from toolkit.plugins import Plugin

WHY = "`tandem compare {engine} --model {model}` says what INT8 loses, node by node, and why"


@dataclass(frozen=True, slots=True)
class AgreementRequest:
    """The command line of `tandem compare A B`. `bisect`: the folder for what it finds."""

    a: Path
    b: Path
    inputs: InputRequest
    tolerances: Tolerances
    layers: bool
    bisect: Path | None
    dla: Dla
    plugins: tuple[Plugin, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a bisection found, the files it wrote and the commands that run them."""

    culprit: Culprit
    files: tuple[Path, ...]
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The comparison and, where it was asked for and the sides differ, the bisection."""

    compared: Compared
    finding: Finding | None
    hint: str

    def text(self, *, every: bool) -> str:
        """Return the report for people."""
        parts = [compared_text(self.compared, every=every)]
        if self.finding is not None:
            one = self.finding
            parts.append(culprit_text(one.culprit, one.files, one.commands))
        return "\n\n".join([*parts, *([self.hint] if self.hint else [])])

    def builtins(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        values = None
        if self.finding is not None:
            one = self.finding
            values = culprit_builtins(one.culprit, one.files, one.commands)
        return compared_builtins(self.compared, values)


def compare_files(request: AgreementRequest, progress: Progress) -> Agreement:
    """Compare A and B; bisect if they differ and it is asked for. Raises TandemError."""
    a = open_side(request.a, dla=request.dla, plugins=request.plugins)
    try:
        b = open_side(request.b, dla=request.dla, plugins=request.plugins)
    except BaseException:
        a.close()
        raise
    try:
        samples, described = _samples(a, b, request)
        compared = compare_sides(
            a, b, samples, described, request.tolerances, layers=request.layers, progress=progress
        )
        finding = None
        if request.bisect is not None and not compared.agrees:
            finding = _bisect(a, b, samples, compared, request, request.bisect, progress)
        return Agreement(compared, finding, _hint(a, b))
    finally:
        a.close()
        b.close()


def write_agreement_page(request: AgreementRequest, agreement: Agreement, path: Path) -> None:
    """Write the page of a comparison; engines are opened again to read their nodes."""
    engines = _facts_of(request.a), _facts_of(request.b)
    write_page(path, agreement_page(agreement.compared, engines, agreement.text(every=False)))


def _facts_of(path: Path) -> EngineFacts | None:
    if kind_of(path) != "engine":
        return None
    with open_engine(path) as engine:
        return engine_facts(engine)


def _samples(a: Side, b: Side, request: AgreementRequest) -> tuple[list[Arrays], str]:
    saved = [side.title for side in (a, b) if side.kind == "arrays"]
    if len(saved) == 1 and not request.inputs.stated:
        raise CompareError(
            f"{saved[0]} holds outputs, but nothing says what they were computed on; give the same "
            "--input, --data or --random"
        )
    return samples_for(a, b, request.inputs)


def _hint(a: Side, b: Side) -> str:
    """Point at the report on INT8 where an engine lies beside its own model."""
    engine = next((s for s in (a, b) if isinstance(s, EngineSide) and s.precision == "int8"), None)
    if engine is None or not built_from((a, b)):
        return ""
    model = a if engine is b else b
    return WHY.format(engine=engine.title, model=model.title)


def _bisect(
    a: Side,
    b: Side,
    samples: list[Arrays],
    compared: Compared,
    request: AgreementRequest,
    folder: Path,
    progress: Progress,
) -> Finding:
    model, other = (a, b) if isinstance(a, ModelSide) else (b, a)
    if not isinstance(model, ModelSide):
        raise CompareError("--bisect cuts a model, but neither A nor B is one; give the ONNX model")
    bisections = []
    for number, sample in enumerate(samples):
        feeds = {id(a): sample, id(b): feeds_for(b, sample)[0]}
        numbered = (number, feeds[id(model)], feeds[id(other)])
        bisections.append(Bisection(model, other, numbered, request.tolerances, progress))
    outputs_of: dict[int, list[str]] = {}
    for row in _differing(compared, model):
        outputs_of.setdefault(_sample_of(row, bisections), []).append(row.tensor)
    found = [
        (bisections[number], bisections[number].first(outputs))
        for number, outputs in outputs_of.items()
    ]
    _, culprit = min(found, key=lambda pair: pair[0].place(pair[1]))
    return _write(culprit, model, other, folder, request.tolerances)


def _differing(compared: Compared, model: ModelSide) -> list[Row]:
    """Return the differing outputs that --bisect can follow: those of the model, on both sides."""
    known = {str(value.name) for value in model.file.model.graph.outputs}
    rows = [row for row in compared.outputs if row.agrees is False]
    followed = [row for row in rows if row.tensor in known and not row.lacking]
    if followed:
        return followed
    names = ", ".join(repr(row.tensor) for row in rows)
    raise CompareError(
        f"no differing output ({names}) is computed by both sides under one name of "
        f"{model.title}; --bisect follows tensors by name"
    )


def _sample_of(row: Row, bisections: list[Bisection]) -> int:
    """Return the sample on which an output differs: the worst, else the first.

    The largest error may be within a relative tolerance, and NaN is no error.
    """
    worst = 0 if row.figures is None or row.figures.worst is None else row.figures.worst.sample
    numbers = sorted(range(len(bisections)), key=lambda number: number != worst)
    return next((n for n in numbers if bisections[n].differs(row.tensor)), worst)


def _write(
    culprit: Culprit, model: ModelSide, other: Side, folder: Path, tolerances: Tolerances
) -> Finding:
    """Write the part, its inputs and what the other side gives, and the commands that use them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompareError(
            f"cannot make the folder {folder}: {error.strerror}; give another with --out"
        ) from error
    part, inputs, expected = folder / "node.onnx", folder / "inputs.npz", folder / "other.npz"
    ir.save(culprit.part, part)
    save_samples(inputs, [culprit.feeds])
    save_samples(expected, [culprit.expected])
    files, commands = [part, inputs, expected], []
    stated = _stated(tolerances)
    feed = f"--input {shlex.quote(str(inputs))}{stated}"
    if culprit.other_part is not None:
        other_path = folder / "other.onnx"
        ir.save(culprit.other_part, other_path)
        files.insert(1, other_path)
        commands.append(f"tandem compare {_words(part, other_path)} {feed}")
    else:
        commands.append(f"tandem compare {_words(part, expected)} {feed}")
    if isinstance(other, EngineSide) and other.precision != "int8":
        manifest, engine = other.runner.manifest, folder / "node.engine"
        commands += [
            f"tandem build {_words(part)} --profile {manifest.profile} "
            f"--precision {other.precision} -o {_words(engine)}",
            f"tandem compare {_words(part, engine)} {feed}",
        ]
    return Finding(culprit, tuple(files), tuple(commands))


def _words(*paths: Path) -> str:
    return shlex.join(map(str, paths))


def _stated(tolerances: Tolerances) -> str:
    rows = (
        ("--atol", tolerances.atol),
        ("--rtol", tolerances.rtol),
        ("--min-sqnr", tolerances.sqnr_db),
    )
    return "".join(f" {option} {values['']:g}" for option, values in rows if "" in values)
