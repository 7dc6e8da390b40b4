"""What the transcripts show only in part: each tool's order of checks, its traces, and wrong types of every kind."""

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from paritygate import retail
from paritygate.retail.database import Database
from paritygate.retail.tools import TOOLS, WRITE_TOOLS
from tests.counts import soak
from tests.retail.calls import random_call, some_orders


@pytest.fixture
def db(source: retail.Source) -> Iterator[Database]:
    yield source.database()
    assert retail.database_hash(source.database()) == source.initial_hash


def first(db: Database, status: str, *, method: str = "", items: int = 1) -> dict[str, Any]:
    """An order of this status, paid by a method whose id starts with `method`, with at least so many items."""
    return next(
        order
        for _, order in db.records("orders")
        if order["status"] == status
        and order["payment_history"][0]["payment_method_id"].startswith(method)
        and len({item["item_id"] for item in order["items"]}) == len(order["items"]) >= items
    )


def test_schemas_and_tools_are_the_same_sixteen(source: retail.Source) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in source.tools}
    assert schemas.keys() == TOOLS.keys()
    assert len(TOOLS) == 16
    for name, schema in schemas.items():
        assert set(schema["properties"]) == set(TOOLS[name].parameters) == set(schema["required"])
    assert TOOLS.keys() > set(WRITE_TOOLS)


def test_return_checks_payment_before_items(db: Database) -> None:
    order = first(db, "delivered", method="credit_card")
    arguments = {"order_id": order["order_id"], "item_ids": ["none"], "payment_method_id": "none"}
    assert retail.call(db, "return_delivered_order_items", arguments) == "Error: payment method not found"
    arguments["payment_method_id"] = order["payment_history"][0]["payment_method_id"]
    assert retail.call(db, "return_delivered_order_items", arguments) == "Error: some item not found"


def test_exchange_checks_items_before_payment_and_order_before_both(db: Database) -> None:
    order = first(db, "delivered")
    arguments: dict[str, Any] = {"order_id": "x", "item_ids": ["no"], "new_item_ids": [], "payment_method_id": "no"}
    answers: list[str] = []
    item = order["items"][0]["item_id"]
    for change in ({}, {"order_id": order["order_id"]}, {"item_ids": [item]}, {"new_item_ids": ["1"]}):
        arguments |= change
        answers.append(retail.call(db, "exchange_delivered_order_items", arguments))
    assert answers == [
        "Error: order not found",
        "Error: no not found",
        "Error: the number of items to be exchanged should match",
        "Error: new item 1 not found or available",
    ]
    assert not db.touched


def test_cancelling_after_a_change_of_payment_refunds_every_entry(db: Database) -> None:
    order = next(
        order
        for _, order in db.records("orders")
        if order["status"] == "pending"
        and len(db.record("users", order["user_id"])["payment_methods"]) > 1
        and not any("gift" in key for key in db.record("users", order["user_id"])["payment_methods"])
    )
    paid = order["payment_history"][0]
    other = next(
        key for key in db.record("users", order["user_id"])["payment_methods"] if key != paid["payment_method_id"]
    )
    change = {"order_id": order["order_id"], "payment_method_id": other}
    assert retail.call(db, "modify_pending_order_payment", change).startswith("{")
    again = retail.call(db, "modify_pending_order_payment", change)
    assert again == "Error: there should be exactly one payment for a pending order"
    cancel = {"order_id": order["order_id"], "reason": "no longer needed"}
    cancelled = json.loads(retail.call(db, "cancel_pending_order", cancel))
    refunds = cancelled["payment_history"][3:]
    assert [entry["payment_method_id"] for entry in refunds] == [
        paid["payment_method_id"],
        other,
        paid["payment_method_id"],
    ]
    assert {entry["transaction_type"] for entry in refunds} == {"refund"}


