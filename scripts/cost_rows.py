"""Parse the published figures: each row of configs/published_figures.csv as a case, or unused.

Tables of aliases map devices, power modes and models of the sources to profiles, clocks and
networks of `scripts.networks`. A row that no table contains is unused, with the reason.
"""

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, cast, get_args

import onnx_ir as ir

import configs
from device.engine.manifest import Precision
from device.errors import ConfigError
from device.profile import load_profile
from device.selftest.report import Report
from scripts.networks import NETWORKS
from scripts.networks.classic import conv_layer, dense_layer, googlenet_part
from toolkit.partition.costs.gpu import Launch
from toolkit.partition.costs.hardware import Clocks

Engine = Literal["gpu", "dla0", "2dla", "gpu+2dla"]
Measure = Literal["latency", "rate", "power", "energy"]
# How a figure came about: TensorRT or the DLA timed by the source's own program; the engine called
# by a framework, with the price of its call; a target, peak or claim, which nobody timed.
Kind = Literal["measured", "framework", "configured"]
KINDS: tuple[str, ...] = get_args(Kind)
Raw = dict[str, str]

SELFTEST = "selftest of a board"  # how the source of a row begins that came with a report

FIGURES = configs.ROOT / "published_figures.csv"
CHECKS = configs.ROOT / "published_checks.csv"  # rows that no fit has seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A published device: a profile with a power mode or clocks."""

    profile: str
    mode: str | None = None
    clocks: Clocks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One usable row. `value` is ms of one run of the batch (latency), ms of one image (rate), W
    (power) or mJ of one image (energy). `line` is the row's line in the file, the header being 1.
    """

    line: int
    source: str
    device: str
    board: Board
    network: str
    side: int | None
    batch: int
    dla_batch: int
    precision: Precision
    engine: Engine
    measure: Measure
    value: float
    kind: Kind = "measured"

    @property
    def family(self) -> str:
        """The group of rows that come from one kind of source, for reports."""
        return next((name for start, name in _FAMILIES if self.source.startswith(start)), "other")

    @property
    def launch(self) -> Launch:
        """How the source's runtime started kernels."""
        return next(
            (launch for start, measure, launch, _ in _LAUNCHES
             if self.source.startswith(start) and self.measure == measure
), "each"
        )  # fmt: skip

    @property
    def called(self) -> bool:
        """Return True if the time has the price of a framework's call of the engine."""
        return self.source.startswith(_CALLED) and self.measure == "latency"

    def model(self, batch: int | None = None) -> ir.Model:
        """Build the network at the case's size."""
        if self.network in PARTS:
            return PARTS[self.network]()
        return NETWORKS[self.network].model(batch or self.batch, self.side)


@dataclass(frozen=True, slots=True)
class UnusedRow:
    """A row that is not used, and why."""

    line: int
    reason: str


_FAMILIES = (
    ("trtutils", "trtutils"),
    ("HaX-CoNN", "HaX-CoNN"),
    ("NVIDIA Deep-Learning", "DLA-SW"),
    ("DLA-SW", "DLA-SW"),
    ("GitHub markdown", "ResNet-50 study"),
    ("Ultralytics", "Ultralytics"),
    ("onnxsim", "onnxsim"),
    ("NVIDIA-AI-IOT/cuDLA", "cuDLA"),
    ("JEDI", "JEDI"),
    ("MLPerf", "MLPerf"),
    ("torch2trt", "torch2trt"),
)

# Runs as CUDA graphs, and where that is said; all others launch every kernel: trtexec without
# --useCudaGraph, trtutils' raw_exec, Ultralytics' execute_async, layer profiles.
_LAUNCHES: tuple[tuple[str, Measure, Launch, str], ...] = (
    (
        "MLPerf",
        "latency",
        "graph",
        "use_graphs = True in closed/NVIDIA/configs/*/{SingleStream,MultiStream}; False in Offline",
    ),
)

# Frameworks whose call is in the time: torch2trt times a PyTorch module with its synchronisation
# (its latencies are 0.25 to 0.37 ms above the inverse of its rates). Ultralytics' inference times
# have no such part: fitted to them alone the price is 0.
_CALLED = ("torch2trt",)

