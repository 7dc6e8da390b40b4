"""The sixteen retail tools: upstream's checks in upstream's order (tau_bench/envs/retail/tools at 59a200c6).

Arguments are not type-checked, as upstream does not: what a wrong type does to Python's own operations (`in`,
iteration, `.lower()`) becomes the observation. A refusal leaves no trace; an error after a write leaves the write.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paritygate.retail import reading, writing
from paritygate.retail.database import Database

TERMINATING = frozenset({"transfer_to_human_agents"})
# The tools that change the database.
WRITE_TOOLS = (
    "cancel_pending_order",
    "exchange_delivered_order_items",
    "modify_pending_order_address",
    "modify_pending_order_items",
    "modify_pending_order_payment",
    "modify_user_address",
    "return_delivered_order_items",
)
MAX_ARGUMENT_DEPTH = 100
_ITEMS = ("order_id", "item_ids", "new_item_ids", "payment_method_id")


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
    Tool("calculate", ("expression",), reading.calculate),
    Tool("cancel_pending_order", ("order_id", "reason"), writing.cancel_pending_order),
    Tool("exchange_delivered_order_items", _ITEMS, writing.exchange_delivered_order_items),
    Tool("find_user_id_by_email", ("email",), reading.find_user_id_by_email),
    Tool("find_user_id_by_name_zip", ("first_name", "last_name", "zip"), reading.find_user_id_by_name_zip),
    Tool("get_order_details", ("order_id",), reading.details("orders", "order")),
    Tool("get_product_details", ("product_id",), reading.details("products", "product")),
    Tool("get_user_details", ("user_id",), reading.details("users", "user")),
    Tool("list_all_product_types", (), reading.list_all_product_types),
    Tool("modify_pending_order_address", ("order_id", *writing.ADDRESS), writing.modify_pending_order_address),
    Tool("modify_pending_order_items", _ITEMS, writing.modify_pending_order_items),
    Tool("modify_pending_order_payment", ("order_id", "payment_method_id"), writing.modify_pending_order_payment),
    Tool("modify_user_address", ("user_id", *writing.ADDRESS), writing.modify_user_address),
    Tool(
        "return_delivered_order_items",
        ("order_id", "item_ids", "payment_method_id"),
        writing.return_delivered_order_items,
    ),
    Tool("think", ("thought",), reading.think),
    Tool("transfer_to_human_agents", ("summary",), reading.transfer_to_human_agents),
)
TOOLS: dict[str, Tool] = {tool.name: tool for tool in _ALL}


class BindingError(Exception):
    """Arguments that do not fit; the text is what CPython 3.11 says for upstream's static method."""


def bind(class_name: str, module: str, parameters: Sequence[str], arguments: Mapping[str, Any]) -> list[Any]:
    """The arguments in the order of `parameters`; BindingError for an extra, a missing or the reserved one.

    `module` and `class_name` name upstream's tool, since its error texts do: tau_bench/envs/retail/tools at 59a200c6.
    """
    if "data" in arguments:
        raise BindingError(f"{module}.{class_name}.invoke() got multiple values for keyword argument 'data'")
    for name in arguments:
        if name not in parameters:
            raise BindingError(f"{class_name}.invoke() got an unexpected keyword argument {name!r}")
    missing = [repr(name) for name in parameters if name not in arguments]
    if missing:
        plural = "" if len(missing) == 1 else "s"
        raise BindingError(
            f"{class_name}.invoke() missing {len(missing)} required positional argument{plural}: {_listed(missing)}"
        )
    return [arguments[name] for name in parameters]


def _listed(names: list[str]) -> str:
    if len(names) <= 2:
        return " and ".join(names)
    return f"{', '.join(names[:-1])}, and {names[-1]}"
