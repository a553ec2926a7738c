"""Network card that ranks of several hosts meet through. gloo takes that of the address of the host's name.

On many hosts that is 127.0.0.1 or 127.0.1.1 (Debian's /etc/hosts): ranks of other hosts then connect to themselves, one
fails after a while and the others wait. So where the name is such an address, the card is used that leads to the main
host, as GLOO_SOCKET_IFNAME would say.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys

from lightning_pipe.lightning_names import rank_zero_info

_VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF_CARD = 0x8915  # SIOCGIFADDR of <linux/sockios.h>


def choose_card(main_address: str) -> str | None:
    """Let gloo use the card that leads to the main host, and return its name; None where gloo's choice can be right.

    Args:
        main_address: name or address of the host of rank 0.
    """
    if _VARIABLE in os.environ or not _is_loopback(socket.gethostname()):
        return None
    card = _card_towards(main_address)
    if card is not None:
        os.environ[_VARIABLE] = card
        rank_zero_info(f"The hosts meet through the network card {card}, as {_VARIABLE} says nothing else.")
    return card


def _is_loopback(name: str) -> bool:
    """Return whether a host's name leads nowhere but to itself; one that is unknown does not lead anywhere either."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(name)).is_loopback
    except OSError:
        return True


def _card_towards(address: str) -> str | None:
    """Return the card through which messages to an address leave; None where that cannot be found out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return None
        own = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if _address_of(name, probe) == own), None)


def _address_of(card: str, probe: socket.socket) -> str | None:
    if sys.platform != "linux":
        return None
    from fcntl import ioctl  # which other systems do not have

    try:
        found = ioctl(probe.fileno(), _ADDRESS_OF_CARD, struct.pack("256s", card.encode()[:15]))
    except OSError:  # without an address
        return None
    return socket.inet_ntoa(found[20:24])
