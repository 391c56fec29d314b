"""Run the live tests of E2B's JavaScript SDK, with the released npm package, against `me2b serve`.

    python tools/js_suite.py [--sdk 2.51.0] [GROUP ...]

The tests import the SDK's sources; here each such import becomes the package. Files that only test the SDK itself
(all answers mocked, no sandbox) are left out. Images come from a registry of stand-ins, where this host has one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from stand_ins import mirror
from suite import Group, Test, checkout, clean, first_line, main_of, npm_environment, server

SDK = "2.51.0"
TOOLS = {"vitest": "^4.1.10", "msw": "^2.12.10", "dotenv": "^16.4.5", "error-stack-parser-es": "^2.0.1", "undici": "^7"}
WORKERS = 3
"""Test files at a time."""

GROUPS: Mapping[str, Sequence[str]] = {
    "API": (
        *(f"api/{name}" for name in ("info", "kill", "list", "snapshot")),
        *(f"sandbox/{name}" for name in ("create", "connect", "kill", "timeout", "secure")),
    ),
    "commands": tuple(
        f"sandbox/commands/{name}"
        for name in ("connect", "envVars", "kill", "list", "run", "sandboxKilledDuringRun", "sendStdin")
    ),
    "files": tuple(
        f"sandbox/files/{name}"
        for name in ("contentEncoding", "exists", "info", "list", "makeDir", "read", "remove", "rename", "write")
    ),
    "files, more": tuple(f"sandbox/files/{name}" for name in ("metadata", "signing", "watch")),
    "terminals": tuple(f"sandbox/pty/{name}" for name in ("kill", "ptyConnect", "ptyCreate", "resize", "sendInput")),
    "lifecycle": ("sandbox/snapshot", "sandbox/metrics", "sandbox/lifecyclePayload"),
    "git": tuple(
        f"sandbox/git/{name}"
        for name in (
            *("add", "branches", "clone", "commit", "config", "dangerouslyAuthenticate"),
            *("init", "remote", "reset", "restore", "status", "sync"),
        )
    ),
    "copies": ("sandbox/fork", "sandbox/snapshot-api"),
    "ports": ("sandbox/host",),
    "network": ("sandbox/network", "sandbox/internetAccess"),
    "templates": tuple(
        f"template/{name}"
        for name in ("backgroundBuild", "build", "exists", "methods/makeSymlink", "methods/runCmd", "tags")
    ),
}

MOCKED = ("Template tags unit tests",)
"""Tests of the SDK alone, in files that are run: their answers are mocked at E2B's own address."""

# The tests' own configuration wants the source tree; this one wants the package. Only what it says about the tests'
# environment is kept: isolation between files, and the time that each test gets.
CONFIGURATION = """
import { createRequire } from 'node:module'
import { defineConfig } from 'vitest/config'
const sdk = createRequire(import.meta.url).resolve('e2b').replace(/\\.js$/, '.mjs')
export default defineConfig({
  plugins: [{
    name: 'the-released-sdk',
    enforce: 'pre',
    resolveId: (source) => (/^(\\.\\.\\/)+src(\\/.*)?$/.test(source) ? { id: sdk, external: true } : undefined),
  }],
  test: { include: ['tests/**/*.test.ts'], isolate: true, testTimeout: %(milliseconds)d, environment: 'node' },
})
"""

# What `me2b env` sets for https reaches Node.js before version 24 only through a dispatcher.
PROXY = """
import { createRequire } from 'node:module'
const { EnvHttpProxyAgent, setGlobalDispatcher } = createRequire(process.env.SUITE_MODULES + '/')('undici')
setGlobalDispatcher(new EnvHttpProxyAgent())
"""


def run_group(name: str, files: Sequence[str], directory: Path, environment: Mapping[str, str]) -> Group:
    """Run the files of one group; a file that cannot be loaded is a failed test."""
    output = directory / "results.json"
    output.unlink(missing_ok=True)
    milliseconds = 180_000 if name == "templates" else 30_000
    (directory / "vitest.config.mjs").write_text(CONFIGURATION % {"milliseconds": milliseconds})
    command = [
        "node_modules/.bin/vitest",
        "run",
        f"--maxWorkers={WORKERS}",
        "--reporter=json",
        f"--outputFile={output}",
    ]
    ended = subprocess.run(
        [*command, *(f"tests/{file}.test.ts" for file in files)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if not output.exists():
        return Group(name, [Test("vitest", "failed", (ended.stderr or ended.stdout).strip()[-400:])])
    return Group(name, outcomes(json.loads(output.read_text()), directory))


def outcomes(results: Mapping[str, list[dict[str, object]]], directory: Path) -> list[Test]:
    """The tests in what vitest's JSON reporter wrote."""
    found: list[Test] = []
    for file in results["testResults"]:
        where = str(Path(str(file["name"])).relative_to(directory.resolve() / "tests"))
        assertions = file["assertionResults"]
        assert isinstance(assertions, list)
        if not assertions:
            found.append(Test(where, "failed", str(file.get("message", "")).strip().splitlines()[0]))
        for one in assertions:
            if str(one["fullName"]).startswith(MOCKED):
                continue
            outcome = one["status"] if one["status"] in ("passed", "failed") else "skipped"
            reason = first_line(" ".join(one["failureMessages"]))
            found.append(Test(f"{where} > {one['fullName']}", outcome, reason))
    return found


def install(sdk: str = SDK) -> Path:
    """The modules of an environment with this release; made once."""
    return npm_environment("js", {"e2b": sdk, **TOOLS})


def run(wanted: Sequence[str], sdk: str = SDK) -> list[Group]:
    """Run these groups against a server of their own."""
    modules = install(sdk)
    with tempfile.TemporaryDirectory(prefix="me2b-js-") as temporary:
        checkout(["packages/js-sdk/tests", "packages/js-sdk/tsconfig.json"], Path(temporary))
        directory = Path(temporary) / "packages" / "js-sdk"
        (directory / "node_modules").symlink_to(modules)
        proxy = Path(temporary) / "proxy.mjs"
        proxy.write_text(PROXY)
        with mirror() as arguments, server(*arguments) as client:
            environment = clean() | client
            environment |= {"NODE_OPTIONS": f"--import={proxy}", "SUITE_MODULES": str(modules), "CI": "1"}
            return [run_group(name, GROUPS[name], directory, environment) for name in wanted]


if __name__ == "__main__":
    sys.exit(main_of(__doc__, "JavaScript", "npm", SDK, GROUPS, run))
