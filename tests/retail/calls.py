"""Random tool calls: plausible ones on real records, and the same with arguments of every wrong shape."""

import random
from typing import Any

from paritygate.retail.database import Database
from paritygate.retail.tools import TOOLS

JUNK: list[Any] = [
    None,
    True,
    0,
    12345,
    -1.5,
    "",
    "x",
    " ",
    "#W0000000",
    "é\ud800",
    [],
    {},
    ["x"],
    [None],
    [["x"]],
    [1, 2],
]
JUNK += [{"a": 1}, {"order_id": "x"}, "gift_card", ["", ""], float("nan"), [{}], "0" * 300]
EXPRESSIONS = [
    "1+1",
    "2**10",
    "(1",
    "007",
    "5//2",
    "1/0",
    "-2**2",
    "1..",
    "()",
    "2(3)",
    "12.345*100",
    "9.999",
    "1 1",
    "a",
]


def some_orders(rng: random.Random, db: Database, count: int) -> list[str]:
    """Order ids for a sequence of calls, few enough that calls meet each other's traces."""
    return rng.sample(list(db.base.tables["orders"]), count)


def random_call(rng: random.Random, db: Database, orders: list[str]) -> tuple[str, dict[str, Any]]:
    """A tool and arguments: mostly consistent with the present state of one of `orders`, sometimes damaged."""
    name = rng.choice([*TOOLS] + ["modify_pending_order_items", "modify_pending_order_payment"] * 3)
    arguments = _plausible(rng, db, name, orders)
    damage = rng.random()
    if damage < 0.15 and arguments:
        del arguments[rng.choice(list(arguments))]
    elif damage < 0.2:
        arguments[rng.choice(["note", "data", "self", "order_id", "zip"])] = rng.choice(JUNK)
    elif damage < 0.5 and arguments:
        arguments[rng.choice(list(arguments))] = rng.choice(JUNK)
    return name, arguments


def _plausible(rng: random.Random, db: Database, name: str, orders: list[str]) -> dict[str, Any]:
    wanted = "delivered" if "delivered" in name else "pending"
    fitting = [order_id for order_id in orders if db.record("orders", order_id)["status"] == wanted]
    order = db.record("orders", rng.choice(fitting if fitting and rng.random() < 0.9 else orders))
    user = db.record("users", order["user_id"])
    items = rng.sample(order["items"], rng.randint(1, min(3, len(order["items"]))))
    product = db.record("products", items[0]["product_id"])
    values: dict[str, Any] = {
        "order_id": order["order_id"],
        "user_id": order["user_id"],
        "product_id": product["product_id"],
        "item_ids": [item["item_id"] for item in items] + [items[0]["item_id"]] * (rng.random() < 0.1),
        "new_item_ids": [_variant(rng, db, item) for item in items],
        "payment_method_id": rng.choice(list(user["payment_methods"])),
        "reason": rng.choice(["no longer needed", "ordered by mistake", "ordered by mistake", "bored"]),
        "email": rng.choice([user["email"], user["email"].upper(), "nobody@example.com"]),
        "first_name": rng.choice([user["name"]["first_name"], user["name"]["first_name"].upper(), "Nobody"]),
        "last_name": user["name"]["last_name"],
        "expression": rng.choice(EXPRESSIONS),
    }
    values.update({key: rng.choice([text, "1 Main Street"]) for key, text in user["address"].items()})
    return {key: values.get(key, "said") for key in TOOLS[name].parameters}


def _variant(rng: random.Random, db: Database, item: dict[str, Any]) -> str:
    variants = db.record("products", item["product_id"])["variants"]
    available = [key for key, variant in variants.items() if variant["available"]]
    return rng.choice([*available, item["item_id"]] if rng.random() < 0.9 else list(variants))
