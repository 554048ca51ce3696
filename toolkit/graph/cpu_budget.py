"""How long this process may compute for one step: what a model makes large by repetition."""

import time

from toolkit.errors import ImportModelError


class CpuBudget:
    """Seconds of processor time that a step may take; a busy machine does not use them up."""

    def __init__(self, step: str, seconds: float) -> None:
        self._step = step
        self._seconds = seconds
        self._until = time.process_time() + seconds

    @property
    def is_spent(self) -> bool:
        """Whether the step has taken longer than it may."""
        return time.process_time() > self._until

    def check(self) -> None:
        """Raise ImportModelError if the step has taken longer than it may."""
        if self.is_spent:
            raise ImportModelError(
                f"{self._step} takes longer than {self._seconds:.0f} s of processor time; the "
                "model is damaged or too large: export it again, or in parts"
            )
