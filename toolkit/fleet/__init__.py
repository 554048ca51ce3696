"""The operator's side: bundles, trust, rollouts, and the boards that they go to."""