# Parts of networks that sources time on their own. The seven layers of the ResNet-34 backbone and
# the last three of AlexNet are single layers; the groups of GoogLeNet are its blocks.
PARTS: dict[str, Callable[[], ir.Model]] = {
    **{
        f"googlenet:{part}": partial(googlenet_part, part)
        for part in ("stem", "3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b")
    },
    "alexnet:fc6": partial(dense_layer, 9216, 4096),
    "alexnet:fc7": partial(dense_layer, 4096, 4096),
    "alexnet:fc8": partial(dense_layer, 4096, 1000),
    "resnet34:conv2": partial(conv_layer, 64, (192, 320), 3, 64),
}
_GOOGLENET = ("stem", "3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b")

# Models as the sources name them. Layer groups: "[layers a-b]" measured, "[group i ...]" as the
# artifact's solver takes them.
MODELS: dict[str, str] = {
    **{name: name for name in NETWORKS},  # as selftests of boards name them
    "GoogleNet": "googlenet",
    **{
        f"GoogleNet[layers {span}]": f"googlenet:{part}"
        for span, part in zip(
            (
                "0-9",
                "10-24",
                "25-38",
                "39-52",
                "53-66",
                "67-80",
                "81-94",
                "95-109",
                "110-123",
                "124-140",
            ),
            _GOOGLENET,
            strict=True,
        )
    },
    **{
        f"GoogleNet[group {i} from layer {start}]": f"googlenet:{part}"
        for i, (start, part) in enumerate(
            zip((0, 10, 25, 39, 52, 66, 81, 94, 110, 124), _GOOGLENET, strict=True)
        )
    },
    "AlexNet[group 5 from layer 9]": "alexnet:fc6",
    "AlexNet[group 6 from layer 11]": "alexnet:fc7",
    "AlexNet[group 7 from layer 14]": "alexnet:fc8",
    "resnet50": "resnet50",
    "ResNet50": "resnet50",
    "ResNet-50": "resnet50",
    "ResNet50 (torchvision)": "resnet50",
    "ResNet-34 backbone": "resnet34_backbone",
    **{
        f"ResNet-34 backbone layer {layer}": "resnet34:conv2"
        for layer in (
            "Conv_223+BN+ReLU",
            "Conv_226+BN+Add+ReLU",
            "Conv_230+BN+ReLU",
            "Conv_233+BN+Add+ReLU",
            "Conv_237+BN+ReLU",
            "Conv_240+BN+Add+ReLU",
        )
    },
    "SSD-ResNet34": "ssd_resnet34",
    "ssd-resnet34": "ssd_resnet34",
    "SSD-MobileNetV1": "ssd_mobilenet_v1",
    "ssd-mobilenet": "ssd_mobilenet_v1",
    "RetinaNet ResNeXt-50": "retinanet_resnext50",
    "RetinaNet ResNet-34": "retinanet_resnet34",
    "YOLOv5s (QAT)": "yolov5s",
    **{f"YOLO26{s}": f"yolo26{s}" for s in "nsmlx"},
    **{f"yolov8{s}": f"yolov8{s}" for s in "nsm"},
    **{f"yolov9{s}": f"yolov9{s}" for s in "tsm"},
    **{f"yolov10{s}": f"yolov10{s}" for s in "nsm"},
    **{f"yolox{s}": f"yolox_{s}" for s in "ntsm"},
    "yolov7t": "yolov7_tiny",
    "yolov7m": "yolov7",
    "YOLOv2-relu": "yolov2",
    "YOLOv2tiny-relu": "yolov2_tiny",
    "YOLOv3-relu": "yolov3",
    "YOLOv3tiny-relu": "yolov3_tiny",
    "YOLOv4-relu": "yolov4",
    "YOLOv4tiny-relu": "yolov4_tiny",
    **{f"YOLO11{s}": f"yolo11{s}" for s in "nsmlx"},
    "ResNet18": "resnet18",
    "MobileNetV2": "mobilenet_v2",
    "retinanet": "retinanet_resnext50",
    **{
        f"{name} (torchvision)": name
        for name in (
            *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "mobilenet_v2"),
            *("densenet121", "densenet161", "densenet169", "densenet201", "vgg16", "vgg19"),
            *("shufflenet_v2_x0_5", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0"),
        )
    },
    "squeezenet1_1 (torchvision)": "squeezenet",
    "shufflenet_v2_x1_0 (torchvision)": "shufflenet_v2",
    # Normalisation is folded into the convolution before it.
    "vgg16_bn (torchvision)": "vgg16",
    "vgg19_bn (torchvision)": "vgg19",
}

