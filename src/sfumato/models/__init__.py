"""Networks without cross-example operations, and the registry that builds them by name."""

from sfumato.models.registry import build

__all__ = ["build"]
