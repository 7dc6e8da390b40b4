"""One proof from beginning to end: open, prepare, check, and a report after every obligation."""

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from paritygate.address import checked_url
from paritygate.errors import BadInputError, printable
from paritygate.service.connection import Connection, Usage
from paritygate.service.lab import Lab, Settings
from paritygate.service.obligations import Obligations
from paritygate.service.report import Report
from paritygate.service.runner import Result, first_contact, prepare, prove


def prove_at(
    url: str,
    api_key: str | None,
    model: str | None,
    obligations: Obligations,
    *,
    settings: Settings | None = None,
    limit: float = 120.0,
    earlier: Report | None = None,
    usage: Usage | None = None,
    save: Callable[[Report], None] = lambda report: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Report:
    """Hold the service at `url` to `obligations`.

    model: None where the service reports one only. earlier: an unfinished report, whose results stand where it was of
    the same service, model, SDK, spec and settings. usage: counts the tokens, and is told of every saved state. save:
    called with the report so far after every obligation. say: called with a sentence on what becomes of `earlier`.
    Raises BadInputError (arguments) and BackendError (the service is gone, fails at what every check starts with, or
    stopped answering); what `save` was given last is what is known then.
    """
    settings, url, sdk = settings or Settings(), checked_url(url, "--base-url"), sdk_version()
    connection = Connection(url, api_key, model or "", limit=limit, usage=usage or Usage())
    connection.probe(10.0)
    lab = Lab(connection, settings)
    models = first_contact(lab)
    connection.model = model or only_model(models, url)
    report = Report(
        url,
        connection.model,
        [printable(name) for name in models],
        sdk,
        obligations.sha256,
        asdict(settings),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    done: Mapping[str, Result] = {}
    if earlier is not None and not earlier.complete:
        other = earlier.difference(report)
        kept = f"what it has of {len(earlier.results)} obligations is kept"
        say(f"An earlier run did not finish: {f'{other}, so all is checked again' if other else kept}.")
        if not other:
            done = {result.name: result for result in earlier.results}
            report.calls, report.tokens, report.seconds = earlier.calls, earlier.tokens, earlier.seconds
    before, started = (report.calls, report.tokens, report.seconds), time.monotonic()

    def add(result: Result) -> None:
        report.results.append(result)
        report.calls, report.tokens = before[0] + connection.calls, before[1] + connection.tokens
        report.seconds = before[2] + time.monotonic() - started
        save(report)

    try:
        prepare(lab)
        report.noise = asdict(lab.noise)
        prove(lab, obligations, done, add)
        report.complete = True
        save(report)
    finally:
        lab.close()
    return report


def only_model(models: list[str], url: str) -> str:
    """The model that is proved where none is named; BadInputError where a service reports none, or several."""
    if len(models) == 1:
        return models[0]
    raise BadInputError(f"Name the model with --model; {url} serves {', '.join(models) or 'none that it reports'}.")


def sdk_version() -> str:
    """The installed SDK's; BadInputError where there is none, or one that lacks what it imports (0.18.1: orjson)."""
    try:
        installed = version("tinker")
        importlib.import_module("tinker")
    except PackageNotFoundError:
        raise BadInputError("The Tinker SDK is not installed; install tinker.") from None
    except ImportError as error:
        raise BadInputError(f"The installed Tinker SDK cannot be imported ({error}).") from None
    return installed
