"""`tandem fleet rollout`: begin rollouts, watch them, give them orders."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.options.fleet import fleet_option, json_option, operator, show, watch_option

if TYPE_CHECKING:
    from toolkit.fleet.rollout.values import Order
    from toolkit.fleet.server.views import RolloutView


@click.group(epilog="Example: tandem fleet rollout status 3 --fleet fleet/ --watch")
def rollout() -> None:
    """Roll a release out, group by group."""


@rollout.command(epilog='Example: tandem fleet rollout start --bundle robot.bundle '
    '--groups canary,5%,rest --gate "p95_latency_ms<30, errors<1%" --fleet fleet/')  # fmt: skip
@click.option(
    "--bundle",
    required=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What is rolled out.",
)
@fleet_option
@click.option(
    "--groups",
    default="rest",
    show_default=True,
    metavar="LIST",
    help="In this order: NAME (devices with the label group=NAME, or one of this id), KEY=VALUE, "
    "N%, rest.",
)
@click.option(
    "--gate",
    "gates",
    default="",
    metavar="LIST",
    help="What the bundle must say of itself, and each group have measured before the next begins.",
)
@click.option(
    "--require",
    "requires",
    default="",
    metavar="LIST",
    help="What a device must be, such as jetpack>=6,dla_cores>=1,label.site=lab.",
)
@click.option(
    "--rate",
    metavar="N/min",
    help="Devices a minute; 10/min,x2/50,max=1000 doubles after each 50 that are live. By default "
    "what a server carries, by the size of the bundle.",
)
@click.option(
    "--success",
    default="90%",
    show_default=True,
    metavar="N%",
    help="So many of a group must be live before the next begins.",
)
@click.option(
    "--max-failures",
    default="10%",
    show_default=True,
    metavar="N%|N",
    help="At most so many of each group, or so many devices in all, may fail.",
)
@click.option(
    "--on-failure",
    type=click.Choice(["pause", "rollback"]),
    default="pause",
    show_default=True,
    help="What is done above that, or if a gate does not hold.",
)
@click.option(
    "--approval", is_flag=True, help="Wait after each group for `tandem fleet rollout approve`."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=1.0),
    default=3600.0,
    show_default=True,
    metavar="S",
    help="So long a device has for a final answer.",
)
@click.option(
    "--window", metavar="HH:MM-HH:MM", help="Install only then, in the device's local time."
)
@click.option(
    "--confirm-after",
    "confirm_after_s",
    type=FiniteRange(min=0.1, max=86400.0),
    metavar="S",
    help="Health that a device must show before it keeps the release.",
)
@click.option(
    "--shadow",
    "shadow_s",
    type=FiniteRange(min=0.0, max=86400.0),
    default=0.0,
    metavar="S",
    help="Let the new release see live frames beside the old one for so long, and compare.",
)
@click.option(
    "--max-bytes-per-s",
    type=click.IntRange(min=1024),
    metavar="N",
    help="Limit each device's download.",
)
@click.option(
    "--no-late-joiners",
    is_flag=True,
    help="Leave devices out that appear later. They enter the group rest otherwise.",
)
@click.option("--retry", is_flag=True, help="Try it also where it was rolled back before.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and to whom not and why.")
@json_option  # fmt: skip
def start(
    bundle: Path,
    folder: Path,
    groups: str,
    gates: str,
    requires: str,
    rate: str | None,
    success: str,
    max_failures: str,
    on_failure: str,
    approval: bool,
    timeout_s: float,
    window: str | None,
    confirm_after_s: float | None,
    shadow_s: float,
    max_bytes_per_s: int | None,
    no_late_joiners: bool,
    retry: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Roll a bundle out to the devices that it fits.

    A gate's limit on latency, temperature or agreement is also told to each device, which then goes
    back by itself.
    """
    import msgspec

    from device.protocol.documents import InstallPolicy
    from device.update.bundle import read_bundle_info
    from toolkit.cli.commands.fleet.tables import plan_table
    from toolkit.fleet.bundles.facts import statements_of
    from toolkit.fleet.bundles.release import release_of
    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.rollout import values as v
    from toolkit.fleet.rollout.gates import parse_gates
    from toolkit.fleet.rollout.groups import parse_groups
    from toolkit.fleet.rollout.limits import parse_limit, parse_share
    from toolkit.fleet.rollout.policy import with_gates, with_window
    from toolkit.fleet.rollout.rates import default_rate, parse_rate
    from toolkit.fleet.rollout.targets import parse_requirements
    from toolkit.fleet.server.operations import make_plan, new_key, start_rollout
    from toolkit.fleet.trust.publish import admit

    rows, said = parse_gates(gates), statements_of(read_bundle_info(bundle))
    policy = InstallPolicy(
        confirm_after_s=confirm_after_s, shadow_s=shadow_s, max_bytes_per_s=max_bytes_per_s
    )
    policy = with_gates(policy if window is None else with_window(policy, window), rows)
    release = release_of(bundle)
    spec = v.RolloutSpec(
        key=new_key(),
        release=release,
        groups=parse_groups(groups),
        policy=policy,
        rate=default_rate(release.blob.bytes) if rate is None else parse_rate(rate),
        success=parse_share(success),
        max_failures=parse_limit(max_failures),
        on_failure=msgspec.convert(on_failure, v.OnFailure),
        gates=rows,
        requires=parse_requirements(requires),
        metrics=dict(said.metrics),
        texts=dict(said.texts),
        models=said.models,
        timeout_s=timeout_s,
        approval=approval,
        late_joiners=not no_late_joiners,
        retry=retry,
    )
    database = load_fleet(folder).open_store()
    try:
        plan, number = make_plan(database, spec), 0
        if not dry_run:
            spec = msgspec.structs.replace(spec, release=admit(folder, bundle))
            number = start_rollout(database, spec, plan, bundle, operator())
    finally:
        database.close()
    if as_json:
        document = {"rollout": number or None, "plan": plan}
        click.echo(msgspec.json.encode(document).decode())
        return
    from rich.console import Console

    Console().print(plan_table(plan))
    click.echo(f"rollout {number} has begun" if number else "Nothing was sent (--dry-run).")


