"""All rollouts, and one of them with its groups, failures and buttons."""

from collections import Counter
from collections.abc import Mapping, Sequence

from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.machine import accepts
from toolkit.fleet.server.operations import STATUS_WORDS, get_spec
from toolkit.fleet.server.views import GroupView, RolloutView, rollout_page, rollout_views
from toolkit.fleet.store import lease
from toolkit.fleet.store.accounts import Account, Role
from toolkit.fleet.store.database import Database
from toolkit.fleet.web.access import RefusedError
from toolkit.fleet.web.frame import View, csrf_slot, hidden, link, order_button, part
from toolkit.fleet.web.visit import Visit, badge
from toolkit.html.markup import Html, Number, facts, heading, join, markup, paragraph, table

PAGE_ROWS = 50

# Status -> the kind of its badge.
STATUS_KINDS: Mapping[v.Status, str] = {
    "running": "active",
    "scheduled": "waits",
    "paused": "waits",
    "approval": "waits",
    "rolling_back": "bad",
    "finished": "good",
    "aborted": "bad",
    "rolled_back": "bad",
}
# RolloutAction -> the text of its button, who may give it, and whether it takes something back.
BUTTONS: Mapping[v.RolloutAction, tuple[str, Role, bool]] = {
    "pause": ("Pause", "operator", False),
    "resume": ("Resume", "operator", False),
    "approve": ("Approve", "approver", False),
    "abort": ("End", "operator", True),
    "rollback": ("Roll back", "operator", True),
}
# Phase -> its colour in a bar, in the order in which they stand there.
PHASES: Mapping[v.DevicePhase, str] = {
    "live": "good", "undone": "undone", "sent": "active", "undoing": "active", "silent": "waits",
    "failed": "bad", "timed_out": "bad", "undo_failed": "bad", "pending": "old", "skipped": "old",
    "superseded": "old", "decommissioned": "old",
}  # fmt: skip


def draw_rollouts(database: Database, _fleet: Fleet, visit: Visit) -> View:
    """Return the list of all rollouts, the newest first."""
    rows = rollout_page(database, before=visit.number("before"), limit=PAGE_ROWS)
    parts = [server_notice(database)]
    if visit.account.may("operator"):
        parts.append(new_rollout_link())
    if rows:
        parts.append(table("Rollouts, the newest first", COLUMNS, map(_row, rows), sortable=False))
    else:
        parts.append(paragraph("No release was rolled out yet.", "muted"))
    if rows and rows[-1].number > 1:
        older = link("Older", "/rollouts", {"before": str(rows[-1].number)})
        parts.append(Html(f"<p>{older}</p>"))
    return View("Rollouts", join(parts))


def new_rollout_link() -> Html:
    """Return the button that leads to the form of a rollout."""
    return Html('<p><a class=button href="/rollouts/new">New rollout</a></p>')


COLUMNS = ("Rollout", "Release", "Profile", "Status", "Live", "Of", "Begun")


def _row(view: RolloutView) -> Sequence[str | Html | Number]:
    return (
        link(str(view.number), f"/rollouts/{view.number}"),
        f"{view.name} {view.version}",
        view.profile,
        status_badge(view),
        Number(view.live),
        Number(view.devices),
        view.created,
    )


def draw_rollout(database: Database, _fleet: Fleet, visit: Visit) -> View:
    """Return one rollout. Raises RefusedError: there is none of the number."""
    number = visit.number("number", least=1)
    spec = find_spec(database, number)
    (view,) = rollout_views(database, [number])
    return View(
        f"Rollout {number}: {view.name} {view.version}",
        join([server_notice(database), draw_progress(view, visit.account), _failures(view),
            _settings(view, spec)]),
    )  # fmt: skip


def find_spec(database: Database, number: int) -> v.RolloutSpec:
    """Return the spec of a rollout. Raises RefusedError: there is none of the number."""
    try:
        return get_spec(database, number)
    except RolloutError as error:
        raise RefusedError(404, str(error)) from error


def draw_progress(view: RolloutView, account: Account) -> Html:
    """Return a rollout's status, its groups as bars, and the orders that it takes now."""
    title = link(f"{view.number}: {view.name} {view.version}", f"/rollouts/{view.number}")
    parts = [Html(f"<p>{title} {status_badge(view)}</p>")]
    if view.reason:
        parts.append(paragraph(view.reason, "reason"))
    parts.append(Html(f"<div class=groups>{''.join(map(_group, view.groups))}</div>"))
    if view.total_bytes:
        received, total = view.received_bytes / 1e6, view.total_bytes / 1e6
        parts.append(paragraph(f"{received:.1f} of {total:.1f} MB downloaded", "muted"))
    buttons = [
        _planned_order(text, word, view.number)
        if dangerous
        else order_button(text, word, view.number)
        for word, (text, role, dangerous) in BUTTONS.items()
        if accepts(view.status, word) and account.may(role)
    ]
    if buttons:
        parts.append(Html(f"<p class=buttons>{''.join(buttons)}</p>"))
    return Html(f"<article class=card>{join(parts)}</article>")


