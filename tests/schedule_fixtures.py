"""A schedule is checked against its problem."""

import pytest


def check_schedule(problem, solution):
    """The schedule is one that the problem allows, and ends when the solution says."""
    parts = {s.network: [] for s in solution.segments}
    for segment in solution.segments:
        parts[segment.network].append(segment)
    for one in solution.schedule:
        segment = parts[one.network][one.segment]
        net = next(n for n in problem.networks if n.name == one.network)
        time = sum(t.time_us[segment.processor] for t in net.tasks if t.name in segment.tasks)
        time += problem.segment_us.get(segment.processor, 0.0)
        assert one.end_us - one.start_us == pytest.approx(time)
        for other in solution.schedule:
            if other is not one and {other.processor, other.network} & {one.processor, one.network}:
                assert one.end_us <= other.start_us + 1e-6 or other.end_us <= one.start_us + 1e-6
    assert max(i.end_us for i in solution.schedule) <= solution.value + 1e-6
