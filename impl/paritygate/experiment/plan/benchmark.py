"""What is known of the benchmark's tasks, computed from the data: what an honest report must say beside its numbers."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paritygate.spec import Experiment, TaskSelection
from paritygate.spec.findings import SPLIT_SIZES

if TYPE_CHECKING:
    from paritygate.retail import Source


def facts_of(exp: Experiment, source: "Source") -> dict[str, Any]:
    """What is known of the tasks that this experiment trains and evaluates on, computed from the data."""
    from paritygate.retail import facts

    evaluation, train = exp.protocol.evaluation, exp.protocol.train
    held_out, trained = _indices(evaluation), _indices(train)
    other = "train" if evaluation.split != "train" else None
    return {
        "provenance": source.place,
        "evaluation_split": evaluation.split,
        "train_split": train.split,
        "do_nothing_evaluated": _among(facts.do_nothing(source, evaluation.split), held_out),
        "do_nothing_split": facts.do_nothing(source, evaluation.split),
        "do_nothing_trained": _among(facts.do_nothing(source, train.split), trained),
        "failing_gold_evaluated": _among(facts.failing_gold(source, evaluation.split, writes_only=True), held_out),
        "failing_gold_trained": _among(facts.failing_gold(source, train.split), trained),
        "same_gold_evaluated": [list(pair) for pair in facts.same_gold(source, evaluation.split, held_out)],
        "same_gold_split": [list(pair) for pair in facts.same_gold(source, evaluation.split)] if other else [],
        "split_tasks": len(source.tasks(evaluation.split)),
        "train_split_writes_only": facts.writes_only(source, train.split),
        "users_evaluated": len(facts.users(source, evaluation.split, held_out)),
        "split_overlap": dataclasses.asdict(facts.overlap(source, evaluation.split, other)) if other else None,
        "users_shared_with_training": len(
            set(facts.users(source, evaluation.split, held_out)) & set(facts.users(source, train.split, trained))
        ),
    }


def lines_of(exp: Experiment, data: dict[str, Any]) -> tuple[str, ...]:
    """What an honest report must say of the tasks, in sentences."""
    n, split = exp.eval.n_examples, data["evaluation_split"]
    idle, pairs, whole = data["do_nothing_evaluated"], data["same_gold_evaluated"], data["do_nothing_split"]
    elsewhere = [pair for pair in data["same_gold_split"] if pair not in pairs]
    lines = [
        f"Doing nothing scores 1.0 on {len(idle)} of the {n} evaluated tasks ({len(idle) / n:.1%})"
        + (f": {_listed(idle)}" if idle else "")
        + f", and on {len(whole)} of the {data['split_tasks']} {split} tasks ({len(whole) / data['split_tasks']:.1%}).",
        f"The evaluated tasks hold {data['users_evaluated']} users; pairs with the same gold: "
        f"{_pairs(pairs)}"
        + (f" (elsewhere in the split: {_pairs(elsewhere)})" if elsewhere else "")
        + ". They are not independent draws.",
        f"Gold writes that themselves fail: {_listed(data['failing_gold_evaluated'])} evaluated, "
        f"{_listed(data['failing_gold_trained'])} trained on (flagged, not dropped).",
    ]
    shared = data["split_overlap"]
    if shared is not None:
        lines.append(
            f"{shared['orders_shared']} of {shared['orders']} {split} write-orders and {shared['users_shared']} of "
            f"{shared['users']} {split} users also occur in the train tasks: the splits share customers and orders."
        )
    else:
        lines.append(
            f"Evaluation and training both use the {split} split, on disjoint tasks; "
            f"{data['users_shared_with_training']} users occur in both."
        )
    if data["train_split_writes_only"]:
        lines.append(
            f"The gold of every {data['train_split']} task is writes only: no reads, no expected outputs, no transfers."
        )
    if data["do_nothing_trained"]:
        lines.append(f"Doing nothing also scores 1.0 on training tasks {_listed(data['do_nothing_trained'])}.")
    return tuple(lines)


def _indices(selection: TaskSelection) -> tuple[int, ...]:
    return selection.indices(SPLIT_SIZES[selection.split])


def _among(tasks: Sequence[int], chosen: Sequence[int]) -> list[int]:
    return sorted(set(tasks) & set(chosen))


def _pairs(pairs: Sequence[Sequence[int]]) -> str:
    return ", ".join("/".join(map(str, pair)) for pair in pairs) or "none"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
