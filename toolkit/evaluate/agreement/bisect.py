"""Finds the first node that differs between a model and another side, on the same inputs.

Both sides are run up to one tensor at a time. A binary search over the tensors on which a differing
output depends, in running order, ends at a tensor that differs beside one that agrees. Differences
can hide (a ReLU drops them, a sum of two branches has two histories), so the search alone proves
nothing: every tensor that runs before the culprit and on which a differing output depends is then
compared too, and if one of them differs the search goes on among those before it. What is returned
is the first in running order that differs, over all outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from toolkit.errors import CompareError
from toolkit.evaluate.agreement.compare import (
    EXACT,
    differences_of,
    hold_text,
    holds_whole_numbers,
)
from toolkit.evaluate.agreement.figures import Figures, Tally
from toolkit.evaluate.agreement.sides import ModelSide, Side
from toolkit.evaluate.agreement.tolerance import Tolerances, lower
from toolkit.evaluate.infer.runner import Array, Arrays
from toolkit.graph.extract import values_read
from toolkit.graph.subgraph import cut_model, with_shapes
from toolkit.progress import Progress, silent


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first tensor that differs, and the nodes between it and those that agree.

    More than one node where the other side does not show what is between them. `part` computes
    `tensor` from `feeds`, the model's own numbers; `other_part` is the same part of the other side
    where it is a model. `alone`: both on `feeds`, None where the other side has no part of its own.
    `runs`: how often parts were run.
    """

    tensor: str
    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    figures: Figures
    part: ir.Model
    other_part: ir.Model | None
    feeds: Arrays
    expected: Arrays
    alone: Figures | None
    alone_agrees: bool | None
    runs: int


