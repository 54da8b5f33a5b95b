"""Model, clipped gradient and optimizer of one run, ready to take updates."""

import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from sfumato.clipping import GradFn, clipped_grad
from sfumato.clipping.clip import refuse_missing_tf32
from sfumato.clipping.microbatch import count_saved, default_microbatch_size
from sfumato.clipping.probe import first_line
from sfumato.clipping.speed import Speed
from sfumato.data.canaries import WithCanaries, canary_images
from sfumato.data.examples import Dataset, Examples
from sfumato.data.features import FeatureSet
from sfumato.data.people import People, Together
from sfumato.data.views import Views
from sfumato.errors import InputError
from sfumato.evaluation.objective import Objective
from sfumato.evaluation.row_independence import require_rows_apart
from sfumato.models import registry
from sfumato.models.layers import CentredLinear, centred
from sfumato.models.trainable import (
    Backbone,
    centre_features,
    classifier_name,
    classifier_of,
    freeze_statistics,
    named_classifier,
    scale_features,
    select_trainable,
)
from sfumato.models.weights import Fitted, Weights, fit
from sfumato.planning.resolve import Plan
from sfumato.randomness import Stream
from sfumato.training.allocator import keep_freed_memory
from sfumato.training.features import ROWS, features_of
from sfumato.training.first_release import MeanFeatures
from sfumato.training.nonprivate import OrdinaryStep
from sfumato.training.state import State, model_state
from sfumato.training.step import PrivateStep, Randomness, Statistics, Step


