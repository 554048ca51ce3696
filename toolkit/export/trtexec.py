"""A network and a release of TensorRT -> trtexec's arguments, or why there are none."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from device.engine.manifest import Dim, DimRange
from toolkit.dla.rules.rule import version_text
from toolkit.errors import BuildError
from toolkit.export.joined_network import Network
from toolkit.export.releases import Release
from toolkit.partition.planning.trtexec_flags import FLAGS, has_flag

MAX_ARGUMENT_BYTES = 131_071
"""Linux refuses longer ones (MAX_ARG_STRLEN)."""

DLA_POOLS = "dlaSRAM:1,dlaLocalDRAM:1024,dlaGlobalDRAM:512"
"""MiB: the header's defaults. TensorRT 8.5 took half the SRAM unless it was told so."""

_HWC4_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one release builds the export. `problem`: why it cannot; then there are no arguments.

    `notes`: what the arguments cannot say.
    """

    release: Release
    arguments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""

    @property
    def script(self) -> str:
        """A shell script that builds from the files beside it."""
        lines = " \\\n    ".join(shlex.quote(argument) for argument in self.arguments)
        return f'#!/bin/sh\nset -e\ncd "$(dirname "$0")"\ntrtexec \\\n    {lines} "$@"\n'


def recipe(
    network: Network, release: Release, *, dla_core: int | None, model: str, cache: str
) -> Recipe:
    """Return the arguments of a release's trtexec for the files `model` and `cache`.

    `dla_core`: the core that the DLA's nodes run on, None where no node does.
    """
    problem = _problem(network, release, dla_core)
    if problem:
        return Recipe(release, problem=problem)
    engine = f"model-{release.version}.plan"
    arguments = [f"--onnx={model}", f"--saveEngine={engine}", _no_run(release)]
    arguments += _shapes(network)
    if release.era == "implicit":
        arguments += _precision(network, cache)
    elif has_flag(release.number, "--stronglyTyped"):
        arguments.append("--stronglyTyped")
    if dla_core is not None:
        arguments += _dla(network, dla_core, release)
    for argument in arguments:
        flag = argument.partition("=")[0]
        if not has_flag(release.number, flag):
            return Recipe(release, problem=f"its trtexec has no {flag} ({_known(flag)})")
        if len(argument.encode()) > MAX_ARGUMENT_BYTES:
            return Recipe(
                release,
                problem=f"{flag} would take {len(argument.encode())} bytes, and Linux passes at "
                f"most {MAX_ARGUMENT_BYTES} in one argument",
            )
    return Recipe(release, tuple(arguments), _notes(network, release, dla_core))


def nameable(model: ir.Model) -> ir.Model:
    """Return a copy whose node names trtexec can be told: none has a comma, colon, star or blank.

    Raises BuildError: a node has no name.
    """
    copy = model.clone()
    taken = {str(node.name) for node in copy.graph}
    for node in copy.graph:
        if not node.name:
            raise BuildError(f"A node {node.op_type} has no name; build the engine again.")
        plain = "".join("_" if letter in ",:*+ \t" else letter for letter in node.name)
        if plain != node.name:
            while plain in taken:
                plain += "_"
            taken.add(plain)
            node.name = plain
    return copy


def _problem(network: Network, release: Release, dla_core: int | None) -> str:
    opset = network.model.graph.opset_imports.get("", 0)
    if opset > release.max_opset:
        return (
            f"the model has opset {opset}, and its ONNX parser reads up to {release.max_opset}; "
            "export the model again with an older opset"
        )
    if dla_core is not None and not release.has_dla:
        return (
            "the plan uses the DLA, and this TensorRT has none on Jetson; build the engine again "
            f"with `tandem build --jetpack {release.jetpack.split()[0]}`, or without the DLA"
        )
    return ""


def _known(flag: str) -> str:
    first, end = FLAGS[flag]
    text = f"it came with {version_text(first)}"
    return text if end is None else f"{text} and went with {version_text(end)}"


def _no_run(release: Release) -> str:
    return "--skipInference" if has_flag(release.number, "--skipInference") else "--buildOnly"


def _shapes(network: Network) -> list[str]:
    """The range of each dynamic input. An axis that is open without a range cannot be here."""
    ranges = {dim.name: dim for dim in network.dims}
    inputs = [
        value for value in network.model.graph.inputs
        if value.shape is not None and not value.shape.is_static()
    ]  # fmt: skip
    if not inputs:
        return []
    return [
        f"--{kind}Shapes=" + ",".join(_shape(value, ranges, kind) for value in inputs)
        for kind in ("min", "opt", "max")
    ]


def _shape(value: ir.Value, ranges: Mapping[str, DimRange], kind: str) -> str:
    assert value.shape is not None
    dims: Iterable[Dim] = (d if isinstance(d, int) else str(d.value) for d in value.shape)
    sizes = [str(d) if isinstance(d, int) else str(getattr(ranges[str(d)], kind)) for d in dims]
    name = str(value.name)
    return f"{repr(name) if ':' in name else name}:{'x'.join(sizes)}"


def _precision(network: Network, cache: str) -> list[str]:
    if network.precision == "fp32":
        return []
    if network.precision == "fp16":
        return ["--fp16"]
    arguments = ["--int8", "--fp16", f"--calib={cache}"]
    if network.float_nodes:
        layers = ",".join(f"{name}:fp16" for name in network.float_nodes)
        arguments += ["--precisionConstraints=obey", f"--layerPrecisions={layers}"]
    return arguments


def _dla(network: Network, core: int, release: Release) -> list[str]:
    arguments = [f"--useDLACore={core}", f"--memPoolSize={DLA_POOLS}"]
    on_gpu = _on(network, gpu=True)
    if on_gpu:
        arguments.append("--allowGPUFallback")
        if has_flag(release.number, "--layerDeviceTypes"):
            layers = ",".join(f"{name}:GPU" for name in on_gpu)
            arguments.append(f"--layerDeviceTypes={layers}")
        return arguments
    graph, typed = network.model.graph, release.era == "explicit"
    formats = ["fp16:chw16" if typed else _input_format(network, value) for value in graph.inputs]
    arguments.append("--inputIOFormats=" + ",".join(formats))
    arguments.append("--outputIOFormats=" + ",".join("fp16:chw16" for _ in graph.outputs))
    return arguments


def _input_format(network: Network, value: ir.Value) -> str:
    """A format that both the first layer and the DLA take, so that the GPU reformats nothing."""
    dtype = "int8" if str(value.name) in network.amax else "fp16"
    channels = value.shape[1] if value.shape is not None and len(value.shape) == 4 else None
    convolves = all(node.op_type == "Conv" for node in value.consumers())
    if convolves and channels in _HWC4_CHANNELS:
        return f"{dtype}:dla_hwc4"
    return f"{dtype}:{'chw32' if dtype == 'int8' else 'chw16'}"


def _on(network: Network, *, gpu: bool) -> Sequence[str]:
    """The nodes of the plan on a GPU, or on a DLA. A Cast or Q/DQ that was added is on neither."""
    return [
        str(node.name)
        for node in network.model.graph
        if (place := network.processors.get(str(node.name))) is not None
        and place.startswith("dla") is not gpu
    ]


def _notes(network: Network, release: Release, dla_core: int | None) -> tuple[str, ...]:
    cores = {place for place in network.processors.values() if place.startswith("dla")}
    notes = []
    on_gpu, flag = _on(network, gpu=True), "--layerDeviceTypes"
    if dla_core is not None and on_gpu and not has_flag(release.number, flag):
        notes.append(
            f"its trtexec places no single layers ({flag}: {_known(flag)}): the DLA also takes "
            f"what it can of the {len(on_gpu)} nodes that the plan has on the GPU"
        )
    if len(cores) > 1:
        notes.append(
            f"the plan uses {' and '.join(sorted(cores))}, and one TensorRT engine one core: all "
            f"of it is built for core {dla_core}"
        )
    if any(place == "cpu" for place in network.processors.values()):
        notes.append("nodes that Tandem runs on the CPU are left to TensorRT's GPU")
    return tuple(notes)
