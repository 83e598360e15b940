"""The troubleshooting page knows every message: the errors that the source raises, and the warnings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import accumulate
from docs.pages import ROOT

PACKAGE = Path(accumulate.__file__).parent
ERRORS = {"AccumulateError", "UnsupportedWrapperError", "WindowError"}
PAGE = " ".join((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").replace("`", "").split())
WORDS = 4
"""How many words of a message must be on the page."""
LEFT_OUT: dict[str, str] = {}
"""Beginnings of messages that the page need not have, each with the reason."""


def called(call: ast.Call) -> str:
    """The name of what is called, whatever module it is in."""
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def texts(node: ast.expr, functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """What an expression may be as text, with ``{}`` for each value; a call is what its function returns."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # type: ignore[misc]  # a JoinedStr's constants are text
    elif isinstance(node, ast.Call) and (name := called(node)) in functions:
        for inner in ast.walk(functions[name]):
            if isinstance(inner, ast.Return) and inner.value is not None:
                yield from texts(inner.value, functions)
    else:
        raise AssertionError(f"line {node.lineno}: this test cannot tell what {ast.unparse(node)} says")


def messages() -> Iterator[tuple[str, str]]:
    """Every message with the file that raises it."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
    functions = {node.name: node for _, node in nodes if isinstance(node, ast.FunctionDef)}
    for file, node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
            for text in texts(node.args[0], functions):
                yield file.name, text


def key(message: str) -> str:
    """The first words of the longest piece of the first sentence that no value interrupts."""
    pieces = re.split(r"\{\}\)?,?", re.split(r"\. |; ", message.replace("`", ""))[0])
    return " ".join(max(pieces, key=len).split()[:WORDS]).rstrip(":;,")


MESSAGES = sorted(set(messages()))


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 20


@pytest.mark.parametrize(("file", "message"), MESSAGES, ids=lambda value: value[:40])
def test_a_message_is_on_the_page_or_it_is_said_why_not(file: str, message: str) -> None:
    assert len(key(message).split()) >= 2, message
    assert key(message) in PAGE or any(message.startswith(start) for start in LEFT_OUT), f"{file}: {key(message)!r}"


def test_what_is_left_out_exists() -> None:
    assert [start for start in LEFT_OUT if not any(text.startswith(start) for _, text in MESSAGES)] == []


def rows(section: str) -> list[str]:
    """The messages in the tables of the page's sections whose heading contains the text."""
    sections = re.split(
        r"^##+ ", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    text = "".join(each for each in sections if section in each.partition("\n")[0])
    return [row.replace("`", "") for row in re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)]


def test_each_error_on_the_page_is_still_raised() -> None:
    keys = {key(message) for _, message in MESSAGES}
    shown = rows("Error`")
    assert len(shown) > 25
    assert [row for row in shown if not any(each in row for each in keys)] == []


def test_each_warning_on_the_page_is_still_given() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py")))
    shown = rows("Warnings")
    assert len(shown) > 3
    assert [row for row in shown if max(row.split("..."), key=len).strip()[:25] not in source] == []
