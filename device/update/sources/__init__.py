"""Where a blob may be fetched besides MQTT: HTTP(S), a folder, a USB stick. One small interface."""
