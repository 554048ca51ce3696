"""The steps that give the agent its Python environment, beside JetPack's packages."""

import shlex
from pathlib import Path

from device.update.agent_versions import FILE, FOLDER
from toolkit.fleet.boards.probe import NEEDED_MB
from toolkit.fleet.boards.setup import Setup, State, packed, stamp_of
from toolkit.fleet.boards.texts import AGENT, STATE, VENV
from toolkit.fleet.boards.wheels import content_digest, gather, locked_versions, pip_wheel

STAMP = f"{VENV}/tandem.installed"
_WHEELS = f"{VENV}/wheels"
_PIP = "--disable-pip-version-check --no-cache-dir --root-user-action=ignore -q"


def look_venv(setup: Setup) -> State:
    """Whether the environment is there, and of this Python."""
    minor = ".".join(map(str, setup.probe.python[:2]))
    check = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{minor}')"
    if setup.shell.run(f"{VENV}/bin/python -c {shlex.quote(check)}").status == 0:
        return State("already", f"{VENV}, Python {minor}")
    return State("todo", f"make {VENV} with Python {minor}, which sees the system's packages")


def make_venv(setup: Setup) -> str:
    """Make it; pip is sent along, as JetPack comes without one."""
    script = f"python3 -m venv --clear --without-pip --system-site-packages {VENV}"
    setup.shell.must(script, root=True, what=f"make {VENV}")
    setup.cache.pop(STAMP, None)
    return f"{VENV}; it needs up to {NEEDED_MB} MB"


def _stamp(setup: Setup) -> bytes:
    options = setup.options
    return stamp_of(
        {
            "wheel": content_digest(options.wheel),
            "extras": ",".join(sorted(options.extras)),
            "python": setup.probe.abi,
        }
    )


def look_packages(setup: Setup) -> State:
    """Whether this very Tandem is installed with these extras."""
    name = setup.options.wheel.name
    if setup.read(STAMP) == _stamp(setup):
        return State("already", name)
    return State("todo", f"install {name}[{','.join(setup.options.extras)}]")


def install_packages(setup: Setup) -> str:
    """Send what the board lacks, or let it download that, and install.

    What is installed runs from then on, not a version that the agent has updated itself to.
    """
    options, probe = setup.options, setup.probe
    wheels: tuple[Path, ...] = (options.wheel,)
    index = ""
    if options.packages != "board":
        source = None if options.packages == "host" else options.packages
        wheels = gather(options.wheel, options.extras, probe, options.work, source)
        index = f"--no-index --find-links {_WHEELS}"
    pip = pip_wheel(options.work)
    content = packed((*wheels, pip))
    setup.shell.must(
        f"rm -rf {_WHEELS}; mkdir -p {_WHEELS} && tar -x -C {_WHEELS}",
        content,
        root=True,
        what="send the packages",
    )
    run = f"{VENV}/bin/python {_WHEELS}/{pip.name}/pip"
    wheel = f"{_WHEELS}/{options.wheel.name}"
    extras = f"[{','.join(options.extras)}]" if options.extras else ""
    # A version of the system's that fits is kept: pip would put the tested one before it.
    tested = [
        f"{name}=={version}"
        for name, version in locked_versions(probe).items()
        if options.packages == "board" and name != "numpy" and name not in probe.distributions
    ]
    script = f"""set -e
printf '%s\\n' {shlex.join((probe.numpy, *tested))} > {_WHEELS}/constraints.txt
{run} install {_PIP} {index} -c {_WHEELS}/constraints.txt {shlex.quote(wheel + extras)}
{run} install {_PIP} --no-index --no-deps --force-reinstall {wheel}
{AGENT} --help > /dev/null
rm -f {STATE}/{FOLDER}/{FILE}
rm -rf {_WHEELS}"""
    setup.shell.must(script, root=True, what="install the packages")
    setup.write(STAMP, _stamp(setup), mode="644")
    return f"{len(wheels)} wheels, {len(content) / 1e6:.1f} MB sent"
