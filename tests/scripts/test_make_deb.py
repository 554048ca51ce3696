"""The agent's Debian package: what is in it, and what dpkg makes of it on a Debian."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from process_lines import next_line
from wheel_fixtures import empty_wheel, installed_wheel, tandem_wheel

import configs
from device.errors import BundleError
from device.update.agent_versions import AgentVersions
from scripts.make_deb import SCRIPTS, debian_version, main

# Of another release or architecture (scripts/test_deb.sh); else this machine's own.
LOWER = os.environ.get("TANDEM_DEB_ROOT", "/")
SCRIPT = Path(__file__).parents[2] / "scripts/test_deb.sh"
EPOCH = 1_700_000_000
ADDRESS = "Robots <robots@example.org>"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A double of Tandem's wheel: its configuration files alone, and two requirements."""
    empty_wheel(
        tmp_path, "tandem_edge", "1.2rc1", "py3-none-any", "click", "pure; extra == 'fleet'"
    )
    path = tmp_path / "tandem_edge-1.2rc1-py3-none-any.whl"
    with zipfile.ZipFile(path, "a") as archive:
        for name in ("tandem-agent.service", "agent.toml"):
            archive.write(configs.ROOT / name, f"tandem/configs/{name}")
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Doubles of the wheels that it needs, one of them for a Python and a machine."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    empty_wheel(folder, "click", "8.2", "cp310-cp310-manylinux_2_35_aarch64")
    empty_wheel(folder, "pure", "1.0", "py3-none-any")
    empty_wheel(folder, "numpy", "1.26.4", "cp310-cp310-manylinux_2_17_aarch64")
    empty_wheel(folder, "unused", "1.0", "py3-none-any")
    return folder


def make(wheel: Path, wheels: Path, out: Path, *words: str) -> Path:
    assert main([str(wheel), "--wheels", str(wheels), "--out", str(out), *words]) == 0
    (package,) = out.glob("*.deb")
    return package


def deb(*words: str) -> str:
    done = subprocess.run(("dpkg-deb", *words), capture_output=True, text=True, check=True)
    return done.stdout


def test_what_is_in_the_package(
    wheel: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(EPOCH))
    package = make(wheel, wheels, tmp_path / "out", "--maintainer", ADDRESS)
    assert package.name == "tandem-agent_1.2~rc1_arm64.deb"
    control = dict(
        row.split(": ", 1) for row in deb("-f", str(package)).splitlines() if ": " in row
    )
    assert control["Maintainer"] == ADDRESS
    assert control["Depends"].split(", ") == [
        "adduser", "libc6 (>= 2.35)", "python3 (<< 3.11)", "python3 (>= 3.10~)", "python3-venv",
    ]  # fmt: skip
    rows = [row.split(maxsplit=5) for row in deb("-c", str(package)).splitlines()]
    assert {row[1] for row in rows} == {"root/root"}
    modes = {row[5][1:]: row[0] for row in rows if not row[5].endswith("/")}
    carried = {path.name for path in (wheel, *wheels.glob("[!u]*.whl"))}
    assert set(modes) == {
        "/etc/tandem/agent.toml", "/lib/systemd/system/tandem-agent.service",
        "/usr/bin/tandem-agent", "/usr/share/man/man1/tandem-agent.1.gz",
        "/usr/share/doc/tandem-agent/changelog.gz", "/usr/share/doc/tandem-agent/copyright",
        *(f"/usr/lib/tandem-agent/wheels/{name}" for name in carried),
    }  # fmt: skip
    assert {path for path, mode in modes.items() if mode != "-rw-r--r--"} == {
        "/usr/bin/tandem-agent"
    }
    assert {row[0] for row in rows if row[5].endswith("/")} == {"drwxr-xr-x"}

    tree, scripts = tmp_path / "tree", tmp_path / "control"
    deb("-x", str(package), str(tree))
    deb("-e", str(package), str(scripts))
    unit = (tree / "lib/systemd/system/tandem-agent.service").read_bytes()
    assert unit == (configs.ROOT / "tandem-agent.service").read_bytes()
    assert (scripts / "conffiles").read_text() == "/etc/tandem/agent.toml\n"
    sums = ["md5sum", "--check", "--quiet", "--strict", str(scripts / "md5sums")]
    subprocess.run(sums, cwd=tree, check=True)
    assert len((scripts / "md5sums").read_text().splitlines()) == len(modes)
    for name in SCRIPTS:
        path = str(scripts / name)
        assert os.access(path, os.X_OK)
        subprocess.run(("sh", "-n", path), check=True)
        subprocess.run(("shellcheck", "-s", "sh", path), check=True)
        assert not re.search(r"@[A-Z]+@", (scripts / name).read_text())
    assert "1.2rc1-py3-none-any.whl[fleet,serial]" in (scripts / "postinst").read_text()


