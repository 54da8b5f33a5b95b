"""Many private models at once, each with its own key: what the product's own run with that key gives.

Sampler, noise and divisor are the product's. The clipped sums are computed for several models at once
(`sfumato.clipping.stacked`; with views of each image, `sfumato.clipping.functional`), so they are held
to the product's own `PrivateStep.collect` while the models train.
"""

import copy
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing.problem import Problem, Target
from sfumato.clipping import clipped_grad
from sfumato.clipping.functional import clipped_sum
from sfumato.clipping.stacked import Stacked
from sfumato.data.images import ImageSet
from sfumato.data.sampling import poisson_batch
from sfumato.data.views import Views
from sfumato.randomness import Streams
from sfumato.training.step import PrivateStep, Randomness, draw

PADDING = 4
"""Pixels by which a view is moved at most, where there are views."""
_EXAMPLES_AT_ONCE = 128
"""Of all models that are computed together: more leave a core's cache, and take longer each."""
_COLUMNS_KEPT = 2000
"""Of at most so many images what the first layer multiplies is kept: 78 KB each for LeNet."""
_CLOSE = 0.02
"""The sums of one update, computed in two ways in float32, differ by at most this share of their norm."""


class Stopped(Exception):
    """Whoever asked for the models no longer waits for them."""


class Product:
    """The product's own clipped gradient of one network, for one thread at a time.

    Args:
        network: Its parameters are where every model begins; it is copied.
        clipping_norm: C.
        augmult: K, views of each image; 0: the image as it is.
    """

    def __init__(self, network: nn.Sequential, clipping_norm: float, augmult: int = 0) -> None:
        self.network, self.augmult = copy.deepcopy(network), augmult
        self.begin = {name: value.detach().clone() for name, value in network.named_parameters()}
        self.grad_fn = clipped_grad(self.network, cross_entropy, clipping_norm=clipping_norm, augmult=augmult)
        self.views = Views("crop" if augmult else "none", augmult, PADDING if augmult else 0)
        self._alone = threading.Lock()

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.begin.values())).dtype

    def prepare(self, images: ImageSet) -> None:
        """Settles the engine, which no other thread may compute beside."""
        first = torch.tensor([0])
        bits = np.zeros((1, self.augmult), dtype=np.uint32)
        examples = _OfType(self.views, self.dtype).with_labels(images, first, bits, torch.device("cpu"))
        self.grad_fn.prepare(*examples)

    def step(self, mechanism: Mechanism) -> PrivateStep:
        return PrivateStep(self.grad_fn, mechanism, _OfType(self.views, self.dtype))

    def collect(
        self, step: PrivateStep, parameters: Mapping[str, torch.Tensor], images: ImageSet, randomness: Randomness
    ) -> dict[str, torch.Tensor]:
        """The sum at these parameters, by the product's step."""
        with self._alone, torch.no_grad():
            for name, value in self.network.named_parameters():
                value.copy_(parameters[name])
            return step.collect(images, parameters, randomness)[0]


