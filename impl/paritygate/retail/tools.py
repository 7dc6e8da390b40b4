"""The sixteen retail tools: upstream's checks in upstream's order (tau_bench/envs/retail/tools at 59a200c6).

Arguments are not type-checked, as upstream does not: what a wrong type does to Python's own operations (`in`,
iteration, `.lower()`) becomes the observation. A refusal leaves no trace; an error after a write leaves the write.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paritygate.retail import arithmetic
from paritygate.retail.binding import bind
from paritygate.retail.database import Database, Record

TERMINATING = frozenset({"transfer_to_human_agents"})
WRITES = frozenset(
    {
        "cancel_pending_order",
        "exchange_delivered_order_items",
        "modify_pending_order_address",
        "modify_pending_order_items",
        "modify_pending_order_payment",
        "modify_user_address",
        "return_delivered_order_items",
    }
)
MAX_ARGUMENT_DEPTH = 100
_REASONS = ("no longer needed", "ordered by mistake")
_ADDRESS = ("address1", "address2", "city", "state", "country", "zip")
_ITEMS = ("order_id", "item_ids", "new_item_ids", "payment_method_id")


class _Refusal(Exception):  # noqa: N818 - what the tool answers, no fault
    """A tool's own refusal: its text, after "Error: ", is the observation."""


def call(db: Database, name: Any, arguments: Any) -> str:
    """Make one tool call on `db` and give the observation; no exception of a tool leaves this function."""
    tool = TOOLS.get(name) if isinstance(name, str) else None
    if tool is None:
        return f"Unknown action {name}"
    if not isinstance(arguments, dict):
        return f"Error: arguments must be an object, not {type(arguments).__name__}"
    if _deeper(arguments, MAX_ARGUMENT_DEPTH):
        return f"Error: arguments nested deeper than {MAX_ARGUMENT_DEPTH} levels"
    try:
        return tool.run(db, *bind(tool.class_name, tool.module, tool.parameters, arguments))
    except Exception as error:  # upstream turns every exception of a tool into its text
        return f"Error: {error}"


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested so deep that hashing the database could exhaust the stack."""
    if not isinstance(value, dict | list):
        return False
    inner: Any = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(element, levels - 1) for element in inner)


# --- reading --------------------------------------------------------------------------------------------------------


def _calculate(_db: Database, expression: Any) -> str:
    if not all(character in arithmetic.ALLOWED for character in expression):
        raise _Refusal("invalid characters in expression")
    if not isinstance(expression, str):
        raise TypeError("eval() arg 1 must be a string, bytes or code object")
    return str(round(float(arithmetic.evaluate(expression)), 2))


def _find_user_id_by_email(db: Database, email: Any) -> str:
    for user_id, user in db.records("users"):
        if user["email"].lower() == email.lower():
            return user_id
    raise _Refusal("user not found")


def _find_user_id_by_name_zip(db: Database, first_name: Any, last_name: Any, zip_code: Any) -> str:
    for user_id, user in db.records("users"):
        name = user["name"]
        same_name = name["first_name"].lower() == first_name.lower() and name["last_name"].lower() == last_name.lower()
        if same_name and user["address"]["zip"] == zip_code:
            return user_id
    raise _Refusal("user not found")


def _details(table: str, noun: str) -> Callable[[Database, Any], str]:
    def details(db: Database, key: Any) -> str:
        if not db.has(table, key):
            raise _Refusal(f"{noun} not found")
        return json.dumps(db.record(table, key))

    return details


def _list_all_product_types(db: Database) -> str:
    names = {product["name"]: product["product_id"] for _, product in db.records("products")}
    return json.dumps(dict(sorted(names.items())))


def _think(_db: Database, _thought: Any) -> str:
    return ""


def _transfer_to_human_agents(_db: Database, _summary: Any) -> str:
    return "Transfer successful"


# --- checks that several writes share -------------------------------------------------------------------------------


def _order(db: Database, order_id: Any, status: str, done: str) -> Record:
    if not db.has("orders", order_id):
        raise _Refusal("order not found")
    order = db.record("orders", order_id)
    if order["status"] != status:
        raise _Refusal(f"non-{status} order cannot be {done}")
    return order


def _methods(db: Database, order: Record) -> Record:
    return db.record("users", order["user_id"])["payment_methods"]


def _method(db: Database, order: Record, payment_method_id: Any) -> Record:
    methods = _methods(db, order)
    if payment_method_id not in methods:
        raise _Refusal("payment method not found")
    return methods[payment_method_id]


def _check_held(order: Record, item_ids: Any, text: str) -> None:
    held = [item["item_id"] for item in order["items"]]
    for item_id in item_ids:
        if item_ids.count(item_id) > held.count(item_id):
            raise _Refusal(text.format(item_id))


def _price_difference(db: Database, order: Record, item_ids: Any, new_item_ids: Any) -> int | float:
    """New prices minus old ones, unrounded, after the checks of both lists; each new item is of its item's product."""
    _check_held(order, item_ids, "{} not found")
    if len(item_ids) != len(new_item_ids):
        raise _Refusal("the number of items to be exchanged should match")
    difference = 0
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
        item = _first(order, item_id)
        variants = db.record("products", item["product_id"])["variants"]
        if new_item_id not in variants or not variants[new_item_id]["available"]:
            raise _Refusal(f"new item {new_item_id} not found or available")
        difference += variants[new_item_id]["price"] - item["price"]
    return difference