class Learner:
    """Takes updates. ``initialise`` must be called once, before the first.

    Attributes:
        model: The whole network, as it is published.
        trained: The part of it that examples pass through: the whole, or its classifier.
        train: The images that it trains on, or from `initialise` on features of them; `held_out`
            likewise.
        drawn_from: What updates draw from: these and, behind them, the canaries.
        fitted: How given weights met the network; None from scratch.
        grad_fn: For a private run, what sums clipped gradients, prepared; else None.
        step: How an update is computed.
        first_release: What is released once before update 1; None: nothing.
    """

    step: Step
    first_release: MeanFeatures | None = None
    fitted: Fitted | None = None
    _centred: CentredLinear

    def __init__(
        self,
        plan: Plan,
        dataset: Dataset,
        device: torch.device,
        speed: Speed,
        trust: Collection[str] = (),
        weights: Weights | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.plan, self.dataset, self.device, self._trust = plan, dataset, device, trust
        recipe = plan.recipe
        proportions = recipe.data.class_proportions
        self.objective = Objective(tuple(proportions) if proportions else None, recipe.training.label_smoothing)
        self.views = Views.of(recipe.augmentation)
        self.weights = weights
        self.model = self._build(seed=0).to(device).train()
        self._require_outputs()
        self.trained, self._backbone = self._cut()
        privacy = recipe.privacy
        draws_people = privacy is not None and privacy.person_sampling == "persons"
        # K, where people are drawn.
        self._people = privacy.max_images_per_person if privacy is not None and draws_people else None
        self._drawn: People | None = None
        self.train: Examples = dataset.train
        self.drawn_from: Examples | WithCanaries = dataset.train
        self.held_out: Examples = dataset.held_out
        self._report = report
        self.state = State(self.model, recipe)
        self.num_parameters = sum(value.numel() for value in self.state.parameters.values())
        self.grad_fn: GradFn | None = None
        if recipe.model.features == "centred":
            self.first_release = MeanFeatures(plan.mechanism, device)
        if recipe.privacy is None:
            self.engine, self.methods, self.num_workers = speed.engine, {}, 1
            self.microbatch_size = speed.microbatch_size or default_microbatch_size(
                0, max(1, self.views.augmult), self._values_saved()
            )
            self.step = OrdinaryStep(
                self.trained,
                self.objective,
                self.views,
                self.microbatch_size,
                recipe.optimizer.max_grad_norm,
                speed.precision,
                speed.compile,
            )
        else:
            # All before the run folder is made: a model that is refused leaves nothing behind.
            shape = self._example_shape()
            draws_each = self._people is None
            augmult = self.views.augmult if self._people is None else self._people
            row = torch.zeros(1, *shape, device=device)
            grad_fn = self.grad_fn = clipped_grad(
                self.trained,
                self.objective.loss,
                clipping_norm=recipe.budget.clipping_norm,
                augmult=augmult,
                per_view=not draws_each,
                **vars(speed),
            )
            views = row[:, None].expand(1, augmult, *shape) if augmult else row
            labels = torch.zeros(1, dtype=torch.int64, device=device)
            targets = [labels] if draws_each else [labels.expand(1, augmult), torch.ones(1, augmult, device=device)]
            prepared = grad_fn.prepare(views, *targets, batch_size=recipe.training.batch_size)
            self.engine, self.microbatch_size = prepared.name, prepared.microbatch_size
            self.methods, self.num_workers = grad_fn.methods, grad_fn.num_workers
            self.step = PrivateStep(grad_fn, plan.mechanism, self.views if self._people is None else Together())
            require_rows_apart(self.trained, row)
            self._require_features_apart()

    def _require_features_apart(self) -> None:
        """Features may not be of several images."""
        if self._backbone is not None:
            require_rows_apart(self._backbone, torch.zeros(1, *self.dataset.shape, device=self.device))

    def _build(self, seed: int) -> torch.nn.Module:
        recipe, dataset = self.plan.recipe, self.dataset
        model = registry.build(
            recipe.model.name,
            image_size=dataset.facts.image_size,
            channels=dataset.facts.channels,
            num_classes=len(dataset.classes),
            options=recipe.model.options,
            fix=recipe.model.fix,
            seed=seed,
            trust=self._trust,
        )
        _refuse_other_state(model)
        if self.weights is not None:
            self.fitted = fit(model, self.weights, classifier_name(model, len(dataset.classes)))
            freeze_statistics(model)
        if recipe.model.features != "raw":
            scale_features(model, named_classifier(model, len(dataset.classes)))
        select_trainable(model, recipe.model.trainable, len(dataset.classes))
        return model

    def _require_outputs(self) -> None:
        """Raises InputError unless an image has one output for each class. Of a model that fails, a
        private run says more when it is checked.
        """
        classes = len(self.dataset.classes)
        self.model.eval()
        try:
            with torch.no_grad():
                outputs = self.model(torch.zeros(2, *self.dataset.shape, device=self.device))
        except Exception as error:  # whatever the model's code runs into
            if self.plan.recipe.privacy is not None:
                return
            raise InputError(
                f"the model fails on images of shape {self.dataset.shape}: {first_line(error)}. Correct it."
            ) from error
        finally:
            self.model.train()
        shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        if shape != (2, classes):
            raise InputError(
                f"the model gives {shape} for 2 images, not (2, {classes}): there are {classes} classes, and each "
                "has one output. Have the factory pass num_classes on, and return the logits alone."
            )

    def _cut(self) -> tuple[torch.nn.Module, Backbone | None]:
        """What trains: the model; or, where nothing else trains and each image is seen as it is, its
        classifier, and the rest, whose features are computed once.
        """
        if self.plan.recipe.model.trainable != "classifier" or self.views.augmult:
            return self.model, None
        name = named_classifier(self.model, len(self.dataset.classes))
        backbone = Backbone(self.model, name, torch.zeros(1, *self.dataset.shape, device=self.device))
        self.model.train()
        return classifier_of(self.model, name), backbone

    def _example_shape(self) -> tuple[int, ...]:
        """Of what `trained` takes."""
        if self._backbone is None:
            return self.dataset.shape
        with torch.no_grad():
            return tuple(self._backbone(torch.zeros(1, *self.dataset.shape, device=self.device)).shape[1:])

    def _values_saved(self) -> int:
        """Numbers that autograd keeps of one more view; those kept once, whatever the batch, are left
        out (standardised weights).
        """
        counts = []
        self.trained.eval()
        for rows in (1, 2):
            with count_saved() as saved:
                self.trained(torch.zeros(rows, *self._example_shape(), device=self.device))
            counts.append(saved[0])
        self.trained.train()
        return max(1, counts[1] - counts[0])

    @property
    def refusal(self) -> str | None:
        """Why a private run could not have a faster engine; None if it has the fastest."""
        return self.grad_fn.refusal if self.grad_fn else None

    def initialise(
        self, seed: np.ndarray, took_part: np.ndarray | None = None, state: dict[str, torch.Tensor] | None = None
    ) -> None:
        """Draws the initial weights from one uniform word, or takes those of a checkpoint; then computes what stays the
        same from then on.

        Args:
            seed: (1,), uint64.
            took_part: (m,), bool: which canaries take part; None: there are none.
            state: Of a run that goes on, as `State.tensors` gave it.
        """
        if state is None:
            self.model.load_state_dict(self._build(seed=int(seed[0]) >> 1).state_dict())
        else:  # features are of the network that the run began with
            self.model.load_state_dict(model_state(state), strict=False)  # a centre has no place there yet
        self._compute_features()
        if self.plan.recipe.model.features == "centred":
            self._centred = centre_features(self.model, named_classifier(self.model, len(self.dataset.classes)))
        self.state = State(self.model, self.plan.recipe)
        if state is not None:
            self.state.load(state)
            self.centre()
        self.drawn_from = self.train if took_part is None else self._with_canaries(took_part)

    def _compute_features(self) -> None:
        """Of all images, where the rest of the network is fixed and each image is seen as it is."""
        if self._backbone is not None:
            self.train, self.held_out = (
                features_of(self._backbone, images, self.device, self._report)
                for images in (self.dataset.train, self.dataset.held_out)
            )
            self.model.train()

    def _with_canaries(self, took_part: np.ndarray) -> WithCanaries:
        dataset = self.dataset
        images = canary_images(
            len(took_part),
            len(dataset.classes),
            mean=dataset.mean,
            std=dataset.std,
            image_size=dataset.image_size,
            stored_size=self.plan.recipe.data.stored_size(dataset.image_size),
        )
        if self._backbone is None:
            return WithCanaries(dataset.train, images, took_part)
        assert isinstance(self.train, FeatureSet)
        of_canaries = features_of(self._backbone, images, self.device, self._report)
        self.model.train()
        return WithCanaries(self.train, of_canaries, took_part)

    @torch.inference_mode()
    def seconds_of_features(self, num_images: int) -> float:
        """How long the features of so many images will take, from a batch of blank ones; 0 where
        none are computed.
        """
        if self._backbone is None:
            return 0.0
        batch = torch.zeros(ROWS, *self.dataset.shape, device=self.device)
        times = []
        for _ in range(2):
            start = time.perf_counter()
            self._backbone(batch).sum().item()
            times.append(time.perf_counter() - start)
        return min(times) / ROWS * num_images

    @property
    def lacks_first_release(self) -> bool:
        """Whether what is released before the updates is not at hand."""
        return self.first_release is not None and not self._centred.centre.any()

    def take_first_release(self, sums: dict[str, torch.Tensor], noise: Stream) -> None:
        """From here on features are centred by what is released of the first sums."""
        assert self.first_release is not None
        self._centred.centre.copy_(self.first_release.release(sums, noise))
        self.centre()

    def centre(self) -> None:
        """Takes the centre that the state has off all features, once."""
        if self.first_release is not None and self._centred.centre.any():
            centre = self._centred.centre.clone()
            assert isinstance(self.train, FeatureSet) and isinstance(self.held_out, FeatureSet)
            for features in (self.train, self.held_out):
                features.replace(lambda rows: centred(rows, centre.to(rows.device)))

    def collect(self, randomness: Randomness, step: int) -> tuple[dict[str, torch.Tensor], Statistics]:
        """What the gradients of one update add up to; in a private run nobody may see it."""
        every = self.plan.recipe.training.norm_histogram_every
        with_norms = every is not None and (step == 1 or step % every == 0)
        if self._people is None:
            return self.step.collect(self.drawn_from, self.state.parameters, randomness, with_norms=with_norms)
        if self._drawn is None:
            self._drawn = People(self.train, self._people)
        return self.step.collect(self._drawn, self.state.parameters, randomness, with_norms=with_norms)


def _refuse_other_state(model: torch.nn.Module) -> None:
    """Raises InputError if a module keeps state that is no tensor, which no checkpoint could hold."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            where = f"{type(module).__name__} at '{path}'" if path else f"the model ({type(module).__name__})"
            raise InputError(
                f"{where} keeps state of its own (get_extra_state), which no checkpoint could "
                "hold. Keep it in buffers, or leave it out."
            )


def build_learner(
    plan: Plan,
    dataset: Dataset,
    device: torch.device,
    recorded: dict[str, Any] | None,
    trust: Collection[str] = (),
    weights: Weights | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Learner:
    """A learner; its model may come from trusted modules alone, and starts from the weights that are given.

    Args:
        recorded: Engine, methods and microbatch size of a run that goes on bit for bit; None: they are chosen.
    """
    keep_freed_memory()
    training = plan.recipe.training
    refuse_missing_tf32(training.precision, device)
    engine, methods = training.engine, None
    microbatch_size = None if training.microbatch_size == "auto" else training.microbatch_size
    if plan.recipe.run.seed is not None:
        methods = {"memory_format": "contiguous"}  # nothing measured: equal seeds give equal bits
    if recorded is not None:
        if engine == "auto":
            engine = recorded["engine"]
        microbatch_size = microbatch_size or recorded["microbatch_size"]
        methods = recorded["methods"]
    # Operations on a small microbatch leave a second core idle; two microbatches side by side do
    # not.
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    speed = Speed(engine, microbatch_size, methods, training.precision, training.compile, workers)
    return Learner(plan, dataset, device, speed, trust, weights, report)
