"""How sandboxes look in answers. Pure: values in, JSON-like dicts out, none of which shows a secret it need not."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from managed_e2b.local.clock import rfc3339
from managed_e2b.local.model import CLIENT_ID, ENVD_VERSION, Sandbox
from managed_e2b.local.runtime.base import Usage
from managed_e2b.local.templates import Template

CPU_COUNT = 2
MEMORY_MB = 512
DISK_MB = 10_240
# Nominal sizes, as upstream's default template has them: the local sandboxes share the host's.


def sandbox(box: Sandbox, domain: str) -> dict[str, Any]:
    """The answer to create and connect. `domain` is what the SDK's `get_host` builds names of ports with."""
    view: dict[str, Any] = {
        "templateID": box.spec.template_id,
        "sandboxID": box.sandbox_id,
        "clientID": CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "domain": domain,
        "trafficAccessToken": box.traffic_token,
    }
    if box.spec.alias is not None:
        view["alias"] = box.spec.alias
    if box.access_token is not None:
        view["envdAccessToken"] = box.access_token
    return view


def listed(box: Sandbox) -> dict[str, Any]:
    """One item of a list."""
    view: dict[str, Any] = {
        "templateID": box.spec.template_id,
        "sandboxID": box.sandbox_id,
        "clientID": CLIENT_ID,
        "startedAt": rfc3339(box.lifetime.start.wall),
        "endAt": rfc3339(box.lifetime.end.wall),
        "cpuCount": CPU_COUNT,
        "memoryMB": MEMORY_MB,
        "diskSizeMB": DISK_MB,
        "state": box.shown_state,
        "envdVersion": ENVD_VERSION,
        "metadata": dict(box.spec.metadata),
    }
    if box.spec.alias is not None:
        view["alias"] = box.spec.alias
    return view


def detail(box: Sandbox, domain: str) -> dict[str, Any]:
    """The answer to a question for one sandbox."""
    view = listed(box)
    view["domain"] = domain if box.shown_state == "running" else None
    view["allowInternetAccess"] = box.spec.allow_internet_access
    view["lifecycle"] = {
        "autoResume": box.spec.auto_resume,
        "onTimeout": "pause" if box.spec.auto_pause else "kill",
    }
    if box.shown_state == "paused":
        view["pauseMode"] = "full"
    if box.access_token is not None:
        view["envdAccessToken"] = box.access_token
    if box.spec.network is not None:
        view["network"] = dict(box.spec.network)
    return view


def metric(usage: Usage, now: datetime) -> dict[str, Any]:
    """One sample, stamped with the whole second it was taken in, as upstream's are."""
    second = now.astimezone(UTC).replace(microsecond=0)
    return {
        "timestamp": rfc3339(second),
        "timestampUnix": int(second.timestamp()),
        "cpuCount": usage.cpu_count,
        "cpuUsedPct": usage.cpu_used_pct,
        "memUsed": usage.mem_used,
        "memTotal": usage.mem_total,
        "memCache": usage.mem_cache,
        "diskUsed": usage.disk_used,
        "diskTotal": usage.disk_total,
    }


def template(item: Template, created_at: datetime, spawned: int) -> dict[str, Any]:
    """One item of the list of templates."""
    return {
        "templateID": item.template_id,
        "buildID": item.build_id,
        "cpuCount": CPU_COUNT,
        "memoryMB": MEMORY_MB,
        "diskSizeMB": DISK_MB,
        "public": False,
        "aliases": [item.alias],
        "names": [item.alias],
        "createdAt": rfc3339(created_at),
        "updatedAt": rfc3339(created_at),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": spawned,
        "buildCount": 1,
        "envdVersion": ENVD_VERSION,
        "buildStatus": "ready",
    }
