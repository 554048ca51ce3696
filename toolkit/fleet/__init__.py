"""The operator's side of a fleet: deployments, and a broker for first steps."""
