"""A board as it leaves its box, on loopback: a real sshd whose logins see files of their own.

Real: sshd, sudo with its password, useradd, visudo, the board's Python, pip, the agent. Doubles,
which say so: systemctl (starts what the unit says, as its user, without systemd's protections),
journalctl (prints that agent's log) and nvpmodel (two modes, the second after a reboot only).
`/etc`, `/opt`, `/usr/local`, `/var/lib` and `/home` are the board's own: nothing of this machine
changes. JetPack's packages are links into the packages of the tests, without pip and Tandem.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mqtt_fixtures import free_port
from ssh_fixtures import Sshd

PASSWORD = "a password, with 'quotes' and $signs"
LOGIN, HOST = "robot", "fresh-board"
WAIT_S = 30.0

SYSTEMCTL = r"""#!/bin/sh
# Double of systemctl: no systemd runs here. It starts what the unit says.
state=/var/lib/double; unit=/etc/systemd/system/tandem-agent.service
echo "$*" >> $state/systemctl.log
alive() { test -e $state/pid && test -d "/proc/$(cat $state/pid)"; }
stop() {
    alive && kill "$(cat $state/pid)"
    while alive; do sleep 0.05; done
    rm -f $state/pid
}
start() {
    user=$(sed -n 's/^User=//p' $unit); line=$(sed -n 's/^ExecStart=//p' $unit)
    mkdir -p /var/lib/tandem && chown "$user" /var/lib/tandem && chmod 700 /var/lib/tandem
    setsid setpriv --reuid "$user" --regid "$user" --init-groups $line \
        >> $state/agent.log 2>&1 < /dev/null &
    echo $! > $state/pid
}
case $1 in
    restart) test -e $unit || { echo "Unit tandem-agent.service not found." >&2; exit 5; }
        stop; start ;;
    is-active) case $* in *tandem-agent*) alive ;; *) false ;; esac ;;
    reboot) echo yes > $state/rebooted; stop; start ;;
esac
"""
JOURNALCTL = r"""#!/bin/sh
# Double of journalctl: prints the log of the agent that the double of systemctl started.
echo "$*" >> /var/lib/double/journalctl.log
exec cat /var/lib/double/agent.log
"""
NVPMODEL = r"""#!/bin/sh
# Double of nvpmodel: 15W and MAXN are set at once, 40W asks for a reboot as on a Jetson.
status=/var/lib/nvpmodel/status
case $1 in
    -q) id=$(sed 's/pmode:0*//' $status); id=${id:-0}
        name=$(sed -n "s/^< POWER_MODEL ID=$id NAME=\(.*\) >/\1/p" /etc/nvpmodel.conf)
        echo "NV Power Mode: $name"; echo "$id" ;;
    -m) test "$(id -u)" = 0 || { echo "NVPM ERROR: must be root" >&2; exit 1; }
        if [ "$2" = 2 ]; then
            echo "NVPM WARN: Reboot required for changing to this power mode: 2"
            echo "NVPM WARN: DO YOU WANT TO REBOOT NOW? enter YES/yes to confirm:"
            read -r answer; test "$answer" = yes || exit 0
            systemctl reboot
        fi
        printf 'pmode:%04d\n' "$2" > $status ;;
esac
"""
CONF = (
    "< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=1 NAME=15W >\n< POWER_MODEL ID=2 NAME=40W >\n"
)
MOUNT = r"""set -e
cd {folder}
mount -t overlay overlay -o lowerdir=/etc,upperdir=etc,workdir=work_etc /etc
mount -t overlay overlay -o lowerdir=/usr/local,upperdir=usr_local,workdir=work_local /usr/local
for name in opt home var_lib; do mount --bind $name /$(echo $name | tr _ /); done
mount --bind {prefix} /mnt
mount --bind {packages} /srv
mount -t tmpfs -o mode=755 tmpfs /root  # Python may lie there, where only root may look
mkdir -p {prefix}
test "$(ls {prefix})" || mount --bind /mnt {prefix}
mkdir -p {system}
mount --bind site {system}
useradd --create-home --shell /bin/sh {login}
chpasswd < password
echo "{login} ALL=(ALL:ALL) ALL" > /etc/sudoers.d/{login}
echo ready
exec sleep infinity
"""
ENTER = r"""#!/bin/sh
exec nsenter -m -t {pid} -- setpriv --reuid {login} --regid {login} --init-groups \
    env -i HOME=/home/{login} PATH=/usr/local/bin:/usr/bin:/bin sh -c "cd; $SSH_ORIGINAL_COMMAND"
