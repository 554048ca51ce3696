"""One device: what it is, what it runs and measures, what happened to it, and its labels."""

from collections import deque
from collections.abc import Iterator, Mapping

from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.server.history import history_of
from toolkit.fleet.server.operations import unknown_device
from toolkit.fleet.server.times import age_text, utc
from toolkit.fleet.server.views import DeviceView, device_view
from toolkit.fleet.store.accounts import Account
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.devices import load_decommissioned
from toolkit.fleet.trust.publish import is_signed
from toolkit.fleet.web.access import RefusedError
from toolkit.fleet.web.frame import View, csrf_slot, field, link, part
from toolkit.fleet.web.pages.answer import buttons
from toolkit.fleet.web.pages.devices import (
    labels_text,
    problems_text,
    rollout_link,
    running_text,
    state_badge,
)
from toolkit.fleet.web.visit import Visit
from toolkit.html.markup import Html, facts, heading, join, markup, paragraph

MAX_HISTORY = 100


def draw_device(database: Database, fleet: Fleet, visit: Visit) -> View:
    """Return one device. Raises RefusedError: it is not known, and has not left the fleet."""
    device = visit.params["device"]
    view = device_view(database, device)
    if view is None:
        return _draw_gone(database, fleet, device, visit.account)
    problems = problems_text(view)
    live = [
        Html(f"<p>{state_badge(view.state)} heard {age_text(view.age_s)}</p>"),
        paragraph(problems, "notice bad") if problems else Html(""),
        Html("<div class=columns>"),
        join([Html("<section>"), heading("Now"), facts(_present(dict(_now(view)))),
            Html("</section><section>"), heading("Board"), facts(_present(dict(_board(view)))),
            Html("</section></div>")]),
        heading("History"),
        _history(database, device),
    ]  # fmt: skip
    below = Html("")
    if visit.account.may("operator"):
        leave = Html(
            f'<p><a class=button href="/devices/{part(device)}/decommission">Take it out of the '
            "fleet...</a></p>"
        )
        below = join([buttons(device), _labels_form(view), leave])
    return View(device, join(live), below=below)


def _draw_gone(database: Database, fleet: Fleet, device: str, account: Account) -> View:
    """Return a device that has left the fleet, and how it comes back."""
    if device not in load_decommissioned(database):
        raise RefusedError(404, unknown_device(database, device))
    notice = paragraph("It has left the fleet. It is back once it connects again.", "notice waits")
    parts: list[Html] = []
    if is_signed(fleet.folder) and account.may("approver"):
        parts.append(Html(
            f'<form method=post action="/devices/{part(device)}/enrol" class=card>'
            f"<h2>A new board under this id</h2>{csrf_slot()}<p>It may ask the fleet for a "
            "certificate once, by <code>tandem-agent enrol</code>.</p>"
            "<p class=buttons><button>Let a board enrol</button></p></form>"
        ))  # fmt: skip
    live = join([notice, heading("History"), _history(database, device)])
    return View(device, live, below=join(parts))


def draw_decommission(database: Database, _fleet: Fleet, visit: Visit) -> View:
    """Return what it means that a device leaves, and the form that does it."""
    device = visit.params["device"]
    view = device_view(database, device)
    if view is None:
        raise RefusedError(404, unknown_device(database, device))
    rollout = join([rollout_link(view), ", which goes on without it"]) if view.rollout else "none"
    about = {
        "State": join([state_badge(view.state), f" heard {age_text(view.age_s)}"]),
        "Runs": f"{running_text(view)}, and goes on with it",
        "Rollout": rollout,
        "Labels": f"{labels_text(view.labels) or 'none'}; the operators' are lost",
    }
    parts = [facts(about)]
    if view.state in ("online", "late"):
        parts.append(paragraph(
            "It is connected: it comes back as soon as it reports again. Stop it before, or shut "
            f"it out for good by `tandem fleet identity revoke {device}`.", "notice waits",
        ))  # fmt: skip
    parts.append(Html(
        f'<form method=post action="/devices/{part(device)}/decommission" class=card>'
        f"{csrf_slot()}{field(f'Type {device} to take it out of the fleet', 'typed')}"
        "<p class=buttons><button class=dangerous>Take it out of the fleet</button></p></form>"
    ))  # fmt: skip
    return View(f"{device} leaves the fleet", Html(""), above=join(parts))


def _now(view: DeviceView) -> Iterator[tuple[str, str]]:
    running = view.running
    yield (
        "Runs",
        ("nothing" if running is None else link(running_text(view), f"/releases/{running.sha256}")),
    )
    yield "Rollout", rollout_link(view)
    if view.pipeline is not None:
        yield "Pipeline", f"{view.pipeline.status} {view.pipeline.reason}".strip()
        yield "Other processor", "; ".join(view.pipeline.degraded)
        yield "Load", view.pipeline.load
    if view.update is not None:
        yield "Update", f"{view.update.phase} {view.update.reason}".replace("_", " ").strip()
    figures = view.measured
    if figures is not None and figures.frames:
        yield "Frames", f"{figures.frames:,}, {figures.errors:,} lost to faults"
        yield "Rate", f"{figures.fps:.1f} frames a second"
        yield "Latency", f"{figures.latency_p50_ms:.1f} ms, p95 {figures.latency_p95_ms:.1f} ms"
    if figures is not None and figures.temperature_c is not None:
        yield "Temperature", f"{figures.temperature_c:.0f} degrees Celsius"
    yield "Labels", ", ".join(f"{key}={value}" for key, value in sorted(view.labels.items()))


def _board(view: DeviceView) -> Iterator[tuple[str, str]]:
    yield "Profile", view.profile
    yield "Signatures", "takes unsigned releases (dev = true)" if view.dev else "required"
    yield "Last heard", view.last_heard or "never"
    yield "Beats", "" if view.beats else "none: its agent is older, so silence is not noticed"
    yield "Its clock", view.clock
    if view.facts is not None:
        facts_ = view.facts
        yield "Module", facts_.module
        yield "Power mode", facts_.power_mode
        yield "JetPack", facts_.jetpack
        yield "TensorRT", facts_.tensorrt
        yield "DLA cores", str(facts_.dla_cores)
        yield "Memory", f"{facts_.memory_mb:,} MB" if facts_.memory_mb else ""
        yield "Free", f"{facts_.free_mb:,} MB" if facts_.free_mb else ""


def _present(rows: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in rows.items() if value}


def _history(database: Database, device: str) -> Html:
    entries = reversed(deque(history_of(database, device), MAX_HISTORY))
    rows = "".join(
        f"<li><span class=muted>{utc(entry.at_s)}</span> "
        + (link(f"rollout {entry.rollout}", f"/rollouts/{entry.rollout}") if entry.rollout else "")
        + f" {markup(entry.text)}</li>"
        for entry in entries
    )
    return Html(f"<ol class=history>{rows}</ol>") if rows else paragraph("Nothing yet.", "muted")


def _labels_form(view: DeviceView) -> Html:
    labels_field = field(
        "Labels", "labels", hint="KEY=VALUE sets one, KEY= takes it away; more with blanks"
    )
    return Html(
        f'<form method=post action="/devices/{part(view.id)}/labels" class=card>'
        f"<h2>Change labels</h2>{csrf_slot()}{labels_field}"
        "<p class=buttons><button class=primary>Change</button></p></form>"
    )
