"""Hashes of engines before their kernels are compiled: `python -m scripts.golden_engines`.

A change that moves and renames code must not change what builds make. Each case imports a model,
plans it, cuts it into segments and lowers them to kernel launches, as a build does, and hashes
what comes out, in one field for each kind of thing. `--check` compares with
`tests/golden/engines.json`; without it, the file is written again.

The file holds for the versions of onnx, onnx-ir, onnxscript, highspy and numpy that it was written
with; where a check fails after another of them is installed, compare with the code before.

Names may change: give the new one and the one that the file was written with in `RENAMED_KERNELS`,
`RENAMED_PARAMETERS` and `RENAMED_STEPS`. Names of allocations are not hashed, nor is any order of
parameters and constants. What the project is called upon for is in `_model`, `_planned` and
`_built`; how its values are read is in `_plan_text` to `_workspace_text`.
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.util import find_spec
from inspect import signature
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

import configs
from device.engine.cuda_manifest import Cuda
from device.engine.manifest import DimRange, Precision, TensorInfo
from device.engine.preprocessing import Preprocessing
from scripts.golden import LIGHT_MODELS
from scripts.golden_graphs import GRAPHS, graph_named
from scripts.networks import NETWORKS
from toolkit.engine.build import ask_for_kernels, build_planned, plan_nodes, unified_ranges
from toolkit.engine.frontend import run_frontend
from toolkit.engine.frontend_result import Frontend
from toolkit.engine.options import BuildOptions
from toolkit.engine.segments import BuiltSegments
from toolkit.engine.target import choose_target
from toolkit.gpu.codegen.worker import kernel_function
from toolkit.gpu.compile_segment import GpuSegment
from toolkit.gpu.frames import compile_frames
from toolkit.gpu.ir.launch import (
    KERNELS,
    Argument,
    InTensor,
    InWeights,
    KernelLaunch,
    KernelSpec,
    TunableOp,
)
from toolkit.gpu.lower import KernelProgram
from toolkit.gpu.schedule.tactics import TacticOptions
from toolkit.gpu.segments import GpuBackend, gpu_target
from toolkit.gpu.shapes.sizes import Size
from toolkit.graph.extract import serialize_segment
from toolkit.partition.planning.objectives import DEFAULT
from toolkit.partition.planning.plan import Plan, PlanOptions, SharedPlan

FILE = Path(__file__).parent.parent / "tests" / "golden" / "engines.json"
SECONDS = 120.0  # of search: far more than any proof takes, so that a busy machine finds the same
PROCESSES = 2

# New name -> name in the golden file. Empty them when the file is written again.
RENAMED_KERNELS: Mapping[str, str] = {}
RENAMED_PARAMETERS: Mapping[str, str] = {}
RENAMED_STEPS: Mapping[str, str] = {}
"""Of all strings in constants: steps of epilogues, kinds of reductions and so on."""

# Kernels that no case makes, with the reason; all others must occur.
NOT_COVERED: Mapping[str, str] = {}


@dataclass(frozen=True)
class Case:
    """A build: a model for a profile at a precision.

    `model`: "net NAME" of `scripts.networks`, "light NAME" of the onnx wheel, "graph NAME" of
    `scripts.golden_graphs`, or a file of `configs/models`. `shape`: of its input instead of its
    own, with names for `dims`. `exhaustive`: with all tactics. `frames`: with the kernels that make
    its input of camera frames. `quick`: it takes less than a second, and the tests look at it every
    time.
    """

    name: str
    model: str
    profile: str
    precision: Precision
    batch: int = 1
    side: int | None = None
    shape: tuple[int | str, ...] = ()
    dims: tuple[DimRange, ...] = ()
    objective: str = DEFAULT
    exhaustive: bool = False
    frames: bool = False
    quick: bool = False


BATCH = DimRange(name="batch", min=1, opt=4, max=8)
HEIGHT = DimRange(name="height", min=64, opt=160, max=320)
WIDTH = DimRange(name="width", min=64, opt=192, max=320)
GRAPHS_ON: tuple[tuple[str, Precision], ...] = (
    ("h200", "fp16"),
    ("h200", "int8"),
    ("orin-nano-8gb", "fp32"),
    ("orin-nano-8gb", "int8"),
    ("agx-thor", "fp16"),
    ("agx-orin-64gb", "int8"),
    ("agx-xavier-32gb", "fp16"),
    ("laptop", "int8"),
)

CASES = (
    # Hopper, at full size
    Case("resnet50 h200 fp16 b8", "net resnet50", "h200", "fp16", batch=8),
    Case("resnet50 h200 int8 b8", "net resnet50", "h200", "int8", batch=8),
    Case("resnet50 h200 int8 b32", "net resnet50", "h200", "int8", batch=32),
    Case("resnet50 h200 fp16 b1", "net resnet50", "h200", "fp16"),
    Case("mobilenet_v2 h200 fp16 b8", "net mobilenet_v2", "h200", "fp16", batch=8),
    Case("mobilenet_v2 h200 int8 b32", "net mobilenet_v2", "h200", "int8", batch=32),
    Case("yolov8n h200 fp16 b8", "net yolov8n", "h200", "fp16", batch=8),
    Case("yolov8n h200 int8 b8", "net yolov8n", "h200", "int8", batch=8),
    Case("vit_small h200 fp16 b8", "net vit_small", "h200", "fp16", batch=8),
    Case("vit_small h200 int8 b8", "net vit_small", "h200", "int8", batch=8),
    Case("efficientnet_b0 h200 int8 b8", "net efficientnet_b0", "h200", "int8", batch=8),
    Case("robot-objects h200 int8", "robot-objects.onnx", "h200", "int8"),
    Case("resnet18 h200 fp32", "net resnet18", "h200", "fp32"),
    Case("resnet18 h200 int8 all", "net resnet18", "h200", "int8", batch=8, exhaustive=True),
    Case("yolov8n h200 fp16 all", "net yolov8n", "h200", "fp16", side=320, exhaustive=True),
    Case("resnet34_backbone h200 int8", "net resnet34_backbone", "h200", "int8"),
    # Other GPUs
    Case("resnet18 orin-nano fp16", "net resnet18", "orin-nano-8gb", "fp16"),
    Case("yolo11n orin-nano int8", "net yolo11n", "orin-nano-8gb", "int8", side=320),
    Case("deeplab orin-nano fp16", "net deeplab", "orin-nano-8gb", "fp16", side=128),
    Case("unet orin-nano int8", "net unet", "orin-nano-8gb", "int8", side=128),
    Case(
        "mobilenet_v2 orin-nano int8 all",
        "net mobilenet_v2",
        "orin-nano-8gb",
        "int8",
        exhaustive=True,
    ),
    Case(
        "robot-objects orin-nano fp16 frames",
        "robot-objects.onnx",
        "orin-nano-8gb",
        "fp16",
        frames=True,
    ),
    Case("resnet18 jetson-nano fp16", "net resnet18", "jetson-nano", "fp16"),
    Case("squeezenet orin-nano fp32", "light squeezenet", "orin-nano-8gb", "fp32", quick=True),
    Case("mobilenet_v3 thor fp16", "net mobilenet_v3", "agx-thor", "fp16"),
    Case("shufflenet_v2 thor int8", "net shufflenet_v2", "agx-thor", "int8", batch=2),
    Case("encoder thor fp32", "net encoder", "agx-thor", "fp32", quick=True),
    # With a DLA
    Case("resnet18 agx-xavier fp16", "net resnet18", "agx-xavier-32gb", "fp16"),
    Case("resnet50 agx-xavier int8", "light resnet50", "agx-xavier-64gb", "int8"),
    Case("googlenet agx-orin int8", "light inception_v1", "agx-orin-64gb", "int8"),
    Case("googlenet agx-orin fp16", "light inception_v1", "agx-orin-64gb", "fp16"),
    Case("squeezenet orin-nx int8", "light squeezenet", "orin-nx-8gb", "int8", quick=True),
    Case("robot-objects agx-orin int8", "robot-objects.onnx", "agx-orin-64gb", "int8"),
    Case("yolov5n orin-nx fp16", "net yolov5n", "orin-nx-16gb", "fp16", side=320),
    Case("yolov8n orin-nx int8", "net yolov8n", "orin-nx-16gb", "int8", side=320),
    Case("yolo11n agx-orin int8", "net yolo11n", "agx-orin-64gb", "int8", side=320),
    Case("yolov3_tiny agx-xavier int8", "net yolov3_tiny", "agx-xavier-32gb", "int8"),
    Case("mobilenet_v2 agx-orin int8", "net mobilenet_v2", "agx-orin-64gb", "int8"),
    Case("shufflenet agx-orin int8", "light shufflenet", "agx-orin-64gb", "int8"),
    Case("densenet121 agx-xavier fp16", "light densenet121", "agx-xavier-32gb", "fp16"),
    Case("deeplab agx-xavier int8", "net deeplab", "agx-xavier-32gb", "int8", side=256),
    Case("vit_small agx-orin int8", "net vit_small", "agx-orin-64gb", "int8"),
    Case(
        "resnet18 agx-orin fp16 relief",
        "net resnet18",
        "agx-orin-64gb",
        "fp16",
        objective="gpu-relief",
    ),
    Case(
        "efficientnet_lite0 orin-nx int8 relief",
        "net efficientnet_lite0",
        "orin-nx-8gb",
        "int8",
        objective="gpu-relief",
    ),
    Case("mobilenet_v2 agx-xavier fp32", "net mobilenet_v2", "agx-xavier-64gb", "fp32"),
    # Without a GPU
    Case("robot-objects laptop fp32", "robot-objects.onnx", "laptop", "fp32", quick=True),
    Case("robot-objects laptop int8", "robot-objects.onnx", "laptop", "int8", quick=True),
    # Dynamic sizes
    Case(
        "resnet18 h200 fp16 dynamic batch",
        "net resnet18",
        "h200",
        "fp16",
        shape=("batch", 3, 224, 224),
        dims=(BATCH,),
    ),
    Case(
        "mobilenet_v2 h200 int8 dynamic batch",
        "net mobilenet_v2",
        "h200",
        "int8",
        shape=("batch", 3, 224, 224),
        dims=(BATCH,),
    ),
    Case(
        "mobilenet_v1 thor fp16 dynamic pictures",
        "net mobilenet_v1",
        "agx-thor",
        "fp16",
        shape=(1, 3, "height", "width"),
        dims=(HEIGHT, WIDTH),
    ),
    Case(
        "rolling orin-nano fp16",
        "graph rolling",
        "orin-nano-8gb",
        "fp16",
        dims=(BATCH, HEIGHT, WIDTH),
        quick=True,
    ),
    Case(
        "rolling h200 int8",
        "graph rolling",
        "h200",
        "int8",
        dims=(BATCH, HEIGHT, WIDTH),
        quick=True,
    ),
    Case("suppressed h200 fp16", "graph suppressed", "h200", "fp16", quick=True),
    Case("suppressed orin-nano int8", "graph suppressed", "orin-nano-8gb", "int8", quick=True),
    # What the networks leave out
    *(
        Case(f"{graph} {profile} {precision}", f"graph {graph}", profile, precision, quick=True)
        for graph in GRAPHS
        if graph not in ("rolling", "suppressed")
        for profile, precision in GRAPHS_ON
    ),
)


@dataclass(frozen=True)
class Golden:
    """The expected results of a case: counts to read, then hashes.

    `kernels`: launches of each kernel in all tactics. `processors`: planned segments of each.
    `portable`: GPU segments that have no kernels.
    """

    processors: dict[str, int]
    rewrites: int
    portable: int
    operations: int
    tactics: int
    kernels: dict[str, int]
    plan: str
    segments: str
    weights: str
    launches: str
    workspace: str


@dataclass(frozen=True)
class _Planned:
    """A plan and what it was made of; `programs` takes the segments that `backend` compiles."""

    front: Frontend
    shared: SharedPlan
    backend: GpuBackend | None
    programs: dict[str, KernelProgram]


def measure(case: Case) -> Golden:
    """Return what a build makes of a case."""
    planned = _planned(case)
    (plan,) = planned.shared.plans
    built, programs = _built(planned), planned.programs
    if case.frames:
        assert planned.backend is not None
        (image,) = built.quantized.model.graph.inputs
        shape = tuple(dim for dim in image.shape or () if isinstance(dim, int))
        tensor = TensorInfo(name=str(image.name), dtype="float32", shape=shape)
        compile_frames(planned.backend, Preprocessing(), (tensor,))
    operations = [op for program in programs.values() for op in program.ops]
    tactics = [tactic for op in operations for tactic in op.tactics]
    calls = [call for tactic in tactics for call in tactic]
    kernels = Counter(_kernel(call) for call in calls)
    processors = Counter(segment.processor for segment in plan.segments)
    numbers = {name: _allocation_numbers(program) for name, program in programs.items()}
    return Golden(
        processors=dict(sorted(processors.items())),
        rewrites=len(planned.front.prepared.applied),
        portable=sum(s.place == "portable" for s in built.plan.segments if s.processor == "gpu"),
        operations=len(operations),
        tactics=len(tactics),
        kernels=dict(sorted(kernels.items())),
        plan=_sha(_plan_text(plan)),
        segments=_sha(_segments_text(built)),
        weights=_sha(_weights_text(built, programs)),
        launches=_sha({n: _launches_text(p, numbers[n]) for n, p in programs.items()}),
        workspace=_sha({n: _workspace_text(p, numbers[n]) for n, p in programs.items()}),
    )


# The steps of a build


def _model(case: Case, folder: Path) -> Path:
    """Write the model of a case, unless it is a file already."""
    kind, _, name = case.model.partition(" ")
    if kind == "light":
        return LIGHT_MODELS / f"light_{name}.onnx"
    if kind == "net":
        model = NETWORKS[name].model(case.batch, case.side)
        if case.shape:
            model.graph.inputs[0].shape = ir.Shape(case.shape)
            for value in (output for node in model.graph for output in node.outputs):
                value.shape = None
        ir.save(model, folder / "model.onnx")
        return folder / "model.onnx"
    if kind == "graph":
        onnx.save(graph_named(name), folder / "model.onnx")
        return folder / "model.onnx"
    return Path(configs.ROOT) / "models" / case.model


def _planned(case: Case) -> _Planned:
    """Steps 1 to 6 of `toolkit.engine.build.build_engine`, with stand-ins for ranges."""
    options = BuildOptions(
        precision=case.precision,
        dummy_ranges=case.precision == "int8",
        dims=case.dims,
        plan=PlanOptions(objective=case.objective, seconds=SECONDS),
        tactics=TacticOptions(exhaustive=case.exhaustive),
    )
    with tempfile.TemporaryDirectory() as folder:
        front = run_frontend(_model(case, Path(folder)), choose_target(case.profile), options)
    programs: dict[str, KernelProgram] = {}
    backend = _backend(front, programs)
    shared = plan_nodes(front, ask_for_kernels(front, backend))
    assert shared.plans[0].search.placement_proven, f"no plan is proven for {case.name}"
    return _Planned(front, shared, backend, programs)


def _backend(front: Frontend, programs: dict[str, KernelProgram]) -> GpuBackend | None:
    """Return a backend whose compiler only keeps the programs, by segment.

    Compiling takes minutes, and a host may have no compiler.
    """

    def record(name: str, program: KernelProgram, **_: object) -> GpuSegment:
        if not name.startswith("dla"):  # a second way to run what TensorRT makes, lowered alike
            programs[name] = program
        cuda = Cuda(
            sm=0, kernels=(), works=(), weights="", workspace_bytes=0, inputs=(), outputs=()
        )
        return GpuSegment(cuda, {}, (), program.workspace_bytes, program.largest_live_bytes)

    if front.target.profile.gpu is None:
        return None
    tactics = front.options.tactics
    return GpuBackend(
        gpu_target(front.target.profile, tactics),
        front.plan.precision,
        front.imported.dims,
        wide=frozenset(front.wide),
        tactics=tactics,
        compiler=record,
    )


def _built(planned: _Planned) -> BuiltSegments:
    """Steps 7 to 10, with the stand-in for the compiler."""
    unified = unified_ranges(planned.front, planned.shared.plans[0])
    return build_planned(planned.front, planned.shared, unified, planned.backend)


# What is hashed, as values that JSON can hold


def _sha(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sha_bytes(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _plan_text(plan: Plan) -> object:
    rows = [[p.node, p.op, p.processor, p.segment, p.rule, p.reason] for p in plan.placements]
    return [rows, [[s.name, s.processor, list(s.nodes)] for s in plan.segments]]


def _segments_text(built: BuiltSegments) -> object:
    pieces = [
        [segment.name, segment.processor, dict(segment.no_kernel), list(segment.unpaid)]
        for segment in built.plan.segments
    ]
    models = [
        [s.name, list(s.inputs), list(s.outputs), _sha_bytes(serialize_segment(s))]
        for s in built.extracted
    ]
    dims = [[dim.name, dim.min, dim.opt, dim.max, dim.step] for dim in built.gpu.dims]
    return [pieces, models, dims]


def _weights_text(built: BuiltSegments, programs: Mapping[str, KernelProgram]) -> object:
    constants = {
        segment.name: {
            name: [str(array.dtype), list(array.shape), _sha_array(array)]
            for name, array in segment.weights.items()
        }
        for segment in built.extracted
    }
    return [constants, {name: _sha_bytes(p.weights) for name, p in programs.items()}]


def _sha_array(array: np.ndarray) -> str:
    return _sha_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _allocation_numbers(program: KernelProgram) -> dict[str, int]:
    """Number the allocations by where they occur first."""
    numbers: dict[str, int] = {}
    views = [*program.inputs.values(), *program.outputs.values()]
    touched = [base for op in program.ops for base in _bases(op)]
    for base in [*touched, *(view.base for view in views), *program.offsets]:
        numbers.setdefault(base, len(numbers))
    return numbers


def _bases(op: TunableOp) -> list[str]:
    return [
        base for tactic in op.tactics for call in tactic for base in (*call.reads, *call.writes)
    ]


def _launches_text(program: KernelProgram, numbers: Mapping[str, int]) -> object:
    return [
        [
            list(op.nodes),
            [[_call_text(call, numbers) for call in tactic] for tactic in op.tactics],
        ]
        for op in program.ops
    ]


def _call_text(call: KernelLaunch, numbers: Mapping[str, int]) -> object:
    spec = call.spec
    _check_parameters(spec)
    arguments = [
        [_parameter(name), kind, _argument_text(argument, numbers)]
        for (name, kind), argument in zip(spec.signature, call.arguments, strict=True)
    ]
    return [
        *(_kernel(call), sorted(arguments), sorted(map(list, _constants(call)))),
        *(spec.warps, spec.stages, spec.exact, _value(call.grid)),
        *([numbers[base] for base in names] for names in (call.reads, call.writes)),
    ]


def _check_parameters(spec: KernelSpec) -> None:
    """Raise AssertionError: a launch does not name the parameters of its kernel."""
    names = {name.partition(".")[0] for name, _ in (*spec.signature, *spec.constants)}
    required, optional = _parameters_of(spec.kernel)
    assert required <= names <= required | optional or not required, (
        f"kernel {spec.kernel}: {sorted(names ^ required)} are not its parameters"
    )


@cache
def _parameters_of(kernel: str) -> tuple[set[str], set[str]]:
    """Return the parameters that a kernel needs, and the others; none without Triton."""
    if find_spec("triton") is None:
        return set(), set()
    parameters = signature(kernel_function(kernel, None).fn).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty}
    return required, {p.name for p in parameters} - required


def _kernel(call: KernelLaunch) -> str:
    return RENAMED_KERNELS.get(call.spec.title, call.spec.title)


def _constants(call: KernelLaunch) -> list[tuple[str, str]]:
    return [(_parameter(name), _value(value)) for name, value in call.spec.constants]


def _parameter(name: str) -> str:
    """Return the name of a parameter in the golden file; "SHAPE.1" is renamed with "SHAPE"."""
    whole, dot, member = name.partition(".")
    return RENAMED_PARAMETERS.get(whole, whole) + dot + member


def _argument_text(argument: Argument, numbers: Mapping[str, int]) -> str:
    if isinstance(argument, InTensor):
        return f"tensor {numbers[argument.base]} + {_value(argument.offset)}"
    if isinstance(argument, InWeights):
        return f"weights + {_value(argument.offset)}"
    return _value(argument)


def _value(value: object) -> str:
    """Return a constant as text; a size with its formula."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))})"
    if isinstance(value, str):
        return repr(RENAMED_STEPS.get(value, value))
    if isinstance(value, (bool, np.bool_)):
        return repr(bool(value))
    if isinstance(value, (int, np.integer)):
        return repr(value) if isinstance(value, Size) else repr(int(value))
    if isinstance(value, (float, np.floating)):
        return repr(float(value))
    assert value is None, f"a constant of an unknown type: {value!r}"
    return "None"


