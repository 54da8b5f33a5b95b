"""Networks without cross-example operations, the registry that builds them by name, and the layers of one's own."""

from sfumato.models.layers import WeightStandardizedConv2d, fix_groupnorm
from sfumato.models.registry import build

__all__ = ["WeightStandardizedConv2d", "build", "fix_groupnorm"]
