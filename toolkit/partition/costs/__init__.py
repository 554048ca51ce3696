"""What nodes take on each processor, in time and energy, fitted to published measurements.

`model.CostModel` is the front: the costs of one graph on one board in one power mode.
`hardware.py` reads rates and clocks from a profile, `fusion.py` says which nodes run as one,
`gpu.py` and `dla.py` hold the formulas of time, `memory.py` contention, `energy.py` power,
`constants.py` the fitted values (`configs/costs.toml`), `measured.py` times from a board, which go
before all of these.
"""
