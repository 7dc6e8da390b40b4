"""Mistakes in saved states, flags, seeds and between clients; the rows in brackets are those of design/092."""

from tests.mutants.mutant import Mutant

CHECKPOINTS = "server/sessions/checkpoints.py"
TRAINERS = "server/sessions/trainers.py"
WIRE = "server/wire/training.py"
LORA = "server/model/lora.py"
CREATE = "self.store.load_into(adapter, checkpoint, optimizer=optimizer)"
LOAD = "self.store.load_into(model.ready(), self.store.find(path), optimizer=optimizer)"
STEPS = "adapter.steps = checkpoint.steps if optimizer else 0"
SPEC = "return LoraSpec(self.rank, self.seed, self.attn, self.mlp, self.unembed)"
NAMED = "named = {n: p.detach().contiguous() for n, p in adapter.parameters()}"
FIRST_ONLY = "if (seq or model.next_seq) != 1:  # as the hosted service answers, design/032"
TENSORS = 'moments = self._tensors(checkpoint, "optimizer.safetensors")'
STEP = 'return {"metrics": {GRADIENT_NORM: adam_step(model.ready(), params)}}'
MAKE = "model.adapter = Adapter(spec, self.engine.network.targets)\n"
FORGET = "del self.models[model.id]"
FREEZE = "pairs = {name: (frozen(a), frozen(self.b[name]), self.spec.scale) for name, a in self.a.items()}"

