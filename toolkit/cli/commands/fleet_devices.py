"""`tandem fleet devices`, `device` and `query`: devices, commands to them, saved queries."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.cli.command import (
    FOLDER,
    NEW_FILE,
    NEW_FOLDER,
    argument,
    command,
    group,
    json_option,
    option,
)
from toolkit.cli.options.fleet import fleet_option, watch_option


@dataclass(frozen=True, slots=True)
class Devices:
    """List the devices of the fleet: what they run, and how far an update is.

    Example: tandem fleet devices --fleet fleet/ --where label.site=lab --watch
    """

    folder: Path = fleet_option()
    where: str = option(
        "Only devices that fulfil all of it, such as jetpack>=6,label.site=lab, or @NAME for a "
        "saved query.",
        default="", metavar="LIST",
    )  # fmt: skip
    state: str | None = option(
        "Only devices that are online, late, silent, stopped, lost...", metavar="STATE"
    )
    phase: str | None = option(
        "Only devices in this phase of their rollout: live, failed, ...", metavar="PHASE"
    )
    number: int | None = option("Only devices of this rollout.", "--rollout", min=1, metavar="N")
    search: str = option(
        "Only devices with this text in their id, release, version, profile or labels.",
        default="", metavar="TEXT",
    )  # fmt: skip
    limit: int | None = option(
        "List so many at most.  [default: 100; in JSON all]", min=1, max=10_000, metavar="N"
    )
    after: str = option("Go on after the list that ended with this.", default="", metavar="PLACE")
    as_json: bool = json_option("Print JSON.")
    watch: bool = watch_option()


@dataclass(frozen=True, slots=True)
class ShowDevice:
    """Show all that is known of the device ID.

    Example: tandem fleet device show board-1 --fleet fleet/ --watch
    """

    device: str = argument("ID")
    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")
    watch: bool = watch_option()


@dataclass(frozen=True, slots=True)
class Label:
    """Give the device ID labels, or take them away (KEY=).

    They are above those that the device has of itself. Groups of rollouts are chosen by them.

    Example: tandem fleet device label board-1 group=canary --fleet fleet/
    """

    device: str = argument("ID")
    labels: tuple[str, ...] = argument("KEY=VALUE...", nargs=-1)
    folder: Path = fleet_option()


@dataclass(frozen=True, slots=True)
class RunCommand:
    """Have the device ID do the operation OP once.

    Operations: restart; pipeline state=running|stopped; snapshot [camera= width= quality=];
    log [lines= source=all|agent|pipeline]; logs [seconds=], for `tandem fleet logs -f` to follow
    its lines; report; reboot, where agent.toml allows it.

    Example: tandem fleet device run board-1 log lines=50 --fleet fleet/
    """

    device: str = argument("ID")
    op: str = argument("OP")
    words: tuple[str, ...] = argument("[KEY=VALUE...]", nargs=-1, required=False)
    folder: Path = fleet_option()
    wait_s: float = option(
        "Time to wait for the result; 0: do not wait.",
        "--wait", min=0.0, default=60.0, metavar="S",
    )  # fmt: skip
    expires_s: float = option(
        "A device that receives it later does not execute it.",
        "--expires", min=1.0, max=30 * 86400.0, default=300.0, metavar="S",
    )  # fmt: skip
    output: Path | None = option(
        "Write the picture of a snapshot, or the result in JSON, to this file.",
        "-o", "--output", type=NEW_FILE, metavar="FILE",
    )  # fmt: skip
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Clear:
    """Show the commands of the device ID that have ended, and clear them from the broker.

    `tandem fleet device run` clears those for whose end it has waited.

    Example: tandem fleet device clear board-1 --fleet fleet/
    """

    device: str = argument("ID")
    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Decommission:
    """Take the device ID out of the fleet and of its rollouts, and end what it shall run.

    It is in the fleet again once it connects or reports anew: a new board may have the same id.
    Stop the old one before, or shut it out with `tandem fleet identity revoke`; then `expect` lets
    the new one enrol itself.

    Example: tandem fleet device decommission board-1 --fleet fleet/
    """

    device: str = argument("ID")
    folder: Path = fleet_option()


@dataclass(frozen=True, slots=True)
class RunKit:
    """Run the selftest of KIT, a folder of a board kit, on farm boards, one job per step.

    Boards of the farm have farm = "yes" in [labels] of agent.toml. Each report is a file of its own
    in the folder of -o; a job whose board drops out goes to another one.

    Example: tandem fleet farm kit/ -o reports/ --where label.site=lab --fleet fleet/
    """

    kit: Path = argument(type=FOLDER)
    output: Path = option("The folder for reports.", "-o", type=NEW_FOLDER, required=True)
    where: str = option(
        "What a board must be, beside the kit's profile.", default="", metavar="LIST"
    )
    minutes: float = option("Time for one job.", min=0.1, max=60.0, default=20.0)
    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")


device = group(
    "device",
    """Show, label and decommission one device.

    Example: tandem fleet device show board-1 --fleet fleet/
    """,
    (
        command(ShowDevice, "fleet.devices:show_device", name="show"),
        command(Label, "fleet.devices:label"),
        command(RunCommand, "fleet.devices:run_command", name="run"),
        command(Clear, "fleet.devices:clear"),
        command(Decommission, "fleet.devices:decommission_device", name="decommission"),
    ),
)


@dataclass(frozen=True, slots=True)
class SetQuery:
    """Save the requirements LIST under NAME; with "" the name is taken away.

    @NAME stands for the devices that fulfil it at that moment: in `tandem fleet devices --where`
    and in the groups of a rollout.

    Example: tandem fleet query set lab "label.site=lab,jetpack>=6" --fleet fleet/
    """

    name: str = argument("NAME")
    where: str = argument("LIST")
    folder: Path = fleet_option()


@dataclass(frozen=True, slots=True)
class ListQueries:
    """List the saved queries.

    Example: tandem fleet query list --fleet fleet/
    """

    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")


query = group(
    "query",
    """Save queries of devices under names.

    Example: tandem fleet query list --fleet fleet/
    """,
    (
        command(SetQuery, "fleet.devices:set_query", name="set"),
        command(ListQueries, "fleet.devices:list_queries", name="list"),
    ),
)
