"""Who may reach a sandbox's ports, and what it may reach: the options of create, and their change while it runs."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from managed_e2b.local.api import schemas
from managed_e2b.local.api.params import sandbox_id
from managed_e2b.local.errors import bad_request, not_built
from managed_e2b.local.network.policy import parse
from managed_e2b.local.sandboxes import SandboxRegistry

_OUTGOING = ("allowOut", "denyOut", "dnsServers")
_HOST = re.compile(r"([A-Za-z0-9._-]|\$\{PORT\})+(:([0-9]{1,5}|\$\{PORT\}))?")


class NetworkApi:
    def __init__(self, registry: SandboxRegistry) -> None:
        self._registry = registry

    def routes(self) -> list[Route]:
        return [Route("/sandboxes/{id}/network", self.update, methods=["PUT"])]

    async def update(self, request: Request) -> Response:
        """Replace what it may reach; what is left out is cleared. Connections that are not allowed any more end."""
        body = await schemas.read_body(request, schemas.NetworkUpdate)
        _refuse_unbuilt(body)
        policy = parse(body.allow_internet_access, body.allow_out or (), body.deny_out or (), body.dns_servers)
        box = await self._registry.get(sandbox_id(request))
        kept = {name: value for name, value in (box.spec.network or {}).items() if name not in _OUTGOING}
        await self._registry.update_network(
            box.sandbox_id,
            egress=policy,
            network={**kept, **_told(body, _OUTGOING)},
            allow_internet_access=body.allow_internet_access,
        )
        return Response(status_code=204)


def options(network: schemas.Network | None, allow_internet_access: bool | None) -> dict[str, Any]:
    """What of `SandboxSpec` the network options of create decide. Raises ApiError: 400, 501."""
    if network is None:
        return {"allow_internet_access": allow_internet_access, "egress": parse(allow_internet_access)}
    _refuse_unbuilt(network)
    if network.mask_request_host is not None and not _HOST.fullmatch(network.mask_request_host):
        raise bad_request(f"mask request host is not valid: {network.mask_request_host}")
    return {
        "allow_internet_access": allow_internet_access,
        "egress": parse(allow_internet_access, network.allow_out or (), network.deny_out or (), network.dns_servers),
        "network": _told(network, (*_OUTGOING, "allowPublicTraffic", "maskRequestHost", "httpsPorts")),
        "public_traffic": network.allow_public_traffic,
        "mask_request_host": network.mask_request_host,
        "https_ports": frozenset(network.https_ports or ()),
    }


def _refuse_unbuilt(asked: schemas.Outgoing) -> None:
    """Options that would change what traffic means: accepting them in silence would be a lie."""
    for name, value in (("egressProxy", asked.egress_proxy), ("rules", asked.rules)):
        if value:
            raise not_built(f"The network option {name}")


def _told(asked: schemas.Outgoing, names: tuple[str, ...]) -> dict[str, Any]:
    """What was asked, to be shown again: only what is named here, so no secret can slip through."""
    found = asked.model_dump(by_alias=True, exclude_unset=True)
    return {name: found[name] for name in names if name in found}
