"""Read the detections of a device over MQTT. It needs paho-mqtt alone, nothing of Tandem.

    python examples/read_events.py --broker 192.168.1.10:1883 --device board-1

A device publishes one JSON message per frame on fleet/v1/DEVICE/detections:

    {"schema": 1, "pipeline": "robot-objects", "seq": 7, "time": "2026-01-31T12:00:00.123Z", ...,
     "latency_ms": {"infer": 2.1, ..., "total": 4.0},
     "detections": [{"label": "cone", "class_id": 0, "score": 0.93, "box": [10, 20, 60, 90]}]}
"""

import argparse
import json

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broker", default="127.0.0.1:1883", metavar="HOST:PORT")
    parser.add_argument("--device", default="demo-board", help="the id in its agent.toml")
    parser.add_argument("--count", type=int, help="stop after this number of frames")
    arguments = parser.parse_args()
    host, _, port = arguments.broker.rpartition(":")
    topic = f"fleet/v1/{arguments.device}/detections"
    frames = 0

    def on_connect(client: mqtt.Client, *_: object) -> None:
        client.subscribe(topic)  # here, so that it is repeated after a reconnection
        print(f"listening on {topic}", flush=True)

    def on_message(client: mqtt.Client, _: object, message: mqtt.MQTTMessage) -> None:
        nonlocal frames
        event = json.loads(message.payload)
        objects = [f"{one['label']} {one['score']:.2f}" for one in event["detections"]]
        total_ms = event["latency_ms"]["total"]
        print(f"frame {event['seq']}, {total_ms:.1f} ms: {', '.join(objects) or 'nothing'}")
        frames += 1
        if frames == arguments.count:
            client.disconnect()

    client = mqtt.Client(CallbackAPIVersion.VERSION2)
    client.on_connect = on_connect
    client.on_message = on_message
    client.connect(host, int(port))
    client.loop_forever()


if __name__ == "__main__":
    main()
