"""The loop over updates, and what a run writes before, during and after it."""

import contextlib
import dataclasses
import datetime
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Literal

import torch

from sfumato.accounting.accountants import EpsilonCurve
from sfumato.data.examples import Dataset
from sfumato.errors import InputError, MachineError
from sfumato.json_record import finite
from sfumato.models.weights import Weights, read_weights
from sfumato.planning.claims import Guarantee, claims
from sfumato.planning.resolve import Plan
from sfumato.randomness import Streams
from sfumato.run_folder import coins, files, launch, ledger, record
from sfumato.run_folder.certificate import certificate, public_inputs
from sfumato.run_folder.device import pick_device
from sfumato.run_folder.launch import Launch
from sfumato.run_folder.record import Certificate, Metrics, PrivateMetrics, RecordLines, Result
from sfumato.run_folder.verification import verify_run
from sfumato.training.allocator import give_freed_memory_back
from sfumato.training.draws import Draws
from sfumato.training.held_out import (
    HeldOutScores,
    accuracy_on_training_images,
    held_out_scores,
    scores_with_views,
    warning_of_chance,
)
from sfumato.training.interrupt import Interrupted, watch_for_interrupts
from sfumato.training.learner import Learner, build_learner
from sfumato.training.logs import Logs, log_kinds
from sfumato.training.outcome import result, save_weights
from sfumato.training.step import Statistics
from sfumato.training.world import World

_CHECKPOINT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a run tells whoever watches it; every call may be ignored."""

    message: Callable[[str], None] = lambda text: None
    step: Callable[["StepFacts"], None] = lambda facts: None


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """Where a run stands after a step.

    Attributes:
        epsilon: Spent so far; None where the run is not private.
        accuracy: On held-out images when they were last looked at; None before.
        evaluated: Whether that was after this step.
    """

    step: int
    num_steps: int
    epsilon: float | None
    accuracy: float | None
    images_per_second: float
    evaluated: bool


@dataclasses.dataclass(frozen=True)
class Looks:
    """What is looked at besides what the recipe asks for. Nothing that is released depends on it.

    Attributes:
        steps: After which held-out images are looked at, too.
        training_images: Whether accuracy on training images is noted for the owner (metrics_private.jsonl) after these
            steps and the last one: no guarantee covers it.
    """

    steps: frozenset[int] = frozenset()
    training_images: bool = False


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
    looks: Looks = Looks(),  # noqa: B008  (immutable)
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
        device: "auto", "cpu", "cuda" ...
        resume: Go on with the run in ``folder``, from its newest checkpoint; begin where nothing was begun; one that is
            complete returns its result again.
        max_lost: The share of the plan's updates that crashes may cost the model before the run is refused.
        trust: Modules that may be imported for the recipe's model, each by its full name.
        progress: Who watches.
        looks: What is evaluated besides.

    Returns:
        What result.json holds.

    Raises:
        InputError: If the input is wrong; nothing that was there is lost.
        MachineError: If the disk fails, or too much was lost; the run can be resumed.
        Interrupted: After SIGINT or SIGTERM, once a checkpoint is written.
    """
    files.refuse_name(folder)
    files.refuse_among_images(folder, plan.recipe.data)
    plan, weights = _with_weights(plan)
    log_kinds(plan.recipe.run)
    refuse_large_groups(plan, dataset.train.largest_group())
    if resume and (folder / record.RESULT_FILE).exists():
        launch.refuse_changed_recipe(folder, plan)
        return verify_run(folder)[1].model_copy(update={"run": str(folder)})  # it may have been moved
    with contextlib.ExitStack() as stack:
        started = launch.go_on(folder, plan, dataset, max_lost) if resume else None
        if started is not None:
            stack.callback(started.ledger.close)
        learner = _build(plan, dataset, device, started, trust, weights, progress)
        if started is None:
            if not resume:
                files.create(folder)
            started = launch.begin(folder, plan, dataset)
            stack.callback(started.ledger.close)
        logs = Logs(folder, plan.recipe.run)
        stack.callback(logs.close)
        stack.callback(give_freed_memory_back)
        return _Run(plan, dataset, learner, started, progress, looks, logs).finish()


