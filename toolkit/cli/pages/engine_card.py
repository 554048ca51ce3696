"""The report card of an engine: what it is, its graph, layers, memory over time and roofline."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from device.engine.arithmetic import arithmetic_title
from device.engine.cuda_manifest import Cuda
from device.engine.file import Engine
from device.engine.manifest import UNCALIBRATED, Manifest, Precision
from device.errors import ProfileError
from device.profile import Profile, load_profile
from toolkit.cli.pages.engine_nodes import EngineNode, place_of, read_nodes
from toolkit.gpu.report import GpuReport
from toolkit.html.charts import Bar, Ceiling, Steps, WorkPoint, roofline, step_chart, strip
from toolkit.html.graph import LABELS, GraphNode, draw_graph
from toolkit.html.markup import (
    Html,
    Number,
    bullets,
    facts,
    folded,
    heading,
    join,
    paragraph,
    preformatted,
    table,
)
from toolkit.html.page import page

if TYPE_CHECKING:
    from toolkit.engine.precision_gain import LayerGain

_MEASURED_ERROR = (
    "The error is that at the outputs with one node in INT8; it is measured where an output misses "
    "its target."
)
_RESULT_ERROR = "The error is that of the node's own results, where data were given (norm)."


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine as pages show it. `profile` None: it is not known here, so there is no roof."""

    path: str
    size_bytes: int
    sha256: str
    manifest: Manifest
    nodes: tuple[EngineNode, ...]
    profile: Profile | None


@dataclass(frozen=True, slots=True)
class LayerTime:
    """The measured time of the nodes that one operation, or a whole segment, computes."""

    nodes: tuple[str, ...]
    time_us: float


def engine_facts(engine: Engine) -> EngineFacts:
    """Read what pages show of an open engine. Raises EngineError."""
    try:
        profile = load_profile(engine.manifest.profile)
    except ProfileError:  # one of the user's own, by its path
        profile = None
    return EngineFacts(
        path=str(engine.path),
        size_bytes=engine.path.stat().st_size,
        sha256=engine.sha256,
        manifest=engine.manifest,
        nodes=read_nodes(engine),
        profile=profile,
    )


def engine_page(
    engine: EngineFacts,
    *,
    notes: Sequence[str] = (),
    gpu: Sequence[GpuReport] = (),
    gains: Sequence["LayerGain"] = (),
    report: str = "",
) -> str:
    """Return the page of one engine; what else is given is of its build."""
    parts = [
        card(engine, notes),
        heading("Graph"),
        engine_graph(engine.nodes),
        *layer_parts(engine),
        *memory_parts(engine),
        *roofline_parts(engine, predicted_work(engine.nodes), "predicted"),
        *_gains(gains),
        *_kernels(gpu),
    ]
    if report:
        parts += [heading("Build report"), folded("As printed", preformatted(report))]
    lead = f"Engine for {engine.manifest.profile}. All times are predicted."
    return page(f"Engine {engine.path}", lead, parts)


def _gains(gains: Sequence["LayerGain"]) -> list[Html]:
    """Return what low precision gains and loses at each node that could have it."""
    if not gains:
        return []
    form = gains[0].form  # of all: a build has one
    rows = [
        (
            row.node,
            row.processor,
            us(row.int8_us),
            us(row.half_us),
            us(row.half_us - row.int8_us),
            _error(row),
            row.kept or form,
        )
        for row in gains
    ]
    saved_us = sum(row.half_us - row.int8_us for row in gains if not row.kept)
    lead = (
        f"{form} saves {saved_us:.0f} us a frame against FP16 at the nodes that have it, "
        "predicted where no board has measured both, without crossings between processors. "
        f"{_MEASURED_ERROR if form == 'INT8' else _RESULT_ERROR}"
    )
    heads = ("node", "runs on", f"{form} us", "FP16 us", "saved us", "error", "computes in")
    return [heading(f"What {form} gains and loses"), paragraph(lead), table("By node", heads, rows)]


def _error(row: "LayerGain") -> Number:
    error = row.error_share if row.error is None else row.error
    return Number(error, "" if error is None else f"{error:.1%}")


