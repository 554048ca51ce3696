"""How the views of a fleet look on a terminal."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from toolkit.fleet.rollout import values as v
from toolkit.fleet.server.history import printable
from toolkit.fleet.server.operations import STATUS_WORDS, Plan
from toolkit.fleet.server.times import age_text
from toolkit.fleet.server.views import DeviceView, GroupView, RolloutView

PLANNED = 5  # devices of a group that a plan lists
LISTED_LABELS = 8  # of a device in a list; `tandem fleet device show` has them all
MAX_WORDS = 48  # characters of a label in a list
MAX_REASON = 400  # characters of a reason in a list
COLOURS: Mapping[v.Status, str] = {
    "running": "cyan",
    "scheduled": "cyan",
    "paused": "yellow",
    "approval": "yellow",
    "rolling_back": "red",
    "finished": "green",
    "aborted": "red",
    "rolled_back": "red",
}
NO_SERVER = "No server runs: orders wait until `tandem fleet serve` does."


def rollouts_table(views: Sequence[RolloutView]) -> RenderableType:
    """Return the list of all rollouts."""
    table = _table("rollout", "release", "profile", "status", "live", "begun")
    for view in views:
        table.add_row(
            str(view.number),
            _text(f"{view.name} {view.version}"),
            _text(view.profile),
            _status(view),
            f"{view.live} of {view.devices}{_taken(view)}",
            view.created,
        )
    return _with_server(table, views)


def _taken(view: RolloutView) -> str:
    numbers = ", ".join(map(str, view.taken_by))
    return f" (then taken by {numbers})" if numbers else ""


def rollout_table(view: RolloutView) -> RenderableType:
    """Return one rollout with its groups and failures."""
    head = Text.assemble(
        (f"rollout {view.number}: {view.name} {view.version}", "bold"), " is ", _status(view)
    )
    if view.reason:
        head.append(f": {view.reason}")
    table = _table("group", "devices", "live", "", "pending", "sent", "failed", "others")
    for group in view.groups:
        table.add_row(*_group_cells(group))
    parts: list[RenderableType] = [head, table]
    if view.window:
        parts.append(_text(f"devices install it in their maintenance window, {view.window}"))
    if view.total_bytes:
        received, total = view.received_bytes / 1e6, view.total_bytes / 1e6
        parts.append(_text(f"{received:.1f} of {total:.1f} MB downloaded"))
    parts += [
        _text(
            f"{group.name}: on {group.shadow_frames} live frames {share:.2%} or more agree "
            "with the release before"
        )
        for group in view.groups
        if (share := group.shadow_agreement) is not None
    ]
    parts += [
        _text(f"rollout {number} has taken {count} of its devices since it ended")
        for number, count in view.taken_by.items()
    ]
    if view.failures:
        rows = _table("device", "group", "phase", "reason")
        for failure in view.failures:
            reason = _text(_cut(failure.reason, MAX_REASON))
            rows.add_row(failure.device, _text(failure.group), failure.phase, reason)
        parts.append(rows)
    return _with_server(Group(*parts), [view])


def _group_cells(group: GroupView) -> list[RenderableType]:
    phases = group.phases
    failed = phases.get("failed", 0) + phases.get("timed_out", 0)
    others = [
        f"{count} {phase}"
        for phase, count in phases.items()
        if phase not in ("live", "pending", "sent", "failed", "timed_out")
    ]
    live = phases.get("live", 0)
    return [
        _text(group.name),
        str(group.devices),
        str(live),
        ProgressBar(total=max(1, group.devices), completed=live, width=20),
        str(phases.get("pending", 0)),
        str(phases.get("sent", 0)),
        _text(str(failed), style="red" if failed else ""),
        ", ".join(others),
    ]


def devices_table(
    views: Sequence[DeviceView], counts: Mapping[str, int] | None = None, after: str = ""
) -> RenderableType:
    """Return a page of devices. `counts`: how many devices of all pages are in each presence, None:
    there is no other page; `after`: what asks for the next page."""
    columns = ("device", "state", "heard", "profile", "runs", "update", "rollout", "labels")
    table = _table(*columns, "problems")
    for view in views:
        table.add_row(
            Text.assemble(view.id, (" dev", "red") if view.dev else ""),
            _text(view.state, style="" if view.state == "online" else "yellow"),
            age_text(view.age_s) if view.beats else f"{age_text(view.age_s)} (no beats)",
            _text(view.profile),
            _running(view),
            _update(view),
            f"{view.rollout} {view.phase}" if view.rollout else "",
            _text(_labels(view, LISTED_LABELS)),
            str(len(view.problems)) if view.problems else "",
        )
    states = Counter(view.state for view in views)
    if counts is not None:
        states = Counter()
        for presence, count in counts.items():  # a late one is shown as it was: online
            states["online" if presence == "late" else presence] += count
    total = sum(states.values())
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    total_line = _text(f"{total} devices: {counted}" if total else "0 devices")
    parts: list[RenderableType] = [table, total_line]
    if after:
        parts.append(_text(f"{len(views)} are listed; the next ones: --after {after}"))
    return Group(*parts)


def device_table(view: DeviceView) -> RenderableType:
    """Return all that is known of one device."""
    table = Table(box=None, show_header=False)
    facts, measured = view.facts, view.measured
    rows: list[tuple[str, str]] = [
        ("state", f"{view.state}, heard {view.last_heard or 'never'}"),
        ("silent since", view.silent_since),
        ("beats", "" if view.beats else "none: its agent is older, so silence is not noticed"),
        ("its clock", view.clock),
        ("profile", view.profile),
        ("signatures", "takes unsigned releases (dev = true)" if view.dev else "required"),
        ("runs", _running(view).plain),
        ("pipeline", "" if view.pipeline is None else _pipeline(view)),
        ("update", _update(view).plain),
        ("reason", "" if view.update is None else view.update.reason),
        ("rollout", f"{view.rollout}: {view.phase}" if view.rollout else "none"),
        ("labels", _labels(view)),
        ("agent", view.agent),
    ]
    if (versions := view.versions) is not None:
        given_up = f"{versions.failed}: {versions.reason}" if versions.failed else ""
        rows += [
            ("agent release", versions.running or "the installed agent"),
            ("agent on trial", versions.trial),
            ("agent given up", given_up),
        ]
    if facts is not None:
        rows += [
            ("module", facts.module),
            ("JetPack", facts.jetpack),
            ("L4T", facts.l4t),
            ("Python", facts.python),
            ("TensorRT", facts.tensorrt),
            ("DLA cores", str(facts.dla_cores)),
            ("memory", f"{facts.memory_mb} MB" if facts.memory_mb else ""),
            ("free", f"{facts.free_mb} MB" if facts.free_mb else ""),
        ]
    if measured is not None:
        rows += [
            ("frames", f"{measured.frames}, {measured.errors} lost to faults"),
            ("rate", f"{measured.fps:g} frames a second"),
            ("latency", f"{measured.latency_p50_ms:g} ms, p95 {measured.latency_p95_ms:g} ms"),
            ("golden inputs", _share(measured.golden_agreement, "")),
            (
                "live frames",
                _share(measured.shadow_agreement, f" on {measured.shadow_frames} frames"),
            ),
        ]
    rows += [("problem", problem) for problem in (*view.problems, view.warning) if problem]
    for name, value in rows:
        if value:
            table.add_row(_text(name, style="dim"), _text(value))
    return Group(_text(view.id, style="bold"), table)


def plan_table(plan: Plan) -> RenderableType:
    """Return what a rollout would do."""
    release = plan.release
    head = _text(
        f"{release.name} {release.version} for {release.profile}, {release.blob.bytes / 1e6:.1f} MB"
    )
    groups = _table("group", "devices", "the first of them")
    for group in plan.groups:
        first = ", ".join(group.devices[:PLANNED])
        more = ", ..." if len(group.devices) > PLANNED else ""
        groups.add_row(_text(group.name), str(len(group.devices)), f"{first}{more}")
    parts: list[RenderableType] = [head, groups]
    if plan.unfit:
        unfit = _table("does not fit", "because")
        for row in plan.unfit:
            unfit.add_row(row.device, _text("; ".join(row.reasons)))
        parts.append(unfit)
    members = sum(len(group.devices) for group in plan.groups)
    notes = (
        (len(plan.ungrouped), "fit and are in no group"),
        (len(plan.offline), "are not online: they get it once they are back"),
        (len(plan.unsigned), "take unsigned releases (dev = true)"),
        (members - len(plan.before), "run no release of this fleet: they cannot be rolled back"),
    )
    parts += [_text(f"{count} devices {text}") for count, text in notes if count]
    return Group(*parts)


def _with_server(what: RenderableType, views: Sequence[RolloutView]) -> RenderableType:
    if views and not views[0].server:
        return Group(what, _text(NO_SERVER, style="yellow"))
    return what


def _status(view: RolloutView) -> Text:
    return _text(STATUS_WORDS[view.status], style=COLOURS[view.status])


def _running(view: DeviceView) -> Text:
    return _text(
        "nothing" if view.running is None else f"{view.running.name} {view.running.version}"
    )


def _update(view: DeviceView) -> Text:
    update = view.update
    if update is None:
        return _text("")
    if update.phase == "downloading" and update.total_bytes:
        return _text(f"downloading {100 * update.received_bytes // update.total_bytes} %")
    return _text(update.phase, style="red" if update.phase in ("refused", "rolled_back") else "")


def _pipeline(view: DeviceView) -> str:
    report = view.pipeline
    assert report is not None
    return f"{report.status}: {report.reason}" if report.reason else report.status


def _share(agreement: float | None, of: str) -> str:
    return "" if agreement is None else f"{100.0 * agreement:.2f} % agree{of}"


def _labels(view: DeviceView, most: int | None = None) -> str:
    rows = [f"{key}={value}" for key, value in sorted(view.labels.items())]
    if most is None:
        return ", ".join(rows)
    more = [f"and {len(rows) - most} more"] if len(rows) > most else []
    return ", ".join([*(_cut(row, MAX_WORDS) for row in rows[:most]), *more])


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _text(text: str, style: str = "") -> Text:
    """Return a text of which nothing steers the terminal: devices say much of it."""
    return Text(printable(text), style=style)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