def test_two_builds_in_different_folders_are_equal(
    wheel: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(EPOCH))
    first = make(wheel, wheels, tmp_path / "first")
    another = tmp_path / "elsewhere"
    shutil.copytree(wheels, another)
    monkeypatch.setenv("TMPDIR", str(another))
    mask = os.umask(0o077)
    try:
        second = make(wheel, another, another / "second")
    finally:
        os.umask(mask)
    assert first.read_bytes() == second.read_bytes()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(EPOCH + 60))
    assert make(wheel, wheels, tmp_path / "later").read_bytes() != first.read_bytes()


def test_what_no_board_could_install_is_refused(wheel: Path, wheels: Path, tmp_path: Path) -> None:
    (wheels / "pure-1.0-py3-none-any.whl").unlink()
    with pytest.raises(SystemExit, match="pure"):
        make(wheel, wheels, tmp_path / "out")
    empty_wheel(wheels, "pure", "1.0", "cp310-cp310-manylinux_2_17_x86_64")
    with pytest.raises(SystemExit, match="aarch64 and x86_64"):
        make(wheel, wheels, tmp_path / "out")
    with pytest.raises(SystemExit, match="no wheel of tandem-edge"):
        make(wheels / "click-8.2-cp310-cp310-manylinux_2_35_aarch64.whl", wheels, tmp_path / "out")


def test_versions_of_debian_are_in_the_order_of_pythons() -> None:
    versions = ["1.0.dev1", "1.0a1.dev1", "1.0a1", "1.0rc1", "1.0", "1.0.post1", "1.0.1", "1.10"]
    for low, high in pairwise(versions):
        words = (debian_version(low), "lt", debian_version(high))
        subprocess.run(("dpkg", "--compare-versions", *words), check=True)
    with pytest.raises(BundleError, match="is no version"):
        debian_version("new")


@pytest.mark.slow
def test_lintian_warns_of_nothing(wheel: Path, wheels: Path, tmp_path: Path) -> None:
    package = make(wheel, wheels, tmp_path / "out", "--maintainer", ADDRESS)
    command = ("lintian", "--allow-root", "--fail-on", "error,warning", str(package))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_root_of_another_release_is_made_once_and_no_folder_is_taken(tmp_path: Path) -> None:
    programs, root, mine = tmp_path / "bin", tmp_path / "root", tmp_path / "mine"
    for folder in (programs, mine):
        folder.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    (programs / "debootstrap").write_text(f"#!/bin/sh\necho $* >> {tmp_path}/log; mkdir {root}\n")
    (programs / "debootstrap").chmod(0o755)
    (programs / "pytest.py").write_text("raise SystemExit(9)\n")

    def run(folder: Path) -> int:
        command = ("bash", str(SCRIPT), "jammy", "amd64", "--components=main,universe")
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(programs),
            "TANDEM_DEB_ROOT": str(folder), "TANDEM_MIRROR": "mirror:/",
        }  # fmt: skip
        done = subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=False)
        return done.returncode

    assert [run(root), run(root), run(mine)] == [9, 9, 1]
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.endswith(f"--components=main,universe jammy {root} mirror:/")
    assert [path.name for path in mine.iterdir()] == ["thesis.tex"]


