"""Carries out the steps of `tandem board init`, which may be cut off and begun again at any one."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from toolkit.errors import BoardError
from toolkit.fleet.boards.power import PendingError
from toolkit.fleet.boards.probe import (
    Package,
    Probe,
    changed_packages,
    check_probe,
    describe_packages,
    probe_board,
)
from toolkit.fleet.boards.request import InitRequest, agent_settings, check_user
from toolkit.fleet.boards.setup import InitOptions, PackagesFrom, Setup
from toolkit.fleet.boards.shell import Shell
from toolkit.fleet.boards.steps import STEPS
from toolkit.fleet.boards.texts import GROUPS
from toolkit.fleet.boards.wheels import own_wheel

Outcome = Literal["done", "already", "skipped", "would do", "pending"]


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a step ended. "pending": something is left for the user."""

    step: str
    outcome: Outcome
    detail: str = ""
    duration_s: float = 0.0


class InitResult(msgspec.Struct, frozen=True, kw_only=True):
    """A board that is set up, or would be. `system`: JetPack's packages, which did not change."""

    device: str
    board: str
    dry_run: bool
    steps: tuple[StepResult, ...]
    system: dict[str, Package]


OnStep = Callable[[StepResult], None]
OnBegin = Callable[[str, str], None]  # the step, and what it will do


@dataclass(frozen=True, slots=True)
class InitSettings:
    """What is the same for each board of a line; see `InitOptions`."""

    wheel: Path | None
    packages: PackagesFrom
    extras: tuple[str, ...]
    user: str
    power_mode: str
    overwrite: bool
    timeout_s: float


def set_up(
    shell: Shell,
    request: InitRequest,
    settings: InitSettings,
    work: Path,
    *,
    dry_run: bool,
    on_step: OnStep,
    on_probe: Callable[[Probe], None] = lambda _probe: None,
    on_begin: OnBegin = lambda _step, _detail: None,
) -> InitResult:
    """Probe one board and set it up; Tandem's wheel is built into `work` if none was named.

    `on_probe` may refuse the board before anything is changed on it.
    """
    check_user(settings.user)
    probe = probe_board(shell)
    check_probe(probe, shell.name)
    on_probe(probe)
    options = InitOptions(
        settings=agent_settings(request, probe),
        wheel=settings.wheel or own_wheel(work),
        work=work,
        fleet=request.fleet,
        packages=settings.packages,
        extras=settings.extras,
        user=settings.user,
        power_mode=settings.power_mode,
        overwrite=settings.overwrite,
        start_timeout_s=settings.timeout_s,
    )
    return init_board(shell, probe, options, dry_run=dry_run, on_step=on_step, on_begin=on_begin)


def init_board(
    shell: Shell,
    probe: Probe,
    options: InitOptions,
    *,
    dry_run: bool,
    on_step: OnStep,
    on_begin: OnBegin,
) -> InitResult:
    """Set a board up; each step that is done already is left alone.

    With `dry_run` nothing is changed. Raises BoardError: a step failed; those before it stay, and
    the next run goes on there.
    """
    setup = Setup(
        shell=shell,
        probe=probe,
        options=options,
        login=shell.run("id -un").text,
        groups=_groups(shell, options),
    )
    results = []
    for step in STEPS:
        begun_s = time.monotonic()
        state = step.look(setup)
        outcome: Outcome = "done"
        detail = state.detail
        if state.kind != "todo":
            outcome = state.kind
        elif dry_run:
            outcome = "would do"
        else:
            on_begin(step.name, state.detail)
            try:
                detail = step.act(setup)
            except PendingError as error:
                outcome, detail = "pending", str(error)
        duration_s = round(time.monotonic() - begun_s, 3)
        result = StepResult(step=step.name, outcome=outcome, detail=detail, duration_s=duration_s)
        on_step(result)
        results.append(result)
    system = _system_unchanged(shell, probe)
    on_step(system)
    return InitResult(
        device=options.settings.device,
        board=shell.name,
        dry_run=dry_run,
        steps=(*results, system),
        system=probe.packages,
    )


def _groups(shell: Shell, options: InitOptions) -> tuple[str, ...]:
    """Return the groups of the agent that the board has: systemd refuses one that is missing."""
    names = (*GROUPS, *(("dialout",) if options.settings.smp_device else ()))
    present = shell.run(f"getent group {' '.join(names)}").text
    return tuple(n for n in names if any(line.startswith(f"{n}:") for line in present.splitlines()))


def _system_unchanged(shell: Shell, before: Probe) -> StepResult:
    """Compare the system's packages with those before the first step."""
    changed = changed_packages(before, probe_board(shell))
    if changed:
        raise BoardError(
            f"{shell.name}: {', '.join(changed)} of the system changed meanwhile: nothing of "
            "`tandem board init` writes there; look who else installs, then run it again"
        )
    detail = f"as before: {describe_packages(before)}"
    return StepResult(step="system's packages", outcome="already", detail=detail)