class Bisection:
    """One sample on two sides, of which the first is a model."""

    def __init__(
        self,
        model: ModelSide,
        second: Side,
        sample: tuple[int, Arrays, Arrays],
        tolerances: Tolerances,
        progress: Progress = silent,
    ) -> None:
        """`sample`: its number, and the feeds of both sides."""
        self._model, self._other = model, second
        self._number, self._feeds, self._other_feeds = sample
        self._tolerances, self._progress = tolerances, progress
        self._precision = lower(model.precision, second.precision)
        self._graph = model.file.model.graph
        self._producers = {
            str(value.name): node for node in self._graph for value in node.outputs if value.name
        }
        self._order = {name: number for number, name in enumerate(self._producers)}
        self._verdicts: dict[str, bool | None] = {}
        self._runs = 0

    def differs(self, name: str) -> bool | None:
        """Whether a tensor, computed by itself, is beyond its tolerance; None: it is not shown."""
        if name not in self._verdicts:
            ours, theirs = self._run([name])
            shown = name in ours and name in theirs
            self._verdicts[name] = self._beyond(name, ours[name], theirs[name]) if shown else None
        return self._verdicts[name]

    def first(self, outputs: Sequence[str]) -> Culprit:
        """Return the first tensor in running order that differs, of all behind `outputs`.

        Raises CompareError: no output differs on this sample, or one of them or a tensor that it
        depends on has no tolerance.
        """
        reached = {name for output in outputs for name in (output, *self._behind(output))}
        within = sorted(reached, key=self._order.__getitem__)
        for name in within:
            if not self._tolerances.of(name, self._precision).judges:
                raise CompareError(
                    f"without a tolerance nothing says whether the {self._precision} tensor "
                    f"{name!r} differs; give --atol, --rtol or --min-sqnr for all tensors"
                )
        culprit = next((name for name in outputs if self.differs(name)), None)
        if culprit is None:
            raise CompareError(
                f"{', '.join(map(repr, outputs))} of both sides agree on this sample when they are "
                "computed by themselves; try another sample, or a smaller tolerance"
            )
        while True:
            culprit = self._search([*self._behind(culprit), culprit])
            place = self._order[culprit]
            earlier = self._confirm([name for name in within if self._order[name] < place])
            if earlier is None:
                return self._culprit(culprit)
            culprit = earlier

    def place(self, culprit: Culprit) -> int:
        """Return where a culprit's tensor comes in running order."""
        return self._order[culprit.tensor]

    def _search(self, tensors: Sequence[str]) -> str:
        """Return a tensor that differs beside one that agrees; the last one differs."""
        low, high = -1, len(tensors) - 1
        while high - low > 1:
            middle = self._visible(tensors, low, high)
            if middle is None:
                break
            if self.differs(tensors[middle]):
                high = middle
            else:
                low = middle
            self._progress("bisect", 1 - (high - low) / len(tensors))
        return tensors[high]

    def _visible(self, tensors: Sequence[str], low: int, high: int) -> int | None:
        """Return the place nearest to the middle whose tensor both sides show."""
        middle = (low + high) // 2
        places = sorted(range(low + 1, high), key=lambda place: abs(place - middle))
        return next((p for p in places if self.differs(tensors[p]) is not None), None)

    def _confirm(self, tensors: Sequence[str]) -> str | None:
        """Return the first of `tensors` that differs, all computed together, or None."""
        candidates = [name for name in tensors if self._verdicts.get(name, True) is not None]
        if not candidates:
            return None
        ours, theirs = self._run(candidates)
        beyond = (
            name
            for name in candidates
            if name in ours and self._beyond(name, ours[name], theirs[name])
        )
        # By itself, too: other outputs change what is fused.
        return next((name for name in beyond if self.differs(name)), None)

    def _run(self, names: Sequence[str]) -> tuple[Arrays, Arrays]:
        theirs = self._other.values(self._number, self._other_feeds, names)
        shown = [name for name in names if name in theirs]
        if not shown:
            return {}, {}
        self._runs += 1
        return self._model.values(self._number, self._feeds, shown), theirs

    def _beyond(self, name: str, ours: Array, theirs: Array) -> bool:
        return ours.shape != theirs.shape or not self._tally(name, ours, theirs).agrees

    def _tally(self, name: str, ours: Array, theirs: Array) -> Tally:
        text = hold_text(ours, theirs)
        whole = holds_whole_numbers(ours, theirs)
        tolerance = self._tolerances.of(name, self._precision, whole=whole)
        tally = Tally(EXACT if text else tolerance)
        if ours.shape == theirs.shape:
            tally.add(*(differences_of(ours, theirs) if text else (ours, theirs)))
        return tally

    def _behind(self, name: str) -> list[str]:
        """Return the tensors of numbers on which a tensor depends, in running order."""
        seen: set[str] = set()
        stack = [name]
        while stack:
            producer = self._producers.get(stack.pop())
            if producer is None:
                continue
            for value in values_read(producer):
                if str(value.name) in self._producers and str(value.name) not in seen:
                    seen.add(str(value.name))
                    stack.append(str(value.name))
        fixed = {n for n in seen if self._producers[n].op_type == "Constant"}
        return sorted(seen - fixed, key=self._order.__getitem__)

    def _culprit(self, name: str) -> Culprit:
        """Cut the part between the culprit and the tensors that agree, and run it alone."""
        borders = self._borders(name)
        typed = with_shapes(self._model.file.model)
        part = cut_model(typed, borders, [name])
        inner = [n for n in borders if n in self._producers]
        feeds = self._model.values(self._number, self._feeds, inner) if inner else {}
        feeds |= {n: self._feeds[n] for n in borders if n in self._feeds}
        ours, theirs = self._run([name])
        other_part = self._other_part(borders, name)
        alone = None
        if other_part is not None:
            alone = self._alone(part, other_part, feeds, name)
        nodes = [node for node in part.graph if node.op_type != "Constant"]
        return Culprit(
            tensor=name,
            nodes=tuple(str(node.name) for node in nodes),
            ops=tuple(node.op_type for node in nodes),
            figures=self._tally(name, ours[name], theirs[name]).figures(),
            part=part,
            other_part=other_part,
            feeds=feeds,
            expected={name: theirs[name]},
            alone=None if alone is None else alone.figures(),
            alone_agrees=None if alone is None else alone.agrees,
            runs=self._runs,
        )

    def _borders(self, name: str) -> list[str]:
        """Return the nearest tensors before `name` that both sides show: inputs and agreeing ones.

        What is not shown is passed through, back to what is.
        """
        borders: dict[str, None] = {}
        seen: set[str] = set()
        stack = [name]
        while stack:
            producer = self._producers[stack.pop()]
            for value in values_read(producer):
                read = str(value.name)
                if read in seen or value.is_initializer():
                    continue
                seen.add(read)
                maker = self._producers.get(read)
                if maker is None:
                    borders[read] = None
                elif maker.op_type == "Constant" or self.differs(read) is None:
                    stack.append(read)
                else:
                    borders[read] = None
        return list(borders)

    def _other_part(self, borders: Sequence[str], name: str) -> ir.Model | None:
        if not isinstance(self._other, ModelSide):
            return None
        typed = with_shapes(self._other.file.model)
        known = {str(v.name) for node in typed.graph for v in node.outputs}
        known |= {str(value.name) for value in typed.graph.inputs}
        if not set(borders) <= known:
            return None
        return cut_model(typed, borders, [name])

    def _alone(
        self, first: ir.Model, second: ir.Model, feeds: Mapping[str, Array], name: str
    ) -> Tally:
        from toolkit.evaluate.infer.onnx_runner import OnnxRunner

        results = [
            OnnxRunner(model, title).run(
                {str(v.name): feeds[str(v.name)] for v in model.graph.inputs}
            )
            for model, title in ((first, "the part of A"), (second, "the part of B"))
        ]
        return self._tally(name, results[0][name], results[1][name])
