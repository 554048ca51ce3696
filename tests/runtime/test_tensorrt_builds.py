"""What a build for the DLA survives: constants, crashes at its end, full disks, any failing call.

tests/fixtures/tensorrt_double stands for TensorRT, and fails where it is told to.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import cuda_double
import msgspec
import numpy as np
import pytest
from model_fixtures import save
from onnx import helper
from tensorrt_fixtures import build, install, prepare

from device.runtime.prepare import build as build_module
from device.runtime.prepare import prepare_engine as prepare_module
from device.runtime.prepare.children import BUILD, Ended, Limits, Task, Watch
from device.runtime.prepare.prepare_engine import Prepared
from device.runtime.tensorrt.messages import MESSAGES, explain, last_error
from device.runtime.tensorrt.request import Request
from device.session import open_session
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions

INJECT = "TENSORRT_DOUBLE_INJECT"


@pytest.fixture(autouse=True)
def gpu() -> Iterator[cuda_double.CudaDouble]:
    """A driver in every test; the module tensorrt is gone after it."""
    with cuda_double.installed() as double:
        yield double
    forget()


def forget() -> None:
    for name in ("tensorrt", "tensorrt.injected"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network in INT8, all of it but the last node on the DLA."""
    return build(tmp_path_factory.mktemp("engine"), precision="int8")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build in this process: what the child does but leave."""

    def run(task: Task, request: Path, log: Path, watch: Watch) -> Ended:
        assert task == BUILD
        forget()
        decoded = msgspec.json.decode(request.read_bytes(), type=Request)
        return Ended(answer=msgspec.json.encode(build_module.answer(decoded, [])))

    monkeypatch.setattr(prepare_module, "run_child", run)


def runs_on_the_dla(engine: Path, plans: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the engine with its plan, and return why it runs as it does."""
    monkeypatch.delenv(INJECT)
    forget()
    with open_session(engine, plans=plans) as session:
        (dla,) = [report for report in session.reports if report.processor == "dla0"]
        session.infer({"x": np.zeros((1, 3, 32, 32), np.float32)})
    assert dla.implementation == "tensorrt", dla.reason
    return dla.reason


# --- constants