class Models:
    """All models of one setting.

    Args:
        problem: D and z.
        target: Which z.
        product: Of the network and the clipping norm.
        mechanism: N counts z.
        learning_rate: Of plain SGD.
        fixed_batches: (b,) indices for each step, the same for all models; None: each model draws
            Poisson batches from its own key.
        stopped: Once it is set, `train` raises `Stopped`.
    """

    def __init__(
        self,
        problem: Problem,
        target: Target,
        product: Product,
        mechanism: Mechanism,
        *,
        learning_rate: float,
        fixed_batches: Sequence[np.ndarray] | None = None,
        stopped: threading.Event | None = None,
    ) -> None:
        self.mechanism, self._product, self._views = mechanism, product, product.views
        self._learning_rate, self._fixed_batches, self._stopped = learning_rate, fixed_batches, stopped
        self._images = {took: problem.with_target(target, takes_part=took) for took in (False, True)}
        self._stacked = Stacked(product.network)
        images = self._images[True]
        self._columns = None
        if not product.augmult and len(images) <= _COLUMNS_KEPT:
            self._columns = self._stacked.columns(self._batch(torch.arange(len(images))))
        self.step = product.step(mechanism)

    @property
    def at_once(self) -> int:
        """Models that are best computed together."""
        return max(1, _EXAMPLES_AT_ONCE // (self.mechanism.batch_size * max(1, self._views.augmult)))

    def train(
        self, keys: Sequence[bytes], takes_part: Sequence[bool], tell: Callable[[int], None] = lambda count: None
    ) -> dict[str, torch.Tensor]:
        """Parameters after all updates: name -> (M, ...).

        Args:
            keys: One for each model. All its randomness follows from it.
            takes_part: Whether z takes part in its training.
            tell: Is given the number of updates that were just taken.
        """
        streams = [Streams(key, {}, {}) for key in keys]
        parameters = {
            name: value.expand(len(keys), *value.shape).clone() for name, value in self._product.begin.items()
        }
        # Which update of which model is computed a second time follows from a key, so it is the same
        # when the audit goes on after an interrupt.
        word = int(streams[0].stream("check").uint64(1)[0])
        checked = word % len(keys), 1 + word // len(keys) % self.mechanism.num_steps
        for number in range(1, self.mechanism.num_steps + 1):
            if self._stopped is not None and self._stopped.is_set():
                raise Stopped
            drawn = [self._draw(each, number) for each in streams]
            rows = [
                each.indices[self._images[took].readable.numpy()[each.indices]]
                for each, took in zip(drawn, takes_part, strict=True)
            ]
            sums = self._clipped_sums(parameters, drawn, rows)
            if number == checked[1]:
                self._check(parameters, sums, drawn, takes_part, checked[0])
            for model, each in enumerate(streams):
                own = {name: value[model] for name, value in sums.items()}
                for name, grad in self.step.release(own, each.stream("noise", number)).items():
                    parameters[name][model] -= self._learning_rate * grad
            tell(len(keys))
        return parameters

    def losses(self, parameters: Mapping[str, torch.Tensor]) -> list[float]:
        """On z, of each model."""
        last = torch.tensor([len(self._images[True]) - 1])
        count = len(next(iter(parameters.values())))
        columns = self._stacked.columns(self._batch(last)).expand(count, 1, -1, -1)
        labels = self._images[True].labels[last].expand(count, 1)
        return self._stacked.losses(parameters, columns, labels)[:, 0].tolist()

    def trained_losses(
        self, keys: Sequence[bytes], takes_part: Sequence[bool], tell: Callable[[int], None] = lambda count: None
    ) -> list[float]:
        """The loss on z of each model, trained: of any number of models, a few at a time.

        Args:
            keys, takes_part: As in `train`.
            tell: Is given the number of updates that were just taken.
        """
        found = []
        for first in range(0, len(keys), self.at_once):
            part = slice(first, first + self.at_once)
            found += self.losses(self.train(keys[part], takes_part[part], tell))
        return found

    def _draw(self, streams: Streams, number: int) -> Randomness:
        indices = (
            poisson_batch(self.mechanism, streams.stream("sampling", number))
            if self._fixed_batches is None
            else self._fixed_batches[number - 1]
        )
        view, model = (
            streams.stream(purpose, number) for purpose in ("augmentation", "random numbers inside the model")
        )
        return draw(self.mechanism, indices, self._views, view, model)

    def _batch(self, rows: torch.Tensor) -> torch.Tensor:
        return self._images[True].batch(rows.flatten()).to(self._product.dtype)

    def _clipped_sums(
        self, parameters: dict[str, torch.Tensor], drawn: Sequence[Randomness], rows: Sequence[np.ndarray]
    ) -> dict[str, torch.Tensor]:
        """Name -> (M, ...). Rows of shorter batches are filled up with an example that does not count."""
        longest = max(len(each) for each in rows)
        filled = torch.zeros(len(rows), longest, dtype=torch.int64)
        is_real = torch.zeros(len(rows), longest, dtype=torch.bool)
        for model, each in enumerate(rows):
            filled[model, : len(each)] = torch.from_numpy(each)
            is_real[model, : len(each)] = True
        sums = {name: torch.zeros_like(value) for name, value in parameters.items()}
        passes = max(1, round(len(rows) * longest / _EXAMPLES_AT_ONCE))
        size = max(1, math.ceil(longest / passes))  # no pass for the few rows that a batch is longer than B
        for first in range(0, longest, size):
            part = slice(first, first + size)
            of_part = self._views_sum if self._views.augmult else self._stacked_sum
            for name, value in of_part(parameters, drawn, filled[:, part], is_real[:, part]).items():
                sums[name] += value
        return sums

    def _stacked_sum(
        self,
        parameters: dict[str, torch.Tensor],
        drawn: Sequence[Randomness],
        rows: torch.Tensor,
        is_real: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        if self._columns is None:
            columns = self._stacked.columns(self._batch(rows)).unflatten(0, rows.shape)
        else:
            columns = self._columns.index_select(0, rows.flatten()).unflatten(0, rows.shape)
        labels = self._images[True].labels[rows]
        return self._stacked.clipped_sum(
            parameters, columns, labels, is_real, clipping_norm=self._product.grad_fn.clipping_norm
        )

    def _views_sum(
        self,
        parameters: dict[str, torch.Tensor],
        drawn: Sequence[Randomness],
        rows: torch.Tensor,
        is_real: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        device = torch.device("cpu")
        made = [
            self._views.with_labels(self._images[True], own, each.view_bits, device)
            for own, each in zip(rows, drawn, strict=True)
        ]
        inputs = torch.stack([views for views, _ in made]).to(self._product.dtype)  # (M, b, K, C, H, W)
        labels = torch.stack([labels for _, labels in made])

        def of_model(
            parameters: dict[str, torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor, is_real: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            return clipped_sum(
                parameters,
                self._product.network,
                cross_entropy,
                inputs,
                (labels,),
                is_real,
                clipping_norm=self._product.grad_fn.clipping_norm,
                augmult=self._views.augmult,
            )

        return torch.func.vmap(of_model)(parameters, inputs, labels, is_real)

    def _check(
        self,
        parameters: dict[str, torch.Tensor],
        sums: dict[str, torch.Tensor],
        drawn: Sequence[Randomness],
        takes_part: Sequence[bool],
        model: int,
    ) -> None:
        """Holds one update of one model to the product's own step.

        Raises:
            RuntimeError: If they differ: then nothing that is audited here is the product's.
        """
        own = {name: value[model] for name, value in parameters.items()}
        took, randomness = takes_part[model], drawn[model]
        true = self._product.collect(self.step, own, self._images[took], randomness)
        share = _share_of_difference({name: value[model] for name, value in sums.items()}, true)
        if share > _CLOSE:
            # A pixel of a feature map that is nearly zero may round to either side of a kink; in float64 none does.
            share = self._difference_in_float64(own, took, randomness)
        if not share <= _CLOSE:
            raise RuntimeError(
                f"the clipped sum of models side by side differs from that of the product's step by {share:.3g} of its "
                "norm, or of C: one of the two is wrong"
            )

    def _difference_in_float64(self, parameters: dict[str, torch.Tensor], took: bool, randomness: Randomness) -> float:
        """Of one update of one model, as a share of the sum's norm."""
        precise, own = copy.copy(self), {name: value.double() for name, value in parameters.items()}
        product = Product(
            copy.deepcopy(self._product.network).double(), self._product.grad_fn.clipping_norm, self._product.augmult
        )
        product.prepare(self._images[took])
        precise._product, precise._stacked, precise._columns = product, Stacked(product.network), None
        rows = randomness.indices[self._images[took].readable.numpy()[randomness.indices]]
        sums = precise._clipped_sums({name: value[None] for name, value in own.items()}, [randomness], [rows])
        true = product.collect(product.step(self.mechanism), own, self._images[took], randomness)
        return _share_of_difference({name: value[0] for name, value in sums.items()}, true)


def _share_of_difference(sums: Mapping[str, torch.Tensor], true: Mapping[str, torch.Tensor]) -> float:
    difference = sum(float((sums[name] - value).square().sum()) for name, value in true.items()) ** 0.5
    size = sum(float(value.square().sum()) for value in true.values()) ** 0.5
    return difference / max(1.0, size)


def cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


class _OfType:
    """Views in the type that the network computes in."""

    def __init__(self, views: Views, dtype: torch.dtype) -> None:
        self._views, self._dtype = views, dtype

    def with_labels(
        self, examples: Any, indices: torch.Tensor, view_bits: np.ndarray, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = self._views.with_labels(examples, indices, view_bits, device)
        return inputs.to(self._dtype), labels
