"""Lays two sides side by side: every sample through both, each output, and each tensor between."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from toolkit.errors import CompareError
from toolkit.evaluate.agreement.figures import Figures, Tally
from toolkit.evaluate.agreement.sides import EngineSide, ModelSide, SavedSide, Side
from toolkit.evaluate.agreement.tolerance import Tolerance, Tolerances, lower
from toolkit.evaluate.infer.inputs import InputRequest, describe, make_samples
from toolkit.evaluate.infer.runner import Array, Arrays
from toolkit.progress import Progress, silent

EXACT = Tolerance(0.0, 0.0)
"""Of strings, and of outputs that one side lacks: whatever tolerance is stated."""


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of both sides: its node where a side is a model, and how close they are.

    `problem` says why there are no figures: other shapes, no numbers, or one side lacks it
    (`lacking`). `agrees` None: not judged.
    """

    tensor: str
    node: str
    op: str
    shape: tuple[int, ...]
    tolerance: Tolerance
    figures: Figures | None
    problem: str
    agrees: bool | None
    lacking: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """Both sides on all samples. `layers`: every tensor that both show, None: not asked for."""

    a: str
    b: str
    precisions: tuple[str, str]
    inputs: str
    outputs: tuple[Row, ...]
    layers: tuple[Row, ...] | None
    notes: tuple[str, ...] = field(default=())

    @property
    def agrees(self) -> bool:
        """Whether no output is beyond its tolerance."""
        return all(row.agrees is not False for row in self.outputs)

    @property
    def judged(self) -> bool:
        """Whether any output has a tolerance."""
        return any(row.agrees is not None for row in self.outputs)


def samples_for(a: Side, b: Side, request: InputRequest) -> tuple[list[Arrays], str]:
    """Return the samples that both sides run on, and what they are, in words.

    Two files of saved outputs need none. Raises TandemError: they do not fit, or one side was saved
    and nothing says what it was computed on.
    """
    running = [side for side in (a, b) if not isinstance(side, SavedSide)]
    saved = [side for side in (a, b) if isinstance(side, SavedSide)]
    if not running:
        counts = [len(side.samples) for side in saved]
        if counts[0] != counts[1]:
            raise CompareError(
                f"{a.title} holds {counts[0]} samples and {b.title} {counts[1]}; compare outputs "
                "of the same inputs"
            )
        return [{} for _ in range(counts[0])], f"{counts[0]} saved samples"
    names = [[tensor.name for tensor in side.inputs] for side in running]
    is_paired = len(names[0]) == len(names[-1]) and not {*names[0]} & {*names[-1]}
    if {*names[0]} != {*names[-1]} and not is_paired:
        raise CompareError(
            f"{a.title} takes {', '.join(names[0]) or 'nothing'}, {b.title} takes "
            f"{', '.join(names[1]) or 'nothing'}: compare models with the same inputs"
        )
    samples = make_samples(request, running[0].inputs, running[0].title)
    return samples, describe(request, len(samples))


def compare_sides(
    a: Side,
    b: Side,
    samples: Sequence[Arrays],
    described: str,
    tolerances: Tolerances,
    *,
    layers: bool = False,
    progress: Progress = silent,
) -> Compared:
    """Run both sides on every sample.

    Raises TandemError: there is no sample, a side fails, or nothing is in common.
    """
    if not samples:
        raise CompareError(f"there is no sample to compare {a.title} and {b.title} on; give inputs")
    precision = lower(a.precision, b.precision)
    nodes = _nodes(a, b)
    outputs = _Rows(tolerances, precision, nodes)
    between = _Rows(tolerances, precision, nodes)
    notes: dict[str, None] = dict.fromkeys(_not_compared(a, b, len(samples)))
    if layers:
        notes.update(dict.fromkeys(_hidden(a, b)))
    for number, sample in enumerate(samples):
        feeds_b, renamed = feeds_for(b, sample)
        notes.update(dict.fromkeys(renamed))
        results = a.outputs(number, sample), b.outputs(number, feeds_b)
        for name, pair in _pairs(a, b, *results, notes):
            outputs.add(name, *pair)
        for side, name, array in _alone(a, b, *results):
            outputs.lack(name, array, side)
        if layers:
            shown = a.tensors(number, sample), b.tensors(number, feeds_b)
            for name in _common(nodes, *shown):
                between.add(name, shown[0][name], shown[1][name])
        progress("samples", (number + 1) / len(samples))
    tolerances.check_names(outputs.names | between.names)
    return Compared(
        a=a.title,
        b=b.title,
        precisions=(a.precision, b.precision),
        inputs=described,
        outputs=outputs.rows(),
        layers=between.rows() if layers else None,
        notes=tuple(notes),
    )


def _hidden(a: Side, b: Side) -> tuple[str, ...]:
    """Say which segments of engines show only what they pass on."""
    engines = (side for side in (a, b) if isinstance(side, EngineSide) and side.hidden)
    return tuple(
        f"{side.title} shows no tensors inside {', '.join(side.hidden)}: neither onnxruntime nor "
        "the emulation runs them here"
        for side in engines
    )


def _not_compared(a: Side, b: Side, count: int) -> tuple[str, ...]:
    """Say which saved samples have nothing beside them."""
    return tuple(
        f"compared: {count} of the {len(side.samples)} samples in {side.title}"
        for side in (a, b)
        if isinstance(side, SavedSide) and len(side.samples) > count
    )


