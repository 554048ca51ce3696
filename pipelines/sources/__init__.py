"""Where frames come from: files, cameras, streams."""
