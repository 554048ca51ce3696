"""`tandem fleet serve`: carries rollouts out, and answers what devices fetch."""
