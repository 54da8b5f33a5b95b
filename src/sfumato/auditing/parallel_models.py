"""Many private models at once, each with its own key: what the product's own run with that key gives.

Sampler, noise and divisor are the product's. The clipped sums are computed for several models at once
(`sfumato.clipping.stacked`; with views of each image, `sfumato.clipping.func`).
"""

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn

from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing.toy_task import Setting, ToyTask
from sfumato.clipping import clipped_grad
from sfumato.clipping.func import clipped_sum
from sfumato.clipping.stacked import Stacked
from sfumato.data.images import on_device
from sfumato.data.sampling import poisson_batch
from sfumato.data.views import Views
from sfumato.randomness import Stream, derived
from sfumato.training.step import PrivateStep, Randomness, draw

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")

_PADDING = 4
"""Pixels by which a view is moved at most, where there are views."""
_EXAMPLES_AT_ONCE = {"cpu": 128, "cuda": 2**13}
"""Of all models that are computed together: more leave a core's cache and take longer each, or fill a GPU's memory."""
_LEAST_MODELS = {"cpu": 1, "cuda": 512}
"""That are trained together; a GPU is at its best with many."""


class Stopped(Exception):
    """Whoever asked for the models no longer waits for them."""


class Models:
    """All models of one setting.

    Args:
        task: D and z.
        setting: Which z, C, and the learning rate of plain SGD.
        network: Its parameters are where every model begins.
        mechanism: N counts z.
        augmult: K, views of each image; 0: the image as it is.
        fixed_batches: (b,) indices for each step, the same for all models; None: each model draws
            Poisson batches from its own key.
        stopped: Once it is set, `train` raises `Stopped`.
        device: Where sums are computed; noise is drawn on the CPU, as for every run.
    """

    def __init__(
        self,
        task: ToyTask,
        setting: Setting,
        network: nn.Sequential,
        mechanism: Mechanism,
        augmult: int = 0,
        fixed_batches: Sequence[np.ndarray] | None = None,
        stopped: threading.Event | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.mechanism, self._network, self._learning_rate = mechanism, network, setting.learning_rate
        self._fixed_batches, self._stopped, self._device = fixed_batches, stopped, device
        self._begin = {name: value.detach().to(device) for name, value in network.named_parameters()}
        self._sizes = [value.numel() for value in self._begin.values()]
        self._dtype = next(iter(self._begin.values())).dtype
        self.views = Views("crop" if augmult else "none", augmult, _PADDING if augmult else 0)
        grad_fn = clipped_grad(network, cross_entropy, clipping_norm=setting.clipping_norm, augmult=augmult)
        self.step = PrivateStep(grad_fn, mechanism, self.views)
        # z is among the images of both; where it takes no part, it is unreadable.
        self._images = task.with_target(setting.target)
        self._labels = self._images.labels.to(device)
        self._stacked = Stacked(network)

    def train(self, keys: Sequence[bytes], takes_part: Sequence[bool]) -> Tensors:
        """Parameters after all updates: name -> (M, ...).

        Args:
            keys: One for each model. All its randomness follows from it.
            takes_part: Whether z takes part in its training.
        """
        parameters = {name: value.expand(len(keys), *value.shape).clone() for name, value in self._begin.items()}
        readable, last = self._images.readable.numpy(), len(self._images) - 1
        for number in range(1, self.mechanism.num_steps + 1):
            if self._stopped is not None and self._stopped.is_set():
                raise Stopped
            drawn = [self._draw(key, number) for key in keys]
            rows = [
                each.indices[readable[each.indices] & (took | (each.indices != last))]
                for each, took in zip(drawn, takes_part, strict=True)
            ]
            sums = self._clipped_sums(parameters, drawn, rows)
            flat = torch.cat([value.flatten(1) for value in sums.values()], 1).cpu()
            private = on_device(self._released(flat, [derived(key, "noise", number) for key in keys]), self._device)
            for value, grad in zip(parameters.values(), private.split(self._sizes, 1), strict=True):
                value -= self._learning_rate * grad.view(value.shape)
        return parameters

    def _released(self, flat: torch.Tensor, noise: list[Stream]) -> torch.Tensor:
        """(M, n), from the sums, by as many threads as PyTorch takes here."""
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            run = map if torch.get_num_threads() == 1 else pool.map
            return torch.stack(list(run(self.step.release, flat, noise)))

    def losses(self, parameters: Mapping[str, torch.Tensor]) -> list[float]:
        """On z, of each model."""
        last = torch.tensor([len(self._images) - 1])
        count = len(next(iter(parameters.values())))
        images, labels = self._batch(last).expand(count, 1, -1, -1, -1), self._labels[-1:].expand(count, 1)
        return self._stacked.losses(parameters, images, labels)[:, 0].tolist()

    def trained_losses(self, keys: Sequence[bytes], takes_part: Sequence[bool]) -> list[float]:
        """The loss on z of each model, trained: of any number of models, a few at a time."""
        found = []
        each, kind = self.mechanism.batch_size * max(1, self.views.augmult), self._device.type
        at_once = max(_LEAST_MODELS[kind], _EXAMPLES_AT_ONCE[kind] // each)
        for first in range(0, len(keys), at_once):
            part = slice(first, first + at_once)
            found += self.losses(self.train(keys[part], takes_part[part]))
        return found

    def _draw(self, key: bytes, number: int) -> Randomness:
        if self._fixed_batches is None:
            indices = poisson_batch(self.mechanism, derived(key, "sampling", number))
        else:
            indices = self._fixed_batches[number - 1]
        views, model = derived(key, "augmentation", number), derived(key, "random numbers inside the model", number)
        return draw(indices, self.views, views, model)

    def _batch(self, rows: torch.Tensor) -> torch.Tensor:
        return self._images.batch(rows.flatten(), self._device).to(self._dtype)

    def _clipped_sums(self, parameters: Tensors, drawn: Sequence[Randomness], rows: Sequence[np.ndarray]) -> Tensors:
        """Name -> (M, ...). Rows of shorter batches are filled up with an example that does not count."""
        filled = nn.utils.rnn.pad_sequence([torch.from_numpy(each) for each in rows], batch_first=True)
        longest = filled.shape[1]
        is_real = on_device(torch.arange(longest) < torch.tensor([[len(each)] for each in rows]), self._device)
        sums = {name: torch.zeros_like(value) for name, value in parameters.items()}
        passes = max(1, round(len(rows) * longest / _EXAMPLES_AT_ONCE[self._device.type]))
        size = max(1, math.ceil(longest / passes))  # no pass for the few rows that a batch is longer than B
        for first in range(0, longest, size):
            part = slice(first, first + size)
            sum_of = self._views_sum if self.views.augmult else self._stacked_sum
            for name, value in sum_of(parameters, drawn, filled[:, part], is_real[:, part]).items():
                sums[name] += value
        return sums

    def _stacked_sum(
        self, parameters: Tensors, drawn: Sequence[Randomness], rows: torch.Tensor, is_real: torch.Tensor
    ) -> Tensors:
        images, labels = self._batch(rows).unflatten(0, rows.shape), self._labels[on_device(rows, self._device)]
        norm = self.step.grad_fn.clipping_norm
        return self._stacked.clipped_sum(parameters, images, labels, is_real, clipping_norm=norm)

    def _views_sum(
        self, parameters: Tensors, drawn: Sequence[Randomness], rows: torch.Tensor, is_real: torch.Tensor
    ) -> Tensors:
        made = [
            self.views.make(self._images, own, each.view_bits, self._device)
            for own, each in zip(rows, drawn, strict=True)
        ]
        labels = self._labels[on_device(rows, self._device)]  # (M, b)
        inputs = torch.stack(made).to(self._dtype)  # (M, b, K, C, H, W)
        norm = self.step.grad_fn.clipping_norm

        def of_model(parameters: Tensors, inputs: torch.Tensor, *own: torch.Tensor) -> Tensors:
            given = parameters, self._network, cross_entropy, inputs, own[:1], own[1]
            return clipped_sum(*given, clipping_norm=norm)

        return torch.func.vmap(of_model)(parameters, inputs, labels, is_real)


def cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="none")
