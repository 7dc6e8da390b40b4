"""What a run has used so far, in tokens, hours and money: a table for the report, one line for the log."""

import dataclasses
from pathlib import Path

from paritygate.experiment.run.account.meter import KINDS, ROLES, SAVED, Usage, key
from paritygate.experiment.run.journal import Record
from paritygate.receipts import write_atomic
from paritygate.spec.experiment import Experiment
from paritygate.spec.prices import Prices, find_prices, load_prices

TABLE = "prices.json"


@dataclasses.dataclass(frozen=True)
class Cost:
    """Used tokens and hours, with what they cost as far as the price table knows.

    rows: role, model, kind, tokens, price (of a million), its day and money, these None where the table has none; the
    day is "unknown date" where its source does not say. unknown: one sentence for each model without a price.
    """

    rows: tuple[Record, ...]
    saved_states: int
    hours: float
    gpu_hours: float
    money: float | None
    currency: str
    as_of: str
    unknown: tuple[str, ...]

    def to_json(self) -> Record:
        """What the run's files hold."""
        return dataclasses.asdict(self)

    def line(self) -> str:
        """All of it in one line."""
        total = {kind: sum(row["tokens"] for row in self.rows if self._kind(row) == kind) for kind in SHOWN}
        tokens = ", ".join(f"{kind} {millions(count)}" for kind, count in total.items() if count)
        parts = [f"tokens: {tokens or 'none'}", f"{self.saved_states} states saved", f"{self.hours:.2f} h"]
        if self.money is not None:
            least = "at least " if self.unknown else ""
            parts.append(f"{least}{self.money:.2f} {self.currency} ({self.days()})")
        return "; ".join(parts)

    def days(self) -> str:
        """Of which days the prices are that were needed: the service may ask for others by now."""
        days = sorted({str(row["day"]) for row in self.rows if row["day"] is not None})
        return f"prices of {', '.join(days) or self.as_of}"

    @staticmethod
    def _kind(row: Record) -> str:
        """The proof's, the judge's and the user's tokens are kinds of their own."""
        return str(row["kind"] if row["role"] == "policy" else row["role"])


SHOWN = (*KINDS, "proof", "judge", "user")


def millions(count: float) -> str:
    """A number of tokens for a person."""
    return f"{count / 1e6:.2f}M" if count >= 1e5 else f"{count:,.0f}"


def cost_of(exp: Experiment, used: Usage, hours: tuple[float, float], prices: Prices | None) -> Cost:
    """What `used` and (hours, GPU hours) come to."""
    wall, gpu = (round(spent, 4) for spent in hours)
    models = {
        "policy": exp.base_model,
        "proof": exp.base_model,
        "user": exp.protocol.user.model,
        "judge": exp.protocol.judge.model,
    }
    rows: list[Record] = []
    for role in ROLES:
        for kind in KINDS:
            tokens = used.get(key(role, kind), 0)
            if not tokens:
                continue
            price = None if prices is None else prices.of(str(models[role]), kind)
            money = None if price is None else tokens * price / 1e6
            day = None if prices is None or price is None else prices.day(str(models[role]))
            named = {"role": role, "model": models[role], "kind": kind}
            rows.append({**named, "tokens": tokens, "price": price, "day": day, "money": money})
    money = None
    if prices is not None:
        money = sum(row["money"] or 0.0 for row in rows) + gpu * (prices.gpu_hour or 0.0)
    unknown = dict.fromkeys((row["model"], row["kind"]) for row in rows if row["price"] is None)
    return Cost(
        tuple(rows),
        used.get(SAVED, 0),
        wall,
        gpu,
        money,
        prices.currency if prices is not None else "",
        prices.as_of if prices is not None else "",
        () if prices is None else tuple(unpriced(model, kind, prices) for model, kind in unknown),
    )


def unpriced(model: str, kind: str, prices: Prices) -> str:
    """One sentence about a model or kind that the table does not know."""
    return (
        f"The price table of {prices.as_of} has no price for {kind} tokens of {model}: they are counted, what they "
        "cost is not in the sum; add the model, or name another table in budget.prices or by --prices."
    )


def prices_of(exp: Experiment, given: Path | None) -> tuple[Path, Prices] | None:
    """The table that the command line or else the spec names, with its file; None where neither does.

    Raises SpecError (exit 2) where it is not there or wrong.
    """
    path = given or find_prices(exp.budget.prices, exp.path)
    return None if path is None else (path, load_prices(path))


def keep_prices(directory: Path, exp: Experiment, given: Path | None) -> Prices | None:
    """The run's own copy of its price table, made when it begins: what it costs is said by the same prices to the end.

    Another table that is given to a run that goes on replaces the copy.
    """
    copy = directory / TABLE
    if copy.is_file() and given is None:
        return load_prices(copy)
    table = prices_of(exp, given)
    if table is None:
        return None
    write_atomic(copy, table[0].read_bytes())
    return table[1]
