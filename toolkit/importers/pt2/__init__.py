"""What a .pt2 may hold: `archive.py` looks at its parts, `program.py` and `text.py` at the JSON.

`torch.export.load` and the export to ONNX evaluate text of the program. In PyTorch 2.13:

* `expr_str` goes to `sympy.sympify`, which is `eval`;
* `target`, `as_operator` and `source_fn_stack` are looked up by `getattr`; operators are called;
* `guards_code`, and strings that are inputs, become source code that `exec` runs;
* names of nodes, inputs, graphs and parameters become source code of `forward`;
* `in_spec` and `out_spec` import modules by name (enumerations, `defaultdict`);
* keys of `range_constraints` are counted up to.

So Tandem reads the program first and lets nothing pass that is not in its tables.
"""
