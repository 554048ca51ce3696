"""`tandem demo`: build, run, deploy and roll back on one machine, with real parts.

scene_video   a rendered moving scene, encoded as video
releases      three bundles: a first, a better, a broken one
fleet         broker, agent process and an MQTT client that receives
steps         the driver, and the checks that decide the exit status
report_html   the HTML report
"""
