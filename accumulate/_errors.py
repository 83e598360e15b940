"""The errors of this library, so that one ``except`` catches what the library raises about itself.

    AccumulateError
    ├── UnsupportedWrapperError   also a TypeError: this wrapper, or this option of it, cannot be steered
    └── WindowError               also a RuntimeError: calls in an order that would lose or mix gradients

Arguments that are wrong in themselves raise the builtin ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

__all__ = ["AccumulateError", "UnsupportedWrapperError", "WindowError"]


class AccumulateError(Exception):
    """Gradients would be wrong, so nothing was updated; the message says what to do."""


class UnsupportedWrapperError(AccumulateError, TypeError):
    """A wrapper whose reduction cannot be steered is refused by its name."""


class WindowError(AccumulateError, RuntimeError):
    """A call came at a point of the window where it would lose, mix or miscount gradients."""
