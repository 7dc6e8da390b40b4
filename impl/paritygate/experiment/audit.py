"""A finished run held against itself: what its files derive from each other is derived again, offline.

Digests show that nothing was touched since; whoever recomputes them all can still contradict himself. Here the phases
are those of the spec, metrics and items those of the units, units those of the trajectories (training steps:
`audit_steps`), and rewards, rule scores, advantages and the page are computed anew.
"""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from paritygate.agent.episode import agent_messages
from paritygate.agent.judge import Judgement
from paritygate.agent.judge.judgement import DIMENSIONS
from paritygate.agent.judge.rules import judge_messages
from paritygate.agent.rollouts import Rollout
from paritygate.agent.seeds import derive
from paritygate.agent.trajectory import GRADED, Trajectory
from paritygate.errors import BadInputError, Refused
from paritygate.experiment.audit_steps import (
    alike,
    check_cost,
    check_episode,
    check_facts,
    check_steps,
    lines_of,
    record_of,
)
from paritygate.experiment.plan.service_obligations import JSON, RECEIPT, proof_settings, stands_on
from paritygate.experiment.protocol import PHASES
from paritygate.experiment.run.entry_points import GroupAdvantages, as_it_ran, folder
from paritygate.experiment.run.journal import finite, read_lines
from paritygate.experiment.run.replay import replay
from paritygate.experiment.run.state import DEVIATIONS, moved_to
from paritygate.receipts import PhaseChain, canonical, read_parity_receipt
from paritygate.receipts.environment import installed
from paritygate.receipts.signature import run_signer
from paritygate.service import report as reports
from paritygate.service.receipt import receipt as service_receipt
from paritygate.service.receipt import verify
from paritygate.spec import Experiment, SpecError, load
from paritygate.spec.strict import read_plain

Record = dict[str, Any]


def audit(run_dir: Path, root: Path) -> list[str]:
    """Check the run in `run_dir` offline against the checkout at `root`; raises Refused naming the file.

    The lines say what was checked, which versions differ (not judged), who signed, and the verdict.
    """
    lines = replay(run_dir, root)
    try:
        exp = load(run_dir / "spec.json")
    except SpecError as error:
        raise Refused(f"{run_dir / 'spec.json'} is no spec: {error}.") from error
    if not isinstance(exp, Experiment):
        raise Refused(f"{run_dir / 'spec.json'} names no experiment: such a run has no directory.")
    try:
        stopped = check_phases(run_dir, exp)
        proved = check_service_proof(run_dir, exp)
        check_metrics(run_dir)
        check_items(run_dir, exp, stopped)
        trajectories = check_evaluation(run_dir, exp)
        trained = check_steps(run_dir, exp, losses_of_arms(run_dir, exp))
        graded = check_rewards([*trajectories, *trained])
        check_facts(run_dir, exp)
        check_cost(run_dir, exp)
        check_dependencies(run_dir, exp)
        drawn = check_page(run_dir, root)
    except (KeyError, TypeError, ValueError, IndexError, OSError) as error:
        raise Refused(f"{run_dir} holds a file of another form than a run writes: {error!r}.") from error
    signer = run_signer(root, run_dir)
    return [
        *lines[:-1],
        *proved,
        f"signed by {signer}" if signer else "not signed: digests alone do not show who made it",
        f"{len(trajectories)} evaluated episodes: items, rule scores and advantages computed anew; {graded}; {drawn}",
        lines[-1],
    ]


def check_phases(run_dir: Path, exp: Experiment) -> str | None:
    """The phase that a gate stopped the run at, or None; Refused unless the phases are the spec's, in its order."""
    chain = PhaseChain(run_dir)
    names = [phase.name for phase in PHASES if phase.applies(exp)]
    outcomes = [chain.record(name).get("outcome") for name in chain.completed]
    stopped = chain.completed[-1] if outcomes[-1:] == ["stopped"] else None
    expected = names[: names.index(stopped) + 1] if stopped in names else names
    if chain.completed != expected:
        missing = next((name for name in expected if name not in chain.completed), "another order")
        raise Refused(f"{run_dir / 'phases'} are not the phases of {run_dir / 'spec.json'}: {missing} is missing.")
    if set(outcomes[: -1 if stopped else None]) - {"done"}:
        raise Refused(f"{run_dir / 'phases'}: a phase that was not done has phases after it.")
    later = names[names.index(stopped) + 1 :] if stopped else []
    for name in later:
        if leftovers := sorted((run_dir / "units").glob(f"{name}-*")):
            raise Refused(f"{leftovers[0]} is there, though a gate stopped the run before, at {stopped}.")
    return stopped


