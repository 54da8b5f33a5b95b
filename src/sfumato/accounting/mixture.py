"""One step's privacy loss where a person has several images: dp-accounting's mixture of Gaussians, inverted at all
points of the grid at once.
"""

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, MixtureGaussianPrivacyLoss

_BLOCK = 2**20  # numbers at once


def from_mixture(sigma: float, probs: Sequence[float], interval: float) -> PrivacyLossDistribution:
    """The library's ``from_mixture_gaussian_mechanism`` of sensitivities 0, 1, .., k, some ten times as fast."""
    return PrivacyLossDistribution(
        *(
            _pmf(_Loss(sigma, range(len(probs)), probs, adjacency_type=adjacency), interval)
            for adjacency in (AdjacencyType.REMOVE, AdjacencyType.ADD)
        )
    )


def _pmf(loss: MixtureGaussianPrivacyLoss, interval: float) -> pld_pmf.PLDPmf:
    """Connect-the-dots."""
    bounds = loss.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    deltas = loss.get_delta_for_epsilon(np.arange(low, high + 1) * interval)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas)


class _Loss(MixtureGaussianPrivacyLoss):
    def _inverse_privacy_losses_with_range(
        self, privacy_losses: np.ndarray, bounds: tuple[float, float], precision: float = 1e-6
    ) -> np.ndarray:
        """The same bisection, a round for all losses in place of a call for each middle.

        Returns:
            As there, for each loss: the smallest multiple of ``precision`` at which the loss is at most that.
        """
        low, high = np.full_like(privacy_losses, bounds[0]), np.full_like(privacy_losses, bounds[1])
        while True:
            middle = (low + high) / 2
            wide = (high - low > precision) & (low < middle) & (middle < high)  # far out no number lies between
            if not wide.any():
                return np.floor(high / precision) * precision
            points, of_each = np.unique(middle, return_inverse=True)
            above = self._losses(points)[of_each] > privacy_losses  # they fall as x grows
            low, high = np.where(wide & above, middle, low), np.where(wide & ~above, middle, high)

    def _losses(self, points: np.ndarray) -> np.ndarray:
        """``privacy_loss`` of each."""
        sign = 1 if self.adjacency_type == AdjacencyType.REMOVE else -1
        log_probs, rows = np.log(self.sampling_probs), max(1, _BLOCK // len(self.sensitivities))
        return sign * np.concatenate(
            [
                np.logaddexp.reduce(
                    log_probs + sign * self.privacy_loss_for_single_gaussian(block[:, None], self.sensitivities), axis=1
                )
                for block in np.split(points, range(rows, len(points), rows))
            ]
        )
