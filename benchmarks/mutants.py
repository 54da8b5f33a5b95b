"""One small change to a source file at a time: the mutants that `benchmarks.mutation` lets the tests find.

An operator is exchanged, a condition negated, a constant moved, a statement taken out, a returned value lost. Type
annotations, decorators, docstrings and the words of messages stay as they are: they release nothing.
"""

import ast
import copy
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`before` at `line` of `file` becomes `after`; `source` is that file; `id` outlives changes of other lines."""

    id: str
    file: str
    line: int
    before: str
    after: str
    source: bytes


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file, in the order of its text."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found, seen = [], Counter[str]()
    for node, after in _changes(ast.parse(source)):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = source[start:end].decode()
        name = f"{file} {lines[node.lineno - 1].decode().strip()} {before} {after}"
        seen[name] += 1
        key = hashlib.sha256(f"{name} {seen[name]}".encode()).hexdigest()[:12]
        found.append(Mutant(key, file, node.lineno, before, after, source[:start] + after.encode() + source[end:]))
    return found


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """(node, what to write in its place)."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _of_one(child)
                yield from _changes(child)


def _of_one(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                for other in COMPARISONS[type(operator)]:
                    yield node, _written(node, ops=[*node.ops[:place], other(), *node.ops[place + 1 :]])
        case ast.BoolOp():
            yield node, _written(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_text(node.left):
            yield node, _written(node, op=ARITHMETIC[type(node.op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int()):
            yield from ((node, f"({node.value + step})") for step in (1, -1))
        case ast.Constant(value=float()):
            yield from ((node, f"({value})") for value in ((node.value * 2, node.value / 2) if node.value else (1.0,)))
        case ast.Raise() | ast.Assert() | ast.Expr(value=ast.Call() | ast.Await()):
            yield node, "pass"
        case ast.AugAssign(op=operator) if type(operator) in ARITHMETIC:
            yield node, _written(node, op=ARITHMETIC[type(operator)]())
            yield node, "pass"
        case ast.Return(value=ast.expr()) if ast.unparse(node) != "return None":
            yield node, "return None"
        case ast.Break():
            yield node, "continue"
        case ast.Continue():
            yield node, "break"
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.comprehension):
        conditions = [condition for condition in node.ifs if not isinstance(condition, ast.Compare)]
        yield from ((condition, f"(not ({ast.unparse(condition)}))") for condition in conditions)


def _written(node: ast.AST, **fields: object) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return ast.unparse(changed) if isinstance(node, ast.stmt) else f"({ast.unparse(changed)})"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
