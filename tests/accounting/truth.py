"""Truths that share nothing with the package: multi-precision integrals, closed forms, a numerically inverted
transform.
"""

import math

import mpmath
import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_ndtr


def rdp(sampling_prob: float, noise_multiplier: float, order: float) -> float:
    """Renyi divergence of one step of the Poisson-subsampled Gaussian, by Gauss-Legendre in 40 digits."""
    with mpmath.workdps(40):
        q, sigma, alpha = mpmath.mpf(sampling_prob), mpmath.mpf(noise_multiplier), mpmath.mpf(order)

        def integrand(z):
            return mpmath.npdf(z) * (1 - q + q * mpmath.exp(z / sigma - 1 / (2 * sigma**2))) ** alpha

        last = int(order / noise_multiplier) + 15
        panels = mpmath.linspace(-15, last, (last + 15) // 2 + 1)
        moment, error = mpmath.quad(integrand, panels, method="gauss-legendre", maxdegree=5, error=True)
        assert error < 1e-12 * (moment - 1)
        return float(mpmath.log(moment) / (alpha - 1))


def epsilon_rdp(sampling_prob: float, noise_multiplier: float, num_steps: int, delta: float, order: float) -> float:
    """The improved conversion at one order."""
    divergence = num_steps * rdp(sampling_prob, noise_multiplier, order)
    return divergence + math.log(1 - 1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def delta_of_one_step(sampling_prob: float, noise_multiplier: float, epsilon: float) -> float:
    """Closed form at T = 1: the hockey-stick divergence of (1-q) N(0, s^2) + q N(1, s^2) from N(0, s^2), the larger
    direction.
    """
    q, sigma = sampling_prob, noise_multiplier
    if q < 1 and math.exp(epsilon) <= 1 - q:
        return 1 - math.exp(epsilon)
    threshold = sigma**2 * math.log((math.expm1(epsilon) + q) / q) + 0.5  # where the ratio is e^epsilon
    return q * math.exp(log_ndtr((1 - threshold) / sigma)) - (math.expm1(epsilon) + q) * math.exp(
        log_ndtr(-threshold / sigma)
    )


def epsilon_of_one_step(sampling_prob: float, noise_multiplier: float, delta: float) -> float:
    if delta_of_one_step(sampling_prob, noise_multiplier, 0.0) <= delta:
        return 0.0
    return brentq(lambda e: delta_of_one_step(sampling_prob, noise_multiplier, e) - delta, 0.0, 500.0, xtol=1e-13)


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """Balle and Wang 2018, in 40 digits."""
    with mpmath.workdps(40):

        def excess(epsilon):
            others = mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
            return mpmath.ncdf(mu / 2 - epsilon / mu) - others - delta

        if excess(mpmath.mpf(0)) <= 0:
            return 0.0
        above = mu**2 / 2 + mu * math.sqrt(-2 * math.log(delta))
        tries = {"solver": "illinois", "tol": 1e-15 * delta, "maxsteps": 500, "verify": False}
        return float(mpmath.findroot(excess, (0, above), **tries))


def epsilon(
    sampling_prob: float,
    noise_multiplier: float,
    num_steps: int,
    delta: float,
    images: int = 1,
    whole_mu: float = 0.0,
) -> float:
    """Tight epsilon by inverting the transform of the privacy loss along a line through the saddle point.

    With L the composed loss and M(s) = E[exp(s L)], for any c > 0

        delta(epsilon) = E[(1 - exp(epsilon - L))_+] = 1/(2 pi i) int_{c - i inf}^{c + i inf} exp(-s epsilon) M(s) / (s
        (s + 1)) ds.

    M is one step's to the power of T; one step's is an integral over the output. Gaussian steps beside them, with
    sensitivity / noise = mu, have the loss N(mu^2 / 2, mu^2), so M is multiplied by exp(s (s + 1) mu^2 / 2).
    """
    return epsilon_of_unlike([(sampling_prob, noise_multiplier, num_steps)], delta, images, whole_mu)


def epsilon_of_unlike(parts, delta: float, images: int = 1, whole_mu: float = 0.0) -> float:
    """Tight epsilon of steps of several kinds (q, sigma, T) together: their transforms are multiplied."""
    return max(_Inversion(parts, delta, images, add, whole_mu).epsilon() for add in (False, True))


class _Steps:
    """The loss of one step of a kind, in one direction, taken T times."""

    def __init__(self, q, sigma, num_steps, images, add):
        self.num_steps = num_steps
        x, self.dx = np.linspace(-14 * sigma, images + 14 * sigma, 2001, retstep=True)
        i = np.arange(images + 1)[:, None]
        weights = np.array([math.comb(images, k) * q**k * (1 - q) ** (images - k) for k in range(images + 1)])[:, None]
        # log(mu / mu_0) = log1p(sum of weights * expm1), for the digits of small q
        exponent = (i * x - i**2 / 2) / sigma**2
        peak = exponent.max(axis=0)
        ratio = np.where(
            peak < 1,
            np.log1p((weights * np.expm1(np.minimum(exponent, 1))).sum(0)),
            np.log((weights * np.exp(exponent - peak)).sum(0)) + peak,
        )
        log_density = -0.5 * (x / sigma) ** 2 - math.log(sigma * math.sqrt(2 * math.pi))
        self.loss, self.log_density = (-ratio, log_density) if add else (ratio, log_density + ratio)

    def log_moments(self, c, frequencies):
        """At c + i w for equally spaced w: from one to the next by a product, which takes less than exp."""
        exponent = complex(c, frequencies[0]) * self.loss + self.log_density
        peak = exponent.real.max()
        terms, turn = np.exp(exponent - peak), np.exp(1j * (frequencies[-1] - frequencies[-2]) * self.loss)
        sums = np.empty(len(frequencies), dtype=complex)
        for place in range(len(frequencies)):
            sums[place] = terms.sum()
            terms *= turn
        return self.num_steps * (np.log(sums * self.dx) + peak)

    def variance(self, c):
        weight = c * self.loss + self.log_density
        weight = np.exp(weight - weight.max())
        mean = np.average(self.loss, weights=weight)
        return self.num_steps * np.average((self.loss - mean) ** 2, weights=weight)


class _Inversion:
    def __init__(self, parts, delta, images, add, whole_mu):
        self.delta, self.whole_mu = delta, whole_mu
        self.parts = [_Steps(*part, images, add) for part in parts]

    def log_moments_of_all(self, c, frequencies):
        s = c + 1j * frequencies
        return sum(part.log_moments(c, frequencies) for part in self.parts) + s * (s + 1) * self.whole_mu**2 / 2

    def epsilon(self):
        log_delta = math.log(self.delta)

        def chernoff(log_c):  # of the tail P(L > epsilon) = delta: a bound on epsilon, and a line near the saddle
            c = math.exp(log_c)
            return (self.log_moments_of_all(c, np.zeros(2))[0].real - log_delta) / c

        found = minimize_scalar(chernoff, bounds=(-7, 16), method="bounded")
        c, bound = math.exp(found.x), found.fun
        spread = math.sqrt(max(1e-300, self.whole_mu**2 + sum(part.variance(c) for part in self.parts)))
        # Step: the sum over frequencies repeats with period 2 pi / step in the loss; 40 deviations (and the weight's
        # 1/c) apart nothing is left.
        step = 2 * math.pi / (60 * spread + 60 / min(c, 1.0))
        frequencies, log_moments, k = [], [], 0
        while k <= 60_000 and not (k and np.max(np.real(log_moments[-1])) < np.real(log_moments[0][0]) - 40):
            frequencies.append(step * np.arange(k, k + 256))
            log_moments.append(self.log_moments_of_all(c, frequencies[-1]))
            k += 256
        s = c + 1j * np.concatenate(frequencies)
        log_terms = np.concatenate(log_moments) - np.log(s * (s + 1))

        def excess(epsilon):
            terms = np.exp(log_terms - s * epsilon).real
            return step / math.pi * (terms.sum() - terms[0] / 2) - self.delta

        assert excess(bound) <= 0 and k <= 60_000, "this setting is beyond the method"
        # From the bound down, since digits cancel far from the saddle.
        high = low = bound
        while low > 0 and excess(low) <= 0:
            high, low = low, max(0.0, low - 1 / c)
        return brentq(excess, low, high, xtol=1e-13) if excess(low) > 0 else 0.0
