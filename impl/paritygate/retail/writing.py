"""The tools that write: upstream's checks in upstream's order, and all of them before the first write."""

import json
from typing import Any

from paritygate.retail.database import Database, Record
from paritygate.retail.errors import ToolRefusal

ADDRESS = ("address1", "address2", "city", "state", "country", "zip")
_REASONS = ("no longer needed", "ordered by mistake")


def _order(db: Database, order_id: Any, status: str, done: str) -> Record:
    if not db.has("orders", order_id):
        raise ToolRefusal("order not found")
    order = db.record("orders", order_id)
    if order["status"] != status:
        raise ToolRefusal(f"non-{status} order cannot be {done}")
    return order


def _methods(db: Database, order: Record) -> Record:
    return db.record("users", order["user_id"])["payment_methods"]


def _method(db: Database, order: Record, payment_method_id: Any) -> Record:
    methods = _methods(db, order)
    if payment_method_id not in methods:
        raise ToolRefusal("payment method not found")
    return methods[payment_method_id]


def _check_held(order: Record, item_ids: Any, text: str) -> None:
    held = [item["item_id"] for item in order["items"]]
    for item_id in item_ids:
        if item_ids.count(item_id) > held.count(item_id):
            raise ToolRefusal(text.format(item_id))


def _price_difference(db: Database, order: Record, item_ids: Any, new_item_ids: Any) -> int | float:
    """New prices minus old ones, unrounded, after the checks of both lists; each new item is of its item's product."""
    _check_held(order, item_ids, "{} not found")
    if len(item_ids) != len(new_item_ids):
        raise ToolRefusal("the number of items to be exchanged should match")
    difference = 0
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
        item = _first(order, item_id)
        variants = db.record("products", item["product_id"])["variants"]
        if new_item_id not in variants or not variants[new_item_id]["available"]:
            raise ToolRefusal(f"new item {new_item_id} not found or available")
        difference += variants[new_item_id]["price"] - item["price"]
    return difference


def _first(order: Record, item_id: Any) -> Record:
    return next(item for item in order["items"] if item["item_id"] == item_id)


def _check_balance(method: Record, amount: float, purpose: str) -> None:
    if method["source"] == "gift_card" and method["balance"] < amount:
        raise ToolRefusal(f"insufficient gift card balance to pay for the {purpose}")


def _credit(db: Database, order: Record, payment_method_id: str, amount: float) -> None:
    """Add `amount` (negative: take) to a gift card, rounded to cents."""
    method = db.edit("users", order["user_id"])["payment_methods"][payment_method_id]
    method["balance"] = round(method["balance"] + amount, 2)


def _entry(kind: str, amount: Any, payment_method_id: Any) -> Record:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": payment_method_id}


def cancel_pending_order(db: Database, order_id: Any, reason: Any) -> str:
    """Cancel, refunding every entry of the payment history; gift cards are credited at once."""
    _order(db, order_id, "pending", "cancelled")
    if reason not in _REASONS:
        raise ToolRefusal("invalid reason")
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


def exchange_delivered_order_items(
    db: Database, order_id: Any, item_ids: Any, new_item_ids: Any, payment_method_id: Any
) -> str:
    """Ask for an exchange: the two sorted lists and the rounded difference; no balance moves."""
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


def modify_pending_order_address(db: Database, order_id: Any, *address: Any) -> str:
    """Replace the address, its keys in the order of the parameters."""
    _order(db, order_id, "pending", "modified")
    order = db.edit("orders", order_id)
    order["address"] = dict(zip(ADDRESS, address, strict=True))
    return json.dumps(order)


def modify_pending_order_items(
    db: Database, order_id: Any, item_ids: Any, new_item_ids: Any, payment_method_id: Any
) -> str:
    """Replace items one after another by first match; the unrounded difference is paid or refunded."""
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


def modify_pending_order_payment(db: Database, order_id: Any, payment_method_id: Any) -> str:
    """Pay by another method and refund the first; gift cards move at once; the order stays pending."""
    order = _order(db, order_id, "pending", "modified")
    method = _method(db, order, payment_method_id)
    history = order["payment_history"]
    if len(history) > 1 or history[0]["transaction_type"] != "payment":
        raise ToolRefusal("there should be exactly one payment for a pending order")
    amount, old_method_id = history[0]["amount"], history[0]["payment_method_id"]
    if old_method_id == payment_method_id:
        raise ToolRefusal("the new payment method should be different from the current one")
    _check_balance(method, amount, "order")
    order = db.edit("orders", order_id)
    order["payment_history"] += [_entry("payment", amount, payment_method_id), _entry("refund", amount, old_method_id)]
    if method["source"] == "gift_card":
        _credit(db, order, payment_method_id, -amount)
    if "gift_card" in old_method_id:
        _credit(db, order, old_method_id, amount)
    return json.dumps(order)


def modify_user_address(db: Database, user_id: Any, *address: Any) -> str:
    """Replace a user's address, its keys in the order of the parameters."""
    if not db.has("users", user_id):
        raise ToolRefusal("user not found")
    user = db.edit("users", user_id)
    user["address"] = dict(zip(ADDRESS, address, strict=True))
    return json.dumps(user)


def return_delivered_order_items(db: Database, order_id: Any, item_ids: Any, payment_method_id: Any) -> str:
    """Ask for a return of the sorted items; the payment is checked before them."""
    order = _order(db, order_id, "delivered", "returned")
    _method(db, order, payment_method_id)
    if "gift_card" not in payment_method_id and payment_method_id != order["payment_history"][0]["payment_method_id"]:
        raise ToolRefusal("payment method should be either the original payment method or a gift card")
    _check_held(order, item_ids, "some item not found")
    order = db.edit("orders", order_id)
    order["status"] = "return requested"
    order["return_items"] = sorted(item_ids)
    order["return_payment_method_id"] = payment_method_id
    return json.dumps(order)
