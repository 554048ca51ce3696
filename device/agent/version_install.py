"""Makes the environment of another version of the agent from a bundle that was checked.

The agent runs it as a child: `STATE_DIR BUNDLE SHA256 VERSION`. Its result is a line of JSON:
`name` of the environment, or the `problem`.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from device.agent.environment import make_environment
from device.agent.facts import board_software
from device.agent.launch import command_of
from device.errors import BundleError, TandemError
from device.files import disk_problem, remove
from device.update import agent_versions as av
from device.update.agent_payload import unfit
from device.update.bundle import BundleInfo, check_bundle

IMPORT_S = 300.0  # so long a version may take to say its help, on a slow card under load


def install(bundle: Path, info: BundleInfo, sha256: str, state_dir: Path) -> str:
    """Make the environment of a bundle and return its name.

    `sha256`: of the bundle as it was checked. Raises BundleError: it is no release of the agent, it
    does not fit this board, it is damaged, or its agent does not start.
    """
    if info.agent is None:
        raise BundleError(
            f"{info.name} {info.version} is a release of pipelines, none of the agent"
        )
    if reasons := unfit(info.agent, board_software()):
        raise BundleError(f"version {info.version} of the agent is refused: {'; '.join(reasons)}")
    name = av.environment_name(info.version, sha256)
    make_environment(bundle, state_dir / av.FOLDER, name, sha256)
    if problem := _start_problem(state_dir, name):
        versions = av.read_versions(state_dir)
        if name not in (versions.current, versions.previous, versions.trial):
            remove(state_dir / av.FOLDER / name)
        raise BundleError(f"version {info.version} of the agent does not start: {problem}")
    return name


def _start_problem(state_dir: Path, name: str) -> str:
    """Return why the agent of an environment cannot even say its help; "" if it does."""
    program, words, environment = command_of(state_dir, name, ["--help"])
    try:
        done = subprocess.run(
            [program, *words[1:]], env=environment, capture_output=True, text=True, check=False,
            timeout=IMPORT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"{last}; a bundle needs all wheels that the board's system lacks"


def main(argv: Sequence[str]) -> int:
    """Install one version and print the result."""
    state_dir, bundle, sha256, version = argv[1:]
    try:
        info, _ = check_bundle(Path(bundle))
        if info.version != version:
            raise BundleError(
                f"the bundle has version {info.version}, the fleet asks for {version}"
            )
        result = {"name": install(Path(bundle), info, sha256, Path(state_dir))}
    except TandemError as error:
        result = {"problem": str(error)}
    except OSError as error:
        result = {"problem": disk_problem(Path(state_dir), error)}
    print(msgspec.json.encode(result).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
