"""Write docs/api.md and docs/options.md out of the docstrings and the options table.

python docs/generate.py            write the pages
python docs/generate.py --check    exit 1 when a page is not what it would write

Signatures come from the stub beside a compiled module, else from the .py source: both are read, not imported,
so the pages are the same on every Python. Docstrings come from the imported objects.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

NOTE = "<!-- Written by docs/generate.py out of docstrings and the options table; run `make docs`. -->\n"

# The modules whose public names (`__all__`) the page shows, after those of `epcy` itself.
MODULES = (
    "epcy.recording",
    "epcy.doctor",
    "epcy.stats",
    "epcy.metrics",
    "epcy.model",
    "epcy.topology",
    "epcy.options",
    "epcy.reference",
)
FIRST = ("Buffer", "Dispatch", "Combine", "Handle", "LowLatencyHandle", "Hook", "Event")


class Source:
    """The declarations of one module, as its stub or its source writes them."""

    def __init__(self, module: str) -> None:
        base = ROOT.joinpath(*module.split("."))
        candidates = (base.with_suffix(".pyi"), base.with_suffix(".py"), base / "__init__.py")
        found = [path for path in candidates if path.exists()]
        self.body = ast.parse(found[0].read_text(encoding="utf-8")).body if found else []

    def find(self, path: str) -> ast.AST | None:
        body, node = self.body, None
        for name in path.split("."):
            node = next((n for n in body if getattr(n, "name", None) == name), None)
            body = getattr(node, "body", [])
        return node

    def signature(self, path: str, title: str) -> str | None:
        node = self.find(path)
        if isinstance(node, ast.ClassDef):
            inits = [n for n in node.body if getattr(n, "name", "") == "__init__"]
            return _signature(inits[-1], title) if inits else None
        return _signature(node, title) if isinstance(node, ast.FunctionDef) else None

    def members(self, path: str) -> list[str]:
        """Return the public methods and properties of a class in the order of the source."""
        node = self.find(path)
        names = [n.name for n in getattr(node, "body", []) if isinstance(n, ast.FunctionDef)]
        return list(dict.fromkeys(name for name in names if not name.startswith("_")))


def _signature(node: ast.FunctionDef, title: str) -> str:
    arguments = node.args
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    if not static:
        for group in (arguments.posonlyargs, arguments.args):
            if group and group[0].arg in ("self", "cls"):
                del group[0]
                break
    text = f"{title}({ast.unparse(arguments)})"
    if node.returns is not None and node.name != "__init__":
        text += f" -> {ast.unparse(node.returns)}"
    if len(text) <= 100:
        return text
    inner = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0].args  # type: ignore[attr-defined]
    tail = text[text.rindex(")") :] if " -> " not in text else ")" + text[text.rindex(" -> ") :]
    return f"{title}(\n" + "".join(f"    {part},\n" for part in _arguments(inner)) + tail


def _arguments(arguments: ast.arguments) -> list[str]:
    """Write each argument on its own."""

    def one(argument: ast.arg, default: ast.expr | None) -> str:
        text = ast.unparse(argument)
        if default is None:
            return text
        return f"{text} = {ast.unparse(default)}" if argument.annotation else f"{text}={ast.unparse(default)}"

    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [one(a, d) for a, d in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        parts.append("*" + ast.unparse(arguments.vararg))
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [one(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        parts.append("**" + ast.unparse(arguments.kwarg))
    return parts


def markdown(doc: str | None) -> str:
    """Turn a NumPy-style docstring into Markdown: section titles in bold, its definition lists as lists."""
    lines = inspect.cleandoc(doc or "").splitlines()
    out: list[str] = []
    section = ""
    at = 0
    while at < len(lines):
        line = lines[at]
        if at + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[at + 1].strip()):
            section = line.strip()
            out += ["", f"**{section}**", ""]
            at += 2
            continue
        if section in ("", "Notes", "Examples", "See Also"):
            out.append(line)
        elif line.startswith(" "):
            out.append("  " + line.strip())
        elif line.strip():
            name, colon, kind = line.partition(" : ")
            out.append(f"- `{name.strip()}`" + (f" : {kind.strip()}" if colon else "") + "  ")
        else:
            out.append("")
        at += 1
    text = "\n".join(line.rstrip() if not line.endswith("`  ") else line.rstrip() for line in out)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def inherited_from(value: type) -> list[type]:
    """Return the bases of a class that have no entry of their own: what they define is shown as its own."""
    public = importlib.import_module("epcy").__all__
    bases = value.__mro__[1:]
    return [base for base in bases if base.__module__.startswith("epcy.") and base.__name__ not in public]


def entry(module: str, name: str, value: Any, level: int) -> list[str]:
    """Return the lines of one public name."""
    home = getattr(value, "__module__", None) or module
    source = Source(home)
    lines = [f"{'#' * level} {name}", ""]
    is_error = inspect.isclass(value) and issubclass(value, BaseException)
    title = name if module == "epcy" else f"{module}.{name}"
    if inspect.isclass(value):
        bases = [b.__name__ for b in value.__bases__ if b is not object]
        path = value.__name__
        signature = None if is_error else source.signature(path, title)
        text = signature or (f"class {title}" + (f"({', '.join(bases)})" if bases else ""))
        lines += ["```python", text, "```", "", markdown(value.__doc__), ""]
        owned = [] if is_error else [(source, path, member) for member in source.members(path)]
        for base in () if is_error else inherited_from(value):
            of = Source(base.__module__)
            owned += [(of, base.__name__, member) for member in of.members(base.__name__)]
        for of, owner, member in owned:
            attribute = inspect.getattr_static(value, member, None)
            if attribute is None or not getattr(attribute, "__doc__", None):
                if not isinstance(attribute, staticmethod):
                    continue
            doc = getattr(value, member).__doc__ if isinstance(attribute, staticmethod) else attribute.__doc__
            signature = of.signature(f"{owner}.{member}", f"{name}.{member}")
            node = of.find(f"{owner}.{member}")
            if any(
                isinstance(d, ast.Name) and d.id == "property" for d in getattr(node, "decorator_list", [])
            ):
                signature = None
            lines += [f"{'#' * (level + 1)} {name}.{member}", ""]
            lines += ["```python", signature, "```", ""] if signature else []
            lines += [markdown(doc), ""]
    elif callable(value):
        signature = source.signature(getattr(value, "__name__", name), title) or f"{title}(...)"
        lines += ["```python", signature, "```", "", markdown(value.__doc__), ""]
    else:
        return []
    return lines


def source_names(module: str) -> list[str]:
    """Return the functions and classes that a module without `__all__` defines in public."""
    names = [getattr(node, "name", "_") for node in Source(module).body]
    return [name for name in names if not name.startswith("_")]


def api() -> str:
    epcy = importlib.import_module("epcy")
    names = [n for n in epcy.__all__ if not n.startswith("_")]
    errors = [n for n in names if n.endswith("Error")]
    rest = sorted(
        (n for n in names if n not in errors), key=lambda n: (FIRST.index(n) if n in FIRST else 99, n)
    )
    lines = [NOTE, "# The public names of epcy", ""]
    seen: dict[int, str] = {}
    for name in rest:
        value = getattr(epcy, name)
        if id(value) in seen:
            lines += [f"## {name}", "", f"Another name of `{seen[id(value)]}`.", ""]
            continue
        seen[id(value)] = name
        lines += entry("epcy", name, value, 2)
    lines += ["## Errors", "", "Each also is the builtin that people catch.", ""]
    for name in sorted(errors, key=lambda n: (n != "EpcyError", n)):
        lines += entry("epcy", name, getattr(epcy, name), 3)
    for module in MODULES:
        loaded = importlib.import_module(module)
        lines += [f"## {module}", "", markdown(loaded.__doc__), ""]
        for name in getattr(loaded, "__all__", None) or source_names(module):
            lines += entry(module, name, getattr(loaded, name), 3)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def options() -> str:
    from epcy.options import OPTIONS

    lines = [NOTE, "# The options of a Buffer", ""]
    lines += [
        "Each is a keyword argument of `epcy.Buffer`; where it is not given the variable counts, and where",
        "that is not set the default. `python -m epcy` prints every value and where it came from.",
        "Options marked *agreed* must be equal on all ranks: the constructor compares them.",
        "",
        "| option | kind | default | variable | agreed | meaning |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for option in OPTIONS:
        kind = ", ".join(f"`{c}`" for c in option.choices) or option.kind
        default = "computed" if option.default is None else f"`{option.default}`"
        default = "required" if option.required else default
        variable = f"`{option.env}`" if option.env else ""
        help_text = option.help.replace("|", "\\|")
        agreed = "yes" if option.compared else "no"
        lines.append(f"| `{option.name}` | {kind} | {default} | {variable} | {agreed} | {help_text} |")
    return "\n".join(lines) + "\n"


PAGES = {"api.md": api, "options.md": options}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    if stale:
        print(("not current: " if check else "wrote ") + ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
