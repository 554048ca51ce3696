"""The batch of a plan, and what others would do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch that was tried: `latency_us` of 99 of 100 frames when the board is busy."""

    batch: int
    frames_per_second: float
    latency_us: float
    within: bool  # the bound


@dataclass(frozen=True, slots=True)
class Batching:
    """The frames of one run of the engine, and how they were chosen.

    `tried` is empty where the batch was not chosen; `note`: why there was no choice.
    """

    size: int = 1
    tried: tuple[BatchRow, ...] = ()
    max_latency_ms: float | None = None
    note: str = ""

    @property
    def lines(self) -> list[str]:
        """The choice as text."""
        if not self.tried:
            return []
        rows = ", ".join(
            f"{row.batch}: {row.frames_per_second:.0f} frames/s in {row.latency_us / 1e3:.3g} ms"
            f"{'' if row.within else ' (too long)'}"
            for row in self.tried
        )
        chosen = (
            f"batch {self.size}, the fastest within {self.max_latency_ms:g} ms for 99 of 100 "
            "frames; times and energies of segments are of a batch, other energies of a frame"
        )
        return [chosen, f"  {rows}", *([f"  {self.note}"] if self.note else [])]
