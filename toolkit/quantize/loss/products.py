"""Which products stay in floating point, so that they and the outputs keep their limits.

One sample of JUDGE_EVERY, or the last of fewer, judges products of fewer bits, and nothing is
fitted to it, unless it is the only one.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.arrays import Sample
from toolkit.quantize.loss.judge import Basis, Judgement, at_targets, judge, loss_text
from toolkit.quantize.loss.parts import output_parts, split_outputs

JUDGE_EVERY = 4
MAX_ERROR = 0.3  # of a product's results (norm), relative; a trained network lost classes at 0.45
MAX_SEARCHES = 8  # each finds a product that must stay in floating point for the outputs

Outputs = Mapping[str, NDArray[Any]]
Run = Callable[[Mapping[str, NDArray[Any]]], Outputs]
OpenModel = Callable[[ir.Model, Sequence[str]], Run]  # of a model and tensors


def sample_roles(samples: Iterable[Sample], most: int) -> Iterator[tuple[Sample, bool, bool]]:
    """Yield samples, whether each fits something and whether it judges, as at most `most` do."""
    samples = iter(samples)
    head = list(itertools.islice(samples, JUDGE_EVERY))
    last, judging = len(head) - 1, 0  # of few samples the last judges
    for index, sample in enumerate(itertools.chain(head, samples)):
        judges = index % JUDGE_EVERY == last and judging < most
        judging += judges
        yield sample, not judges or last == 0, judges


@dataclass(frozen=True, slots=True)
class HeldOutSamples:
    """The samples that judge, and their outputs in floating point; `apart`: none fits, too."""

    samples: Sequence[Sample]
    truths: Sequence[Outputs]
    apart: bool

    def judged(
        self, model: ir.Model, plain: ir.Model, open_model: OpenModel, bases: tuple[Basis, Basis]
    ) -> tuple[list[Outputs], Judgement]:
        """Return the outputs of a model and what it loses; `bases`: by samples apart or not."""
        run = open_model(model, [str(value.name) for value in plain.graph.outputs])
        results: list[Outputs] = [
            {name: np.array(array) for name, array in run(sample).items()}
            for sample in self.samples
        ]
        parts = output_parts(plain)
        exact, actual = (
            [split_outputs(parts, outputs) for outputs in each] for each in (self.truths, results)
        )
        return results, at_targets(judge(parts, exact, actual, basis=bases[not self.apart]))


def problem_of(error: float, not_finite: str) -> str:
    """Return why a product stays in floating point whatever the outputs lose; "": it need not."""
    if error <= MAX_ERROR:
        return ""
    differs = f"its results differ by {error:.1%} (norm, limit {MAX_ERROR:.0%})"
    return differs if math.isfinite(error) else not_finite


def relative_norm(signal: float, noise: float) -> float:
    """Return sqrt(noise / signal) of sums of squares; infinite without signal, 0 without noise."""
    if not math.isfinite(noise) or noise > 0 == signal:
        return math.inf
    return math.sqrt(noise / signal) if noise else 0.0


class Rounded(Protocol):
    """A product of fewer bits, the relative error of its results, and why it cannot be one."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def error(self) -> float: ...  # noqa: D102
    @property
    def problem(self) -> str: ...  # noqa: D102


class Tried(Protocol):
    """A model of which so many products have fewer bits, and what it loses."""

    @property
    def products(self) -> int: ...  # noqa: D102
    @property
    def judgement(self) -> Judgement: ...  # noqa: D102


P = TypeVar("P", bound=Rounded)
T = TypeVar("T", bound=Tried)


@dataclass(frozen=True, slots=True)
class Search(Generic[P, T]):
    """What a search ended with: `first` had all products that lose too little by themselves.

    `excess`: by how much the limits are missed, as accepted.
    """

    result: T
    first: T
    floats: tuple[P, ...]
    excess: str = ""

    @property
    def judgement(self) -> Judgement:
        """That of the result, of the first trial where no product is left."""
        return self.result.judgement if self.result.products else self.first.judgement

    def reasons(self) -> dict[str, str]:
        """Return why each product stays in floating point: by its own error, or at the outputs."""
        missed = "; ".join(map(loss_text, self.first.judgement.broken))
        return {
            product.name: product.problem
            or f"its results differ by {product.error:.1%} (norm), and with it {missed}"
            for product in self.floats
        }


def within_limits(
    products: Sequence[P], tried: Callable[[Sequence[P]], T], *, accept_loss: bool
) -> Search[P, T]:
    """Leave products in floating point until the others and the outputs keep their limits.

    `products`: those with the largest errors first; `tried`: the model with some of them in float.
    """
    if accept_loss:
        result = tried(())
        excess = [f"{product.name}: {product.problem}" for product in products if product.problem]
        excess += map(loss_text, result.judgement.broken)
        return Search(result, result, (), "; ".join(excess))
    floats = [product for product in products if product.problem]
    first = tried(floats)
    if not (first.judgement.broken and first.products):
        return Search(first, first, tuple(floats))
    for _ in range(MAX_SEARCHES):
        rest = [product for product in products if product not in floats]
        enough, too_few = len(rest), 0
        while enough - too_few > 1:  # Fewer of them lose less.
            middle = (enough + too_few) // 2
            if tried([*floats, *rest[:middle]]).judgement.broken:
                too_few = middle
            else:
                enough = middle
        # The last of them is needed; the others perhaps not.
        before, floats = floats, [*floats, rest[enough - 1]]
        result = tried(floats)
        if not result.judgement.broken or not result.products:
            return Search(result, first, tuple(floats))
    floats = [*before, *rest[:enough]]
    return Search(tried(floats), first, tuple(floats))
