"""Devices from the operator's side: deployments and a broker for first steps."""
