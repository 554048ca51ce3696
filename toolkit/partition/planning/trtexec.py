"""A plan as options of trtexec, for those who build with TensorRT alone.

trtexec gives every layer that it can to the DLA; `--layerDeviceTypes` says which go to the GPU. A
name may hold one `*` (from TensorRT 10 on), and later entries go before earlier ones.
"""

import math
from collections.abc import Iterator, Sequence

from toolkit.dla.rules.rule import Version, parse_version
from toolkit.partition.planning.figures import GPU_ONLY, Figures
from toolkit.partition.planning.plan import Plan
from toolkit.partition.planning.quantities import number, quantity
from toolkit.partition.planning.trtexec_flags import WILDCARDS, has_flag

_LONG = 400  # letters
_ENDS = "/._"  # where a prefix of names may end
_RESERVED = frozenset(",*'\"")  # letters that the lists of trtexec cannot hold in a name


def trtexec_lines(plan: Plan) -> list[str]:
    """Return a line of options and notes on it; nothing for a plan without the DLA.

    A note predicts what the command takes. Where a release cannot place single layers, the command
    is the one of two that comes nearest to the plan: all that the DLA takes on it, or nothing.
    """
    on_dla = [row.node for row in plan.placements if row.processor.startswith("dla")]
    if not on_dla or plan.tensorrt is None:
        return []
    version = parse_version(plan.tensorrt)
    on_gpu = [row.node for row in plan.placements if not row.processor.startswith("dla")]
    options = [*_types(plan, version)]
    notes, row = [], plan.figures[0]
    if on_gpu and not has_flag(version, "--layerDeviceTypes"):
        row = min(plan.figures[1:3], key=lambda figures: _distance(plan, figures))
        takes = "nothing to the DLA" if row.name == GPU_ONLY else "the DLA all that this takes"
        notes.append(
            f"trtexec of TensorRT {plan.tensorrt} cannot place single layers "
            f"(`layerDeviceTypes` came with 8.6): this command, the nearest, gives {takes}"
        )
    if row.name != GPU_ONLY:
        options += ["--useDLACore=0", *(["--allowGPUFallback"] if on_gpu else [])]
    if on_gpu and has_flag(version, "--layerDeviceTypes"):
        options.append(f"--layerDeviceTypes={_listed(on_gpu, on_dla, 'GPU', version)}")
    notes.append(_predicted(plan, row))
    as_float = [row.node for row in plan.placements if row.rule in ("K1", "S1")]
    if as_float and plan.precision == "int8" and has_flag(version, "--layerPrecisions"):
        others = [row.node for row in plan.placements if row.rule not in ("K1", "S1")]
        options.append("--precisionConstraints=prefer")
        options.append(f"--layerPrecisions={_listed(as_float, others, 'fp16', version)}")
    return [f"trtexec --onnx=MODEL.onnx {' '.join(options)}", *notes, *_name_notes(on_gpu)]


def _one_by_one_hz(plan: Plan, row: Figures) -> float:
    """Return the frames per second of trtexec, which runs one batch after the other."""
    return plan.batching.size * 1e6 / row.latency_us


def _distance(plan: Plan, row: Figures) -> float:
    """Return how far the command of a row is from the plan in the figure that the plan is for.

    The logarithm of a factor. The board that runs one batch after the other is idle for longer.
    """
    planned, hz = plan.figures[0], _one_by_one_hz(plan, row)
    factor = row.latency_us / planned.latency_us
    if plan.search.objective == "energy":
        idle = row.idle_mj * row.frames_per_second / hz
        factor = (row.energy_mj - row.idle_mj + idle) / planned.energy_mj
    elif plan.search.objective == "gpu-relief":
        factor = (1 + row.gpu_us) / (1 + planned.gpu_us)  # either may be 0
    elif plan.search.objective == "throughput" and plan.rate_hz is None:
        factor = hz / planned.frames_per_second
    return abs(math.log(factor))


def _predicted(plan: Plan, row: Figures) -> str:
    batch = "" if plan.batching.size == 1 else f" of {plan.batching.size} frames"
    core = "" if row.name == GPU_ONLY else " on one DLA core"
    text = (
        f"predicted for this command, one run{batch} after the other{core}: "
        f"{quantity(row.latency_us, 'us')} a run, {number(_one_by_one_hz(plan, row))} frames/s"
    )
    if plan.in_flight == 1:
        return text
    rate = number(plan.figures[0].frames_per_second)
    return f"{text}; the plan reaches {rate} with {plan.in_flight} frames in flight"


def is_long(lines: Sequence[str]) -> bool:
    """Return True for options that would fill a report; `tandem plan --trtexec` prints them."""
    return len(lines[0]) > _LONG


def _types(plan: Plan, version: Version) -> Iterator[str]:
    """Yield what sets the types; from TensorRT 11 on the model has them (Q/DQ, strongly typed)."""
    if not has_flag(version, "--int8"):
        return
    if plan.precision == "int8":
        yield "--int8"
        yield "--calib=MODEL.cache"
    if plan.precision != "fp32":
        yield "--fp16"


def _listed(names: Sequence[str], others: Sequence[str], value: str, version: Version) -> str:
    """Return the list of names with a value, quoted; a pattern for those of a common prefix."""
    if version >= WILDCARDS:
        shown = patterns(names, others)
    else:
        shown = [name for name in names if _RESERVED.isdisjoint(name)]
    rows = [f"{_quoted(name)}:{value}" for name in shown]
    return f'"{",".join(rows)}"'


def patterns(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return patterns with at most one `*` that match all of `names` and none of `others`."""
    taken = {name[:end] for name in others for end in range(len(name) + 1)}
    groups: dict[str, list[str]] = {}
    for name in names:
        if _RESERVED.isdisjoint(name):
            prefixes = (name[: end + 1] for end, letter in enumerate(name) if letter in _ENDS)
            prefix = next((p for p in prefixes if p not in taken and p != name), "")
            groups.setdefault(prefix or name, []).append(name)
    return [f"{prefix}*" if len(members) > 1 else members[0] for prefix, members in groups.items()]


def _quoted(name: str) -> str:
    return f"'{name}'" if ":" in name else name


def _name_notes(names: Sequence[str]) -> list[str]:
    lost = [name for name in names if not _RESERVED.isdisjoint(name)]
    if not lost:
        return []
    return [f"left out, for trtexec cannot name them: {len(lost)} nodes such as {lost[0]}"]
