"""Refusals in OpenAI's format."""

from __future__ import annotations

from typing import Any

from umbra.proto.errors import UmbraError
from umbra.services.http.door import error_body


class ApiError(UmbraError):
    """A request that gets no turn.

    `status` is never one that the `openai` client repeats a request after (408, 409, 429, 5xx),
    but for 503 where that may help.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON object to answer with."""
        return error_body(str(self), self.status, self.code, self.param)
