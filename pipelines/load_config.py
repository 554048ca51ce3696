"""[load] of pipeline.toml: what a pipeline does on a hot or slow board."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from pipelines.value import Positive, PositiveFloat
from pipelines.value import Value as _Value


class LoadStep(_Value, frozen=True, kw_only=True):
    """One step of [load]: run every nth frame of a camera, and at most `max_hz` a second.

    `use`: names of [[models]] with `replaces`, such as a smaller engine or one for the DLA; they
    run instead of the models that they replace.
    """

    every_nth: Positive = 1
    max_hz: PositiveFloat | UnsetType = UNSET
    use: tuple[str, ...] = ()


class LoadConfig(_Value, frozen=True, kw_only=True):
    """What to do when the board is hot or too slow.

    `hot_c`, `slow_ms` (p95 from frame to result over `window_s`) and `low_clock` (of the GPU, a
    fraction of its highest): limits, each may be left out. Beyond one for `hold_s` the next of
    `steps` is taken, and another one not within `settle_s`, as a board cools slowly. Once the
    temperature is `cool_by_c` below its limit and the others well within theirs for `recover_s`,
    one step is taken back.
    """

    hot_c: PositiveFloat | UnsetType = UNSET
    cool_by_c: PositiveFloat = 8.0
    slow_ms: PositiveFloat | UnsetType = UNSET
    window_s: PositiveFloat = 10.0
    low_clock: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    hold_s: Annotated[float, Meta(ge=0.0)] = 5.0
    settle_s: Annotated[float, Meta(ge=0.0)] = 30.0
    recover_s: Annotated[float, Meta(ge=0.0)] = 30.0
    steps: Annotated[tuple[LoadStep, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        """Raise ValueError for limits or steps that could never do anything."""
        if self.hot_c is UNSET and self.slow_ms is UNSET and self.low_clock is UNSET:
            raise ValueError("set hot_c, slow_ms or low_clock")
        if LoadStep() in self.steps:
            raise ValueError("each of `steps` needs every_nth above 1, max_hz or use")
