"""How a kernel is launched: tiles, loop order, tactics, occupancy, workspace."""
