"""Taking over what a create made whose answer never came."""

from __future__ import annotations

import logging
from typing import Any

from ..errors import BackendError
from .base import Engine
from .patience import patiently

logger = logging.getLogger("managed_e2b")


async def adopt(engine: Engine, ids: list[str], seconds: int) -> Any:
    """The native object of the first of `ids` that lives; None when none of them does. The others are killed.

    One create may have made several: a proxy that sent it twice, an endpoint that knows no idempotency key.
    """
    adopted: Any = None
    for sandbox_id in ids:
        if adopted is None:
            adopted = await _adopt_one(engine, sandbox_id, seconds)
            continue
        try:
            await patiently(engine, engine.driver.sdk.kill, sandbox_id)
        except BackendError as error:
            # Nobody renews its lease, which ends it; `reconcile` does it sooner.
            logger.warning("%s, a second sandbox of one create, is not killed yet: %s", sandbox_id, error)
    return adopted


async def _adopt_one(engine: Engine, sandbox_id: str, seconds: int) -> Any:
    try:
        return await patiently(engine, engine.driver.sdk.adopt, sandbox_id, seconds)
    except BackendError:
        if await patiently(engine, engine.driver.sdk.info, sandbox_id) is None:
            return None  # it was listed and is gone: lists lag
        raise
