"""Copy-on-write: sharing is never seen, and the fast hash is upstream's plain one."""

import random
from hashlib import sha256
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paritygate import retail
from paritygate.retail.database import Base, Database, canonical_text
from tests.counts import soak
from tests.retail.calls import random_call, some_orders

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
tables = st.fixed_dictionaries(
    {
        name: st.dictionaries(st.text(max_size=3), st.dictionaries(st.text(), json_values, min_size=1), max_size=3)
        for name in ("users", "orders", "products")
    }
)


def plainly(value: Any) -> Any:
    """Upstream's rule, written once more: sorted pairs for objects, tuples for lists."""
    if isinstance(value, dict):
        return tuple(sorted((key, plainly(inner)) for key, inner in value.items()))
    return tuple(plainly(inner) for inner in value) if isinstance(value, list) else value


def plain(db: Database) -> dict[str, Any]:
    """The whole database as a dictionary, whose hash is not made from cached texts."""
    return {table: dict(db.records(table)) for table in ("users", "orders", "products")}


@given(tables)
def test_the_hash_from_cached_texts_is_the_hash_of_the_whole(data: dict[str, Any]) -> None:
    pairs = tuple(
        (table, tuple((key, plainly(data[table][key])) for key in sorted(data[table]))) for table in sorted(data)
    )
    expected = sha256(str(pairs).encode(errors="surrogatepass")).hexdigest()
    assert retail.database_hash(Database(Base(data))) == expected == retail.database_hash(data)


def test_two_episodes_never_see_each_other(source: retail.Source) -> None:
    rng = random.Random(1)
    for _ in range(soak(quick=5, full=60)):
        one, other = source.database(), source.database()
        orders = some_orders(rng, one, 8)
        for _ in range(30):
            name, arguments = random_call(rng, one, orders)
            retail.call(one, name, arguments)
        assert one.touched
        assert retail.database_hash(other) == source.initial_hash
        assert not other.touched
        assert retail.database_hash(one) == retail.database_hash(plain(one))
        assert source.base.texts == {
            table: {key: canonical_text(record) for key, record in sorted(records.items())}
            for table, records in source.base.tables.items()
        }


def test_equal_changes_mean_equal_hashes_and_unequal_ones_unequal(source: retail.Source) -> None:
    states: dict[str, dict[tuple[str, str], str]] = {}
    for split in ("dev", "test"):
        for index in range(len(source.tasks(split))):
            goal = source.goal(split, index)
            assert states.setdefault(retail.database_hash(goal.database), goal.changes) == goal.changes
    assert len({str(sorted(changes.items())) for changes in states.values()}) == len(states)
    assert states[source.initial_hash] == {}


def test_a_write_that_is_taken_back_is_no_change(source: retail.Source) -> None:
    db = source.database()
    user_id, user = next(db.records("users"))
    before = dict(user["address"])
    retail.call(db, "modify_user_address", {"user_id": user_id, **dict.fromkeys(before, "x")})
    assert retail.database_hash(db) != source.initial_hash
    retail.call(db, "modify_user_address", {"user_id": user_id, **before})
    assert db.touched
    assert not db.changes()
    assert retail.database_hash(db) == source.initial_hash


def test_an_equal_number_of_another_type_is_a_change(source: retail.Source) -> None:
    db = source.database()
    methods = (
        (key, name, method) for key, user in db.records("users") for name, method in user["payment_methods"].items()
    )
    user_id, name, method = next(candidate for candidate in methods if type(candidate[2].get("balance")) is int)
    db.edit("users", user_id)["payment_methods"][name]["balance"] = float(method["balance"])
    assert db.record("users", user_id) == source.base.tables["users"][user_id]
    assert db.changes()  # upstream hashes the text: 22 and 22.0 differ
    assert retail.database_hash(db) == retail.database_hash(plain(db)) != source.initial_hash
