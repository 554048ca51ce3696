"""Which processor runs each node: costs, the solver, the plan."""
