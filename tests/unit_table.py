"""Each directive of the agent's unit: why it stands there, and what it does on a board.

Read from the sources of systemd 249.11 (Ubuntu 22.04, JetPack 6), 252.31 (Debian 12) and 255.4
(Ubuntu 24.04, JetPack 7): unit.c, execute.c, exec-invoke.c, namespace.c and cgroup.c of src/core,
src/shared/seccomp-util.c.
"""

import configparser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VERSIONS = (249, 252, 255)
Directives = Sequence[tuple[str, str]]  # (name, value), in the order of the unit
PerVersion = str | tuple[str, str, str]  # on all versions alike, or on 249, 252 and 255
NOTHING = ""  # it does nothing to them


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the unit. What it does to device nodes, sockets and memory made executable."""

    name: str
    value: str
    why: str
    nodes: PerVersion = NOTHING
    sockets: PerVersion = NOTHING
    jit: PerVersion = NOTHING


ROWS = (
    Row("Description", "Tandem agent: runs this board's pipeline and takes its releases", "a name"),
    Row("Wants", "network-online.target", "the broker is on the network"),
    Row(
        "After",
        "network-online.target nvpmodel.service nvargus-daemon.service",
        "order alone: power mode and camera service are there first, where they exist",
    ),
    Row("StartLimitIntervalSec", "0", "it is started again for ever"),
    Row("Type", "notify", "up when it says so", sockets="NOTIFY_SOCKET, an AF_UNIX datagram"),
    Row("ExecStart", "/opt/tandem/bin/tandem-agent --config /etc/tandem/agent.toml", "the agent"),
    Row("User", "tandem", "not root", nodes="opened by mode and group, as by any login"),
    Row(
        "SupplementaryGroups",
        "video render",
        "the groups of /dev/video*, /dev/nvmap, /dev/nvhost-*, /dev/nvgpu/*, /dev/dri/renderD*",
        nodes="opens those of these groups",
    ),
    Row(
        "StateDirectory",
        "tandem",
        "slots, and the caches below HOME",
        sockets="the control socket lies there",
        jit="~/.nv/ComputeCache can be written",
    ),
    Row("StateDirectoryMode", "0700", "slots and keys are the agent's alone; 0755 would be told"),
    Row("WatchdogSec", "300", "a hung agent is started again"),
    Row("Restart", "always", "whatever ended it"),
    Row("RestartSec", "2", "no tight loop"),
    Row(
        "MemoryMax",
        "80%",
        "the board stays reachable; a cgroup of the memory controller alone",
        jit="counts its pages; nvmap's are the driver's, and not counted",
    ),
    Row("OOMPolicy", "continue", "the pipeline's end is not the agent's"),
    Row("KillMode", "mixed", "the agent stops its pipeline itself"),
    Row("TimeoutStopSec", "30", "then all is killed"),
    Row(
        "PrivateTmp",
        "yes",
        "libraries write there without meeting others",
        sockets="hides /tmp/argus_socket and /tmp/.X11-unix: see BindReadOnlyPaths",
    ),
    Row(
        "BindReadOnlyPaths",
        "/tmp:/run/tandem-host-tmp",
        "the system's /tmp as it is now, also after the camera service starts again",
        sockets="read only forbids files, not connect(): the kernel asks no mount for sockets",
    ),
    Row(
        "ExecStartPre",
        "-/bin/ln -sfn /run/tandem-host-tmp/argus_socket /tmp/argus_socket",
        "the address that libnvargus_socketclient has built in; same user as the agent, so "
        "fs.protected_symlinks lets it follow",
        sockets="csi:// reaches the camera service",
    ),
    Row(
        "NoNewPrivileges",
        "yes",
        "no setuid program gives rights",
        nodes="setuid nvidia-modprobe cannot make any: udev has made them on a board",
    ),
    Row(
        "CapabilityBoundingSet",
        "",
        "none is needed; without CAP_SYS_TIME no clock is set, so ProtectClock adds nothing",
        nodes="no mknod of devices, which needs CAP_MKNOD",
    ),
    Row(
        "ProtectSystem",
        "strict",
        "files are written below StateDirectory and /tmp alone",
        nodes="/dev is left as it is (READWRITE_IMPLICIT)",
        sockets="/run is read only; sockets there are reached",
    ),
    Row(
        "ProtectHome",
        "yes",
        "/home, /root and /run/user are nobody's business",
        sockets="those below /run/user (PulseAudio, Wayland) are out of reach, and not used",
    ),
    Row(
        "ProtectKernelTunables",
        "yes",
        "clocks and sensors are read in /sys, never set",
        nodes="/sys and /proc/sys read only; /dev is left as it is",
    ),
    Row("ProtectKernelModules", "yes", "/usr/lib/modules hidden: nothing is loaded from here"),
    Row("ProtectKernelLogs", "yes", "no kernel log", nodes="/dev/kmsg alone, by a mount"),
    Row("ProtectControlGroups", "yes", "its own limits are read, not changed"),
    Row(
        "ProtectHostname",
        "yes",
        "a name space of its own for the host's name",
        nodes=(NOTHING, NOTHING, "/proc/sys/kernel/hostname read only"),
    ),
    Row(
        "RestrictSUIDSGID",
        "yes",
        "no file with such a mode; openat2() answers ENOSYS, and libraries fall back",
    ),
    Row(
        "RestrictNamespaces",
        "yes",
        "neither unshare() nor setns(), nor clone() with name spaces",
        jit=(NOTHING, "clone3() answers ENOSYS: glibc falls back", "as on 252"),
    ),
    Row("LockPersonality", "yes", "personality() alone"),
    Row("SystemCallArchitectures", "native", "arm64 alone: JetPack has no 32-bit programs"),
    Row(
        "RestrictAddressFamilies",
        "AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "Argus, broker, streams, MAVLink, network state; socket() of others fails",
        sockets="no AF_PACKET, AF_CAN, AF_BLUETOOTH, AF_VSOCK",
    ),
    Row("UMask", "0077", "what it writes is its own"),
    Row("WantedBy", "multi-user.target", "started at boot"),
)

# What must never stand in the unit -> why. Each is a hardening that somebody will propose.
NEVER: Mapping[str, str] = {
    "ProtectClock": "249: implies DeviceAllow=char-rtc r, which closes every other device node",
    "PrivateDevices": "a /dev without GPU, DLA and cameras, and DevicePolicy=closed",
    "DevicePolicy": "strict and closed shut out GPU, DLA and cameras",
    "DeviceAllow": "one line closes all other nodes; the majors of nvgpu's are dynamic",
    "RootDirectory": "JetPack's libraries lie in the root",
    "RootImage": "as RootDirectory; with a device policy it adds loop devices to it",
    "MountImages": "with a device policy it adds loop devices to it",
    "LoadCredentialEncrypted": "252, 255: with a device policy it adds the TPM to it",
    "SetCredentialEncrypted": "252, 255: with a device policy it adds the TPM to it",
    "MemoryDenyWriteExecute": "no mmap of writable code: CUDA compiles PTX, GStreamer's ORC loops",
    "SystemCallFilter": "a bet on what closed libraries call; of an ioctl it sees a number alone",
    "NoExecPaths": "the JIT's files and Python's packages are mapped executable",
    "ProcSubset": "pid hides /proc/device-tree, which names the board",
    "PrivateNetwork": "the broker is on the network",
}


def read_unit(text: str) -> tuple[tuple[str, str], ...]:
    """Return name and value of each line of a unit that is no comment and no section."""
    rows = [line for line in text.splitlines() if line and line[0] not in "#;["]
    return tuple((name, value) for name, _, value in (row.partition("=") for row in rows))


def device_rules(directives: Directives, version: int) -> tuple[str, ...]:
    """Return what systemd makes of a unit's device policy; empty: every node may be opened.

    unit_patch_contexts of src/core/unit.c. From 252 on what is implied is added to a policy that
    is there, and makes none (commit 63857bf4f7a5, systemd#25075); before, no such condition stood
    at ProtectClock.
    """
    unit = dict(directives)
    policy = unit.get("DevicePolicy", "auto")
    rules = [value for name, value in directives if name == "DeviceAllow" and value]
    if _on(unit, "PrivateDevices") and policy == "auto":
        policy = "closed"
    closed = policy != "auto" or bool(rules)
    if closed and ("RootImage" in unit or "MountImages" in unit):
        rules += ["/dev/loop-control rw", "/dev/mapper/control rw", "block-loop rwm"]
    if _on(unit, "ProtectClock") and (closed or version < 252):
        rules.append("char-rtc r")
    encrypted = {"LoadCredentialEncrypted", "SetCredentialEncrypted"} & unit.keys()
    if closed and encrypted and version >= 252:
        rules.append("char-tpm rw")
    return (*([f"DevicePolicy={policy}"] if policy != "auto" else []), *rules)


def _on(unit: Mapping[str, str], name: str) -> bool:
    return configparser.ConfigParser.BOOLEAN_STATES[unit.get(name, "no").lower()]
