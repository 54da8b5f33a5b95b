"""What an update changes: parameters, the optimizer's moments, averages."""

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from sfumato.config import ResolvedOptimizer, ResolvedRecipe, ResolvedSgd
from sfumato.training.ema import Ema

# What torch's optimizers remember of each parameter, and its name in a checkpoint.
_MEMORY = {"momentum_buffer": "momentum", "exp_avg": "first_moment", "exp_avg_sq": "second_moment", "step": "updates"}


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

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything of it, by name, for a checkpoint."""
        out = {f"model.{name}": value.cpu() for name, value in _each_its_own(self.model.state_dict()).items()}
        for number in range(len(self.ema.averages)):
            out.update({f"ema.{number}.{name}": value for name, value in _each_its_own(self._averages(number)).items()})
        names = list(self.parameters)
        for number, memory in self.optimizer.state_dict()["state"].items():
            out.update(
                {f"{_MEMORY[slot]}.{names[number]}": value for slot, value in memory.items() if value is not None}
            )
        return out

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes over what ``tensors`` of an equal state returned."""
        self.model.load_state_dict(model_state(tensors))
        for number, average in enumerate(self.ema.averages):
            for name in average:
                average[name].copy_(tensors[f"ema.{number}.{name}"])
        memory = {
            number: {slot: tensors[f"{kind}.{name}"] for slot, kind in _MEMORY.items() if f"{kind}.{name}" in tensors}
            for number, name in enumerate(self.parameters)
        }
        # torch's own loading puts each on the device where its optimizer keeps it.
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": memory})

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within the block the model computes with the first average."""
        last = {name: value.detach().clone() for name, value in self.parameters.items()}
        self._set(self.ema.averages[0])
        try:
            yield
        finally:
            self._set(last)

    @torch.no_grad()
    def _set(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in self.parameters.items():
            value.copy_(values[name])

    def averaged_state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state with the first average in place of the last parameters."""
        return _each_its_own({**self.model.state_dict(), **self._averages(0)})

    def _averages(self, number: int) -> dict[str, torch.Tensor]:
        """One of the averages; a parameter under several names has it under each."""
        own = {id(value): self.ema.averages[number][name] for name, value in self.parameters.items()}
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: own[id(value)] for name, value in named if id(value) in own}


def model_state(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What of a state's tensors is the model's."""
    return {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}


def _each_its_own(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with no two sharing memory: files hold one copy for each name."""
    seen: set[int] = set()
    out = {}
    for name, value in tensors.items():
        memory = value.untyped_storage().data_ptr() if value.numel() else id(value)
        out[name] = value.clone() if memory in seen else value
        seen.add(memory)
    return out


def make_optimizer(parameters: Mapping[str, torch.Tensor], config: ResolvedOptimizer) -> torch.optim.Optimizer:
    """The optimizer of a resolved recipe, over all trainable parameters alike.

    Guarantee: it sees private gradients, weights made from them and public numbers alone, so its
    moments and its weight decay are post-processing: they cost no privacy.
    """
    if isinstance(config, ResolvedSgd):
        return torch.optim.SGD(
            parameters.values(),
            lr=config.learning_rate,
            momentum=config.momentum,
            dampening=config.dampening,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    return kind(
        parameters.values(),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )


def learning_rate(config: ResolvedOptimizer, step: int, num_steps: int) -> float:
    """The learning rate of update ``step`` (from 1): linear warm-up, then as the schedule says."""
    base, warmup = config.learning_rate, config.warmup_steps
    if step <= warmup:
        return base * step / warmup
    if config.schedule == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * (step - 1 - warmup) / max(num_steps - warmup, 1)))
    passed = sum(step > milestone for milestone in config.milestones or [])
    return base * config.gamma**passed
