"""A fourth search: mistakes of the same kinds that no obligation named at first; see design/092."""

from tests.mutants.mutant import Mutant

TRAINING = "server/engine/training.py"
WIRE = "server/wire/training.py"
CHECKPOINTS = "server/sessions/checkpoints.py"
PIECES_DONE = "        yield\n\n    def _piece("
CLIP = "clip = params.grad_clip_norm"
TARGETS = "    bad = np.argwhere((targets < 0) | (targets >= shape.vocabulary))\n"
FINITE = "    bad = np.argwhere(~np.isfinite(value))\n"
STEP = 'return {"metrics": {GRADIENT_NORM: adam_step(model.ready(), params)}}'
TAKEN = "        if folder.exists() and not overwrite:\n"

MUTANTS = (
    Mutant(
        "forward-drops-the-gradient",
        "forward zeroes the gradient that waits for its step",
        "state/pending_gradient",
        TRAINING,
        PIECES_DONE,
        "        if self.forward_only:\n            for _, p in self.adapter.parameters():\n"
        "                p.grad = None\n" + PIECES_DONE,
    ),
    Mutant(
        "loss-of-the-last-microbatch",
        "the reported loss is that of a request's last piece",
        "value/cross_entropy",
        TRAINING,
        "            packing.add(datum)\n        self._piece",
        "            packing.add(datum)\n        self.outcome.loss = 0.0\n        self._piece",
    ),
    Mutant(
        "targets-wrap-around",
        "a target id outside of the vocabulary is taken modulo its size",
        "wire/refuses_token_out_of_range",
        WIRE,
        TARGETS,
        "    targets = targets % shape.vocabulary\n" + TARGETS,
    ),
    Mutant(
        "nan-weights-are-zero",
        "a NaN weight or sampler logprob counts as 0",
        "wire/refuses_nan",
        WIRE,
        FINITE,
        '    value = value if name == "advantages" else np.nan_to_num(value)\n' + FINITE,
    ),
    Mutant(
        "flags-change-places",
        "train_mlp is read for train_unembed, and the other way round",
        "state/rank",
        WIRE,
        'mlp=config.flag("train_mlp", True),\n        unembed=config.flag("train_unembed", True)',
        'mlp=config.flag("train_unembed", True),\n        unembed=config.flag("train_mlp", True)',
    ),
    Mutant(
        "moments-shared-by-restores",
        "clients that are restored from one state share its moments",
        "state/optimizer_restored",
        CHECKPOINTS,
        '            moments = self._tensors(checkpoint, "optimizer.safetensors")',
        '            read = self._tensors(checkpoint, "optimizer.safetensors")\n'
        '            moments = self.__dict__.setdefault("read", {}).setdefault(checkpoint.version, read)',
    ),
    Mutant(
        "second-save-keeps-the-first",
        "a save under a name that is taken is answered, and not done",
        "state/names_apart",
        CHECKPOINTS,
        TAKEN,
        TAKEN + '            return self.find(f"tinker://{run}/{kind}/{name}")\n' + TAKEN,
    ),
    Mutant(
        "first-parameters-stick",
        "betas and eps of a client's first step are those of all its steps",
        "optimiser/betas",
        "server/sessions/trainers.py",
        STEP,
        "import dataclasses\n\n                first = model.__dict__.setdefault('first', params)\n"
        "                kept = dataclasses.replace(params, beta1=first.beta1, beta2=first.beta2, eps=first.eps)\n"
        "                " + STEP.replace("params", "kept"),
    ),
    Mutant(
        "norm-of-the-last-call",
        "gradients are clipped by the norm of the last call's",
        "optimiser/clip",
        TRAINING,
        CLIP,
        'norm = getattr(adapter, "last_norm", norm)\n    ' + CLIP,
        (
            (
                TRAINING,
                PIECES_DONE,
                "        if not self.forward_only:\n"
                "            self.adapter.last_norm = float(sum(g.square().sum() for g in gradients.values())) ** 0.5\n"
                + PIECES_DONE,
            ),
        ),
    ),
    Mutant(
        "prefix-cache-of-a-run",
        "the cache of prompts keeps what older weights of the run computed",
        "state/snapshot_frozen",
        "server/sessions/trainers.py",
        'freeze(f"{model.id}#{uuid.uuid4().hex}")',
        "freeze(model.id)",
    ),
    Mutant(
        "seed-of-one-sample-ignored",
        "a request of one sample is drawn without its seed",
        "sampling/seed_repeats",
        "server/engine/loop.py",
        "token = draw(logits_V, params, row.index, position)",
        "import dataclasses\n        import secrets\n\n        one = row.job.num_samples == 1\n"
        "        params = dataclasses.replace(params, seed=secrets.randbits(53)) if one else params\n"
        "        token = draw(logits_V, params, row.index, position)",
    ),
)
