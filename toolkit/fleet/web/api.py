"""The API that programs call: a row for each operation, from which the OpenAPI document is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from device.errors import TandemError
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.rollout import values as v
from toolkit.fleet.server.history import history_of
from toolkit.fleet.server.operations import (
    Plan,
    label_device,
    make_plan,
    unknown_device,
)
from toolkit.fleet.server.rollout_request import RolloutRequest, spec_of
from toolkit.fleet.server.times import utc
from toolkit.fleet.server.views import (
    DeviceView,
    DeviceViewPage,
    RolloutView,
    device_page,
    device_view,
    rollout_page,
    rollout_views,
)
from toolkit.fleet.store import log
from toolkit.fleet.store.accounts import Account, Role
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.device_queries import FleetCounts, fleet_counts
from toolkit.fleet.store.devices import load_device, load_ear
from toolkit.fleet.trust.publish import find_stored, list_stored
from toolkit.fleet.web.access import RefusedError
from toolkit.fleet.web.forms import Planned, order_rollout, start_planned, who
from toolkit.fleet.web.pages.devices import filter_of
from toolkit.fleet.web.pages.rollouts import find_spec
from toolkit.fleet.web.visit import Visit

ROOT = "/api/v1"
MAX_PAGE = 1000

Limit = Annotated[int, Meta(ge=1, le=MAX_PAGE)]


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what the API takes and gives."""


class Problem(_Body, frozen=True, kw_only=True):
    """Why something was not done: the status of HTTP, and a sentence."""

    status: int
    reason: str


class DeviceQuery(_Body, frozen=True, kw_only=True):
    """Which devices: those that fulfil all of it, sorted, a page of them. `label`: KEY=VALUE, more
    with commas. `after`: as the page before says."""

    q: str = ""
    state: str = ""
    problem: str = ""
    phase: str = ""
    rollout: Annotated[int, Meta(ge=1)] | None = None
    release: str = ""
    version: str = ""
    profile: str = ""
    label: str = ""
    sort: str = "id"
    down: Literal["", "yes"] = ""
    after: str = ""
    limit: Limit = 50


class PageQuery(_Body, frozen=True, kw_only=True):
    """A page of rows: those with a number below `before` (0: the newest)."""

    before: Annotated[int, Meta(ge=0, le=2**62)] = 0
    limit: Limit = 50


class LabelChanges(_Body, frozen=True, kw_only=True):
    """Labels that are set, or with null taken away."""

    changes: dict[str, str | None]


class Labels(_Body, frozen=True, kw_only=True):
    """The operator's labels of a device."""

    device: str
    labels: dict[str, str]


class HistoryRow(_Body, frozen=True, kw_only=True):
    """What happened to a device, in which rollout (0: none)."""

    at: str
    rollout: int
    text: str


class AuditRow(_Body, frozen=True, kw_only=True):
    """A row of the audit log; `body` is JSON, of a long one the beginning: events have it whole."""

    seq: int
    at: str
    who: str
    rollout: int
    kind: str
    body: str
    hash: str


class BundleRow(_Body, frozen=True, kw_only=True):
    """A bundle that can be rolled out."""

    name: str
    version: str
    profile: str
    sha256: str
    bytes: int


class PlanRequest(_Body, frozen=True, kw_only=True):
    """A rollout that is asked for: the SHA-256 of a bundle, and how it is rolled out."""

    bundle: str
    rollout: RolloutRequest = RolloutRequest()


class StartRequest(_Body, frozen=True, kw_only=True):
    """A rollout that shall begin. `devices`: how many devices the plan had; if it is another number
    now, nothing begins."""

    bundle: str
    devices: int
    rollout: RolloutRequest = RolloutRequest()


class StartedRollout(_Body, frozen=True, kw_only=True):
    """A rollout that has begun."""

    number: int
    plan: Plan


class OrderRequest(_Body, frozen=True, kw_only=True):
    """An order to a rollout."""

    order: v.RolloutAction