MOUNT = r"""set -e
cd {folder}
mount -t tmpfs tmpfs layers  # an upper layer may not lie in the lower one
mkdir layers/upper layers/work
mount -t overlay overlay -o lowerdir={lower},upperdir=layers/upper,workdir=layers/work root
mount -t proc proc root/proc
mount -t tmpfs tmpfs root/run
mkdir -p root/run/systemd/system root/packages
mount --bind {packages} root/packages
mv root/usr/bin/systemctl root/usr/bin/real-systemctl
cp systemctl root/usr/bin/systemctl
rm -f root/usr/sbin/policy-rc.d
echo ready
exec sleep infinity
"""
SYSTEMCTL = r"""#!/bin/sh
# Double of systemctl: no systemd runs here. It notes what it is told; links of units are real.
echo "$*" >> /root/systemctl.log
case $* in
    *preset*) export SYSTEMD_OFFLINE=1; exec real-systemctl "$@" ;; # it would look for a bus
    *is-*) exit 1 ;;
esac
"""


class Debian:
    """A Debian or Ubuntu with files of its own: real dpkg, adduser, Python, pip, agent."""

    def __init__(self, folder: Path, packages: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("needs root: dpkg installs into file systems of its own")
        for name in ("layers", "root"):
            (folder / name).mkdir(parents=True)
        (folder / "systemctl").write_text(SYSTEMCTL)
        (folder / "systemctl").chmod(0o755)
        (folder / "mount.sh").write_text(
            MOUNT.format(folder=folder, packages=packages, lower=LOWER)
        )
        self.root = folder / "root"
        self._keeper = subprocess.Popen(
            ("unshare", "-m", "sh", str(folder / "mount.sh")),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert self._keeper.stdout is not None
        first = next_line(self._keeper)
        assert first == b"ready\n", first + self._keeper.stdout.read()

    def run(self, script: str, status: int = 0) -> str:
        """Run a script in it as root; return what it prints."""
        enter = ("nsenter", "-m", "-t", str(self._keeper.pid), "--", "chroot", str(self.root))
        path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(
            (*enter, "sh", "-c", script),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=path,
        )  # fmt: skip
        assert done.returncode == status, (script, done.stdout, done.stderr)
        return done.stdout

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """first.deb: Tandem's wheel for the Python there; second.deb: the same as version 9.1."""
    out, wheels = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("wheels")
    names = ("click", "markdown-it-py", "mdurl", "msgspec", "paho-mqtt", "pygments", "pyserial",
             "rich", "xxhash")  # fmt: skip
    if LOWER == "/":
        for name in names:
            installed_wheel(name, wheels)
    else:
        _download(names, wheels)
    empty_wheel(wheels, "numpy", "1.26.4", "py3-none-any")  # the agent's own process needs none
    first = tandem_wheel(tmp_path_factory)
    second = out / "tandem_edge-9.1-py3-none-any.whl"
    _raise_version(first, second)
    for wheel, name in ((first, "first"), (second, "second")):
        make(wheel, wheels, out / name, "--extra", "serial").rename(out / f"{name}.deb")
    return out


def _download(names: tuple[str, ...], folder: Path) -> None:
    """Take wheels for the Python of the other root from the index."""
    code = "import os, sys; print(*sys.version_info[:2], os.uname().machine)"
    shown = subprocess.check_output(("chroot", LOWER, "python3", "-c", code), text=True)
    major, minor, machine = shown.split()
    tags = [f"--platform=manylinux{glibc}_{machine}" for glibc in ("2014", "_2_28", "_2_34")]
    version = (f"--python-version={major}.{minor}", "--only-binary=:all:", "--no-deps")
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder))
    subprocess.run((*pip, *version, *tags, *names, "tomli", "typing-extensions"), check=True)


def _raise_version(source: Path, target: Path) -> None:
    version, later = (path.name.split("-")[1] for path in (source, target))
    with zipfile.ZipFile(source) as wheel, zipfile.ZipFile(target, "w") as changed:
        for entry in wheel.infolist():
            data = wheel.read(entry)
            if entry.filename.endswith("dist-info/METADATA"):
                data = data.replace(
                    f"\nVersion: {version}\n".encode(), f"\nVersion: {later}\n".encode()
                )
            if entry.filename.endswith("dist-info/RECORD"):
                data = b""  # pip writes its own
            changed.writestr(entry.filename.replace(f"edge-{version}.", f"edge-{later}."), data)


@pytest.fixture
def debian(tmp_path: Path, packages: Path) -> Iterator[Debian]:
    machine = Debian(tmp_path / "debian", packages)
    yield machine
    machine.close()