def card(engine: EngineFacts, notes: Sequence[str] = ()) -> Html:
    """Return what the engine is, its segments and notes."""
    manifest = engine.manifest
    source = manifest.provenance
    calibration = source.calibration
    values = {
        "model": f"{source.model}, sha256 {source.model_sha256[:12]}",
        "profile": manifest.profile + (f" ({engine.profile.title})" if engine.profile else ""),
        "precision": precision_text(engine.nodes, manifest),
        "file": f"{engine.size_bytes / 1e6:.2f} MB, sha256 {engine.sha256[:12]}",
        "INT8 ranges": "none"
        if calibration is None
        else f"{calibration.method}, {calibration.samples} samples",
        "inputs": ", ".join(_tensor(manifest, name) for name in manifest.inputs),
        "outputs": ", ".join(_tensor(manifest, name) for name in manifest.outputs),
        "memory of a session": f"{mib(manifest.memory.arena_bytes)} arena between segments, "
        f"{mib(sum(workspaces(manifest).values()))} GPU workspace",
        "passes": ", ".join(source.passes) or "none",
        "made with": ", ".join(f"{name} {v}" for name, v in source.versions.items()),
    }
    for dim in manifest.dims:
        values[f"dimension {dim.name}"] = f"{dim.min} to {dim.max}, optimised for {dim.opt}"
    warning = [paragraph(UNCALIBRATED, "warning")] if manifest.uncalibrated else []
    return join([*warning, facts(values), bullets(notes), heading("Segments"), *segments(engine)])


def segments(engine: EngineFacts) -> list[Html]:
    """Return the segments as a strip of predicted time, and as a table."""
    manifest = engine.manifest
    times = segment_times(manifest)
    rows = [
        (
            segment.name,
            LABELS[place_of(segment)],
            Number(len(segment.nodes)),
            us(times[segment.name]),
            ", ".join(str(item.__struct_config__.tag) for item in segment.implementations),
            ", ".join(segment.inputs),
            ", ".join(segment.outputs),
        )
        for segment in manifest.segments
    ]
    drawn = [
        Bar(segment.name, times[segment.name], f"{times[segment.name]:.1f} us", place_of(segment))
        for segment in manifest.segments
    ]
    heads = ("segment", "runs on", "nodes", "predicted us", "carries", "reads", "writes")
    return [strip("Predicted time of each segment", drawn), table("Segments in order", heads, rows)]


def engine_graph(
    nodes: Sequence[EngineNode], measured: Mapping[str, LayerTime] | None = None
) -> Html:
    """Return the graph; `measured`: the layer of each node that was timed."""
    times = measured or {}
    return draw_graph(
        [
            GraphNode(
                name=node.row.node,
                op=node.row.op,
                place=node.place,
                after=node.after,
                time=_time(node, times),
                facts=_facts(node, times),
            )
            for node in nodes
        ],
        "Graph of the engine",
    )


def layer_parts(engine: EngineFacts) -> list[Html]:
    """Return the table of layers."""
    rows = [
        (
            Number(index + 1),
            node.row.node,
            node.row.op,
            LABELS[node.place],
            node.row.segment,
            node.computes,
            ", ".join(shape.rpartition(": ")[2] for shape in node.shapes),
            us(node.row.predicted_us),
            Number(None if node.operations is None else node.operations / 1e6, _mops(node)),
            kernel_text(node),
            f"[{node.row.rule}] {node.row.reason}" if node.row.rule else node.row.reason,
        )
        for index, node in enumerate(engine.nodes)
    ]
    heads = (
        "#", "node", "operator", "processor", "segment", "precision", "output", "predicted us",
        "Mop", "kernel", "why there",
    )  # fmt: skip
    return [heading("Layers"), table(f"{len(rows)} layers in running order", heads, rows)]


