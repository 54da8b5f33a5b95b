"""What learns: a model, its gradient, its optimizer, ready to take updates."""

import functools
import time
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from sfumato.clipping import clipped_grad
from sfumato.clipping.identity import identity
from sfumato.data.dataset import Dataset, ImageSet
from sfumato.data.views import Views
from sfumato.errors import InputError
from sfumato.evaluation.objective import Objective
from sfumato.evaluation.row_independence import require_rows_apart
from sfumato.models import registry
from sfumato.planning.resolve import Plan
from sfumato.randomness import Stream
from sfumato.training.allocator import keep_freed_memory
from sfumato.training.microbatch import default_microbatch_size, find_microbatch_size
from sfumato.training.nonprivate import OrdinaryStep
from sfumato.training.state import State
from sfumato.training.step import PrivateStep, Randomness, Statistics
from sfumato.training.workers import Workers, workers_for


class Learner:
    """Takes updates. ``initialise`` must be called once, before the first.

    Attributes:
        grad_fn: For a private run, what sums clipped gradients; it has seen a batch of noise,
            so that its engine and methods are settled before the run begins.
    """

    def __init__(
        self,
        plan: Plan,
        dataset: Dataset,
        device: torch.device,
        engine: str,
        microbatch_size: int | None,
        methods: dict[str, str] | None = None,
        trust: Collection[str] = (),
    ) -> None:
        self.plan, self.dataset, self.device, self._trust = plan, dataset, device, trust
        recipe = plan.recipe
        self.objective = Objective(tuple(recipe.data.class_proportions) if recipe.data.class_proportions else None)
        self.views = Views.of(recipe.augmentation)
        self.model = self._build(seed=0).to(device).train()
        self.state = State(self.model, recipe)
        self.num_parameters = sum(value.numel() for value in self.state.parameters.values())
        self.microbatch_size = microbatch_size or default_microbatch_size(self.num_parameters, self.views.augmult)
        self.engine, self.methods, self._methods, self.workers = engine, {}, methods, Workers(1)
        if recipe.privacy is not None:
            # All before the run folder is made: a model that is refused leaves nothing behind.
            compile = recipe.training.compile
            if microbatch_size is not None:
                self._settle(microbatch_size, compile)
            else:
                # A CPU is at its best with few; with a public seed nothing is measured.
                searches = device.type == "cuda" and recipe.run.seed is None
                attempt = functools.partial(self._settle, compile=compile and not searches)
                self.microbatch_size = find_microbatch_size(attempt, self.microbatch_size, grows=searches)
                if searches:
                    self._settle(self.microbatch_size, compile)
            self.engine, self.methods = self.grad_fn.engine, self.grad_fn.methods
            self.workers = workers_for(device, self.grad_fn.parallel)
            require_rows_apart(self.model, torch.zeros(1, *dataset.shape, device=device))

    def _settle(self, microbatch_size: int, compile: bool) -> float:
        """Makes what sums clipped gradients and shows it a batch under the conditions of a run; returns the seconds of
        a second one.

        Its methods are chosen by their speed.
        """
        self.grad_fn = clipped_grad(
            self.model,
            self.objective.loss,
            clipping_norm=self.plan.recipe.budget.clipping_norm,
            augmult=self.views.augmult,
            microbatch_size=microbatch_size,
            engine=self.engine,
            methods=self._methods,
            precision=self.plan.recipe.training.precision,
            compile=compile,
        )

        def seconds(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
            start = time.perf_counter()
            out = self.grad_fn(*batch, key=bytes(32), example_ids=torch.arange(microbatch_size))
            out.grad_norms.sum().item()  # waits for the device
            return time.perf_counter() - start

        batch = self._made_up_batch(microbatch_size)
        (first,) = workers_for(self.device, self.engine in ("auto", "graph")).map(seconds, [batch])
        return seconds(batch) if self.device.type == "cuda" else first

    def _build(self, seed: int) -> torch.nn.Module:
        recipe, dataset = self.plan.recipe, self.dataset
        model = registry.build(
            recipe.model.name,
            image_size=dataset.facts.image_size,
            channels=dataset.facts.channels,
            num_classes=len(dataset.classes),
            options=recipe.model.options,
            seed=seed,
            trust=self._trust,
        )
        _refuse_other_state(model)
        return model

    def _made_up_batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        views = (self.views.augmult,) if self.views.augmult else ()
        images = torch.randn(size, *views, *self.dataset.shape, generator=generator)
        labels = torch.randint(len(self.dataset.classes), (size,), generator=generator)
        return images.to(self.device), labels.to(self.device)

    def identity(self) -> str:
        """A digest of what is computed, as far as it can be told."""
        engine = None if self.plan.recipe.privacy is None else self.grad_fn._engine
        return identity(self.model, self.objective.loss, engine)

    def initialise(self, seed: np.ndarray) -> None:
        """Draws the initial weights from one uniform word."""
        recipe = self.plan.recipe
        self.model.load_state_dict(self._build(seed=int(seed[0]) >> 1).state_dict())
        self.state = State(self.model, recipe)
        if recipe.privacy is None:
            training = recipe.training
            self.step: Any = OrdinaryStep(
                self.model,
                self.objective,
                self.views,
                self.microbatch_size,
                recipe.optimizer.max_grad_norm,
                training.precision,
                training.compile,
            )
        else:
            self.step = PrivateStep(self.grad_fn, self.plan.mechanism, self.views, self.microbatch_size, self.workers)

    def collect(
        self, images: ImageSet, randomness: Randomness, step: int
    ) -> tuple[dict[str, torch.Tensor], Statistics]:
        """What the gradients of one update add up to; in a private run nobody may see it."""
        every = self.plan.recipe.training.norm_histogram_every
        watch = {"with_norms": True} if every and (step == 1 or step % every == 0) else {}  # only a private step can
        verify_every = self.plan.recipe.training.verify_every
        if verify_every and self.plan.recipe.privacy is not None and step % verify_every == 0:
            self.grad_fn.verify(step)
        return self.step.collect(images, self.state.parameters, randomness, **watch)

    def update(self, grad_sum: dict[str, torch.Tensor], noise: Stream, step: int) -> None:
        """Parameters and averages, by what is released of the sum."""
        self.state.update(self.step.release(grad_sum, noise), step)


def _refuse_other_state(model: torch.nn.Module) -> None:
    """Raises InputError if a module keeps state that is no tensor, which no checkpoint could hold."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            where = f"{type(module).__name__} at '{path}'" if path else f"the model ({type(module).__name__})"
            raise InputError(
                f"{where} keeps state of its own (get_extra_state), which no checkpoint could hold. Keep it in "
                "buffers, or leave it out."
            )


def build_learner(
    plan: Plan, dataset: Dataset, device: torch.device, recorded: dict[str, Any] | None, trust: Collection[str] = ()
) -> Learner:
    """A learner in the recorded environment as far as the recipe leaves it open; its model may come from trusted
    modules alone.
    """
    keep_freed_memory()
    training = plan.recipe.training
    engine, methods = training.engine, None
    microbatch_size = None if training.microbatch_size == "auto" else training.microbatch_size
    if plan.recipe.run.seed is not None:
        methods = {"memory_format": "contiguous"}  # nothing measured: equal seeds give equal bits
    if recorded is not None:
        torch.set_num_threads(recorded["threads"])
        engine = recorded["engine"] if engine == "auto" else engine
        microbatch_size = microbatch_size or recorded["microbatch_size"]
        methods = recorded.get("methods")  # a record without them is of another environment anyway
    return Learner(plan, dataset, device, engine, microbatch_size, methods, trust)
