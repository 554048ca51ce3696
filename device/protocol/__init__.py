"""What passes over MQTT and over the pipes of child processes: topics, documents, messages."""
