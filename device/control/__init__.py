"""`tandem-agent control`: takes a bundle on the board's side and hands it over to the agent."""
