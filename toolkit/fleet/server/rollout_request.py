"""A rollout as people and programs ask for it: texts, which become the checked values of a spec."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from device.protocol.documents import InstallPolicy
from device.update.bundle import read_bundle_info
from toolkit.errors import RolloutError
from toolkit.fleet.bundles.facts import statements_of
from toolkit.fleet.bundles.release import release_of
from toolkit.fleet.rollout import values as v
from toolkit.fleet.rollout.gates import AGREEMENT_GATES, Gate, parse_gates
from toolkit.fleet.rollout.groups import parse_groups, queries_in
from toolkit.fleet.rollout.policy import with_gates, with_window
from toolkit.fleet.rollout.rates import default_rate, parse_rate
from toolkit.fleet.rollout.targets import parse_requirements
from toolkit.fleet.rollout.waits import parse_duration, parse_start
from toolkit.fleet.server.operations import new_key, query_of
from toolkit.fleet.store.database import Database

Bytes = Annotated[int, Meta(ge=1024)]
Seconds = Annotated[float, Meta(ge=0.0, le=86400.0)]
_PERCENT = re.compile(r"(\d+(\.\d+)?)\s*%\Z")


class RolloutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a bundle is rolled out; each text is written as the option of `tandem fleet rollout
    start` is. `rate`, `window` and `start_at` empty, numbers None: what the fleet does by default.
    """

    groups: str = "rest"
    gates: str = ""
    requires: str = ""
    rate: str = ""
    success: str = "90%"
    max_failures: str = "10%"
    on_failure: v.OnFailure = "pause"
    approval: bool = False
    timeout_s: Annotated[float, Meta(ge=1.0)] = 3600.0
    window: str = ""
    confirm_after_s: Annotated[float, Meta(ge=0.1, le=86400.0)] | None = None
    shadow_s: Seconds = 0.0
    max_bytes_per_s: Bytes | None = None
    late_joiners: bool = True
    retry: bool = False
    soak: str = "0s"
    start_at: str = ""


def spec_of(database: Database, request: RolloutRequest, bundle: Path) -> v.RolloutSpec:
    """Return the spec of a new rollout. Raises RolloutError: a text cannot be read, or names a
    query that the fleet does not have; BundleError.

    A release of the agent has no late joiners: the newest rollout takes a new device, which then
    would never get its pipeline.
    """
    info = read_bundle_info(bundle)
    gates, facts = parse_gates(request.gates), statements_of(info)
    if info.agent is not None:
        _check_agent(request, gates)
    release = release_of(bundle)
    policy = InstallPolicy(
        confirm_after_s=request.confirm_after_s,
        shadow_s=request.shadow_s,
        max_bytes_per_s=request.max_bytes_per_s,
    )
    if request.window:
        policy = with_window(policy, request.window)
    groups = parse_groups(request.groups)
    rate = parse_rate(request.rate) if request.rate else default_rate(release.blob.bytes)
    return v.RolloutSpec(
        key=new_key(),
        release=release,
        groups=groups,
        policy=policy if info.agent is not None else with_gates(policy, gates),
        rate=rate,
        success=parse_share(request.success),
        max_failures=parse_limit(request.max_failures),
        on_failure=request.on_failure,
        gates=gates,
        requires=parse_requirements(request.requires),
        metrics=dict(facts.metrics),
        texts=dict(facts.texts),
        models=facts.models,
        timeout_s=request.timeout_s,
        approval=request.approval,
        late_joiners=request.late_joiners and info.agent is None,
        retry=request.retry,
        soak_s=parse_duration(request.soak),
        start_s=parse_start(request.start_at, database.now_s()) if request.start_at else 0.0,
        queries={name: query_of(database, name) for name in queries_in(groups)},
        agent=info.agent,
    )


def _check_agent(request: RolloutRequest, gates: Sequence[Gate]) -> None:
    """Raise RolloutError for what would be of no effect on a release of the agent."""
    used = {"--shadow": request.shadow_s, "--confirm-after": request.confirm_after_s}
    words = [option for option, value in used.items() if value]
    words += [f"the gate {gate}" for gate in gates if gate.name in AGREEMENT_GATES]
    if words:
        raise RolloutError(
            f"leave {words[0]} out for a release of the agent: it is about the trial of a pipeline"
        )


def parse_share(text: str) -> float:
    """Return a share from 0 to 1 for a text from 0% to 100%."""
    match = _PERCENT.match(text.strip())
    if match is None or float(match[1]) > 100.0:
        raise RolloutError(f"{text!r} is no share: write 0% to 100%, for example 90%")
    return float(match[1]) / 100.0


def parse_limit(text: str) -> v.Limit:
    """Return the limit in a text: N% of each group, or N devices of the rollout."""
    if text.strip().isascii() and text.strip().isdigit():
        return v.Limit(count=int(text))
    try:
        return v.Limit(percent=100.0 * parse_share(text))
    except RolloutError as error:
        raise RolloutError(
            f"{text!r} is no limit of failures: write 10% of each group, or 3 devices in all"
        ) from error
