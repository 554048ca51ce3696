"""Time and energy of nodes on each processor, fitted to published measurements.

model      entry point: the costs of one graph on one board in one power mode; memory contention
hardware   rates and clocks of a profile
fusion     nodes that run as one kernel
gpu        formulas of time on the GPU; how executors start kernels
dla        formulas of time on the DLA
energy     formulas of power and energy
bytes      sizes of tensors, bytes moved by kernels
constants  the fitted values (`configs/costs.toml`), idle power (`configs/power.toml`)
errors     how far off predictions are: intervals (`configs/errors.json`)
measured   times measured on a board, which replace predictions
"""
