"""What keeps a bundle from a board, by what the board says of itself: before anything is sent."""

from collections.abc import Callable
from dataclasses import dataclass

from device.control.upload_request import BoardFacts
from device.protocol.documents import Reported
from device.update.admission import SPARE_BYTES
from device.update.bundle import BundleInfo
from device.update.decisions import other_profile, wrong_slot
from device.update.versions import is_older, too_old

_MEBIBYTE = 1024**2
COPIES = 2  # as it arrives, and unpacked in the slot


@dataclass(frozen=True, slots=True)
class FlashOptions:
    """What comes with a bundle: signatures, and the slot that it is for, empty for any."""

    signed: bool
    slot: str = ""


Rule = Callable[[BoardFacts, Reported, BundleInfo, int, FlashOptions], str]


def _module(
    _: BoardFacts, board: Reported, info: BundleInfo, size: int, options: FlashOptions
) -> str:
    if info.profile == board.profile:
        return ""
    return other_profile(info.name, info.version, info.profile, board.profile)


def _signature(
    _: BoardFacts, board: Reported, info: BundleInfo, size: int, options: FlashOptions
) -> str:
    if options.signed or board.dev:
        return ""
    return (
        f"the release {info.name} {info.version} is not signed and this device takes only signed "
        "ones: name the folder of its fleet with `tandem flash --fleet`, or set dev = true in "
        "agent.toml of a board on a bench"
    )


def _floor(
    facts: BoardFacts, _: Reported, info: BundleInfo, size: int, options: FlashOptions
) -> str:
    floor = facts.answer.min_version
    return too_old(info.name, info.version, floor) if is_older(info.version, floor) else ""


def _room(
    facts: BoardFacts, _: Reported, info: BundleInfo, size: int, options: FlashOptions
) -> str:
    needed_mb = (COPIES * size + SPARE_BYTES) // _MEBIBYTE
    free_mb = facts.facts.free_mb
    if not free_mb or free_mb >= needed_mb:
        return ""
    return (
        f"the release needs {needed_mb} MiB on the board while it is installed, {free_mb} MiB are "
        "free: make room there"
    )


def _slot(
    facts: BoardFacts, board: Reported, info: BundleInfo, size: int, options: FlashOptions
) -> str:
    active = "" if board.running is None else board.running.slot
    idle = "b" if active == "a" else "a"
    return "" if options.slot in ("", idle) else wrong_slot(options.slot, active or None)


# The first that has a sentence refuses the bundle.
RULES: tuple[Rule, ...] = (_module, _signature, _floor, _slot, _room)


def refusal(facts: BoardFacts, info: BundleInfo, size: int, options: FlashOptions) -> str:
    """Return why the board would not take a bundle of `size` bytes, empty if it would."""
    reported = facts.answer.reported
    if reported is None:
        return ""
    sentences = (rule(facts, reported, info, size, options) for rule in RULES)
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
