"""The calculator's arithmetic: Python's rules for numbers, operators and parentheses, bounded, without eval."""

import re
from collections.abc import Callable
from typing import Any

ALLOWED = "0123456789+-*/(). "
MAX_CHARACTERS = 10_000
MAX_BITS = 16_384  # 16 times the range of a float; CPython itself refuses literals above 4,300 digits
MAX_DEPTH = 200  # CPython's own limit of nested parentheses

_TOKEN = re.compile(r"\d+\.\d*|\.\d+|\d+|\*\*|//|[-+*/().]")
_UNARY_PRECEDENCE = 3
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "**": 4}

# A value is an int, float or complex; anything else that the grammar can spell, such as `()`, ends in an error anyway.
Value = Any


class ArithmeticSyntaxError(Exception):
    """The text is no arithmetic expression; the message is CPython 3.11's where it has one."""


class TooLargeError(Exception):
    """The expression or a number on the way is beyond the bounds of this module."""


def evaluate(expression: str) -> Value:
    """The value of an arithmetic expression over `ALLOWED`, by Python's precedence and number types.

    Raises ArithmeticSyntaxError or TooLargeError, and what the operators raise (ZeroDivisionError, OverflowError,
    TypeError). Source: what `eval` gives for such a text, upstream tools/calculate.py at 59a200c6.
    """
    if len(expression) > MAX_CHARACTERS:
        raise TooLargeError(f"expression longer than {MAX_CHARACTERS} characters")
    return _Machine(_tokens(expression)).value()


def _syntax(text: str) -> ArithmeticSyntaxError:
    return ArithmeticSyntaxError(f"{text} (<string>, line 1)")


def _tokens(expression: str) -> list[str]:
    """The tokens; what CPython's tokenizer itself refuses comes before any error of their order, wherever it stands."""
    tokens: list[str] = []
    position, depth = 0, 0
    while position < len(expression):
        if expression[position] == " ":
            position += 1
            continue
        match = _TOKEN.match(expression, position)
        if match is None:
            raise _syntax("invalid syntax")
        token = match[0]
        if token[0] == "0" and "." not in token and token.strip("0"):
            raise _syntax(
                "leading zeros in decimal integer literals are not permitted; use an 0o prefix for octal integers"
            )
        depth += (token == "(") - (token == ")")
        if depth < 0:
            raise _syntax("unmatched ')'")
        if depth >= MAX_DEPTH:
            raise _syntax("too many nested parentheses")
        tokens.append(token)
        position = match.end()
    if not tokens:
        raise ArithmeticSyntaxError("invalid syntax (<string>, line 0)")
    return tokens


def _number(token: str) -> int | float:
    return float(token) if "." in token else int(token)


def _bits(value: Value) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, int) and isinstance(exponent, int) and (_bits(base) - 1) * exponent > MAX_BITS:
        raise TooLargeError(f"power of more than {MAX_BITS} bits")
    return base**exponent


def _product(left: Value, right: Value) -> Value:
    if _bits(left) + _bits(right) > MAX_BITS:
        raise TooLargeError(f"product of more than {MAX_BITS} bits")
    return left * right


_BINARY: dict[str, Callable[[Value, Value], Value]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": _product,
    "/": lambda left, right: left / right,
    "//": lambda left, right: left // right,
    "**": _power,
}


class _Machine:
    """Operator precedence with explicit stacks: no recursion, so no input can exhaust Python's stack."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.values: list[Value] = []
        self.pending: list[str] = []  # operators, "u+", "u-", "(" and "call("

    def value(self) -> Value:
        """Run over the tokens: the syntax of the whole text is checked before anything is computed, as Python does."""
        program = self._postfix()
        for step in program:
            self._apply(step)
        return self.values[0]

    def _postfix(self) -> list[str]:
        out: list[str] = []
        operand_next = True
        for index, token in enumerate(self.tokens):
            if token == ")":
                operand_next = self._close(out, empty=self.tokens[index - 1] == "(", operand_next=operand_next)
            elif token == "(":
                self.pending.append("(" if operand_next else "call(")
                operand_next = True
            elif token in _PRECEDENCE:
                operand_next = self._operator(token, out, operand_next=operand_next)
            elif operand_next and token != ".":
                _number(token)
                out.append(token)
                operand_next = False
            else:
                self._refuse(token)
        if any(opened.endswith("(") for opened in self.pending):
            raise _syntax("'(' was never closed")
        if operand_next:
            raise _syntax("invalid syntax")
        return out + self.pending[::-1]

    def _refuse(self, token: str) -> None:
        inside = any(opened.endswith("(") for opened in self.pending)
        raise _syntax("invalid syntax" + ". Perhaps you forgot a comma?" * (inside and token != "."))

    def _operator(self, token: str, out: list[str], *, operand_next: bool) -> bool:
        if operand_next:
            if token not in "+-":
                raise _syntax("invalid syntax")
            self.pending.append(f"u{token}")
            return True
        self._unwind(_PRECEDENCE[token], out, right_associative=token == "**")
        self.pending.append(token)
        return True

    def _unwind(self, precedence: int, out: list[str], *, right_associative: bool) -> None:
        while self.pending and not self.pending[-1].endswith("("):
            top = self.pending[-1]
            held = _UNARY_PRECEDENCE if top[0] == "u" else _PRECEDENCE[top]
            if held < precedence or (held == precedence and right_associative):
                return
            out.append(self.pending.pop())

    def _close(self, out: list[str], *, empty: bool, operand_next: bool) -> bool:
        if operand_next and not empty:
            raise _syntax("invalid syntax")
        while not self.pending[-1].endswith("("):
            out.append(self.pending.pop())
        opened = self.pending.pop()
        if opened == "call(":
            out.append("call()" if empty else "call(x)")
        elif empty:
            out.append("()")
        return False

    def _apply(self, step: str) -> None:
        if step[0].isdigit() or step[0] == ".":
            self.values.append(_number(step))
        elif step == "()":
            self.values.append(())
        elif step[0] == "u":
            operand = self.values.pop()
            self.values.append(+operand if step == "u+" else -operand)
        elif step.startswith("call"):
            if step == "call(x)":
                self.values.pop()
            raise TypeError(f"{type(self.values.pop()).__name__!r} object is not callable")
        else:
            right = self.values.pop()
            self.values.append(_BINARY[step](self.values.pop(), right))
