"""How a bundle reaches boards: MQTT, SSH, a serial line or UDP (SMP), a login shell, a folder."""
