"""What is counted of a model."""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass
class Figures:
    """What is counted of a model since it was loaded; `spent_ns` in the order of STAGES; `batches`
    by size: how many ran, and their time in the stages after the queue."""

    success: int = 0
    success_ns: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    fail_ns: int = 0
    inferences: int = 0
    executions: int = 0
    last_ms: int = 0
    last_s: float = 0.0  # on the monotonic clock; of a failure of the model too
    spent_ns: list[int] = field(default_factory=lambda: [0] * len(STAGES))
    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    batches: defaultdict[int, list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0] * len(STAGES))
    )

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def record_execution(
        self, rows: Sequence[int], waited_ns: int, stages_ns: Sequence[int]
    ) -> None:
        """Count one execution of requests with so many rows each."""
        with self._lock:
            size = sum(rows)
            self.executions += 1
            self.inferences += size
            batch, total = self.batches[size], self.spent_ns
            batch[0] += 1
            total[0] += waited_ns
            for place, spent_ns in enumerate(stages_ns, 1):
                total[place] += spent_ns * len(rows)
                batch[place] += spent_ns

    def record_request(self, spent_ns: int, failure: str = "") -> None:
        """Count a request that was answered, or failed for a reason."""
        with self._lock:
            if failure in {"", "BACKEND"}:
                self.last_s = time.monotonic()
            if failure:
                self.failures[failure] += 1
                self.fail_ns += spent_ns
            else:
                self.success += 1
                self.success_ns += spent_ns
                self.recent_ms.append(spent_ns / 1e6)
                self.last_ms = time.time_ns() // 1_000_000

    def as_json(self) -> dict[str, Any]:
        """Return them as the statistics extension has them."""
        with self._lock:
            stages = {
                stage: {"count": self.success, "ns": spent_ns}
                for stage, spent_ns in zip(STAGES, self.spent_ns, strict=True)
            }
            return {
                "last_inference": self.last_ms,
                "inference_count": self.inferences,
                "execution_count": self.executions,
                "inference_stats": {
                    "success": {"count": self.success, "ns": self.success_ns},
                    "fail": {"count": self.failures.total(), "ns": self.fail_ns},
                    **stages,
                    "cache_hit": {"count": 0, "ns": 0},
                    "cache_miss": {"count": 0, "ns": 0},
                },
                "batch_stats": [
                    {
                        "batch_size": size,
                        **{
                            stage: {"count": batch[0], "ns": batch[place]}
                            for place, stage in enumerate(STAGES[1:], 1)
                        },
                    }
                    for size, batch in sorted(self.batches.items())
                ],
            }
