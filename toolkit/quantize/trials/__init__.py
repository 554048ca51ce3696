"""INT8 tried without a build: trial graphs, metrics, accuracy budgets."""
