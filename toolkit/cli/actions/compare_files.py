"""Compare two files for `tandem compare A B`, and bisect where they differ."""

import json
import shlex
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir

from device.engine.file import open_engine
from toolkit.cli.actions.inputs import input_request, tolerances_of
from toolkit.cli.actions.outputs import print_page_path
from toolkit.cli.commands.compare import BISECT_FOLDER, Compare
from toolkit.cli.pages.compare_page import agreement_page
from toolkit.cli.pages.engine_card import EngineFacts, engine_facts
from toolkit.cli.progress import progress_bar
from toolkit.errors import CompareError
from toolkit.evaluate.agreement.bisect import Bisection, Culprit
from toolkit.evaluate.agreement.compare import (
    Compared,
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
from toolkit.evaluate.agreement.tolerance import DEFAULTS, Tolerances
from toolkit.evaluate.infer.inputs import InputRequest
from toolkit.evaluate.infer.runner import Arrays, kind_of
from toolkit.evaluate.infer.saved import save_samples
from toolkit.html.page import write_page
from toolkit.progress import Progress

WHY = "`tandem compare {engine} --model {model}` says what INT8 loses, node by node, and why"


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


def compare_two(options: Compare, second: Path) -> bool:
    """Compare A and B, bisect if they differ and it is asked for, and print the report.

    Returns whether they agree. Raises TandemError.
    """
    with progress_bar(f"{options.a.name} and {second.name}") as report:
        agreement = _compare(options, second, report)
    if options.html is not None:
        engines = _facts_of(options.a), _facts_of(second)
        text = agreement.text(every=False)
        write_page(options.html, agreement_page(agreement.compared, engines, text))
    text = agreement.text(every=options.nodes)
    click.echo(json.dumps(agreement.builtins()) if options.as_json else text)
    print_page_path(options.html, as_json=options.as_json)
    return agreement.compared.agrees


def _compare(options: Compare, second: Path, progress: Progress) -> Agreement:
    inputs, tolerances = input_request(options.inputs), tolerances_of(options.tolerances)
    dla = options.dla or "portable"
    with (
        closing(open_side(options.a, dla=dla, plugins=options.plugins)) as a,
        closing(open_side(second, dla=dla, plugins=options.plugins)) as b,
    ):
        samples, described = _samples(a, b, inputs)
        compared = compare_sides(
            a, b, samples, described, tolerances, layers=options.layers, progress=progress
        )
        finding = None
        if options.bisect and not compared.agrees:
            finding = _bisect((a, b), samples, compared, options, progress)
        return Agreement(compared, finding, _hint(a, b))


def _facts_of(path: Path) -> EngineFacts | None:
    if kind_of(path) != "engine":
        return None
    with open_engine(path) as engine:
        return engine_facts(engine)


def _samples(a: Side, b: Side, inputs: InputRequest) -> tuple[list[Arrays], str]:
    saved = [side.title for side in (a, b) if side.kind == "arrays"]
    if len(saved) == 1 and not inputs.stated:
        raise CompareError(
            f"{saved[0]} holds outputs, but nothing says what they were computed on; give the same "
            "--input, --data or --random"
        )
    return samples_for(a, b, inputs)


def _hint(a: Side, b: Side) -> str:
    """Point at the report on INT8 where an engine lies beside its own model."""
    engine = next((s for s in (a, b) if isinstance(s, EngineSide) and s.precision == "int8"), None)
    if engine is None or not built_from((a, b)):
        return ""
    model = a if engine is b else b
    return WHY.format(engine=engine.title, model=model.title)


def _bisect(
    sides: tuple[Side, Side],
    samples: list[Arrays],
    compared: Compared,
    options: Compare,
    progress: Progress,
) -> Finding:
    a, b = sides
    model, second = (a, b) if isinstance(a, ModelSide) else (b, a)
    if not isinstance(model, ModelSide):
        raise CompareError("--bisect cuts a model, but neither A nor B is one; give the ONNX model")
    tolerances = tolerances_of(options.tolerances)
    bisections = []
    for number, sample in enumerate(samples):
        feeds = {id(a): sample, id(b): feeds_for(b, sample)[0]}
        numbered = (number, feeds[id(model)], feeds[id(second)])
        bisections.append(Bisection(model, second, numbered, tolerances, progress))
    outputs_of: dict[int, list[str]] = {}
    for row in _differing(compared, model):
        outputs_of.setdefault(_sample_of(row, bisections), []).append(row.tensor)
    first_differences = [
        (bisections[number], bisections[number].first(outputs))
        for number, outputs in outputs_of.items()
    ]
    _, culprit = min(first_differences, key=lambda pair: pair[0].place(pair[1]))
    return _write(culprit, model, second, options.out or Path(BISECT_FOLDER), tolerances)


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
    culprit: Culprit, model: ModelSide, second: Side, folder: Path, tolerances: Tolerances
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
    if isinstance(second, EngineSide) and second.precision in DEFAULTS:  # others take data
        manifest, engine = second.runner.manifest, folder / "node.engine"
        commands += [
            f"tandem build {_words(part)} --profile {manifest.profile} "
            f"--precision {second.precision} -o {_words(engine)}",
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
