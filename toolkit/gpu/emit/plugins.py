"""Lower nodes of plugins to their kernels, on row-major tensors."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from toolkit.errors import PluginError, first_line
from toolkit.gpu.codegen.cuda_source import INSTALL_HINT, find_compiler
from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.dtypes import is_float
from toolkit.gpu.ir.launch import KernelLaunch, KernelSource
from toolkit.gpu.ir.view import View, row_major
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import Size
from toolkit.plugins import Kernel, Launch, Node, Plugin, Tensor
from toolkit.plugins.functions import complete_attributes

_SOURCES = (".py", ".cu")


def plugin_emitters(
    plugins: Sequence[Plugin],
) -> Mapping[str, Callable[[LoweringContext, Group], None]]:
    """Return the emitter of each plugin's operator."""
    return {plugin.title: partial(emit_plugin, plugin) for plugin in plugins}


def emit_plugin(plugin: Plugin, ctx: LoweringContext, group: Group) -> None:
    """Lower one node.

    Raises NotCoveredError: the plugin does; PluginError: it fails or returns an invalid launch.
    """
    op = group.root_operation
    views = {name: _operand(plugin, ctx, name) for name in op.inputs if name}
    outputs = {name: ctx.output_view(name) for name in op.outputs}
    written = {name: _result(plugin, ctx, view) for name, view in outputs.items()}
    node = Node(
        op.name,
        tuple(_tensor(name, views[name]) if name else None for name in op.inputs),
        tuple(_tensor(name, written[name]) for name in op.outputs),
        complete_attributes(plugin, op.name, op.attributes),
    )
    launches = tuple(
        _kernel_launch(plugin, launch, views | written, tuple(written.values()))
        for launch in _launches(plugin, node)
    )
    ctx.add_op(group.nodes, launches)
    for name, output in outputs.items():
        if written[name] != output:
            ctx.add_elementwise(output, [written[name]])


def _operand(plugin: Plugin, ctx: LoweringContext, name: str) -> View:
    """Return an operand, row-major, floats in a type that the plugin takes."""
    if name in ctx.network.constants:
        values = ctx.network.constants[name]
        dtype = values.dtype.name
        return ctx.weights.pack(values, _float_dtype(plugin, ctx) if is_float(dtype) else dtype)
    view = ctx.read(name, "float or integer", "row-major")
    dtype = _float_dtype(plugin, ctx) if is_float(view.dtype) else view.dtype
    return view if view.dtype == dtype else ctx.copy_view(view, row_major(view.shape), dtype)


def _result(plugin: Plugin, ctx: LoweringContext, output: View) -> View:
    """Return the view that the plugin writes: the output, or a buffer that is copied to it."""
    supported = not is_float(output.dtype) or output.dtype in plugin.floats
    if supported and output.scale is None and output.is_row_major():
        return output
    real = is_float(output.dtype) or output.scale is not None
    dtype = _float_dtype(plugin, ctx) if real else output.dtype
    return ctx.allocate(output.base, dtype, output.shape, row_major(output.shape))


def _float_dtype(plugin: Plugin, ctx: LoweringContext) -> str:
    choices = (ctx.dtype, "float32", *plugin.floats)  # FP32 holds BF16, FP16 does not
    return next(dtype for dtype in choices if dtype in plugin.floats)


def _tensor(name: str, view: View) -> Tensor:
    return Tensor(name, view.dtype, view.shape)


def _launches(plugin: Plugin, node: Node) -> tuple[Launch, ...]:
    try:
        launches = tuple(plugin.launches(node))
    except NotCoveredError:
        raise
    except Exception as error:
        raise PluginError(
            f"{plugin.title}: its launches fail on node {node.name!r}: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    if not launches or not all(isinstance(launch, Launch) for launch in launches):
        raise PluginError(
            f"{plugin.title}: its launches for node {node.name!r} are {launches!r}; return at "
            "least one toolkit.plugins.Launch"
        )
    return launches


def _kernel_launch(
    plugin: Plugin,
    launch: Launch,
    views: Mapping[str, View],
    writes: Sequence[View],
) -> KernelLaunch:
    arguments: dict[str, View | int | None] = {}
    for name, value in launch.arguments.items():
        if isinstance(value, Tensor) and value.name in views:
            arguments[name] = views[value.name]
        elif isinstance(value, int):
            arguments[name] = value
        else:
            raise PluginError(
                f"{plugin.title}: the argument {name!r} of kernel {launch.kernel.function} is "
                f"{value!r}; give a tensor of the node, or an integer"
            )
    dynamic = [name for name, value in launch.constants.items() if isinstance(value, Size)]
    if dynamic:
        raise NotCoveredError(
            f"{plugin.title}: the constant {dynamic[0]!r} of kernel {launch.kernel.function} "
            "follows a dynamic dimension; give it to the kernel as an argument"
        )
    kernel_launch = make_launch(
        launch.kernel.function,
        launch.grid,
        arguments,
        launch.constants,
        writes=writes,
        warps=launch.warps,
        stages=launch.stages,
    )
    spec = replace(kernel_launch.spec, source=_source(plugin, launch.kernel))
    return replace(kernel_launch, spec=spec)


def _source(plugin: Plugin, kernel: Kernel) -> KernelSource:
    if kernel.file.suffix not in _SOURCES:
        raise PluginError(
            f"{plugin.title}: its kernel file {kernel.file} must end in .py (Triton) or .cu (CUDA "
            "C++)"
        )
    if kernel.file.suffix == ".cu" and find_compiler() is None:
        raise NotCoveredError(
            f"{plugin.title} is written in CUDA C++, and this host has neither nvcc nor NVRTC: "
            f"{INSTALL_HINT}"
        )
    try:
        digest = hashlib.sha256(kernel.file.read_bytes()).hexdigest()
    except OSError as error:
        raise PluginError(
            f"{plugin.title}: its kernel file {kernel.file} cannot be read: {error.strerror}"
        ) from error
    return KernelSource(plugin.title, str(kernel.file.resolve()), digest)
