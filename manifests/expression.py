"""Whole-number formulas over a model's configuration, and the notation of axes that is built on them.

    formula  := choice of sums          "head_dim | hidden_size / num_attention_heads"; parentheses go around sums
    axis     := segment + segment ...   "q:(KV@kv, g@rep, hd) + k:(KV@kv, hd) + v:(KV@kv, hd)"
    segment  := [name:] (factor, ...)   the last factor may be a nested [axis]
    factor   := formula [[~] * | [~] @mesh-axis]  a trailing * is @tp; ~ fills shorter parts up with zeros

``a | b`` is ``a`` unless a name in it is unknown. A division must have no remainder. A number may stand directly before
a name (``3hd``). ``?`` is a name that callers bind to what remains of a dimension.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

from manifests.errors import PlanError
from manifests.layout import Axis, Factor, Segment
from manifests.shown import shown

_TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+)|(?P<name>[A-Za-z_][\w.]*|\?)|(?P<mark>[-+*/|@~,:()\[\]]))")

MAX_SIZE = 1 << 63
"""No number on the way to a size reaches it."""
MAX_NESTING = 16
"""Axes within axes; models have two."""
MAX_BLOCKS = 1 << 16
"""Of which a rank's part of an axis may be; those of models are hundreds."""
MAX_FACTORS = 32
"""In a segment; models have four."""

Number = int | Fraction
"""A size, or what divides one: a rank's share of what is unevenly divided is no whole number."""
Size = TypeVar("Size", int, Number)
Lookup = Callable[[str], int | None]


class UnknownSizeError(PlanError):
    """A formula names a size that is not known.

    Attributes:
        name: The unknown name.
    """

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name


def evaluate(text: str, lookup: Callable[[str], Number | None]) -> int:
    """Return the value of a formula.

    Args:
        text: The formula.
        lookup: Gives a name's value, or None where it has none.

    Raises:
        UnknownSizeError: No alternative has all its names known.
        PlanError: The text is no formula, or a division leaves a remainder, or it comes to no whole number.

    >>> evaluate("head_dim | hidden / heads", {"hidden": 576, "heads": 9}.get)
    64
    """
    parser = _Parser(text, lookup)
    value = parser.formula()
    parser.expect_end()
    return value


def parse_axis(text: str, lookup: Lookup = lambda _: None) -> Axis:
    """Return the axis that the notation denotes, with every name bound to its size.

    Args:
        text: The notation.
        lookup: Gives a name's size, or None where it has none; knows no names if not given.

    Raises:
        UnknownSizeError: A name has no size.
        PlanError: The text is not in the notation.

    >>> str(parse_axis("q:(KV@kv, g@rep, hd) + k:(KV@kv, hd)", {"KV": 3, "g": 3, "hd": 64}.get))
    'q:(3@kv, 3@rep, 64) + k:(3@kv, 64)'
    >>> parse_axis("(2, I*)", {"I": 1536}.get).size
    3072
    """
    parser = _Parser(text, lookup)
    axis = parser.axis()
    parser.expect_end()
    if _blocks(axis) > MAX_BLOCKS:
        raise PlanError(f"{shown(text)}: a rank's part would be over {MAX_BLOCKS} blocks; divide a factor further left")
    return axis


def _blocks(axis: Axis) -> int:
    """Return the most blocks that a rank's part of an axis may be."""
    count = 0
    for segment in axis.segments:
        inner = _blocks(segment.body) if segment.body and segment.body.mesh_axes() else 0
        for factor in reversed(segment.factors):
            inner = inner * factor.size if inner else 1 if factor.on else 0
        count += inner or 1
    return count