_ORIN = "agx-orin-64gb"
# (device, power mode as written) -> board. The developer kits of AGX Orin, of 32 GB too, hold the
# full module (2048 cores, 1301 MHz; jetson_specs, p3701-0000); trtutils states no power mode and is
# taken at the highest; JetPack 5 knows Orin Nano at 625 MHz only.
BOARDS: dict[tuple[str, str], Board] = {
    ("Jetson AGX Xavier 32GB", "MAXN (nvpmodel -m 0)"): Board(profile="agx-xavier-32gb"),
    ("Jetson AGX Xavier 32GB", "MaxP"): Board(profile="agx-xavier-32gb"),
    ("Jetson AGX Xavier", "MAXN + jetson_clocks"): Board(profile="agx-xavier-32gb"),
    ("Jetson AGX Xavier", "not stated"): Board(profile="agx-xavier-32gb"),
    ("Jetson Nano", "not stated"): Board(profile="jetson-nano"),
    ("Jetson Xavier NX 8GB", "MaxP"): Board(profile="xavier-nx-8gb"),
    # MLPerf's ResNet-50 takes 0.78 of what 918 MHz need: 918 / 1173.
    ("Jetson Orin NX 16GB", "MaxP"): Board(profile="orin-nx-16gb-super"),
    ("Jetson AGX Orin 32GB", "MAXN"): Board(profile=_ORIN),
    ("Jetson AGX Orin 32GB", "not stated"): Board(profile=_ORIN),
    ("Jetson AGX Orin 64GB", "not stated"): Board(profile=_ORIN),
    **{
        ("Jetson AGX Orin 64GB", mode): Board(profile=_ORIN, mode=mode)
        for mode in ("MAXN", "50W", "30W", "15W")
    },
    ("Jetson AGX Orin 64GB devkit", "MAXN"): Board(profile=_ORIN),
    ("Jetson AGX Orin 64GB devkit", "50W"): Board(profile=_ORIN, mode="50W"),
    ("Jetson AGX Orin 64GB devkit", "max (nvpmodel -m 0 + jetson_clocks advised)"): Board(
        profile=_ORIN
    ),
    ("Jetson AGX Orin", "MaxP"): Board(profile=_ORIN),
    ("NVIDIA Jetson AGX Orin Developer Kit 64G (TensorRT)", "MaxP"): Board(profile=_ORIN),
    **{
        (f"Siliconhighway NVIDIA Jetson AGX Orin ({page} page size)", f"nvidia_orin_{run}"): Board(
            profile=_ORIN
        )
        for page, run in (
            ("64K", "64k_default_jetpack-nvidia_original-gpu-tensorrt-vdefault-default_config"),
            ("4K", "maxn_pagesize.4k-nvidia_original-gpu-tensorrt-vdefault-default_config"),
        )
    },
    ("Jetson Orin Nano 8GB", "not stated"): Board(profile="orin-nano-8gb"),
    ("Jetson Orin Nano 8GB Super", "MAXN_SUPER"): Board(profile="orin-nano-8gb-super"),
    ("Jetson Orin NX 16GB", "not stated"): Board(profile="orin-nx-16gb"),
    ("Jetson Xavier NX 8GB", "not stated"): Board(profile="xavier-nx-8gb"),
    ("Jetson Orin Nano Super devkit", "max (nvpmodel -m 0 + jetson_clocks advised)"): Board(
        profile="orin-nano-8gb-super"
    ),
    ("Jetson Orin NX 16GB", "MAXN (JetPack 6.0: before Super)"): Board(profile="orin-nx-16gb"),
    ("Jetson Orin NX 16GB", "max (nvpmodel -m 0 + jetson_clocks advised)"): Board(
        profile="orin-nx-16gb-super"
    ),
    ("Jetson AGX Thor (devkit)", "max (nvpmodel -m 0 + jetson_clocks advised)"): Board(
        profile="agx-thor"
    ),
    ("DRIVE Orin-X", "GPU 1275/DLA 1331/EMC 3200 MHz"): Board(
        profile=_ORIN, clocks=Clocks(gpu_mhz=1275, dla_mhz=1331, emc_mhz=3200)
    ),
    ("DRIVE/Jetson Orin", "DLA 1152 MHz"): Board(profile=_ORIN, clocks=Clocks(dla_mhz=1152)),
}

