"""`me2b env`: what to export so that any E2B SDK talks to the local server that runs."""

from __future__ import annotations

import os
import shlex
import urllib.error
import urllib.request

from managed_e2b.cli.options import AsJson
from managed_e2b.cli.output import fail, print_json
from managed_e2b.local.keys import ServerState, read_state, state_file

_NO_PROXY = "NO_PROXY"


def env(as_json: AsJson = False) -> None:
    """Print what points any E2B SDK at the local server of `me2b serve`: eval "$(me2b env)"."""
    state = read_state(state_file())
    if state is None or not _answers(state):
        fail("no local server is running: start one with `me2b serve`")
    if as_json:
        inherited = os.environ.get(_NO_PROXY)
        variables = state.environment()
        print_json(variables | ({_NO_PROXY: f"{variables[_NO_PROXY]},{inherited}"} if inherited else {}))
        return
    for name, value in state.environment().items():
        # What the shell already exempts from its proxy stays exempt.
        print(f"export {name}={shlex.quote(value)}" + (f'"${{{name}:+,${name}}}"' if name == _NO_PROXY else ""))


def _answers(state: ServerState) -> bool:
    """Whether something serves there. A server that was killed leaves its file; the key is not sent to find out."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        direct.open(f"{state.url}/health", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
