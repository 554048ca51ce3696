"""TensorRT's known refusals of a DLA segment, as one sentence and a fix.

Sources: issue threads and pull requests where people posted these lines. `TRT#n` is
NVIDIA/TensorRT, `cuDLA#n` NVIDIA-AI-IOT/cuDLA-samples, `tutorial#n`
NVIDIA-AI-IOT/jetson_dla_tutorial, `yolo#n` ultralytics/ultralytics, `deepstream#n`
marcoslucianops/DeepStream-Yolo, `yolov3#n` lewes6369/TensorRT-Yolov3, `tf2onnx#n`
onnx/tensorflow-onnx, `inference#n` dusty-nv/jetson-inference.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "unmarked", "warning", "info"]

_KEEP_OFF = "keep it off with `tandem build --force-gpu`, and report it: the rule table is wrong"
_NO_FAULT_OF_THE_MODEL = "report it with the log: no rule of Tandem's table says so"
_SHARED_CORE = "stop other programs that use the DLA, or build with fewer DLA segments"


@dataclass(frozen=True, slots=True)
class Message:
    """A line of TensorRT's log: its pattern, what it means (with the pattern's groups), the fix.

    `source`: where the line was posted.
    """

    pattern: str
    meaning: str
    fix: str
    source: str


# Of rows that match one line the first counts.
MESSAGES: tuple[Message, ...] = (
    Message(
        r"Cannot create DLA engine, (\d+) not available",
        "there is no DLA core {0} here",
        "build for the profile of this module; in a container, give it the DLA's devices",
        "NVIDIA-ISAAC-ROS/isaac_ros_depth_segmentation#12",
    ),
    Message(
        r"DLA supports only (\d+) subgraphs per DLA core",
        "the core holds {0} loadables already",
        _SHARED_CORE,
        "deepstream#27, yolov3#86",
    ),
    Message(
        r"Layer '?(.+?)'? \(CONSTANT\): Unsupported on DLA",
        "TensorRT does not fold constant {0} into the layers of the DLA",
        "keep the node that reads it off with `tandem build --force-gpu`, and report it",
        "tutorial#3, yolo#16449",
    ),
    Message(
        r"(?:Layer )?(?:'(.+?)'|(\S+)) ?\([^)]*\): Unsupported on DLA",
        "TensorRT does not run layer {0} on the DLA",
        _KEEP_OFF,
        "tutorial#3, yolo#16449",
    ),
    Message(
        r"(\S+): DLA cores do not support (\w+) ElementWise",
        "the DLA of this board has no {1} of two tensors, as layer {0} needs it",
        _KEEP_OFF,
        "yolo#16449, tutorial#3",
    ),
    Message(
        r"(\S+): MatMul is unsupported on DLA",
        "the DLA multiplies by constant matrices only, and layer {0} has two tensors",
        _KEEP_OFF,
        "yolo#23488",
    ),
    Message(
        r"Unary operation: (\w+) is not supported on DLA",
        "the DLA of this board has no {0} of a tensor",
        _KEEP_OFF,
        "TensorRT logs",
    ),
    Message(
        r"reshape layers directly connected to Slice or Concat",
        "a Reshape stands directly beside a Slice or a Concat, which this DLA does not take",
        "put another layer between them, or keep the Reshape off with `tandem build --force-gpu`",
        "yolo#23488",
    ),
    Message(
        r"DLA does not support out-of-bounds slice",
        "a slice reaches beyond its tensor, which the DLA does not take",
        _KEEP_OFF,
        "yolo#23488",
    ),
    Message(
        r"Input tensor has less than 4 dimensions for (.+?)\. At least",
        "an input of layer {0} has fewer than 4 dimensions, and the reshape of it runs on the GPU",
        _KEEP_OFF,
        "yolo#23488",
    ),
    Message(
        r"DLA does not support dynamic shape tensor: (.+)",
        "the size of tensor {0} is not fixed, as the DLA needs it",
        "build with fixed sizes for what runs on the DLA",
        "yolo#23488",
    ),
    Message(
        r"DLA Layer (.+) does not support dynamic shapes",
        "the sizes of layer {0} are not fixed, as the DLA needs them",
        "build with fixed sizes for what runs on the DLA",
        "tf2onnx#1632",
    ),
    Message(
        r"all profiles have same min, max, and opt value",
        "sizes are not fixed, as the DLA needs them",
        "build with fixed sizes for what runs on the DLA",
        "TRT#4413",
    ),
    Message(
        r"\) (\d+) for layer (.+) exceeds max batch size allowed of (\d+)",
        "layer {1} has a batch of {0} (all dimensions but C, H, W), and this DLA takes {2}",
        "run a smaller batch, or keep the layer off with `tandem build --force-gpu`",
        "TRT#2318",
    ),
    Message(
        r"DLA only supports FP16 and Int8 precision type\. Switching (.+) device type",
        "layer {0} computes in another type than FP16 and INT8",
        _KEEP_OFF,
        "tf2onnx#1632",
    ),
    Message(r"DLA only supports (.+?)\.?$", "the DLA only supports {0}", _KEEP_OFF, "yolo#16449"),
    Message(
        r"Concatenation on DLA requires at least two inputs",
        "a Concat has one input, which the DLA does not take",
        _KEEP_OFF,
        "yolov3#86",
    ),
    Message(
        r"Validation failed for DLA layer:? ?(.+?)?(?:\. Switching.*|\.?$)",
        "the DLA's compiler refuses layer {0}",
        _KEEP_OFF,
        "yolo#23488",
    ),
    Message(
        r"DLA(?: Standalone)? is enabled but layer '?(.+?)'? is not (?:supported|running) on DLA",
        "TensorRT does not run layer {0} on the DLA",
        _KEEP_OFF,
        "cuDLA#19, TRT#1529, TRT#2318",
    ),
    Message(
        r"not all layers are running on DLA",
        "TensorRT puts a layer of it on the GPU, and names none",
        "see the warnings of its log before; keep the layer off with `tandem build --force-gpu`",
        "TRT#2190",
    ),
    Message(
        r"no layer in the network can run on DLA",
        "TensorRT runs none of its layers on the DLA",
        _KEEP_OFF,
        "TRT#2318",
    ),
    Message(
        r"forceToUseNvmIO",
        "TensorRT reads an input of the segment, or one of its outputs, outside of the DLA, too",
        _NO_FAULT_OF_THE_MODEL,
        "cuDLA#34",
    ),
    Message(
        r"kDIRECT_IO specified but no conformant implementation exists",
        "TensorRT cannot run it without changing the format of an input or output on the GPU",
        _NO_FAULT_OF_THE_MODEL,
        "cuDLA#36, NVIDIA-ISAAC-ROS/isaac_ros_depth_segmentation#10",
    ),
    Message(
        r"Safety certified DLA should only have one graph",
        "TensorRT splits it into several loadables",
        _NO_FAULT_OF_THE_MODEL,
        "TRT#4165",
    ),
    Message(
        r"nbTensors <= capacity\(\)",
        "TensorRT counts more tensors at the DLA's border than it has room for, a fault of its own",
        "build with fewer or larger DLA segments (`tandem build --force-gpu`), or update JetPack",
        "TRT#2307",
    ),
    Message(
        r"RegionType::kNVM",
        "a tensor at the DLA's border does not lie in the DLA's memory, a fault of old TensorRT",
        "update JetPack, or keep its last node off with `tandem build --force-gpu`",
        "TRT#828",
    ),
    Message(
        r"Could not find any implementation for node (.+?)\.?\)?$",
        "TensorRT finds no implementation of {0} within the limits",
        "free memory on the board and run `tandem-agent prepare --again`",
        "TRT#3847",
    ),
    Message(
        r"Failure to submit program to DLA engine|DLA Error in submit",
        "the DLA's driver does not take the loadable",
        "reboot the board, and free memory: loadables need it in one piece",
        "TRT#2426, TRT#899",
    ),
    Message(
        r"SetInputTensorDesc failed|BindInputTensorArgs failed",
        "the DLA's driver does not take a tensor at the border",
        "run `tandem-agent prepare --again`; if it stays, report it with the log",
        "TRT#899",
    ),
    Message(
        r"Failure to load program|NVMEDIA_DLA.*load from memory failed",
        "the DLA's driver does not load the loadable, which another version's compiler has built",
        "run `tandem-agent prepare --again`, and compare JetPack's packages with `tandem doctor`",
        "TRT#2252",
    ),
    Message(
        r"context\.dlaContext != nullptr",
        "TensorRT gets no place on the DLA core",
        f"{_SHARED_CORE}; in a container, give it the DLA's devices",
        "inference#1838",
    ),
    Message(
        r"Calibration table does not match calibrator algorithm type",
        "a calibration cache is of another algorithm",
        "build the engine again",
        "TensorRT logs",
    ),
    Message(
        r"Missing scale and zero-point for tensor (\S+?),",
        "tensor {0} has no range",
        "calibrate the model again, and build with that table",
        "TRT#2462",
    ),
    Message(
        r"quantizeBiasCommon",
        "a tensor in INT8 has the range 0",
        "calibrate the model again with data in which every layer answers",
        "TRT#4446",
    ),
    Message(
        r"(?:out of memory|OutOfMemory|NvMapMemAlloc.* error)",
        "there is not enough memory to build",
        "stop other programs, or add swap while the board prepares",
        "TensorRT logs",
    ),
    Message(
        r"libnvdla_compiler\.so",
        "the DLA's compiler cannot be loaded",
        "install nvidia-l4t-dla-compiler; in a container, mount it from the board",
        "TensorRT logs",
    ),
    Message(
        r"kPLAN_MAGIC_TAG|[Vv]ersion tag does not match|stdVersionRead == ",
        "the plan is of another TensorRT, or has other bytes before it",
        "run `tandem-agent prepare --again`",
        "yolo#16449",
    ),
    Message(
        r"factory function returned nullptr",
        "TensorRT starts with an error of its own, as it does without a GPU that it can use",
        "run `tandem doctor`, and reboot the board if it finds nothing",
        "TensorRT logs",
    ),
)

WITH_FALLBACK = "Tandem: no plan without GPU fallback, now a build with it"
"""Line of a log between two builds of a segment for the DLA."""

# What TensorRT says at the end of every build that fails: it explains nothing.
_CONSEQUENCES = re.compile(
    r"engine(?:Ptr)? != nullptr|Engine could not be created|Building engine failed|"
    r"Failed to create engine|Engine set up failed|Engine creation failed"
)
_MARK = re.compile(
    r"(?:^|\s)\[(?P<letter>[FEWIV])\](?:\s|$)|(?:^|\s|\[)(?P<word>ERROR|WARNING|INFO)\b|"
    r"Error Code \d+"
)
_OF_LETTER: dict[str, Severity] = {
    "F": "error",
    "E": "error",
    "W": "warning",
    "I": "info",
    "V": "info",
}


def explain(log: Iterable[str]) -> str | None:
    """Return what a log says of the reason why there is no plan, and what to do; None if nothing.

    Errors count before warnings, and of each the last one: TensorRT warns of much that does no
    harm. Where there are errors, and none is known, no warning explains them.
    """
    lines = list(log)
    for severity in ("error", "unmarked", "warning"):
        rows = [line for line in lines if severity_of(line) == severity]
        for line in reversed(rows):
            sentence = _sentence(line)
            if sentence is not None:
                return sentence
        if severity == "error" and any(not _CONSEQUENCES.search(line) for line in rows):
            return None
    return None


def split_builds(log: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the lines of the build without GPU fallback, and those of the one with it that came
    after; none if it did not come."""
    lines = list(log)
    at = next((n for n, line in enumerate(lines) if text_of(line) == WITH_FALLBACK), len(lines))
    return lines[:at], lines[at + 1 :]


def last_error(log: Iterable[str]) -> str:
    """Return the last error of a log that is no consequence of another; "" if there is none."""
    errors = [line for line in log if severity_of(line) == "error"]
    causes = [line for line in errors if not _CONSEQUENCES.search(line)]
    return text_of((causes or errors or [""])[-1])


def severity_of(line: str) -> Severity:
    """Return how severe a line is, by the marks of Tandem's logs, trtexec and users' tools."""
    match = _MARK.search(line)
    if match is None:
        return "unmarked"
    if match["letter"]:
        return _OF_LETTER[match["letter"]]
    return _OF_LETTER[(match["word"] or "E")[0]]


def text_of(line: str) -> str:
    """Return a line of Tandem's log without its mark."""
    return re.sub(r"^\[[EWIV]\] ", "", line)


def _sentence(line: str) -> str | None:
    for message in MESSAGES:
        match = re.search(message.pattern, line)
        if match:
            groups = [group for group in match.groups() if group] or ["(unnamed)"]
            return f"{message.meaning.format(*groups)}; {message.fix}"
    return None
