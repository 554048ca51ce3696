"""Nodes of plugins -> calls of their kernels, on tensors in the order of their indices."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from toolkit.errors import PluginError, first_line
from toolkit.gpu.codegen.cuda_source import HOW_TO_GET, find_compiler
from toolkit.gpu.emit.context import LoweringContext
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
    """Return who adds the work of each plugin's operator."""
    return {plugin.title: partial(emit_plugin, plugin) for plugin in plugins}


def emit_plugin(plugin: Plugin, ctx: LoweringContext, group: Group) -> None:
    """Add the launches of one node.

    Raises NotCoveredError: the plugin says so; PluginError: it fails or asks for what is not there.
    """
    op = group.root_operation
    views = {name: _operand(plugin, ctx, name) for name in op.inputs if name}
    finals = {name: ctx.make(name) for name in op.outputs}
    made = {name: _result(plugin, ctx, view) for name, view in finals.items()}
    node = Node(
        op.name,
        tuple(_tensor(name, views[name]) if name else None for name in op.inputs),
        tuple(_tensor(name, made[name]) for name in op.outputs),
        complete_attributes(plugin, op.name, op.attributes),
    )
    calls = tuple(
        _call(plugin, ctx, one, views | made, tuple(made.values()))
        for one in _launches(plugin, node)
    )
    ctx.add(group.nodes, calls)
    for name, final in finals.items():
        if made[name] != final:
            ctx.elementwise(final, [made[name]], (), ())


def _operand(plugin: Plugin, ctx: LoweringContext, name: str) -> View:
    """Return an operand without gaps, floating point in a type that the plugin takes."""
    if name in ctx.network.constants:
        values = ctx.network.constants[name]
        dtype = values.dtype.name
        return ctx.constant(values, _float(plugin, ctx) if is_float(dtype) else dtype)
    view = ctx.rows(name)
    wanted = _float(plugin, ctx) if is_float(view.dtype) else view.dtype
    return view if view.dtype == wanted else ctx.copy(view, row_major(view.shape), wanted)


def _result(plugin: Plugin, ctx: LoweringContext, final: View) -> View:
    """Return where the plugin writes a result: its place, or memory that is copied there."""
    takes = not is_float(final.dtype) or final.dtype in plugin.floats
    if takes and final.scale is None and final.is_row_major():
        return final
    real = is_float(final.dtype) or final.scale is not None
    dtype = _float(plugin, ctx) if real else final.dtype
    return ctx.allocate(final.base, dtype, final.shape, row_major(final.shape))


def _float(plugin: Plugin, ctx: LoweringContext) -> str:
    return ctx.dtype if ctx.dtype in plugin.floats else plugin.floats[0]


def _tensor(name: str, view: View) -> Tensor:
    return Tensor(name, view.dtype, view.shape)


def _launches(plugin: Plugin, node: Node) -> tuple[Launch, ...]:
    try:
        found = tuple(plugin.launches(node))
    except NotCoveredError:
        raise
    except Exception as error:
        raise PluginError(
            f"{plugin.title}: its launches fail on node {node.name!r}: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    if not found or not all(isinstance(one, Launch) for one in found):
        raise PluginError(
            f"{plugin.title}: its launches for node {node.name!r} are {found!r}; return at least "
            "one toolkit.plugins.Launch"
        )
    return found


def _call(
    plugin: Plugin,
    ctx: LoweringContext,
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
    call = ctx.make_launch(
        launch.kernel.function,
        launch.grid,
        arguments,
        launch.constants,
        writes=writes,
        warps=launch.warps,
        stages=launch.stages,
    )
    return replace(call, spec=replace(call.spec, source=_source(plugin, launch.kernel)))


def _source(plugin: Plugin, kernel: Kernel) -> KernelSource:
    if kernel.file.suffix not in _SOURCES:
        raise PluginError(
            f"{plugin.title}: its kernel file {kernel.file} must end in .py (Triton) or .cu (CUDA "
            "C++)"
        )
    if kernel.file.suffix == ".cu" and find_compiler() is None:
        raise NotCoveredError(
            f"{plugin.title} is written in CUDA C++, and this host has neither nvcc nor NVRTC: "
            f"{HOW_TO_GET}"
        )
    try:
        digest = hashlib.sha256(kernel.file.read_bytes()).hexdigest()
    except OSError as error:
        raise PluginError(
            f"{plugin.title}: its kernel file {kernel.file} cannot be read: {error.strerror}"
        ) from error
    return KernelSource(plugin.title, str(kernel.file.resolve()), digest)
