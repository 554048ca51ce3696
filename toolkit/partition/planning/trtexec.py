"""A plan as options of trtexec, for those who build with TensorRT alone.

trtexec gives every layer that it can to the DLA; `--layerDeviceTypes` says which go to the GPU. A
name may hold one `*` (from TensorRT 10 on), and later entries go before earlier ones.
"""

from collections.abc import Iterator, Sequence

from toolkit.dla.rules.rule import Version, parse_version
from toolkit.partition.planning.plan import Plan
from toolkit.partition.planning.trtexec_flags import WILDCARDS, has_flag

_LONG = 400  # letters
_ENDS = "/._"  # where a prefix of names may end
_RESERVED = frozenset(",*'\"")  # letters that the lists of trtexec cannot hold in a name


def trtexec_lines(plan: Plan) -> list[str]:
    """Return a line of options and notes on it; nothing for a plan without the DLA."""
    on_dla = [row.node for row in plan.placements if row.processor.startswith("dla")]
    if not on_dla or plan.tensorrt is None:
        return []
    version = parse_version(plan.tensorrt)
    on_gpu = [row.node for row in plan.placements if not row.processor.startswith("dla")]
    options = [*_types(plan, version), "--useDLACore=0"]
    notes = []
    if on_gpu:
        options.append("--allowGPUFallback")
        if has_flag(version, "--layerDeviceTypes"):
            options.append(f"--layerDeviceTypes={_listed(on_gpu, on_dla, 'GPU', version)}")
        else:
            notes.append(
                f"trtexec of TensorRT {plan.tensorrt} cannot place single layers "
                "(--layerDeviceTypes is of 8.6): it gives the DLA all that this takes"
            )
    as_float = [row.node for row in plan.placements if row.rule in ("K1", "S1")]
    if as_float and plan.precision == "int8" and has_flag(version, "--layerPrecisions"):
        others = [row.node for row in plan.placements if row.rule not in ("K1", "S1")]
        options.append("--precisionConstraints=prefer")
        options.append(f"--layerPrecisions={_listed(as_float, others, 'fp16', version)}")
    return [f"trtexec --onnx=MODEL.onnx {' '.join(options)}", *notes, *_name_notes(on_gpu)]


def is_long(lines: Sequence[str]) -> bool:
    """Return True for options that would fill a report; `tandem plan --trtexec` prints them."""
    return sum(map(len, lines)) > _LONG


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