"""
# Of the packages of the tests: what a JetPack has no counterpart of.
NOT_ON_A_BOARD = ("pip", "tandem_edge", "__editable__", "distutils-precedence", "__pycache__")


BASE_PYTHON = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


class FreshBoard:
    """The board; `way` is its address. `close` it."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("needs root: the board has file systems of its own")
        assert shutil.which("sudo"), "sudo is missing: apt-get install sudo"
        self.folder = folder
        for name in ("etc", "opt", "home", "usr_local/bin", "var_lib", "site", "work_etc",
                     "work_local", "sshd"):  # fmt: skip
            (folder / name).mkdir(parents=True)
        (folder / "var_lib/double").mkdir()
        (folder / "var_lib/nvpmodel").mkdir()
        (folder / "var_lib/nvpmodel/status").write_text("pmode:0001\n")
        (folder / "etc/nvpmodel.conf").write_text(CONF)
        (folder / "etc/avahi/services").mkdir(parents=True)
        (folder / "password").write_text(f"{LOGIN}:{PASSWORD}\n")
        self._fill_system()
        words = "import site, sys; print(site.getsitepackages()[0])"
        done = subprocess.run(
            (BASE_PYTHON, "-c", words), capture_output=True, text=True, check=True
        )
        mount = folder / "mount.sh"
        packages = next(path for path in map(Path, sys.path) if path.name == "site-packages")
        text = MOUNT.format(
            folder=folder,
            prefix=sys.base_prefix,
            packages=packages,
            system=done.stdout.strip(),
            login=LOGIN,
        )
        mount.write_text(text)
        self._keeper = subprocess.Popen(
            ("unshare", "-m", "sh", str(mount)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self._keeper.stdout is not None
        first = self._keeper.stdout.readline()
        assert first == b"ready\n", first + self._keeper.stdout.read()
        self._link_packages(packages)
        enter = folder / "enter"
        enter.write_text(ENTER.format(pid=self._keeper.pid, login=LOGIN))
        enter.chmod(0o755)
        self.sshd = Sshd(folder / "sshd", f"ForceCommand {enter}\n")
        self.way = f"ssh://127.0.0.1:{self.sshd.port}?ssh_config={self.sshd.config}"

    def _fill_system(self) -> None:
        programs = {"systemctl": SYSTEMCTL, "journalctl": JOURNALCTL, "nvpmodel": NVPMODEL}
        programs["python3"] = f'#!/bin/sh\nexec {BASE_PYTHON} "$@"\n'
        for name, text in programs.items():
            path = self.folder / "usr_local/bin" / name
            path.write_text(text)
            path.chmod(0o755)
        for folder in (self.folder, self.folder / "usr_local", self.folder / "usr_local/bin"):
            folder.chmod(0o755)

    def _link_packages(self, packages: Path) -> None:
        """The packages of the tests as JetPack's, by the name under which the board sees them."""
        for path in packages.iterdir():
            if not path.name.startswith(NOT_ON_A_BOARD) and path.suffix != ".pth":
                (self.folder / "site" / path.name).symlink_to(Path("/srv") / path.name)

    def run(self, script: str) -> str:
        """Run a script on the board as root, not over ssh."""
        command = ("nsenter", "-m", "-t", str(self._keeper.pid), "--", "sh", "-c", script)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (script, done.stdout, done.stderr, self.log())
        return done.stdout

    def log(self) -> str:
        path = self.folder / "var_lib/double/agent.log"
        return path.read_text() if path.exists() else ""

    def calls(self, name: str = "systemctl") -> list[str]:
        """The command lines that a double was given."""
        path = self.folder / f"var_lib/double/{name}.log"
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        self.sshd.kill()
        pid_file = self.folder / "var_lib/double/pid"
        if pid_file.exists():
            pid = int(pid_file.read_text())
            try:
                os.kill(pid, signal.SIGTERM)
                until_s = time.monotonic() + WAIT_S
                while Path(f"/proc/{pid}").exists() and time.monotonic() < until_s:
                    time.sleep(0.05)
            except ProcessLookupError:
                pass
        self._keeper.kill()
        self._keeper.wait()


__all__ = ["HOST", "LOGIN", "PASSWORD", "FreshBoard", "free_port"]
