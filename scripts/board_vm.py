"""Make the image of a board, boot it under qemu, and run tests/boards/test_board_vm.py on it.

What was proven is printed as a table; it is that of an emulated board with a real kernel and a real
systemd, without NVIDIA's parts. Power is cut by a reset of the machine: what the board's kernel had
not written by then is lost, what its disk had taken is kept.
"""

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
Arch = Literal["arm64", "amd64"]
LOGIN = "robot"
REPORT = "proven.txt"

PACKAGES = (
    *("systemd-sysv", "udev", "dbus", "kmod", "e2fsprogs", "initramfs-tools", "iproute2"),
    *("openssh-server", "sudo", "ca-certificates", "python3", "python3-venv", "python3-numpy"),
)
# As on JetPack 6: OpenCV, of NumPy 1, and GStreamer are packages of the system.
SYSTEM_OPENCV = (
    *("gstreamer1.0-tools", "gstreamer1.0-plugins-base", "gstreamer1.0-plugins-good"),
    *("python3-opencv", "gstreamer1.0-plugins-bad"),
)
INITRAMFS_MODULES = "virtio_pci virtio_blk virtio_net ext4"


@dataclass(frozen=True, slots=True)
class Suite:
    """A release of Debian, and the one that systemd and udev alone are taken from."""

    systemd: int
    release: str
    systemd_release: str = ""  # empty: `release`
    extras: tuple[str, ...] = ()


# Debian has neither 249 (JetPack 6) nor 255 (JetPack 7): 247 and 252, 254 and 257 lie around them.
# The Python of Debian 11 is too old for Tandem: its systemd runs below the programs of Debian 12.
SUITES = {
    "bookworm": Suite(252, "bookworm"),
    "trixie": Suite(257, "trixie"),
    "bookworm-systemd247": Suite(247, "bookworm", "bullseye", SYSTEM_OPENCV),
    "bookworm-systemd254": Suite(254, "bookworm", "bookworm-backports"),
}
# qemu's program and its machine. Processors: an A78's elder brother; x86-64-v2, which NumPy needs.
MACHINES: dict[Arch, tuple[str, tuple[str, ...], str]] = {
    "arm64": ("qemu-system-aarch64", ("-M", "virt", "-cpu", "cortex-a76"), "ttyAMA0"),
    "amd64": ("qemu-system-x86_64", ("-M", "q35", "-cpu", "Nehalem"), "ttyS0"),
}


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """What is built and how it is booted; a value, so that it can be looked at without root."""

    suite: str
    arch: Arch
    folder: Path
    accel: str = "tcg"
    disk_gb: int = 6
    memory_mb: int = 3072

    @property
    def packages(self) -> tuple[str, ...]:
        suite = SUITES[self.suite]
        return (*PACKAGES, *suite.extras, f"linux-image-{self.arch}")

    @property
    def place(self) -> Path:
        """Where image, kernel and keys are; another plan has another place."""
        suite = SUITES[self.suite]
        text = repr((suite, self.arch, self.packages, self.disk_gb, customise("KEY")))
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return self.folder / f"{self.suite}-{self.arch}-{digest}"

    def bootstrap(self, root: Path, hooks: Path, mirror: str) -> tuple[str, ...]:
        """Return the command that makes the root file system."""
        suite = SUITES[self.suite]
        sources: tuple[str, ...] = ()
        if suite.systemd_release:
            sources = (f"deb {mirror} {suite.systemd_release} main",)
        return (
            *("mmdebstrap", "--mode=root", "--variant=apt", f"--architectures={self.arch}"),
            *("--components=main", f"--include={','.join(self.packages)}"),
            *('--aptopt=APT::Install-Recommends "false"', '--aptopt=Acquire::Retries "3"'),
            # Before the kernel comes: a small initramfs, which an emulator makes in seconds.
            f"--essential-hook=copy-in {hooks}/initramfs-tools /etc",
            f'--setup-hook=cp {hooks}/preferences "$1/etc/apt/preferences.d/board"',
            *(suite.release, str(root), mirror, *sources),
        )

    def boot(self, disk: Path, ssh_port: int, qmp: Path, console: Path) -> tuple[str, ...]:
        """Return the command that boots a copy of the image."""
        program, machine, tty = MACHINES[self.arch]
        threads = ",thread=multi" if self.accel == "tcg" else ""
        return (
            *(program, *machine, "-accel", f"{self.accel}{threads}", "-smp", "2"),
            *("-m", str(self.memory_mb), "-display", "none", "-nodefaults", "-no-user-config"),
            *("-kernel", str(self.place / "vmlinuz"), "-initrd", str(self.place / "initrd")),
            *("-append", f"root=/dev/vda rw console={tty}"),
            *("-drive", f"file={disk},format=qcow2,if=none,id=disk,cache=writeback"),
            *("-device", "virtio-blk-pci,drive=disk"),
            *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{ssh_port}-:22"),
            *("-device", "virtio-net-pci,netdev=net"),
            *(
                "-chardev",
                f"file,id=console,path={console},append=on",
                "-serial",
                "chardev:console",
            ),
            *("-qmp", f"unix:{qmp},server=on,wait=off"),
        )


