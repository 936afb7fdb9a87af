"""Rewrites the numbers of a gsm8k problem and recomputes its solution, so that a small model sees more arithmetic.

gsm8k's reference answers carry their calculations as `<<48/2=24>>`. A rewrite draws new values for the numbers of the
question, evaluates the calculations again in order, and replaces old values by new ones in both texts. A rewrite that
is ambiguous (one old value would need two new ones) or awkward (negative, or no longer whole) is thrown away.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable

NUMBER = re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?![\w,])|(?<![\w,.])\d*\.?\d+(?!\w)")
CALCULATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
GLUED = re.compile(r"\d[A-Za-z]|[A-Za-z]\d")
# Values that usually stand for something fixed (days, months, hours, minutes, per cent), so they must stay.
FIXED = frozenset({7, 12, 24, 30, 31, 52, 60, 100, 365})
SMALLEST, LARGEST = 5, 1000

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Unsuitable(ValueError):
    """This problem, or this draw of numbers, cannot be rewritten."""


def parse(text: str) -> float:
    """The value of a number as written."""
    return round(float(text.replace(",", "")), 6)


def evaluate(expression: str) -> float:
    """Evaluates plain arithmetic; nothing else is accepted."""

    def walk(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return float(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -walk(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        raise Unsuitable(expression)

    try:
        return round(walk(ast.parse(expression.strip(), mode="eval").body), 6)
    except (SyntaxError, ZeroDivisionError) as error:
        raise Unsuitable(expression) from error


def write_number(value: float) -> str:
    """Writes a value the short way: no trailing zeros, at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def draw(old: float, rng: random.Random) -> float:
    """A new value of about the old one's size and roundness."""
    step = 100 if old % 100 == 0 else 10 if old % 10 == 0 else 5 if old % 5 == 0 and old > 20 else 1
    units = int(old // step)
    return float(step * rng.randint(max(2, units // 2), units * 2 + 2))


def numbers_of(text: str) -> list[float]:
    return [parse(match) for match in NUMBER.findall(text)]


def replace_numbers(text: str, mapping: dict[float, float]) -> str:
    """Replaces every number that has a new value; others keep their spelling."""

    def new_text(match: re.Match[str]) -> str:
        old = parse(match.group())
        new = mapping.get(old, old)
        return match.group() if new == old else write_number(new)

    return NUMBER.sub(new_text, text)


def new_values(question: str, reference: str, rng: random.Random) -> dict[float, float]:
    """Draws new question numbers and follows them through the calculations."""
    asked = sorted(set(numbers_of(question)))
    free = [v for v in asked if v.is_integer() and SMALLEST <= v <= LARGEST and v not in FIXED]
    mapping = {value: draw(value, rng) if value in free else value for value in asked}
    for expression, result in CALCULATION.findall(reference):
        for literal in numbers_of(expression):
            mapping.setdefault(literal, literal)
        old, new = parse(result), evaluate(replace_numbers(expression, mapping))
        if abs(evaluate(expression) - old) > 1e-6 or new <= 0:
            raise Unsuitable(expression)
        if (old.is_integer() and not new.is_integer()) or round(new, 2) != new or new > 99_999:
            raise Unsuitable(expression)
        if mapping.setdefault(old, new) != new:
            raise Unsuitable(expression)
    if all(old == new for old, new in mapping.items()):
        raise Unsuitable("nothing to change")
    return mapping


def rewrite(question: str, reference: str, rng: random.Random) -> tuple[str, str]:
    """One rewritten problem and its solution; raises Unsuitable."""
    text, _, final = reference.rpartition("####")
    calculations = CALCULATION.findall(reference)
    if not calculations or GLUED.search(question + reference) or re.search(r"[^0-9.+\-*/() ]", calculations[0][0]):
        raise Unsuitable("no plain calculations")
    mapping = new_values(question, reference, rng)
    if parse(final.strip()) not in {parse(result) for _, result in calculations}:
        raise Unsuitable("the final answer was not calculated")
    changed = replace_numbers(text, mapping), replace_numbers(final, mapping)
    return replace_numbers(question, mapping), "####".join(changed)


def rewrites(question: str, reference: str, rng: random.Random, count: int, tries: int) -> list[tuple[str, str]]:
    """Up to `count` different rewrites of one problem; an empty list where none is possible."""
    found: dict[str, str] = {}
    for _ in range(tries):
        if len(found) == count:
            break
        try:
            new_question, new_reference = rewrite(question, reference, rng)
        except (Unsuitable, ValueError):
            continue
        found[new_question] = new_reference
    return list(found.items())
