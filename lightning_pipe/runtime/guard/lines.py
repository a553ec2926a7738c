"""Send messages over a socket, one line of JSON each, between ends that trust each other (`runtime.callers`)."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]
SEND_S = 2.0  # a message that is not taken in this time is lost; its reader is stopped or cut off
_MOST = 1 << 16  # bytes of one read
_LONGEST = 1 << 22  # bytes of a line


class Lines:
    """One end of a connection.

    Args:
        connection: the socket; read it when it is readable.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(SEND_S)
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self.connection.fileno()

    def send(self, message: Message) -> bool:
        """Send a message; return whether it has left."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def read(self) -> list[Message] | None:
        """Return the messages that have come, None when the other end is closed or sends something else."""
        try:
            received = self.connection.recv(_MOST)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not received:
            return None
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > _LONGEST:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
