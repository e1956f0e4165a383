"""How a service listens: address, key and limits, for the recommender and the language model alike."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

KEY_VARIABLE = "PRISM_API_KEY"


@dataclass(frozen=True)
class ServerSettings:
    """Address, key and limits of a service."""

    host: str = "127.0.0.1"
    port: int = 8087
    api_key: str | None = None
    """What clients must send as `X-API-Key` or `Authorization: Bearer`. None: no key is asked for."""
    max_body: int = 4 * 2**20
    """Largest body of a request, in bytes."""
    grace: float = 20.0
    """Seconds that running requests get to finish after SIGTERM or Ctrl-C."""

    def check(self) -> None:
        """Raise ValueError for values that cannot be served with."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535 (0: any free port), got {self.port}")
        if self.max_body < 1024:
            raise ValueError(f"max_body must be at least 1024 bytes, got {self.max_body}")
        if self.grace < 0:
            raise ValueError(f"grace must be 0 seconds or more, got {self.grace}")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def warnings(self) -> list[str]:
        """What an operator should know about these settings before the service is reachable."""
        if self.is_local:
            return []
        found = [
            f"warning: --host {self.host} can be reached from other machines, over HTTP without encryption: "
            "put a proxy with TLS in front of it"
        ]
        if self.api_key is None:
            found.append("warning: no API key is set, so everyone who reaches the service may read and change its data")
        return found


def read_api_key(file: Path | None) -> str | None:
    """The API key: from a file, else from the variable PRISM_API_KEY, else None."""
    if file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        where = f"the variable {KEY_VARIABLE}"
        if not key:
            return None
    else:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_key_file {file} cannot be read: {error}") from error
        where = f"api_key_file {file}"
        if os.name == "posix" and stat.S_IMODE(file.stat().st_mode) & 0o007:
            raise ValueError(f"{where} can be read by every user of this machine: chmod 600 {file}")
    if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{where} must hold at least 8 printable ASCII characters without spaces")
    return key
