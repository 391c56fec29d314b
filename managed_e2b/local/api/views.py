"""How sandboxes look in answers. Pure: values in, JSON-like dicts out, none of which shows a secret it need not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from managed_e2b.local.builds.model import Entry
from managed_e2b.local.clock import rfc3339
from managed_e2b.local.errors import ApiError
from managed_e2b.local.history import Sample
from managed_e2b.local.model import CLIENT_ID, ENVD_VERSION, Sandbox
from managed_e2b.local.sizes import Asked, Size
from managed_e2b.local.snapshots import Snapshot
from managed_e2b.local.templates import BASE, Template

NO_BUILD = "00000000-0000-0000-0000-000000000000"


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
        **_size(box.size),
        "state": box.shown_state,
        "envdVersion": ENVD_VERSION,
        "metadata": dict(box.spec.metadata),
    }
    if box.spec.volume_mounts:
        view["volumeMounts"] = [{"name": mount.name, "path": mount.path} for mount in box.spec.volume_mounts]
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
        view["pauseMode"] = box.pause_mode
    if box.access_token is not None:
        view["envdAccessToken"] = box.access_token
    if box.spec.network is not None:
        view["network"] = dict(box.spec.network)
    return view


def _size(size: Size) -> dict[str, int]:
    return {"cpuCount": size.cpu_count, "memoryMB": size.memory_mb, "diskSizeMB": size.disk_mb}


def metric(sample: Sample) -> dict[str, Any]:
    """One sample."""
    usage = sample.usage
    return {
        "timestamp": rfc3339(sample.at),
        "timestampUnix": sample.second,
        "cpuCount": usage.cpu_count,
        "cpuUsedPct": usage.cpu_used_pct,
        "memUsed": usage.mem_used,
        "memTotal": usage.mem_total,
        "memCache": usage.mem_cache,
        "diskUsed": usage.disk_used,
        "diskTotal": usage.disk_total,
    }


def fork(result: Sandbox | ApiError, domain: str) -> dict[str, Any]:
    """One of the results of a fork."""
    return {"error": result.body()} if isinstance(result, ApiError) else {"sandbox": sandbox(result, domain)}


def snapshot(item: Snapshot) -> dict[str, Any]:
    """A snapshot, made or listed."""
    return {"snapshotID": item.snapshot_id, "names": list(item.template.names)}


def template(item: Template, size: Callable[[Asked], Size]) -> dict[str, Any]:
    """One item of the list of templates. `size`: what a sandbox gets for what a build asks."""
    builds = list(item.builds.values())
    build = builds[0] if builds else None
    given = size(build or BASE)
    return {
        "templateID": item.template_id,
        "buildID": item.latest[0] if item.latest else build.build_id if build else NO_BUILD,
        **_size(given),
        "public": item.public,
        "aliases": list(item.names),
        "names": list(item.names),
        "createdAt": rfc3339(item.created_at),
        "updatedAt": rfc3339(item.updated_at or item.created_at),
        "createdBy": None,
        "lastSpawnedAt": None if item.last_spawned_at is None else rfc3339(item.last_spawned_at),
        "spawnCount": item.spawned,
        "buildCount": len(builds),
        "envdVersion": ENVD_VERSION,
        "buildStatus": item.latest[1] if item.latest else "ready" if build else "waiting",
    }


def template_with_builds(item: Template, size: Callable[[Asked], Size]) -> dict[str, Any]:
    """The answer to a question for one template. `size`: see `template`."""
    view = template(item, size)
    shared = ("templateID", "public", "aliases", "names", "createdAt", "updatedAt", "lastSpawnedAt", "spawnCount")
    builds = [
        {
            "buildID": build.build_id,
            "status": "ready",
            "createdAt": rfc3339(build.created_at),
            "updatedAt": rfc3339(build.created_at),
            "finishedAt": rfc3339(build.created_at),
            **_size(size(build)),
            "envdVersion": ENVD_VERSION,
        }
        for build in item.builds.values()
    ]
    return {**{name: view[name] for name in shared}, "builds": builds}


def build_log(entry: Entry) -> dict[str, Any]:
    """One line of a build's log."""
    view: dict[str, Any] = {"timestamp": rfc3339(entry.at), "level": entry.level, "message": entry.message}
    return view if entry.step is None else {**view, "step": entry.step}
