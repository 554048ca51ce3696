"""Time plans: CPU seconds from the graph after the passes to the plan, rewrites included.

    python -m scripts.bench_plan [--profile agx-orin-64gb] [MODEL.onnx ...]

With models: what the command `tandem plan` takes for each, in a process of its own, from the file
to the report: CPU seconds of the user and of the system, and the peak of its memory.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from device.profile import Profile, load_profile
from scripts.networks import NETWORKS
from toolkit.graph.passes import run_passes
from toolkit.partition.planning.objectives import BUILD_GOALS
from toolkit.partition.planning.plan import Model, PlanOptions, plan_together
from toolkit.partition.prepare_graph import prepare_graph

SINGLE = ("resnet50", "googlenet", "densenet121")
WORKLOAD = (("resnet50", 30.0), ("googlenet", 10.0), ("mobilenet_v2", 5.0))


def main() -> None:
    """Print a line for each model, or for each network and objective, then the workload."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL.onnx")
    parser.add_argument("--profile", default="agx-orin-64gb")
    arguments = parser.parse_args()
    for path in arguments.models:
        usage = usage_of_command(path, arguments.profile)
        print(
            f"{path.stem:32} {usage.user_s:6.2f} s user {usage.system_s:6.2f} s system "
            f"{usage.peak_mb:6.0f} MB",
            flush=True,
        )
    if arguments.models:
        return
    profile = load_profile(arguments.profile)
    for objective in BUILD_GOALS:
        for name in SINGLE:
            _time(((name, None),), profile, objective)
        _time(WORKLOAD, profile, objective)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its children took: CPU seconds, and the largest of their peaks in MB."""

    user_s: float
    system_s: float
    peak_mb: float


def usage_of_command(path: Path, profile: str) -> Usage:
    """Run `tandem plan` on a model. Raises CalledProcessError: it fails."""
    command = (sys.executable, "-m", "toolkit.cli", "plan", str(path), "--profile", profile)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Usage(usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)


def _time(members: tuple[tuple[str, float | None], ...], profile: Profile, objective: str) -> None:
    graphs = [(name, rate, run_passes(NETWORKS[name].model())[0]) for name, rate in members]
    options = PlanOptions(tensorrt="10.3.0", objective=objective)
    wall, cpu = time.perf_counter(), time.process_time()
    models = []
    for name, rate, graph in graphs:
        prepared = prepare_graph(graph, profile, options)
        models.append(Model(name, prepared.model.graph, rate_hz=rate, cuts=prepared.cuts))
    search = plan_together(models, profile, options).plans[0].search
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    names = "+".join(name for name, _ in members)
    proof = "proven" if search.proven else f"gap {search.gap:.1%}"
    print(f"{names:32} {objective:11} {cpu:6.2f} s CPU {wall:6.2f} s  {proof}", flush=True)


if __name__ == "__main__":
    main()
