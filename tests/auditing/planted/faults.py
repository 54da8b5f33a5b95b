"""The table: ways of losing privacy, each as a change to one or two lines.

`FAULTS` are the classic ones, which every run of the tests plants; `MORE` were made up afterwards, to try the laws.
"""

from tests.auditing.planted.plants import Edit, Fault

_COLLECT, _RELEASE = "training.step:PrivateStep.collect", "training.step:PrivateStep.release"
_SUM, _NOISE, _SAMPLE = (
    "clipping.grad_fn:GradFn._sum",
    "training.step:Draws.noise_key",
    "training.step:Draws.of_update",
)
_UPDATES, _COUNTED = "training.loop:_Run._take_updates", "training.loop:_Run._counted"
_CLAIMS = "planning.claims:claims"
_CLIP, _RUN = "clipping.clip:Clip.__call__", "clipping.graph.engine:GraphEngine._run"
_NORMAL = "training.noise:standard_normal"
_CLAMP, _RADIUS = "torch.clamp(1 / norms, max=1 / self.clipping_norm)", "np.sqrt(-2 * np.log(uniform))"
_FRESH, _STDDEV = 'return self._streams.key("noise", release)', "self.noise_stddev, noise, first)"
_AGAIN = (
    'self._kept = [*getattr(self, "_kept", []), self._streams.key("noise", release)]\n    return self._kept[{place}]'
)
_APPEND, _UPDATE = "self.writer.started.append(self.step + 1)", "learner.state.update(private_grad, release, self.step)"
_BATCH = "with torch.no_grad():  # each thread has a mode of its own"
_EACH_VIEW = (
    "batch = Batch(batch.inputs.flatten(0, 1)[:, None], tuple(target.flatten(0, 1)[:, None] for target in"
    " batch.targets), torch.ones_like(batch.weights).view(-1, 1), batch.is_real.repeat_interleave("
    f"batch.weights.shape[1]))\n        {_BATCH}"
)
_PARTS = "one.out.grad_sum if engine.leaves_out else one.of_finite(clipped)"
_OUT, _MEAN = "return out.grad_sum, Rows(out.grad_norms, out.losses)", "noisy / self.mechanism.batch_size"
_NOISY = "return torch.from_numpy(noisy)"


def _fault(name: str, law: str, *texts: str) -> Fault:
    """Each three texts are an edit: its place, what stands there, and what is put instead."""
    return Fault(name, tuple(Edit(*texts[first : first + 3]) for first in range(0, len(texts), 3)), law)


def _scaled(name: str, factor: str) -> Fault:
    """Noise of another scale."""
    return _fault(name, "release", _RELEASE, _STDDEV, f"self.noise_stddev * {factor}, noise, first)")


FAULTS: tuple[Fault, ...] = (
    _fault("no clipping", "influence", _CLIP, _CLAMP, "torch.full_like(norms, 1 / self.clipping_norm)"),
    _fault(
        "clipped after averaging over the batch",
        "influence",
        *(_SUM, "clipped_sum(self._clip,", "clipped_sum(torch.ones_like,"),
        *(_SUM, "return ClippedGrad(total, torch.cat(norms)"),
        "mean = torch.cat([value.flatten() for value in total.values()]).norm() / len(rows)\n"
        "    total = {name: value * self._clip(mean) for name, value in total.items()}\n"
        "    return ClippedGrad(total, torch.cat(norms)",
    ),
    _fault("each view clipped by itself, not divided by K", "influence", _SUM, _BATCH, _EACH_VIEW),
    _fault(
        "padding counted",
        "influence",
        *(_SUM, "if prepared.has_one_size else 0", ""),
        *(_SUM, "batch.is_real[len(places) :] = False", "pass"),
    ),
    _scaled("noise divided by the batch size twice", "1 / self.mechanism.batch_size"),
    _scaled(
        "noise too small by the root of the accumulation steps",
        "(self.mechanism.batch_size / self.grad_fn.microbatch_size) ** -0.5",
    ),
    _fault("the same noise twice", "release", _NOISE, _FRESH, _AGAIN.format(place="(release - 1) // 2")),
    _fault("noise from a seed that the adversary knows", "secret", _NOISE, "self._streams", "Streams(0)"),
    _fault(
        "batch normalisation let through",
        "networks",
        *("clipping.model_check:layer_findings", "isinstance(module, _BatchNorm)", "False"),
        *("clipping.engine_check:EngineCheck._refuse_meeting", "if not _rows_agree(", "if False and not _rows_agree("),
        *("clipping.graph.rows:Rows._refusal", 'if given.get("training") else', "if False else"),
        *("clipping.engine_check:EngineCheck.refuse", "if error <= _EXACT[expected.exact]:", "if True:"),
        *("clipping.engine_check:EngineCheck.refuse_in_run", "if longer <= _NORM and", "if True or"),
        *("evaluation.scores:require_rows_apart", "if found is not None:", "if False:"),
    ),
    _fault(
        "an example that is not finite let through",
        "influence",
        *("clipping.microbatch:Summed.of_finite", "while not one._is_finite():", "while False:"),
    ),
    _fault(
        "shuffled batches accounted as Poisson",
        "sampling",
        *(_SAMPLE, 'if self._mechanism.sampling == "poisson":', "if False:"),
    ),
    _fault("a ledger that skips a step", "account", _COUNTED, _APPEND, "self.step == 2 or " + _APPEND),
    _fault(
        "the realised batch as divisor",
        "release",
        *(_COLLECT, _OUT, "self.count = max(1, len(drawn))\n    " + _OUT),
        *(_RELEASE, _MEAN, "noisy / self.count"),
    ),
    _fault(
        "a default computed from private labels",
        "influence",
        *("training.learner:Learner.__init__", "Objective.of(recipe.data, "),
        "Objective(tuple((1 + int((dataset.train.labels == label).sum()))"
        " / (len(dataset.train) + len(dataset.classes)) for label in range(len(dataset.classes))), ",
    ),
)

