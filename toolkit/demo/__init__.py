"""`tandem demo`: the whole way of the data on one machine, with real parts.

scene_video   a moving scene, drawn and encoded as video
releases      three bundles: a first, a better, a broken one
fleet         broker, agent process and an MQTT client that listens
steps         the order of all this, and the checks that decide the exit status
report_html   one page about what happened
"""