def _workspace_text(program: KernelProgram, numbers: Mapping[str, int]) -> object:
    rows = sorted([numbers[b], _value(program.sizes[b]), at] for b, at in program.offsets.items())
    borders = [
        [
            [name, numbers[v.base], v.dtype, *map(_value, (v.shape, v.strides, v.offset, v.scale))]
            for name, v in views.items()
        ]
        for views in (program.inputs, program.outputs)
    ]
    totals = [program.workspace_bytes, program.largest_live_bytes, program.dynamic]
    return [rows, borders, totals]


# All cases


def read_goldens() -> dict[str, Golden]:
    """Return the expected results by case."""
    return {name: Golden(**row) for name, row in json.loads(FILE.read_text()).items()}


def differences(expected: Golden, measured: Golden) -> list[str]:
    """Return a line for each field that differs."""
    return [
        f"{field.name}: {getattr(expected, field.name)} expected, "
        f"{getattr(measured, field.name)} measured"
        for field in fields(Golden)
        if getattr(expected, field.name) != getattr(measured, field.name)
    ]


def measure_all(cases: Sequence[Case], report: Callable[[str], None]) -> dict[str, Golden]:
    """Return what builds make of cases, by name; the longest are begun first."""
    measured: dict[str, Golden] = {}
    with Pool(PROCESSES) as pool:
        for case, golden, seconds in pool.imap_unordered(_timed, cases):
            measured[case.name] = golden
            report(
                f"{case.name}: {seconds:.1f} s, {golden.operations} operations, "
                f"{golden.processors}, {golden.rewrites} rewrites, {golden.portable} portable"
            )
    return {case.name: measured[case.name] for case in cases}


