"""The agent process: connection, updates carried out, pipelines as child processes."""
