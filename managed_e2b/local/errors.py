"""The errors the control plane and the gateway answer with.

One class: an HTTP status, a message for people and, where the contract names one, a machine-readable
`error_code`. Every such answer is the JSON body `{"code": <status>, "message": …}`, because the SDKs read
`code` from the body and fail on anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class ApiError(Exception):
    """A request that is answered with an error. `message` is sent to the caller: it must hold no secret."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_code: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_code = error_code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        body: dict[str, Any] = {"code": self.status, "message": self.message}
        if self.error_code is not None:
            body["error_code"] = self.error_code
        return body


def bad_request(message: str) -> ApiError:
    return ApiError(400, message)


def sandbox_not_found(sandbox_id: str) -> ApiError:
    return ApiError(404, f"Sandbox \"{sandbox_id}\" doesn't exist or you don't have access to it")


def not_built(what: str) -> ApiError:
    """The local server knows the request but cannot do it. Retrying changes nothing, and the answer says so."""
    return ApiError(501, f"{what} is not available on the local server", headers={"Should-Retry": "false"})