def check_service_proof(run_dir: Path, exp: Experiment) -> list[str]:
    """One line about the service's proof; Refused unless its receipt is whole and fits the spec and the run's files.

    Held: the digest in the chain of phases and in receipt.json, the service, model, rank and Adam of the run, the
    obligations that the arms stand on, the reason for each that was not shown, and the report beside the receipt.
    """
    chain = PhaseChain(run_dir)
    if "service_proof" not in chain.completed:
        return []
    path = run_dir / RECEIPT
    receipt, facts, asked = verify(path), chain.record("service_proof")["facts"], stands_on(exp)

    def hold(right: bool, what: str) -> None:
        if not right:
            raise Refused(f"{path} {what}.")

    hold(receipt["sha256"] == facts["sha256"], "is not the receipt that the phase service_proof wrote")
    if (run_dir / "receipt.json").exists():
        named = record_of(run_dir / "receipt.json")["predicate"]["buildDefinition"]["resolvedDependencies"]
        digests = [entry["digest"]["sha256"] for entry in named if entry.get("name") == "service proof"]
        hold(digests == [receipt["sha256"]], "is not the service proof that receipt.json names")
    endpoint = chain.record("service_preflight")["facts"]["endpoint"]
    local = receipt["endpoint"].startswith("http://127.0.0.1:")
    moved = moved_to(endpoint, receipt["endpoint"]) in read_lines(run_dir / DEVIATIONS)
    there = receipt["endpoint"] == endpoint or (local if endpoint == "embedded" else moved)
    hold(there, f"is of another service than {endpoint}")
    hold(receipt["model"] == exp.base_model, f"is of another model than {exp.base_model}")
    hold(receipt["settings"] == proof_settings(exp), "is of another rank, other betas or other material than the run's")
    names = [entry["name"] for entry in receipt["obligations"]]
    hold(names == [entry.name for entry in asked.entries], "has other obligations than those that the arms stand on")
    hold(receipt["spec_sha256"] == asked.sha256, "is held to another spec/service.json")
    for entry in receipt["obligations"]:
        hold(entry["outcome"] != "departs", f"says that {entry['name']} departs, and the run went on")
        shown = entry["outcome"] == "holds" or entry["name"] in exp.protocol.service.undecided
        hold(shown, f"does not show {entry['name']}, and the spec gives no reason to go on without it")
    report = reports.read(run_dir / JSON)
    hold(report is not None and service_receipt(report, asked) == receipt, f"is not that of {JSON}")
    counts = ", ".join(f"{count} {name}" for name, count in facts["outcomes"].items() if count)
    return [f"the service at {receipt['endpoint']} was proved with SDK {receipt['sdk']}: {counts}"]


def check_metrics(run_dir: Path) -> None:
    """Refused unless metrics.jsonl holds the metrics of the units, in the order in which they were committed."""
    records = [record_of(path) for path in sorted((run_dir / "units").rglob("*.json"))]
    lines = sorted((record["metrics"] for record in records if "metrics" in record), key=lambda line: line["index"])
    if [line["index"] for line in lines] != list(range(len(lines))):
        raise Refused(f"{run_dir / 'units'}: a unit that had metrics is missing, or is there twice.")
    if read_plain(run_dir / "metrics.jsonl") != b"".join(canonical(line) + b"\n" for line in lines):
        raise Refused(f"{run_dir / 'metrics.jsonl'} does not hold the metrics of {run_dir / 'units'}.")


