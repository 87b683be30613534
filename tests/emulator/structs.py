"""The structs and constants of include/epcy as ctypes has them, read from the headers themselves.

The headers are plain C: `typedef struct name { type a, *b, c[N]; } name;`, `#define NAME number` and enums.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

INCLUDE = Path(__file__).resolve().parents[2] / "include" / "epcy"
PLAIN: dict[str, Any] = {
    "char": ctypes.c_char,
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
}


def number(text: str, names: dict[str, int]) -> int | None:
    """Evaluate a constant expression of numbers and known names; None for anything else."""
    text = re.sub(r"\b(0x[0-9A-Fa-f]+|\d+)[uUlL]+\b", r"\1", text)
    text = re.sub(r"\b[A-Z]\w+\b", lambda m: str(names.get(m[0], m[0])), text)
    if not re.fullmatch(r"[0-9xA-Fa-f\s()+*<-]+", text):
        return None
    return int(eval(text, {"__builtins__": {}}))


def plain(text: str) -> str:
    """Return C without its comments."""
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def read(*headers: str, constants_of: tuple[str, ...] = ()) -> SimpleNamespace:
    """Return a namespace with a ctypes.Structure a struct and an int a constant."""
    text = "\n".join((INCLUDE / name).read_text() for name in (*constants_of, *headers))
    text = plain(text)
    names: dict[str, int] = {}
    for name, value in re.findall(r"^#define (\w+) (.+?)\s*$", text, flags=re.M):
        found = number(value, names)
        if found is not None:
            names[name] = found
    for body in re.findall(r"\benum \w+ \{(.*?)\}", text, flags=re.S):
        last = -1
        for entry in filter(None, (e.strip() for e in body.split(","))):
            name, _, value = entry.partition("=")
            given = number(value.strip(), names) if value else None
            last = last + 1 if given is None else given
            names[name.strip()] = last
    types = dict(PLAIN)
    text = plain("\n".join((INCLUDE / name).read_text() for name in headers))
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, flags=re.S):
        fields = []
        for declaration in filter(None, (d.strip() for d in body.split(";"))):
            kind, rest = re.fullmatch(r"(?:const\s+)?(\w+)\s*(.*)", declaration, flags=re.S).groups()
            for one in rest.split(","):
                star, field, dimensions = re.fullmatch(r"(\*?)\s*(\w+)((?:\[[^]]+\])*)", one.strip()).groups()
                made = ctypes.c_void_p if star else types[kind]
                for size in reversed(re.findall(r"\[([^]]+)\]", dimensions)):
                    made = made * number(size, names)
                fields.append((field, made))
        types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return SimpleNamespace(**names, **{k: v for k, v in types.items() if k not in PLAIN})


C = read("layout.h", "cuda.h", "low_latency.h", "put.h", "put_nodes.h", constants_of=("meter.h",))