ENGINES: dict[str, Engine] = {
    "GPU": "gpu",
    "GPU (JEDI pre/post parallel, streams)": "gpu",
    "DLA0": "dla0",
    "DLA1": "dla0",
    "2DLA": "2dla",
    "DLA0+DLA1": "2dla",
    "GPU+2DLA": "gpu+2dla",
}
PRECISIONS: dict[str, Precision] = {
    "FP32": "fp32",
    "FP16": "fp16",
    "FP16 (trtutils default build)": "fp16",
    "INT8": "int8",
    "INT8 dense": "int8",
    "see MLPerf (INT8 for CNN/BERT)": "int8",
    "": "int8",  # energy rows of MLPerf leave it out; their runs are INT8
}
MEASURES: dict[str, Measure] = {
    "latency_ms": "latency",
    "latency_p90_ms": "latency",
    "latency_p99_ms": "latency",
    "fps": "rate",
    "qps": "rate",
    "board_power_w": "power",
    "energy_mj": "energy",
}

# Sources that give the mean beside the 90th percentile of the same run.
_WITH_MEANS = tuple(
    f"MLPerf Inference {run} (github:mlcommons/inference_results_{run.split()[0]})".split(" (")[0]
    for run in (
        "v1.1 closed NVIDIA/AGX_Xavier_TRT",
        "v1.1 closed NVIDIA/AGX_Xavier_TRT_MaxQ",
        "v2.0 closed NVIDIA/Orin_TRT",
        "v2.0 closed NVIDIA/Orin_TRT_MaxQ",
        "v2.1 closed NVIDIA/Orin_TRT",
        "v2.1 closed NVIDIA/Orin_TRT_MaxQ",
        "v3.0 closed NVIDIA/Orin_TRT",
        "v3.0 closed NVIDIA/Orin_TRT_MaxQ",
    )
)


def _copied(row: Raw) -> bool:
    """Return True if a collection repeats a run that the file has from its original source."""
    copied_runs = ("v2.0 closed NVIDIA", "v2.1 closed NVIDIA", "v3.0 closed NVIDIA")
    from_collection = (
        any(run in row["source"] for run in copied_runs) and "cm4mlperf" in row["source"]
    )
    return from_collection or (
        "pagesize.4k" in row["source"] and row["metric"] in ("fps", "board_power_w")
    )


_FREQUENCY = re.compile(r"soc_(gpu|dla|emc)_freq=(\d+)")


def _board(row: Raw) -> Board | None:
    """Return the board of a row; runs at other clocks have them in the notes."""
    known = BOARDS.get((row["device"], row["power_mode"]))
    if known is not None:
        return known
    if row["source"].startswith(SELFTEST):
        return Board(profile=row["device"], mode=row["power_mode"] or None)
    clocks_mhz = {part: int(hz) / 1e6 for part, hz in _FREQUENCY.findall(row["notes"])}
    if "Orin" not in row["device"] or not clocks_mhz.get("gpu"):
        return None
    return Board(
        profile=_ORIN,
        clocks=Clocks(
            gpu_mhz=clocks_mhz["gpu"],
            dla_mhz=min(1600.0, clocks_mhz["dla"]) if clocks_mhz.get("dla") else None,
            emc_mhz=clocks_mhz["emc"] if clocks_mhz.get("emc") else None,
        ),
    )


