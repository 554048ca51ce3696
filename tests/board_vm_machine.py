"""A board under qemu: booted, reached over SSH, its power cut by a reset of the machine."""

import json
import socket
import subprocess
import time
from pathlib import Path

from mqtt_fixtures import free_port

from scripts.board_vm import LOGIN, ImagePlan

HOST = "10.0.2.2"  # this machine, as the board sees it
BOOT_S = 900.0
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class BoardVm:
    """A machine on a copy of the image. `close` it."""

    def __init__(self, plan: ImagePlan, folder: Path) -> None:
        place = plan.place
        self.port = free_port()
        self.console = folder / "console.log"
        self._qmp = folder / "qmp"
        disk = folder / "disk.qcow2"
        base = ("-b", str(place / "disk.raw"), "-F", "raw", str(disk))
        subprocess.run(("qemu-img", "create", "-q", "-f", "qcow2", *base), check=True)
        host_key = " ".join((place / "host_key.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}\n")
        self.config = folder / "ssh_config"
        self.config.write_text(
            f"IdentityFile {place}/user_key\nIdentitiesOnly yes\nIdentityAgent none\n"
            f"UserKnownHostsFile {folder}/known_hosts\nGlobalKnownHostsFile /dev/null\n"
            "ConnectTimeout 20\nServerAliveInterval 10\nServerAliveCountMax 6\n"
        )
        self.way = f"ssh://{LOGIN}@127.0.0.1:{self.port}?ssh_config={self.config}"
        self._log = (folder / "qemu.log").open("ab")
        command = plan.boot(disk, self.port, self._qmp, self.console)
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def ask(self, script: str) -> "subprocess.CompletedProcess[str]":
        """Run a script on the board as root."""
        words = ("-F", str(self.config), "-p", str(self.port), f"{LOGIN}@127.0.0.1")
        return subprocess.run(
            ("ssh", *words, "sudo -n sh"), input=script, capture_output=True, text=True, check=False
        )

    def run(self, script: str) -> str:
        """Run a script that must succeed; return what it printed."""
        done = self.ask(f"set -e\n{script}")
        assert done.returncode == 0, (script, done.stdout, done.stderr)
        return done.stdout.strip()

    def wait_boot(self, before: str = "") -> float:
        """Wait until the board answers, in another boot than `before`; return the seconds."""
        begun_s = time.monotonic()
        while True:
            done = self.ask(f"cat {BOOT_ID}")
            if done.returncode == 0 and done.stdout.strip() not in ("", before):
                return time.monotonic() - begun_s
            assert self._process.poll() is None, "qemu has ended"
            assert time.monotonic() - begun_s < BOOT_S, (done.stderr, self.tail())
            time.sleep(2.0)

    def cut_power(self) -> None:
        """Reset the machine at once: what its memory held is gone."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._qmp))
            stream = connection.makefile("rw")
            stream.readline()
            for command in ("qmp_capabilities", "system_reset"):
                stream.write(json.dumps({"execute": command}) + "\n")
                stream.flush()
                while "return" not in (answer := json.loads(stream.readline())):
                    assert "event" in answer, answer

    def tail(self) -> str:
        """The end of the console."""
        return self.console.read_text(errors="replace")[-2000:] if self.console.exists() else ""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
