"""Damaged models for `scripts/fuzz_models.py`.

`mutant.py` changes a model of `bases.py` by the rows of its table; the changes are in `nodes.py`,
`attributes.py`, `types.py`, `constants.py` and `borders.py`, what they put there in `values.py`.
"""