def _build(
    plan: Plan,
    dataset: Dataset,
    device: str,
    started: Launch | None,
    trust: Collection[str],
    weights: Weights | None,
    progress: Progress,
) -> Learner:
    """Model and engine. A run of a public seed goes on with the methods that it began with: equal bits."""
    seeded = plan.recipe.run.seed is not None and started is not None and started.checkpoint is not None
    recorded = started.checkpoint.facts["speed"] if seeded and started and started.checkpoint else None
    compiles = "; compiling takes some minutes" if plan.recipe.training.compile else ""
    with said_when_long(
        lambda: progress.message(f"still tracing the model and trying how to differentiate it{compiles}")
    ):
        learner = build_learner(plan, dataset, pick_device(device), recorded, trust, weights, progress.message)
    for line in learner.network.fitted.lines() if learner.network.fitted else []:
        progress.message(line)
    if plan.recipe.privacy is not None and learner.engine == "reference":
        why = f": {learner.refusal}" if learner.refusal else ""
        progress.message(f'engine "reference" computes one image at a time, which is slow{why}')
    return learner


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


@contextlib.contextmanager
def said_when_long(say: Callable[[], None], seconds: float = 8.0) -> Iterator[None]:
    """Says something if the block takes longer than that."""
    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def refuse_large_groups(plan: Plan, largest: tuple[str, int] | None) -> None:
    """Refuses a person with more images than the certificate would cover.

    Args:
        plan: Of the run.
        largest: The group with most training images and how many it has; None where images are not
            grouped.

    Raises:
        InputError: Naming the group.
    """
    privacy = plan.recipe.privacy
    if privacy is None or privacy.max_images_per_person is None or largest is None:
        return
    group, count = largest
    if count > privacy.max_images_per_person:
        raise InputError(
            f"group {group!r} has {count} training images, more than "
            f"privacy.max_images_per_person = {privacy.max_images_per_person}: its epsilon would "
            "not be covered. Raise the limit or remove images."
        )


