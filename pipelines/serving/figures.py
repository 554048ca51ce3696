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
    """What is counted of a model since it was loaded; `spent_ns` by stage, `batches` by size."""

    success: int = 0
    success_ns: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    fail_ns: int = 0
    inferences: int = 0
    executions: int = 0
    last_ms: int = 0
    last_s: float = 0.0  # on the monotonic clock; of a failure of the model too
    spent_ns: Counter[str] = field(default_factory=Counter)
    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    batches: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def record_execution(
        self, rows: Sequence[int], waited_ns: int, stages_ns: Sequence[int]
    ) -> None:
        """Count one execution of requests with so many rows each."""
        with self._lock:
            self.executions += 1
            self.inferences += sum(rows)
            batch = self.batches[sum(rows)]
            batch["count"] += 1
            self.spent_ns["queue"] += waited_ns
            for stage, spent_ns in zip(STAGES[1:], stages_ns, strict=True):
                self.spent_ns[stage] += spent_ns * len(rows)
                batch[stage] += spent_ns

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
                stage: {"count": self.success, "ns": self.spent_ns[stage]} for stage in STAGES
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
                            stage: {"count": batch["count"], "ns": batch[stage]}
                            for stage in STAGES[1:]
                        },
                    }
                    for size, batch in sorted(self.batches.items())
                ],
            }
