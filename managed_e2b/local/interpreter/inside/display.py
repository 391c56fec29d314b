"""An extension of IPython: what the clients of the interpreter show of a value beyond text and pictures.

`e2b/data` is the columns of a pandas DataFrame, `e2b/chart` what a matplotlib figure shows, `application/json` a list
or a dict. A picture of Pillow's is shown when it is saved or shown, as there is no screen.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from IPython.core.formatters import BaseFormatter, JSONFormatter
from IPython.display import display
from traitlets.traitlets import ObjectName, Unicode


class DataFormatter(BaseFormatter):
    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = (dict, str)

    def __call__(self, obj: Any) -> Any:
        pandas = sys.modules.get("pandas")  # who has a DataFrame has imported it
        if pandas is None or not isinstance(obj, getattr(pandas, "DataFrame", ())):
            return super().__call__(obj)
        table: Any = obj
        return {str(name): [_cell(value) for value in column] for name, column in table.items()}


def _cell(value: Any) -> Any:
    """A value of a table in JSON: a missing one is null, a time ISO 8601, what JSON has no word for is text."""
    value = value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "isoformat"):
        return value.isoformat() if value == value else None  # NaT is unequal to itself
    try:
        return json.loads(json.dumps(value, default=_plain, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return str(value)


class ChartFormatter(BaseFormatter):
    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = (dict, str)

    def __call__(self, obj: Any) -> Any:
        figure = sys.modules.get("matplotlib.figure")
        if figure is None or not isinstance(obj, figure.Figure):
            return super().__call__(obj)
        try:
            from e2b_charts import chart_figure_to_dict  # type: ignore[import-untyped]
        except ImportError:
            return None
        try:
            return chart_figure_to_dict(obj)
        except Exception:  # noqa: BLE001 - a figure it cannot read is still a picture
            return {}


class PlainJSONFormatter(JSONFormatter):
    """Of a list or dict itself, where that can be said in JSON."""

    def __call__(self, obj: Any) -> Any:
        if isinstance(obj, list | dict):
            try:
                return json.loads(json.dumps(obj, default=_plain, allow_nan=False)), {"expanded": True}
            except (TypeError, ValueError, RecursionError):
                return None
        return super().__call__(obj)


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError


class _PillowWatch(MetaPathFinder):
    """Changes two modules of Pillow when they are imported: to import it for everybody would cost time."""

    def __init__(self) -> None:
        self._changes: dict[str, Callable[[ModuleType], None]] = {
            "PIL.Image": _show_when_saved,
            "PIL.ImageShow": _show_in_the_result,
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self._changes.pop(fullname, None)
        spec = None if change is None else importlib.util.find_spec(fullname)
        if change is None or spec is None or spec.loader is None:
            return None
        original = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _show_when_saved(image_module: Any) -> None:
    original = image_module.Image.save

    def save(image: Any, fp: Any, format: Any = None, **options: Any) -> None:
        if isinstance(fp, str):
            display(image)  # type: ignore[no-untyped-call]
        original(image, fp, format, **options)

    image_module.Image.save = save


def _show_in_the_result(show_module: Any) -> None:
    """There is no screen: what is left of its viewers is the one that shows pictures as results."""
    show_module._viewers[:] = [
        viewer for viewer in show_module._viewers if not isinstance(viewer, show_module.UnixViewer)
    ]


def load_ipython_extension(shell: Any) -> None:
    formatters = shell.display_formatter.formatters
    for formatter in (DataFormatter, ChartFormatter):
        made = formatter(parent=shell.display_formatter)
        formatters[made.format_type] = made
    formatters["application/json"] = PlainJSONFormatter(parent=shell.display_formatter)
    sys.meta_path.insert(0, _PillowWatch())
