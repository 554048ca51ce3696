"""Where results go: MQTT, JSON lines, an annotated video."""