def check_items(run_dir: Path, exp: Experiment, stopped: str | None) -> None:
    """Refused unless items.jsonl holds the items of the units, and misses one where the run stopped for that."""
    path = run_dir / "items.jsonl"
    items = [unit["item"] for _, unit in evaluated(run_dir, exp)]
    if not path.is_file():
        if stopped is None or stopped in ("evaluate", "decide"):
            raise Refused(f"{path} is missing: the evaluation is over.")
        return
    if read_plain(path) != b"".join(canonical(finite(item)) + b"\n" for item in items):
        raise Refused(f"{path} does not hold the items of {run_dir / 'units'}, in the order of arms, tasks, rollouts.")
    if stopped == "evaluate" and all(item["composite"] is not None for item in items):
        raise Refused(f"{run_dir / 'phases'} say that the evaluation stopped for a missing item; {path} misses none.")


def check_evaluation(run_dir: Path, exp: Experiment) -> list[tuple[Path, Trajectory]]:
    """The evaluated trajectories with their files; Refused unless each item is what its trajectory says."""
    trajectories: list[tuple[Path, Trajectory]] = []
    for path, unit in evaluated(run_dir, exp):
        item, place = unit["item"], run_dir / unit["trajectories"]
        [line] = lines_of(place)
        trajectory, judgement = Trajectory.from_json(line), line["judgement"]
        seed = derive(exp.arms[0].seed, "evaluate", item["task_index"], item["rollout"], item["tries"] - 1)
        check_episode(place, exp, Rollout.from_json(line), exp.protocol.evaluation.split, seed)
        dimensions = {name: judgement[name] for name in DIMENSIONS} if judgement is not None else None
        composite = Judgement(**dimensions, rationale={}).composite if dimensions is not None else None
        if not trajectory.trains:
            composite = None
        says: Record = {
            "task_index": trajectory.task_index,
            "rollout": trajectory.rollout,
            "composite": composite,
            "dimensions": dimensions if composite is not None else None,
            "reward": trajectory.reward,
            "ended_by": trajectory.ended_by,
            "turns": trajectory.turns,
            "assistant_tokens": sum(trajectory.mask),
            "grade": dict(trajectory.grade),
            "judge_tries": line["judge_tries"],
            "judge_first_try_parsed": line["judge_first_try_parsed"],
        }
        for name, value in says.items():
            if item[name] != value:
                raise Refused(f"{path}: {name} is {item[name]!r} in the item, {value!r} by {place}.")
        rules = {name: getattr(judge_messages(trajectory.messages), name) for name in DIMENSIONS}
        by_rules = dimensions if exp.protocol.judge.kind == "rule" else item["rules"]
        if by_rules is not None and trajectory.trains and by_rules != rules:
            raise Refused(f"{path}: the rules give {rules} for the messages in {place}, not {by_rules}.")
        trajectories.append((place, trajectory))
    return trajectories


def losses_of_arms(run_dir: Path, exp: Experiment) -> dict[str | None, GroupAdvantages]:
    """The losses that arms name, as they ran; Refused unless the run's receipts of them are whole and those it names.

    Their repositories have to be here, with the bytes of the run.
    """
    losses: dict[str | None, GroupAdvantages] = {}
    for name in exp.entry_points:
        copies = sorted(folder(run_dir, name).glob("parity-*.json"))
        named = record_of(run_dir / "receipt.json")["predicate"]["buildDefinition"]["resolvedDependencies"]
        digests = [entry["digest"]["sha256"] for entry in named if entry.get("name") == f"loss {name}"]
        if [read_parity_receipt(path).sha256 for path in copies] != digests or len(digests) != 1:
            raise Refused(f"{folder(run_dir, name)} does not hold the parity receipt that receipt.json names.")
        losses[name] = as_it_ran(name, read_parity_receipt(copies[0]))
    return losses


