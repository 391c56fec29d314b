"""docs/crash-table.md: every row names the tests that prove it, and these exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "crash-table.md").read_text(encoding="utf-8")
COLUMNS = 5


def rows() -> list[list[str]]:
    """The cells of every row of every table, heads left out."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {index - 1 for index, row in enumerate(cells) if set("".join(row)) == {"-"}}
    return [row for index, row in enumerate(cells) if index not in heads and index - 1 not in heads]


ROWS = rows()


@functools.cache
def functions(file: str) -> frozenset[str]:
    """The tests in a file: at its top, or in a class of it."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    found = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(node.name for node in found)


def test_the_page_has_its_tables() -> None:
    assert len(re.findall(r"^## ", PAGE, re.M)) - 1 == PAGE.count("| shown by |")
    assert len(ROWS) > 40


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_every_row_is_whole_and_names_tests_that_exist(row: list[str]) -> None:
    assert len(row) == COLUMNS
    assert all(row), "a cell is empty"
    for named in row[-1].split(", "):
        file, _, function = named.partition("::")
        assert function.startswith("test_"), named
        assert (ROOT / file).is_file(), named
        assert function in functions(file), named
