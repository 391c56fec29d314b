"""The templates that the server brings beside `base`: `code-interpreter-v1` and `mcp-gateway`.

Each is an image that the runtime makes when a sandbox first asks for it, so they cost nothing until then.
"""

from __future__ import annotations

from datetime import datetime

from managed_e2b.local.interpreter import recipe as interpreter
from managed_e2b.local.mcp.recipe import GatewayRecipe
from managed_e2b.local.runtime.base import Recipe, Runtime
from managed_e2b.local.templates import DEFAULT_TAG, NO_SETTINGS, Build, Settings, Template, TemplateCatalog

CODE_INTERPRETER = "code-interpreter-v1"
MCP_GATEWAY = "mcp-gateway"

_INTERPRETER = Settings(
    start_cmd=f"exec {interpreter.START}",
    awaited_ports=frozenset({interpreter.PORT}),
    guarded=frozenset({(interpreter.PORT, "/execute")}),  # the SDKs send the token to no other path
)


def add_builtin(catalog: TemplateCatalog, runtime: Runtime, now: datetime) -> None:
    """Offer them to the runtime, and name them in the catalog."""
    offers: list[tuple[str, int, Recipe, Settings]] = [
        (CODE_INTERPRETER, 1, interpreter.InterpreterRecipe(), _INTERPRETER),
        (MCP_GATEWAY, 2, GatewayRecipe(), NO_SETTINGS),
    ]
    for name, number, recipe, settings in offers:
        runtime.offer(name, recipe)
        build = Build(f"00000000-0000-4000-8000-{number:012}", name, now, settings)
        catalog.add(Template(name, now, public=True, names=[name], tags={DEFAULT_TAG: (build, now)}))
