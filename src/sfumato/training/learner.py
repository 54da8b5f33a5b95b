"""Network, source and update of one run together, ready to take updates."""

import os
import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from sfumato.clipping import GradFn, clipped_grad
from sfumato.clipping.clip import refuse_missing_tf32
from sfumato.clipping.microbatch import default_microbatch_size
from sfumato.clipping.protocol import Speed
from sfumato.data.canaries import WithCanaries, canary_images
from sfumato.data.examples import Dataset, Examples, FeatureSet
from sfumato.data.images import ImageSet
from sfumato.data.views import People, Views
from sfumato.errors import InputError, refusing
from sfumato.evaluation.scores import Objective, predict_logits, require_rows_apart
from sfumato.json_record import pick
from sfumato.models.weights import Weights
from sfumato.planning.resolve import Plan
from sfumato.randomness import Stream
from sfumato.run_folder.launch import is_under_torchrun
from sfumato.training.features import features_of
from sfumato.training.flat import require_one_type
from sfumato.training.network import Network
from sfumato.training.process import keep_freed_memory
from sfumato.training.state import State
from sfumato.training.step import OrdinaryStep, PrivateStep, Randomness, Rows
from sfumato.training.world import World


class Learner:
    """Takes updates. ``initialise`` must be called once, before the first.

    Args:
        plan: The resolved run.
        dataset: Its images.
        device: Where it computes.
        trust: Modules that the model may come from.
        weights: That it starts from; None: from scratch.
        report: Takes lines that the user should read.
        world: Whose gradients are added up.
        recorded: `speed` of another process, or of a run that goes on bit for bit; None: it is chosen.

    Attributes:
        device: Where it computes.
        network: Model, and the part of it that trains.
        train, held_out: Examples, which are images, or features of them that are computed once; from `initialise` on.
        drawn_from: What updates draw from: `train`, with canaries behind, or people.
        update: How an update is computed: clipped, or ordinary.
        state: What an update changes.
        engine, methods, microbatch_size, num_workers: How gradients are computed.
    """

    train: Examples
    held_out: Examples
    drawn_from: Examples | WithCanaries | People
    update: PrivateStep | OrdinaryStep
    state: State
    methods: dict[str, str]

    def __init__(
        self,
        plan: Plan,
        dataset: Dataset,
        device: torch.device,
        trust: Collection[str] = (),
        weights: Weights | None = None,
        report: Callable[[str], None] = lambda line: None,
        world: World = World(),  # noqa: B008  (without state)
        recorded: dict[str, Any] | None = None,
    ) -> None:
        keep_freed_memory()
        self.world = world
        self._plan, self._dataset, self.device, self._report = plan, dataset, device, report
        recipe = plan.recipe
        refuse_missing_tf32(recipe.training.precision, device)
        speed = _speed(plan, device, recorded)
        if speed.compile:
            report("compiling the model, which takes some minutes")
        self.objective = Objective.of(recipe.data, recipe.training.label_smoothing)
        self.views = Views.of(recipe.augmentation)
        self.network = Network(plan, dataset, device, trust, weights)
        for line in self.network.fitted.lines() if self.network.fitted else []:
            report(line)
        if self.network.low_rank:
            shown = ", ".join(self.network.low_rank[:8]) + (", ..." if len(self.network.low_rank) > 8 else "")
            report(f"{len(self.network.low_rank)} layers get low-rank updates, and no other weight: {shown}")
        if self.network.gives_probabilities:
            report("warning: the model ends in a softmax, and the loss has one: it would learn little. Leave it out")
        trainable = {name: value for name, value in self.network.model.named_parameters() if value.requires_grad}
        require_one_type(trainable)
        self.num_parameters = sum(value.numel() for value in trainable.values())
        if recipe.privacy is None:
            self._prepare_ordinary(speed)
        else:  # all before the run folder is made: a model that is refused leaves nothing behind
            self._prepare_private(speed)

    @property
    def speed(self) -> dict[str, Any]:
        """How gradients are computed, for who is to compute as this."""
        return pick(self, "engine", "microbatch_size", "methods")

    def _prepare_ordinary(self, speed: Speed) -> None:
        self.engine, self.methods, self.num_workers = speed.engine, {}, 1
        self.microbatch_size = speed.microbatch_size or default_microbatch_size(
            0, max(1, self.views.augmult) * self.network.values_saved()
        )
        max_grad_norm = self._plan.recipe.optimizer.max_grad_norm
        self.update = OrdinaryStep(
            self.network.trained, self.objective, self.views, self.microbatch_size, max_grad_norm, speed
        )

    def _prepare_private(self, speed: Speed) -> None:
        recipe, network = self._plan.recipe, self.network
        privacy, row = recipe.budget, network.blank_examples()
        of_people = privacy.person_sampling == "persons"
        augmult = (privacy.max_images_per_person or 0) if of_people else self.views.augmult
        grad_fn: GradFn = clipped_grad(
            network.trained,
            self.objective.loss,
            clipping_norm=privacy.clipping_norm,
            augmult=augmult,
            per_view=of_people,
            **vars(speed),
        )
        views = row[:, None].expand(1, augmult, *row.shape[1:]) if augmult else row
        labels = torch.zeros_like(self._dataset.train.labels[:1], device=row.device)
        targets = [labels]
        if of_people:
            targets = [labels[:, None].expand(1, augmult, *labels.shape[1:]), torch.ones(1, augmult, device=row.device)]
        prepared = grad_fn.prepare(views, *targets, batch_size=recipe.training.batch_size)
        self.engine, self.microbatch_size = prepared.name, prepared.microbatch_size
        self.methods, self.num_workers = grad_fn.methods, grad_fn.num_workers
        self.update = PrivateStep(grad_fn, self._plan.mechanism, self.views)
        if self.engine == "reference":
            why = f": {grad_fn.refusal}" if grad_fn.refusal else ""
            self._report(f'engine "reference" computes one image at a time, which is slow{why}')
        require_rows_apart(network.trained, row)
        if network.backbone is not None:  # features may not be of several images
            require_rows_apart(network.backbone, network.blank())

    def initialise(
        self, word: np.ndarray, took_part: np.ndarray | None = None, state: dict[str, Any] | None = None
    ) -> None:
        """Draws the initial weights from one uniform word, or takes those of a checkpoint; then computes what stays the
        same from then on.

        Args:
            word: (1,), uint64.
            took_part: (m,), bool: which canaries take part; None: there are none.
            state: Of a run that goes on, as `State.state_dict` gave it; the first process has it.
        """
        with self.world.together():
            if state is None:
                self.network.initialise(int(word[0]))
            else:
                self.network.load(state["model"])
        self.state = State(self.network.model, self._plan.recipe, self.world)
        self.state.load_state_dict(state)
        with self.world.together():  # features, of the network that the run began with, take long
            self._find_examples(took_part)

    def _find_examples(self, took_part: np.ndarray | None) -> None:
        recipe, dataset = self._plan.recipe, self._dataset
        self.train, self.held_out = self._seen(dataset.train), self._seen(dataset.held_out)
        self.drawn_from, privacy = self.train, recipe.privacy
        if privacy is not None and privacy.person_sampling == "persons":
            assert privacy.max_images_per_person is not None
            self.drawn_from = People(self.train, privacy.max_images_per_person)
        elif took_part is not None:
            how = pick(dataset.train, "mean", "std") | {"image_size": dataset.train.shape[1]}
            stored_size = recipe.data.stored_size(dataset.train.shape[1])
            images = canary_images(len(took_part), len(dataset.classes), stored_size=stored_size, **how)
            self.drawn_from = WithCanaries(self.train, self._seen(images), took_part)

    def _seen(self, images: ImageSet) -> ImageSet | FeatureSet:
        """Images as `network.trained` takes them."""
        if self.network.backbone is None:
            return images
        found = features_of(self.network.backbone, images, self.device, self._report)
        self.network.model.train()
        return found

    def collect(self, randomness: Randomness) -> tuple[torch.Tensor, Rows]:
        """What the gradients of this process's share of an update add up to; in a private run nobody may see it."""
        grad_sum, rows = self.update.collect(self.drawn_from, self.state.parameters, randomness, self.world.share)
        return self.state.flat.join(grad_sum), rows

    def release(self, summed: Any, noise: Stream) -> torch.Tensor:
        """The gradient that an optimizer may see, of this process's shard, from what `World.sum` makes of the sums."""

        def part(values: torch.Tensor, first: int) -> torch.Tensor:
            return self.update.release(values, noise, first)

        gradient = self.world.release(summed, part, self.state.mine)
        return self.update.scaled(gradient, self.world.total if self.world.is_sharded else float)

    def logits(self, examples: Examples) -> torch.Tensor:
        """What the model answers for examples: (N, classes), float32, on the CPU. Each process asks for a part."""
        own = torch.arange(len(examples)).tensor_split(self.world.size)[self.world.rank]
        # A model need not take a batch of none.
        none = torch.zeros(0, len(self._dataset.classes))
        return self.world.gather(predict_logits(self.network.trained, examples, own) if len(own) else none)


