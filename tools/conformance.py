"""Everything that E2B publishes to use its service with, against the local server; one table at the end.

    make conformance        (or: python tools/conformance.py [--real-internet] [python] [python-old] [js] [cli])

Needs a clone of E2B's public repository in `E2B_REPO` for the suites (see suite.py), and Node.js for the last two.
Where root runs it, the internet is a stand-in (stand_in_internet.py) unless the real one is asked for. Exits with 1
when a test fails that docs/conformance.md does not name.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import cli_suite
import js_suite
import python_suite
import stand_in_internet
from suite import ROOT, Group, report, repository

OLD_SDK = "2.45.1"
"""The release that the suite of the public repository was written for."""


@dataclass(frozen=True)
class Run:
    """What is run: its name in the table, what installs it (and so needs the real internet), and what runs it."""

    title: str
    install: Callable[[], object]
    suite: Callable[[], list[Group]]


RUNS: Mapping[str, Run] = {
    "python": Run(
        f"Python SDK {python_suite.SDK}", python_suite.install, lambda: python_suite.run(list(python_suite.GROUPS))
    ),
    "python-old": Run(
        f"Python SDK {OLD_SDK}",
        lambda: python_suite.install(OLD_SDK),
        lambda: python_suite.run(list(python_suite.GROUPS), OLD_SDK),
    ),
    "js": Run(f"JavaScript SDK {js_suite.SDK}", js_suite.install, lambda: js_suite.run(list(js_suite.GROUPS))),
    "cli": Run(f"command line {cli_suite.CLI}", cli_suite.install, cli_suite.run),
}
INSTALLED = "--installed"


def unnamed(groups: Sequence[Group], document: str) -> list[str]:
    """The failures whose test the document does not name: a Python test by its name, any other by its whole title."""
    names = [test.name.rpartition("::")[2].rpartition(" > ")[2] for group in groups for test in group.failures]
    return [name for name in names if name.partition("[")[0] not in document]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of: {', '.join(RUNS)} (all)")
    parser.add_argument("--real-internet", action="store_true", help="not the stand-in that root gets")
    parser.add_argument(INSTALLED, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = options.runs or list(RUNS)
    if set(wanted) - set(RUNS):
        parser.error(f"no such run: {', '.join(sorted(set(wanted) - set(RUNS)))}")
    repository()
    if not options.installed:
        for key in wanted:
            RUNS[key].install()
        if not options.real_internet and stand_in_internet.possible():
            again = [sys.executable, stand_in_internet.__file__, sys.executable, __file__, INSTALLED, *wanted]
            return subprocess.run(again, check=False).returncode
    results: dict[str, list[Group]] = {}
    for run in (RUNS[key] for key in wanted):
        results[run.title] = run.suite()
        report(run.title, results[run.title])
    print(f"\n{table(results)}")
    document = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    new = [name for groups in results.values() for name in unnamed(groups, document)]
    for name in new:
        print(f"docs/conformance.md has no reason for: {name}")
    return 1 if new else 0


def table(results: Mapping[str, Sequence[Group]]) -> str:
    """Groups down, runs across, as docs/conformance.md has it."""
    names = list(dict.fromkeys(group.name for groups in results.values() for group in groups))
    lines = [f"| group | {' | '.join(results)} |", f"|---|{'---|' * len(results)}"]
    for name in names:
        found = [next((group for group in groups if group.name == name), None) for groups in results.values()]
        cells = [f"{group.passed} of {group.ran}" if group else "" for group in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    sums = [(sum(one.passed for one in groups), sum(one.ran for one in groups)) for groups in results.values()]
    lines.append(f"| **all** | {' | '.join(f'**{passed} of {ran}**' for passed, ran in sums)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
