"""What is compiled for sm_90 (Hopper) alone: rewrites, schedules, kernels and a change of PTX.

`generation.py` is the table of them. `toolkit.gpu.generations` finds it; nothing else imports this
folder, and the compiler works without it.
"""