class _Run:
    """The loop's variables; ``finish`` reads from top to bottom."""

    def __init__(
        self,
        plan: Plan,
        dataset: Dataset,
        learner: Learner,
        started: Launch,
        progress: Progress,
        looks: Looks,
        logs: Logs,
    ) -> None:
        self.plan, self.dataset, self.learner = plan, dataset, learner
        self.started, self.ledger, self.folder = started, started.ledger, started.folder
        self.progress, self.looks, self.logs = progress, looks, logs
        self.world = World()
        self.streams = Streams(plan.recipe.run.seed)
        self.mechanism = plan.mechanism
        self.draws = Draws(plan.mechanism, learner.views, self.streams)
        self.metrics = RecordLines(self.folder / record.METRICS_FILE)
        self.metrics_private = RecordLines(self.folder / record.PRIVATE_METRICS_FILE, mode=0o600)
        self.seconds: dict[str, float] = {}
        self.step = 0
        self.seconds_before = 0.0
        self.started_at = time.perf_counter()
        self._initialise()
        self.releases_before = self.ledger.num_releases

    def _initialise(self) -> None:
        """All that is drawn once, in checkpoint 0; or what the newest checkpoint has."""
        learner, found, num_canaries = self.learner, self.started.checkpoint, self.plan.recipe.audit.canaries
        word = self.streams.stream("initial weights").uint64(1)
        if found is None:
            took_part = None
            if num_canaries:
                stream = self.streams.stream("coins of canaries")
                took_part = coins.toss(self.folder, self.started.run_id, num_canaries, stream)
            learner.initialise(word, took_part)
            self._checkpoint()
        else:
            took_part = coins.read(self.folder, self.started.run_id, num_canaries) if num_canaries else None
            learner.initialise(word, took_part, found.state)
            self.step, self.seconds_before = found.step, found.facts["seconds"]
            lost = self.ledger.num_releases - found.num_releases
            if lost:
                self.progress.message(
                    f"{lost} update(s) since the last checkpoint are lost: they were released and count for the epsilon"
                )
        self.state = learner.state
        for lines in (self.metrics, self.metrics_private):
            lines.keep_up_to(0 if found is None else found.num_releases)
        self.logs.go_on_from(1 if found is None else found.num_releases + 1)

    def finish(self) -> Result:
        """Takes every update that is left, evaluates, and writes what a finished run leaves."""
        self._write_certificate()
        with watch_for_interrupts() as interrupted, self._kept_when_the_disk_fails():
            self._release_first()
            scores = self._take_updates(interrupted)
        return self._complete(scores)

    @contextlib.contextmanager
    def _kept_when_the_disk_fails(self) -> Iterator[None]:
        """Writes a last checkpoint, for which there is room, when anything else cannot be written."""
        try:
            yield
        except MachineError as error:
            if isinstance(error.__cause__, OSError):  # not another start of this run, whose files these are then
                self._checkpoint()
            raise

    def _take_updates(self, interrupted: Callable[[], bool]) -> HeldOutScores:
        """All that the plan has left. The scores are those of the last weights."""
        num_steps, ledger, learner, world = self.mechanism.num_steps, self.ledger, self.learner, self.world
        scores: HeldOutScores | None = None
        last_checkpoint = time.monotonic()
        while ledger.num_releases < num_steps:  # the plan is a hard cap on releases
            release = ledger.num_releases + 1  # never repeats, whatever was lost
            with self._timed("sampling"):
                randomness = self.draws.of_update(release)
            with self._timed("gradient"):
                grad_sum, statistics = learner.collect(world.share(randomness), release)
                grad_sum = world.sum(grad_sum)
            with self._timed("ledger"):  # on disk before any noise is drawn
                ledger.append(self.step + 1)
            with self._timed("update"):
                released = world.same(functools.partial(self._noised, grad_sum, release))
                self.step += 1
                self.state.update(released, release, self.step)

            evaluated = self._is_looked_at(release)
            if evaluated:
                scores = self._evaluate(release)
            if evaluated or statistics.norms is not None:
                self._note(release, statistics)
            accuracy = scores.averaged.accuracy if scores else None
            epsilon, rate = self._curve(release), self._images_per_second(release)
            self.progress.step(StepFacts(release, num_steps, epsilon, accuracy, rate, evaluated))
            stops, is_due = interrupted(), release % self._checkpoint_every == 0 or release == num_steps
            if stops or is_due or time.monotonic() - last_checkpoint > _CHECKPOINT_SECONDS:
                with self._timed("checkpoint"):
                    self._checkpoint()
                last_checkpoint = time.monotonic()
            if stops and release < num_steps:
                raise Interrupted(release, num_steps)
        return scores or held_out_scores(learner, self.dataset)

    def _noised(self, grad_sum: dict[str, torch.Tensor], release: int) -> dict[str, torch.Tensor]:
        return self.learner.update.release(grad_sum, self.draws.noise(release))

    @functools.cached_property
    def _checkpoint_every(self) -> int:
        return self.plan.recipe.training.checkpoint_every or max(self.mechanism.num_steps // 50, 1)

    def _is_looked_at(self, release: int) -> bool:
        num_steps = self.mechanism.num_steps
        every = self.plan.recipe.training.evaluate_every or max(num_steps // 10, 1)
        return release in self.looks.steps or release == num_steps or release % every == 0

    def _evaluate(self, release: int) -> HeldOutScores:
        with self._timed("evaluation"):
            scores = held_out_scores(self.learner, self.dataset)
        line = Metrics(
            step=release,
            epsilon=self._curve(release),
            accuracy=scores.averaged.accuracy,
            accuracy_last=scores.accuracy_last,
        )
        self.metrics.append(line)
        self.logs.public(line)
        return scores

    def _note(self, release: int, statistics: Statistics) -> None:
        """For the owner; what a diverged run has no finite number for is None, and no reason to stop."""
        asked = release in self.looks.steps or release == self.mechanism.num_steps
        noted = PrivateMetrics(
            step=release,
            loss=finite(statistics.loss),
            clipped_fraction=finite(statistics.clipped_fraction),
            grad_norm=finite(statistics.grad_norm),
            clipped_square=finite(statistics.clipped_square),
            norms=statistics.norms,
            train_accuracy=accuracy_on_training_images(self.learner) if asked and self.looks.training_images else None,
            seconds=self._elapsed(),
            phases=self.seconds,
        )
        self.metrics_private.append(noted)
        self.logs.private(noted)

    def _release_first(self) -> None:
        """What is released of all examples before update 1, where there is such a thing: number 0 of the ledger."""
        learner, is_counted = self.learner, self.ledger.lines.has_first_release
        if learner.first_release is None or not learner.lacks_first_release:
            return
        if is_counted or self.ledger.num_releases:
            self.progress.message(
                "the mean of features was released in a start that was cut short, and is lost: going on without it"
            )
            return
        with self._timed("gradient"):
            sums = learner.first_release.collect(learner.source.train)
        with self._timed("ledger"):  # on disk before any noise is drawn
            self.ledger.append(0, "first release")
        learner.take_first_release(sums, self.draws.noise(0))
        self._checkpoint()

    @functools.cached_property
    def _curve(self) -> Callable[[int], float | None]:
        """Epsilon after so many releases; of a run that was selected from several, that of the whole plan."""
        plan = self.plan
        if not plan.private:
            return lambda release: None
        if plan.selection is not None:
            return lambda release: self._claims.epsilon
        return EpsilonCurve(self.mechanism, plan.delta, plan.recipe.budget.accountant).at

    @functools.cached_property
    def _claims(self) -> Guarantee:
        return claims(self.plan, self.mechanism)

    def _certificate(self, status: Literal["running", "complete"]) -> Certificate:
        sha256, public = ledger.sha256_of(self.ledger.path), public_inputs(self.plan, self.dataset)
        so_far = None if self.plan.selection is not None else self._curve(self.ledger.num_releases)
        return certificate(self.plan, self._claims, self.ledger.lines, self.step, status, public, sha256, so_far)

    def _write_certificate(self) -> None:
        record.write(self.folder / record.CERTIFICATE_FILE, self._certificate("running"))

    def _checkpoint(self) -> None:
        speed = {"engine": self.learner.engine, "microbatch_size": self.learner.microbatch_size}
        facts = {"seconds": self._elapsed(), "speed": {**speed, "methods": self.learner.methods}}
        self.started.save(self.learner.state.tensors(), self.step, facts)
        self._write_certificate()

    def _elapsed(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started_at

    def _images_per_second(self, release: int) -> float:
        """Expected, not realised, batches: the realised count is sensitive."""
        taken = release - self.releases_before
        return self.mechanism.batch_size * taken / max(time.perf_counter() - self.started_at, 1e-9)

    def _timed(self, phase: str) -> "_Timed":
        return _Timed(self.seconds, phase)

    def _complete(self, scores: HeldOutScores) -> Result:
        """Writes weights, certificate and result, in this order."""
        is_selected = self.plan.selection is not None  # when and how fast would tell which of several it was
        claim = self._certificate("complete")
        temperature, path = scores.temperature, self.folder / record.WEIGHTS_FILE
        digest = save_weights(path, self.plan, self.learner, claim, temperature)
        day = None if is_selected else datetime.datetime.now(datetime.UTC).date().isoformat()
        claim = claim.model_copy(update={"weights_sha256": digest, "finished_on": day})
        record.write(self.folder / record.CERTIFICATE_FILE, claim)
        if warning := warning_of_chance(self.learner, self.dataset.classes, scores):
            self.progress.message(warning)
        test_views = self.plan.recipe.augmentation.test_views
        with_views = scores_with_views(self.learner, self.dataset, test_views, self.progress.message)
        seconds = self._elapsed()
        rate = self.mechanism.batch_size * max(self.step, 1) / max(seconds, 1e-9)
        found = result(
            claim,
            self.folder,
            self.dataset,
            scores,
            with_views,
            num_parameters=self.learner.num_parameters,
            images_per_second=None if is_selected else rate,
            seconds=None if is_selected else seconds,
        )
        record.write(self.folder / record.RESULT_FILE, found)
        self.started.checkpoints.free_room()
        return found


class _Timed:
    """Adds the seconds of a block to one phase of the run."""

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self.seconds, self.phase = seconds, phase

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + time.perf_counter() - self.start
