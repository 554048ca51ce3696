"""How descriptions, checks and differences of bundles look on a terminal."""

import shlex
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from device.update.bundle import BundleInfo, GoldenLimit
from toolkit.fleet.bundles.diff import Change, Difference, TensorChange
from toolkit.fleet.bundles.inspection import BundleView, EngineView, TensorView
from toolkit.fleet.bundles.signature import Signature
from toolkit.fleet.bundles.verify import Check
from toolkit.fleet.server.history import printable

SHOWN_LABELS = 8
NOTHING = "-"


def bundle_table(view: BundleView) -> RenderableType:
    """Return what a bundle holds and says of itself."""
    head = Text(printable(f"{view.name} {view.version} for {view.profile}"), style="bold")
    facts = _grid()
    for title, text in _facts(view):
        facts.add_row(title, Text(printable(text)))
    members = _table("member", "bytes", "sha256")
    for member in view.members:
        members.add_row(member.name, f"{member.bytes:,}", member.sha256)
    engines = [part for engine in view.engines for part in _engine(engine)]
    return Group(head, facts, members, *engines)


def agent_text(info: BundleInfo) -> str:
    """Return what a release of the agent is, and what a board needs for it."""
    needs = info.agent
    assert needs is not None
    rows = (
        ("Python", needs.min_python, needs.below_python),
        ("L4T", needs.min_l4t, needs.below_l4t),
        ("glibc", needs.min_glibc, ""),
    )
    parts = [
        " ".join(filter(None, (name, least and f">= {least}", below and f"< {below}")))
        for name, least, below in rows
        if least or below
    ]
    machine = needs.machine or "any machine"
    return printable(
        f"{info.name} {info.version}, {len(info.files)} wheels for {', '.join((machine, *parts))}"
    )


def checks_table(checks: Sequence[Check]) -> RenderableType:
    """Return the checks, the failed ones in red."""
    table = _table("check", "", "")
    for check in checks:
        verdict = (
            Text("passed", style="green") if check.passed else Text("failed", style="bold red")
        )
        table.add_row(check.name, verdict, Text(printable(check.detail)))
    return table


def difference_table(difference: Difference, *, every: bool) -> RenderableType:
    """Return what changed; `every`: equal parts, too."""
    if difference.same:
        return Text("The bundles are the same, byte for byte.", style="green")
    sections = (
        ("what the bundle says", difference.statements),
        ("engines", difference.engines),
        ("pipeline", difference.pipeline),
        ("labels", difference.labels),
    )
    parts: list[RenderableType] = [_changes(title, rows) for title, rows in sections if rows]
    return Group(*parts, _parts(difference.parts, every=every), _fetch(difference))


def _facts(view: BundleView) -> Iterator[tuple[str, str]]:
    """Yield the facts that are known, with their titles."""
    golden = view.golden
    rows = (
        ("file", f"{view.path}, {view.bytes:,} bytes"),
        ("sha256", view.sha256),
        ("JetPack", view.jetpack),
        ("TensorRT", view.tensorrt),
        ("needs", ", ".join(f"{name} {least}" for name, least in view.requires.items())),
        ("version floor", view.min_version_floor),
        ("pipeline", _pipeline(view)),
        *((name, _labels(labels)) for name, labels in view.labels.items()),
        ("golden inputs", "" if golden is None else str(golden.samples)),
        *(
            ("golden limit", _limit(name, row))
            for name, row in ({} if golden is None else golden.limits).items()
        ),
        ("licence", view.licence),
        *((f"sha256 of {name}", digest) for name, digest in view.hashes.items()),
        *(
            (name, _figure(value, view.measured_by.get(name, "")))
            for name, value in view.metrics.items()
        ),
        ("published", "" if view.signature is None else signature_text(view.signature)),
    )
    return ((title, text) for title, text in rows if text)


def _limit(model: str, limit: GoldenLimit) -> str:
    who = f"{model}: " if model else ""
    return (
        f"{who}{limit.min_agreement:.0%} of the {limit.task} and {limit.min_sqnr_db:g} dB "
        f"(measured {limit.measured_agreement:.1%} and {limit.measured_sqnr_db:g} dB)"
    )


