"""What learns: a model, its gradient, its optimizer, ready to take updates."""

from typing import Any

import numpy as np
import torch

from sfumato.clipping import clipped_grad
from sfumato.clipping.checks import require_private
from sfumato.data.dataset import Dataset, ImageSet
from sfumato.models import registry
from sfumato.training.objective import Objective
from sfumato.training.ordinary import OrdinaryStep
from sfumato.training.resolve import Plan
from sfumato.training.state import State
from sfumato.training.step import PrivateStep, Randomness, Statistics, Views


class Learner:
    """Takes updates. ``initialise`` must be called once, before the first."""

    def __init__(self, plan: Plan, dataset: Dataset, device: torch.device, engine: str, microbatch_size: int | None) -> None:
        self.plan, self.dataset, self.device, self.engine = plan, dataset, device, engine
        recipe = plan.recipe
        self.objective = Objective(tuple(recipe.data.class_proportions) if recipe.data.class_proportions else None)
        assert recipe.augmentation.kind is not None and recipe.augmentation.augmult is not None
        self.views = Views(recipe.augmentation.kind, recipe.augmentation.augmult, recipe.augmentation.padding)
        self._build(seed=0)
        self.num_parameters = sum(value.numel() for value in self.state.parameters.values())
        if recipe.privacy is not None:
            # Before the run folder is made: a model that mixes examples leaves nothing behind.
            require_private(self.state.model, torch.zeros(4, *dataset.shape, device=device))
        self.microbatch_size = microbatch_size or default_microbatch_size(self.num_parameters, self.views.augmult)

    def _build(self, seed: int) -> None:
        recipe, dataset = self.plan.recipe, self.dataset
        assert recipe.model.name is not None
        model = registry.build(
            recipe.model.name,
            image_size=dataset.facts.image_size,
            channels=dataset.facts.channels,
            num_classes=len(dataset.classes),
            options=recipe.model.options,
            seed=seed,
        )
        self.state = State(model.to(self.device).train(), recipe)

    def initialise(self, seed: np.ndarray) -> None:
        """Draws the initial weights from one uniform word."""
        self._build(seed=int(seed[0]) >> 1)
        recipe = self.plan.recipe
        if recipe.privacy is None:
            self.step: Any = OrdinaryStep(self.state.model, self.objective, self.views, self.microbatch_size, recipe.optimizer.max_grad_norm)
            return
        grad_fn = clipped_grad(
            self.state.model,
            self.objective.loss,
            clipping_norm=recipe.privacy.clipping_norm,
            augmult=self.views.augmult,
            microbatch_size=self.microbatch_size,
            engine=self.engine,
        )
        self.step = PrivateStep(grad_fn, self.plan.mechanism, self.views, self.microbatch_size)

    def update(self, images: ImageSet, randomness: Randomness, step: int) -> Statistics:
        """One update of parameters and averages."""
        gradient, statistics = self.step(images, self.state.parameters, randomness)
        self.state.update(gradient, step)
        return statistics


def build_learner(plan: Plan, dataset: Dataset, device: torch.device, recorded: dict[str, Any] | None) -> Learner:
    """A learner in the recorded environment as far as the recipe leaves it open."""
    training = plan.recipe.training
    engine, microbatch_size = training.engine, training.microbatch_size
    if recorded is not None:
        torch.set_num_threads(recorded["threads"])
        engine = recorded["engine"] if engine == "auto" else engine
        microbatch_size = microbatch_size or recorded["microbatch_size"]
    return Learner(plan, dataset, device, "func" if engine == "auto" else engine, microbatch_size)


def default_microbatch_size(num_parameters: int, augmult: int) -> int:
    """So many examples that their gradients take about 64 MB, a power of two between 8 and 256."""
    fit = 2**26 // (4 * num_parameters * 1) // max(1, augmult // 4)
    return 2 ** max(3, min(8, fit.bit_length() - 1))
