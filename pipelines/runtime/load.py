"""What a pipeline does when the board is hot or too slow: declared steps, down and up again.

A pure policy with hysteresis. A reading beyond its limit for `hold_s` takes the next step; all
readings well below theirs for `recover_s` takes one step back.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType

from pipelines.load_config import LoadConfig, LoadStep

CALM_LATENCY = 0.7  # of `slow_ms`: below it the pipeline has room for a step back
CALM_CLOCK = 1.1  # of `low_clock`


@dataclass(frozen=True, slots=True)
class Readings:
    """What is known of the board at one moment; None: it has no such sensor, or no frame came.

    `temperature_c`: the hottest zone, in degrees Celsius. `clock`: of the GPU, as a fraction of
    its highest. `latency_p95_ms`: from frame to result.
    """

    temperature_c: float | None = None
    clock: float | None = None
    latency_p95_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """The step that holds, 0 for none, and why it was taken.

    `strained_s` and `calm_s`: since when readings were beyond a limit or all well below, `taken_s`:
    when the step was taken, in seconds of `time.monotonic()`.
    """

    step: int = 0
    reason: str = ""
    strained_s: float | None = None
    calm_s: float | None = None
    taken_s: float = float("-inf")


def next_load(config: LoadConfig, load: Load, readings: Readings, now_s: float) -> Load:
    """Return the step that holds after these readings at `now_s`."""
    over = next(_over(config, readings), None)
    if over is not None:
        since_s = now_s if load.strained_s is None else load.strained_s
        strained = replace(load, strained_s=since_s, calm_s=None)
        # A board cools slowly: a step is given the time to show what it does.
        settles = now_s - load.taken_s < config.settle_s
        if settles or now_s - since_s < config.hold_s or load.step == len(config.steps):
            return strained
        return Load(load.step + 1, over, taken_s=now_s)
    if load.step == 0 or not _is_calm(config, readings):
        return replace(load, strained_s=None, calm_s=None)
    since_s = now_s if load.calm_s is None else load.calm_s
    if now_s - since_s < config.recover_s:
        return replace(load, strained_s=None, calm_s=since_s)
    step = load.step - 1
    return Load(step, load.reason if step else "", calm_s=now_s, taken_s=now_s)


def step_of(config: LoadConfig, load: Load) -> LoadStep:
    """Return what the step that holds asks for; nothing at step 0."""
    return config.steps[load.step - 1] if load.step else LoadStep()


def load_text(config: LoadConfig, load: Load) -> str:
    """Return the step and its reason as one sentence; empty at step 0."""
    if not load.step:
        return ""
    step = step_of(config, load)
    measures = [f"one frame of {step.every_nth}"] if step.every_nth > 1 else []
    measures += [f"at most {step.max_hz:g} frames/s a camera"] if step.max_hz is not UNSET else []
    measures += [f"with {', '.join(step.use)}"] if step.use else []
    return f"step {load.step} of {len(config.steps)} ({', '.join(measures)}): {load.reason}"


def _over(config: LoadConfig, readings: Readings) -> Iterator[str]:
    """Yield each limit that is passed, as a sentence."""
    if _above(readings.temperature_c, config.hot_c):
        yield f"{readings.temperature_c:.1f} C is above hot_c = {config.hot_c:g}"
    if _above(readings.latency_p95_ms, config.slow_ms):
        yield f"a p95 of {readings.latency_p95_ms:.1f} ms is above slow_ms = {config.slow_ms:g}"
    if readings.clock is not None and config.low_clock and readings.clock < config.low_clock:
        yield f"a GPU clock of {readings.clock:.0%} is below low_clock = {config.low_clock:.0%}"


def _is_calm(config: LoadConfig, readings: Readings) -> bool:
    """Whether every reading that has a limit is well within it."""
    cool_c = config.hot_c - config.cool_by_c if config.hot_c else UNSET
    room_ms = config.slow_ms * CALM_LATENCY if config.slow_ms else UNSET
    clock = readings.clock
    return not (
        _above(readings.temperature_c, cool_c)
        or _above(readings.latency_p95_ms, room_ms)
        or (clock is not None and config.low_clock and clock < config.low_clock * CALM_CLOCK)
    )


def _above(reading: float | None, limit: float | UnsetType) -> bool:
    return reading is not None and limit is not UNSET and reading > limit
