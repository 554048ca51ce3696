"""Time plans: CPU seconds from the graph after the passes to the plan, rewrites included.

python -m scripts.bench_plan [--profile agx-orin-64gb]
"""

import argparse
import time

from device.profile import Profile, load_profile
from scripts.networks import NETWORKS
from toolkit.graph.passes import run_passes
from toolkit.partition.planning.objectives import BUILD_GOALS
from toolkit.partition.planning.plan import Model, PlanOptions, plan_together
from toolkit.partition.prepare import prepare

SINGLE = ("resnet50", "googlenet", "densenet121")
WORKLOAD = (("resnet50", 30.0), ("googlenet", 10.0), ("mobilenet_v2", 5.0))


def main() -> None:
    """Print a line for each network and objective, then the workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="agx-orin-64gb")
    profile = load_profile(parser.parse_args().profile)
    for objective in BUILD_GOALS:
        for name in SINGLE:
            _time(((name, None),), profile, objective)
        _time(WORKLOAD, profile, objective)


def _time(members: tuple[tuple[str, float | None], ...], profile: Profile, objective: str) -> None:
    graphs = [(name, rate, run_passes(NETWORKS[name].model())[0]) for name, rate in members]
    options = PlanOptions(tensorrt="10.3.0", objective=objective)
    wall, cpu = time.perf_counter(), time.process_time()
    models = []
    for name, rate, graph in graphs:
        prepared = prepare(graph, profile, options)
        models.append(Model(name, prepared.model.graph, rate_hz=rate, cuts=prepared.cuts))
    search = plan_together(models, profile, options).plans[0].search
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    names = "+".join(name for name, _ in members)
    proof = "proven" if search.proven else f"gap {search.gap:.1%}"
    print(f"{names:32} {objective:11} {cpu:6.2f} s CPU {wall:6.2f} s  {proof}", flush=True)


if __name__ == "__main__":
    main()
