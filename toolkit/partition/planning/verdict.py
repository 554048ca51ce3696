"""Compares the plan with the GPU alone: whether the DLA pays."""

from toolkit.partition.planning.plan import Plan
from toolkit.partition.planning.quantities import pair

NOTICEABLE = 0.02  # smaller shares are left out


def verdict(plan: Plan) -> str:
    """Return one or two sentences: what the DLA brings, and what it costs."""
    if len(plan.figures) == 1:
        return "This profile has no DLA beside a GPU: there is nothing to choose."
    here, gpu = plan.figures[0], plan.figures[1]
    if not any(segment.processor.startswith("dla") for segment in plan.segments):
        objective = plan.search.objective
        return f"The DLA does not pay for {objective}: all nodes are on the GPU.{_foregone(plan)}"
    batch = plan.batching.size
    run, latency = ("frame", "latency") if batch == 1 else (f"batch of {batch}", "batch latency")
    changes = (
        ("frames/s", "", here.frames_per_second, gpu.frames_per_second, True),
        ("us", f" of {latency}", here.latency_us, gpu.latency_us, False),
        ("us", f" of GPU time a {run}", here.gpu_us, gpu.gpu_us, False),
        ("mJ", " a frame", here.energy_mj, gpu.energy_mj, False),
    )
    better: list[str] = []
    worse: list[str] = []
    for unit, what, mine, theirs, more_is_better in changes:
        share = mine / theirs - 1 if theirs > 0 else 0.0
        if abs(share) >= NOTICEABLE:
            here_text, gpu_text, scaled = pair(mine, theirs, unit)
            error = plan.search.energy_error if unit == "mJ" else plan.search.time_error
            within = ", within the model's error" if abs(share) < error else ""
            text = f"{here_text} instead of {gpu_text} {scaled}{what} ({share:+.0%}{within})"
            (better if (share > 0) == more_is_better else worse).append(text)
    if better:
        gains = f"The DLA pays: {', '.join(better)}."
    else:
        gains = "The DLA does not pay." if worse else "The DLA hardly changes anything."
    return gains + (f" It costs: {', '.join(worse)}." if worse else "") + _foregone(plan)


def _foregone(plan: Plan) -> str:
    """Say what moves would gain that gain less than is asked for."""
    search = plan.search
    if search.foregone <= 0:
        return ""
    within = ", within the model's error" if search.foregone < search.model_error else ""
    return (
        f" More on the DLA would gain {search.foregone:.1%}{within}: moves must gain "
        f"{search.min_gain:.0%} (`tandem plan --min-gain`)."
    )
