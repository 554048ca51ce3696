"""The first page: who is there, what is rolled out, what is wrong, which versions run."""

from collections.abc import Mapping, Sequence

from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.rollout.liveness import Outage
from toolkit.fleet.rollout.values import ENDED
from toolkit.fleet.server.times import age_text, utc
from toolkit.fleet.server.views import device_page, open_rollouts, read_outages
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.device_queries import (
    PRESENCES,
    DeviceFilter,
    FleetCounts,
    RunningCount,
    fleet_counts,
)
from toolkit.fleet.store.devices import load_ear
from toolkit.fleet.store.presence import PresenceSample, load_samples
from toolkit.fleet.web.frame import View, link, part
from toolkit.fleet.web.pages.devices import STATE_KINDS, problems_text, state_badge
from toolkit.fleet.web.pages.rollouts import draw_progress, new_rollout_link, server_notice
from toolkit.fleet.web.visit import Visit
from toolkit.html.markup import Html, Number, heading, join, markup, paragraph, table

MAX_PROBLEMS = 10  # devices that the page names
MAX_VERSIONS = 20
MAX_OUTAGES = 3
DAY_S = 86400.0

# Kind of a problem -> how the page calls devices that have it.
PROBLEM_WORDS: Mapping[str, str] = {
    "pipeline": "pipeline not running well",
    "fallback": "segment left its processor",
    "throttled": "slowed down",
    "hot": "hot",
    "update": "update refused or rolled back",
    "device": "device reports a fault",
}


def draw_overview(database: Database, fleet: Fleet, visit: Visit) -> View:
    """Return the first page."""
    ear = load_ear(database)
    counts, rollouts = fleet_counts(database, ear), open_rollouts(database)
    parts = [server_notice(database), _presence(counts)]
    parts.append(_day(load_samples(database, database.now_s() - DAY_S)))
    parts += _outages(read_outages(database), ear.until_s)
    parts.append(heading("Rollouts under way"))
    if visit.account.may("operator"):
        parts.append(new_rollout_link())
    parts += [draw_progress(view, visit.account) for view in reversed(rollouts)]
    if not rollouts:
        parts.append(Html("<p class=muted>None. <a href=/rollouts>All rollouts</a></p>"))
    parts += [_problems(database, counts), _versions(counts.running)]
    return View(f"Fleet {fleet.file.name}", join(parts))


def _presence(counts: FleetCounts) -> Html:
    rows = "".join(
        f'<li class={STATE_KINDS[name]}><a href="/devices?state={name}">'
        f"<strong>{counts.presence[name]:,}</strong>{name}</a></li>"
        for name in PRESENCES
        if counts.presence[name] or name in ("online", "late", "silent")
    )
    total = f'<li><a href="/devices"><strong>{counts.devices:,}</strong>devices</a></li>'
    return Html(f"<ul class=counts>{total}{rows}</ul>")


def _day(rows: Sequence[PresenceSample]) -> Html:
    """Return how many devices were heard over the last day as an area over all of them."""
    most = max((sum(row.counts.values()) for row in rows), default=0)
    if len(rows) < 2 or not most:
        return Html("")
    begin, end = rows[0].at_s, rows[-1].at_s
    points = []
    for row in rows:
        heard = row.counts.get("online", 0) + row.counts.get("late", 0)
        points.append(
            f"{1000 * (row.at_s - begin) / max(1, end - begin):.1f},{60 - 58 * heard / most:.1f}"
        )
    least = min(row.counts.get("online", 0) + row.counts.get("late", 0) for row in rows)
    text = f"Heard since {utc(begin)}: {least:,} at least, of {most:,}"
    return Html(
        f'<figure><svg class=day viewBox="0 0 1000 60" preserveAspectRatio=none role=img'
        f' aria-label="{markup(text)}"><polyline points="0,60 {" ".join(points)} 1000,60" />'
        f"</svg><figcaption class=muted>{markup(text)}</figcaption></figure>"
    )


def _outages(outages: Sequence[Outage], now_s: float) -> list[Html]:
    """Return the first outages, and how many more there are."""
    parts = [_outage(outage, now_s) for outage in outages[:MAX_OUTAGES]]
    if len(outages) > MAX_OUTAGES:
        more = link(f"and {len(outages) - MAX_OUTAGES} more", "/devices", {"state": "silent"})
        parts.append(Html(f"<p>{more}</p>"))
    return parts


def _outage(outage: Outage, now_s: float) -> Html:
    place = f" of {outage.place}" if outage.place else ""
    first = ", ".join(outage.devices[:3]) + (", ..." if len(outage.devices) > 3 else "")
    text = f"{len(outage.devices)} of {outage.of} devices{place} are silent: {first}; "
    return paragraph(f"{text}last heard {age_text(now_s - outage.since_s)}", "notice bad")


def _problems(database: Database, counts: FleetCounts) -> Html:
    if not counts.problems["any"]:
        return join([heading("Problems"), paragraph("No device reports one.", "muted")])
    kinds = [
        link(f"{counts.problems[kind]:,} {words}", "/devices", {"problem": kind})
        for kind, words in PROBLEM_WORDS.items()
        if counts.problems.get(kind)
    ]
    page = device_page(database, DeviceFilter(problem="any"), limit=MAX_PROBLEMS)
    rows = [
        (
            link(view.id, f"/devices/{part(view.id)}"),
            state_badge(view.state),
            age_text(view.age_s),
            problems_text(view),
        )
        for view in page.devices
    ]
    return join(
        [
            heading(f"Problems on {counts.problems['any']:,} devices"),
            Html(f"<p>{' · '.join(kinds)}</p>"),
            table(
                "Devices with a problem",
                ("Device", "State", "Heard", "Problem"),
                rows,
                sortable=False,
            ),
        ]
    )


def _versions(running: Sequence[RunningCount]) -> Html:
    """Return versions by profile as bars that lead to the devices."""
    if not running:
        return Html("")
    rows = sorted(running, key=lambda row: -row.devices)
    most = rows[0].devices
    drawn = [
        (
            link(f"{row.release} {row.version}".strip() or "nothing", "/devices",
                {"release": row.release, "version": row.version, "profile": row.profile}),
            row.profile,
            Number(row.devices, f"{row.devices:,}"),
            _bar(row.devices / most),
        )
        for row in rows[:MAX_VERSIONS]
    ]  # fmt: skip
    parts = [
        heading("Versions"),
        table("Versions", ("Runs", "Profile", "Devices", "Share"), drawn, sortable=False),
    ]
    if len(rows) > MAX_VERSIONS:
        parts.append(paragraph(f"and {len(rows) - MAX_VERSIONS} more", "muted"))
    return join(parts)


def _bar(share: float) -> Html:
    return Html(
        '<svg class=bar viewBox="0 0 100 8" preserveAspectRatio=none aria-hidden=true>'
        f'<rect class="phase active" width="{100 * share:.2f}" height=8 /></svg>'
    )


assert set(STATE_KINDS) >= set(PRESENCES)
assert ENDED
