"""Parameter averaging over updates."""

from collections.abc import Mapping

import torch

from sfumato.torch_internals import lerp_all


def warmed_up_decay(decay: float, step: int) -> float:
    """min(decay, (1 + t) / (10 + t)) with t = step - 1 updates before (De et al. 2022, C.3).

    Args:
        decay: In [0, 1).
        step: 1 for the first update.
    """
    return min(decay, step / (9 + step))


class Ema:
    """Exponential moving averages of a model's parameters, one for each decay.

    Call ``update`` once per update, never per microbatch: at 64 microbatches an average
    of 88 updates would otherwise shrink to 2.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], decays: list[float]) -> None:
        self.decays = decays
        self.averages = [{name: value.detach().clone() for name, value in parameters.items()} for _ in decays]

    @torch.no_grad()
    def update(self, parameters: Mapping[str, torch.Tensor], step: int) -> None:
        """Moves each average towards the parameters after update number ``step``, which starts at
        1.
        """
        for decay, average in zip(self.decays, self.averages, strict=True):
            weight = 1 - warmed_up_decay(decay, step)
            lerp_all(list(average.values()), [parameters[name].detach() for name in average], weight)

    def state_dict(self) -> dict[str, object]:
        """For a checkpoint."""
        return {"averages": self.averages}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, list[dict[str, torch.Tensor]]]) -> None:
        """Takes over what `state_dict` of an equal object returned."""
        for average, kept in zip(self.averages, state["averages"], strict=True):
            for name, value in average.items():
                value.copy_(kept[name])
