"""Finds a small part of a model on which a command fails as it does on the whole.

Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002)
over the nodes of the main graph. A part is a set of nodes: what they read from others becomes an
input, what no other node of it reads an output. Two halvings go first, which a failure at one place
needs alone: the end is cut as early, then the start as late as the command still fails.

    1 behind    the nodes that one node depends on, for the earliest such node
    2 from      those of them from one node on, for the latest such node
    3 ddmin     leave out chunks of nodes, ever smaller ones, down to single nodes

The result fails and is valid, and leaving out any one of its nodes gives a part that does not fail
or is no valid model (unless it was interrupted).
"""

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from toolkit.errors import SurgeonError
from toolkit.graph.extract import values_read
from toolkit.graph.subgraph import cut_model, with_shapes
from toolkit.progress import Progress, silent
from toolkit.surgeon.command import Check
from toolkit.surgeon.write import why_invalid, write_model

Keep = Callable[[ir.Model], None]


@dataclass(frozen=True, slots=True)
class Reduced:
    """The smallest part found. `nodes` leaves out constants; `failure`: how the command ended."""

    model: ir.Model
    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    nodes_before: int
    runs: int
    failure: str
    interrupted: bool


@dataclass
class _Search:
    """The nodes of a model and what was tried of them. A part is a tuple of node numbers."""

    typed: ir.Model
    check: Check
    keep: Keep
    progress: Progress
    folder: Path
    best: tuple[int, ...] = ()
    failure: str = ""
    runs: int = 0
    _tried: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = [node for node in self.typed.graph if node.op_type != "Constant"]
        self._number = {node: number for number, node in enumerate(self.nodes)}
        self.best = tuple(range(len(self.nodes)))
        self._readers: dict[ir.Value, set[ir.Node]] = {}
        for node in self.nodes:
            for value in values_read(node):
                self._readers.setdefault(value, set()).add(node)

    def fails(self, part: tuple[int, ...]) -> bool:
        """Whether the command fails on a part; a part that is no valid model does not count."""
        if part not in self._tried:
            model = self.model_of(part) if part else None
            self._tried[part] = model is not None and self._run(model)
            if self._tried[part] and model is not None and len(part) < len(self.best):
                self.best = part
                self.keep(model)
        return self._tried[part]

    def _run(self, model: ir.Model) -> bool:
        path = self.folder / "candidate.onnx"
        write_model(model, path)
        self.runs += 1
        count, total = len(self.best), len(self.nodes)
        self.progress(f"{count} of {total} nodes left, run {self.runs}", 1 - count / total)
        outcome = self.check.run(path)
        if outcome.failed:
            self.failure = outcome.text
        return outcome.failed

    def model_of(self, part: tuple[int, ...]) -> ir.Model | None:
        """Return a part as a model, None where it would not be valid."""
        inside = {self.nodes[number] for number in part}
        borders: dict[str, None] = {}
        for node in (self.nodes[number] for number in part):
            for value in values_read(node):
                maker = value.producer()
                constant = value.is_initializer() or (maker and maker.op_type == "Constant")
                if not constant and maker not in inside:
                    if not isinstance(value.type, ir.TensorType) or value.dtype is None:
                        return None  # nobody could feed it
                    borders[str(value.name)] = None
        outputs = [
            str(value.name)
            for node in self.typed.graph
            if node in inside
            for value in node.outputs
            if value.name
            and (value.is_graph_output() or not self._readers.get(value, set()) & inside)
        ]
        if not borders or not outputs:
            return None
        try:
            model = cut_model(self.typed, list(borders), outputs)
        except SurgeonError:
            return None
        return model if why_invalid(model) is None else None

    def behind(self, number: int) -> tuple[int, ...]:
        """Return a node and all that it depends on."""
        seen: set[int] = {number}
        stack = [self.nodes[number]]
        while stack:
            for value in values_read(stack.pop()):
                maker = value.producer()
                if maker in self._number and self._number[maker] not in seen:
                    seen.add(self._number[maker])
                    stack.append(maker)
        return tuple(sorted(seen))


def reduce_model(model: ir.Model, check: Check, keep: Keep, progress: Progress = silent) -> Reduced:
    """Return the smallest part of a model that fails a command, as found by delta debugging.

    `keep` is called with every smaller part that fails, so that an end of this process loses
    nothing. A KeyboardInterrupt ends the search with the best so far.
    Raises SurgeonError: the command does not fail on the whole model, or cannot be run.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-reduce-") as folder:
        search = _Search(with_shapes(model), check, keep, progress, Path(folder))
        whole = Path(folder) / "whole.onnx"
        write_model(model, whole)
        outcome = check.run(whole)
        if not outcome.failed:
            with_output = " with that output" if check.pattern and outcome.status else ""
            raise SurgeonError(
                f"the command does not fail{with_output} on the whole model ({outcome.text}); "
                "--check takes a command that exits with a status other than 0"
            )
        search.failure = outcome.text
        keep(model)
        interrupted = False
        try:
            _cut_end(search)
            _cut_start(search)
            _ddmin(search)
        except KeyboardInterrupt:
            interrupted = True
        whole_part = len(search.best) == len(search.nodes)
        best = model if whole_part else search.model_of(search.best)
        nodes = [search.nodes[number] for number in search.best]
        return Reduced(
            model=best or model,
            nodes=tuple(str(node.name) for node in nodes),
            ops=tuple(node.op_type for node in nodes),
            nodes_before=len(search.nodes),
            runs=search.runs + 1,
            failure=search.failure,
            interrupted=interrupted,
        )


def _cut_end(search: _Search) -> None:
    """Find the earliest node such that the command fails on what it depends on."""
    low, high = -1, len(search.nodes) - 1
    if not search.fails(search.behind(high)):
        return
    while high - low > 1:
        middle = (low + high) // 2
        if search.fails(search.behind(middle)):
            high = middle
        else:
            low = middle


def _cut_start(search: _Search) -> None:
    """Leave out as many of the first nodes as possible."""
    part = search.best
    low, high = 0, len(part)
    while high - low > 1:
        middle = (low + high) // 2
        if search.fails(part[middle:]):
            low = middle
        else:
            high = middle


def _ddmin(search: _Search) -> None:
    """Leave out chunks, in the end single nodes, until none can go."""
    chunks = 2
    while len(search.best) > 1:
        part, chunks = search.best, min(chunks, len(search.best))
        if any(search.fails(rest) for rest in _complements(part, chunks)):
            chunks = max(chunks - 1, 2)
        elif chunks == len(part):
            return
        else:
            chunks *= 2


def _complements(part: Sequence[int], chunks: int) -> list[tuple[int, ...]]:
    """Return the part without each of `chunks` equal chunks."""
    edges = [len(part) * number // chunks for number in range(chunks + 1)]
    return [(*part[:begin], *part[end:]) for begin, end in itertools.pairwise(edges)]
