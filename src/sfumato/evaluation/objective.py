"""The loss of one row, and the decision, where class proportions are public."""

import dataclasses

import torch
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Objective:
    """Cross-entropy, adjusted by public class proportions where they are given.

    Privacy noise costs the smaller class first. With proportions p the loss sees
    outputs + log p, so that the outputs themselves score balanced classes, and the
    decision subtracts log p once more (docs/imbalance.md has the measurements).

    Attributes:
        class_proportions: Public, positive, one a class; None: plain cross-entropy.
        label_smoothing: Share of each label that is spread evenly over all classes (Szegedy et al.
            2016).
    """

    class_proportions: tuple[float, ...] | None = None
    label_smoothing: float = 0.0

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One loss per row: (rows, classes), (rows,) -> (rows,)."""
        if self.class_proportions is not None:
            outputs = outputs + _log_prior(self.class_proportions, outputs)
        return F.cross_entropy(outputs, labels, reduction="none", label_smoothing=self.label_smoothing)

    def decision_logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """What the decision takes the largest of: (rows, classes)."""
        return outputs if self.class_proportions is None else outputs - _log_prior(self.class_proportions, outputs)

    @property
    def offsets(self) -> list[float] | None:
        """By which the loss's outputs differ from what the decision takes the largest of, a class each;
        None: they do not differ. Probabilities are of the classes as often as they are.
        """
        if self.class_proportions is None:
            return None
        return (2 * _log_prior(self.class_proportions, torch.zeros(0, dtype=torch.float64))).tolist()


def _log_prior(class_proportions: tuple[float, ...], outputs: torch.Tensor) -> torch.Tensor:
    shares = torch.tensor(class_proportions, dtype=outputs.dtype, device=outputs.device)
    return torch.log(shares / shares.mean())
