"""The plan: what runs where and why, from rules, costs and the solver."""
