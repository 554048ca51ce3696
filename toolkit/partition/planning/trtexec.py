"""A plan as options of trtexec, for those who build with TensorRT alone.

trtexec gives every layer that it can to the DLA; `--layerDeviceTypes` says which go to the GPU. A
name may hold one `*`, and later entries go before earlier ones. Which flags exist is a table, from
sampleOptions.cpp of each release.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolkit.dla.rules.rule import Version, parse_version
from toolkit.partition.planning.plan import Plan

_LONG = 400  # letters
_ENDS = "/._"  # where a prefix of names may end
_RESERVED = frozenset(",*'\"")  # letters that the lists of trtexec cannot hold in a name


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of trtexec, in releases from `first` to before `removed`."""

    name: str
    first: Version
    removed: Version | None = None

    def exists(self, version: Version) -> bool:
        """Return True if a release has the option."""
        return self.first <= version and (self.removed is None or version < self.removed)


# fmt: off
DEVICE_TYPES = Flag("--layerDeviceTypes", (8, 6))
PRECISIONS = Flag("--layerPrecisions", (8, 4), (11,))
TYPE_FLAGS = Flag("--int8", (5,), (11,))
# fmt: on


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
        if DEVICE_TYPES.exists(version):
            options.append(f"{DEVICE_TYPES.name}={_listed(on_gpu, on_dla, 'GPU')}")
        else:
            notes.append(
                f"trtexec of TensorRT {plan.tensorrt} cannot place single layers "
                f"({DEVICE_TYPES.name} is of 8.6): it gives the DLA all that this takes"
            )
    as_float = [row.node for row in plan.placements if row.rule in ("K1", "S1")]
    if as_float and plan.precision == "int8" and PRECISIONS.exists(version):
        others = [row.node for row in plan.placements if row.rule not in ("K1", "S1")]
        options.append("--precisionConstraints=prefer")
        options.append(f"{PRECISIONS.name}={_listed(as_float, others, 'fp16')}")
    return [f"trtexec --onnx=MODEL.onnx {' '.join(options)}", *notes, *_name_notes(on_gpu)]


def is_long(lines: Sequence[str]) -> bool:
    """Return True for options that would fill a report; `tandem plan --trtexec` prints them."""
    return sum(map(len, lines)) > _LONG


def _types(plan: Plan, version: Version) -> Iterator[str]:
    """Yield what sets the types; from TensorRT 11 on the model has them (Q/DQ, strongly typed)."""
    if not TYPE_FLAGS.exists(version):
        return
    if plan.precision == "int8":
        yield "--int8"
        yield "--calib=MODEL.cache"
    if plan.precision != "fp32":
        yield "--fp16"


def _listed(names: Sequence[str], others: Sequence[str], value: str) -> str:
    """Return the list of names with a value, those of a common prefix as one pattern, quoted."""
    rows = [f"{_quoted(name)}:{value}" for name in patterns(names, others)]
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
