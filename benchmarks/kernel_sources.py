"""A hash of what a kernel is compiled from, which comments and other kernels don't change."""

import ast
import hashlib
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction

from sparseformer.kernels.common.compilation import CompileCase


def fingerprint(case: CompileCase) -> str:
    """Return the hash of a kernel, the functions it calls and its options."""
    parts: dict[str, str] = {}
    _collect(case.kernel, parts)
    settings = (case.types, case.constants, case.launch.options())
    described = [sorted((name, str(x)) for name, x in group.items()) for group in settings]
    text = repr((sorted(parts.items()), described))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _collect(function: Any, parts: dict[str, str]) -> None:
    """Add a jit function's code and, one by one, all that it refers to."""
    name = f"{function.fn.__module__}.{function.fn.__name__}"
    if name in parts:
        return
    tree = function.parse()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    parts[name] = ast.unparse(tree)
    for used in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}):
        value = function.fn.__globals__.get(used)
        if isinstance(value, JITFunction):
            _collect(value, parts)
        elif isinstance(value, tl.constexpr):
            parts[f"{name}: {used}"] = repr(value.value)
