"""One update in two halves: the private one, De et al. (2022), Algorithm 1 and Eq. 3; and the ordinary one."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from sfumato.accounting.mechanism import Mechanism
from sfumato.clipping import GradFn
from sfumato.clipping.clip import at_least_float32
from sfumato.clipping.protocol import Speed
from sfumato.data.sampling import Shuffling, poisson_batch
from sfumato.data.views import Views, ViewWords
from sfumato.evaluation.scores import Objective
from sfumato.json_record import finite
from sfumato.randomness import Stream, Streams
from sfumato.run_folder.record import NormHistogram
from sfumato.training.noise import with_noise

# Edges are public and fixed, so that they say nothing of the images: ten to a decade, from C / 10^4
# to 10^4 C.
_PER_DECADE, _DECADES = 10, 4


@dataclasses.dataclass(frozen=True)
class Randomness:
    """The random bits of one update's sum; each is used for nothing else.

    The noise is not among them: it is drawn once the update is counted (`Draws.noise_key`).

    Attributes:
        indices: The sampled examples, shape (realised batch,). Sensitive.
        view_bits: Uniform words for the views of any example: a view depends on (example, view) alone.
        model_key: Of the random numbers inside the model, which it draws for each (example, view).
    """

    indices: np.ndarray
    view_bits: ViewWords
    model_key: bytes


@dataclasses.dataclass(frozen=True)
class Rows:
    """What gradients of single examples were like. Not private.

    Attributes:
        norms: (b,), before clipping; zeros of an ordinary step, which has none.
        losses: (b,).
    """

    norms: torch.Tensor
    losses: torch.Tensor


def all_of(count: int) -> slice:
    """The share of whoever works alone."""
    return slice(count)


class PrivateStep:
    """Computes ``private_grad``, the gradient that an optimizer may see.

    For the sampled examples i with views j, clipping norm C, noise multiplier sigma and
    expected batch size B,

    .. math::

        \\frac1B \\Big( \\sum_i \\tfrac1C \\mathrm{clip}_C\\big(\\tfrac1K \\sum_j
        \\nabla\\ell(x_{ij})\\big) + \\sigma\\xi \\Big).

    ``collect`` makes the inner sum, ``release`` the rest. Between the two the update is put on the
    ledger.

    Guarantee: with indices from ``poisson_batch`` and a fresh noise stream, T updates are T
    compositions of the Poisson-subsampled Gaussian mechanism of ``mechanism``, one
    example's contribution replaced by zero. B and q are its constants; nothing depends
    on how many examples were drawn, and an empty batch is an update like any other.

    Args:
        grad_fn: From ``clipped_grad``; states its own sensitivity.
        mechanism: The public numbers.
        views: How images become inputs and targets: `Views`.
    """

    def __init__(self, grad_fn: GradFn, mechanism: Mechanism, views: Views) -> None:
        self.grad_fn = grad_fn
        self.mechanism = mechanism
        self.views = views
        self.noise_stddev = mechanism.noise_multiplier * grad_fn.sensitivity

    def collect(
        self,
        examples: Any,
        parameters: Mapping[str, torch.Tensor],
        randomness: Randomness,
        share: Callable[[int], slice] = all_of,
    ) -> tuple[dict[str, torch.Tensor], Rows]:
        """``grad_sum``, which nobody may see, and what the gradients of the readable images were like.

        Args:
            examples: What ``views`` make inputs of: images, features or people.
            parameters: Of the model, by name.
            randomness: Of this update.
            share: Which of so many examples are added up here.
        """
        device = next(iter(parameters.values())).device
        drawn = torch.from_numpy(randomness.indices)
        drawn = drawn[examples.readable[drawn]]  # an unreadable image adds exactly zero; the divisor stays

        def load(indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.views.with_labels(examples, indices, randomness.view_bits, device)

        out = self.grad_fn.sum_over(load, drawn[share(len(drawn))], key=randomness.model_key)
        return out.grad_sum, Rows(out.grad_norms, out.losses)

    def release(self, grad_sum: torch.Tensor, noise: Stream, first: int = 0) -> torch.Tensor:
        """``private_grad``: noise added once, divided by the constant expected batch.

        Args:
            grad_sum: (n,): its coordinates from ``first`` on.
            noise: Of this update.
            first: A multiple of `sfumato.training.noise.BLOCK`.
        """
        noisy = with_noise(grad_sum, self.noise_stddev, noise, first) if self.noise_stddev > 0 else grad_sum
        return noisy / self.mechanism.batch_size

    def scaled(self, private_grad: torch.Tensor, total: Callable[[float], float]) -> torch.Tensor:
        """The same: each example's gradient was clipped."""
        return private_grad

    def statistics(self, rows: Rows, signal: float, num_parameters: int, with_norms: bool) -> dict[str, Any]:
        """Aggregates over the training images of one update, as `PrivateMetrics` has them: not private. What a diverged
        run has no finite number for is None.

        Args:
            rows: Of all of its examples.
            signal: The norm of the sum before noise.
            num_parameters: That have noise.
            with_norms: Whether a `norm_histogram` is asked for.
        """
        # In float64, which holds squares and sums of what float32 does: one image must not end the run.
        norm, loss = rows.norms.double(), rows.losses.double()
        noise = self.noise_stddev * num_parameters**0.5
        norms = norm_histogram(rows, self.grad_fn.clipping_norm, signal, noise) if with_norms else None
        is_finite = torch.isfinite(norm) & torch.isfinite(loss)
        if not is_finite.any():
            return {"loss": 0.0, "clipped_fraction": 0.0, "grad_norm": 0.0, "clipped_square": 0.0, "norms": norms}
        norm, loss = norm[is_finite], loss[is_finite]
        return {
            "loss": finite(float(loss.mean())),
            "clipped_fraction": float((norm > self.grad_fn.clipping_norm).double().mean()),
            "grad_norm": finite(float(norm.square().mean().sqrt())),
            "clipped_square": float((norm / self.grad_fn.clipping_norm).clamp(max=1).square().mean()),
            "norms": norms,
        }


