"""The table: ways of losing privacy, each as a change to one or two lines.

`FAULTS` are the classic ones, which every run of the tests plants; `MORE` were made up afterwards, to try the laws.
"""

from tests.auditing.planted.plants import Edit, Fault

_COLLECT, _RELEASE = "training.step:PrivateStep.collect", "training.step:PrivateStep.release"
_SUM, _NOISE, _SAMPLE = (
    "clipping.grad_fn:GradFn._sum",
    "training.draws:Draws.noise",
    "training.draws:Draws.of_update",
)
_UPDATES = "training.loop:_Run._take_updates"
_ADD_NOISE = "add_noise(grad_sum, self.noise_stddev, noise)"
_FRESH = 'return self._streams.stream("noise", release)'
_AGAIN = (
    'self._kept = [*getattr(self, "_kept", []), self._streams.stream("noise", release)._key]\n'
    "    return Stream(self._kept[{place}])"
)
_APPEND = "ledger.append(self.step + 1)"
_BATCH = "self._clip, evaluated, batch)"
_EACH_VIEW = (
    "self._clip, evaluated, Batch(batch.inputs.flatten(0, 1)[:, None], tuple(target.flatten(0, 1)[:, None] for target"
    " in batch.targets), torch.ones_like(batch.weights).view(-1, 1), batch.is_real.repeat_interleave("
    "batch.weights.shape[1])))"
)
_OUT = "return out.grad_sum, statistics"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "no clipping",
        (
            Edit(
                "clipping.clip:Clip.__call__",
                "torch.clamp(1 / norms, max=1 / self.clipping_norm)",
                "torch.full_like(norms, 1 / self.clipping_norm)",
            ),
        ),
        "influence",
    ),
    Fault(
        "clipped after averaging over the batch",
        (
            Edit(_SUM, "clipped_sum(self._clip,", "clipped_sum(torch.ones_like,"),
            Edit(
                _SUM,
                "return ClippedGrad(total, torch.cat(norms)",
                "mean = torch.cat([value.flatten() for value in total.values()]).norm() / len(rows)\n"
                "    total = {name: value * self._clip(mean) for name, value in total.items()}\n"
                "    return ClippedGrad(total, torch.cat(norms)",
            ),
        ),
        "influence",
    ),
    Fault(
        "each view clipped by itself, not divided by K",
        (Edit(_SUM, _BATCH, _EACH_VIEW),),
        "influence",
    ),
    Fault(
        "padding counted",
        (
            Edit(_SUM, "if self._speed.compile or prepared.on_gpu else 0", ""),
            Edit(_SUM, "batch.is_real[len(places) :] = False", "pass"),
        ),
        "influence",
    ),
    Fault(
        "noise divided by the batch size twice",
        (Edit(_RELEASE, _ADD_NOISE, "add_noise(grad_sum, self.noise_stddev / self.mechanism.batch_size, noise)"),),
        "release",
    ),
    Fault(
        "noise too small by the root of the accumulation steps",
        (
            Edit(
                _RELEASE,
                _ADD_NOISE,
                "add_noise(grad_sum, self.noise_stddev"
                " / (self.mechanism.batch_size / self.grad_fn.microbatch_size) ** 0.5, noise)",
            ),
        ),
        "release",
    ),
    Fault(
        "the same noise twice",
        (Edit(_NOISE, _FRESH, _AGAIN.format(place="(release - 1) // 2")),),
        "release",
    ),
    Fault(
        "noise from a seed that the adversary knows",
        (Edit(_NOISE, "self._streams", "Streams(0)"),),
        "secret",
    ),
    Fault(
        "batch normalisation let through",
        (
            # Six checks stand in its way, each by itself.
            Edit("clipping.model_check:layer_findings", "isinstance(module, _BatchNorm)", "False"),
            Edit(
                "clipping.engine_check:EngineCheck._refuse_meeting",
                "if not _rows_agree(",
                "if False and not _rows_agree(",
            ),
            Edit("clipping.graph.rows:Rows._refusal", 'if given.get("training") else', "if False else"),
            Edit("clipping.engine_check:EngineCheck.refuse", "if error <= _EXACT[expected.exact]:", "if True:"),
            Edit("clipping.engine_check:EngineCheck.refuse_in_run", "if longer <= _NORM and", "if True or"),
            Edit("evaluation.row_independence:require_rows_apart", "if found is not None:", "if False:"),
        ),
        "networks",
    ),
    Fault(
        "an example that is not finite let through",
        (
            Edit(
                "clipping.graph.engine:GraphEngine._run",
                "finite = norms.isfinite() & losses.isfinite()",
                "finite = torch.ones_like(batch.is_real)",
            ),
        ),
        "influence",
    ),
    Fault(
        "shuffled batches accounted as Poisson",
        (Edit(_SAMPLE, 'if self._mechanism.sampling == "poisson":', "if False:"),),
        "sampling",
    ),
    Fault(
        "a ledger that skips a step",
        (Edit(_UPDATES, _APPEND, "self.step == 2 or " + _APPEND),),
        "account",
    ),
    Fault(
        "the realised batch as divisor",
        (
            Edit(_COLLECT, _OUT, "self.count = max(1, len(drawn))\n    " + _OUT),
            Edit(_RELEASE, "value / self.mechanism.batch_size", "value / self.count"),
        ),
        "release",
    ),
    Fault(
        "a default computed from private labels",
        (
            Edit(
                "training.learner:Learner.__init__",
                "proportions = recipe.data.class_proportions",
                "proportions = recipe.data.class_proportions or [(1 + int((dataset.train.labels == label).sum()))"
                " / (len(dataset.train) + len(dataset.classes)) for label in range(len(dataset.classes))]",
            ),
        ),
        "influence",
    ),
)