CALLS = "cat /root/systemctl.log 2>/dev/null || true; rm -f /root/systemctl.log"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_install_upgrade_remove_and_purge(debian: Debian) -> None:
    debian.run(
        "rm -rf /opt/tandem* /etc/tandem /var/lib/tandem; dpkg --no-triggers -i /packages/first.deb"
    )
    assert debian.run("readlink /opt/tandem") == "tandem-a\n"
    assert "usage: tandem-agent" in debian.run("tandem-agent --help")
    assert debian.run("stat -c '%a %U:%G' /etc/tandem/agent.toml") == "640 root:tandem\n"
    assert debian.run("id -nG tandem") == "tandem\n"
    assert debian.run("ls /etc/systemd/system/multi-user.target.wants/tandem-agent.service")
    assert "start" not in debian.run(CALLS), "agent.toml names no board yet"
    assert debian.run("dpkg --verify tandem-agent") == ""

    # The fleet has installed another version, and the operator has changed agent.toml.
    debian.run("echo '# mine' >> /etc/tandem/agent.toml")
    write_versions(debian, "10.0-0123456789ab")
    debian.run("dpkg --no-triggers -i /packages/second.deb")
    assert "# mine" in debian.run("cat /etc/tandem/agent.toml")
    assert debian.run("stat -c '%a %U:%G' /etc/tandem/agent.toml") == "640 root:tandem\n"
    assert debian.run("ls -d /opt/tandem*") == "/opt/tandem\n/opt/tandem-b\n"
    pip = "/opt/tandem/bin/python -m pip --disable-pip-version-check"
    shown = debian.run(f"{pip} list --format=freeze")
    assert "tandem-edge==9.1" in shown.splitlines()
    assert "try-restart tandem-agent.service" in debian.run(CALLS)
    assert "10.0-0123456789ab" in debian.run("cat /var/lib/tandem/agent/versions.json")
    # An older one gives way to that of the package.
    write_versions(debian, "9.0-0123456789ab")
    debian.run("dpkg --no-triggers --force-confold -i /packages/second.deb")
    assert debian.run("ls -A /var/lib/tandem/agent") == ""
    assert debian.run("readlink /opt/tandem") == "tandem-a\n"
    debian.run(CALLS)

    debian.run("dpkg --no-triggers --remove tandem-agent")
    assert "stop tandem-agent.service" in debian.run(CALLS)
    assert debian.run("ls -d /var/lib/tandem /etc/tandem/agent.toml").split() == [
        "/etc/tandem/agent.toml",
        "/var/lib/tandem",
    ]
    debian.run("ls -d /opt/tandem*", status=2)
    debian.run("dpkg --no-triggers --purge tandem-agent")
    debian.run("ls -d /var/lib/tandem /etc/tandem", status=2)
    debian.run("test -e /etc/systemd/system/multi-user.target.wants/tandem-agent.service", status=1)
    assert debian.run("id -un tandem") == "tandem\n"


def write_versions(debian: Debian, current: str) -> None:
    """What an agent leaves that runs a version of the fleet."""
    text = msgspec.json.encode(AgentVersions(current=current)).decode()
    debian.run(
        "install -d -m 700 -o tandem -g tandem /var/lib/tandem /var/lib/tandem/agent\n"
        f"echo '{text}' > /var/lib/tandem/agent/versions.json"
    )
    debian.run("chown tandem: /var/lib/tandem/agent/versions.json")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_failed_upgrade_leaves_the_environment_that_runs(debian: Debian) -> None:
    debian.run(
        "rm -rf /opt/tandem* /etc/tandem /var/lib/tandem; dpkg --no-triggers -i /packages/first.deb"
    )
    debian.run("dpkg --no-triggers --unpack /packages/second.deb")
    debian.run("rm /usr/lib/tandem-agent/wheels/rich-*.whl")
    debian.run("dpkg --no-triggers --configure tandem-agent", status=1)
    assert debian.run("readlink /opt/tandem") == "tandem-a\n"
    assert "usage: tandem-agent" in debian.run("tandem-agent --help")
    debian.run("dpkg --no-triggers -i /packages/second.deb")
    assert debian.run("ls -d /opt/tandem*") == "/opt/tandem\n/opt/tandem-b\n"
