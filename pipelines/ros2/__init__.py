"""ROS 2 without ROS: message definitions, CDR, type hashes, and the wires that carry them."""
