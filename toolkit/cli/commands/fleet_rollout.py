"""`tandem fleet rollout` and `rollback`: a release group by group."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.cli.command import FILE, argument, command, group, json_option, option, part
from toolkit.cli.options.fleet import fleet_option, watch_option


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What each device keeps to while it installs the release."""

    window: str | None = option(
        "Install only then, in the device's local time.", metavar="HH:MM-HH:MM"
    )
    confirm_after_s: float | None = option(
        "Health that a device must show before it keeps the release.",
        "--confirm-after", min=0.1, max=86400.0, metavar="S",
    )  # fmt: skip
    shadow_s: float = option(
        "Shadow mode: time in which the new release sees the same live frames as the old one.",
        "--shadow", min=0.0, max=86400.0, default=0.0, show_default=False, metavar="S",
    )  # fmt: skip
    max_bytes_per_s: int | None = option("Limit each device's download.", min=1024, metavar="N")


@dataclass(frozen=True, slots=True)
class Start:
    """Roll a bundle, or with --agent a release of the agent, out to the devices that it fits.

    A gate's limit on latency, temperature or agreement is also told to each device, which then goes
    back by itself.

    Example: tandem fleet rollout start --bundle robot.bundle --groups canary,5%,rest --gate
    "p95_latency_ms<30, errors<1%" --fleet fleet/
    """

    bundle: Path | None = option("The bundle that is rolled out.", type=FILE, metavar="FILE")
    agent: Path | None = option(
        "In its place: a release of the agent, of `tandem bundle agent`.", type=FILE, metavar="FILE"
    )
    folder: Path = fleet_option()
    groups: str = option(
        "In this order: NAME (devices with the label group=NAME, or one of this id), KEY=VALUE, "
        "@NAME (a saved query), N%, rest.", default="rest", metavar="LIST",
    )  # fmt: skip
    gates: str = option(
        "What the bundle must say of itself, and each group have measured before the next begins.",
        "--gate", default="", metavar="LIST",
    )  # fmt: skip
    requires: str = option(
        "What a device must be, such as jetpack>=6,dla_cores>=1,label.site=lab.",
        "--require", default="", metavar="LIST",
    )  # fmt: skip
    rate: str | None = option(
        "Devices a minute; 10/min,x2/50,max=1000 doubles after each 50 that are live. By default "
        "what a server carries, by the size of the bundle.", metavar="N/min",
    )  # fmt: skip
    success: str = option(
        "Minimum share of a group that must be live before the next begins.",
        default="90%",
        metavar="N%",
    )
    max_failures: str = option(
        "Maximum share of each group, or number of devices in all, that may fail.",
        default="10%", metavar="N%|N",
    )  # fmt: skip
    on_failure: Literal["pause", "rollback"] = option(
        "What to do above that, or if a gate does not hold.", default="pause"
    )
    soak: str = option(
        "Soak time after a group passes, before the next begins, such as 30m or 2h.",
        default="0s", show_default=False, metavar="TIME",
    )  # fmt: skip
    start_at: str | None = option(
        "Send nothing before this time, such as 2026-12-01T02:00 (of this machine's zone).",
        metavar="TIME",
    )
    approval: bool = option("Wait after each group for `tandem fleet rollout approve`.")
    timeout_s: float = option(
        "Time limit of each device for its final answer.",
        "--timeout", min=1.0, default=3600.0, metavar="S",
    )  # fmt: skip
    policy: PolicyOptions = part()
    no_late_joiners: bool = option(
        "Leave devices out that appear later. They enter the group rest otherwise."
    )
    retry: bool = option("Try it also where it was rolled back before.")
    dry_run: bool = option("Say what would be done, and to whom not and why.")
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """List all rollouts, or show the groups and failures of rollout N.

    With --watch it goes on until the rollout has ended.

    Example: tandem fleet rollout status 3 --fleet fleet/ --watch
    """

    number: int | None = argument("[N]", required=False, min=1)
    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")
    watch: bool = watch_option()


@dataclass(frozen=True, slots=True)
class RolloutCommand:
    """An order to rollout N."""

    number: int = argument("N", min=1)
    folder: Path = fleet_option()


# The word of an order -> its help.
ORDERS = {
    "pause": "Send nothing more of rollout N until it is resumed. Devices finish what they have "
    "begun.",
    "resume": "Go on with rollout N. The failures so far are tolerated, and its group passes as it "
    "is.",
    "approve": "Let the next group of rollout N begin.",
    "abort": "End rollout N. Devices keep what they have, and finish what they have begun.",
}


@dataclass(frozen=True, slots=True)
class Rollback:
    """Take every device of rollout N, the newest without N, back to the release before.

    They have it in their other slot: no byte is sent again. Devices that a newer rollout has taken
    over stay as they are.

    Example: tandem fleet rollback --fleet fleet/
    """

    number: int | None = argument("[N]", required=False, min=1)
    folder: Path = fleet_option()


rollout = group(
    "rollout",
    """Roll a release out, group by group.

    Example: tandem fleet rollout status 3 --fleet fleet/ --watch
    """,
    (
        command(Start, "fleet.rollout:start"),
        command(RolloutStatus, "fleet.rollout:status"),
        *(
            command(
                RolloutCommand,
                "fleet.rollout:give_order",
                name=word,
                text=f"{text}\n\nExample: tandem fleet rollout {word} 3 --fleet fleet/",
            )
            for word, text in ORDERS.items()
        ),
    ),
)
