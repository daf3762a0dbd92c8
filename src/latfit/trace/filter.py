"""Row filters such as `hardware == 'h100' and tp in (4, 8)`: parsed here, never evaluated as Python.

Grammar:  either := both ("or" both)* ;  both := term ("and" term)* ;  term := "not" term | "(" either ")" | comparison
          comparison := column operator literal | column ["not"] "in" "(" literal ("," literal)* ")"
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.trace.table import Trace

Mask = NDArray[np.bool_]
Literal = str | float
DEEPEST = 100
"""Brackets within brackets; each is a few calls deep."""
SHOWN = 60
"""Letters of an expression that an error repeats, about the place it is about."""

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>'[^']*'|"[^"]*")
  | (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
  | (?P<word>[A-Za-z_][A-Za-z0-9_.]*)
  | (?P<mark>==|!=|<=|>=|<|>|=|\(|\)|,)
  )""",
    re.VERBOSE,
)

_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def matching_rows(trace: Trace, expression: str) -> Mask:
    """Boolean mask (n,) of the rows for which `expression` holds. Raises WrongUsage that points at the place."""
    return _Parser(trace, expression).parse()


class _Parser:
    """Recursive descent over the tokens; each rule returns the mask of its part."""

    def __init__(self, trace: Trace, expression: str) -> None:
        self.trace = trace
        self.expression = expression
        self.tokens = self._split()
        self.next = 0
        self.depth = 0

    def parse(self) -> Mask:
        mask = self._either()
        if self.next < len(self.tokens):
            raise self._error(f"{self.tokens[self.next][1]!r} was not expected here")
        return mask

    def _split(self) -> list[tuple[str, str, int]]:
        tokens, at = [], 0
        text = self.expression.rstrip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if not found or found.lastgroup is None:
                raise self._error(f"{text[at:].strip()[:12]!r} cannot be read", at)
            tokens.append((found.lastgroup, found.group(found.lastgroup), found.start(found.lastgroup)))
            at = found.end()
        return tokens

    def _error(self, reason: str, at: int | None = None) -> WrongUsage:
        if at is None:
            at = self.tokens[self.next][2] if self.next < len(self.tokens) else len(self.expression)
        begin = 0 if len(self.expression) <= SHOWN else max(0, min(at, len(self.expression)) - SHOWN // 2)
        shown = self.expression[begin : begin + SHOWN]
        before, after = "..." if begin else "", "..." if begin + SHOWN < len(self.expression) else ""
        return WrongUsage(
            f"{reason}, at character {at + 1} of {before}{shown!r}{after}",
            where="--where",
            remedy="Write comparisons joined by and, or, not, such as: hardware == 'h100' and tp in (4, 8)",
        )

    def _take(self, *wanted: str) -> str | None:
        """The next token if it is one of `wanted` (words in any case), else None."""
        if self.next < len(self.tokens):
            kind, text, _ = self.tokens[self.next]
            if kind != "text" and (text.lower() if kind == "word" else text) in wanted:
                self.next += 1
                return text.lower()
        return None

    def _either(self) -> Mask:
        mask = self._both()
        while self._take("or"):
            mask = mask | self._both()
        return mask

    def _both(self) -> Mask:
        mask = self._term()
        while self._take("and"):
            mask = mask & self._term()
        return mask

    def _term(self) -> Mask:
        negated = False
        while self._take("not"):
            negated = not negated
        mask = self._group() if self._take("(") else self._comparison()
        return ~mask if negated else mask

    def _group(self) -> Mask:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self._error(f"more than {DEEPEST} brackets are open")
        mask = self._either()
        if not self._take(")"):
            raise self._error("a closing bracket is missing")
        self.depth -= 1
        return mask

    def _comparison(self) -> Mask:
        column = self._column()
        negated = bool(self._take("not"))
        if self._take("in"):
            mask = np.isin(column, self._literals(column))
            return ~mask if negated else mask
        sign = None if negated else self._take(*_COMPARE)
        if sign is None:
            raise self._error("a comparison is missing")
        result = _COMPARE[sign](column, self._literal(column))
        return np.asarray(result, dtype=bool)

    def _column(self) -> NDArray[Any]:
        if self.next >= len(self.tokens) or self.tokens[self.next][0] != "word":
            raise self._error("a column name is missing")
        name = self.tokens[self.next][1]
        if name not in self.trace:
            raise self._error(f"there is no column {name!r} (there are {', '.join(self.trace.columns)})")
        self.next += 1
        return self.trace[name]

    def _literal(self, column: NDArray[Any]) -> Literal:
        kind, text, _ = self.tokens[self.next] if self.next < len(self.tokens) else ("", "", 0)
        if kind not in ("text", "number"):
            raise self._error("a number or a quoted text is missing")
        is_text_column = column.dtype.kind in "OUST"
        if is_text_column != (kind == "text"):
            raise self._error(f"{text} does not compare with a column of {'texts' if is_text_column else 'numbers'}")
        self.next += 1
        return text[1:-1] if kind == "text" else float(text)

    def _literals(self, column: NDArray[Any]) -> list[Any]:
        if not self._take("("):
            raise self._error("an opening bracket is missing after in")
        values: list[Any] = [self._literal(column)]
        while self._take(","):
            values.append(self._literal(column))
        if not self._take(")"):
            raise self._error("a closing bracket is missing")
        return values
