"""Docstrings name things as ``:class:`Name```, which editors understand; this turns it into Markdown for the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

PUBLIC = re.findall(
    r"^::: accumulate\.(\w+)$", Path(__file__).with_name("api.md").read_text(encoding="utf-8"), re.MULTILINE
)
_ROLE = re.compile(r":(?:class|func|meth|mod):`~?([\w.]+)`")


class Roles(griffe.Extension):
    """Links public names to their entry in the reference, and shows all others as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute as soon as it is read."""
        if obj.docstring:
            obj.docstring.value = _ROLE.sub(_link, obj.docstring.value)


def _link(match: re.Match[str]) -> str:
    name = match[1].removeprefix("accumulate.")
    return f"[`{name}`][accumulate.{name}]" if name in PUBLIC else f"`{name}`"
