"""Do A and B agree? `figures.py` measures, `tolerance.py` judges, `sides.py` runs each of a model,
an engine and saved outputs, `compare.py` lays them side by side, `bisect.py` finds the first node
that differs, `report.py` writes it down.
"""