def _batches(row: Raw) -> tuple[int, int]:
    """Return the batch of the GPU and of the DLA."""
    text = row["batch"] or ",".join(re.findall(r"(?:gpu|dla)_b\w*size=\d+", row["notes"]))
    gpu = re.search(r"(?:GPU |gpu_b\w*size=)(\d+)", text)
    dla = re.search(r"(?:DLA |dla_b\w*size=)(\d+)", text)
    if text.isdigit():
        return int(text), int(text)
    default = 256 if row["metric"] == "fps" else 8 if "MultiStream" in row["notes"] else 1
    return int(gpu.group(1)) if gpu else default, int(dla.group(1)) if dla else 1


# Reasons not to use a row; the first that applies counts.
_REASONS: tuple[tuple[str, Callable[[Raw], bool]], ...] = (
    ("a target, peak or claim, not a run", lambda r: r["kind"] == "configured"),
    (
        "rounded copy of a measured row",
        lambda r: r["model"].startswith("GoogleNet[group") and r["engine"] == "GPU",
    ),
    (
        "memory contention: fitted apart (section Contention)",
        lambda r: r["metric"] == "achieved_bw_gbps",
    ),
    ("a crossing: fitted apart (section Crossings)", lambda r: r["metric"] == "transition_cost_ms"),
    (
        "DLA against GPU on their rails: checked apart (section Energy)",
        lambda r: r["metric"] == "perf_per_watt_ratio",
    ),
    ("bandwidth in use, not time", lambda r: r["metric"] == "emc_utilization_pct_max"),
    ("a schedule of two networks, sums mixed with maxima", lambda r: r["metric"] == "makespan_ms"),
    (
        "two networks at once",
        lambda r: "co-running" in r["engine"] or "independent copies" in r["model"],
    ),
    (
        "an output marked for a transition: with the crossing's cost",
        lambda r: "extra output marked" in r["notes"],
    ),
    (
        "a crossing of one run: fitted apart (section Crossings)",
        lambda r: "dumpProfile avg" in r["notes"] and "ForeignNode" not in r["notes"],
    ),
    ("sparse weights, which no plan uses", lambda r: "sparse" in r["precision"]),
    ("two precisions in one network", lambda r: r["precision"].startswith("INT8+FP16")),
    ("another output format, value approximate", lambda r: "approx." in r["notes"]),
    (
        "with pictures read and prepared, on an otherwise idle GPU",
        lambda r: "baseline, no pipelining" in r["engine"],
    ),
    (
        "pipelined over processors by the authors' own cuts",
        lambda r: "JEDI pipelined" in r["engine"],
    ),
    ("an older run of the same table", lambda r: "old version table" in r["notes"]),
    ("a whole application with decoding", lambda r: "DeepStream" in r["source"]),
    ("with nodes that fall back to the GPU", lambda r: "fallback" in r["engine"]),
    (
        "derived from other rows of the same run",
        lambda r: (
            r["metric"]
            in (
                "inf_per_s_per_w",
                "energy_mj_per_8sample_query",
                "peak_board_power_w",
                "gr3d_util_pct",
                "vdd_gpu_soc_w",
            )
            or r["notes"].startswith("derived")
        ),
    ),
    (
        "a language, speech, volume or diffusion model: no such graph here",
        lambda r: (
            r["model"]
            in (
                "bert-99",
                "bert-99.9",
                "rnnt",
                "3d-unet-99",
                "3d-unet-99.9",
                "gptj-99",
                "gptj-99.9",
                "stable-diffusion-xl",
                "llama2-70b-99",
            )
        ),
    ),
    ("its layers overlap in time", lambda r: r["model"].endswith(("MaxPool", "MaxPool_222"))),
    (
        "its graph is not public or its cut ambiguous",
        lambda r: r["model"] not in MODELS and r["model"] != "idle",
    ),
    ("clocks unknown", lambda r: _board(r) is None),
    (
        "combined with another run in the file",
        lambda r: r["metric"] == "latency_p90_ms" and r["source"].split(" (")[0] in _WITH_MEANS,
    ),
    ("another copy of a run in the file", _copied),
)


