"""How fast an engine runs on this machine, and in what state the machine was.

`measure.py` runs, `distribution.py` and `report.py` are pure, `state.py` reads clocks and versions.
"""