class _Parser:
    """Recursive descent over one text; every method consumes what it is named after."""

    def __init__(self, text: str, lookup: Callable[[str], Number | None]) -> None:
        self.text = text
        self.lookup = lookup
        self.tokens = _tokenize(text)
        self.at = 0
        # Whether what is read was not chosen, so that its divisions need not come out.
        self.idle = False
        self.nesting = 0

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.peek()
        if not token or (expected and token not in expected):
            wanted = " or ".join(repr(mark) for mark in expected) or "more"
            raise PlanError(f"{shown(self.text)}: {wanted} expected before {shown(token or 'the end')}")
        self.at += 1
        return token

    def expect_end(self) -> None:
        if self.peek():
            raise PlanError(f"{shown(self.text)}: {shown(self.peek())} is not understood here")

    def formula(self) -> int:
        chosen: Number | None = None
        missing: list[str] = []
        while True:
            unknown: list[str] = []
            self.idle = chosen is not None
            value = self._sum(unknown)
            if chosen is None and not unknown:
                chosen = value
            missing += unknown
            if self.peek() != "|":
                break
            self.take()
        self.idle = False
        if chosen is None:
            raise UnknownSizeError(f"{shown(self.text)}: the size {shown(missing[0])} is not known", name=missing[0])
        if chosen.denominator != 1:
            raise PlanError(f"{shown(self.text)}: comes to {chosen}, no whole number")
        return int(chosen)

    def _sum(self, unknown: list[str]) -> Number:
        value = self._product(unknown)
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value = self._bounded(value + sign * self._product(unknown))
        return value

    def _product(self, unknown: list[str]) -> Number:
        value = self._operand(unknown)
        while True:
            if self.peek() == "/":
                self.take()
                value = self._divide(value, self._operand(unknown), unknown)
            elif self.peek() == "*" and self.peek(1) not in (",", ")", ""):
                self.take()
                value = self._bounded(value * self._operand(unknown))
            else:
                return value

    def _divide(self, value: Number, divisor: Number, unknown: list[str]) -> Number:
        if unknown or self.idle:
            return value
        if divisor == 0 or value % divisor:
            raise PlanError(f"{shown(self.text)}: {value} / {divisor} is not a whole number")
        return value // divisor

    def _operand(self, unknown: list[str]) -> Number:
        token = self.take()
        if token == "(":
            self._nest("parentheses")
            inner = self._sum(unknown)
            self.nesting -= 1
            self.take(")")
            return inner
        if token.isdecimal():
            # A number directly before a name is one operand: 16 / 4hd divides by 4 * hd.
            number = self._bounded(int(token) if len(token) <= 20 else MAX_SIZE)
            return self._bounded(number * self._operand(unknown)) if self.peek().isidentifier() else number
        if not (token[0].isalpha() or token[0] in "_?"):
            raise PlanError(f"{shown(self.text)}: {shown(token)} is no number and no name")
        value = self.lookup(token)
        if value is None:
            unknown.append(token)
            return 1
        return value

    def _bounded(self, value: Size) -> Size:
        if not -MAX_SIZE < value < MAX_SIZE:
            raise PlanError(f"{shown(self.text)}: comes to a number of 2^63 or more, which no size is")
        return value

    def _nest(self, what: str) -> None:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise PlanError(f"{shown(self.text)}: nested deeper than {MAX_NESTING} {what}")

    def axis(self) -> Axis:
        segments = [self.segment()]
        size = segments[0].size
        while self.peek() == "+":
            self.take()
            segments.append(self.segment())
            size = self._bounded(size + segments[-1].size)
        return Axis(tuple(segments))

    def segment(self) -> Segment:
        name = ""
        if self.peek(1) == ":":
            name = self.take()
            self.take(":")
        self.take("(")
        factors: list[Factor] = []
        body: Axis | None = None
        size = 1
        while True:
            if self.peek() == "[":
                body = self.nested_axis()
                self._bounded(size * (body.size or 1))
                self.take(")")
                break
            factors.append(self.factor())
            if len(factors) > MAX_FACTORS:
                raise PlanError(f"{shown(self.text)}: a segment of more than {MAX_FACTORS} factors")
            size = self._bounded(size * (factors[-1].size or 1))
            if self.take(",", ")") == ")":
                break
        return Segment(tuple(factors), body, name)

    def nested_axis(self) -> Axis:
        self.take("[")
        self._nest("axes")
        axis = self.axis()
        self.nesting -= 1
        self.take("]")
        return axis

    def factor(self) -> Factor:
        size = self.formula()
        if size < 0:
            raise PlanError(f"{shown(self.text)}: a factor is {size}; sizes are whole numbers from 0")
        padded = self.peek() == "~"
        if padded:
            self.take()
        mark = self.take("*", "@") if padded or self.peek() in ("*", "@") else ""
        name = self.take() if mark == "@" else "tp" if mark else ""
        if mark == "@" and not name.isidentifier():
            raise PlanError(f"{shown(self.text)}: {shown(name)} after @ is no name of a mesh axis")
        return Factor(size, name, padded)


def _tokenize(text: str) -> list[str]:
    tokens: list[str] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise PlanError(f"{shown(text)}: {shown(text[at : at + 100].strip()[:1])} is not understood")
        tokens.append(match.group().strip())
        at = match.end()
    return tokens
