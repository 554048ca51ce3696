"""Answers devices that ask for a certificate over MQTT (`tandem-agent enrol`)."""

import logging

from device.enrol.request import EnrolRequest, EnrolResponse, response_topic
from device.protocol.documents import decode, encode
from device.protocol.mqtt import Link, Message
from device.protocol.topics import PROVISION
from toolkit.errors import FleetError
from toolkit.fleet.authority import Authority
from toolkit.fleet.trust.certificates import enrol

LOG = logging.getLogger(__name__)
SUBSCRIPTION = f"{PROVISION}/+/request"
ID_LETTERS = frozenset("0123456789abcdef")


class Provisioning:
    """A service on a server's link: it signs the requests of expected devices."""

    subscriptions = ((SUBSCRIPTION, 1),)

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    def on_message(self, message: Message, link: Link) -> None:
        """Answer a request; what is none is dropped."""
        request_id = message.topic.removeprefix(f"{PROVISION}/").removesuffix("/request")
        if len(request_id) != 32 or not ID_LETTERS.issuperset(request_id):
            return
        response = self.answer(message.payload)
        if response is not None:
            link.publish(response_topic(request_id), encode(response), qos=1)

    def answer(self, payload: bytes) -> EnrolResponse | None:
        """Return the answer to a request, None if it is not one."""
        try:
            request = decode(payload, EnrolRequest)
        except ValueError as error:
            LOG.warning("a request for a certificate is not understood: %s", error)
            return None
        try:
            issued = enrol(self._authority, request.device, request.csr.encode())
        except FleetError as error:
            LOG.warning("%s", error)
            return EnrolResponse(device=request.device, error=str(error))
        LOG.info("enrolled %s until %s", issued.name, issued.not_after.date())
        return EnrolResponse(
            device=request.device,
            certificate=issued.pem.decode(),
            ca=self._authority.ca_pem.decode(),
        )