def check_rewards(trajectories: list[tuple[Path, Trajectory]]) -> str:
    """How many episodes were graded anew from their tool calls; Refused where one gives another reward or grade."""
    from paritygate import retail

    try:
        source = retail.load()
    except BadInputError:
        return "no reward graded anew: PARITYGATE_TAU_BENCH names no tau-bench retail folder"
    for path, trajectory in trajectories:
        if trajectory.ended_by not in GRADED:
            if trajectory.reward != 0.0:
                raise Refused(f"{path}: reward {trajectory.reward} for an episode that ended by {trajectory.ended_by}.")
            continue
        episode = retail.RetailEpisode(source, trajectory.split, trajectory.task_index)
        calls = {call["id"]: call["function"] for m in trajectory.messages for call in m.get("tool_calls") or ()}
        for message in trajectory.messages:
            call = calls.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
            if call is not None and isinstance(call["arguments"], dict) and not episode.done:
                episode.call(call["name"], call["arguments"])
        grade = episode.grade(agent_messages(trajectory.messages))
        if grade.reward != trajectory.reward:
            raise Refused(
                f"{path}: its tool calls and messages earn a reward of {grade.reward}, not {trajectory.reward}."
            )
        if not alike(dict(trajectory.grade), dataclasses.asdict(grade)):
            raise Refused(f"{path}: its tool calls and messages give another grade than it says.")
    return f"{len(trajectories)} rewards graded anew"


def check_dependencies(run_dir: Path, exp: Experiment) -> None:
    """Refused unless what receipt.json says that the results depend on is what the run's files say."""
    entries = record_of(run_dir / "receipt.json")["predicate"]["buildDefinition"]["resolvedDependencies"]
    named = {entry["name"]: entry.get("annotations", {}) for entry in entries}
    items = lines_of(run_dir / "items.jsonl") if (run_dir / "items.jsonl").exists() else []
    judged = {
        "items": len(items),
        "parsed": sum(item["composite"] is not None for item in items),
        "parsed_at_first": sum(bool(item["judge_first_try_parsed"]) for item in items),
    }
    used: Counter[str] = Counter()
    for entry in lines_of(run_dir / "timings.jsonl"):
        used.update(entry.get("used", {}))
    chain = PhaseChain(run_dir)
    adapters = chain.record("train")["facts"].get("samplers", {}) if "train" in chain.completed else {}
    says = [
        ("judge", named["judge"], dataclasses.asdict(exp.protocol.judge) | {"judged": judged}),
        ("user simulator", named["user simulator"], dataclasses.asdict(exp.protocol.user)),
        ("base model", named["base model"]["model"], exp.base_model),
        ("service", named["service"]["used"], dict(used)),
        ("service", named["service"]["adapters"], adapters),
    ]
    for name, stated, computed in says:
        if not alike(stated, computed):
            raise Refused(f"{run_dir / 'receipt.json'}: {name} is {stated!r} in it, {computed!r} by the run's files.")


def check_page(run_dir: Path, root: Path) -> str:
    """Refused unless report.html is what the files of the run gave when it was made, before its own phase ended.

    Other versions of what draws it may draw otherwise: then the page is not judged, and the sentence says so.
    """
    from paritygate.report.files import read_run
    from paritygate.report.page import PAGE, render

    then = record_of(run_dir / "receipt.json")["predicate"]["buildDefinition"]["internalParameters"]["installed"]
    here = installed(root)
    if other := [name for name in ("jinja2", "matplotlib") if then.get(name) != here.get(name)]:
        return f"the page was not made anew: another {other[0]} made it"
    run = read_run(run_dir)
    run = dataclasses.replace(run, phases=tuple(phase for phase in run.phases if phase.name != "report"))
    if read_plain(run_dir / PAGE, most=2**33) != render(run).encode("utf-8"):
        raise Refused(f"{run_dir / PAGE} is not the page that the run's files give.")
    return "the page made anew"


def evaluated(run_dir: Path, exp: Experiment) -> list[tuple[Path, Record]]:
    """The units of the evaluation with their files, in the order of arms, tasks and rollouts."""
    paths = [
        path
        for arm in exp.arms
        for path in sorted((run_dir / "units" / f"evaluate-{arm.name}").glob("task-*.json"), key=numbers)
    ]
    return [(path, record_of(path)) for path in paths]


def numbers(path: Path) -> tuple[int, ...]:
    """(task, rollout) of `task-0012-0.json`."""
    return tuple(int(part) for part in path.stem.split("-")[1:])
