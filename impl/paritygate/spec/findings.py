"""What a schema cannot see: keys of an experiment that contradict each other."""

from collections.abc import Iterator
from typing import Any, get_args

from paritygate.spec.error import Finding, pointer
from paritygate.spec.experiment import ArmKind, Experiment
from paritygate.spec.pins import TAU_BENCH, is_pinned, tau_bench_commit, unknown_pins
from paritygate.spec.protocol import TaskSelection
from paritygate.spec.schema import load_schema

SPLIT_SIZES = {"train": 500, "dev": 20, "test": 115}  # tau-bench retail at the pinned commit

NUMERIC_METRICS = frozenset(
    {
        "sdpo_frac_tokens_abs_adv_gt_0.1",
        "sdpo_mean_abs_token_adv",
        "sdpo_frac_trajectories_with_feedback",
        "grpo_frac_groups_nonzero_adv",
        "judge_parse_success_rate",
        "sampler_recomputed_max_abs_diff",
    }
)
NAME_METRICS = frozenset({"executed_base_model"})

OF_ONE_KIND = {  # keys of an arm -> the kind that reads them
    "hybrid_weight": "hybrid",
    "top_k": "sdpo_logit",
    "loss": "entry_point",
    "teacher": "entry_point",
}

# What the protocol does whatever the arms are; a spec that says otherwise describes another experiment.
FIXED_FEATURES = {
    "adaptive_selection": False,
    "checkpoint_restore": False,
    "custom_optimizer": False,
    "generated_training_data": False,
    "heldout_loss": False,
    "learned_generator": False,
    "paired_comparison": True,
    "paired_training_arms": True,
}


def arm_findings(document: dict[str, Any]) -> Iterator[Finding]:
    """Findings that must be settled before an Experiment can be built: names and kinds of arms."""
    names = [arm["name"] for arm in document["arms"]]
    for index, arm in enumerate(document["arms"]):
        if names.index(arm["name"]) != index:
            yield Finding(pointer(["arms", index, "name"]), f"two arms are called {arm['name']!r}")
        if arm.get("kind", arm["name"]) == "entry_point" and arm["loss"] is None:
            yield Finding(
                pointer(["arms", index, "loss"]), "an arm of kind entry_point names its loss, as PACKAGE:LOSS"
            )
        if "kind" not in arm and arm["loss"] is None and arm["name"] not in get_args(ArmKind):
            kinds = ", ".join(get_args(ArmKind))
            yield Finding(
                pointer(["arms", index, "kind"]), f"the name does not tell the kind of arm: give one of {kinds}"
            )
    comparison = document["protocol"]["comparison"]
    for role in ("treatment", "baseline"):
        if comparison[role] is not None and comparison[role] not in names:
            yield Finding(f"/protocol/comparison/{role}", f"no arm is called {comparison[role]!r}")


def cross_findings(exp: Experiment) -> list[Finding]:
    """Every contradiction between keys of a well-formed experiment."""
    parts = (_sizes, _selections, _arms, _restoration, _gates, _decision, _features, _partners, _revisions, _declared)
    return [finding for part in parts for finding in part(exp)]


def unresolved(exp: Experiment) -> tuple[str, ...]:
    """JSON pointers of the revisions that are not pinned."""
    pointers = [] if tau_bench_commit(exp.dataset.name) else ["/dataset/name"]
    for index, path in enumerate(exp.correctness_preflight.paths):
        for key in ("baseline_revision", "reference_revision"):
            if not is_pinned(getattr(path, key)):
                pointers.append(pointer(["correctness_preflight", "paths", index, key]))
    return tuple(pointers)


def _sizes(exp: Experiment) -> Iterator[Finding]:
    rollout = exp.protocol.rollout
    wanted = exp.steps * rollout.tasks_per_step
    if wanted != exp.dataset.n_examples:
        yield Finding(
            "/dataset/n_examples",
            f"{exp.steps} steps x {rollout.tasks_per_step} tasks = {wanted}, not {exp.dataset.n_examples}",
        )
    batch = rollout.tasks_per_step * rollout.rollouts_per_task
    if batch != exp.batch_size:
        yield Finding(
            "/batch_size",
            f"{rollout.tasks_per_step} tasks x {rollout.rollouts_per_task} rollouts = {batch}, not {exp.batch_size}",
        )
    if rollout.max_tokens_per_turn > exp.max_seq_len:
        yield Finding("/protocol/rollout/max_tokens_per_turn", f"more than max_seq_len, {exp.max_seq_len}")