def memory_parts(engine: EngineFacts) -> list[Html]:
    """Return memory over time: what segments share, the running one's workspace, live results."""
    manifest, nodes = engine.manifest, engine.nodes
    arena, space = arena_in_use(manifest), workspaces(manifest)
    series = (
        Steps("arena in use", tuple(arena[n.row.segment] for n in nodes), "dla0"),
        Steps("GPU workspace", tuple(space.get(n.row.segment, 0) for n in nodes), "gpu"),
        Steps("results alive, without reuse inside kernels", tuple(n.live_bytes for n in nodes),
              "s2", filled=False),
    )  # fmt: skip
    names = [node.row.node for node in nodes]
    return [
        heading("Memory over time"),
        step_chart("Memory over the nodes in running order", names, series, "B"),
        paragraph(
            f"The arena has {mib(manifest.memory.arena_bytes)} for the whole run; the workspace of "
            "a GPU segment is its largest need. What a DLA segment keeps inside lies in memory of "
            "the DLA's own. Weights are not shown.",
            "muted",
        ),
    ]


def predicted_work(nodes: Sequence[EngineNode]) -> list[WorkPoint]:
    """Return the nodes that compute, at their predicted times."""
    return [
        WorkPoint(
            f"{node.row.node} ({node.row.op}, {node.computes})",
            node.place,
            float(node.operations),
            float(node.moved_bytes),
            node.row.predicted_us,
        )
        for node in nodes
        if node.operations and node.moved_bytes and node.row.predicted_us > 0
    ]


def roofline_parts(engine: EngineFacts, work: Sequence[WorkPoint], times: str) -> list[Html]:
    """Return the roofline of some work at `times` ("predicted" or "measured")."""
    profile = engine.profile
    if profile is None or not work:
        return []
    places = {point.place for point in work}
    used = {node.precision for node in engine.nodes}
    bandwidth = profile.memory.bandwidth_gbps.value
    return [
        heading("Roofline"),
        roofline("Roofline", work, ceilings(profile, places, used), bandwidth * 1e9),
        paragraph(
            f"A point is a layer with multiply-accumulates, at its {times} time; a fused kernel's "
            "time is at its first node. Bytes are the layer's own inputs, weights and outputs. "
            f"Roofs: {profile.name} at its highest clocks, memory {bandwidth:g} GB/s.",
            "muted",
        ),
    ]


def ceilings(profile: Profile, places: set[str], used: set[Precision]) -> list[Ceiling]:
    """Return the highest rates of the processors in use, at the precisions in use."""
    rows = []
    if profile.gpu is not None and "gpu" in places:
        gpu = profile.gpu
        rows += [
            ("gpu", "fp32", gpu.fp32_tflops),
            ("gpu", "fp16", gpu.fp16_tflops),
            ("gpu", "int8", gpu.int8_tops),
        ]
    if profile.dla is not None:
        for place in sorted(places & {"dla0", "dla1"}):
            rows += [
                (place, "fp16", profile.dla.fp16_tflops),
                (place, "int8", profile.dla.int8_tops),
            ]
    return [
        Ceiling(
            f"{LABELS[place]} {precision.upper()} {figure.value:g} Top/s",
            place,
            figure.value * 1e12,
        )
        for place, precision, figure in rows
        if figure is not None and precision in used
    ]


def arena_in_use(manifest: Manifest) -> dict[str, int]:
    """Return the bytes of the arena that hold something while each segment runs."""
    order = {segment.name: index for index, segment in enumerate(manifest.segments)}
    maker = {name: order[s.name] for s in manifest.segments for name in s.outputs}
    last = dict(maker)
    for segment in manifest.segments:
        for name in segment.inputs:
            last[name] = max(last.get(name, 0), order[segment.name])
    last |= {name: len(order) - 1 for name in manifest.outputs}
    return {
        name: sum(
            buffer.bytes
            for buffer in manifest.memory.buffers
            if maker.get(buffer.tensor, 0) <= index <= last.get(buffer.tensor, -1)
        )
        for name, index in order.items()
    }


def workspaces(manifest: Manifest) -> dict[str, int]:
    """Return the workspace of each GPU segment that has kernels, in bytes."""
    return {
        segment.name: item.workspace_bytes
        for segment in manifest.segments
        if segment.processor == "gpu"
        for item in segment.implementations
        if isinstance(item, Cuda)
    }


