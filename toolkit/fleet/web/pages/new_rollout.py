"""A new rollout: what is rolled out and how, its plan, and only then the button that starts it."""

from collections.abc import Mapping

import msgspec

from device.errors import TandemError
from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.server.operations import Plan, make_plan
from toolkit.fleet.server.rollout_request import RolloutRequest, spec_of
from toolkit.fleet.store.database import Database
from toolkit.fleet.trust.publish import StoredBundle, find_stored, list_stored
from toolkit.fleet.web.frame import View, choice, csrf_slot, field, hidden, tick
from toolkit.fleet.web.visit import Visit
from toolkit.html.markup import Html, Number, bullets, heading, join, markup, paragraph, table

PLANNED = 5  # devices of a group that a plan names
MAX_UNFIT = 20  # devices that a plan names
TYPED_ABOVE = 20  # devices; the number of a larger rollout is typed in before it starts

# Field -> its label and hint; each is written as the option of the command line is.
TEXTS: Mapping[str, tuple[str, str]] = {
    "groups": (
        "Groups, one after the other",
        "rest: all at once. canary,5%,rest: those labelled group=canary, then 5 %, then the "
        "others. Also KEY=VALUE and @QUERY",
    ),
    "soak": ("Wait after each group", "30m, 2h; 0s: go on as soon as the group has passed"),
    "requires": (
        "Devices must be",
        "jetpack>=6, dla_cores>=1, label.site=lab; empty: all that fit",
    ),
    "gates": ("Devices must measure", "p95_latency_ms<30, errors<1%; empty: nothing"),
    "success": ("Live of a group", "this share must be before the next begins"),
    "max_failures": ("Most failures", "10% of each group, or 3 devices in all"),
    "rate": ("Rate", "100/min; empty: by the size of the bundle"),
    "start_at": ("Begin at", "2026-12-24T22:00; empty: now"),
    "window": ("Maintenance window", "02:00-04:00 in the devices' local time; empty: always"),
}
TICKS: Mapping[str, str] = {
    "approval": "Wait for an approval after each group",
    "retry": "Also where it was rolled back before",
}
ON_FAILURE = (("pause", "pause"), ("rollback", "roll back"))


def draw_new_rollout(database: Database, fleet: Fleet, visit: Visit) -> View:
    """Return the form, and below it the plan of what stands in it, or why there is none."""
    stored = list_stored(fleet.folder)
    parts = [
        paragraph(f"This bundle cannot be rolled out: {text}", "notice bad")
        for text in stored.unreadable
    ]
    if not stored.bundles:
        text = "No bundle is published yet: `tandem fleet publish BUNDLE` does it."
        return View("New rollout", Html(""), above=join([*parts, paragraph(text)]))
    parts.append(_form(stored.bundles, visit))
    if sha256 := visit.text("bundle"):
        try:
            request = request_of(visit.query)
            bundle = find_stored(fleet.folder, sha256)
            plan = make_plan(database, spec_of(database, request, bundle.path))
            parts += [heading("Plan"), _plan(plan), _start(visit, sha256, plan)]
        except TandemError as error:  # what was written stays in the form
            parts.append(Html(f'<p role=alert class="notice bad">{markup(str(error))}</p>'))
    return View("New rollout", Html(""), above=join(parts))


def request_of(fields: Mapping[str, str]) -> RolloutRequest:
    """Return the request in the fields of a form. Raises RolloutError."""
    values: dict[str, object] = {
        name: fields[name].strip()
        for name in (*TEXTS, "on_failure")
        if fields.get(name, "").strip()
    }
    values |= {name: fields.get(name) == "yes" for name in TICKS}
    try:
        return msgspec.convert(values, RolloutRequest)
    except msgspec.ValidationError as error:
        raise RolloutError(f"the rollout cannot be read: {error}") from error


def _form(bundles: tuple[StoredBundle, ...], visit: Visit) -> Html:
    defaults = msgspec.structs.asdict(RolloutRequest())
    options = [
        (
            bundle.sha256,
            f"{bundle.name} {bundle.version} for {bundle.profile}, {bundle.bytes / 1e6:.1f} MB",
        )
        for bundle in bundles
    ]
    written = {name: visit.query.get(name, str(defaults[name])) for name in TEXTS}
    texts = {
        name: field(label, name, written[name], hint=hint) for name, (label, hint) in TEXTS.items()
    }
    ticks = {
        name: tick(text, name, ticked=visit.text(name) == "yes") for name, text in TICKS.items()
    }
    first = [choice("Bundle", "bundle", options, visit.text("bundle"))]
    first += [texts.pop("groups"), texts.pop("soak"), ticks.pop("approval")]
    failure = choice("If too many fail", "on_failure", ON_FAILURE, visit.text("on_failure"))
    more = [*texts.values(), failure, *ticks.values()]
    is_open = " open" if any(written[name] != str(defaults[name]) for name in texts) else ""
    return Html(
        f"<form method=get action=/rollouts/new class=card><div class=fields>{join(first)}</div>"
        f"<details{is_open}><summary>More settings</summary><div class=fields>{join(more)}</div>"
        "</details><p class=buttons><button class=primary>Plan</button></p></form>"
    )


def _plan(plan: Plan) -> Html:
    rows = [
        (
            group.name,
            Number(len(group.devices)),
            ", ".join(group.devices[:PLANNED]) + (", ..." if len(group.devices) > PLANNED else ""),
        )
        for group in plan.groups
    ]
    notes = (
        (len(plan.ungrouped), "fit and are in no group"),
        (len(plan.offline), "are not online: they get it once they are back"),
        (len(plan.unsigned), "take unsigned releases (dev = true)"),
        (
            plan.members - len(plan.before),
            "run no release of this fleet: they cannot be rolled back",
        ),
    )
    parts = [
        table("Groups", ("Group", "Devices", "The first of them"), rows, sortable=False),
        bullets(f"{count} devices {text}" for count, text in notes if count),
    ]
    if plan.unfit:
        unfit = [(row.device, "; ".join(row.reasons)) for row in plan.unfit[:MAX_UNFIT]]
        parts.append(
            table(
                f"{len(plan.unfit)} devices do not fit",
                ("Device", "Because"),
                unfit,
                sortable=False,
            )
        )
    return join(parts)


def _start(visit: Visit, sha256: str, plan: Plan) -> Html:
    """Return the form that starts what was planned."""
    count = plan.members
    names = (*TEXTS, *TICKS, "on_failure")
    fields = [hidden(name, visit.query[name]) for name in names if visit.query.get(name)]
    fields += [hidden("bundle", sha256), hidden("planned", str(count))]
    if count > TYPED_ABOVE:
        fields.append(field(f"Type {count} to send it to {count} devices", "count"))
    return Html(
        f"<form method=post action=/rollouts class=card>{csrf_slot()}{join(fields)}"
        f"<p class=buttons><button class=primary>{markup(f'Start on {count} devices')}</button></p>"
        "</form>"
    )
