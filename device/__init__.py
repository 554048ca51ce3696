"""What runs on the board: engine format, session, agent and updates."""
