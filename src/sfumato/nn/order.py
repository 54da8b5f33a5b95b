"""The order of activation and normalisation, which private training is sensitive to (Sander et al.
2022, Fig. 5).
"""

from typing import Literal, get_args

from torch import nn

from sfumato.errors import InputError

Order = Literal["activation-norm", "norm-activation"]


def in_order(activation: nn.Module, norm: nn.Module, order: Order) -> list[nn.Module]:
    """Both layers as they run.

    Raises:
        InputError: If there is no such order.
    """
    if order not in get_args(Order):
        raise InputError(f'model option order = "{order}" is unknown. Known are {", ".join(get_args(Order))}.')
    return [activation, norm] if order == "activation-norm" else [norm, activation]
