"""Logging of every service to standard error: a line for people or a JSON object for programs."""

from __future__ import annotations

import json
import logging
import sys
import time

from umbra.services.config import LogConfig


class LineFormatter(logging.Formatter):
    """`12:34:56.789 service level message`, or one JSON object per record."""

    def __init__(self, service: str, *, as_json: bool) -> None:
        super().__init__()
        self._service = service
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        level, message = record.levelname.lower(), record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if not self._as_json:
            clock = time.strftime("%H:%M:%S", time.localtime(record.created))
            line = f"{clock}.{record.msecs:03.0f} {self._service} {level} {message}"
            return f"{line}\n{trace}" if trace else line
        row = {
            "time": record.created,
            "level": level,
            "service": self._service,
            "logger": record.name,
            "message": message,
        }
        return json.dumps({**row, "exception": trace} if trace else row)


def setup_logging(config: LogConfig, service: str) -> None:
    """Send all of this process's logging to standard error as `config` says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(service, as_json=config.format == "json"))
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
    if config.level == "info":  # a line for each request of the hub's client is for debugging
        for client in ("httpx", "httpx2"):
            logging.getLogger(client).setLevel(logging.WARNING)
