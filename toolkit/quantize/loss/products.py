"""Which products stay in floating point, so that they and the outputs keep their limits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from toolkit.quantize.loss.judge import Judgement, loss_text

MAX_SEARCHES = 8  # each finds a product that must stay in floating point for the outputs


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
    """What a search ended with: `first` had all products that lose too little by themselves."""

    result: T
    first: T
    floats: tuple[P, ...]

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


def within_limits(products: Sequence[P], tried: Callable[[Sequence[P]], T]) -> Search[P, T]:
    """Leave products in floating point until the others and the outputs keep their limits.

    `products`: those with the largest errors first; `tried`: the model with some of them in float.
    """
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