def preferences(suite: Suite) -> str:
    """Return what makes apt take systemd and udev, and no other package, from their release."""
    if not suite.systemd_release:
        return ""
    rows = (("src:systemd", suite.systemd_release, 990), ("*", suite.release, 900))
    return "\n".join(
        f"Package: {package}\nPin: release n={release}\nPin-Priority: {priority}\n"
        for package, release, priority in rows
    )


def customise(key: str) -> str:
    """Return the script that makes a board of a root file system, run inside of it."""
    return f"""set -e
echo 'LABEL=root / ext4 defaults 0 1' > /etc/fstab
echo board > /etc/hostname
printf '127.0.0.1 localhost board\\n' > /etc/hosts
printf '[Match]\\nName=e*\\n[Network]\\nDHCP=yes\\n' > /etc/systemd/network/80-board.network
systemctl enable systemd-networkd ssh
systemctl disable systemd-networkd-wait-online || true
for group in video render; do getent group $group >/dev/null || groupadd --system $group; done
useradd --create-home --shell /bin/bash {LOGIN}
echo '{LOGIN} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/{LOGIN}
install -d -m 700 -o {LOGIN} -g {LOGIN} /home/{LOGIN}/.ssh
echo '{key}' > /home/{LOGIN}/.ssh/authorized_keys
chown {LOGIN}: /home/{LOGIN}/.ssh/authorized_keys
echo vivid > /etc/modules-load.d/board.conf
echo 'options vivid n_devs=1' > /etc/modprobe.d/board.conf
rm -f /etc/machine-id && touch /etc/machine-id
"""


INITRAMFS_HOOK = f"""#!/bin/sh
if [ "$1" = prereqs ]; then exit 0; fi
. /usr/share/initramfs-tools/hook-functions
manual_add_modules {INITRAMFS_MODULES}
"""


def needed_programs(plan: ImagePlan) -> tuple[str, ...]:
    """Return what this machine lacks to build and boot the plan."""
    names = ["mmdebstrap", "mke2fs", "qemu-img", "ssh-keygen", MACHINES[plan.arch][0]]
    return tuple(name for name in names if shutil.which(name) is None)


