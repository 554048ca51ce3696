"""Makes the environment of another version of the agent from a bundle that was checked.

The agent runs it as a child: `STATE_DIR BUNDLE SHA256 VERSION TAKES`; TAKES is `signed` where the
board takes signed releases only, else `any`. Its result is a line of JSON: `name` of the
environment, or the `problem`.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
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
# What an agent imports only to verify a release, so that its help does not show what is missing or
# too old: import -> what it is for. What is imported at the start (msgspec, paho), its help shows.
SIGNED_ONLY_IMPORTS: Mapping[str, str] = {
    "cryptography.hazmat.primitives.asymmetric.types.PublicKeyTypes": "verifies signatures",
    "securesystemslib.signer.Key": "reads the keys of signatures",
    "tuf.ngclient.Updater": "reads the fleet's signed metadata",
}


def install(
    bundle: Path, info: BundleInfo, sha256: str, state_dir: Path, *, signed_only: bool
) -> str:
    """Make the environment of a bundle and return its name.

    `sha256`: of the bundle as it was checked; `signed_only`: the board takes no other releases.
    Raises BundleError: it is no release of the agent, it does not fit this board, it is damaged,
    its agent does not start, or could verify no release.
    """
    if info.agent is None:
        raise BundleError(
            f"{info.name} {info.version} is a release of pipelines, none of the agent"
        )
    if reasons := unfit(info.agent, board_software()):
        raise BundleError(f"version {info.version} of the agent is refused: {'; '.join(reasons)}")
    name = av.environment_name(info.version, sha256)
    make_environment(bundle, state_dir / av.FOLDER, name, sha256)
    if problem := _problem(state_dir, name, signed_only=signed_only):
        versions = av.read_versions(state_dir)
        if name not in (versions.current, versions.previous, versions.trial):
            remove(state_dir / av.FOLDER / name)
        raise BundleError(
            f"version {info.version} of the agent {problem}; a bundle needs all wheels that the "
            "board's system lacks"
        )
    return name


def _problem(state_dir: Path, name: str, *, signed_only: bool) -> str:
    """Return what the agent of an environment cannot do; "" if it may be tried."""
    _, command, environment = command_of(state_dir, name, ["--help"])
    if failure := _failure(command, environment):
        return f"does not start: {failure}"
    for path, purpose in SIGNED_ONLY_IMPORTS.items() if signed_only else ():
        module, _, attribute = path.rpartition(".")
        code = f"from {module} import {attribute}"
        if failure := _failure((command[0], "-I", "-c", code), environment):
            return f"cannot import {path}, which {purpose} (this board has dev = false): {failure}"
    return ""


def _failure(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command; return the last line of its error, "" if it ends well."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=IMPORT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def main(argv: Sequence[str]) -> int:
    """Install one version and print the result."""
    state_dir, bundle, sha256, version, takes = argv[1:]
    try:
        info, _ = check_bundle(Path(bundle))
        if info.version != version:
            raise BundleError(
                f"the bundle has version {info.version}, the fleet asks for {version}"
            )
        name = install(Path(bundle), info, sha256, Path(state_dir), signed_only=takes == "signed")
        result = {"name": name}
    except TandemError as error:
        result = {"problem": str(error)}
    except OSError as error:
        result = {"problem": disk_problem(Path(state_dir), error)}
    print(msgspec.json.encode(result).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