def _timed(case: Case) -> tuple[Case, Golden, float]:
    began = time.monotonic()
    try:
        golden = measure(case)
    except Exception as error:
        raise RuntimeError(f"case {case.name}: {error}") from error
    return case, golden, time.monotonic() - began


def kernels_of(goldens: Mapping[str, Golden]) -> dict[str, int]:
    """Return in how many cases each kernel occurs; 0 for those of none."""
    kernels = [{title.partition(" ")[0] for title in golden.kernels} for golden in goldens.values()]
    return {kernel: sum(kernel in titles for titles in kernels) for kernel in _table()}


def _table() -> list[str]:
    return [RENAMED_KERNELS.get(kernel, kernel) for kernel in KERNELS]


def check_coverage(goldens: Mapping[str, Golden]) -> None:
    """Raise AssertionError: a kernel that should occur does not."""
    cases = kernels_of(goldens)
    missing = {kernel for kernel, count in cases.items() if not count}
    assert missing == set(NOT_COVERED), f"kernels of no case: {sorted(missing)}"
    assert any(golden.rewrites for golden in goldens.values()), "nothing is rewritten for the DLA"
    assert any(golden.portable for golden in goldens.values()), "no segment is covered in part"


def _check(cases: Sequence[Case], measured: Mapping[str, Golden]) -> bool:
    expected = read_goldens()
    same = True
    for case in cases:
        lines = (
            differences(expected[case.name], measured[case.name])
            if case.name in expected
            else ["new"]
        )
        same = same and not lines
        for line in lines:
            print(f"DIFFERENT {case.name}: {line}")
    return same


def main() -> None:
    """Write the file, or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the golden file")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="this one only")
    options = parser.parse_args()
    cases = [case for case in CASES if options.case in (None, case.name)]
    began = time.monotonic()
    measured = measure_all(cases, print)
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s")
    if options.case is None:
        for kernel, count in kernels_of(measured).items():
            print(f"{kernel}: {count} cases")
        check_coverage(measured)
    else:
        print(json.dumps(asdict(measured[options.case]), indent=1))
    if options.check:
        raise SystemExit(0 if _check(cases, measured) else 1)
    if options.case is None:
        rows = {name: asdict(golden) for name, golden in measured.items()}
        FILE.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