def _selections(exp: Experiment) -> Iterator[Finding]:
    protocol = exp.protocol
    parts = [("/protocol/train", protocol.train, "training"), ("/protocol/evaluation", protocol.evaluation, "eval")]
    if protocol.warm_start is not None:
        parts.append(("/protocol/warm_start/tasks", protocol.warm_start.tasks, "the warm start"))
    usable: list[tuple[str, TaskSelection, str]] = []
    for place, selection, what in parts:
        wrong = list(_selection(place, selection))
        yield from wrong
        if not wrong:
            usable.append((place, selection, what))
    for place, selection, wanted in (
        ("/protocol/train", protocol.train, exp.dataset.n_examples),
        ("/protocol/evaluation", protocol.evaluation, exp.eval.n_examples),
    ):
        if selection.count != wanted:
            key = "dataset" if place.endswith("train") else "eval"
            yield Finding(place, f"selects {selection.count} tasks, but {key}.n_examples is {wanted}")
    for position, (place, selection, what) in enumerate(usable):
        for _, other, other_what in usable[:position]:
            shared = _chosen(selection) & _chosen(other) if selection.split == other.split else set[int]()
            if shared:
                yield Finding(place, f"{len(shared)} tasks are in {what} and in {other_what}, e.g. {min(shared)}")


def _chosen(selection: TaskSelection) -> set[int]:
    return set(selection.indices(SPLIT_SIZES[selection.split]))


def _selection(place: str, selection: TaskSelection) -> Iterator[Finding]:
    size = SPLIT_SIZES[selection.split]
    if (selection.first is None) == (selection.tasks is None):
        yield Finding(place, "give either first or tasks")
    elif selection.tasks is not None and selection.shuffle_seed is not None:
        yield Finding(f"{place}/shuffle_seed", "tasks are taken in the order given; a shuffle goes with first")
    elif selection.count > size:
        yield Finding(place, f"selects {selection.count} tasks, but the {selection.split} split has {size}")
    for index, task in enumerate(selection.tasks or ()):
        if task >= size:
            yield Finding(f"{place}/tasks/{index}", f"the {selection.split} split has {size} tasks, 0 to {size - 1}")


def _arms(exp: Experiment) -> Iterator[Finding]:
    for index, arm in enumerate(exp.arms):
        if arm.lr != exp.optimizer.lr:
            yield Finding(f"/arms/{index}/lr", f"{arm.lr} is not the optimizer's {exp.optimizer.lr}")
        if arm.seed != exp.arms[0].seed:
            yield Finding(f"/arms/{index}/seed", "arms differ only in the advantage, so in no seed")
        for key, kind in OF_ONE_KIND.items():
            default = load_schema("experiment")["$defs"]["arm"]["properties"][key]["default"]
            if arm.kind != kind and getattr(arm, key) != default:
                yield Finding(f"/arms/{index}/{key}", f"an arm of kind {arm.kind} has none, {kind} has")
    if exp.comparison.treatment == exp.comparison.baseline:
        yield Finding("/protocol/comparison", "treatment and baseline are the same arm")


def _restoration(exp: Experiment) -> Iterator[Finding]:
    place = "/restoration_preflight/groups/0/arms"
    group = exp.restoration_preflight.groups[0].arms
    if sorted(arm.name for arm in group) != sorted(arm.name for arm in exp.arms):
        yield Finding(place, "names other arms than the experiment has")
    for index, arm in enumerate(group):
        config = arm.optimizer_config
        if config.learning_rate != exp.optimizer.lr:
            yield Finding(f"{place}/{index}/optimizer_config/learning_rate", f"not the optimizer's {exp.optimizer.lr}")
        if config.lora_rank != exp.lora_rank:
            yield Finding(f"{place}/{index}/optimizer_config/lora_rank", f"not lora_rank, {exp.lora_rank}")
        if config != group[0].optimizer_config:
            yield Finding(f"{place}/{index}/optimizer_config", "differs from the first arm's")
    if not exp.restoration_preflight.applicable:
        yield Finding("/restoration_preflight/applicable", "paired arms start from one state: it always applies")


def _gates(exp: Experiment) -> Iterator[Finding]:
    for index, check in enumerate(exp.activation_gate.checks):
        place = f"/activation_gate/checks/{index}"
        if check.metric in NAME_METRICS:
            if check.one_of is None or check.min is not None or check.max is not None:
                yield Finding(place, "a name is checked by one_of alone")
            elif exp.base_model not in check.one_of:
                yield Finding(f"{place}/one_of", f"base_model {exp.base_model!r} is not among them")
        elif check.metric in NUMERIC_METRICS:
            if check.one_of is not None or (check.min is None and check.max is None):
                yield Finding(place, "a number is checked by min, max or both")
            elif check.min is not None and check.max is not None and check.min > check.max:
                yield Finding(place, f"min {check.min} is above max {check.max}")
        else:
            metrics = ", ".join(sorted(NUMERIC_METRICS | NAME_METRICS))
            yield Finding(f"{place}/metric", f"no metric is called {check.metric!r}; known: {metrics}")
    if not exp.activation_gate.applicable:
        yield Finding("/activation_gate/applicable", "a trained comparison always has its activation gates")


