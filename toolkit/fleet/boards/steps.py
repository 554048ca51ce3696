"""The table of steps of `tandem board init`: each looks first, and does only what is not done."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from toolkit.fleet.boards.packages import install_packages, look_packages, look_venv, make_venv
from toolkit.fleet.boards.power import current_mode, find_mode, set_mode
from toolkit.fleet.boards.service import look_started, start_agent
from toolkit.fleet.boards.setup import Setup, State
from toolkit.fleet.boards.texts import (
    ANNOUNCEMENT,
    AVAHI,
    COMMAND,
    CONFIG,
    ETC,
    STATE,
    SUDOERS,
    UNIT,
    agent_toml,
    announcement_text,
    command_text,
    sudoers_text,
    unit_text,
)
from toolkit.fleet.boards.trust import enrol_board, look_identity, look_trust, write_trust


@dataclass(frozen=True, slots=True)
class Step:
    """`look` says whether it has to be done; `act` does it and says what was done."""

    name: str
    look: Callable[[Setup], State]
    act: Callable[[Setup], str]


def _look_user(setup: Setup) -> State:
    user = setup.options.user
    if setup.shell.run(f"id -u {shlex.quote(user)}").status == 0:
        return State("already", f"{user} exists")
    return State("todo", f"make the user {user}")


def _make_user(setup: Setup) -> str:
    user = shlex.quote(setup.options.user)
    script = f"useradd --system --user-group --home-dir {STATE} --shell /usr/sbin/nologin {user}"
    setup.shell.must(script, root=True, what=f"make the user {user}")
    return f"{user}, without a login"


def _look_config(setup: Setup) -> State:
    present, text = setup.read(CONFIG), agent_toml(setup.options.settings).encode()
    if present is None:
        return State("todo", f"write {CONFIG}")
    if present == text:
        return State("already", CONFIG)
    if setup.options.overwrite:
        return State("todo", f"write {CONFIG} anew; the present one becomes {CONFIG}.old")
    return State("already", f"{CONFIG} says something else and is kept; --overwrite replaces it")


def _write_config(setup: Setup) -> str:
    owner, old = f"root:{setup.options.user}", setup.read(CONFIG)
    setup.shell.must(f"mkdir -p -m 755 {ETC}", root=True, what=f"make {ETC}")
    if old is not None:
        setup.write(f"{CONFIG}.old", old, mode="640", owner=owner)
    text = agent_toml(setup.options.settings)
    setup.write(CONFIG, text.encode(), mode="640", owner=owner)
    settings = setup.options.settings
    return f"{settings.device}, profile {settings.profile}, broker {settings.host}:{settings.port}"


def _unit(setup: Setup) -> bytes:
    return unit_text(setup.options.user, setup.groups).encode()


def _look_unit(setup: Setup) -> State:
    if setup.read(UNIT) == _unit(setup):
        return State("already", UNIT)
    return State("todo", f"write {UNIT}")


def _write_unit(setup: Setup) -> str:
    setup.write(UNIT, _unit(setup), mode="644")
    setup.shell.must("systemctl daemon-reload", root=True, what="let systemd read its units")
    return UNIT


def _look_command(setup: Setup) -> State:
    script = command_text(setup.options.user).encode()
    rights = sudoers_text(setup.login, setup.options.user).encode()
    if setup.read(COMMAND) != script:
        return State("todo", f"write {COMMAND}")
    if _needs_rights(setup) and setup.read(SUDOERS) != rights:
        return State("todo", f"let {setup.login} run `tandem-agent control` as the agent's user")
    return State("already", COMMAND)


def _needs_rights(setup: Setup) -> bool:
    return setup.login not in ("root", setup.options.user)


def _write_command(setup: Setup) -> str:
    setup.write(COMMAND, command_text(setup.options.user).encode(), mode="755")
    if not _needs_rights(setup):
        return COMMAND
    # A wrong file in sudoers.d would end sudo for everybody: it is checked before it counts.
    text = sudoers_text(setup.login, setup.options.user).encode()
    setup.write(f"{SUDOERS}.check~", text, mode="440")
    script = f"visudo -cqf {SUDOERS}.check~ && mv -f {SUDOERS}.check~ {SUDOERS}"
    setup.shell.must(script, root=True, what=f"write {SUDOERS}")
    setup.cache[SUDOERS] = text
    return f"{COMMAND}; {setup.login} may run `tandem-agent control`"


def _announcement(setup: Setup) -> bytes:
    port = setup.shell.address.port or 22
    return announcement_text(setup.options.settings.device, setup.login, port).encode()


def _look_announcement(setup: Setup) -> State:
    if setup.shell.run(f"test -d {AVAHI}").status != 0:
        return State("skipped", "avahi is not installed: `tandem board find` sees it by USB alone")
    if setup.read(ANNOUNCEMENT) == _announcement(setup):
        return State("already", ANNOUNCEMENT)
    return State("todo", f"write {ANNOUNCEMENT}")


def _write_announcement(setup: Setup) -> str:
    setup.write(ANNOUNCEMENT, _announcement(setup), mode="644")  # avahi sees new files itself
    return "_tandem._tcp"


def _look_power(setup: Setup) -> State:
    mode = current_mode(setup.shell)
    if mode is None:
        return State("skipped", "no nvpmodel: this is no Jetson, or it has not run yet")
    if not setup.options.power_mode:
        return State("already", f"{mode.name} is kept; --power-mode chooses another one")
    target = find_mode(setup.shell, setup.options.power_mode)
    if mode.number == target.number:
        return State("already", mode.name)
    return State("todo", f"from {mode.name} to {target.name}")


def _set_power(setup: Setup) -> str:
    return f"{set_mode(setup.shell, setup.options.power_mode).name}, checked"


def _look_getty(setup: Setup) -> State:
    device = setup.options.settings.smp_device
    if not device:
        return State("skipped", "no serial line was asked for with --serial")
    unit = _getty(device)
    if setup.shell.run(f"systemctl is-active --quiet {unit}").status != 0:
        return State("already", f"nobody else reads {device}")
    return State("todo", f"stop {unit}")


def _stop_getty(setup: Setup) -> str:
    unit = _getty(setup.options.settings.smp_device)
    setup.shell.must(f"systemctl disable --now {unit}", root=True, what=f"stop {unit}")
    return f"{unit} is stopped: its line is the agent's"


def _getty(device: str) -> str:
    return shlex.quote(f"serial-getty@{device.rpartition('/')[2]}.service")


STEPS: tuple[Step, ...] = (
    Step("user", _look_user, _make_user),
    Step("environment", look_venv, make_venv),
    Step("packages", look_packages, install_packages),
    Step("command", _look_command, _write_command),
    Step("config", _look_config, _write_config),
    Step("trust", look_trust, write_trust),
    Step("identity", look_identity, enrol_board),
    Step("power mode", _look_power, _set_power),
    Step("serial line", _look_getty, _stop_getty),
    Step("unit", _look_unit, _write_unit),
    Step("announcement", _look_announcement, _write_announcement),
    Step("agent", look_started, start_agent),
)