class OrdinaryStep:
    """The mean gradient of a batch by plain autograd: no clipping per example, no noise.

    Args:
        max_grad_norm: If given, the mean gradient is scaled to at most this norm and then
            divided by it, as clipping does per example, so that a learning rate tuned
            for private updates keeps its meaning.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        views: Views,
        microbatch_size: int,
        max_grad_norm: float | None,
        speed: Speed,
    ) -> None:
        self.model: Any = torch.compile(model) if speed.compile else model
        self.precision, self.objective, self.views = speed.precision, objective, views
        self.microbatch_size, self.max_grad_norm = microbatch_size, max_grad_norm

    def collect(
        self,
        examples: Any,
        parameters: Mapping[str, torch.Tensor],
        randomness: Randomness,
        share: Callable[[int], slice] = all_of,
    ) -> tuple[dict[str, torch.Tensor], Rows]:
        """The share's part of the mean gradient of the readable images; there are no single examples' norms that could
        be added.
        """
        device = next(iter(parameters.values())).device
        drawn = torch.from_numpy(randomness.indices)
        drawn = drawn[examples.readable[drawn]]
        count = max(len(drawn), 1)
        gradient, losses = {name: torch.zeros_like(at_least_float32(value)) for name, value in parameters.items()}, []
        for indices in drawn[share(count)].split(self.microbatch_size):
            inputs, labels = self.views.with_labels(examples, indices, randomness.view_bits, device)
            views = max(self.views.augmult, 1)
            if self.views.augmult:
                inputs = inputs.flatten(0, 1)  # (b K, C, H, W)
                labels = labels.repeat_interleave(views, 0)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                outputs = self.model(inputs)
            of_views = self.objective.loss(outputs.to(inputs.dtype), labels)
            found = torch.autograd.grad(
                of_views.sum() / (count * views), list(parameters.values()), materialize_grads=True
            )
            for name, value in zip(parameters, found, strict=True):
                gradient[name] += value
            losses.append(of_views.detach().view(-1, views).mean(1))
        of_rows = torch.cat([torch.zeros(0, device=device), *losses])
        return gradient, Rows(torch.zeros_like(of_rows), of_rows)

    def release(self, gradient: torch.Tensor, noise: Stream, first: int = 0) -> torch.Tensor:
        """The same: nothing is added."""
        return gradient

    def scaled(self, gradient: torch.Tensor, total: Callable[[float], float]) -> torch.Tensor:
        """The gradient, no longer than ``max_grad_norm``, in its units.

        Args:
            gradient: A shard of it.
            total: Adds up over shards.
        """
        if self.max_grad_norm is None:
            return gradient
        norm = math.sqrt(total(float(gradient.square().sum())))
        return gradient * min(1 / self.max_grad_norm, 1 / max(norm, 1e-12))

    def statistics(self, rows: Rows, signal: float, num_parameters: int, with_norms: bool) -> dict[str, Any]:
        """Of one update, whose norm is that of the mean gradient."""
        loss = finite(float(rows.losses.double().mean()) if len(rows.losses) else 0.0)
        return {"loss": loss, "clipped_fraction": 0.0, "grad_norm": finite(signal), "clipped_square": 0.0}


def draw(indices: np.ndarray, views: Views, view: Stream, model: Stream) -> Randomness:
    """The sampled examples, the bits of their views, and the key of the random numbers inside the
    model.
    """
    return Randomness(indices, ViewWords(bytes(view.bytes(32)), views.augmult), bytes(model.bytes(32)))


def norm_histogram(rows: Rows, clipping_norm: float, signal: float, noise: float) -> NormHistogram:
    """How long the gradients of one update were before clipping (Sander et al. 2022, Figure 7). Not private.

    Args:
        rows: Of the examples that have a gradient.
        clipping_norm: C.
        signal: The norm of the sum of the clipped gradients, without noise.
        noise: That of the noise, in the same units, in the mean.
    """
    is_finite = torch.isfinite(rows.norms) & torch.isfinite(rows.losses)
    relative = rows.norms[is_finite].double() / clipping_norm
    edges = [10.0 ** (number / _PER_DECADE) for number in range(-_DECADES * _PER_DECADE, _DECADES * _PER_DECADE + 1)]
    counts = torch.bincount(
        torch.bucketize(relative, torch.tensor(edges, dtype=torch.float64)), minlength=len(edges) + 1
    )
    return NormHistogram(
        edges=edges,
        counts=counts.tolist(),
        not_finite=int((~is_finite).sum()),
        median=finite(float(relative.quantile(0.5))) if len(relative) else None,
        signal_to_noise=finite(signal / noise) if noise else None,
    )


class Draws:
    """Of one run.

    Guarantee: without a public seed every update has 256 fresh bits for its sample, views and dropout, and 256 others
    for its noise; nothing keeps them, so no two releases share any, whatever is repeated after a crash.

    Args:
        mechanism: The public numbers.
        views: How many views an image has.
        streams: Of the run.
    """

    def __init__(self, mechanism: Mechanism, views: Views, streams: Streams) -> None:
        self._mechanism, self._views, self._streams = mechanism, views, streams
        self._shuffling = Shuffling(mechanism.num_examples, lambda epoch: streams.stream("shuffling", epoch))

    def of_update(self, release: int) -> Randomness:
        """The sample of release number ``release``, the bits of its views and the key of what the model draws."""
        stream = self._streams.stream("sample", release)
        view, model = Stream(bytes(stream.bytes(32))), Stream(bytes(stream.bytes(32)))
        if self._mechanism.sampling == "poisson":
            indices = poisson_batch(self._mechanism, stream)
        else:  # an epoch's order belongs to many updates
            indices = self._shuffling.batch(self._mechanism.batch_size, release)
        return draw(indices, self._views, view, model)

    def noise_key(self, release: int) -> bytes:
        """Of the stream of an update's noise. Asked for once it is on the ledger."""
        return self._streams.key("noise", release)
