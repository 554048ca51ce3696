"""Decoders: outputs of a network -> results, one file for each family.

`table.py` is the table of kinds. `expected.py` describes outputs as data, `candidates.py` has what
families share. Ultralytics: `ultralytics.py`; rows: `rows.py`; other YOLO: `yolo.py`, `grid.py`;
boxes beside scores: `boxes_scores.py`; after suppression: `finished.py`; transformers: `detr.py`;
NVIDIA: `detectnet.py`; `centernet.py`; `faces.py`; `poses.py`; `maps.py`; `text.py`; `classes.py`.
"""
