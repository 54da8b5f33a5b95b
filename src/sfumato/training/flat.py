"""All trainable parameters in one vector."""

import math
from collections.abc import Mapping

import torch
from torch import nn

from sfumato.errors import InputError

_ALIGNED = 16
"""Parameters begin at multiples of so many numbers: kernels read faster from there."""


class Flat:
    """Makes trainable parameters views of one vector: what moves the vector moves the model.

    Places between two parameters belong to nothing; whatever is in them is never read.

    Attributes:
        values: (n,): the vector.

    Args:
        parameters: By name, of one type (`require_one_type`) and device.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._places: dict[str, tuple[slice, torch.Size]] = {}
        end = 0
        for name, value in parameters.items():
            self._places[name] = slice(end, end + value.numel()), value.shape
            end = math.ceil((end + value.numel()) / _ALIGNED) * _ALIGNED
        self.values = self.join({name: value.detach() for name, value in parameters.items()}, end)
        for name, view in self.split(self.values).items():
            parameters[name].data = view

    def join(self, values: Mapping[str, torch.Tensor], length: int | None = None) -> torch.Tensor:
        """One vector of a tensor for each parameter, zero between them."""
        first = next(iter(values.values()))
        joined = first.new_zeros(len(self.values) if length is None else length)
        for name, (place, _) in self._places.items():
            joined[place] = values[name].reshape(-1)
        return joined

    def split(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each parameter's part of a vector, as a view."""
        return {name: vector[place].view(shape) for name, (place, shape) in self._places.items()}


def require_one_type(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises InputError if parameters are of several types, which no vector holds."""
    kinds = {value.dtype: name for name, value in parameters.items()}
    if len(kinds) > 1:
        what = " and ".join(f"{name!r} is {str(kind).removeprefix('torch.')}" for kind, name in kinds.items())
        raise InputError(f"trainable parameters are of several types: {what}. Convert the model to one of them.")
