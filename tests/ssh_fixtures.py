"""A real sshd on loopback, for the user of the tests, with its own keys and known hosts."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from mqtt_fixtures import AgentBox, free_port, wait_for_port

ROOT = Path(__file__).parents[1]


class Sshd:
    """The server, which can be killed and started again on its port; `config` is for clients."""

    def __init__(self, folder: Path, settings_text: str = "") -> None:
        """`settings_text`: more lines of sshd_config."""
        binary = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        assert binary, "sshd is missing: apt-get install openssh-server"
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # it asks for that when root starts it
        self.port = free_port()
        self._folder = folder
        host_key, user_key = folder / "host_key", folder / "user_key"
        for key in (host_key, user_key):
            command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
            subprocess.run(command, check=True)
        public = (folder / "host_key.pub").read_text().split()[:2]
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {' '.join(public)}\n")
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        settings = folder / "sshd_config"
        settings.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nUsePAM no\n"
            f"PidFile none\nStrictModes no\nAuthorizedKeysFile {folder}/authorized_keys\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\n"
            + settings_text
        )
        self.config = folder / "ssh_config"
        self.config.write_text(
            f"IdentityFile {user_key}\nIdentitiesOnly yes\nIdentityAgent none\n"
            f"UserKnownHostsFile {folder}/known_hosts\nGlobalKnownHostsFile /dev/null\n"
        )
        self._command = [binary, "-D", "-e", "-f", str(settings)]
        self.start()

    def start(self) -> None:
        with (self._folder / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_for_port(self.port, self._process)

    def way(self, board: AgentBox) -> str:
        """The address of a board whose agent is that of this checkout."""
        agent = self._folder / f"{board.config.parent.name}-bin" / "tandem-agent"
        agent.parent.mkdir(exist_ok=True)
        agent.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m device.agent "$@"')
        agent.chmod(0o755)
        options = f"agent={agent}&config={board.config}&ssh_config={self.config}"
        return f"ssh://127.0.0.1:{self.port}?{options}"

    def cut(self) -> None:
        """End the connections that there are; new ones are taken."""
        for pid in _children(self._process.pid):
            for one in (*_children(pid), pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)

    def kill(self) -> None:
        """End it with all connections; once more does nothing."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGSTOP)  # it takes no new connection meanwhile
        self.cut()
        self._process.kill()
        self._process.wait()

    def log(self) -> str:
        return (self._folder / "sshd.log").read_text()


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return []
    return [int(child) for child in text.split()]