def _planned_order(text: str, word: str, number: int) -> Html:
    """Return the button that leads to the plan of an order that takes something back."""
    return Html(
        f'<a class="button dangerous" href="/rollouts/{number}/{word}"'
        f' aria-label="{text} rollout {number}">{text}...</a>'
    )


def draw_order(database: Database, _fleet: Fleet, visit: Visit) -> View:
    """Return what an order would take back, and the button that gives it. Raises RefusedError,
    RolloutError: there is no such order, or it means nothing now."""
    number, word = visit.number("number", least=1), visit.params["order"]
    find_spec(database, number)
    (view,) = rollout_views(database, [number])
    if word not in PLANNED or not accepts(view.status, word):
        raise RolloutError(f"rollout {number} is {STATUS_WORDS[view.status]}: it takes no {word!r}")
    phases = Counter[str]()
    for group in view.groups:
        phases.update(group.phases)
    has = sum(phases[phase] for phase in ("live", "silent", "sent", "failed", "timed_out"))
    text, then, note = PLANNED[word]
    about = {
        "Rollout": join([f"{number}: {view.name} {view.version} ", status_badge(view)]),
        then: f"{has:,} devices",
        "Do not get the release": f"{phases['pending']:,} devices",
    }
    form = Html(
        f"<form method=post action=/orders class=card>{csrf_slot()}"
        f"{hidden('order', f'{word}:{number}')}{hidden('back', f'/rollouts/{number}')}"
        f"<p class=buttons><button class=dangerous>{text} rollout {number}</button>"
        f'<a class=button href="/rollouts/{number}">Leave it as it is</a></p></form>'
    )
    return View(
        f"{text} rollout {number}?", Html(""), above=join([facts(about), paragraph(note), form])
    )


# Order that is planned first -> the text of its button, what becomes of devices that have the
# release or are getting it, and what else is to be known.
PLANNED: Mapping[str, tuple[str, str, str]] = {
    "abort": ("End", "Keep what they have", "It cannot be resumed; it can still be rolled back."),
    "rollback": (
        "Roll back",
        "Go back to what they ran before",
        "Those that ran no release of this fleet before stay as they are.",
    ),
}


def status_badge(view: RolloutView) -> Html:
    """Return a rollout's status as a badge."""
    return badge(STATUS_WORDS[view.status], STATUS_KINDS[view.status])


def _group(group: GroupView) -> str:
    """Return a group as one bar whose parts are its devices by phase."""
    at, parts, total = 0.0, [], max(1, group.devices)
    counts = [(phase, group.phases[phase]) for phase in PHASES if group.phases.get(phase)]
    for phase, count in counts:
        width = 100.0 * count / total
        parts.append(
            f'<rect class="phase {PHASES[phase]}" x="{at:.3f}" width="{width:.3f}" y=0 height=8 />'
        )
        at += width
    text = ", ".join(f"{count} {phase.replace('_', ' ')}" for phase, count in counts) or "empty"
    return (
        f"<div><span>{markup(group.name)} <span class=muted>{group.devices}</span></span>"
        f'<svg viewBox="0 0 100 8" preserveAspectRatio=none role=img aria-label="{markup(text)}">'
        f"{''.join(parts)}</svg><span class=muted>{markup(text)}</span></div>"
    )


def _failures(view: RolloutView) -> Html:
    if not view.failures:
        return Html("")
    rows = [
        (
            link(row.device, f"/devices/{part(row.device)}"),
            row.group,
            row.phase.replace("_", " "),
            row.reason,
        )
        for row in view.failures
    ]
    return join(
        [
            heading("Failures"),
            table("Failures", ("Device", "Group", "Phase", "Reason"), rows, sortable=False),
        ]
    )


def _settings(view: RolloutView, spec: v.RolloutSpec) -> Html:
    limit = spec.max_failures
    rows = {
        "Profile": view.profile,
        "SHA-256": view.sha256,
        "Begun": view.created,
        "Groups": ", ".join(spec.groups),
        "Success": f"{100 * spec.success:g} % of a group",
        "Most failures": f"{limit.count}" if limit.percent is None else f"{limit.percent:g} %",
        "Then": spec.on_failure,
        "Gates": ", ".join(map(str, spec.gates)) or "none",
        "Requires": ", ".join(map(str, spec.requires)) or "nothing",
        "Rate": "no limit" if spec.rate is None else f"{spec.rate.start:g} devices a minute",
        "Approval": "after each group" if spec.approval else "none",
        "Maintenance window": _window(spec),
    }
    return join([heading("Settings"), facts(rows)])


def _window(spec: v.RolloutSpec) -> str:
    begin, end = spec.policy.not_before, spec.policy.not_after
    return f"{begin} to {end} in the devices' local time" if begin or end else "always"


def server_notice(database: Database) -> Html:
    """Return a warning where no server carries orders out."""
    if lease.is_served(database):
        return Html("")
    return paragraph("No server runs: orders wait until `tandem fleet serve` does.", "notice waits")
