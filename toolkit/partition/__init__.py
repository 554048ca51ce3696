"""Which processor runs each node: support, costs, the solver, the plan."""