class _Rows:
    """Rows while they grow, in the order in which tensors came."""

    def __init__(
        self,
        tolerances: Tolerances,
        precision: str,
        nodes: Mapping[str, tuple[str, str]],
    ) -> None:
        self._tolerances, self._precision, self._nodes = tolerances, precision, nodes
        self._tallies: dict[str, Tally] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._problems: dict[str, str] = {}
        self._lacking: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tallies)

    def add(self, name: str, a: Array, b: Array) -> None:
        text = hold_text(a, b)
        tolerance = EXACT
        if not text:
            whole = holds_whole_numbers(a, b)
            tolerance = self._tolerances.of(name, self._precision, whole=whole)
        tally = self._tallies.setdefault(name, Tally(tolerance))
        self._shapes.setdefault(name, a.shape)
        problem = _incomparable(a, b)
        if problem:
            self._problems.setdefault(name, problem)
        else:
            tally.add(*(differences_of(a, b) if text else (a, b)))

    def lack(self, name: str, array: Array, side: str) -> None:
        """Note an output that `side` alone has."""
        self._tallies.setdefault(name, Tally(EXACT))
        self._shapes.setdefault(name, array.shape)
        self._problems.setdefault(name, f"only {side} has it")
        self._lacking.add(name)

    def rows(self) -> tuple[Row, ...]:
        return tuple(self._row(name, tally) for name, tally in self._tallies.items())

    def _row(self, name: str, tally: Tally) -> Row:
        node, op = self._nodes.get(name, ("", ""))
        problem = self._problems.get(name, "")
        if not problem and tally.tolerance is EXACT and tally.beyond:
            problem = f"{tally.beyond} of {tally.elements} strings differ"
        agrees: bool | None = False
        if not problem:  # NaN on one side is beyond every tolerance, also where none is stated
            agrees = tally.agrees if tally.tolerance.judges or tally.not_finite else None
        return Row(
            tensor=name,
            node=node,
            op=op,
            shape=self._shapes[name],
            tolerance=tally.tolerance,
            figures=None if problem else tally.figures(),
            problem=problem,
            agrees=agrees,
            lacking=name in self._lacking,
        )


def _incomparable(a: Array, b: Array) -> str:
    """Return why two tensors have no figures, or ""."""
    if a.shape != b.shape:
        shapes = ("x".join(map(str, array.shape)) or "1 number" for array in (a, b))
        return "the shapes are {} and {}".format(*shapes)
    if hold_text(a, b):
        return ""
    if a.dtype.kind not in "fiub" or b.dtype.kind not in "fiub":
        return f"they hold {a.dtype} and {b.dtype}, not numbers"
    return ""


def hold_text(a: Array, b: Array) -> bool:
    """Whether both sides of a tensor are of strings."""
    return a.dtype.kind in "OSU" and b.dtype.kind in "OSU"


def differences_of(a: Array, b: Array) -> tuple[Array, Array]:
    """Return two tensors of strings as numbers: 0, and 1 where they differ."""
    different = np.asarray(a.astype(str) != b.astype(str), np.int8)
    return different, np.zeros_like(different)


def holds_whole_numbers(a: Array, b: Array) -> bool:
    """Whether both sides of a tensor are of integers or truth values."""
    return a.dtype.kind in "iub" and b.dtype.kind in "iub"


def _nodes(a: Side, b: Side) -> dict[str, tuple[str, str]]:
    """Return node and operator of each tensor of the first side that is a model."""
    model = next((side for side in (a, b) if isinstance(side, ModelSide)), None)
    if model is None:
        return {}
    return {
        str(value.name): (str(node.name), node.op_type)
        for node in model.file.model.graph
        for value in node.outputs
    }


def feeds_for(b: Side, sample: Arrays) -> tuple[Arrays, tuple[str, ...]]:
    """Return the sample for the second side, by position where the names are all others."""
    names = [tensor.name for tensor in b.inputs]
    if not names or set(names) & set(sample) or len(names) != len(sample):
        return sample, ()
    note = f"inputs are matched by position: {', '.join(map(_arrow, sample, names))}"
    return dict(zip(names, sample.values(), strict=True)), (note,)


def _pairs(
    a: Side, b: Side, from_a: Arrays, from_b: Arrays, notes: dict[str, None]
) -> Iterator[tuple[str, tuple[Array, Array]]]:
    """Yield the outputs of both by name, or by position where no name is the same."""
    common = [name for name in from_a if name in from_b]
    if not common:
        if len(from_a) != len(from_b) or not from_a:
            raise CompareError(
                f"{a.title} and {b.title} have no output of the same name: "
                f"{', '.join(from_a) or 'none'} and {', '.join(from_b) or 'none'}"
            )
        notes[f"outputs are matched by position: {', '.join(map(_arrow, from_a, from_b))}"] = None
        names = list(from_b)
        for name_a, name_b in zip(from_a, names, strict=True):
            yield name_a, (from_a[name_a], from_b[name_b])
        return
    for name in common:
        yield name, (from_a[name], from_b[name])


def _alone(a: Side, b: Side, from_a: Arrays, from_b: Arrays) -> Iterator[tuple[str, str, Array]]:
    """Yield the outputs that one side lacks, where they are matched by name: side, name, array."""
    if not from_a.keys() & from_b.keys():
        return
    # Beside a model or an engine, a file may hold more: the tensors of `tandem infer --all`.
    both_saved = isinstance(a, SavedSide) and isinstance(b, SavedSide)
    for side, outputs, others in ((a, from_a, from_b), (b, from_b, from_a)):
        if both_saved or not isinstance(side, SavedSide):
            yield from ((side.title, name, outputs[name]) for name in outputs if name not in others)


def _arrow(before: str, after: str) -> str:
    return f"{before} -> {after}"


def _common(nodes: Mapping[str, object], a: Arrays, b: Arrays) -> list[str]:
    """Return the tensors of both, in the order of the model where there is one."""
    common = [name for name in a if name in b]
    if not nodes:
        return common
    rank = {name: number for number, name in enumerate(nodes)}
    return sorted(common, key=lambda name: rank.get(name, len(rank)))
