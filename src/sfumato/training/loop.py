"""The loop over updates: how a run begins or goes on, takes its updates, and ends."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato import __version__
from sfumato.clipping.clip import convolutions
from sfumato.data.examples import Dataset, dataset_digest
from sfumato.errors import InputError, MachineError
from sfumato.models.weights import Weights, read_weights
from sfumato.planning.resolve import Plan
from sfumato.randomness import Stream, Streams
from sfumato.run_folder import files, launch, ledger, record
from sfumato.run_folder.checkpoint import Checkpoint
from sfumato.run_folder.launch import Launch
from sfumato.run_folder.record import PrivateMetrics, Result
from sfumato.run_folder.verification import refuted, verify_run
from sfumato.training.learner import Learner, pick_device
from sfumato.training.logs import Progress, StepFacts, log_kinds
from sfumato.training.outcome import (
    HeldOutScores,
    accuracy_on_training_images,
    held_out_scores,
    scores_with_views,
    warning_of_chance,
)
from sfumato.training.process import Interrupted, give_freed_memory_back, watch_for_interrupts
from sfumato.training.step import Draws, Rows
from sfumato.training.world import World
from sfumato.training.writer import Writer


def train(
    plan: Plan,
    dataset: Dataset,
    folder: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    max_lost: float = ledger.MOST_LOST,
    trust: Collection[str] = (),
    progress: Progress = Progress(),  # noqa: B008  (immutable)
    looks: Collection[int] = (),
    world: World = World(),  # noqa: B008  (without state)
) -> Result:
    """Trains a model and writes the run folder.

    Guarantee: where ``plan.private``, everything that the run releases (all of its folder but owner/) satisfies the
    (epsilon, delta) of privacy.json for the relation it states, whenever and however the run ends. Each update has a
    sample and noise of its own, from fresh bytes of the operating system, and is counted on disk before its noise is
    drawn; there are never more than planned.

    Args:
        plan: From ``resolve``.
        dataset: What the plan was made for.
        folder: Of the new run, or of the one to go on with.
        device, resume, max_lost, trust: As in `sfumato.train`; a run that is complete returns its result again.
        progress: Who watches.
        looks: After which steps held-out images are looked at too, and training images: their accuracy is noted for the
            owner (metrics_private.jsonl), since no guarantee covers it. Nothing that is released depends on it.
        world: The processes that train it together.

    Returns:
        What result.json holds.

    Raises:
        InputError: If the input is wrong; nothing that was there is lost.
        MachineError: If the disk fails, or too much was lost; the run can be resumed.
        Interrupted: After SIGINT or SIGTERM, once a checkpoint is written.
    """
    with world.together():
        files.refuse_name(folder)
        files.refuse_among_images(folder, plan.recipe.data)
        plan, weights = _with_weights(plan)
        log_kinds(plan.recipe.run)
        _refuse_large_groups(plan, dataset)
        if world.is_first and not resume:
            launch.require_room([plan])
    _refuse_unlike(world, plan, dataset)
    with convolutions(plan.recipe.training.precision), contextlib.ExitStack() as stack:  # what is evaluated, too
        finished, started, recorded = None, None, None
        with world.together():
            if resume and world.is_first:
                finished = _finished(folder, plan, progress)
                if finished is None:
                    started = launch.go_on(folder, plan, dataset, max_lost, patience=world.patience)
                if started is not None:
                    stack.callback(started.close)
                # A run of a public seed goes on with the methods that it began with: equal bits.
                found = None if started is None or plan.recipe.run.seed is None else started.checkpoint
                recorded = None if found is None else found.facts["speed"]
        if (result := world.same(lambda: finished)) is not None:
            return result
        make = functools.partial(Learner, plan, dataset, pick_device(device), trust, weights, progress.message, world)
        learner = _measured_by_the_first(make, recorded, world)
        with world.together():
            if started is None and world.is_first:
                if not resume:
                    files.refuse_filled(folder)
                started = launch.begin(folder, plan, dataset, patience=world.patience)
                stack.callback(started.close)
        launch_id = world.same(lambda: None if started is None else started.ledger.launch_id)
        with world.together():  # any of them may be the first after a restart
            launch.require_sight(folder, launch_id)
        stack.callback(give_freed_memory_back)
        return _Run(plan, dataset, learner, world, started, progress, looks).finish()


def _refuse_unlike(world: World, plan: Plan, dataset: Dataset) -> None:
    """Refuses a rank that would add up other gradients than the first one: on its machine lies something else.

    Raises:
        InputError: In all ranks.
    """
    if world.size == 1:
        return
    line = launch.run_line(dataclasses.replace(plan, budget=None)).model_copy(update={"run_id": ""})
    mine = {
        "images": dataset_digest(dataset),
        "recipe": line.model_dump_json() + str(plan.recipe.training.shard_state),
        "versions of Sfumato and PyTorch": f"{__version__} {torch.__version__}",
    }
    first = world.same(lambda: mine)
    with world.together():
        for name, value in mine.items():
            if value != first[name]:
                raise InputError(
                    f"rank {world.rank} has other {name} than the first rank: their sums would be of different things. "
                    "Give all machines the same command, files and software."
                )


def _finished(folder: Path, plan: Plan, progress: Progress) -> Result | None:
    """What a run reached that is complete; said where an audit refuted its claim."""
    if not (folder / record.RESULT_FILE).exists():
        return None
    launch.refuse_changed_recipe(folder, plan)
    if plan.budget is not None:
        path = folder / ledger.LEDGER_FILE
        launch.refuse_another_plan(ledger.read(path).run, launch.run_line(plan), path)
    stated, result = verify_run(folder)
    for finding in refuted(folder, stated):
        progress.message(f"warning: {finding}.")
    return result.model_copy(update={"run": str(folder)})  # it may have been moved


def _measured_by_the_first(make: Callable[..., Learner], recorded: dict[str, Any] | None, world: World) -> Learner:
    """A learner in each process; engine, methods and microbatch size are what the first one found."""
    with world.together():
        learner = make(recorded=recorded) if world.is_first else None
    speed = world.same(lambda: None if learner is None else learner.speed)
    with world.together():
        return make(recorded=speed) if learner is None else learner


def _with_weights(plan: Plan) -> tuple[Plan, Weights | None]:
    """The weights that a recipe starts from, and the plan with their digest.

    Raises:
        InputError: If they cannot be had, or are others than the recipe says.
    """
    model = plan.recipe.model
    model.refuse_missing_weights()
    if model.init_from is None:
        return plan, None
    weights = read_weights(model.name, model.init_from)
    if model.init_sha256 not in (None, weights.digest):
        raise InputError(
            f"model.init_from = {model.init_from!r} holds other weights (SHA-256 {weights.digest}) than "
            f"model.init_sha256 says ({model.init_sha256}). Name the file that was meant, or take the digest out."
        )
    stated = plan.recipe.model_copy(update={"model": model.model_copy(update={"init_sha256": weights.digest})})
    return dataclasses.replace(plan, recipe=stated), weights


def _refuse_large_groups(plan: Plan, dataset: Dataset) -> None:
    """Refuses a person with more images than the certificate would cover."""
    privacy, largest = plan.recipe.privacy, dataset.train.largest_group()
    limit = None if privacy is None else privacy.max_images_per_person
    if limit is not None and largest is not None and largest[1] > limit:
        raise InputError(
            f"group {largest[0]!r} has {largest[1]} training images, more than privacy.max_images_per_person = "
            f"{limit}: its epsilon would not be covered. Raise the limit or remove images."
        )


class _Run:
    """The loop's variables; ``finish`` reads from top to bottom. Each rank has one.

    Attributes:
        writer: Of the first rank, which alone has one.
    """

    writer: Writer

    def __init__(
        self,
        plan: Plan,
        dataset: Dataset,
        learner: Learner,
        world: World,
        started: Launch | None,
        progress: Progress,
        looks: Collection[int],
    ) -> None:
        self.plan, self.dataset, self.learner, self.world = plan, dataset, learner, world
        self.progress, self.looks = progress, looks
        self.streams = Streams(plan.recipe.run.seed)
        self.mechanism = plan.mechanism
        self.draws = Draws(plan.mechanism, learner.views, self.streams)
        self.seconds: dict[str, float] = {}
        self.started_at = time.perf_counter()
        if started is not None:
            self.writer = Writer(plan, dataset, learner, started)
        self._initialise(None if started is None else started.checkpoint)
        self.releases_before = self.num_releases

    def _initialise(self, found: Checkpoint | None) -> None:
        """All that is drawn once, in checkpoint 0; or what the newest checkpoint has."""
        is_new, word, took_part = self.world.same(lambda: (found is None, *self._drawn_once()))
        self.learner.initialise(word, took_part, None if found is None else found.state)
        here: tuple[int, int, float] = (0, 0, 0.0)
        if found is not None:
            here = found.num_releases, found.step, found.facts["seconds"]
        kept, self.step, self.seconds_before = self.world.same(lambda: here)
        self.num_releases = self.world.same(lambda: self.writer.started.ledger.lines.num_releases)
        if is_new:
            self._checkpoint(waits=True)
        elif lost := self.num_releases - kept:
            self.progress.message(
                f"{lost} update(s) since the last checkpoint are lost: they were released and count for the epsilon"
            )
        if self.world.is_first:
            self.writer.go_on_after(kept)

    def _drawn_once(self) -> tuple[np.ndarray, np.ndarray | None]:
        """A word for the initial weights, and which canaries take part."""
        started, num_canaries = self.writer.started, self.plan.recipe.audit.canaries
        word, took_part = self.streams.stream("initial weights").uint64(1), None
        if num_canaries and started.checkpoint is None:
            stream = self.streams.stream("coins of canaries")
            took_part = launch.toss_coins(started.folder, started.run_id, num_canaries, stream)
        elif num_canaries:
            took_part = launch.read_coins(started.folder, started.run_id, num_canaries)
        return word, took_part

    def finish(self) -> Result:
        """Takes every update that is left, evaluates, and writes what a finished run leaves."""
        with contextlib.ExitStack() as stack:
            if self.world.is_first:
                self.writer.certify(self.step)
                stack.callback(self.writer.close)
            with watch_for_interrupts() as interrupted, self._kept_when_the_disk_fails():
                scores = self._take_updates(interrupted)
            return self._complete(scores)

    @contextlib.contextmanager
    def _kept_when_the_disk_fails(self) -> Iterator[None]:
        """Writes a last checkpoint, for which there is room, when anything else cannot be written."""
        try:
            yield
        except MachineError as error:
            # An error of the disk, and of nothing else. A sharded run loses its updates since the last checkpoint: the
            # other ranks, which have the rest, do not know of the error.
            if isinstance(error.__cause__, OSError) and not self.world.is_sharded:
                self._checkpoint(waits=True)
            raise

    def _take_updates(self, interrupted: Callable[[], bool]) -> HeldOutScores:
        """All that the plan has left. The scores are those of the last weights."""
        num_steps, learner, world = self.mechanism.num_steps, self.learner, self.world
        scores: HeldOutScores | None = None
        while self.num_releases < num_steps:  # the plan is a hard cap on releases
            release = self.num_releases + 1  # never repeats, whatever was lost
            with self._timed("sampling"):
                randomness = world.same(functools.partial(self.draws.of_update, release))
            with self._timed("gradient"):
                grad_sum, rows = learner.collect(randomness)  # of this rank's share
                summed = world.sum(grad_sum)
            with self._timed("ledger"):  # on disk before any noise is drawn
                noise = Stream(world.same(functools.partial(self._counted, release)))
            with self._timed("update"):
                private_grad = learner.release(summed, noise)
                self.num_releases, self.step = release, self.step + 1
                learner.state.update(private_grad, release, self.step)

            evaluated = self._is_looked_at(release)
            if evaluated:
                with self._timed("evaluation"):
                    scores = held_out_scores(learner, self.dataset)
                if world.is_first:
                    self.writer.look(release, scores)
            if evaluated or self._has_norms(release):
                self._note(release, rows, summed)
            if world.is_first:
                accuracy = scores.averaged.accuracy if scores else None
                rate = self._images_per_second()
                self.progress.step(StepFacts(release, num_steps, self.writer.epsilon_at, accuracy, rate, evaluated))
            stops, is_due = world.any(interrupted(), world.is_first and self.writer.is_due())
            if stops or is_due:
                with self._timed("checkpoint"):
                    self._checkpoint(waits=stops)
            if stops and release < num_steps:
                raise Interrupted(f"interrupted after step {release} of {num_steps}")
        return scores or held_out_scores(learner, self.dataset)

    def _counted(self, release: int) -> bytes:
        """The key of a release's noise, once it is on the ledger."""
        self.writer.started.append(self.step + 1)
        return self.draws.noise_key(release)

    def _is_looked_at(self, release: int) -> bool:
        num_steps = self.mechanism.num_steps
        return release in self.looks or release == num_steps or release % self.plan.evaluate_every == 0

    def _has_norms(self, release: int) -> bool:
        every = self.plan.recipe.training.norm_histogram_every
        return every is not None and (release == 1 or release % every == 0)

    def _note(self, release: int, rows: Rows, summed: Any) -> None:
        """For the owner; what a diverged run has no finite number for is None, and no reason to stop."""
        train_accuracy = accuracy_on_training_images(self.learner) if release in self.looks else None
        signal, with_norms = self.world.norm(summed), self._has_norms(release)
        every = Rows(*(self.world.gather(values.double()) for values in (rows.norms, rows.losses)))
        if self.world.is_first:
            statistics = self.learner.update.statistics(every, signal, self.learner.num_parameters, with_norms)
            self.writer.note(
                PrivateMetrics(
                    step=release,
                    **statistics,
                    train_accuracy=train_accuracy,
                    seconds=self._elapsed(),
                    phases=self.seconds,
                )
            )

    def _checkpoint(self, *, waits: bool) -> None:
        state = self.learner.state.state_dict()
        if self.world.is_first:
            self.writer.checkpoint(state, self.step, self._elapsed(), waits=waits)

    def _elapsed(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started_at

    def _images_per_second(self) -> float:
        """Expected, not realised, batches: the realised count is sensitive."""
        taken = self.num_releases - self.releases_before
        return self.mechanism.batch_size * taken / max(time.perf_counter() - self.started_at, 1e-9)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Adds the seconds of the block to one phase of the run."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def _complete(self, scores: HeldOutScores) -> Result:
        """What the run reached, on disk by the first rank."""
        if warning := warning_of_chance(self.learner, self.dataset.classes, scores):
            self.progress.message(warning)
        test_views = self.plan.recipe.augmentation.test_views
        with_views = scores_with_views(self.learner, self.dataset, test_views, self.progress.message)
        weights = self.learner.state.averaged_state_dict()
        found = self.step, self._elapsed(), scores, with_views, weights
        return self.world.same(lambda: self.writer.complete(*found))