def _first(order: Record, item_id: Any) -> Record:
    return next(item for item in order["items"] if item["item_id"] == item_id)


def _check_balance(method: Record, amount: float, purpose: str) -> None:
    if method["source"] == "gift_card" and method["balance"] < amount:
        raise _Refusal(f"insufficient gift card balance to pay for the {purpose}")


def _credit(db: Database, order: Record, payment_method_id: str, amount: float) -> None:
    """Add `amount` (negative: take) to a gift card, rounded to cents."""
    method = db.edit("users", order["user_id"])["payment_methods"][payment_method_id]
    method["balance"] = round(method["balance"] + amount, 2)


def _entry(kind: str, amount: Any, payment_method_id: Any) -> Record:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": payment_method_id}


# --- writing --------------------------------------------------------------------------------------------------------


def _cancel_pending_order(db: Database, order_id: Any, reason: Any) -> str:
    _order(db, order_id, "pending", "cancelled")
    if reason not in _REASONS:
        raise _Refusal("invalid reason")
    order = db.edit("orders", order_id)
    refunds: list[Record] = []
    for paid in order["payment_history"]:  # refunds too, after a change of payment: upstream over-refunds
        refunds.append(_entry("refund", paid["amount"], paid["payment_method_id"]))
        if "gift_card" in paid["payment_method_id"]:
            _credit(db, order, paid["payment_method_id"], paid["amount"])
    order["status"] = "cancelled"
    order["cancel_reason"] = reason
    order["payment_history"].extend(refunds)
    return json.dumps(order)


def _exchange_delivered_order_items(
    db: Database, order_id: Any, item_ids: Any, new_item_ids: Any, payment_method_id: Any
) -> str:
    order = _order(db, order_id, "delivered", "exchanged")
    difference = round(_price_difference(db, order, item_ids, new_item_ids), 2)
    _check_balance(_method(db, order, payment_method_id), difference, "price difference")
    order = db.edit("orders", order_id)
    order["status"] = "exchange requested"
    order["exchange_items"] = sorted(item_ids)
    order["exchange_new_items"] = sorted(new_item_ids)
    order["exchange_payment_method_id"] = payment_method_id
    order["exchange_price_difference"] = difference
    return json.dumps(order)


def _modify_pending_order_address(db: Database, order_id: Any, *address: Any) -> str:
    _order(db, order_id, "pending", "modified")
    order = db.edit("orders", order_id)
    order["address"] = dict(zip(_ADDRESS, address, strict=True))
    return json.dumps(order)


def _modify_pending_order_items(
    db: Database, order_id: Any, item_ids: Any, new_item_ids: Any, payment_method_id: Any
) -> str:
    order = _order(db, order_id, "pending", "modified")
    difference = _price_difference(db, order, item_ids, new_item_ids)
    method = _method(db, order, payment_method_id)
    _check_balance(method, difference, "new item")
    order = db.edit("orders", order_id)
    kind = "payment" if difference > 0 else "refund"
    order["payment_history"].append(_entry(kind, abs(difference), payment_method_id))
    if method["source"] == "gift_card":
        _credit(db, order, payment_method_id, -difference)
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
        item = _first(order, item_id)
        variant = db.record("products", item["product_id"])["variants"][new_item_id]
        item["item_id"] = new_item_id
        item["price"] = variant["price"]
        item["options"] = dict(variant["options"])
    order["status"] = "pending (item modified)"
    return json.dumps(order)


