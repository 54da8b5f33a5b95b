"""Sums of clipped per-example gradients, and the checks that they exist."""

from sfumato.clipping.checks import Finding, findings, require_private
from sfumato.clipping.clipped_grad import ClippedGrad, GradFn, clipped_grad
from sfumato.clipping.groupnorm_fix import fix_groupnorm

__all__ = ["ClippedGrad", "Finding", "GradFn", "clipped_grad", "findings", "fix_groupnorm", "require_private"]
