"""Network cards and addresses that ranks meet at: those of the loopback where there is one host.

gloo listens at the address of the host's name, unless GLOO_SOCKET_IFNAME names a card. On many hosts that is 127.0.0.1
or 127.0.1.1 (Debian's /etc/hosts): ranks of other hosts then connect to themselves, one fails after a while and the
others wait. So where the name is such an address, the card is used that leads to the main host.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator

from lightning_pipe.lightning_names import rank_zero_info

LOOPBACK = "127.0.0.1"
_VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF_CARD = 0x8915  # SIOCGIFADDR of <linux/sockios.h>
_ANY = "0.0.0.0"


def choose_card(main_address: str, *, hosts: int) -> str | None:
    """Let gloo use the card that all ranks can reach, and return its name; None where gloo's choice can be right.

    Args:
        main_address: name or address of the host of rank 0.
        hosts: number of hosts; of one, the card is that of the loopback.
    """
    if _VARIABLE in os.environ or (hosts > 1 and not is_loopback(socket.gethostname())):
        return None
    card = _card_towards(main_address if hosts > 1 else LOOPBACK)
    if card is not None:
        os.environ[_VARIABLE] = card
    if card is not None and hosts > 1:
        rank_zero_info(f"The hosts meet through the network card {card}, as {_VARIABLE} says nothing else.")
    return card


def forget_card() -> None:
    """Let gloo choose again."""
    os.environ.pop(_VARIABLE, None)


def own_addresses(hosts: int) -> list[str]:
    """Return the addresses of this host where rank 0 listens: as few as reach all ranks.

    Args:
        hosts: number of hosts; for one it is the loopback, for several MASTER_ADDR where this host has that address.
    """
    main = os.environ.get("MASTER_ADDR", "")
    if hosts == 1 or main == "localhost" or main.startswith("127."):  # which no other host reaches
        return [LOOPBACK]
    if main and not is_loopback(main) and is_here(main):
        return [main]
    return list(dict.fromkeys(_addresses_of_cards())) or [_ANY]


def is_loopback(name: str) -> bool:
    """Return whether a host's name leads nowhere but to itself; one that is unknown does not lead anywhere either."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(name)).is_loopback
    except OSError:
        return True


def is_here(name: str) -> bool:
    """Return whether this host has the address of a name."""
    try:
        listening(name, 0).close()
    except OSError:
        return False
    return True


def listening(name: str, port: int) -> socket.socket:
    """Return a socket that listens at the address of a name.

    Raises:
        OSError: if this host does not have it, or the port is taken.
    """
    family, *_, place = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family, backlog=1024)


def _addresses_of_cards() -> Iterator[str]:
    """Yield the addresses by which other hosts may reach this one, likeliest first."""
    with contextlib.suppress(OSError):
        if not is_loopback(name := socket.gethostname()):
            yield socket.gethostbyname(name)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, card in socket.if_nameindex():
            if (address := _address_of(card, probe)) is not None and not is_loopback(address):
                yield address


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
