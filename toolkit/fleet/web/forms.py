"""What the site's forms do: each writes an order to the store, which the server carries out."""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode

import msgspec

from device.protocol.documents import Command, CommandState
from toolkit.errors import FleetError, RolloutError
from toolkit.fleet.authority import Authority
from toolkit.fleet.brokers.software import SOFTWARE
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.folder import broker_files
from toolkit.fleet.rollout import values as v
from toolkit.fleet.server.commands import give, make_command
from toolkit.fleet.server.control import ENROL
from toolkit.fleet.server.operations import (
    Plan,
    decommission,
    get_spec,
    label_device,
    label_devices,
    make_plan,
    order,
    start_rollout,
)
from toolkit.fleet.server.rollout_request import RolloutRequest, spec_of
from toolkit.fleet.store import log, rollouts
from toolkit.fleet.store.accounts import Account, Role
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.devices import load_decommissioned
from toolkit.fleet.trust.certificates import expect
from toolkit.fleet.trust.publish import StoredBundle, admit, find_stored, is_signed
from toolkit.fleet.web.access import check_role
from toolkit.fleet.web.frame import own_path, with_notice
from toolkit.fleet.web.pages.answer import DeviceCommand
from toolkit.fleet.web.pages.devices import FILTERS, devices_of
from toolkit.fleet.web.pages.new_rollout import TYPED_ABOVE, request_of
from toolkit.fleet.web.pages.rollouts import BUTTONS
from toolkit.fleet.web.store_threads import StoreThreads
from toolkit.fleet.web.visit import Visit

_NUMBER = re.compile(r"[0-9]{1,15}\Z")
Fields = Mapping[str, str]
COMMAND_WAIT_S = 20.0  # for the device's answer
COMMAND_EXPIRES_S = 60.0


@dataclass(frozen=True, slots=True)
class Form:
    """A form: where it is sent to, who may, and what does it; that returns the page that is shown
    then. Raises RolloutError, RefusedError."""

    path: str
    role: Role
    take: Callable[[Database, Fleet, Account, Fields], str]


def who(account: Account) -> str:
    """Return who gives an order, for the audit log."""
    return f"{account.name} (web)"


def give_order(database: Database, _fleet: Fleet, account: Account, fields: Fields) -> str:
    """Give an order to a rollout."""
    word, _, number = fields.get("order", "").partition(":")
    known: Mapping[str, v.RolloutAction] = {order: order for order in BUTTONS}
    if word not in known or not _NUMBER.match(number):
        raise RolloutError(f"{fields.get('order', '')[:64]!r} is no order to a rollout")
    order_rollout(database, account, int(number), known[word])
    return with_notice(own_path(fields.get("back", "/")), word)


def order_rollout(database: Database, account: Account, number: int, word: v.RolloutAction) -> None:
    """Give an order to a rollout, if the account may. Raises RolloutError, RefusedError."""
    check_role(account, BUTTONS[word][1])
    get_spec(database, number)
    if word == "approve":
        starter = rollouts.started_by(database, number)
        if starter == who(account):
            raise RolloutError(
                f"{account.name} has begun rollout {number}: somebody else approves its groups"
            )
        if not starter:
            raise RolloutError(
                f"it is not known any more who has begun rollout {number}: its groups are "
                "approved by `tandem fleet rollout approve`"
            )
    order(database, number, word, who(account))


def label(database: Database, _fleet: Fleet, account: Account, fields: Fields) -> str:
    """Set or take away labels of a device."""
    device = fields["device"]
    label_device(database, device, fields.get("labels", "").split(), who(account))
    return with_notice(f"/devices/{quote(device, safe='')}", "label")


def leave(database: Database, _fleet: Fleet, account: Account, fields: Fields) -> str:
    """Take a device out of the fleet, if its id was typed in."""
    device = fields["device"]
    if fields.get("typed", "").strip() != device:
        raise RolloutError(f"type {device} to take it out of the fleet")
    decommission(database, device, who(account))
    return with_notice(f"/devices/{quote(device, safe='')}", "decommission")


