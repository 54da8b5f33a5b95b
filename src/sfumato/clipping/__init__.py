"""Sums of clipped per-example gradients, and the checks that they exist.

To understand them read `reference.py` first: one image after another, by plain autograd.
`coefficient.py` is the clipping itself. `clipped_grad.py` is the door to all engines, with the one
loop over microbatches; `preparation.py` settles an engine before the first image; `graph/` is the
fast one. `law.py` and `comparison.py` hold model and engine to what they promise.
"""

from sfumato.clipping.checks import Finding, findings, require_private
from sfumato.clipping.clipped_grad import ClippedGrad, GradFn, clipped_grad
from sfumato.clipping.loss_promise import pure
from sfumato.models.groupnorm_fix import fix_groupnorm

__all__ = [
    "ClippedGrad",
    "Finding",
    "GradFn",
    "clipped_grad",
    "findings",
    "fix_groupnorm",
    "pure",
    "require_private",
]
