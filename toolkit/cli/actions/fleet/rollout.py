"""Begin rollouts, watch them, give them orders."""

import time
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec
from rich.console import Console

from device.protocol.documents import InstallPolicy
from device.update.bundle import read_bundle_info
from toolkit.cli.actions.fleet.tables import plan_table, rollout_table, rollouts_table
from toolkit.cli.actions.fleet.views import open_store, operator, show
from toolkit.cli.commands.fleet import (
    Order,
    PolicyOptions,
    Rollback,
    RolloutStatus,
    Start,
)
from toolkit.fleet.bundles.facts import statements_of
from toolkit.fleet.bundles.release import release_of
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.gates import Gate, parse_gates
from toolkit.fleet.rollout.groups import parse_groups, queries_in
from toolkit.fleet.rollout.limits import parse_limit, parse_share
from toolkit.fleet.rollout.policy import with_gates, with_window
from toolkit.fleet.rollout.rates import default_rate, parse_rate
from toolkit.fleet.rollout.targets import parse_requirements
from toolkit.fleet.rollout.waits import parse_duration, parse_start
from toolkit.fleet.server.operations import (
    get_spec,
    make_plan,
    new_key,
    newest,
    order,
    query_of,
    start_rollout,
)
from toolkit.fleet.server.views import RolloutView, rollout_views
from toolkit.fleet.trust.publish import admit

# Order -> what is said of the rollout.
DONE: Mapping[v.Order, str] = {
    "pause": "is told to pause",
    "resume": "is told to go on",
    "approve": "is approved",
    "abort": "is told to end",
    "rollback": "is told to roll back",
}


def start(options: Start) -> None:
    """Begin a rollout, or print what it would do. Raises TandemError."""
    spec = _spec(options)
    with open_store(options.folder) as database:
        queries = {name: query_of(database, name) for name in queries_in(spec.groups)}
        spec = msgspec.structs.replace(spec, queries=queries)
        plan, number = make_plan(database, spec), 0
        if not options.dry_run:
            spec = msgspec.structs.replace(spec, release=admit(options.folder, options.bundle))
            number = start_rollout(database, spec, plan, options.bundle, operator())
    if options.as_json:
        document = {"rollout": number or None, "plan": plan}
        click.echo(msgspec.json.encode(document).decode())
        return
    Console().print(plan_table(plan))
    click.echo(f"rollout {number} has begun" if number else "Nothing was sent (--dry-run).")


def _spec(options: Start) -> v.RolloutSpec:
    gates, facts = parse_gates(options.gates), statements_of(read_bundle_info(options.bundle))
    policy = _policy(options.policy, gates)
    release = release_of(options.bundle)
    rate = options.rate
    return v.RolloutSpec(
        key=new_key(),
        release=release,
        groups=parse_groups(options.groups),
        policy=policy,
        rate=default_rate(release.blob.bytes) if rate is None else parse_rate(rate),
        success=parse_share(options.success),
        max_failures=parse_limit(options.max_failures),
        on_failure=options.on_failure,
        gates=gates,
        requires=parse_requirements(options.requires),
        metrics=dict(facts.metrics),
        texts=dict(facts.texts),
        models=facts.models,
        timeout_s=options.timeout_s,
        approval=options.approval,
        late_joiners=not options.no_late_joiners,
        retry=options.retry,
        soak_s=parse_duration(options.soak),
        start_s=0.0 if options.start_at is None else parse_start(options.start_at, time.time()),
    )


def _policy(options: PolicyOptions, gates: tuple[Gate, ...]) -> InstallPolicy:
    policy = InstallPolicy(
        confirm_after_s=options.confirm_after_s,
        shadow_s=options.shadow_s,
        max_bytes_per_s=options.max_bytes_per_s,
    )
    return with_gates(
        policy if options.window is None else with_window(policy, options.window), gates
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


def give_order(options: Order) -> None:
    """Give the order that the command is named after. Raises TandemError."""
    word = msgspec.convert(click.get_current_context().info_name, v.Order)
    _order(options.folder, options.number, word)


def rollback(options: Rollback) -> None:
    """Take a rollout back, the newest one if none is named. Raises TandemError."""
    _order(options.folder, options.number, "rollback")


def _order(folder: Path, number: int | None, word: v.Order) -> None:
    with open_store(folder) as database:
        number = newest(database) if number is None else number
        order(database, number, word, operator())
    click.echo(f"rollout {number} {DONE[word]}")