def test_a_gift_card_is_credited_at_once_and_rounded(db: Database) -> None:
    order = first(db, "pending", method="gift_card")
    paid = order["payment_history"][0]
    before = db.record("users", order["user_id"])["payment_methods"][paid["payment_method_id"]]["balance"]
    retail.call(db, "cancel_pending_order", {"order_id": order["order_id"], "reason": "ordered by mistake"})
    after = db.record("users", order["user_id"])["payment_methods"][paid["payment_method_id"]]["balance"]
    assert after == round(before + paid["amount"], 2)


def test_item_changes_keep_the_difference_unrounded_and_exchanges_round_it(db: Database) -> None:
    seen = 0
    for _, order in list(db.records("orders")):
        name = {"pending": "modify_pending_order_items", "delivered": "exchange_delivered_order_items"}
        if order["status"] not in name or order["payment_history"][0]["payment_method_id"].startswith("gift"):
            continue
        item = copy.deepcopy(order["items"][0])
        variants = db.record("products", item["product_id"])["variants"]
        new = next((key for key, variant in variants.items() if variant["available"]), None)
        if new is None:
            continue
        answer = retail.call(
            db,
            name[order["status"]],
            {
                "order_id": order["order_id"],
                "item_ids": [item["item_id"]],
                "new_item_ids": [new],
                "payment_method_id": order["payment_history"][0]["payment_method_id"],
            },
        )
        after = json.loads(answer)
        difference = variants[new]["price"] - item["price"]
        if order["status"] == "delivered":
            assert after["exchange_price_difference"] == round(difference, 2)
            continue
        seen += difference != round(difference, 2)
        assert after["payment_history"][-1]["amount"] == abs(difference)
        assert after["payment_history"][-1]["transaction_type"] == ("payment" if difference > 0 else "refund")
        assert after["status"] == "pending (item modified)"
    assert seen > 10


@pytest.mark.parametrize(
    ("name", "arguments", "observation"),
    [
        ("cancel_pending_order", {}, "missing 2 required positional arguments: 'order_id' and 'reason'"),
        (
            "modify_pending_order_items",
            {"order_id": "x"},
            "missing 3 required positional arguments: 'item_ids', 'new_item_ids', and 'payment_method_id'",
        ),
        ("think", {"thought": "x", "b": 1, "a": 2}, "got an unexpected keyword argument 'b'"),
        ("get_user_details", {"self": 1}, "got an unexpected keyword argument 'self'"),
    ],
)
def test_arguments_bind_as_a_python_call(db: Database, name: str, arguments: dict[str, Any], observation: str) -> None:
    assert retail.call(db, name, arguments) == f"Error: {TOOLS[name].class_name}.invoke() {observation}"


@pytest.mark.parametrize("arguments", [None, [], "{}", 1, True, [("order_id", "#W1")]])
def test_arguments_that_are_no_object_are_answered(db: Database, arguments: Any) -> None:
    answer = retail.call(db, "get_order_details", arguments)
    assert answer == f"Error: arguments must be an object, not {type(arguments).__name__}"


@pytest.mark.parametrize("name", ["", "respond", "Calculate", "calculate ", None, 3, ["calculate"], {"a": 1}])
def test_an_unknown_tool_is_said_to_be_unknown(db: Database, name: Any) -> None:
    assert retail.call(db, name, {}) == f"Unknown action {name}"


def test_wrong_shapes_of_item_lists(db: Database) -> None:
    order = first(db, "pending", method="credit_card")
    base = {"order_id": order["order_id"], "payment_method_id": order["payment_history"][0]["payment_method_id"]}

    def answer(items: Any, new: Any) -> str:
        return retail.call(db, "modify_pending_order_items", {**base, "item_ids": items, "new_item_ids": new})

    item = order["items"][0]["item_id"]
    assert answer("123", []) == "Error: 1 not found"
    assert answer([["a"]], []) == "Error: ['a'] not found"
    assert answer([item], "7") == "Error: new item 7 not found or available"
    assert answer([item], {"7": 1}) == "Error: new item 7 not found or available"
    assert answer([item], [[item]]) == "Error: unhashable type: 'list'"
    assert answer({"a": 1}, []).startswith("Error: 'dict' object has no attribute 'count'")
    assert not db.touched
    assert json.loads(answer("", {}))["status"] == "pending (item modified)"  # nothing asked for, and done


