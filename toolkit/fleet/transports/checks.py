"""What keeps a bundle from a board: before anything is sent, and by how its update ended."""

from collections.abc import Callable

from device.control.upload_request import BoardFacts
from device.protocol.documents import Reported, Update
from device.update.admission import SPARE_BYTES
from device.update.decisions import other_profile, wrong_slot
from device.update.versions import is_older, too_old
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.transport import RefusedError, RolledBackError, TransportError

_MEBIBYTE = 1024**2
COPIES = 2  # as it arrives, and unpacked in the slot

Rule = Callable[[BoardFacts, Reported, Delivery], str]


def _module(_: BoardFacts, board: Reported, delivery: Delivery) -> str:
    info = delivery.info
    if info.profile == board.profile:
        return ""
    return other_profile(info.name, info.version, info.profile, board.profile)


def _signature(_: BoardFacts, board: Reported, delivery: Delivery) -> str:
    if delivery.signed or board.dev:
        return ""
    return (
        f"the release {delivery.named} is not signed and this device takes only signed "
        "ones: name the folder of its fleet with `tandem flash --fleet`, or set dev = true in "
        "agent.toml of a board on a bench"
    )


def _floor(facts: BoardFacts, _: Reported, delivery: Delivery) -> str:
    info, floor = delivery.info, facts.answer.min_version
    return too_old(info.name, info.version, floor) if is_older(info.version, floor) else ""


def _room(facts: BoardFacts, _: Reported, delivery: Delivery) -> str:
    return lacks_room(facts.facts.free_mb, delivery.blob.spec.bytes)


def lacks_room(free_mb: int, bundle_bytes: int) -> str:
    """Return why a bundle does not fit into what is free, empty if it does; 0: not known."""
    needed_mb = (COPIES * bundle_bytes + SPARE_BYTES) // _MEBIBYTE
    if not free_mb or free_mb >= needed_mb:
        return ""
    return (
        f"the release needs {needed_mb} MiB on the board while it is installed, {free_mb} MiB are "
        "free: make room there"
    )


def _slot(_: BoardFacts, board: Reported, delivery: Delivery) -> str:
    active, slot = "" if board.running is None else board.running.slot, delivery.policy.slot
    idle = "b" if active == "a" else "a"
    return "" if slot in ("", idle) else wrong_slot(slot, active or None)


# The first that has a sentence refuses the bundle.
RULES: tuple[Rule, ...] = (_module, _signature, _floor, _slot, _room)


def refusal(facts: BoardFacts, delivery: Delivery) -> str:
    """Return why the board would not take a bundle, empty if it would."""
    reported = facts.answer.reported
    if reported is None:
        return ""
    sentences = (rule(facts, reported, delivery) for rule in RULES)
    return next((sentence for sentence in sentences if sentence), "")


def runs_already(facts: BoardFacts, sha256: str) -> bool:
    """Whether these very bytes are live on the board, and nothing else is tried."""
    reported = facts.answer.reported
    if reported is None or reported.running is None:
        return False
    return reported.running.sha256 == sha256 and reported.update.phase not in (
        "verifying",
        "downloading",
        "staging",
        "trial",
        "postponed",
    )


def check_result(update: Update | None, name: str, delivery: Delivery) -> Update:
    """Return the last update of the board `name`, if it runs the release, live or on trial.

    Raises RefusedError, RolledBackError, or TransportError: it is not known how it ended.
    """
    if update is None:
        raise TransportError(
            f"{name} did not say what became of {delivery.named}: flash again to see"
        )
    if update.request != delivery.request:
        raise RefusedError(
            f"another release took the place of {delivery.named}: somebody else updates {name}"
        )
    if update.phase == "refused":
        raise RefusedError(f"{name} refused {delivery.named}: {update.reason}")
    if update.phase == "rolled_back":
        raise RolledBackError(f"{name} rolled {delivery.named} back: {update.reason}")
    if update.phase != "live" and not update.waits_for_commit:
        raise TransportError(
            f"the connection to {name} was lost while {delivery.named} was in the phase "
            f"{update.phase}: the board goes on by itself; flash again to see how it ended"
        )
    return update