def _figure(value: float, how: str) -> str:
    return f"{value:g} ({how})" if how else f"{value:g}"


def signature_text(signature: Signature) -> str:
    """Return a signature as a sentence."""
    keys = ", ".join(key[:12] for key in signature.keys)
    verified = "" if signature.verified else "; not verified here, see `tandem bundle verify`"
    return (
        f"{signature.target} in {signature.repository}, signed by {keys}, until "
        f"{signature.expires}{verified}"
    )


def _pipeline(view: BundleView) -> str:
    pipeline = view.pipeline
    if pipeline.command:
        return f"{pipeline.name}: runs {shlex.join(pipeline.command)}"
    sinks = ", ".join(pipeline.sinks) or "nowhere"
    decoders = ", ".join(pipeline.decoders)
    return f"{pipeline.name}: {', '.join(pipeline.sources)} -> {decoders} -> {sinks}"


def _labels(labels: Sequence[str]) -> str:
    more = ", ..." if len(labels) > SHOWN_LABELS else ""
    return f"{len(labels)}: {', '.join(labels[:SHOWN_LABELS])}{more}"


def _engine(engine: EngineView) -> Iterator[RenderableType]:
    yield Text(printable(f"{engine.member}: {engine.precision} of {engine.model}"), style="bold")
    calibration = engine.calibration
    rows = (
        ("sha256 of model", engine.model_sha256),
        ("inputs", ", ".join(map(_tensor, engine.inputs))),
        ("outputs", ", ".join(map(_tensor, engine.outputs))),
        ("segments", ", ".join(f"{count} on {name}" for name, count in engine.processors.items())),
        ("calibration", "" if calibration is None else f"{calibration.method}, "
         f"{calibration.samples} samples, sha256 of data {calibration.data_sha256}"),
        ("warning", "INT8 ranges were never measured" if engine.uncalibrated else ""),
        ("made with", ", ".join(f"{name} {number}" for name, number in engine.versions.items())),
    )  # fmt: skip
    facts = _grid()
    for title, text in rows:
        if text:
            facts.add_row(title, Text(printable(text)))
    yield facts
    sizes = _table("purpose", "bytes")
    for purpose, size in engine.sizes.items():
        sizes.add_row(purpose, f"{size:,}")
    yield sizes


def _tensor(tensor: TensorView) -> str:
    return f"{tensor.name} {tensor.dtype} {'x'.join(tensor.shape)}"


def _changes(title: str, rows: Sequence[Change]) -> RenderableType:
    table = _table(title, "before", "after")
    for row in rows:
        table.add_row(Text(printable(row.key)), _cell(row.before), _cell(row.after))
    return table


def _cell(text: str | None) -> Text:
    return Text(NOTHING if text is None else printable(text))


def _parts(rows: Sequence[TensorChange], *, every: bool) -> RenderableType:
    table = _table("part", "dtype", "before", "after", "")
    for row in rows:
        if every or row.state != "equal":
            sizes = (f"{row.before_bytes:,}", f"{row.after_bytes:,}")
            table.add_row(Text(printable(row.name)), row.dtype, *sizes, row.state)
    equal = [row for row in rows if row.state == "equal"]
    equal_bytes = sum(row.after_bytes for row in equal)
    return Group(table, Text(f"{len(equal)} parts are equal, {equal_bytes:,} bytes"))


def _fetch(difference: Difference) -> RenderableType:
    fetch = difference.fetch
    table = _table(f"a board that runs {difference.before} fetches", "bytes", "share")
    rows = (
        ("everything", fetch.whole_bytes),
        (f"what its slot lacks ({fetch.chunks - fetch.reused_chunks} of {fetch.chunks} chunks)",
         fetch.reuse_bytes),
        ("the same, as differences", fetch.delta_bytes),
    )  # fmt: skip
    for title, size in rows:
        table.add_row(Text(printable(title)), f"{size:,}", f"{size / fetch.whole_bytes:.1%}")
    return table


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(Text(printable(column)), overflow="fold")
    return table