def let_enrol(database: Database, fleet: Fleet, account: Account, fields: Fields) -> str:
    """Let a board enrol under the id of a device that has left. Raises FleetError: it may not."""
    device = fields["device"]
    if device not in load_decommissioned(database):
        raise RolloutError(f"{device!r} has not left the fleet")
    if not is_signed(fleet.folder):
        raise RolloutError("the fleet has no keys: a board without a certificate may connect")
    if SOFTWARE[broker_files(fleet.folder).software].keeps_accounts:
        raise FleetError(f"the broker has to know it, too: `tandem fleet identity expect {device}`")
    expect(Authority(fleet.folder / "identity"), (device,))
    body = msgspec.json.encode({"device": device}).decode()
    with database.write():
        note = log.Note(who(account), ENROL, body, devices=(device,))
        log.append(database, [note], database.now_s())
    return with_notice(f"/devices/{quote(device, safe='')}", "enrol")


def label_all(database: Database, _fleet: Fleet, account: Account, fields: Fields) -> str:
    """Label all devices of a filter, if they are as many as were planned and typed in."""
    devices = devices_of(database, Visit({}, fields, account))
    count = str(len(devices))
    if not fields.get("planned") == fields.get("count", "").strip() == count:
        raise RolloutError(f"{count} devices are like this now: plan it again, and type {count}")
    label_devices(database, devices, fields.get("labels", "").split(), who(account))
    filters = {name: fields[name] for name in FILTERS if fields.get(name)}
    return with_notice(f"/devices?{urlencode(filters)}", "label")


def start(database: Database, fleet: Fleet, account: Account, fields: Fields) -> str:
    """Start the rollout that was planned, unless the fleet has changed since."""
    planned, typed = fields.get("planned", ""), fields.get("count", "").strip()
    devices = int(planned) if _NUMBER.match(planned) else 0
    if devices > TYPED_ABOVE and typed != planned:
        raise RolloutError(f"the rollout is for {devices} devices: type {devices} to start it")
    bundle = find_stored(fleet.folder, fields.get("bundle", ""))
    request = request_of(fields)
    number, _ = start_planned(database, account, Planned(fleet, bundle, request, devices))
    return with_notice(f"/rollouts/{number}", "start")


@dataclass(frozen=True, slots=True)
class Planned:
    """What somebody has planned: a bundle of a fleet, how it is rolled out, to how many devices."""

    fleet: Fleet
    bundle: StoredBundle
    request: RolloutRequest
    devices: int


def start_planned(database: Database, account: Account, planned: Planned) -> tuple[int, Plan]:
    """Start a rollout; return its number and its plan. Raises RolloutError: the fleet has changed
    since it was planned; TrustError."""
    path = planned.bundle.path
    spec = spec_of(database, planned.request, path)
    plan = make_plan(database, spec)
    if plan.members != planned.devices:
        raise RolloutError(
            f"the plan was for {planned.devices} devices, and it is {plan.members} now: plan it "
            "again"
        )
    spec = msgspec.structs.replace(spec, release=admit(planned.fleet.folder, path))
    return start_rollout(database, spec, plan, path, who(account)), plan


FORMS: tuple[Form, ...] = (
    Form("/orders", "operator", give_order),
    Form("/rollouts", "operator", start),
    Form("/devices/{device}/labels", "operator", label),
    Form("/devices/{device}/decommission", "operator", leave),
    Form("/devices/{device}/enrol", "approver", let_enrol),
    Form("/bulk/labels", "operator", label_all),
)


async def run_command(
    store: StoreThreads, fleet: Fleet, account: Account, command: DeviceCommand
) -> CommandState | None:
    """Give a command and wait for its end; None: the device has not answered.

    Raises RolloutError: the device or the operation is not known, the broker is not there.
    """
    signed = await store.write(_command, command, who(account))
    answer = await asyncio.to_thread(give, fleet, signed, wait_s=COMMAND_WAIT_S)
    return answer.state


def _command(database: Database, command: DeviceCommand, by: str) -> Command:
    return make_command(
        database, command.device, command.op, command.words, expires_s=COMMAND_EXPIRES_S, who=by
    )
