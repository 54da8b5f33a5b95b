"""Network, source and update of one run together, ready to take updates."""

import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from sfumato.clipping import GradFn, clipped_grad
from sfumato.clipping.clip import refuse_missing_tf32
from sfumato.clipping.microbatch import default_microbatch_size
from sfumato.clipping.protocol import Speed
from sfumato.data.examples import Dataset
from sfumato.data.views import Views
from sfumato.evaluation.objective import Objective
from sfumato.evaluation.scores import require_rows_apart
from sfumato.models.layers import CentredLinear
from sfumato.models.weights import Weights
from sfumato.planning.resolve import Plan
from sfumato.randomness import Stream
from sfumato.training.allocator import keep_freed_memory
from sfumato.training.features import ROWS
from sfumato.training.first_release import MeanFeatures
from sfumato.training.network import Network
from sfumato.training.nonprivate import OrdinaryStep
from sfumato.training.source import Source, source_of
from sfumato.training.state import State, model_state
from sfumato.training.step import PrivateStep, Randomness, Statistics, Step


class Learner:
    """Takes updates. ``initialise`` must be called once, before the first.

    Attributes:
        network: Model, and the part of it that trains.
        source: What updates draw from; from `initialise` on.
        update: How an update is computed: clipped, or ordinary.
        state: What an update changes.
        grad_fn: For a private run, what sums clipped gradients, prepared; else None.
        first_release: What is released once before update 1; None: nothing.
        engine, methods, microbatch_size, num_workers: How gradients are computed.
    """

    source: Source
    update: Step
    state: State
    methods: dict[str, str]
    grad_fn: GradFn | None = None
    first_release: MeanFeatures | None = None
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
        self._plan, self._dataset, self._device, self._report = plan, dataset, device, report
        recipe = plan.recipe
        proportions = recipe.data.class_proportions
        self.objective = Objective(tuple(proportions) if proportions else None, recipe.training.label_smoothing)
        self.views = Views.of(recipe.augmentation)
        self.network = Network(plan, dataset, device, trust, weights)
        trainable = (value for value in self.network.model.parameters() if value.requires_grad)
        self.num_parameters = sum(value.numel() for value in trainable)
        if recipe.model.features == "centred":
            self.first_release = MeanFeatures(plan.mechanism, device)
        if recipe.privacy is None:
            self._prepare_ordinary(speed)
        else:  # all before the run folder is made: a model that is refused leaves nothing behind
            self._prepare_private(speed)

    def _prepare_ordinary(self, speed: Speed) -> None:
        self.engine, self.methods, self.num_workers = speed.engine, {}, 1
        self.microbatch_size = speed.microbatch_size or default_microbatch_size(
            0, max(1, self.views.augmult), self.network.values_saved()
        )
        self.update = OrdinaryStep(
            self.network.trained,
            self.objective,
            self.views,
            self.microbatch_size,
            self._plan.recipe.optimizer.max_grad_norm,
            speed.precision,
            speed.compile,
        )

    def _prepare_private(self, speed: Speed) -> None:
        recipe, network = self._plan.recipe, self.network
        privacy, row = recipe.budget, network.blank_examples()
        of_people = privacy.person_sampling == "persons"
        augmult = (privacy.max_images_per_person or 0) if of_people else self.views.augmult
        grad_fn = self.grad_fn = clipped_grad(
            network.trained,
            self.objective.loss,
            clipping_norm=privacy.clipping_norm,
            augmult=augmult,
            per_view=of_people,
            **vars(speed),
        )
        views = row[:, None].expand(1, augmult, *row.shape[1:]) if augmult else row
        labels = torch.zeros(1, dtype=torch.int64, device=row.device)
        targets = [labels]
        if of_people:
            targets = [labels.expand(1, augmult), torch.ones(1, augmult, device=row.device)]
        prepared = grad_fn.prepare(views, *targets, batch_size=recipe.training.batch_size)
        self.engine, self.microbatch_size = prepared.name, prepared.microbatch_size
        self.methods, self.num_workers = grad_fn.methods, grad_fn.num_workers
        self.update = PrivateStep(grad_fn, self._plan.mechanism, self.views)
        require_rows_apart(network.trained, row)
        if network.backbone is not None:  # features may not be of several images
            require_rows_apart(network.backbone, network.blank())

    @property
    def refusal(self) -> str | None:
        """Why a private run could not have a faster engine; None if it has the fastest."""
        return self.grad_fn.refusal if self.grad_fn else None

    def initialise(
        self, word: np.ndarray, took_part: np.ndarray | None = None, state: dict[str, torch.Tensor] | None = None
    ) -> None:
        """Draws the initial weights from one uniform word, or takes those of a checkpoint; then computes what stays the
        same from then on.

        Args:
            word: (1,), uint64.
            took_part: (m,), bool: which canaries take part; None: there are none.
            state: Of a run that goes on, as `State.tensors` gave it.
        """
        if state is None:
            self.network.initialise(int(word[0]))
        else:  # features are of the network that the run began with
            self.network.load(model_state(state))
        self.source = source_of(self._plan, self._dataset, self.network, self._device, took_part, self._report)
        if self.first_release is not None:
            self._centred = self.network.centred()
        self.state = State(self.network.model, self._plan.recipe)
        if state is not None:
            self.state.load(state)
        if self.first_release is not None and not self.lacks_first_release:
            self.source.centre(self._centred.centre)

    @property
    def lacks_first_release(self) -> bool:
        """Whether what is released before the updates is not at hand."""
        return self.first_release is not None and not self._centred.centre.any()

    def take_first_release(self, sums: dict[str, torch.Tensor], noise: Stream) -> None:
        """From here on features are centred by what is released of the first sums."""
        assert self.first_release is not None
        self._centred.centre.copy_(self.first_release.release(sums, noise))
        self.source.centre(self._centred.centre)

    def collect(self, randomness: Randomness, release: int) -> tuple[dict[str, torch.Tensor], Statistics]:
        """What the gradients of one update add up to; in a private run nobody may see it."""
        every = self._plan.recipe.training.norm_histogram_every
        with_norms = every is not None and (release == 1 or release % every == 0)
        return self.update.collect(self.source.drawn_from, self.state.parameters, randomness, with_norms=with_norms)

    @torch.inference_mode()
    def seconds_of_features(self, num_images: int) -> float:
        """How long the features of so many images will take, from a batch of blank ones; 0 where none are computed."""
        if self.network.backbone is None:
            return 0.0
        times = []
        for _ in range(2):
            start = time.perf_counter()
            self.network.backbone(self.network.blank(ROWS)).sum().item()
            times.append(time.perf_counter() - start)
        return min(times) / ROWS * num_images


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
        engine = recorded["engine"] if engine == "auto" else engine
        microbatch_size = microbatch_size or recorded["microbatch_size"]
        methods = recorded["methods"]
    # Operations on a small microbatch leave a second core idle; two microbatches side by side do not.
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    speed = Speed(engine, microbatch_size, methods, training.precision, training.compile, workers)
    return Learner(plan, dataset, device, speed, trust, weights, report)
