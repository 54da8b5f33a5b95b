"""Scale and shift of group, layer, instance and RMS norm."""

from sfumato.clipping.rules.contribution import Rows
from sfumato.clipping.rules.generic import call
from sfumato.clipping.rules.meeting import Met


def affine(met: Met, slot: str) -> Rows:
    """Scale: the output's gradient times the normalised input; shift: the gradient; summed over positions."""
    product = met.example_grad()
    if slot == "weight":
        normalized = call(met.meeting.node, met.args | {"weight": None} | ({"bias": None} if "bias" in met.args else {}))
        product = product * met.meeting.out_layout.by_example(normalized, met.examples, met.views)
    shape = met.args[slot].shape
    if met.meeting.operation in ("layer_norm", "rms_norm"):  # the last dimensions
        return Rows(product.flatten(1, -1 - len(shape)).sum(dim=1))
    return Rows(product.flatten(3).sum(dim=(1, 3)) if product.ndim > 3 else product.sum(dim=1))  # (m, rows, C, *size)
