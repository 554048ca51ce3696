"""Check what a machine has for Tandem, what is missing, why it matters and how to fix it."""

from collections.abc import Callable
from dataclasses import dataclass

from device.install_advice import pip_install
from toolkit.cli import doctor_probes as probes
from toolkit.cli.commands.doctor import Job
from toolkit.cli.doctor_probes import Finding, Status
from toolkit.machine import Machine


@dataclass(frozen=True, slots=True)
class Check:
    """One row of CHECKS.

    `needed_for`: jobs that fail without it; `helps`: jobs that work better with it.
    """

    name: str
    probe: Callable[[Machine], Finding]
    needed_for: tuple[Job, ...]
    helps: tuple[Job, ...]
    why: str
    fix: str


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check; `fix` is empty when nothing needs fixing."""

    name: str
    status: Status
    found: str
    needed_for: tuple[Job, ...]
    helps: tuple[Job, ...]
    why: str
    fix: str

    def stops(self, job: Job) -> bool:
        """Whether this check prevents the job on this machine."""
        return self.status == "missing" and job in self.needed_for

    def slows(self, job: Job) -> bool:
        """Whether the job would work better with this fixed."""
        concerned = job in self.needed_for + self.helps
        return self.status != "ok" and concerned and not self.stops(job)


def examine(
    machine: Machine, job: Job, broker: tuple[str, int] | None = None
) -> tuple[Result, ...]:
    """Run every check; with `broker` (host, port) also whether that broker accepts a client."""
    results = [_result(check, check.probe(machine)) for check in CHECKS]
    if broker is not None:
        host, port = broker
        check = Check(
            name=f"broker {host}:{port}",
            probe=lambda probed: probes.broker(probed, host, port),
            needed_for=(job,),
            helps=(),
            why="events, updates and fleet commands travel over MQTT",
            fix="sudo apt-get install mosquitto, or check the address and the firewall",
        )
        results.append(_result(check, check.probe(machine)))
    return tuple(results)


def job_of(machine: Machine) -> Job:
    """Return the likely job: a Jetson is a board, everything else a host."""
    return "board" if probes.board_of(machine).model else "host"


def _result(check: Check, finding: Finding) -> Result:
    return Result(
        name=check.name,
        status=finding.status,
        found=finding.found,
        needed_for=check.needed_for,
        helps=check.helps,
        why=check.why,
        fix="" if finding.status == "ok" else finding.fix or check.fix,
    )


CHECKS: tuple[Check, ...] = (
    Check(
        "Python",
        probes.python,
        ("host", "board", "demo"),
        (),
        "Tandem is written for 3.10 and newer",
        "install Python 3.10 or newer beside the system's",
    ),
    Check(
        "distribution",
        probes.distribution,
        ("host", "board", "demo"),
        (),
        "two distributions with the same folder names overwrite each other's files silently",
        "make a fresh virtual environment and install only what you need beside tandem-edge",
    ),
    Check(
        "Jetson",
        probes.jetson,
        (),
        ("board",),
        "an engine is built for one profile; give that name to `tandem build --profile`",
        "only of use on a board: on it, see `tandem profiles` and flash a JetPack listed there",
    ),
    Check(
        "NVIDIA driver",
        probes.driver,
        ("board",),
        (),
        "GPU engines need it; without it only portable segments run, on the CPU",
        "on a Jetson flash JetPack; elsewhere install NVIDIA's driver, and in a container "
        "start it with the NVIDIA runtime",
    ),
    Check(
        "TensorRT",
        probes.tensorrt,
        (),
        ("board",),
        "the only way to the DLA: `tandem-agent prepare` finishes DLA segments with it",
        "sudo apt-get install tensorrt python3-libnvinfer",
    ),
    Check(
        "TensorRT plans",
        probes.plans,
        (),
        ("board",),
        "a segment without a plan runs on the GPU's kernels, and one without these on the CPU",
        "once the reason is gone, finish the engine again with tandem-agent prepare",
    ),
    Check(
        "DLA cores",
        probes.dla,
        (),
        ("board",),
        "without them everything runs on the GPU",
        "Orin NX, AGX Orin, Xavier NX and AGX Xavier have them; no other module does",
    ),
    Check(
        "DLA compiler",
        probes.dla_compiler,
        (),
        ("board",),
        "TensorRT loads it to compile for the DLA; containers and minimal images often lack it",
        "sudo apt-get install nvidia-l4t-dla-compiler",
    ),
    Check(
        "cuDLA",
        probes.cudla,
        (),
        ("board",),
        "TensorRT drives the DLA through it",
        "sudo apt-get install libcudla-12-6",
    ),
    Check(
        "power mode",
        probes.power_mode,
        (),
        ("board",),
        "plans are for the highest clocks, unless `tandem plan --power-mode` names a mode",
        "sudo nvpmodel -m 0",
    ),
    Check(
        "clocks",
        probes.clocks,
        (),
        ("board",),
        "clocks that rise with the load make times differ from run to run",
        "sudo jetson_clocks (until the next boot)",
    ),
    Check(
        "memory",
        probes.memory,
        (),
        ("board",),
        "TensorRT needs room to build DLA segments, and pipelines to run",
        "stop other programs, or add swap while `tandem-agent prepare` runs",
    ),
    Check(
        "OpenCV",
        probes.opencv,
        ("host", "board", "demo"),
        (),
        "reads images, videos and cameras",
        "on a Jetson use JetPack's own (a venv with --system-site-packages); elsewhere "
        f"{pip_install('camera')}",
    ),
    Check(
        "GStreamer",
        probes.gstreamer,
        (),
        ("board",),
        "reads network and CSI cameras in a child process",
        "sudo apt-get install gstreamer1.0-tools",
    ),
    Check(
        "GStreamer elements",
        probes.elements,
        (),
        ("board",),
        "each kind of camera and decoder is an element of its own",
        "sudo apt-get install gstreamer1.0-plugins-good gstreamer1.0-libav",
    ),
    Check(
        "cameras",
        probes.cameras,
        (),
        ("board",),
        "a pipeline with a v4l2:// source reads one",
        "plug one in, and join the group that may read it: sudo usermod -aG video $USER",
    ),
    Check(
        "onnxruntime",
        probes.module("onnxruntime"),
        ("host", "demo"),
        ("board",),
        "observes ranges for calibration, and runs segments on the CPU",
        pip_install("portable"),
    ),
    Check(
        "ONNX",
        probes.module("onnx", "onnx_ir", "onnxscript", "highspy"),
        ("host", "demo"),
        (),
        "the compiler reads and rewrites models, and solves placement with HiGHS",
        pip_install("host"),
    ),
    Check(
        "Triton",
        probes.triton,
        (),
        ("host",),
        "compiles GPU kernels; not needed where TensorRT or the CPU runs the segments",
        f"{pip_install('gpu-build')} (about 1 GB, host only)",
    ),
    Check(
        "amqtt",
        probes.module("amqtt"),
        ("demo",),
        (),
        "the broker that the demo starts for itself",
        pip_install("host"),
    ),
    Check(
        "disk",
        probes.disk,
        ("host", "board", "demo"),
        (),
        "engines, bundles and slots are written beside each other before one takes over",
        "free some space: builds want 2 GB, a board at least 200 MB",
    ),
)