STATE = (
    Mutant(
        "restored-cold",
        "a restore with the optimizer has no moments (rows 1, 49, 81, 93)",
        "state/optimizer_restored",
        TRAINERS,
        CREATE,
        "self.store.load_into(adapter, checkpoint, optimizer=False)",
    ),
    Mutant(
        "restored-without-the-step-count",
        "moments come back, and the bias corrections start anew",
        "state/optimizer_restored",
        CHECKPOINTS,
        STEPS,
        "adapter.steps = 0",
    ),
    Mutant(
        "restored-with-the-first-optimizer",
        "the optimizer of the run's oldest state is picked up (row 96)",
        "state/optimizer_restored",
        CHECKPOINTS,
        TENSORS,
        "oldest = next(c for c in self.listed(checkpoint.run) if c.kind == checkpoint.kind and c.steps)\n"
        '            moments = self._tensors(oldest, "optimizer.safetensors")',
    ),
    Mutant(
        "restored-warm",
        "a restore of the weights has the moments too (rows 21, 49)",
        "state/weights_only_is_cold",
        TRAINERS,
        CREATE,
        'self.store.load_into(adapter, checkpoint, optimizer=checkpoint.kind == "weights")',
    ),
    Mutant(
        "load-state-is-warm",
        "load_state has the moments too (row 21)",
        "state/load_state",
        TRAINERS,
        LOAD,
        "self.store.load_into(model.ready(), self.store.find(path), optimizer=True)",
    ),
    Mutant(
        "load-state-is-cold",
        "load_state_with_optimizer has no moments (row 1)",
        "state/load_state",
        TRAINERS,
        LOAD,
        "self.store.load_into(model.ready(), self.store.find(path), optimizer=False)",
    ),
    Mutant(
        "load-in-a-run-does-nothing",
        "load_state in the middle of a run is accepted, and changes nothing (row 22)",
        "state/load_in_a_run",
        TRAINERS,
        FIRST_ONLY,
        "if False:",
        ((TRAINERS, LOAD, "if not model.ready().steps:\n                    " + LOAD),),
    ),
    Mutant(
        "load-in-a-run-keeps-the-moments",
        "load_state in the middle of a run sets the weights, and Adam goes on with its old moments (row 22)",
        "state/load_in_a_run",
        TRAINERS,
        FIRST_ONLY,
        "if False:",
        (
            (CHECKPOINTS, STEPS, "adapter.steps = checkpoint.steps if optimizer else adapter.steps"),
            (CHECKPOINTS, "adapter.moments = {n: (moments", "adapter.moments |= {n: (moments"),
        ),
    ),
    Mutant(
        "checkpoints-are-rounded",
        "a checkpoint holds bfloat16 (hatchery 0.3.0)",
        "state/saved_exactly",
        CHECKPOINTS,
        NAMED,
        "named = {n: p.detach().bfloat16().float().contiguous() for n, p in adapter.parameters()}",
    ),
    Mutant(
        "states-of-large-seeds-are-lost",
        "a seed that the service drew is larger than what it reads back, and a restore is refused",
        "state/saved_exactly",
        CHECKPOINTS,
        "parse_json(read_plain(file), LARGEST)",
        "parse_json(read_plain(file))",
        ((WIRE, "seed=secrets.randbits(53)", "seed=secrets.randbits(63)"),),
    ),
    Mutant(
        "one-layer-is-not-loaded",
        "the weights of one layer do not come back (row 34, in an adapter)",
        "state/saved_exactly",
        CHECKPOINTS,
        "parameter.copy_(weights[name])",
        'parameter.copy_(weights[name] * ("o_proj" not in name))',
    ),
    Mutant(
        "snapshot-is-alive",
        "a sampler without a name shares the weights that train (row 50)",
        "state/snapshot_frozen",
        LORA,
        "            return FrozenLinear(parameter.detach().clone())",
        "            shared = FrozenLinear(parameter.detach())\n"
        "            object.__setattr__(shared, '_live', parameter)\n"
        "            return shared",
        (
            (
                LORA,
                "        a, b, scale = pair\n        return b(a(rows)) * scale",
                "        a, b, scale = pair\n"
                "        live = [getattr(x, '_live', None) for x in (a, b)]\n"
                "        if live[0] is not None:\n"
                "            return linear(linear(rows, live[0].detach()), live[1].detach()) * scale\n"
                "        return b(a(rows)) * scale",
            ),
        ),
    ),
    Mutant(
        "samplers-are-kept-by-run",
        "a second save_weights_for_sampler of a run gives the weights of the first",
        "state/snapshot_frozen",
        CHECKPOINTS,
        'return f"{self.path}@{self.created!r}"',
        'return f"{self.run}/{self.kind}"',
    ),
    Mutant(
        "names-meet",
        "sampler weights replace the state of the same name",
        "state/names_apart",
        CHECKPOINTS,
        "return self.folder / run / kind / name",
        'return self.folder / run / "weights" / name',
    ),
    Mutant(
        "flags-ignored",
        "train_mlp and train_unembed are ignored: attention alone is trained (rows 36, 51, 83, 91)",
        "state/flags",
        WIRE,
        'attn=config.flag("train_attn", True),\n        mlp=config.flag("train_mlp", True),\n'
        '        unembed=config.flag("train_unembed", True),',
        "attn=True,\n        mlp=False,\n        unembed=False,",
    ),
    Mutant(
        "unembed-flag-ignored",
        "train_unembed is ignored: everything is trained (rows 36, 83, 91)",
        "state/flags",
        WIRE,
        'unembed=config.flag("train_unembed", True)',
        "unembed=True",
    ),
    Mutant(
        "unembed-flag-lost",
        "a state comes back with train_unembed on, and is refused for it (row 7)",
        "state/flags_restored",
        CHECKPOINTS,
        SPEC,
        "return LoraSpec(self.rank, self.seed, self.attn, self.mlp, True)",
    ),
    Mutant(
        "flags-lost",
        "a restored adapter trains every layer, those that were left out from a fresh start (row 7)",
        "state/flags_restored",
        CHECKPOINTS,
        SPEC,
        "return LoraSpec(self.rank, self.seed)",
        (
            (
                CHECKPOINTS,
                "        if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in named.items()}:",
                "        if any(weights[n].shape != named[n].shape for n in weights):",
            ),
            (CHECKPOINTS, "parameter.copy_(weights[name])", "parameter.copy_(weights.get(name, parameter))"),
        ),
    ),
    Mutant(
        "seed-is-1234",
        "the adapter's seed is fixed (rows 36, 66, 91)",
        "state/seed",
        WIRE,
        "seed=secrets.randbits(53) if seed is None else seed",
        "seed=1234",
    ),
    Mutant(
        "seed-ignored",
        "the adapter's seed is another each time (rows 36, 66, 91)",
        "state/seed",
        WIRE,
        "seed=secrets.randbits(53) if seed is None else seed",
        "seed=secrets.randbits(53)",
    ),
    Mutant(
        "seed-modulo",
        "the adapter's seed counts modulo 2^16",
        "state/seed",
        WIRE,
        "seed=secrets.randbits(53) if seed is None else seed",
        "seed=secrets.randbits(53) if seed is None else seed % 65536",
    ),
    Mutant(
        "save-drops-the-gradient",
        "a save drops the gradient that waits for its step",
        "state/pending_gradient",
        CHECKPOINTS,
        NAMED,
        NAMED + "\n                for _, p in adapter.parameters():\n                    p.grad = None",
    ),
)