MORE: tuple[Fault, ...] = (
    _fault("clipped at 1.01 times the norm", "influence", _CLIP, _CLAMP, "1.01 * " + _CLAMP),
    _fault(
        "each view clipped by itself, divided by K",
        "influence",
        *(_SUM, _BATCH, _EACH_VIEW),
        *(_SUM, _PARTS),
        "{own: value / max(1, self._augmult) for own, value in one.out.grad_sum.items()}",
    ),
    _fault(
        "a norm that leaves out the bias",
        "influence",
        *("clipping.graph.weights:NormsAndSums.norms", "(rows.square_norms()[0]", "(0 * rows.square_norms()[0]"),
    ),
    _fault(
        "the bias not clipped",
        "influence",
        *(_RUN, "return norms, losses,"),
        "sums[self._names[-1]] = both.clipped_sums(batch.is_real.float())[self._names[-1]]\n    return norms, losses,",
    ),
    _fault("an unreadable image counted", "influence", _COLLECT, "drawn[examples.readable[drawn]]", "drawn"),
    _fault(
        "images centred by the mean of those beside them",
        "influence",
        *("data.images:ImageSet.batch", "if self.crop is", "batch = batch - batch.mean(0) + 0.5\n    if self.crop is"),
    ),
    _fault(
        "averages that see the sum without noise",
        "weights",
        *(_UPDATES, _UPDATE),
        _UPDATE + "\n            learner.state.averages[0].sub_(0.01 * grad_sum)",
    ),
    _fault(
        "weights moved by the sum without noise",
        "release",
        *(
            _UPDATES,
            "update(private_grad,",
            "update(grad_sum / self.mechanism.batch_size,",
        ),
    ),
    _fault(
        "momentum before the noise",
        "release",
        *(_COLLECT, _OUT),
        "self.kept = {name: value + 0.9 * getattr(self, 'kept', {}).get(name, 0)"
        " for name, value in out.grad_sum.items()}\n    return self.kept, Rows(out.grad_norms, out.losses)",
    ),
    _scaled("noise five per cent too small", "0.95"),
    _fault(
        "noise for every microbatch as well",
        "release",
        *(_SUM, _PARTS),
        "{name: value + torch.randn_like(value) for name, value in one.out.grad_sum.items()}",
    ),
    _fault(
        "noise that is not Gaussian, of the right scale",
        "release",
        *(_NORMAL, "radius * np.cos(angle)", "angle * (3**0.5 / math.pi)"),
    ),
    _fault(
        "the same noise again in the second half of a run",
        "release",
        *(_NOISE, _FRESH, _AGAIN.format(place="(release - 1) % 20")),
    ),
    _fault(
        "noise in units of the clipping norm",
        "release",
        *("training.step:PrivateStep.__init__", "grad_fn.sensitivity", "grad_fn.clipping_norm"),
    ),
    _scaled(
        "noise too small where the sum is short",
        "min(1.0, float(grad_sum.norm()) / 8)",
    ),
    _fault(
        "no noise on the last tensor",
        "release",
        *("training.noise:with_noise", _NOISY, "noisy[-16:] = flat[-16:]\n    " + _NOISY),
    ),
    _fault("the same noise in both halves of a block", "release", _NORMAL, "np.sin(angle)", "np.cos(angle)"),
    _fault(
        "tails of the noise cut at two standard deviations", "release", _NORMAL, _RADIUS, _RADIUS + ".clip(max=2.0)"
    ),
    _fault("noise under the number of the release", "secret", _NOISE, _FRESH, 'return release.to_bytes(32, "big")'),
    _fault("samples that are the same in all runs", "sampling", _SAMPLE, "self._streams", "Streams(0)"),
    _fault(
        "probability of being drawn doubled",
        "sampling",
        *("data.sampling:poisson_batch", "mechanism.batch_size << 64", "2 * mechanism.batch_size << 64"),
    ),
    _fault(
        "epsilon at ten times the delta", "account", _CLAIMS, "epsilon(mechanism, plan", "epsilon(mechanism, 10 * plan"
    ),
    _fault(
        "epsilon of one update less",
        "account",
        *(_CLAIMS, "epsilon(mechanism, plan", "epsilon(mechanism.replace(num_steps=mechanism.num_steps - 1), plan"),
    ),
    _fault(
        "a certificate that counts labels",
        "public",
        *("run_folder.certificate:public_inputs", "**inputs_of_the_recipe(plan.recipe)"),
        "**inputs_of_the_recipe(plan.recipe) | {'class_proportions': ["
        "float((dataset.train.labels == label).sum()) for label in range(len(dataset.classes))]}",
    ),
)