def _modify_pending_order_payment(db: Database, order_id: Any, payment_method_id: Any) -> str:
    order = _order(db, order_id, "pending", "modified")
    method = _method(db, order, payment_method_id)
    history = order["payment_history"]
    if len(history) > 1 or history[0]["transaction_type"] != "payment":
        raise _Refusal("there should be exactly one payment for a pending order")
    amount, old_method_id = history[0]["amount"], history[0]["payment_method_id"]
    if old_method_id == payment_method_id:
        raise _Refusal("the new payment method should be different from the current one")
    _check_balance(method, amount, "order")
    order = db.edit("orders", order_id)
    order["payment_history"] += [_entry("payment", amount, payment_method_id), _entry("refund", amount, old_method_id)]
    if method["source"] == "gift_card":
        _credit(db, order, payment_method_id, -amount)
    if "gift_card" in old_method_id:
        _credit(db, order, old_method_id, amount)
    return json.dumps(order)


def _modify_user_address(db: Database, user_id: Any, *address: Any) -> str:
    if not db.has("users", user_id):
        raise _Refusal("user not found")
    user = db.edit("users", user_id)
    user["address"] = dict(zip(_ADDRESS, address, strict=True))
    return json.dumps(user)


def _return_delivered_order_items(db: Database, order_id: Any, item_ids: Any, payment_method_id: Any) -> str:
    order = _order(db, order_id, "delivered", "returned")
    _method(db, order, payment_method_id)
    if "gift_card" not in payment_method_id and payment_method_id != order["payment_history"][0]["payment_method_id"]:
        raise _Refusal("payment method should be either the original payment method or a gift card")
    _check_held(order, item_ids, "some item not found")
    order = db.edit("orders", order_id)
    order["status"] = "return requested"
    order["return_items"] = sorted(item_ids)
    order["return_payment_method_id"] = payment_method_id
    return json.dumps(order)


# --- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: its parameters in upstream's order, the function, and upstream's names for its error texts."""

    name: str
    parameters: Sequence[str]
    run: Callable[..., str]

    @property
    def class_name(self) -> str:
        """Upstream's class, e.g. GetOrderDetails."""
        return self.name.title().replace("_", "")

    @property
    def module(self) -> str:
        """Upstream's module."""
        return f"tau_bench.envs.retail.tools.{self.name}"


_ALL = (
    Tool("calculate", ("expression",), _calculate),
    Tool("cancel_pending_order", ("order_id", "reason"), _cancel_pending_order),
    Tool("exchange_delivered_order_items", _ITEMS, _exchange_delivered_order_items),
    Tool("find_user_id_by_email", ("email",), _find_user_id_by_email),
    Tool("find_user_id_by_name_zip", ("first_name", "last_name", "zip"), _find_user_id_by_name_zip),
    Tool("get_order_details", ("order_id",), _details("orders", "order")),
    Tool("get_product_details", ("product_id",), _details("products", "product")),
    Tool("get_user_details", ("user_id",), _details("users", "user")),
    Tool("list_all_product_types", (), _list_all_product_types),
    Tool("modify_pending_order_address", ("order_id", *_ADDRESS), _modify_pending_order_address),
    Tool("modify_pending_order_items", _ITEMS, _modify_pending_order_items),
    Tool("modify_pending_order_payment", ("order_id", "payment_method_id"), _modify_pending_order_payment),
    Tool("modify_user_address", ("user_id", *_ADDRESS), _modify_user_address),
    Tool("return_delivered_order_items", ("order_id", "item_ids", "payment_method_id"), _return_delivered_order_items),
    Tool("think", ("thought",), _think),
    Tool("transfer_to_human_agents", ("summary",), _transfer_to_human_agents),
)
TOOLS: dict[str, Tool] = {tool.name: tool for tool in _ALL}