def test_odd_but_legal_values_are_kept_and_hashed(db: Database) -> None:
    address = dict.fromkeys(("address1", "address2", "city", "state", "country", "zip"))
    odd = ["\ud800", 1, 1.0, True, None, [["x"], {"b": 1, "a": math.nan}]]
    values = dict(zip(address, odd, strict=True))
    user_id = next(iter(db.base.tables["users"]))
    answer = retail.call(db, "modify_user_address", {"user_id": user_id, **values})
    assert list(json.loads(answer)["address"]) == list(address)
    hashes = {retail.database_hash(db)}
    for place, value in enumerate([0, True, 1, 1, False, []]):
        changed = {**values, list(address)[place]: value}
        retail.call(db, "modify_user_address", {"user_id": user_id, **changed})
        hashes.add(retail.database_hash(db))
    assert len(hashes) == 7  # 1, 1.0 and True are equal in Python and differ in upstream's hash


def test_arguments_nested_without_end_are_refused_before_any_write(db: Database) -> None:
    deep: Any = "x"
    for _ in range(5_000):
        deep = [deep]
    user_id = next(iter(db.base.tables["users"]))
    arguments = dict.fromkeys(TOOLS["modify_user_address"].parameters, deep) | {"user_id": user_id}
    assert retail.call(db, "modify_user_address", arguments) == "Error: arguments nested deeper than 100 levels"
    assert not db.touched


def test_no_call_raises_and_only_writes_leave_traces(source: retail.Source) -> None:
    rng = random.Random(7)
    for _ in range(soak(quick=30, full=400)):
        db = source.database()
        orders = some_orders(rng, db, 12)
        for _ in range(40):
            name, arguments = random_call(rng, db, orders)
            before = db.changes()
            answer = retail.call(db, name, copy.deepcopy(arguments))
            assert isinstance(answer, str)
            if name not in WRITE_TOOLS or answer.startswith("Error: "):
                assert db.changes() == before, (name, arguments, answer)
            elif name != "modify_user_address":
                assert answer == json.dumps(db.record("orders", arguments["order_id"]))
    assert retail.database_hash(source.database()) == source.initial_hash


def gift_card(db: Database, order: dict[str, Any], balance: float) -> str:
    """The order's user gets a gift card of this balance; its id."""
    methods = db.edit("users", order["user_id"])["payment_methods"]
    methods["gift_card_0000001"] = {"source": "gift_card", "balance": balance, "id": "gift_card_0000001"}
    return "gift_card_0000001"


def dearer(db: Database, order: dict[str, Any]) -> tuple[dict[str, Any], str, float]:
    """An item of the order, a new one of its product that costs more, and the difference."""
    for item in order["items"]:
        for variant_id, variant in db.record("products", item["product_id"])["variants"].items():
            if variant["available"] and variant["price"] > item["price"]:
                return item, variant_id, variant["price"] - item["price"]
    raise AssertionError("every item is the dearest of its product")


CARDS = ["modify_pending_order_payment", "modify_pending_order_items", "exchange_delivered_order_items"]


@pytest.mark.parametrize("name", CARDS)
def test_a_gift_card_with_exactly_the_amount_pays_and_with_less_does_not(source: retail.Source, name: str) -> None:
    """upstream's three tools at 59a200c6 refuse where balance < amount, so an equal balance is enough and is spent."""
    status = "delivered" if name.startswith("exchange") else "pending"
    for missing, allowed in ((0.0, True), (-1.0, True), (0.01, False)):
        db = source.database()
        order = first(db, status, method="credit_card")
        arguments: dict[str, Any] = {"order_id": order["order_id"]}
        if name == "modify_pending_order_payment":
            amount = order["payment_history"][0]["amount"]
        else:
            item, variant_id, amount = dearer(db, order)
            arguments |= {"item_ids": [item["item_id"]], "new_item_ids": [variant_id]}
        amount = round(amount, 2) if name.startswith("exchange") else amount
        card = gift_card(db, order, amount - missing)
        answer = retail.call(db, name, arguments | {"payment_method_id": card})
        assert answer.startswith("Error: insufficient gift card balance") == (not allowed), (missing, answer)
        balance = db.record("users", order["user_id"])["payment_methods"][card]["balance"]
        spent = amount if allowed and status == "pending" else 0.0
        assert balance == pytest.approx(round(amount - missing - spent, 2), abs=1e-9)


