"""The request bodies of the control plane. Unknown fields are ignored, as upstream does; types are strict."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from starlette.requests import ClientDisconnect, Request

from managed_e2b.local.errors import ApiError, bad_request

MAX_BODY = 1024 * 1024
"""Bytes of a request body; larger ones are refused before they are read."""

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, alias_generator=to_camel, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class AutoResume(Body):
    enabled: bool


class Outgoing(Body):
    """What a sandbox may reach."""

    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    dns_servers: list[str] | None = None
    egress_proxy: dict[str, Any] | None = None
    rules: dict[str, Any] | None = None


class NetworkUpdate(Outgoing):
    allow_internet_access: Annotated[bool | None, Field(alias="allow_internet_access")] = None


class Network(Outgoing):
    """The same, and who may reach it."""

    allow_public_traffic: bool = True
    mask_request_host: str | None = None
    https_ports: list[Annotated[int, Field(ge=1, le=65535)]] | None = None


class VolumeMount(Body):
    name: str
    path: str


class NewSandbox(Body):
    """Create. v1 has `secure` and another default timeout; the rest is v2."""

    template_id: Annotated[str, Field(alias="templateID", max_length=512)]
    timeout: Int32 | None = None
    auto_pause: bool = False
    auto_pause_memory: bool = True
    auto_resume: AutoResume | None = None
    secure: bool = False
    allow_internet_access: Annotated[bool | None, Field(alias="allow_internet_access")] = None
    network: Network | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: list[VolumeMount] | None = None


class ConnectSandbox(Body):
    timeout: Int32 | None = None
    memory: bool = True


class ConnectSandboxV1(Body):
    timeout: Int32
    memory: bool = True


class PauseSandbox(Body):
    memory: bool = True
    require_healthy_guest: bool = False


class ResumeSandbox(Body):
    timeout: Int32 | None = None
    auto_pause: bool | None = None
    memory: bool = True


class ForkSandbox(Body):
    timeout: Int32 | None = None
    count: Int32 = 1


class NewSnapshot(Body):
    name: Annotated[str, Field(max_length=512)] | None = None
    memory: bool = True


class SetTimeout(Body):
    timeout: Int32


class Refresh(Body):
    duration: Annotated[int, Field(ge=0, le=3600)] | None = None


M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, model: type[M], *, most: int = MAX_BODY) -> M:
    """The request's body as `model`; an empty one counts as `{}`.

    Raises ApiError: 400, or 413 for one of more than `most` bytes.
    """
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > most:
                raise ApiError(413, f"Request body is larger than {most} bytes", headers={"Connection": "close"})
    except ClientDisconnect as error:
        raise bad_request("The request broke off") from error
    try:
        return model.model_validate_json(bytes(raw).strip() or b"{}")
    except ValidationError as error:
        raise bad_request(_explain(error)) from None  # the cause holds the input, which may hold secrets


def _explain(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"Invalid request body: {place + ': ' if place else ''}{problem['msg']}"
