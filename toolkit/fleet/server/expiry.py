"""What of a fleet ends with time, when, and what to do before: signatures, certificates, lists.

What a running server renews by itself (timestamp, snapshot, its own certificates) is said only when
that has not happened in time; what needs a person, 30 and 7 days before.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Literal

from toolkit.fleet.authority import CLAIM, OPERATOR, SERVER, Authority, read_certificate
from toolkit.fleet.folder import IDENTITY
from toolkit.fleet.trust.certificates import identities
from toolkit.fleet.trust.publish import is_signed
from toolkit.fleet.trust.repository import FleetRepository

Urgency = Literal["fine", "soon", "urgent", "over"]
URGENCIES: tuple[Urgency, ...] = ("fine", "soon", "urgent", "over")
SOON_DAYS, URGENT_DAYS = 30, 7
SERVED = "run `tandem fleet serve`, which renews it, or `tandem fleet refresh`"
RENEWED = "run `tandem fleet serve`, which renews it"


@dataclass(frozen=True, slots=True)
class Rule:
    """When an expiry is soon and when it is urgent, in days before it, and what to do."""

    soon_days: int
    urgent_days: int
    remedy: str


# By what ends; a timestamp lives for 14 days and is renewed after 7, a snapshot after 30 of 60.
RULES: Mapping[str, Rule] = {
    "root": Rule(SOON_DAYS, URGENT_DAYS, "tandem fleet keys rotate root"),
    "targets": Rule(SOON_DAYS, URGENT_DAYS, "tandem fleet keys rotate targets"),
    "director": Rule(SOON_DAYS, URGENT_DAYS, "tandem fleet keys rotate director"),
    "snapshot": Rule(28, URGENT_DAYS, SERVED),
    "timestamp": Rule(6, 2, SERVED),
    "CA": Rule(
        365, 90, "make a new fleet beside this one and enrol its devices: they trust no other CA"
    ),
    "revocation list": Rule(SOON_DAYS, URGENT_DAYS, RENEWED),
    "certificate": Rule(SOON_DAYS, URGENT_DAYS, RENEWED),
    "device": Rule(
        SOON_DAYS,
        URGENT_DAYS,
        "tandem fleet identity expect {name}, then on the board tandem-agent enrol --again",
    ),
}


@dataclass(frozen=True, slots=True)
class ExpiringItem:
    """Something that ends. `kind`: a row of RULES; `name`: which of these."""

    kind: str
    name: str
    ends: datetime

    @property
    def remedy(self) -> str:
        """What to do before."""
        return RULES[self.kind].remedy.format(name=self.name)


def urgency(item: ExpiringItem, now: datetime) -> Urgency:
    """Return how urgent the renewal of an item is."""
    rule, remaining = RULES[item.kind], item.ends - now
    if remaining <= timedelta():
        return "over"
    if remaining <= timedelta(days=rule.urgent_days):
        return "urgent"
    return "soon" if remaining <= timedelta(days=rule.soon_days) else "fine"


def most_urgent(items: Iterable[ExpiringItem], now: datetime) -> Urgency:
    """Return the highest urgency of all."""
    return max((urgency(row, now) for row in items), key=URGENCIES.index, default="fine")


def sentence(item: ExpiringItem, now: datetime) -> str:
    """Return one line on an item that is not fine."""
    what = item.kind if item.kind == item.name else f"{item.kind} {item.name}"
    days = (item.ends - now) / timedelta(days=1)
    when = f"ends in {days:.0f} days, on" if days > 0 else "ended on"
    return f"the {what} {when} {item.ends:%Y-%m-%d %H:%M} UTC: {item.remedy}"


def read_expiry(folder: Path) -> tuple[ExpiringItem, ...]:
    """Return all that ends, the next one first; of a bench without keys, nothing. Of devices, those
    that are enrolled."""
    items: list[ExpiringItem] = []
    if is_signed(folder):
        rows = FleetRepository(folder).expiries()
        items += [ExpiringItem(row.role, row.role, row.expires) for row in rows]
    if (folder / IDENTITY / "ca.key").exists():
        items += _of_identity(Authority(folder / IDENTITY))
    return tuple(sorted(items, key=lambda row: row.ends))


def _of_identity(authority: Authority) -> list[ExpiringItem]:
    folder = authority.folder
    items = [
        ExpiringItem("CA", "CA", read_certificate(folder / "ca.crt").not_valid_after_utc),
        ExpiringItem("revocation list", "revocation list", authority.crl_end()),
    ]
    for name in ("server", SERVER, OPERATOR, CLAIM):
        end = read_certificate(folder / f"{name}.crt").not_valid_after_utc
        items.append(ExpiringItem("certificate", f"{name}.crt", end))
    for row in identities(authority):
        if row.not_after is not None:
            items.append(ExpiringItem("device", row.device, row.not_after))
    return items


def utc_now() -> datetime:
    """Return the time, in UTC."""
    return datetime.now(timezone.utc)