@rollout.command(epilog="Example: tandem fleet rollout status 3 --fleet fleet/ --watch")
@click.argument("number", required=False, type=click.IntRange(min=1), metavar="[N]")
@fleet_option
@json_option
@watch_option
def status(number: int | None, folder: Path, as_json: bool, watch: bool) -> None:
    """List all rollouts, or show the groups and failures of rollout N.

    With --watch it goes on until the rollout has ended.
    """
    from toolkit.cli.commands.fleet.tables import rollout_table, rollouts_table
    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.rollout.values import ENDED
    from toolkit.fleet.server.operations import get_spec
    from toolkit.fleet.server.views import rollout_views

    database = load_fleet(folder).open_store()
    try:
        if number is None:
            show(lambda: rollout_views(database), rollouts_table, as_json=as_json, watch=watch)
            return
        get_spec(database, number)  # there is one

        def read() -> "RolloutView":
            return rollout_views(database, [number])[0]

        show(read, rollout_table, as_json=as_json, watch=watch,
            is_over=lambda view: view.status in ENDED)  # fmt: skip
    finally:
        database.close()


def _order(folder: Path, number: int | None, word: "Order", done: str) -> None:
    """Give an order to a rollout, the newest one if none is named."""
    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.server.operations import newest, order

    database = load_fleet(folder).open_store()
    try:
        chosen = newest(database) if number is None else number
        order(database, chosen, word, operator())
    finally:
        database.close()
    click.echo(f"rollout {chosen} {done}")


_number = click.argument("number", type=click.IntRange(min=1), metavar="N")


@rollout.command(epilog="Example: tandem fleet rollout pause 3 --fleet fleet/")
@_number
@fleet_option
def pause(number: int, folder: Path) -> None:
    """Send nothing more of rollout N until it is resumed. Devices finish what they have begun."""
    _order(folder, number, "pause", "is told to pause")


@rollout.command(epilog="Example: tandem fleet rollout resume 3 --fleet fleet/")
@_number
@fleet_option
def resume(number: int, folder: Path) -> None:
    """Go on with rollout N. The failures so far are tolerated, and its group passes as it is."""
    _order(folder, number, "resume", "is told to go on")


@rollout.command(epilog="Example: tandem fleet rollout approve 3 --fleet fleet/")
@_number
@fleet_option
def approve(number: int, folder: Path) -> None:
    """Let the next group of rollout N begin."""
    _order(folder, number, "approve", "is approved")


@rollout.command(epilog="Example: tandem fleet rollout abort 3 --fleet fleet/")
@_number
@fleet_option
def abort(number: int, folder: Path) -> None:
    """End rollout N. Devices keep what they have, and finish what they have begun."""
    _order(folder, number, "abort", "is told to end")


@click.command(epilog="Example: tandem fleet rollback --fleet fleet/")
@click.argument("number", required=False, type=click.IntRange(min=1), metavar="[N]")
@fleet_option
def rollback(number: int | None, folder: Path) -> None:
    """Take every device of rollout N, the newest without N, back to the release before.

    They have it in their other slot: no byte is sent again. Devices that a newer rollout has taken
    over stay as they are.
    """
    _order(folder, number, "rollback", "is told to roll back")