def test_a_balance_stays_in_cents(db: Database) -> None:
    order = first(db, "pending", method="gift_card")
    card = order["payment_history"][0]["payment_method_id"]
    db.edit("users", order["user_id"])["payment_methods"][card]["balance"] = 0.1
    db.edit("orders", order["order_id"])["payment_history"][0]["amount"] = 0.2
    retail.call(db, "cancel_pending_order", {"order_id": order["order_id"], "reason": "no longer needed"})
    assert db.record("users", order["user_id"])["payment_methods"][card]["balance"] == 0.3  # not 0.30000000000000004


def test_a_return_is_paid_to_the_original_method_or_a_gift_card(db: Database) -> None:
    order = first(db, "delivered", method="credit_card")
    card = gift_card(db, order, 1.0)
    methods = db.edit("users", order["user_id"])["payment_methods"]
    methods["paypal_0000001"] = {"source": "paypal", "id": "paypal_0000001"}
    arguments = {"order_id": order["order_id"], "item_ids": [order["items"][0]["item_id"]]}
    refusal = "Error: payment method should be either the original payment method or a gift card"
    assert (
        retail.call(db, "return_delivered_order_items", arguments | {"payment_method_id": "paypal_0000001"}) == refusal
    )
    answer = json.loads(retail.call(db, "return_delivered_order_items", arguments | {"payment_method_id": card}))
    assert (answer["status"], answer["return_payment_method_id"]) == ("return requested", card)


@pytest.mark.parametrize("name", ["modify_pending_order_items", "exchange_delivered_order_items"])
def test_a_variant_that_is_not_available_is_refused(db: Database, name: str) -> None:
    status = "pending" if name.startswith("modify") else "delivered"
    order, item, sold_out = next(
        (order, item, key)
        for _, order in db.records("orders")
        if order["status"] == status
        for item in order["items"]
        for key, variant in db.record("products", item["product_id"])["variants"].items()
        if not variant["available"]
    )
    arguments = {"order_id": order["order_id"], "item_ids": [item["item_id"]], "new_item_ids": [sold_out]}
    arguments["payment_method_id"] = order["payment_history"][0]["payment_method_id"]
    assert retail.call(db, name, arguments) == f"Error: new item {sold_out} not found or available"


def test_an_exchange_keeps_both_lists_sorted_each_by_itself(db: Database) -> None:
    def available(item: dict[str, Any]) -> list[str]:
        variants = db.record("products", item["product_id"])["variants"]
        return [key for key, variant in variants.items() if variant["available"]]

    order, pairs = next(
        (order, [(a, x), (b, y)])
        for _, order in db.records("orders")
        if order["status"] == "delivered" and order["payment_history"][0]["payment_method_id"].startswith("credit_card")
        for a, b in zip(order["items"], order["items"][1:], strict=False)
        for x in available(a)[:1]
        for y in available(b)[:1]
        if a["item_id"] > b["item_id"] and x > y
    )
    old, new = [item["item_id"] for item, _ in pairs], [chosen for _, chosen in pairs]
    arguments = {"order_id": order["order_id"], "item_ids": old, "new_item_ids": new}
    arguments["payment_method_id"] = order["payment_history"][0]["payment_method_id"]
    answer = json.loads(retail.call(db, "exchange_delivered_order_items", arguments))
    assert (answer["exchange_items"], answer["exchange_new_items"]) == (old[::-1], new[::-1])
