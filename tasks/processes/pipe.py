"""The pipe between a parent and its child: JSON objects in UTF-8, each behind its length in 8 bytes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
WAKE_SECONDS = 0.1  # how often a waiting end looks at the clock and at the other process


class Channel:
    """One end of the pipe. `check(idle)` runs before every wait (idle: the last one brought nothing) and may raise."""

    def __init__(self, sock: socket.socket, check: Callable[[bool], None] | None = None) -> None:
        sock.settimeout(WAKE_SECONDS if check else None)
        self.sock, self._check = sock, check or (lambda idle: None)

    def send(self, payload: bytes) -> None:
        self._check(False)
        data = memoryview(len(payload).to_bytes(8, "big") + payload)
        while data:
            try:
                data = data[self.sock.send(data) :]
            except TimeoutError:
                self._check(True)

    def receive(self) -> Message:
        size = int.from_bytes(self._read(8), "big")
        if size >= 1 << 40:
            raise ValueError(f"a message of {size} bytes: something else wrote into the pipe")
        message = json.loads(self._read(size))
        if not isinstance(message, dict):
            raise ValueError("a message is no JSON object")
        return message

    def _read(self, count: int) -> bytes:
        data, idle = bytearray(), False
        while len(data) < count:
            self._check(idle)
            try:
                chunk = self.sock.recv(min(count - len(data), 1 << 20))
            except TimeoutError:
                idle = True
                continue
            if not chunk:
                raise EOFError
            data += chunk
            idle = False
        return bytes(data)
