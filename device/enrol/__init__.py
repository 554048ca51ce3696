"""`tandem-agent enrol`: a new device makes its key and asks the fleet for a certificate over MQTT.

request      the key, the request (PKCS #10), the documents of both sides
__main__     the connection with the claim certificate, and the files
"""