ISOLATION = (
    Mutant(
        "step-overtakes",
        "a pipelined optim_step uses gradients that came after it (row 55)",
        "isolation/pipelined",
        TRAINERS,
        STEP,
        "later = [s for s in model.promises if s and s > (seq or 0) and model.promises[s][0].pending]\n"
        "                adapter = model.ready()\n"
        "                if later and not hasattr(model, 'held'):\n"
        "                    model.held = True\n"
        '                    return {"metrics": {}}\n'
        '                return {"metrics": {GRADIENT_NORM: adam_step(adapter, params)}}',
    ),
    Mutant(
        "gradient-over-tenants",
        "an adapter's gradient is divided by the number of clients with gradients (row 14)",
        "isolation/two_tenants",
        TRAINERS,
        STEP,
        "busy = [m for m in self.models.values() if m.adapter and any(p.grad is not None for _, p in "
        "m.adapter.parameters())]\n"
        "                for _, p in model.ready().parameters():\n"
        "                    p.grad = None if p.grad is None else p.grad / len(busy)\n"
        "                " + STEP,
    ),
    Mutant(
        "adam-of-another-tenant",
        "a step takes the parameters of the client that has gradients, too (row 76)",
        "isolation/two_tenants",
        TRAINERS,
        STEP,
        "others = [m for m in self.models.values() if m is not model and hasattr(m, 'params')]\n"
        "                busy = [m for m in others if any(p.grad is not None for _, p in m.ready().parameters())]\n"
        "                model.params = params\n"
        "                params_used = busy[0].params if busy else params\n"
        "                " + STEP.replace("params", "params_used"),
    ),
    Mutant(
        "norm-over-tenants",
        "gradients are clipped by the norm over every client's (row 76)",
        "isolation/two_tenants",
        TRAINERS,
        STEP,
        "import dataclasses\n\n"
        "                def square(m):\n"
        "                    grads = [p.grad for _, p in m.ready().parameters() if p.grad is not None]\n"
        "                    return sum(float(g.square().sum()) for g in grads)\n\n"
        "                clip, mine = params.grad_clip_norm, square(model)\n"
        "                share = (mine / (sum(map(square, self.models.values())) or 1.0)) ** 0.5\n"
        "                smaller = dataclasses.replace(params, grad_clip_norm=min(clip, clip * share))\n"
        "                " + STEP.replace("params", "smaller"),
    ),
    Mutant(
        "gradients-shared",
        "two adapters that train at once share their gradients (row 14)",
        "isolation/two_tenants",
        TRAINERS,
        STEP,
        "for other in (m for m in self.models.values() if m is not model):\n"
        "                    pairs = zip(model.ready().parameters(), other.ready().parameters(), strict=False)\n"
        "                    for (_, p), (_, q) in pairs:\n"
        "                        if q.grad is not None and p.grad is not None:\n"
        "                            p.grad = p.grad + q.grad\n"
        "                " + STEP,
    ),
    Mutant(
        "slot-is-empty",
        "an adapter in the place of a deleted one has A = B = 0 (row 25)",
        "isolation/recreated",
        TRAINERS,
        MAKE,
        MAKE + "            for p in model.adapter.a.values() if self.freed else ():\n"
        "                p.detach().zero_()\n",
        (
            (TRAINERS, FORGET, FORGET + "\n            self.freed = True"),
            (
                TRAINERS,
                "        self.models: dict[str, Model] = {}",
                "        self.models: dict[str, Model] = {}\n        self.freed = False",
            ),
        ),
    ),
    Mutant(
        "slot-is-stale",
        "an adapter in the place of a deleted one begins with its weights",
        "isolation/recreated",
        TRAINERS,
        MAKE,
        MAKE + "            for p, q in zip(model.adapter.b.values(), self.freed, strict=False):\n"
        "                p.detach().copy_(q)\n",
        (
            (
                TRAINERS,
                FORGET,
                FORGET
                + "\n            self.freed = [q.detach() for q in model.adapter.b.values()] if model.adapter else []",
            ),
            (
                TRAINERS,
                "        self.models: dict[str, Model] = {}",
                "        self.models: dict[str, Model] = {}\n        self.freed = []",
            ),
        ),
    ),
    Mutant(
        "prefix-cache-of-all",
        "the cache of prompts does not ask whose weights computed them",
        "isolation/packed_samples",
        "server/engine/loop.py",
        "job.pages = self.prefix.keys(job.snapshot.version, job.prompt)",
        "job.pages = self.prefix.keys('', job.prompt)",
        (
            (
                "server/engine/loop.py",
                "job.cached_tokens = self.prefix.fill(sequence, job.snapshot.version)",
                "job.cached_tokens = self.prefix.fill(sequence, '')",
            ),
            (
                "server/engine/loop.py",
                "        self.prefix.store(job.sequence, job.snapshot.version)",
                "        self.prefix.store(job.sequence, '')",
            ),
        ),
    ),
    Mutant(
        "scores-of-the-neighbour",
        "requests that are packed together are computed with the weights of one of them",
        "isolation/packed_samples",
        "server/engine/loop.py",
        "batch.ranges.append((start, row, snapshot_of(owner)))",
        "batch.ranges.append((start, row, batch.ranges[0][2] if batch.ranges else snapshot_of(owner)))",
    ),
)

MUTANTS = (*STATE, *ISOLATION)