def _speed(plan: Plan, device: torch.device, recorded: dict[str, Any] | None) -> Speed:
    """How to compute: as the recipe says, else as recorded, else chosen; nothing is measured where equal seeds give
    equal bits.
    """
    training = plan.recipe.training
    engine, methods = training.engine, None if plan.recipe.run.seed is None else {"memory_format": "contiguous"}
    microbatch_size = None if training.microbatch_size == "auto" else training.microbatch_size
    if recorded is not None:
        engine = recorded["engine"] if engine == "auto" else engine
        microbatch_size, methods = microbatch_size or recorded["microbatch_size"], recorded["methods"]
    workers = torch.get_num_threads() if device.type == "cpu" else 1  # each loads for itself
    return Speed(engine, microbatch_size, methods, training.precision, training.compile, workers)


def pick_device(name: str) -> torch.device:
    """The device of that name: "cpu", "cuda", "cuda:N"; "auto" takes a GPU where there is one, and each rank of a
    machine its own.

    Raises:
        InputError: If there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and is_under_torchrun():
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    remedy = 'Use "auto", "cpu", "cuda" or "cuda:N".'
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):  # others have no float64, which engines are checked in
        raise InputError(f'--device "{name}" is none that is known. {remedy}')
    with refusing(f'--device "{name}" cannot be used', remedy, RuntimeError, AssertionError):
        torch.zeros(1, device=name)
    return torch.device(name)