def _decision(exp: Experiment) -> Iterator[Finding]:
    rule = exp.decision_rule
    ids = [criterion.id for criterion in rule.criteria]
    for index, criterion in enumerate(rule.criteria):
        place = f"/decision_rule/criteria/{index}"
        low, high = criterion.bounds
        if ids.index(criterion.id) != index:
            yield Finding(f"{place}/id", f"two criteria are called {criterion.id!r}")
        if not low < high:
            yield Finding(f"{place}/bounds", f"the lower bound {low} is not below the upper {high}")
        elif (low, high) != (0.0, 1.0):
            yield Finding(f"{place}/bounds", f"{criterion.metric} lies in [0, 1]")
        elif not low - high < criterion.margin < high - low:
            yield Finding(f"{place}/margin", f"a difference lies within {low - high} and {high - low}")
    if "primary" not in ids:
        yield Finding("/decision_rule/criteria", "no criterion is called 'primary'")
    if rule.seeds != (exp.arms[0].seed,):
        yield Finding("/decision_rule/seeds", f"the arms' seed is {exp.arms[0].seed}")


def _features(exp: Experiment) -> Iterator[Finding]:
    expected = {
        **FIXED_FEATURES,
        "custom_loss": any(arm.kind != "grpo" for arm in exp.arms),
        "warmup_adaptation": exp.protocol.warm_start is not None,
    }
    for key, value in expected.items():
        if exp.experiment_features[key] != value:
            yield Finding(f"/experiment_features/{key}", f"this experiment will be {str(value).lower()}")


def _partners(exp: Experiment) -> Iterator[Finding]:
    for name, partner in (("user", exp.protocol.user), ("judge", exp.protocol.judge)):
        if partner.kind == "model" and partner.model is None:
            yield Finding(f"/protocol/{name}/model", "kind is model, so name one")
    if exp.protocol.service.embedded_model is None and exp.protocol.service.embedded_dtype != "float32":
        yield Finding("/protocol/service/embedded_dtype", "there is no embedded model that it could be the dtype of")
    if exp.protocol.user.kind == "model" and "{instruction}" not in exp.protocol.user.prompt:
        yield Finding("/protocol/user/prompt", "must say {instruction} where the task's instruction belongs")


def _declared(exp: Experiment) -> Iterator[Finding]:
    """Keys that say what this program always does, or measures by itself: another value would not be honoured."""
    document = exp.frozen
    primary = next((c.metric for c in exp.decision_rule.criteria if c.id == "primary"), None)
    if primary is not None and document["primary_endpoint"] != f"heldout_{primary}_mean":
        yield Finding("/primary_endpoint", f"the primary criterion decides on heldout_{primary}_mean")
    if document["generation_audit"]["required"]:
        yield Finding("/generation_audit/required", "no training data is generated, so there is nothing to audit")
    if not exp.restoration_preflight.fixed_batch_required:
        yield Finding("/restoration_preflight/fixed_batch_required", "a fixed batch is always compared")
    if not exp.correctness_preflight.required:
        yield Finding("/correctness_preflight/required", "no run starts without the correctness preflight")
    if document["spec_preflight"] != {"findings": [], "status": "passed"}:
        yield Finding("/spec_preflight", "holds findings of somebody who read this spec: settle them first")
    undeclared = {"gpu_hours": None, "known_gpu_hours": 0, "status": "unknown", "wall_seconds": None}
    for key, value in undeclared.items():
        if document["feasibility_check"][key] != value:
            yield Finding(f"/feasibility_check/{key}", "feasibility is measured by the timing pilot, never declared")


def _revisions(exp: Experiment) -> Iterator[Finding]:
    commit = tau_bench_commit(exp.dataset.name)
    if commit not in (None, TAU_BENCH.revision):
        yield Finding("/dataset/name", f"only tau-bench {TAU_BENCH.revision} has been checked, not {commit}")
    ids = [path.id for path in exp.correctness_preflight.paths]
    for index, path in enumerate(exp.correctness_preflight.paths):
        if ids.index(path.id) != index:
            yield Finding(f"/correctness_preflight/paths/{index}/id", f"two paths are called {path.id!r}")
        for key in ("baseline_revision", "reference_revision"):
            for token in unknown_pins(getattr(path, key)) if is_pinned(getattr(path, key)) else ():
                yield Finding(f"/correctness_preflight/paths/{index}/{key}", f"nothing was recorded for {token}")