@dataclass(frozen=True, slots=True)
class Call:
    """A request to an operation: parameters of the path, the query and the body, checked."""

    fleet: Fleet
    account: Account
    params: Mapping[str, str]
    query: Any
    body: Any

    def number(self) -> int:
        """Return the number of a rollout in the path. Raises RefusedError."""
        return Visit(self.params, {}, self.account).number("number", least=1)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation: its method and path, who may, what it takes and gives, and what does it."""

    method: Literal["GET", "POST", "PATCH"]
    path: str
    role: Role
    text: str
    run: Callable[[Database, Call], Any]
    gives: Any
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None


def _counts(database: Database, _call: Call) -> FleetCounts:
    return fleet_counts(database, load_ear(database))


def _devices(database: Database, call: Call) -> DeviceViewPage:
    query: DeviceQuery = call.query
    texts = {
        name: str(value)
        for name, value in msgspec.structs.asdict(query).items()
        if value not in (None, "")
    }
    where = filter_of(Visit({}, texts, call.account))
    return device_page(
        database, where, sort=query.sort, down=query.down == "yes", after=query.after,
        limit=query.limit,
    )  # fmt: skip


def _device(database: Database, call: Call) -> DeviceView:
    view = device_view(database, call.params["device"])
    if view is None:
        raise RefusedError(404, unknown_device(database, call.params["device"]))
    return view


def _label(database: Database, call: Call) -> Labels:
    device, body = call.params["device"], call.body
    if load_device(database, device) is None:
        raise RefusedError(404, unknown_device(database, device))
    for key in body.changes:
        if "=" in key:
            raise RefusedError(409, f"{key!r} is no key of a label: it has an =")
    changes = [f"{key}={value or ''}" for key, value in body.changes.items()]
    label_device(database, device, changes, who(call.account))
    row = load_device(database, device)
    return Labels(device=device, labels={} if row is None else dict(row.labels))


def _history(database: Database, call: Call) -> list[HistoryRow]:
    device = call.params["device"]
    if load_device(database, device) is None:
        raise RefusedError(404, unknown_device(database, device))
    return [
        HistoryRow(at=utc(row.at_s), rollout=row.rollout, text=row.text)
        for row in history_of(database, device)
    ]


def _rollouts(database: Database, call: Call) -> list[RolloutView]:
    return rollout_page(database, before=call.query.before, limit=call.query.limit)


def _rollout(database: Database, call: Call) -> RolloutView:
    number = call.number()
    find_spec(database, number)
    return rollout_views(database, [number])[0]


def _order(database: Database, call: Call) -> RolloutView:
    number = call.number()
    find_spec(database, number)
    order_rollout(database, call.account, number, call.body.order)
    return rollout_views(database, [number])[0]


def _plan(database: Database, call: Call) -> Plan:
    bundle = find_stored(call.fleet.folder, call.body.bundle)
    return make_plan(database, spec_of(database, call.body.rollout, bundle.path))


def _start(database: Database, call: Call) -> StartedRollout:
    body: StartRequest = call.body
    bundle = find_stored(call.fleet.folder, body.bundle)
    planned = Planned(call.fleet, bundle, body.rollout, body.devices)
    number, plan = start_planned(database, call.account, planned)
    return StartedRollout(number=number, plan=plan)


def _bundles(_database: Database, call: Call) -> list[BundleRow]:
    return [
        BundleRow(
            name=bundle.name, version=bundle.version, profile=bundle.profile, sha256=bundle.sha256,
            bytes=bundle.bytes,
        )
        for bundle in list_stored(call.fleet.folder).bundles
    ]  # fmt: skip


def _audit(database: Database, call: Call) -> list[AuditRow]:
    return [
        AuditRow(
            seq=row.seq, at=utc(row.at_s), who=row.who, rollout=row.rollout, kind=row.kind,
            body=row.body, hash=row.hash,
        )
        for row in log.page_before(database, call.query.before or None, call.query.limit)
    ]  # fmt: skip


OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/fleet", "viewer", "The fleet in figures.", _counts, FleetCounts),
    Operation("GET", "/devices", "viewer", "A page of devices.", _devices, DeviceViewPage,
        query=DeviceQuery),
    Operation("GET", "/devices/{device}", "viewer", "One device.", _device, DeviceView),
    Operation("GET", "/devices/{device}/history", "viewer", "What happened to a device.", _history,
        list[HistoryRow]),
    Operation("PATCH", "/devices/{device}/labels", "operator", "Change labels.", _label, Labels,
        body=LabelChanges),
    Operation("GET", "/rollouts", "viewer", "A page of rollouts.", _rollouts, list[RolloutView],
        query=PageQuery),
    Operation("POST", "/rollouts", "operator", "Start a rollout.", _start, StartedRollout,
        body=StartRequest),
    Operation("POST", "/rollouts/plan", "operator", "What a rollout would do.", _plan, Plan,
        body=PlanRequest),
    Operation("GET", "/rollouts/{number}", "viewer", "One rollout.", _rollout, RolloutView),
    Operation("POST", "/rollouts/{number}/orders", "operator", "Order a rollout.", _order,
        RolloutView, body=OrderRequest),
    Operation("GET", "/bundles", "viewer", "Bundles that can be rolled out.", _bundles,
        list[BundleRow]),
    Operation("GET", "/audit", "viewer", "The audit log, the newest first.", _audit,
        list[AuditRow], query=PageQuery),
)  # fmt: skip


def run_operation(database: Database, operation: Operation, call: Call) -> bytes:
    """Return the answer of an operation in JSON. Raises RefusedError."""
    try:
        return msgspec.json.encode(operation.run(database, call))
    except RefusedError:
        raise
    except TandemError as error:
        raise RefusedError(409, str(error)) from error


def check_query(operation: Operation, query: Mapping[str, str]) -> msgspec.Struct | None:
    """Return the query of an operation as its value. Raises RefusedError."""
    if operation.query is None:
        if query:
            raise RefusedError(400, f"{operation.path} takes no query: {', '.join(query)}")
        return None
    try:
        return msgspec.convert(query, operation.query, strict=False)
    except msgspec.ValidationError as error:
        raise RefusedError(400, f"the query cannot be read: {error}") from error


def check_body(operation: Operation, body: bytes) -> msgspec.Struct | None:
    """Return the body of an operation as its value. Raises RefusedError."""
    if operation.body is None:
        return None
    try:
        return msgspec.json.decode(body, type=operation.body)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise RefusedError(400, f"the body cannot be read: {error}") from error


# -- the document

EVENTS_TEXT = (
    "Changes as server-sent events: `log` (a row of the audit log), `device` (a device that has "
    "changed), `missed` (too many to send: read the lists anew). `Last-Event-ID` goes on after one."
)


def openapi(fleet: str) -> dict[str, Any]:
    """Return the OpenAPI document of the API (OpenAPI 3.1)."""
    types = [Problem, *(one.gives for one in OPERATIONS)]
    types += [one.body for one in OPERATIONS if one.body is not None]
    _, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(ROOT + operation.path, {})[operation.method.lower()] = _described(
            operation
        )
    paths[f"{ROOT}/events"] = {
        "get": {
            "operationId": "follow_events",
            "summary": EVENTS_TEXT,
            "responses": {"200": {"description": "Events", "content": {"text/event-stream": {}}}},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Fleet {fleet}", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _described(operation: Operation) -> dict[str, Any]:
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    if operation.query is not None:
        schema = msgspec.json.schema(operation.query)
        properties = next(iter(schema["$defs"].values()))["properties"]
        parameters += [
            {"name": name, "in": "query", "schema": value} for name, value in properties.items()
        ]
    described: dict[str, Any] = {
        "operationId": operation.run.__name__.strip("_"),
        "summary": f"{operation.text} Role: {operation.role}.",
        "parameters": parameters,
        "responses": {
            "200": {"description": "Done", "content": _content(operation.gives)},
            "default": {"description": "Not done", "content": _content(Problem)},
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.body)}
    return described


def _content(type_: object) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components(
        [type_], ref_template="#/components/schemas/{name}"
    )
    return {"application/json": {"schema": schema}}


assert set(get_args(v.RolloutAction)) == {"pause", "resume", "approve", "abort", "rollback"}
