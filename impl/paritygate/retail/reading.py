"""The tools that read, calculate or talk: upstream's answers, the database left as it is."""

import json
from collections.abc import Callable
from typing import Any

from paritygate.retail import arithmetic
from paritygate.retail.database import Database
from paritygate.retail.errors import ToolRefusal


def calculate(_db: Database, expression: Any) -> str:
    """The value of an arithmetic expression, rounded to 2 places (half to even), as `str` of a float."""
    if not all(character in arithmetic.ALLOWED for character in expression):
        raise ToolRefusal("invalid characters in expression")
    if not isinstance(expression, str):
        raise TypeError("eval() arg 1 must be a string, bytes or code object")
    return str(round(float(arithmetic.evaluate(expression)), 2))


def find_user_id_by_email(db: Database, email: Any) -> str:
    """The id of the first user with this e-mail address, whatever its case."""
    for user_id, user in db.records("users"):
        if user["email"].lower() == email.lower():
            return user_id
    raise ToolRefusal("user not found")


def find_user_id_by_name_zip(db: Database, first_name: Any, last_name: Any, zip_code: Any) -> str:
    """The id of the first user with this name, whatever its case, and exactly this present zip."""
    for user_id, user in db.records("users"):
        name = user["name"]
        same_name = name["first_name"].lower() == first_name.lower() and name["last_name"].lower() == last_name.lower()
        if same_name and user["address"]["zip"] == zip_code:
            return user_id
    raise ToolRefusal("user not found")


def details(table: str, noun: str) -> Callable[[Database, Any], str]:
    """The tool that gives a record of `table` as JSON, or says that the `noun` was not found."""

    def details(db: Database, key: Any) -> str:
        if not db.has(table, key):
            raise ToolRefusal(f"{noun} not found")
        return json.dumps(db.record(table, key))

    return details


def list_all_product_types(db: Database) -> str:
    """Product names and ids, sorted by name, as JSON."""
    names = {product["name"]: product["product_id"] for _, product in db.records("products")}
    return json.dumps(dict(sorted(names.items())))


def think(_db: Database, _thought: Any) -> str:
    """Nothing: the thought is in the transcript."""
    return ""


def transfer_to_human_agents(_db: Database, _summary: Any) -> str:
    """The confirmation; ending the episode is the environment's part."""
    return "Transfer successful"
