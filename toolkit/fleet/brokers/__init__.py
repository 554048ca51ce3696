"""The MQTT broker of a fleet: where it is, the files of mosquitto and RabbitMQ, one for a bench."""
