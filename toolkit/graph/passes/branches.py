"""Makes subgraphs (branches of If, bodies of Loop and Scan) compute their own outputs.

ONNX lets a branch read the values around it, but not return one directly; an Identity makes it the
branch's own. Graphs are cloned and run only in this form.
"""

import onnx_ir as ir


def own_branch_outputs(model: ir.Model) -> None:
    """Insert an Identity before each branch output that the branch does not compute."""
    for graph in model.graph.subgraphs():
        computed = {*graph.inputs, *graph.initializers.values()}
        computed |= {value for node in graph for value in node.outputs}
        for index, value in enumerate(graph.outputs):
            if value in computed:
                continue
            name = f"{value.name}_{graph.name}_{index}"
            out = ir.Value(name=name, type=value.type, shape=value.shape)
            graph.append(ir.Node("", "Identity", [value], outputs=[out], name=f"Identity_{name}"))
            graph.outputs[index] = out
