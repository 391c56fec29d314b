"""Everything that E2B publishes to use its service with, against the local server; one table at the end.

    make conformance        (or: python tools/conformance.py [python] [python-old] [js] [cli])

Needs a clone of E2B's public repository in `E2B_REPO` for the two suites, and Node.js for the last two; see suite.py.
Exits with 1 when a test fails that docs/conformance.md does not name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

import cli_suite
import js_suite
import python_suite
from suite import ROOT, Group, report

OLD_SDK = "2.45.1"
"""The release that the suite of the public repository was written for."""

RUNS: Mapping[str, tuple[str, Callable[[], list[Group]]]] = {
    "python": (f"Python SDK {python_suite.SDK}", lambda: python_suite.run(list(python_suite.GROUPS))),
    "python-old": (f"Python SDK {OLD_SDK}", lambda: python_suite.run(list(python_suite.GROUPS), OLD_SDK)),
    "js": (f"JavaScript SDK {js_suite.SDK}", lambda: js_suite.run(list(js_suite.GROUPS))),
    "cli": (f"command line {cli_suite.CLI}", cli_suite.run),
}


def unnamed(groups: Sequence[Group], document: str) -> list[str]:
    """The failures whose test the document does not name: a Python test by its name, any other by its whole title."""
    names = [test.name.rpartition("::")[2].rpartition(" > ")[2] for group in groups for test in group.failures]
    return [name for name in names if name.partition("[")[0] not in document]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of: {', '.join(RUNS)} (all)")
    wanted = parser.parse_args().runs or list(RUNS)
    if set(wanted) - set(RUNS):
        parser.error(f"no such run: {', '.join(sorted(set(wanted) - set(RUNS)))}")
    results: dict[str, list[Group]] = {}
    for key in wanted:
        title, suite = RUNS[key]
        results[title] = suite()
        report(title, results[title])
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