_CLAMP, _RADIUS = "torch.clamp(1 / norms, max=1 / self.clipping_norm)", "np.sqrt(-2 * np.log(uniform))"
_TENSORS = "for (name, value), part in zip(grad_sum.items(), parts, strict=True)\n    }"
_UPDATE = "self.state.update(released, release, self.step)"

MORE: tuple[Fault, ...] = (
    Fault(
        "clipped at 1.01 times the norm",
        (Edit("clipping.clip:Clip.__call__", _CLAMP, "1.01 * " + _CLAMP),),
        "influence",
    ),
    Fault(
        "each view clipped by itself, divided by K",
        (
            Edit(_SUM, _BATCH, _EACH_VIEW),
            Edit(
                _SUM,
                "in out.grad_sum.items()",
                "in {own: value / max(1, self._augmult) for own, value in out.grad_sum.items()}.items()",
            ),
        ),
        "influence",
    ),
    Fault(
        "a norm that leaves out the bias",
        (
            Edit(
                "clipping.graph.weights:NormsAndSums.norms",
                "squares = [rows.square_norms()[0] for _, _, rows in self._small]",
                "squares = [0 * rows.square_norms()[0] for _, _, rows in self._small]",
            ),
        ),
        "influence",
    ),
    Fault(
        "the bias not clipped",
        (
            Edit(
                "clipping.graph.engine:GraphEngine._run",
                "return norms, losses,",
                "sums[self._names[-1]] = both.clipped_sums((batch.is_real & finite).float(), None)[self._names[-1]]\n"
                "    return norms, losses,",
            ),
        ),
        "influence",
    ),
    Fault("an unreadable image counted", (Edit(_COLLECT, "drawn[examples.readable[drawn]]", "drawn"),), "influence"),
    Fault(
        "images centred by the mean of those beside them",
        (
            Edit(
                "data.images:ImageSet.batch",
                "return batch if",
                "batch = batch - batch.mean(0) + 0.5\n    return batch if",
            ),
        ),
        "influence",
    ),
    Fault(
        "averages that see the sum without noise",
        (
            Edit(
                _UPDATES,
                _UPDATE,
                _UPDATE + "\n            for name, value in self.state.ema.averages[0].items():"
                "\n                value.sub_(0.01 * grad_sum[name])",
            ),
        ),
        "weights",
    ),
    Fault(
        "weights moved by the sum without noise",
        (
            Edit(
                _UPDATES,
                _UPDATE,
                "self.state.update({name: value / self.mechanism.batch_size for name, value in grad_sum.items()},"
                " release, self.step)",
            ),
        ),
        "release",
    ),
    Fault(
        "momentum before the noise",
        (
            Edit(
                _COLLECT,
                _OUT,
                "self.kept = {name: value + 0.9 * getattr(self, 'kept', {}).get(name, 0)"
                " for name, value in out.grad_sum.items()}\n    return self.kept, statistics",
            ),
        ),
        "release",
    ),
    Fault(
        "noise five per cent too small",
        (Edit(_RELEASE, _ADD_NOISE, "add_noise(grad_sum, 0.95 * self.noise_stddev, noise)"),),
        "release",
    ),
    Fault(
        "noise for every microbatch as well",
        (
            Edit(
                _SUM,
                "add_to(grad_sum, out.grad_sum)",
                "add_to(grad_sum, {name: value + torch.randn_like(value) for name, value in out.grad_sum.items()})",
            ),
        ),
        "release",
    ),
    Fault(
        "noise that is not Gaussian, of the right scale",
        (Edit("training.noise:standard_normal", "radius * np.cos(angle)", "angle * (3**0.5 / math.pi)"),),
        "release",
    ),
    Fault(
        "the same noise again in the second half of a run",
        (Edit(_NOISE, _FRESH, _AGAIN.format(place="(release - 1) % 20")),),
        "release",
    ),
    Fault(
        "noise in units of the clipping norm",
        (Edit("training.step:PrivateStep.__init__", "grad_fn.sensitivity", "grad_fn.clipping_norm"),),
        "release",
    ),
    Fault(
        "noise too small where the sum is short",
        (
            Edit(
                _RELEASE,
                _ADD_NOISE,
                "add_noise(grad_sum, self.noise_stddev"
                " * min(1.0, float(torch.cat([value.flatten() for value in grad_sum.values()]).norm()) / 8), noise)",
            ),
        ),
        "release",
    ),
    Fault(
        "no noise on the last tensor",
        (Edit("training.noise:add_noise", _TENSORS, _TENSORS + " | dict([list(grad_sum.items())[-1]])"),),
        "release",
    ),
    Fault(
        "the same noise in both halves of a block",
        (Edit("training.noise:standard_normal", "np.sin(angle)", "np.cos(angle)"),),
        "release",
    ),
    Fault(
        "tails of the noise cut at two standard deviations",
        (Edit("training.noise:standard_normal", _RADIUS, _RADIUS + ".clip(max=2.0)"),),
        "release",
    ),
    Fault(
        "noise under the number of the release",
        (Edit(_NOISE, _FRESH, 'return Stream(release.to_bytes(32, "big"))'),),
        "secret",
    ),
    Fault(
        "samples that are the same in all runs",
        (Edit(_SAMPLE, "self._streams", "Streams(0)"),),
        "sampling",
    ),
    Fault(
        "probability of being drawn doubled",
        (Edit("data.sampling:poisson_batch", "mechanism.batch_size << 64", "2 * mechanism.batch_size << 64"),),
        "sampling",
    ),
    Fault(
        "epsilon at ten times the delta",
        (
            Edit(
                "planning.claims:claims",
                "spent = epsilon(mechanism, plan.delta,",
                "spent = epsilon(mechanism, 10 * plan.delta,",
            ),
        ),
        "account",
    ),
    Fault(
        "epsilon of one update less",
        (
            Edit(
                "planning.claims:claims",
                "spent = epsilon(mechanism, plan.delta,",
                "spent = epsilon(mechanism.replace(num_steps=mechanism.num_steps - 1), plan.delta,",
            ),
        ),
        "account",
    ),
    Fault(
        "a certificate that counts labels",
        (
            Edit(
                "run_folder.certificate:public_inputs",
                "**inputs_of_the_recipe(plan.recipe)",
                "**inputs_of_the_recipe(plan.recipe) | {'class_proportions': ["
                "float((dataset.train.labels == label).sum()) for label in range(len(dataset.classes))]}",
            ),
        ),
        "public",
    ),
)
