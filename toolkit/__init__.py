"""Host side of Tandem: import, passes, planning, build, inspection and fleet control."""