@pytest.mark.parametrize("version", ["8.6.1", "10.7.0", "11.4.1"])
def test_constants_are_no_layers_that_the_dla_refuses(
    version: str, engine: Path, in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(version, tmp_path, monkeypatch)
    monkeypatch.setenv(INJECT, "constants=dla")
    row = prepare(engine, tmp_path / "plans")
    assert (row.problem, row.refused_layers, row.fallback) == (None, (), True)
    reason = runs_on_the_dla(engine, tmp_path / "plans", monkeypatch)
    assert "built with GPU fallback, all layers on the DLA" in reason
    again = prepare(engine, tmp_path / "plans")
    assert (again.cached, again.fallback) == (True, True)


def test_a_plan_without_fallback_says_nothing_of_it(
    engine: Path, in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv(INJECT, "")
    assert not prepare(engine, tmp_path / "plans").fallback
    assert "fallback" not in runs_on_the_dla(engine, tmp_path / "plans", monkeypatch)
    log = next((tmp_path / "plans").glob("*.log")).read_text()
    assert "GPU_FALLBACK" not in log


@pytest.mark.parametrize(
    ("inject", "says"),
    [
        ("constants=gpu", "1 of its layers run elsewhere: 'Reformatting CopyNode for Input"),
        ("EngineInspector.get_engine_information=empty", "does not say whether a layer runs on"),
        ("ICudaEngine.create_engine_inspector=null", "does not say whether a layer runs on the"),
        ("Runtime.deserialize_cuda_engine=null", "does not say whether a layer runs on the GPU"),
    ],
)
def test_a_plan_with_fallback_is_taken_only_if_all_of_it_is_on_the_dla(
    inject: str, says: str, engine: Path, in_process: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install("10.3.0", tmp_path, monkeypatch)
    also = "" if inject.startswith("constants") else "constants=dla;"
    monkeypatch.setenv(INJECT, also + inject)
    row = prepare(engine, tmp_path / "plans")
    assert row.problem is not None
    assert says in row.problem
    assert not list((tmp_path / "plans").glob("*.plan"))


NO_SPACE = "NvMapMemAllocInternalTagged: 1075072515 error 12"
UNHEARD = "Error Code 2: Internal Error (Assertion nobody knows failed. )"


@pytest.mark.parametrize(
    ("inject", "says"),
    [
        (f"constants=fails:{NO_SPACE}", "not enough memory to build"),
        (f"constants=fails:{UNHEARD}", f"TensorRT builds no plan: {UNHEARD}"),
    ],
)
def test_where_a_build_with_fallback_fails_too_its_error_comes_first(
    inject: str, says: str, engine: Path, in_process: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv(INJECT, inject)
    problem = prepare(engine, tmp_path / "plans").problem or ""
    assert says in problem.partition("without GPU fallback: ")[0]
    assert "const0" in problem.partition("without GPU fallback: ")[2]


@pytest.mark.parametrize(("error", "says"), [(NO_SPACE, "not enough memory"), (UNHEARD, "")])
def test_a_build_with_fallback_that_crashes_is_not_explained_by_the_one_before(
    error: str, says: str, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv(INJECT, f"constants=crashes:{error}")
    problem = prepare(engine, tmp_path / "plans").problem or ""
    assert f"SIGSEGV) while it built the segment, after: {error}" in problem
    assert says in problem
    assert "const0" not in problem


def test_the_command_says_that_constants_were_folded_with_fallback(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from device.runtime.prepare.__main__ import main

    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv(INJECT, "constants=dla")
    monkeypatch.setattr(sys, "argv", ["prepare", str(engine), "--plans", str(tmp_path / "plans")])
    assert main() == 0
    assert "with GPU fallback, to fold constants; all its layers are" in capfd.readouterr().out


@pytest.mark.parametrize(("version", "flags"), [("10.7.0", "[]"), ("11.4.1", "['ADJUST_FOR_DLA']")])
def test_the_parser_adjusts_layers_for_the_dla_where_it_can(
    version: str, flags: str, engine: Path, in_process: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install(version, tmp_path, monkeypatch)
    assert prepare(engine, tmp_path / "plans").problem is None
    log = next((tmp_path / "plans").glob("*.log")).read_text()
    assert f"[I] parsed with {flags}" in log


# --- the end of the child, and the disk


@pytest.mark.parametrize(
    ("inject", "late"),
    [
        ("exit=segfault", "TensorRT crashed (SIGSEGV)"),
        ("exit=noise", ""),
        ("exit=hang", "longer than 6 s"),
        # Destructors do not run, since the process leaves without them.
        (
            "Builder.__del__=segfault;OnnxParser.__del__=segfault;IBuilderConfig.__del__=segfault",
            "",
        ),
    ],
)
def test_a_plan_that_is_whole_outlives_the_end_of_its_build(
    inject: str, late: str, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv(INJECT, inject)
    limits = Limits(6.0 if "hang" in inject else 60.0)
    row = prepare(engine, tmp_path / "plans", limits=limits)
    assert row.problem is None
    log = next((tmp_path / "plans").glob("*.log")).read_text()
    assert ("after the answer was complete: " in log) == bool(late)
    assert late in log
    runs_on_the_dla(engine, tmp_path / "plans", monkeypatch)


@pytest.mark.parametrize("how", ["null", "empty"])
def test_a_plan_without_bytes_is_none(
    how: str, engine: Path, in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv(INJECT, f"Builder.build_serialized_network={how}")
    row = prepare(engine, tmp_path / "plans")
    assert row.problem is not None
    assert row.problem.startswith("TensorRT builds no plan")
    assert not list((tmp_path / "plans").glob("*.plan"))


def test_a_plan_of_which_a_part_is_missing_is_built_again(
    engine: Path, in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    write = build_module._write

    def shortened(path: Path, data: memoryview) -> str:
        sha256 = write(path, data)
        path.write_bytes(path.read_bytes()[:-1])
        return sha256

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "_write", shortened)
        row = prepare(engine, tmp_path / "plans")
    assert row.problem is not None
    assert "the build's plan is not whole" in row.problem
    assert prepare(engine, tmp_path / "plans").problem is None


def test_a_full_disk_is_said_and_the_next_time_it_is_built(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv(INJECT, "disk=full")
    row = prepare(engine, tmp_path / "plans")
    assert row.problem is not None
    assert "is full; free some of it, and it is tried again" in row.problem
    monkeypatch.delenv(INJECT)
    row = prepare(engine, tmp_path / "plans")
    assert (row.problem, row.cached) == (None, False)


def test_a_disk_that_is_full_when_the_plan_is_kept_costs_this_segment_alone(
    engine: Path, in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "keep_plan", full)
        row = prepare(engine, tmp_path / "plans")
    assert row.problem is not None
    assert "is full" in row.problem
    assert prepare(engine, tmp_path / "plans").problem is None


def test_a_log_and_timings_that_cannot_be_written_cost_no_plan(
    engine: Path, in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv(INJECT, "ITimingCache.serialize=raise;IBuilderConfig.get_timing_cache=null")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build_module, "replacing", full)
    assert prepare(engine, tmp_path / "plans").problem is None
    runs_on_the_dla(engine, tmp_path / "plans", monkeypatch)


# --- any call


@pytest.mark.parametrize("how", ["raise", "null"])
@pytest.mark.parametrize("version", ["10.3.0", "11.4.1"])
def test_whatever_call_of_a_build_fails_is_a_sentence(
    version: str, how: str, engine: Path, in_process: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install(version, tmp_path, monkeypatch)
    monkeypatch.setenv(INJECT, "constants=dla;trace=")
    row = prepare(engine, tmp_path / "traced")
    assert row.problem is None
    from tensorrt.injected import CALLS

    calls = sorted(CALLS)
    assert len(calls) > 35
    rows: dict[str, Prepared] = {}
    for number, call in enumerate(calls):
        monkeypatch.setenv(INJECT, f"constants=dla;{call}={how}")
        rows[call] = prepare(engine, tmp_path / f"plans{number}")
    # What cannot be done without is a problem, in one line; the rest costs nothing.
    for call, row in rows.items():
        assert row.problem is None or (row.problem and "\n" not in row.problem), call
    if how == "raise":
        taken = {call for call, row in rows.items() if row.problem is None}
        assert taken == {"IBuilderConfig.get_timing_cache", "ITimingCache.serialize"}
    else:
        assert rows["Builder.__init__"].problem is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("libnvdla_compiler.so: cannot open shared object file", "install nvidia-l4t-dla-compiler"),
        ("libnvinfer.so.10: cannot open shared object file", "libnvinfer.so.10: cannot open"),
    ],
)
def test_a_library_that_is_missing_is_named_and_tried_again(
    text: str, says: str, engine: Path, in_process: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv(INJECT, f"import={text}")
    row = prepare(engine, tmp_path / "plans")
    assert row.problem is not None
    assert row.problem.startswith("TensorRT cannot be loaded: ")
    assert says in row.problem
    monkeypatch.delenv(INJECT)
    assert prepare(engine, tmp_path / "plans").problem is None


# --- what logs say

# The line as people posted it, where the sentence must say what.
LINES = [
    ("Cannot create DLA engine, 0 not available", "there is no DLA core 0 here"),
    (
        "WARNING: [TRT]: DLA supports only 8 subgraphs per DLA core. Switching to GPU for layer x",
        "holds 8 loadables already",
    ),
    (
        "[W] [TRT] Layer '/model.24/Constant_1_output_0' (CONSTANT): Unsupported on DLA. Switching "
        "this layer's device type to GPU.",
        "does not fold constant /model.24/Constant_1_output_0",
    ),
    (
        "[10/14/2024-23:52:59] [TRT] [W] Layer '/model.22/Reshape' (SHUFFLE): Unsupported on DLA. "
        "Switching this layer's device type to GPU.",
        "does not run layer /model.22/Reshape on the DLA",
    ),
    (
        "[W] [TRT] Layer '(Unnamed Layer* 277) [Shuffle]' (SHUFFLE): Unsupported on DLA.",
        "does not run layer (Unnamed Layer* 277) [Shuffle] on",
    ),
    (
        "[TRT] [W] /model.22/Div: DLA cores do not support DIV ElementWise operation.",
        "no DIV of two tensors, as layer /model.22/Div needs it",
    ),
    (
        "[TRT] [W] /model.10/m/m.0/attn/MatMul_1: MatMul is unsupported on DLA, relax constraints "
        "or use Convolution layer instead.",
        "layer /model.10/m/m.0/attn/MatMul_1 has two tensors",
    ),
    ("[W] [TRT] Unary operation: CEIL is not supported on DLA.", "has no CEIL of a tensor"),
    (
        "[TRT] [W] This version of DLA does not support reshape layers directly connected to Slice "
        "or Concat",
        "put another layer between them",
    ),
    (
        "[TRT] [W] /model.23/Tile_1: DLA does not support out-of-bounds slice operation. Set slice "
        "mode to SliceMode::kDEFAULT to allow the layer to be offloaded to DLA.",
        "reaches beyond its tensor",
    ),
    (
        "[TRT] [W] Input tensor has less than 4 dimensions for /model.23/Mod. At least one shuffle "
        "layer will be inserted which cannot run on DLA.",
        "an input of layer /model.23/Mod has fewer than 4 dimensions",
    ),
    (
        "[TRT] [W] DLA does not support dynamic shape tensor: /model.23/TopK_1_output_1",
        "tensor /model.23/TopK_1_output_1 is not fixed",
    ),
    (
        "[W] [TRT] DLA Layer split_1/Conv2D does not support dynamic shapes in any dimension.",
        "sizes of layer split_1/Conv2D are not fixed",
    ),
    (
        "[E] DLA requests all profiles have same min, max, and opt value.",
        "sizes are not fixed, as the DLA needs them",
    ),
    (
        "[W] [TRT] DLA LAYER: Batch size (combined volume except for CHW dimensions) 128 for layer "
        "EltWise multiplication in likelihood calculation exceeds max batch size allowed of 32.",
        "layer EltWise multiplication in likelihood calculation has a batch of 128",
    ),
    (
        "[W] [TRT] DLA only supports FP16 and Int8 precision type. Switching (Unnamed Layer* 275) "
        "[Gather] device type to GPU.",
        "layer (Unnamed Layer* 275) [Gather] computes in another type",
    ),
    (
        "[TRT] [W] /model.22/Slice_1: DLA only supports slicing 4 dimensional tensors.",
        "the DLA only supports slicing 4 dimensional tensors; keep it off",
    ),
    (
        "[TRT] [W] /model.23/Concat_6: DLA only supports concatenation on the C dimension.",
        "the DLA only supports concatenation on the C dimension; keep it off",
    ),
    (
        "WARNING: layer84-route: Concatenation on DLA requires at least two inputs.",
        "a Concat has one input",
    ),
    (
        "[TRT] [W] Validation failed for DLA layer: /model.10/m/m.0/attn/Reshape. Switching to GPU "
        "fallback.",
        "compiler refuses layer /model.10/m/m.0/attn/Reshape; keep",
    ),
    (
        "[E] [TRT] Default DLA is enabled but layer 283 copy is not supported on DLA and falling "
        "back to GPU is not enabled.",
        "does not run layer 283 copy on the DLA",
    ),
    (
        "[E] Error[9]: [standardEngineBuilder.cpp::isSupported::81] DLA Standalone is enabled but "
        "layer '/model.0/conv/_input_quantizer/Constant_1_output_0' is not supported on DLA.",
        "does not run layer /model.0/conv/_input_quantizer/Constant_1_output_0 on",
    ),
    (
        "4: [standardEngineBuilder.cpp::engineValidationForSafeDLAMode::1519] Error Code 4: "
        "Internal Error (Safe DLA is enabled but not all layers are running on DLA.)",
        "puts a layer of it on the GPU",
    ),
    (
        "[W] [TRT] setDefaultDeviceType was called but no layer in the network can run on DLA.",
        "runs none of its layers on the DLA",
    ),
    (
        "[E] Error[2]: [nvmRegionOptimizer.cpp::forceToUseNvmIO::175] Error Code 2: Internal Error "
        "(Assertion std::all_of(a->consumers.begin(), a->consumers.end(), [](Node* n) { return "
        "isDLA(n->backend); }) failed. )",
        "outside of the DLA, too",
    ),
    (
        "[E] Error[4]: [optimizer.cpp::checkIfDirectIOIsPossible::4316] Error Code 4: Internal "
        "Error (BuilderFlag::kDIRECT_IO specified but no conformant implementation exists)",
        "without changing the format of an input or output",
    ),
    (
        "[E] Error[2]: [foreignNode.cpp::determineCandidateForeignNodes::895] Error Code 2: "
        "Internal Error (Safety certified DLA should only have one graph for the whole network.)",
        "splits it into several loadables",
    ),
    (
        "[E] Error[2]: [nvmediaTensorCache.cpp::registerTensor::80] Error Code 2: Internal Error "
        "(Assertion nbTensors <= capacity() failed. Found a case where the cache is too small.)",
        "more tensors at the DLA's border than it has room for",
    ),
    (
        "[E] [TRT] ../builder/cudnnBuilder2.cpp (1757) - Assertion Error in operator(): 0 "
        "(et.region->getType() == RegionType::kNVM)",
        "does not lie in the DLA's memory",
    ),
    (
        "[E] Error Code 10: Internal Error (Could not find any implementation for node "
        "{ForeignNode[/cnn/cnn.0/Conv]}.)",
        "no implementation of {ForeignNode[/cnn/cnn.0/Conv]} within",
    ),
    (
        "ERROR: [Torch-TensorRT] - 1: [nvdlaUtils.cpp::submit::198] Error Code 1: DLA (Failure to "
        "submit program to DLA engine.)",
        "reboot the board",
    ),
    (
        "NVMEDIA_DLA :  446, ERROR: SetInputTensorDesc failed for tensor: 7. status: 0x0.",
        "does not take a tensor at the border",
    ),
    (
        "[E] [TRT] dla/dlaUtils.cpp (171) - DLA Error in deserialize: 7 (Failure to load program.)",
        "which another version's compiler has built",
    ),
    (
        "[TRT]    Skipping tactic 0x0000000000000003 due to exception Assertion context.dlaContext "
        "!= nullptr failed.",
        "gets no place on the DLA core",
    ),
    ("Calibration table does not match calibrator algorithm type.", "of another algorithm"),
    (
        "[W] Missing scale and zero-point for tensor conv1, expect fall back to non-int8 "
        "implementation for any layer consuming or producing given tensor",
        "tensor conv1 has no range",
    ),
    (
        "ERROR: [TRT]: 2: [weightConvertors.cpp::quantizeBiasCommon::337] Error Code 2: Internal "
        "Error (Assertion getter(i) != 0 failed. )",
        "a tensor in INT8 has the range 0",
    ),
    ("[E] NvMapMemAllocInternalTagged: 1075072515 error 12", "not enough memory to build"),
    (
        "libnvdla_compiler.so: cannot open shared object file: No such file or directory",
        "install nvidia-l4t-dla-compiler",
    ),
    (
        "[E] Serialization assertion plan->header.magicTag == rt::kPLAN_MAGIC_TAG failed.",
        "the plan is of another TensorRT",
    ),
    ("pybind11::init(): factory function returned nullptr", "run `tandem doctor`"),
]


@pytest.mark.parametrize(("line", "text"), LINES)
def test_a_line_that_people_posted_is_a_sentence_and_a_fix(line: str, text: str) -> None:
    sentence = explain(["something else", line, "the end"])
    assert sentence is not None
    assert text in sentence
    assert ".;" not in sentence


def test_every_known_line_was_posted_and_is_that_of_one_row() -> None:
    rows = {next(row for row in MESSAGES if re.search(row.pattern, line)) for line, _ in LINES}
    assert rows == set(MESSAGES)
    assert all(row.source for row in MESSAGES)


MISSING = "[W] Missing scale and zero-point for tensor conv1, expect fall back"
NO_PLACE = "[E] Error Code 1: DLA (Failure to submit program to DLA engine.)"
NO_MEMORY = "[E] NvMapMemAllocInternalTagged: 1075072515 error 12"
UNKNOWN = "[E] Error[2]: [foo.cpp::bar::1] Error Code 2: Internal Error (Assertion x failed. )"
END = "[E] Error[2]: [builder.cpp] Internal Error (Assertion engine != nullptr failed. )"


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ([MISSING, NO_PLACE, END], "reboot the board"),
        ([NO_PLACE, MISSING, END], "reboot the board"),
        ([NO_PLACE, NO_MEMORY, END], "not enough memory"),  # the last one
        ([MISSING, END], "tensor conv1 has no range"),  # nothing but the end is an error
        ([MISSING, UNKNOWN, END], None),  # a warning does not explain another error
        ([f"[I] {NO_MEMORY[4:]}"], None),
        ([END], None),
        ([], None),
    ],
)
def test_errors_count_before_warnings_and_the_last_before_the_first(
    log: list[str], says: str | None
) -> None:
    sentence = explain(log)
    assert (sentence is None) if says is None else (says in (sentence or ""))


def test_an_error_that_nobody_knows_is_said_as_it_is() -> None:
    assert last_error([MISSING, UNKNOWN, END]) == UNKNOWN.removeprefix("[E] ")
    assert last_error([END]) == END.removeprefix("[E] ")
    assert last_error([MISSING]) == ""


def test_records_say_that_a_plan_was_built_with_fallback(
    engine: Path, in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("10.3.0", tmp_path, monkeypatch)
    monkeypatch.setenv(INJECT, "constants=dla")
    prepare(engine, tmp_path / "plans")
    (record,) = (tmp_path / "plans").glob("*.json")
    assert json.loads(record.read_text())["fallback"] is True


def test_no_convolution_before_a_silu_leaves_int8_for_want_of_a_range(
    in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    weights = {f"w{n}": rng.normal(size=(8, 8, 3, 3)).astype(np.float32) * 0.2 for n in (0, 1)}
    nodes = []
    for n, source in enumerate(("x", "m0")):
        nodes += [
            helper.make_node("Conv", [source, f"w{n}"], [f"c{n}"], name=f"conv{n}", pads=[1] * 4),
            helper.make_node("Sigmoid", [f"c{n}"], [f"s{n}"], name=f"sigmoid{n}"),
            helper.make_node("Mul", [f"c{n}", f"s{n}"], [f"m{n}"], name=f"mul{n}"),
        ]
    shape = (1, 8, 16, 16)
    model = save(tmp_path / "m.onnx", nodes, {"x": shape}, {"m1": shape}, weights)
    options = BuildOptions(
        data=[{"x": rng.normal(size=shape).astype(np.float32)} for _ in range(4)],
        kernels=False, accept_loss=True, plan=PlanOptions(forced=Forced(dla=("all",))),
    )  # fmt: skip
    build_engine(model, "orin-nx-16gb", tmp_path / "m.engine", options)
    install("10.3.0", tmp_path, monkeypatch)
    assert prepare(tmp_path / "m.engine", tmp_path / "plans").problem is None
    log = next((tmp_path / "plans").glob("*.log")).read_text()
    missing = re.findall("Missing scale and zero-point for tensor (\\w+)", log)
    assert not {"c0", "c1"} & set(missing)
