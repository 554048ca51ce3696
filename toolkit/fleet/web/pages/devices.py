"""The list of devices: search, filters, sorting, fifty a page; each state of it is an address."""

from collections.abc import Iterator, Mapping, Sequence

from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.server.operations import MAX_LABELLED
from toolkit.fleet.server.times import age_text
from toolkit.fleet.server.views import DeviceView, device_page
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.derived import HOT_C, PROBLEMS
from toolkit.fleet.store.device_queries import (
    PRESENCES,
    SORTS,
    DeviceFilter,
    count_devices,
    stream,
)
from toolkit.fleet.store.devices import load_ear
from toolkit.fleet.web.frame import View, choice, csrf_slot, field, hidden, link, part
from toolkit.fleet.web.visit import Visit, badge
from toolkit.html.markup import Html, facts, join, markup, paragraph

MAX_LABELS = 6  # of a device in the list; its page has them all
MAX_NAMED = 5  # devices of a plan
MAX_WORDS = 40  # characters of a label there

# State -> the kind of its badge.
STATE_KINDS: Mapping[str, str] = {
    "online": "good",
    "late": "waits",
    "silent": "bad",
    "lost": "bad",
    "stopped": "old",
    "unknown": "old",
}
# Column -> the sort of SORTS that its head asks for, empty: it is not sorted by.
COLUMNS: Mapping[str, str] = {
    "Device": "id",
    "State": "state",
    "Heard": "heard",
    "Profile": "profile",
    "Runs": "version",
    "Rollout": "rollout",
    "FPS": "fps",
    "p95 ms": "p95",
    "°C": "temperature",
    "Problems": "problems",
    "Labels": "",
}


def filter_of(visit: Visit) -> DeviceFilter:
    """Return which devices a query asks for. Raises RefusedError, RolloutError."""
    return DeviceFilter(
        presence=_one_of(visit.text("state"), PRESENCES),
        problem=_one_of(visit.text("problem"), ("any", *PROBLEMS)),
        phase=visit.text("phase"),
        rollout=visit.number("rollout") if visit.text("rollout") else None,
        release=visit.text("release"),
        version=visit.text("version"),
        profile=visit.text("profile"),
        labels=_labels(visit.text("label")),
        search=visit.text("q"),
    )


def _one_of(text: str, choices: Sequence[str]) -> str:
    if text and text not in choices:
        raise RolloutError(f"{text!r} is none of {', '.join(choices)}")
    return text


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    for key, equals, value in pairs:
        if not (key.strip() and equals and value.strip()):
            raise RolloutError(f"{text!r} names no label: write KEY=VALUE, such as site=lab")
    return tuple((key.strip(), value.strip()) for key, _, value in pairs)


def draw_devices(database: Database, _fleet: Fleet, visit: Visit) -> View:
    """Return a page of the list."""
    where, ear = filter_of(visit), load_ear(database)
    sort, down = visit.text("sort") or "id", visit.text("down") == "yes"
    page = device_page(database, where, sort=sort, down=down, after=visit.text("after"), ear=ear)
    counts = count_devices(database, where, ear)
    total = sum(counts.values())
    words = ", ".join(f"{counts[name]:,} {name}" for name in PRESENCES if counts.get(name))
    parts = [paragraph(f"{total:,} devices{': ' if words else ''}{words}", "muted")]
    parts.append(_table(visit, page.devices, sort, down))
    if page.after:
        next_page = link("Next page", "/devices", {**visit.query, "after": page.after})
        parts.append(Html(f"<p>{next_page}</p>"))
    below = _bulk(visit) if visit.account.may("operator") and total else Html("")
    return View("Devices", join(parts), above=_filters(visit), below=below)


FILTERS = ("q", "state", "problem", "label", "profile", "version", "release", "phase", "rollout")


def _bulk(visit: Visit) -> Html:
    """Return the form that labels all devices of the list; its plan comes first."""
    filters = [hidden(name, visit.text(name)) for name in FILTERS if visit.text(name)]
    labels = field("Labels", "labels", hint="KEY=VALUE sets one, KEY= takes it away; with blanks")
    return Html(
        f"<form method=get action=/bulk/labels class=card><h2>Label all of them</h2>{join(filters)}"
        f"{labels}<p class=buttons><button>Plan</button></p></form>"
    )


def draw_bulk_labels(database: Database, _fleet: Fleet, visit: Visit) -> View:
    """Return the plan of labels for all devices of a filter, and the button that sets them."""
    devices = devices_of(database, visit)
    changes = visit.text("labels").split()
    if not changes:
        raise RolloutError("no label is named: write KEY=VALUE, or KEY= to take one away")
    count = len(devices)
    first = ", ".join(devices[:MAX_NAMED]) + (", ..." if count > MAX_NAMED else "")
    filters = [hidden(name, visit.text(name)) for name in (*FILTERS, "labels") if visit.text(name)]
    parts = [
        facts({"Devices": f"{count:,}", "The first of them": first, "Labels": " ".join(changes)}),
        Html(f"<form method=post action=/bulk/labels class=card>{csrf_slot()}{join(filters)}"),
        hidden("planned", str(count)),
        field(f"Type {count} to label {count} devices", "count"),
        Html("<p class=buttons><button class=primary>Label them</button></p></form>"),
    ]
    return View("Label devices", Html(""), above=join(parts))


