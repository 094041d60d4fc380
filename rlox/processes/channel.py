"""Messages between two processes."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

CREATE, FAILED = b"c", b"!"  # kinds of messages: the first order and its answer; an exception, by `pack_exception`

_HEAD = struct.Struct("<cQ")


def encode(kind: bytes, value: Any = None) -> bytes:
    """Return a message as bytes: its kind (one byte), the length of the pickled value, and this (nothing for None)."""
    data = b"" if value is None else pickle.dumps(value)
    return _HEAD.pack(kind, len(data)) + data


class Channel:
    """One end of a socket on which messages arrive. An interrupt loses no part of them."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._unread = bytearray()

    def take(self) -> tuple[bytes, Any] | None:
        """Return kind and value of the first message that has arrived and was not taken yet; None if there is none."""
        unread = self._unread
        if len(unread) < _HEAD.size:
            return None
        kind, size = _HEAD.unpack_from(unread)
        end = _HEAD.size + size
        if len(unread) < end:
            return None
        value = pickle.loads(unread[_HEAD.size : end]) if size else None
        del unread[:end]
        return kind, value

    def read(self) -> None:
        """Wait for data, as long as the socket's timeout. Raises EOFError if the other end has closed."""
        size, unread = 4096, self._unread  # more would be allocated for every short message
        if len(unread) >= _HEAD.size:
            size = min(max(size, _HEAD.size + _HEAD.unpack_from(unread)[1] - len(unread)), 1 << 20)
        try:
            part = self.sock.recv(size)
        except ConnectionResetError:
            part = b""
        if not part:
            raise EOFError
        self._unread += part

    def receive(self) -> tuple[bytes, Any]:
        """Wait for the next message."""
        while (message := self.take()) is None:
            self.read()
        return message
