"""Sums of clipped per-example gradients, and the check that they exist.

To understand them read `reference.py` first: one image after another, by plain autograd. `clip.py` is the clipping
itself. `grad_fn.py` is the door to all engines, with the one loop over microbatches; `prepared.py` settles an engine
before the first image, and `engine_check.py` holds it to single images; `graph/` is the fast one.
"""

from sfumato.clipping.grad_fn import GradFn, clipped_grad
from sfumato.clipping.model_check import Finding, findings, require_private
from sfumato.clipping.protocol import ClippedGrad
from sfumato.models.layers import fix_groupnorm

__all__ = ["ClippedGrad", "Finding", "GradFn", "clipped_grad", "findings", "fix_groupnorm", "require_private"]