def segment_times(manifest: Manifest) -> dict[str, float]:
    """Return the predicted time of each segment's nodes in microseconds."""
    times = {segment.name: 0.0 for segment in manifest.segments}
    for row in manifest.plan:
        times[row.segment] += row.predicted_us
    return times


def precision_text(nodes: Sequence[EngineNode], manifest: Manifest) -> str:
    """Return what the engine computes in, and the precision of how many layers each."""
    counts = Counter(node.computes for node in nodes)
    rows = ", ".join(f"{count} layers {name}" for name, count in counts.most_common())
    return f"{arithmetic_title(manifest)} ({rows})"


def kernel_text(node: EngineNode) -> str:
    """Return the kernels of a node's first tactic, or what runs it otherwise."""
    if not node.kernels:
        return "onnxruntime" if node.place in ("cpu", "portable") else "the DLA's own"
    more = f", 1 of {node.tactics} tactics" if node.tactics > 1 else ""
    return f"{' + '.join(node.kernels)}{more}"


def us(value: float) -> Number:
    """Return microseconds as a cell."""
    return Number(value, f"{value:.1f}")


def mib(size: float) -> str:
    """Return bytes in MiB."""
    return f"{size / 2**20:.2f} MiB"


def _mops(node: EngineNode) -> str:
    return "" if node.operations is None else f"{node.operations / 1e6:.3f}"


def _time(node: EngineNode, times: Mapping[str, LayerTime]) -> str:
    layer = times.get(node.row.node)
    value = node.row.predicted_us
    if layer is not None:  # of several nodes at their first
        value = layer.time_us if layer.nodes[0] == node.row.node else 0.0
    return f"{value:.1f} us" if value else ""


def _facts(node: EngineNode, times: Mapping[str, LayerTime]) -> tuple[tuple[str, str], ...]:
    row = node.row
    rows = [
        ("runs on", f"{LABELS[node.place]}, segment {row.segment}"),
        ("why there", f"[{row.rule}] {row.reason}" if row.rule else row.reason),
        ("precision", node.computes),
        ("output", "\n".join(node.shapes) or "not known"),
        ("predicted time", f"{row.predicted_us:.1f} us"),
    ]
    layer = times.get(row.node)
    if layer is not None:
        count = len(layer.nodes)
        together = f" for {count} nodes together" if count > 1 else ""
        rows.append(("measured time", f"{layer.time_us:.1f} us{together}"))
    if node.operations:
        rows.append(("operations", f"{node.operations / 1e6:.3f} million"))
    if node.moved_bytes:
        rows.append(("bytes read and written", f"{node.moved_bytes:,}"))
    if node.kernels:
        rows.append(("kernel", kernel_text(node)))
    if node.shares:
        rows.append(("in one kernel with", ", ".join(node.shares)))
    return tuple(rows)


def _tensor(manifest: Manifest, name: str) -> str:
    tensor = next(tensor for tensor in manifest.tensors if tensor.name == name)
    shape = "x".join("?" if dim is None else str(dim) for dim in tensor.shape) or "1 number"
    return f"{name} ({tensor.dtype} {shape})"


def _kernels(reports: Sequence[GpuReport]) -> list[Html]:
    rows = [
        (
            report.segment,
            kernel.function,
            ", ".join(kernel.nodes) or "change of layout",
            Number(kernel.threads),
            Number(kernel.shared_bytes),
            Number(kernel.registers),
            Number(kernel.spill_bytes),
            Number(kernel.occupancy, "" if kernel.occupancy is None else f"{kernel.occupancy:.0%}"),
            kernel.bound_by or "",
        )
        for report in reports
        for kernel in report.kernels
    ]
    heads = (
        "segment", "kernel", "nodes", "threads", "shared B", "registers", "spill B", "occupancy",
        "bound by",
    )  # fmt: skip
    return [heading("Kernels"), table("Compiled kernels", heads, rows)] if rows else []
