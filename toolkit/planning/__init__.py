"""Where each node runs and why: DLA rules, costs, placement and segments."""
