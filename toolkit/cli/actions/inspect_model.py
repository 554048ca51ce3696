"""What `tandem inspect MODEL.onnx` says of a model, and of its plan for a profile."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from device.engine.manifest import NodePlacement
from toolkit.cli.actions.outputs import print_page_path
from toolkit.cli.actions.planning import in_precision
from toolkit.cli.commands.inspect import Inspect
from toolkit.cli.pages.model_page import model_page
from toolkit.engine.plan_models import PlanMember, PlanRequest, make_plan
from toolkit.errors import about
from toolkit.graph.summary import ModelSummary, NodeLine, TensorLine, summarize
from toolkit.html.page import write_page
from toolkit.importers.input_shapes import set_shapes
from toolkit.importers.onnx import ModelFile, read_model_file
from toolkit.partition.planning.plan import Plan, PlanOptions


@dataclass(frozen=True, slots=True)
class Inspected:
    """A model, its summary, and its plan."""

    file: ModelFile
    summary: ModelSummary
    plan: Plan | None


def inspect_model(options: Inspect) -> None:
    """Read, summarize and plan a model, and print the report. Raises TandemError."""
    inspected = _inspect(options)
    if options.html is not None:
        report = _text(inspected, nodes=False)
        page = model_page(inspected.file, inspected.summary, inspected.plan, report)
        write_page(options.html, page)
    text = _text(inspected, nodes=options.nodes)
    click.echo(json.dumps(_builtins(inspected)) if options.as_json else text)
    print_page_path(options.html, as_json=options.as_json)


def _inspect(options: Inspect) -> Inspected:
    path = options.file
    file = read_model_file(path, options.plugins)
    set_shapes(file.model, options.shapes, path)
    plan = None
    if options.profile is not None:
        planned = make_plan(
            PlanRequest(
                members=(PlanMember(path.stem, path, shapes=options.shapes),),
                profile=options.profile,
                options=in_precision(PlanOptions(), options.precision),
                plugins=options.plugins,
            )
        )
        plan = planned.shared.plans[0]
    with about(path.name):
        return Inspected(file, summarize(file.model), plan)


def _text(inspected: Inspected, *, nodes: bool) -> str:
    """Return the report for people."""
    summary = inspected.summary
    lines = [*_head(inspected.file, summary), "", *_operators(summary)]
    if nodes:
        lines += ["", *(_node(node) for node in summary.nodes)]
    if inspected.plan is not None:
        lines += ["", *_placements(inspected.plan, nodes=nodes)]
    return "\n".join(lines)


def _builtins(inspected: Inspected) -> dict[str, Any]:
    """Return what `--json` prints."""
    file, summary, plan = inspected.file, inspected.summary, inspected.plan
    values = asdict(summary)
    values["weights"] = {
        dtype: {"parameters": count, "bytes": size}
        for dtype, (count, size) in summary.weights.items()
    }
    return {
        "model": str(file.path),
        "sha256": file.sha256,
        "bytes": file.size_bytes,
        "external": list(file.external),
        **values,
        "macs": summary.macs,
        "parameters": summary.parameters,
        "plan": None if plan is None else _plan_builtins(plan),
    }


def _head(file: ModelFile, summary: ModelSummary) -> list[str]:
    opsets = ", ".join(f"{domain} {version}" for domain, version in summary.opsets.items())
    lines = [
        f"{file.path}: {_size(file.size_bytes)}, sha256 {file.sha256[:12]}",
        f"IR version {summary.ir_version}, opset {opsets}"
        + (f", by {summary.producer}" if summary.producer else ""),
    ]
    if file.external:
        lines.append(f"weights in {', '.join(file.external)}")
    lines += [f"metadata {key}: {value}" for key, value in summary.metadata.items()]
    lines += [f"input {_tensor(tensor)}" for tensor in summary.inputs]
    lines += [f"output {_tensor(tensor)}" for tensor in summary.outputs]
    weights = ", ".join(
        f"{dtype} {_size(size)}" for dtype, (_, size) in sorted(summary.weights.items())
    )
    lines.append(f"{summary.parameters:,} parameters in initializers: {weights or 'none'}")
    if summary.nested_nodes or summary.functions:
        lines.append(
            f"{summary.nested_nodes} nodes in branches and loops, {summary.functions} functions"
        )
    if summary.largest is not None:
        lines.append(f"largest tensor between nodes: {_tensor(summary.largest)}")
    return lines


def _operators(summary: ModelSummary) -> list[str]:
    total = summary.macs
    width = max([8, *(len(row.op) for row in summary.operators)])
    lines = [f"{'operator':{width}} {'nodes':>6} {'MMACs':>10} {'share':>7} {'constants':>10}"]
    for row in summary.operators:
        share = f"{row.macs / total:.1%}" if total else "-"
        unknown = f"  ({row.unknown} of unknown shape)" if row.unknown else ""
        lines.append(
            f"{row.op:{width}} {row.nodes:6} {row.macs / 1e6:10.3f} {share:>7} "
            f"{_size(row.weight_bytes):>10}{unknown}"
        )
    count = len(summary.nodes)
    constants = sum(row.weight_bytes for row in summary.operators)
    return [*lines, f"{'all':{width}} {count:6} {total / 1e6:10.3f} {'':7} {_size(constants):>10}"]


def _placements(plan: Plan, *, nodes: bool) -> list[str]:
    lines = [f"planned for {plan.profile}, {plan.arithmetic} (`tandem plan` says what it takes)"]
    lines += [
        f"  {segment.name} on {segment.processor}: {cost.nodes} nodes, {cost.macs / 1e6:.3f} "
        f"MMACs, predicted {cost.predicted_us:.0f} us"
        for segment, cost in zip(plan.segments, plan.costs, strict=True)
    ]
    if plan.refusals:
        lines.append("not on the DLA (`tandem explain RULE`):")
    for row in plan.refusals:
        rule = f"[{row.rule}] " if row.rule else ""
        same = "" if row.same_reason else ", and others alike"
        lines.append(f"  {rule}{row.reason}{same}: {_names(row.nodes)}")
    return lines + (["", *map(_placement, plan.placements)] if nodes else [])


def _placement(row: NodePlacement) -> str:
    rule = f" [{row.rule}]" if row.rule else ""
    return f"{row.processor:5} {row.segment:8} {row.op:16} {row.node}{rule}: {row.reason}"


def _plan_builtins(plan: Plan) -> dict[str, Any]:
    return {
        "profile": plan.profile,
        "precision": plan.arithmetic,
        "segments": [
            {"processor": segment.processor, **asdict(cost)}
            for segment, cost in zip(plan.segments, plan.costs, strict=True)
        ],
        "nodes": [
            {
                "node": row.node,
                "op": row.op,
                "processor": row.processor,
                "segment": row.segment,
                "rule": row.rule,
                "reason": row.reason,
            }
            for row in plan.placements
        ],
        "refusals": [asdict(row) for row in plan.refusals],
    }


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _node(node: NodeLine) -> str:
    macs = "? MMACs" if node.macs is None else f"{node.macs / 1e6:.3f} MMACs"
    outputs = ", ".join(_tensor(tensor) for tensor in node.outputs)
    return f"{node.op:16} {node.name}: {macs}, {_size(node.weight_bytes)} -> {outputs}"


def _tensor(tensor: TensorLine) -> str:
    if tensor.shape is None:
        return f"{tensor.name}: {tensor.dtype} of unknown shape"
    shape = "x".join("?" if dim is None else str(dim) for dim in tensor.shape) or "1 number"
    size = "" if tensor.bytes is None else f" ({_size(tensor.bytes)})"
    return f"{tensor.name}: {tensor.dtype} {shape}{size}"


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"