def raw_rows(path: Path = FIGURES) -> list[Raw]:
    """Return a file of published figures as it is written.

    Raises ConfigError: a row has no kind, or one that is not known.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for line, row in enumerate(rows, start=2):
        if row.get("kind") not in KINDS:
            raise ConfigError(
                f"{path.name}, line {line}: kind is {row.get('kind')!r}; "
                f"write how the figure came about: {', '.join(KINDS)}"
            )
    return rows


def read_rows(path: Path = FIGURES) -> tuple[list[Case], list[UnusedRow]]:
    """Return the rows of a file of published figures: (cases, unused rows).

    Raises ConfigError: see `raw_rows`.
    """
    cases, unused = [], []
    for line, row in enumerate(raw_rows(path), start=2):
        reason = next((name for name, holds in _REASONS if holds(row)), None)
        case = None if reason else _case(line, row)
        if case is None:
            unused.append(UnusedRow(line, reason or "not of a kind that is fitted"))
        else:
            cases.append(case)
    return cases, unused


def report_rows(report: Report) -> tuple[list[Case], list[UnusedRow]]:
    """Return the networks of a selftest's report that ran whole on a DLA as cases.

    `line`: the number of the row in the report.
    """
    rows, unused = figure_rows(report)
    return [case for line, row in rows if (case := _case(line, row)) is not None], unused


def figure_rows(report: Report) -> tuple[list[tuple[int, Raw]], list[UnusedRow]]:
    """Return the networks that ran whole on a DLA as rows of published figures, with their number.

    Kernels of Tandem run as one CUDA graph, but the fit's rows of the GPU are TensorRT's: only the
    times of a DLA are of what the rows are of.
    """
    machine = report.machine
    mode = machine.power_mode_name
    if mode not in {each.name for each in load_profile(report.profile).power_modes}:
        mode = ""
    notes = (
        f"Tandem {report.tandem}, L4T {machine.l4t}, TensorRT {machine.tensorrt}; clocks "
        f"{'held' if machine.locked else 'not held'}; kit {report.kit[:8]}"
    )
    rows, unused = [], []
    for line, row in enumerate(report.networks, start=1):
        processors = {segment.processor for segment in row.segments}
        implementations = {segment.implementation for segment in row.segments}
        reasons = (
            (bool(row.problem), f"it did not run: {row.problem}"),
            (row.network not in NETWORKS, "its graph is not public"),
            (row.variant != "dla", "not a run on the DLA"),
            (not processors <= {"dla0", "dla1"} or implementations != {"tensorrt"},
             "with segments on other processors"),
            (row.precision not in ("int8", "fp16"), "not of a kind that is fitted"),
        )  # fmt: skip
        reason = next((text for holds, text in reasons if holds), None)
        if reason is not None:
            unused.append(UnusedRow(line, f"{row.item}: {reason}"))
            continue
        raw = {
            "source": SELFTEST, "device": report.profile, "power_mode": mode,
            "model": row.network, "input": "", "precision": row.precision.upper(), "batch": "1",
            "engine": "DLA0", "metric": "latency_ms", "value": f"{row.median_ms:.6g}",
            "kind": "measured", "notes": f"{notes}; median of {row.runs}",
        }  # fmt: skip
        rows.append((line, raw))
    return rows, unused


def read_applications(path: Path = CHECKS) -> list[Case]:
    """Return the rates of whole applications whose network is known."""
    rows = enumerate(raw_rows(path), start=2)
    cases = [_case(n, row) for n, row in rows if row["source"].startswith("DeepStream 7")]
    return [case for case in cases if case is not None]


def _case(line: int, row: Raw) -> Case | None:
    engine, precision = ENGINES.get(row["engine"]), PRECISIONS.get(row["precision"])
    measure, board = MEASURES.get(row["metric"]), _board(row)
    if engine is None or precision is None or measure is None or board is None:
        return None
    batch, dla_batch = _batches(row)
    value = float(row["value"])
    network = MODELS[row["model"]]
    sides = re.fullmatch(r"(?:\d+x)?(\d+)x(\d+)", row["input"])
    return Case(
        line=line,
        source=row["source"],
        device=board.profile,
        board=board,
        network=network,
        side=int(sides.group(2))
        if sides and network in NETWORKS and NETWORKS[network].side
        else None,
        batch=batch,
        dla_batch=dla_batch,
        precision=precision,
        engine=engine,
        measure=measure,
        value=1000 / value if measure == "rate" else value,
        kind=cast("Kind", row["kind"]),
    )
