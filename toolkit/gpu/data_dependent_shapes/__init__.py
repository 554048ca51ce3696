"""Rows whose number the data decide: rewrites after which kernels know their sizes.

A detector keeps as many proposals as its NonZero and NonMaxSuppression leave, and its head works on
those rows. `bounded.py` pads them to their bound where the head multiplies matrices, and takes the
padding away behind it; `subsets.py` lets a head with several inputs compute all rows, not subsets
that it gathers and scatters. `row_wise.py` is the table of operators that compute each row alone,
`symbolic.py` infers sizes in which each number of rows is a symbol. `rewrite.py` is the graph pass.
"""
