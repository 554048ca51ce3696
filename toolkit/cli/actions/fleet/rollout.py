"""Begin rollouts, watch them, give them orders."""

from collections.abc import Mapping
from pathlib import Path

import click
import msgspec
from rich.console import Console

from device.update.bundle import read_bundle_info
from toolkit.cli.actions.fleet.tables import plan_table, rollout_table, rollouts_table
from toolkit.cli.actions.fleet.views import open_store, operator, show
from toolkit.cli.commands.fleet_rollout import (
    Rollback,
    RolloutCommand,
    RolloutStatus,
    Start,
)
from toolkit.errors import RolloutError
from toolkit.fleet.rollout import values as v
from toolkit.fleet.server.operations import (
    get_spec,
    make_plan,
    newest,
    order,
    start_rollout,
)
from toolkit.fleet.server.rollout_request import RolloutRequest, spec_of
from toolkit.fleet.server.views import RolloutView, rollout_views
from toolkit.fleet.trust.publish import admit

# RolloutAction -> what is said of the rollout.
DONE: Mapping[v.RolloutAction, str] = {
    "pause": "is told to pause",
    "resume": "is told to go on",
    "approve": "is approved",
    "abort": "is told to end",
    "rollback": "is told to roll back",
}


def start(options: Start) -> None:
    """Begin a rollout, or print what it would do. Raises TandemError."""
    request, bundle = _request(options), _bundle(options)
    with open_store(options.folder) as database:
        spec = spec_of(database, request, bundle)
        plan, number = make_plan(database, spec), 0
        if not options.dry_run:
            spec = msgspec.structs.replace(spec, release=admit(options.folder, bundle))
            number = start_rollout(database, spec, plan, bundle, operator())
    if options.as_json:
        document = {"rollout": number or None, "plan": plan}
        click.echo(msgspec.json.encode(document).decode())
        return
    Console().print(plan_table(plan))
    click.echo(f"rollout {number} has begun" if number else "Nothing was sent (--dry-run).")


def _bundle(options: Start) -> Path:
    """Return what is rolled out; RolloutError: not one file was named, or one of the other kind."""
    files = [path for path in (options.bundle, options.agent) if path is not None]
    if len(files) != 1:
        raise RolloutError("name either --bundle FILE or --agent FILE")
    info = read_bundle_info(files[0])
    if (info.agent is None) != (options.agent is None):
        option = "--bundle" if info.agent is None else "--agent"
        raise RolloutError(f"{files[0]} holds {info.name} {info.version}: name it by {option}")
    return files[0]


def _request(options: Start) -> RolloutRequest:
    policy = options.policy
    return RolloutRequest(
        groups=options.groups,
        gates=options.gates,
        requires=options.requires,
        rate=options.rate or "",
        success=options.success,
        max_failures=options.max_failures,
        on_failure=options.on_failure,
        approval=options.approval,
        timeout_s=options.timeout_s,
        window=policy.window or "",
        confirm_after_s=policy.confirm_after_s,
        shadow_s=policy.shadow_s,
        max_bytes_per_s=policy.max_bytes_per_s,
        late_joiners=not options.no_late_joiners,
        retry=options.retry,
        soak=options.soak,
        start_at=options.start_at or "",
    )


def status(options: RolloutStatus) -> None:
    """Print all rollouts, or one. Raises TandemError."""
    number, as_json, watch = options.number, options.as_json, options.watch
    with open_store(options.folder) as database:
        if number is None:
            show(lambda: rollout_views(database), rollouts_table, as_json=as_json, watch=watch)
            return
        get_spec(database, number)  # there is one

        def read() -> RolloutView:
            return rollout_views(database, [number])[0]

        show(read, rollout_table, as_json=as_json, watch=watch,
            is_over=lambda view: view.status in v.ENDED)  # fmt: skip


def give_order(options: RolloutCommand) -> None:
    """Give the order that the command is named after. Raises TandemError."""
    word = msgspec.convert(click.get_current_context().info_name, v.RolloutAction)
    _order(options.folder, options.number, word)


def rollback(options: Rollback) -> None:
    """Take a rollout back, the newest one if none is named. Raises TandemError."""
    _order(options.folder, options.number, "rollback")


def _order(folder: Path, number: int | None, word: v.RolloutAction) -> None:
    with open_store(folder) as database:
        number = newest(database) if number is None else number
        order(database, number, word, operator())
    click.echo(f"rollout {number} {DONE[word]}")
