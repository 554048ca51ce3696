"""Which decoder and preprocessing a model wants, from its graph and metadata.

`facts.py` reads what can be known, `rules.py` is the table (first match wins) over the families of
`ultralytics.py`, `by_names.py` and `by_shapes.py`, `names.py` reads class names, `proposal.py`
makes the answer, and `toml_text.py` its settings as text.
"""
