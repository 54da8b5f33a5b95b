"""What an update changes: parameters, the optimizer's moments, averages."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sfumato.config import ResolvedOptimizer, ResolvedRecipe, ResolvedSgd
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

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"averages": self.averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` of an equal object returned."""
        for average, kept in zip(self.averages, state["averages"], strict=True):
            copy_all(average, kept)


class State:
    """The model, its optimizer and its averages, moved together by one update."""

    def __init__(self, model: nn.Module, recipe: ResolvedRecipe) -> None:
        self.model = model
        self.parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.ema = Ema(self.parameters, recipe.ema.decays)
        self.config = recipe.optimizer
        self.num_steps = recipe.training.num_steps
        self.optimizer = make_optimizer(self.parameters, self.config)

    def update(self, gradient: dict[str, torch.Tensor], release: int, step: int) -> None:
        """Applies the gradient of a release, and moves the averages once.

        Args:
            gradient: Of each parameter.
            release: Its number, from 1: the schedule of learning rates follows the plan.
            step: Updates that the model has had by then: fewer, where some were lost. The averages' warm-up follows it.
        """
        for name, value in self.parameters.items():
            value.grad = gradient[name].to(value.dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, release, self.num_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.ema.update(self.parameters, step)

    def state_dict(self) -> dict[str, Any]:
        """Everything of it, for a checkpoint."""
        memory = self.optimizer.state_dict()["state"]
        return {"model": self.model.state_dict(), **self.ema.state_dict(), "optimizer": memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` of an equal state returned."""
        self.model.load_state_dict(state["model"])
        self.ema.load_state_dict(state)
        # torch's own loading puts each on the device where its optimizer keeps it.
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state["optimizer"]})

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within the block the model computes with the first average."""
        last = {name: value.detach().clone() for name, value in self.parameters.items()}
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(copy_all, self.parameters, last)
            copy_all(self.parameters, self.ema.averages[0])
            yield

    def averaged_state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state with the first average in place of the last parameters, under each of a parameter's names,
        on the CPU, each tensor in memory of its own.
        """
        own = {id(value): self.ema.averages[0][name] for name, value in self.parameters.items()}
        named = self.model.named_parameters(remove_duplicate=False)
        averaged = self.model.state_dict() | {name: own[id(value)] for name, value in named if id(value) in own}
        return {name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in averaged.items()}


@torch.no_grad()
def copy_all(into: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Gives each tensor its value."""
    for name, value in into.items():
        value.copy_(values[name])


def make_optimizer(parameters: Mapping[str, torch.Tensor], config: ResolvedOptimizer) -> torch.optim.Optimizer:
    """The optimizer of a resolved recipe, over all trainable parameters alike.

    Guarantee: it sees private gradients, weights made from them and public numbers alone, so its
    moments and its weight decay are post-processing: they cost no privacy.
    """
    common: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if isinstance(config, ResolvedSgd):
        common |= {"momentum": config.momentum, "dampening": config.dampening, "nesterov": config.nesterov}
        return torch.optim.SGD(parameters.values(), **common)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    return kind(parameters.values(), betas=(config.beta1, config.beta2), eps=config.adam_epsilon, **common)


def learning_rate(config: ResolvedOptimizer, step: int, num_steps: int) -> float:
    """The learning rate of update ``step`` (from 1): linear warm-up, then as the schedule says."""
    base, warmup = config.learning_rate, config.warmup_steps
    if step <= warmup:
        return base * step / warmup
    if config.schedule == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * (step - 1 - warmup) / max(num_steps - warmup, 1)))
    passed = sum(step > milestone for milestone in config.milestones or [])
    return base * config.gamma**passed
