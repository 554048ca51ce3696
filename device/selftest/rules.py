"""The step `rules`: a node at the limit of a DLA rule or one beyond, before this TensorRT.

First `can_run_on_DLA` is asked of each layer but constants, then a loadable is built of the whole,
as `device.runtime.prepare.build_dla` builds segments. All tensors have one range, so that no rule
on equal ranges stands in the way. A case with inputs or outputs of fewer than three dimensions,
such as those of Gemm, is not built: no format of the DLA takes them at a border
(NvInferRuntimeBase.h, TensorFormat), which says nothing of the rule.
"""

from pathlib import Path
from typing import Any

from msgspec import structs

from device.board_files import tensorrt_version
from device.errors import SessionError
from device.runtime.prepare.build_dla import configure, serialize
from device.runtime.prepare.builder_calls import (
    RefusedError,
    Tools,
    computing_layers,
    make_logger,
    parse,
)
from device.runtime.tensorrt.messages import explain, last_error, text_of
from device.runtime.tensorrt.releases import Release, find_release
from device.selftest.kit import Kit, KitError, unpack
from device.selftest.report import RuleRow
from device.selftest.steps import rule_row

NODE = "node"
"""What the node of a case is called; layers of TensorRT have its name in theirs."""

_AMAX = 4.0
_MIN_RANK = 3


def run(kit: Kit, kit_folder: Path, folder: Path, item: str) -> RuleRow:
    """Ask TensorRT of one case. Raises SessionError: it is not here, or knows no DLA."""
    case = next(row for row in kit.rules if row.name == item)
    version = tensorrt_version()
    if not version:
        raise SessionError("TensorRT is not installed; install JetPack's python3-libnvinfer")
    release = find_release(version)
    if release.form is None:
        raise SessionError(f"TensorRT {version} has no DLA here: {release.why}")
    typed = release.form == "typed"
    precision = "fp16" if typed else case.precision
    if typed and not case.half:
        raise KitError(f"the kit has no case of {case.rule} for typed networks")
    name = f"cases/{case.name}.half.onnx" if typed else f"cases/{case.name}.onnx"
    unpack(kit_folder, (name,), folder)
    supported, built, reason = _ask(release, folder / name, int8=precision == "int8")
    row = rule_row(kit, item)
    return structs.replace(row, precision=precision, can_run=supported, built=built, message=reason)


def _ask(release: Release, model: Path, *, int8: bool) -> tuple[bool | None, bool | None, str]:
    """Return what can_run_on_DLA says, whether a loadable is built (None: it was not tried), and
    the reason if not."""
    import tensorrt as trt

    lines: list[str] = []
    logger = make_logger(trt, lines.append)
    tools = Tools(trt, logger, trt.Builder(logger), lines)
    if tools.builder.num_DLA_cores < 1:
        raise SessionError("TensorRT finds no DLA core on this board")
    config = configure(tools, release, int8=int8)
    try:
        network = parse(
            tools,
            release.network_flags,
            str(model),
            parser_flags=release.parser_flags,
            config=config,
        )
    except RefusedError as error:
        return None, False, str(error)
    ranged = release.form == "ranged"
    _set_types(trt, network, int8=int8, ranged=ranged)
    layers = computing_layers(trt, network)
    named = [layer for layer in layers if NODE in str(layer.name)] or layers
    supported = all(config.can_run_on_DLA(layer) for layer in named)
    flat = next((port for port in _ports(network) if len(port.shape) < _MIN_RANK), None)
    if flat is not None:
        rank = len(flat.shape)
        reason = f"{flat.name} has {rank} dimensions, a DLA's formats {_MIN_RANK} or more"
        return supported, None, f"not built: {reason}"
    try:
        plan, _, elsewhere = serialize(tools, network, config)
    except RefusedError as error:
        return supported, False, str(error)
    if plan is not None:
        return supported, True, ""
    known = explain(lines) or last_error(lines)
    where = f"with GPU fallback {elsewhere[0]!r} runs elsewhere" if elsewhere else ""
    return supported, False, known or where or (text_of(lines[-1]) if lines else "it says nothing")


def _ports(network: Any) -> list[Any]:  # noqa: ANN401
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    return [*inputs, *(network.get_output(index) for index in range(network.num_outputs))]


def _set_types(trt: Any, network: Any, *, int8: bool, ranged: bool) -> None:  # noqa: ANN401
    """Give inputs and outputs a type and a format of the DLA; with ranges, every tensor one."""
    for port in _ports(network):
        if ranged and port.dtype in (trt.DataType.FLOAT, trt.DataType.HALF):
            port.dtype = trt.DataType.INT8 if int8 else trt.DataType.HALF
        name = "CHW32" if port.dtype == trt.DataType.INT8 else "CHW16"
        port.allowed_formats = 1 << int(getattr(trt.TensorFormat, name))
    if not (ranged and int8):
        return
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        tensors += [layer.get_output(output) for output in range(layer.num_outputs)]
    for tensor in tensors:
        tensor.set_dynamic_range(-_AMAX, _AMAX)
