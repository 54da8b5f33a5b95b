r"""Weights that are functions of parameters: from gradients of the former to gradients of the latter.

All examples share the Jacobian J of weights with respect to parameters, so that the clipped
sum needs one pull-back, :math:`\sum_i c_i J^\top g_i = J^\top \sum_i c_i g_i`. Only the norms
:math:`\|J^\top g_i\|` need every example's. Weight standardisation has them in closed form; it
is recognised by what J does, never by a module's name. Everything else is pulled back row by row.
"""

import dataclasses
import functools

import torch

from sfumato.clipping.assumptions import assume
from sfumato.clipping.norms import global_norms
from sfumato.clipping.rules import ChannelContribution

# Largest relative deviation of J from the closed form, in float64.
_AGREEMENT = 1e-9
# Rounding of the difference of squares below, in units of the machine epsilon.
_ROUNDING = 8.0
_DIRECTIONS_SEED = 0


@dataclasses.dataclass(frozen=True)
class Group:
    """Weights that share parameters with each other and with no others.

    Attributes:
        weights: Their names.
        parameters: Names of the parameters that they are computed from.
        kind: "parameter": one weight, which is the parameter. "standardized": one weight, each
            output channel a centred and scaled copy of a parameter's, possibly times a gain.
            "general": anything else.
    """

    weights: tuple[str, ...]
    parameters: tuple[str, ...]
    kind: str


def group_weights(sources: dict[str, tuple[str, ...]]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Connected components of (weights, parameters), in order of their first weight."""
    groups: list[tuple[list[str], set[str]]] = []
    for weight, parameters in sources.items():
        merged: tuple[list[str], set[str]] = ([weight], set(parameters))
        apart = []
        for group in groups:
            if group[1] & merged[1]:
                merged = (group[0] + merged[0], group[1] | merged[1])
            else:
                apart.append(group)
        groups = [*apart, merged]
    order = list(sources)
    sorted_groups = sorted(groups, key=lambda group: min(order.index(weight) for weight in group[0]))
    return [(tuple(weights), tuple(sorted(parameters))) for weights, parameters in sorted_groups]


def pull_back(
    weights: list[torch.Tensor], parameters: list[torch.Tensor], gradients: list[torch.Tensor], batched: bool = False
) -> list[torch.Tensor]:
    """J' times gradients; with ``batched``, of each row of them."""
    pulled = torch.autograd.grad(weights, parameters, gradients, retain_graph=True, allow_unused=True, is_grads_batched=batched)
    rows = (len(gradients[0]),) if batched else ()
    return [
        torch.zeros(*rows, *parameter.shape, dtype=parameter.dtype, device=parameter.device) if gradient is None else gradient
        for gradient, parameter in zip(pulled, parameters, strict=True)
    ]


class Standardized:
    r"""J of weight standardisation: for output channel o, with u the centred parameter over its length,

    .. math:: J_o^\top = s_o (I - \tfrac1n 1 1^\top - u u^\top) + \lambda_o u u^\top, \quad \text{gain}_k: \kappa_{ko} u^\top.

    s, lambda and kappa are read off J itself, by one pull-back, which also shows whether J still has this form.
    """

    def __init__(self, weight: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        self._main = next(i for i, parameter in enumerate(parameters) if parameter.shape == weight.shape)
        rows = parameters[self._main].detach().flatten(1)  # (channels, fan-in)
        self.weight = weight.detach()
        self.fan_in = rows.shape[1]
        centred = rows - rows.mean(1, keepdim=True)
        length = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
        self.along = centred.div_(length).nan_to_num_(0.0, 0.0, 0.0)  # u
        # One pull-back of z + c u, with z fixed, random, of mean zero, and c as large as z's length.
        fixed = _directions(tuple(rows.shape), rows.dtype, rows.device)
        square, part = torch.linalg.vecdot(fixed, fixed), torch.linalg.vecdot(fixed, self.along)
        added = square.sqrt()
        pulled = pull_back([weight], parameters, [torch.addcmul(fixed, self.along, added[:, None]).view_as(weight)])
        of_main = pulled.pop(self._main).flatten(1)
        lengthwise = torch.linalg.vecdot(of_main, self.along)  # lambda (u.z + c)
        self.scale_along = lengthwise / (part + added)  # lambda
        self.scale = (torch.linalg.vecdot(of_main, fixed) - lengthwise * part) / (square - part.square())  # s
        self.gains = [gain.flatten() / (part + added) for gain in pulled]  # kappa, each (channels,)
        # What J did besides that is perpendicular to it.
        expected = self.scale.square() * (square - part.square()) + lengthwise.square()
        gap = (torch.linalg.vecdot(of_main, of_main) - expected).abs().sum()
        self.holds = assume(gap <= torch.finfo(gap.dtype).eps ** 0.5 * expected.sum())

    def pull_back(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """J' times one gradient, (channels, fan-in): for each of the parameters."""
        along = torch.linalg.vecdot(rows, self.along)
        across = (rows - rows.mean(1, keepdim=True)) * self.scale[:, None]
        of_main = across.addcmul_(self.along, (along * (self.scale_along - self.scale))[:, None])
        pulled = [gain * along for gain in self.gains]
        pulled.insert(self._main, of_main)
        return pulled

    def square_norms(self, contribution: ChannelContribution) -> tuple[torch.Tensor, torch.Tensor]:
        """(m,) squares of the norms of J' g_i, and bounds on their rounding errors."""
        moments = contribution.moments(self.along, self.weight)
        scale, along = self.scale.square(), moments.along.square()
        factor = self.scale_along.square() + sum((gain.square() for gain in self.gains), torch.zeros_like(scale))
        across = (moments.squares - moments.plain.square() / self.fan_in - along).clamp(min=0)
        squares = across @ scale + along @ factor
        rounding = _ROUNDING * torch.finfo(squares.dtype).eps * moments.squares
        error = (moments.error + rounding) @ scale + (2 * moments.along.abs() * moments.along_error) @ (scale + factor)
        return squares, error


@functools.cache
def _directions(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Fixed random rows of mean zero; on their device once, for a compiled graph to hold."""
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(_DIRECTIONS_SEED)).to(device, dtype)
    return rows - rows.mean(1, keepdim=True)


def is_standardized(weight: torch.Tensor, parameters: list[torch.Tensor]) -> bool:
    """Whether the closed form holds, tried on a random gradient. Tensors in float64."""
    same = [parameter for parameter in parameters if parameter.shape == weight.shape]
    others = [parameter for parameter in parameters if parameter.shape != weight.shape]
    if weight.ndim < 2 or len(same) != 1 or weight[0].numel() < 3 or any(parameter.numel() != len(weight) for parameter in others):
        return False
    closed = Standardized(weight, parameters)
    generator = torch.Generator().manual_seed(_DIRECTIONS_SEED + 1)
    gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
    true = pull_back([weight], parameters, [gradient])
    claimed = closed.pull_back(gradient.flatten(1))
    size = torch.stack([part.norm() for part in true]).norm()
    error = torch.stack([(a.flatten() - b.flatten()).norm() for a, b in zip(true, claimed, strict=True)]).norm()
    return bool(error <= _AGREEMENT * size)


def general_square_norms(weights: list[torch.Tensor], parameters: list[torch.Tensor], rows: list[torch.Tensor]) -> torch.Tensor:
    """(m,) squares of norms after pulling every example's gradient back; rows are (m, *shape of a weight)."""
    pulled = pull_back(weights, parameters, [row.to(weight.dtype) for row, weight in zip(rows, weights, strict=True)], batched=True)
    return global_norms(part.reshape(len(part), -1) for part in pulled).square()
