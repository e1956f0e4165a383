"""Structured logs: one JSON object a line on standard error."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("prism.serve")


class JsonLines(logging.Formatter):
    """A record as one line of JSON; `extra={"fields": {…}}` adds fields."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "message": record.getMessage()}
        line.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = repr(record.exc_info[1])
            line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(line, ensure_ascii=False, default=str)


LEVELS = ("debug", "info", "warning", "error")


def check_level(level: str) -> None:
    """Raise ValueError for a level that does not exist."""
    if level not in LEVELS:
        raise ValueError(f"log_level must be one of {', '.join(LEVELS)}, got {level!r}")


def set_up_logs(level: str = "info") -> None:
    """Send the logs of the service and of uvicorn to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("prism.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # the service says itself when it starts and stops


def say_event(message: str, **fields: Any) -> None:
    """Log a line about the service, with fields."""
    log.info(message, extra={"fields": fields})
