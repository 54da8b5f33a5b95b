"""What an update changes: parameters, the optimizer's moments, averages."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sfumato.config import ResolvedOptimizer, ResolvedRecipe, ResolvedSgd
from sfumato.models.lora import merged_state_dict
from sfumato.torch_internals import lerp_all
from sfumato.training.flat import Flat
from sfumato.training.world import World

_ALL = "all parameters"
_COUNT = "step"
"""What an optimizer remembers beside vectors."""


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
            for name, value in average.items():
                value.copy_(kept[name])


class State:
    """The model, its optimizer and its averages, moved together by one update.

    All live in vectors (`Flat`). Where the world shards them, a rank has memory and averages of its shard alone, and
    gets from the others what they made of theirs.
    """

    def __init__(self, model: nn.Module, recipe: ResolvedRecipe, world: World = World()) -> None:  # noqa: B008
        self.model, self._world = model, world
        self.parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.flat = Flat(self.parameters)
        self.mine = nn.Parameter(self.flat.values[world.shard(len(self.flat.values))])
        self.ema = Ema({_ALL: self.mine}, recipe.ema.decays)
        self.averages = [average[_ALL] for average in self.ema.averages]
        self.config = recipe.optimizer
        self.num_steps = recipe.training.num_steps
        self.optimizer = make_optimizer(self.mine, self.config)

    def update(self, gradient: torch.Tensor, release: int, step: int) -> None:
        """Applies the gradient of a release, and moves the averages once.

        Args:
            gradient: Of this rank's shard of the vector.
            release: Its number, from 1: the schedule of learning rates follows the plan.
            step: Updates that the model has had by then: fewer, where some were lost. The averages' warm-up follows it.
        """
        self.mine.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, release, self.num_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.ema.update({_ALL: self.mine}, step)
        self._world.spread(self.flat.values)

    def state_dict(self) -> dict[str, Any]:
        """Everything of it, for a checkpoint: copies in the first process's memory, elsewhere anything."""
        averages = [self._named(average) for average in self.averages]
        memory = {
            key: value.clone() if key == _COUNT else self._named(value)
            for key, value in sorted(self.optimizer.state[self.mine].items())
        }
        model = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        return {"model": model, "averages": averages, "optimizer": memory}

    def _named(self, mine: torch.Tensor) -> dict[str, torch.Tensor]:
        whole = self._world.whole(mine, len(self.flat.values))
        return {name: part.clone() for name, part in self.flat.split(whole).items()} if self._world.is_first else {}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Takes over what `state_dict` of an equal state returned and was given to the first process; where it was
        given None, all take over the model that it has.
        """
        if state is not None:
            self.model.load_state_dict(state["model"])
        for value in self.model.state_dict().values():
            self._world.from_first(value)
        averages, memory = ([], {}) if state is None else (state["averages"], state["optimizer"])
        kept = self._world.same(lambda: state and {key: memory[key] if key == _COUNT else None for key in memory})
        for number, average in enumerate(self.averages):
            average.copy_(self.mine if kept is None else self._mine(averages[number] if averages else {}))
        for key, count in (kept or {}).items():
            self.optimizer.state[self.mine][key] = count if key == _COUNT else self._mine(memory.get(key, {}))

    def _mine(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This rank's shard of what the first process has of each parameter, by name."""
        vector = torch.zeros_like(self.flat.values)
        if self._world.is_first:
            for name, own in self.flat.split(vector).items():
                own.copy_(parts[name])
        self._world.from_first(vector)
        return vector[self._world.shard(len(vector))].clone()

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within the block the model computes with the first average."""
        values = self.flat.values
        last = values.clone()
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(values.copy_, last)
            values[self._world.shard(len(values))] = self.averages[0]
            self._world.spread(values)
            yield

    def averaged_state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state with the first average in place of the last parameters, under each of a parameter's names,
        on the CPU, each tensor in memory of its own. Low-rank updates, averaged as A and B, are merged into weights.
        """
        with self.averaged_weights():
            values = merged_state_dict(self.model)
            return {name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in values.items()}


def make_optimizer(parameters: nn.Parameter, config: ResolvedOptimizer) -> torch.optim.Optimizer:
    """The optimizer of a resolved recipe, which treats each number of a vector alike.

    Guarantee: it sees private gradients, weights made from them and public numbers alone, so its
    moments and its weight decay are post-processing: they cost no privacy.
    """
    common: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if isinstance(config, ResolvedSgd):
        common |= {"momentum": config.momentum, "dampening": config.dampening, "nesterov": config.nesterov}
        return torch.optim.SGD([parameters], **common)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    return kind([parameters], betas=(config.beta1, config.beta2), eps=config.adam_epsilon, **common)


def learning_rate(config: ResolvedOptimizer, step: int, num_steps: int) -> float:
    """The learning rate of update ``step`` (from 1): linear warm-up, then as the schedule says."""
    base, warmup = config.learning_rate, config.warmup_steps
    if step <= warmup:
        return base * step / warmup
    if config.schedule == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * (step - 1 - warmup) / max(num_steps - warmup, 1)))
    passed = sum(step > milestone for milestone in config.milestones or [])
    return base * config.gamma**passed
