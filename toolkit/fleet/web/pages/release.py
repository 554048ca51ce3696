"""A release: what runs where on a board, and why not on the DLA, as its engines say."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from device.engine.arithmetic import arithmetic_of
from device.errors import TandemError
from toolkit.fleet.bundles.unpacked import unpacked
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.store import rollouts
from toolkit.fleet.store.database import Database
from toolkit.fleet.web.access import RefusedError
from toolkit.fleet.web.frame import View, link
from toolkit.fleet.web.visit import Visit
from toolkit.html.markup import Html, Number, facts, heading, join, paragraph, table

MAX_OTHERS = 200  # nodes that are not on the DLA and are named


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """A segment: its processor, its nodes, and how long the plan says that it takes."""

    name: str
    processor: str
    nodes: int
    predicted_us: float


@dataclass(frozen=True, slots=True)
class EngineRows:
    """An engine: its segments in running order, and each node that is not on the DLA with its
    operator and the reason."""

    member: str
    model: str
    precision: str
    segments: tuple[SegmentRow, ...]
    others: tuple[tuple[str, str, str], ...]


def draw_release(database: Database, _fleet: Fleet, visit: Visit) -> View:
    """Return a release by its SHA-256. Raises RefusedError: the fleet does not have it."""
    sha256 = visit.params["sha256"]
    known = rollouts.load_releases(database).get(sha256)
    if known is None:
        raise RefusedError(404, f"no rollout of this fleet had the release {sha256[:12]!r}")
    spec, path = known
    about = {"Profile": spec.profile, "SHA-256": sha256, "Size": f"{spec.blob.bytes / 1e6:.1f} MB"}
    query = {"release": spec.name, "version": spec.version}
    parts = [facts(about), Html(f"<p>{link('Devices that run it', '/devices', query)}</p>")]
    rows = _engine_rows(path, _identity(path))
    if isinstance(rows, str):
        parts.append(paragraph(f"What runs where is not known here: {rows}", "muted"))
    else:
        parts += map(_engine, rows)
    return View(f"{spec.name} {spec.version}", join(parts))


def _identity(path: Path) -> tuple[int, ...]:
    """Return what differs where a file is another one, or none."""
    try:
        facts = path.stat()
    except OSError:
        return ()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


@lru_cache(64)
def _engine_rows(path: Path, _identity: tuple[int, ...]) -> tuple[EngineRows, ...] | str:
    """Return what runs where in each engine of a bundle, or why that cannot be read. A bundle is
    unpacked for it, so either is kept while the file stays as it is."""
    if not _identity:
        return f"{path} is gone"
    try:
        return _read_engine_rows(path)
    except (TandemError, OSError) as error:
        return str(error)


def _read_engine_rows(path: Path) -> tuple[EngineRows, ...]:
    with unpacked(path) as bundle:
        return tuple(
            EngineRows(
                member=member,
                model=engine.manifest.provenance.model,
                precision=arithmetic_of(engine.manifest),
                segments=tuple(
                    SegmentRow(
                        segment.name,
                        segment.processor,
                        len(segment.nodes),
                        sum(
                            row.predicted_us or 0.0
                            for row in engine.manifest.plan
                            if row.segment == segment.name
                        ),
                    )
                    for segment in engine.manifest.segments
                ),
                others=tuple(
                    (row.node, row.op, row.reason)
                    for row in engine.manifest.plan
                    if not row.processor.startswith("dla")
                ),
            )
            for member, engine in bundle.engines.items()
        )


def _engine(rows: EngineRows) -> Html:
    segments: Sequence[Sequence[str | Number]] = [
        (row.name, row.processor, Number(row.nodes), Number(row.predicted_us / 1000.0,
            f"{row.predicted_us / 1000.0:.3f}"))
        for row in rows.segments
    ]  # fmt: skip
    heads = ("Segment", "Processor", "Nodes", "Predicted ms")
    parts = [
        heading(f"{rows.member}: {rows.model}, {rows.precision}"),
        table("Segments in running order", heads, segments, sortable=False),
    ]
    if rows.others:
        caption = f"{len(rows.others)} nodes that are not on the DLA"
        shown = rows.others[:MAX_OTHERS]
        parts.append(table(caption, ("Node", "Operator", "Because"), shown, sortable=False))
    return join(parts)
