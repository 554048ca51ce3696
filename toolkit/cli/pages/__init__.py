"""The HTML pages of build, inspect, bench and compare, made of the pieces in `toolkit.html`.

`engine_nodes.py` reads the nodes of an engine file with edges, shapes and work; `engine_card.py`
is the report card of one engine, `two_engines.py` of two, `bench_page.py` of a measurement,
`compare_page.py` of outputs side by side, `model_page.py` of an ONNX model.
"""
