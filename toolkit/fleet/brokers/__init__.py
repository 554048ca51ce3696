"""The MQTT broker of a fleet: where it is, the files of mosquitto, RabbitMQ and NATS, one for a
bench."""
