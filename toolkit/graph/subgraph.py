"""Cuts a part out of a model by the names of tensors, as a model of its own."""

import difflib
from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir
from onnx_ir import convenience

from toolkit.errors import SurgeonError
from toolkit.graph.extract import values_read
from toolkit.graph.passes.shapes import infer_shapes


def with_shapes(model: ir.Model) -> ir.Model:
    """Return a copy of a model with the shapes and types that ONNX infers."""
    inferred = model.clone()
    infer_shapes(inferred)
    return inferred


def cut_model(
    model: ir.Model, inputs: Sequence[str] | None, outputs: Sequence[str] | None
) -> ir.Model:
    """Return the part of a model that computes `outputs` from `inputs`, as a model of its own.

    `inputs` None: those inputs of the model that the part reads; `outputs` None: those of the
    model. Initializers that the part reads are kept, and so are opsets, metadata and the functions
    that it calls. The tensors at the border get the shapes that `model` has for them
    (`with_shapes` infers them).

    Raises SurgeonError: there is no such tensor, the part needs an input that is not among
    `inputs`, or reads none.
    """
    graph = model.graph
    values = convenience.create_value_mapping(graph, include_subgraphs=False)
    last = [_value(values, name) for name in outputs] if outputs else list(graph.outputs)
    first = [_value(values, name) for name in inputs or ()]
    needed = _graph_inputs(last, stop=first)
    missing = [str(v.name) for v in needed if v not in first]
    if inputs is None:
        first = [value for value in graph.inputs if value in needed]
    elif missing:
        raise SurgeonError(
            f"to compute {_list(v.name for v in last)} from {_list(inputs)} the model also needs "
            f"its input{'s' if len(missing) > 1 else ''} {_list(missing)}; add {_list(missing)} to "
            "the inputs (`tandem surgeon --inputs`), or name tensors that come after."
        )
    part = convenience.extract(graph, first, last)
    for name in [n for n in part.initializers if n in {str(v.name) for v in first}]:
        part.initializers.pop(name)  # cut at a constant: it is fed now
    result = ir.Model(
        part,
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        domain=model.domain,
        model_version=model.model_version,
        functions=_called(part, model),
    )
    result.metadata_props.update(model.metadata_props)
    return result


def _called(graph: ir.Graph, model: ir.Model) -> list[ir.Function]:
    """Return the functions that a graph calls, directly or through others."""
    called: dict[ir.OperatorIdentifier, ir.Function] = {}
    nodes = list(graph.all_nodes())
    while nodes:
        key = nodes.pop().op_identifier()
        if key in model.functions and key not in called:
            called[key] = model.functions[key]
            nodes += list(model.functions[key].all_nodes())
    return list(called.values())


def _graph_inputs(outputs: Iterable[ir.Value], stop: Collection[ir.Value]) -> list[ir.Value]:
    """Return the graph inputs without a value of their own that outputs depend on."""
    seen: set[ir.Value] = set(stop)
    stack = [value for value in outputs if value not in seen]
    inputs: list[ir.Value] = []
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = value.producer()
        if producer is not None:
            stack += values_read(producer)
        elif value.is_graph_input() and not value.is_initializer():
            inputs.append(value)
    return inputs


def _value(values: dict[str, ir.Value], name: str) -> ir.Value:
    if name in values:
        return values[name]
    similar = difflib.get_close_matches(name, values, n=3, cutoff=0.5)
    known = similar or list(values)[:5]
    raise SurgeonError(
        f"the model has no tensor {name!r}; {'the nearest names are' if similar else 'it has'} "
        f"{_list(known)}{'' if similar else ', ...' if len(values) > 5 else ''}"
    )


def _list(names: Iterable[str | None]) -> str:
    return ", ".join(map(repr, names))
