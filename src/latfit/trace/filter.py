"""Row filters such as `hardware == 'h100' and tp in (4, 8)`: a subset of Python, parsed, never executed."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.trace.table import Trace

Mask = NDArray[np.bool_]

OPERATORS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: np.isin,
    ast.NotIn: lambda column, values: ~np.isin(column, values),
}
MAX_SHOWN = 200  # characters of a long filter that an error repeats

_SQL_STYLE = re.compile(r"'[^']*'|\"[^\"]*\"|\b(?:and|or|not|in)\b|(?<![<>=!])=(?!=)", re.IGNORECASE)


def matching_rows(trace: Trace, expression: str) -> Mask:
    """Return the mask (n,) of the rows that match. Raises WrongUsage that points at the mistake."""
    try:
        tree = ast.parse(_SQL_STYLE.sub(_as_python, expression.strip()), mode="eval").body
        return _evaluate(tree, trace, expression)
    except SyntaxError as error:
        raise _mistake(expression, f"not a filter ({error.msg})", (error.offset or 1) - 1) from None
    except (ValueError, RecursionError, MemoryError):
        raise _mistake(expression, "not a filter", 0) from None


def _as_python(token: re.Match[str]) -> str:
    return repr(token[0][1:-1]) if token[0][0] in "'\"" else token[0].lower().replace("=", "==")


def _evaluate(node: ast.expr, trace: Trace, expression: str) -> Mask:
    match node:
        case ast.BoolOp(op=op, values=parts):
            masks = [_evaluate(part, trace, expression) for part in parts]
            return np.asarray((np.logical_and if isinstance(op, ast.And) else np.logical_or).reduce(masks))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_evaluate(operand, trace, expression)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
            name = ast.unparse(left)
            if name not in trace:
                reason = f"there is no column {name!r} (there are {', '.join(trace.columns)})"
                raise _mistake(expression, reason, left.col_offset)
            column = trace[name]
            listed = right.elts if isinstance(right, ast.Tuple | ast.List) else [right]
            values = [_literal(each, column, expression) for each in listed]
            is_list = isinstance(op, ast.In | ast.NotIn)
            if listed != [right] and not is_list:
                raise _mistake(expression, "a list needs the operator in", right.col_offset)
            return np.asarray(OPERATORS[type(op)](column, values if is_list else values[0]))
    raise _mistake(expression, "a comparison is missing", node.col_offset)


def _literal(node: ast.expr, column: NDArray[Any], expression: str) -> str | float:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _mistake(expression, "a number or a quoted text is missing", node.col_offset)
    if (column.dtype.kind in "OUST") != isinstance(value, str):
        kind = "numbers" if isinstance(value, str) else "texts"
        raise _mistake(expression, f"{value!r} does not compare with a column of {kind}", node.col_offset)
    return value if isinstance(value, str) else float(value)


def _mistake(expression: str, reason: str, place: int) -> WrongUsage:
    return WrongUsage(
        f"{reason}, at character {place + 1} of {expression[:MAX_SHOWN]!r}",
        where="--where",
        remedy="Write comparisons joined by and, or, not, such as: hardware == 'h100' and tp in (4, 8)",
    )