def build_image(plan: ImagePlan, mirror: str) -> None:
    """Make the root, the image of its disk, its kernel and the keys of its login and its sshd."""
    place, root = plan.place, plan.place / "root"
    shutil.rmtree(place, ignore_errors=True)
    hooks = place / "initramfs-tools"
    for name, text in (("conf.d/board", "MODULES=list\nCOMPRESS=gzip\nFSTYPE=ext4\n"),
                       ("hooks/board", INITRAMFS_HOOK)):  # fmt: skip
        (hooks / name).parent.mkdir(parents=True)
        (hooks / name).write_text(text)
    (hooks / "hooks/board").chmod(0o755)
    for name in ("user_key", "host_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "board", "-f", str(place / name))
    (place / "preferences").write_text(preferences(SUITES[plan.suite]))
    run(*plan.bootstrap(root, place, mirror))
    key = (place / "user_key.pub").read_text().strip()
    run("chroot", str(root), "sh", "-c", customise(key))
    for path in (root / "etc/ssh").glob("ssh_host_*"):
        path.unlink()
    for suffix in ("", ".pub"):
        shutil.copy(place / f"host_key{suffix}", root / f"etc/ssh/ssh_host_ed25519_key{suffix}")
    for name, pattern in (("vmlinuz", "vmlinuz-*"), ("initrd", "initrd.img-*")):
        shutil.copy(next((root / "boot").glob(pattern)), place / name)
    size = f"{plan.disk_gb}G"
    run("mke2fs", "-q", "-t", "ext4", "-L", "root", "-d", str(root), str(place / "disk.raw"), size)
    shutil.rmtree(root)
    (place / "READY").touch()


def run(*command: str) -> None:
    """Run one command of the build; its output is the user's."""
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise SystemExit(f"board_vm: {command[0]} ended with {done.returncode}")


def parse(arguments: Sequence[str]) -> tuple[ImagePlan, list[str]]:
    """Return the plan and what is left for pytest."""
    parser = argparse.ArgumentParser(
        prog="scripts/test_board_vm.sh", description=__doc__, epilog="Other options go to pytest."
    )
    parser.add_argument("--suite", choices=tuple(SUITES), default="bookworm")
    parser.add_argument("--arch", choices=tuple(MACHINES), default="arm64")
    parser.add_argument("--accel", choices=("tcg", "kvm"), default="tcg",
        help="kvm: this machine's processor in place of an emulated one")  # fmt: skip
    parser.add_argument("--memory-mb", type=int, default=3072)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/tandem/board-vm")
    options, rest = parser.parse_known_args(arguments)
    plan = ImagePlan(
        suite=options.suite, arch=options.arch, folder=options.folder,
        accel=options.accel, memory_mb=options.memory_mb,
    )  # fmt: skip
    return plan, rest


def main(arguments: Sequence[str]) -> int:
    """Build what is not built, run the tests, print what they proved."""
    plan, rest = parse(arguments)
    if lacking := needed_programs(plan):
        raise SystemExit(
            f"board_vm: {', '.join(lacking)} missing: apt-get install mmdebstrap e2fsprogs "
            "qemu-utils openssh-client qemu-system-arm qemu-system-x86 qemu-user-static"
        )
    if not (plan.place / "READY").exists():
        if os.geteuid() != 0:
            raise SystemExit("board_vm: run it as root: it makes a root file system")
        command = (str(ROOT / "scripts/apt_mirror.sh"), SUITES[plan.suite].release)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(done.stderr.strip())
        build_image(plan, done.stdout.strip())
    report = plan.place / REPORT
    report.unlink(missing_ok=True)
    environment = {**os.environ, "TANDEM_BOARD_VM": shlex.join(arguments_of(plan))}
    tests = (sys.executable, "-m", "pytest", "-m", "slow", "-p", "no:cacheprovider", *rest)
    done_tests = subprocess.run(
        (*tests, "tests/boards/test_board_vm.py"), cwd=ROOT, env=environment, check=False
    )
    if report.exists():
        print(report.read_text(), end="")
    return done_tests.returncode


def arguments_of(plan: ImagePlan) -> tuple[str, ...]:
    """Return the options that mean this plan, as `parse` reads them."""
    return (
        *("--suite", plan.suite, "--arch", plan.arch, "--accel", plan.accel),
        *("--memory-mb", str(plan.memory_mb), "--folder", str(plan.folder)),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