def devices_of(database: Database, visit: Visit) -> list[str]:
    """Return the ids of all devices that a query asks for. Raises RefusedError, RolloutError."""
    ear = load_ear(database)
    where = filter_of(visit)
    total = sum(count_devices(database, where, ear).values())
    if not 0 < total <= MAX_LABELLED:
        raise RolloutError(f"{total:,} devices are like this: 1 to {MAX_LABELLED:,} are labelled")
    return [row.id for row in stream(database, where, ear)]


def _table(visit: Visit, views: Sequence[DeviceView], sort: str, down: bool) -> Html:
    if not views:
        return paragraph("No device is like this. Take a filter away.")
    heads = "".join(_head(visit, name, key, sort, down) for name, key in COLUMNS.items())
    rows = "".join(f"<tr>{''.join(_cells(view))}</tr>" for view in views)
    return Html(
        "<div class=scroll tabindex=0 role=region aria-label=Devices><table>"
        f"<caption>Devices</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        "</div>"
    )


def _head(visit: Visit, name: str, key: str, sort: str, down: bool) -> str:
    if not key:
        return f"<th scope=col>{markup(name)}</th>"
    is_sorted = key == sort
    turned = "yes" if is_sorted and not down else ""
    query = {**visit.query, "sort": key, "down": turned, "after": ""}
    order = f" aria-sort={'descending' if down else 'ascending'}" if is_sorted else ""
    return f"<th scope=col{order}>{link(name, '/devices', query)}</th>"


def _cells(view: DeviceView) -> Iterator[str]:
    yield f"<td>{link(view.id, f'/devices/{part(view.id)}')}{' dev' if view.dev else ''}</td>"
    yield f"<td>{state_badge(view.state)}</td>"
    old = "" if view.state == "online" else " class=old"
    yield f"<td{old}>{age_text(view.age_s)}</td>"
    yield f"<td>{markup(view.profile)}</td>"
    yield f"<td{old}>{markup(running_text(view))}</td>"
    yield f"<td>{rollout_link(view)}</td>"
    figures = view.measured
    has_frames = figures is not None and figures.frames > 0
    yield _number_cell(view, figures.fps if figures and has_frames else None, 1)
    yield _number_cell(view, figures.latency_p95_ms if figures and has_frames else None, 1)
    yield _number_cell(view, figures.temperature_c if figures else None, 0)
    yield f"<td class=long>{markup(problems_text(view))}</td>"
    yield f"<td class=long>{markup(labels_text(view.labels))}</td>"


def _number_cell(view: DeviceView, value: float | None, digits: int) -> str:
    """Return a cell; what was measured by a device that is not heard is grey."""
    old = "" if view.state == "online" else " old"
    return f'<td class="n{old}">{"-" if value is None else f"{value:.{digits}f}"}</td>'


def state_badge(state: str) -> Html:
    """Return a device's state as a badge."""
    return badge(state, STATE_KINDS.get(state, "old"))


def running_text(view: DeviceView) -> str:
    """Return what a device runs, or how far its update is."""
    update, running = view.update, view.running
    text = "nothing" if running is None else f"{running.name} {running.version}"
    if update is not None and update.phase == "downloading" and update.total_bytes:
        return f"{text}, downloading {100 * update.received_bytes // update.total_bytes} %"
    return text


def rollout_link(view: DeviceView) -> Html:
    """Return the rollout that has a device, and its phase there."""
    if not view.rollout:
        return Html("")
    return join([link(str(view.rollout), f"/rollouts/{view.rollout}"), f" {view.phase}"])


def problems_text(view: DeviceView) -> str:
    """Return what is wrong with a device, in one line."""
    report = view.pipeline
    texts = [*view.problems, view.warning]
    if report is not None:
        texts += [*report.degraded, report.load]
        if report.status in ("stalled", "failed", "restarting", "degraded"):
            texts.append(f"pipeline {report.status}: {report.reason}".removesuffix(": "))
    degrees = None if view.measured is None else view.measured.temperature_c
    if degrees is not None and degrees >= HOT_C:
        texts.append(f"{degrees:.0f} °C")
    if view.update is not None and view.update.phase in ("refused", "rolled_back"):
        texts.append(f"update {view.update.phase.replace('_', ' ')}: {view.update.reason}")
    return "; ".join(text for text in texts if text)


def labels_text(labels: Mapping[str, str]) -> str:
    """Return the first labels of a device."""
    rows = [f"{key}={value}" for key, value in sorted(labels.items())]
    short = [row if len(row) <= MAX_WORDS else f"{row[:MAX_WORDS]}..." for row in rows]
    more = [f"and {len(rows) - MAX_LABELS} more"] if len(rows) > MAX_LABELS else []
    return ", ".join([*short[:MAX_LABELS], *more])


def _filters(visit: Visit) -> Html:
    """Return the form by which the list is narrowed; its address says all of it."""
    states = [("", "any"), *((name, name) for name in PRESENCES)]
    problems = [("", "any or none"), ("any", "any"), *((name, name) for name in PROBLEMS)]
    fields = join(
        [
            field("Search", "q", visit.text("q"), hint="id, release, version, profile or label"),
            choice("State", "state", states, visit.text("state")),
            choice("Problem", "problem", problems, visit.text("problem")),
            field("Label", "label", visit.text("label"), hint="KEY=VALUE, more with commas"),
            field("Profile", "profile", visit.text("profile")),
            field("Version", "version", visit.text("version")),
        ]
    )
    return Html(
        "<form method=get action=/devices class=card role=search>"
        f"<div class=fields>{fields}</div>"
        '<p class=buttons><button class=primary>Show</button><a class=button href="/devices">All'
        "</a></p></form>"
    )


assert set(COLUMNS.values()) - {""} <= set(SORTS)
