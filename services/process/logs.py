"""Logging of every service to standard error: a line for people or a JSON object for programs."""

from __future__ import annotations

import json
import logging
import sys
import time

from umbra.services.config import LogConfig


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        row = {
            "time": record.created,
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row)


class ConsoleFormatter(logging.Formatter):
    """`12:34:56.789 service level message`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, with its traceback below if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{record.msecs:03.0f} {self._service} {record.levelname.lower()}"
        line = f"{head} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def setup_logging(config: LogConfig, service: str) -> None:
    """Send all of this process's logging to standard error as `config` says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(service) if config.format == "json" else ConsoleFormatter(service)
    )
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
    if config.level == "info":  # a line for each request of the hub's client is for debugging
        for client in ("httpx", "httpx2"):
            logging.getLogger(client).setLevel(logging.WARNING)
