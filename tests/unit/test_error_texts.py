"""Every text of an error in the sources: it begins with the name of what was wrong and holds the value that was seen.

The constructions of epcy's errors are found in the sources themselves, so a new one is held to the same. What has no
value, or no argument, stands in EXCEPTIONS with the reason.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from epcy import errors

PACKAGE = Path(errors.__file__).parent
CLASSES = [name for name in errors.__all__ if name != "EpcyError"]
CONSTRUCTION = re.compile(rf"(?<![\w.])(?:errors\.)?({'|'.join(CLASSES)})\(")
# A name: of an argument, an option, a variable or a call; perhaps with an index, or what is written in its place.
NAMED = re.compile(r"^(\w[\w.]*|\{[^}]*\})(\[[^\]]*\])*(:| \(call )")
RANKS = {"self.rank", "rank", "comm.rank", "self.h.rank"}


@dataclass(frozen=True)
class Text:
    """A text as it stands in the source; what is written in its place is in braces."""

    where: str
    kind: str
    text: str | None  # None: it comes from elsewhere, by a name or a call
    values: tuple[str, ...] = ()  # what is written into it
    call: str = ""


def expression(source: str, start: int) -> str:
    """The call whose opening bracket is at `start`, up to the closing one; strings are stepped over."""
    depth, at = 0, start
    while True:
        quote = re.match(r"[rbf]*(\"\"\"|'''|\"|')", source[at:])
        if quote:
            end = source.index(quote[1], at + quote.end())
            while source[end - 1] == "\\":
                end = source.index(quote[1], end + 1)
            at = end + len(quote[1])
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(source[at], 0)
        at += 1
        if depth == 0:
            return source[start:at]


def flattened(node: ast.expr) -> tuple[str, list[str]] | None:
    """The text of an expression, and what is written into it; None: it is not written here."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value, []
    if isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            written = ast.unparse(part.value) if isinstance(part, ast.FormattedValue) else ""
            parts.append((f"{{{written}}}", [written]) if written else (str(part.value), []))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = flattened(node.left), flattened(node.right)
        if left is None:
            return None
        parts = [left, right or ("", [])]
    else:
        return None
    return "".join(text for text, _ in parts), [value for _, values in parts for value in values]


def texts() -> list[Text]:
    """Every construction of an error in the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py*")):
        if path.suffix not in (".py", ".pyx"):
            continue
        source = re.sub(r"<[\w ]+ ?\*?>(?=[\w(])", "", path.read_text(encoding="utf-8"))  # casts of Cython
        for match in CONSTRUCTION.finditer(source):
            before = source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
            if "class " in before or "#" in before or before.rstrip().endswith("->"):
                continue
            call = ast.parse("f" + expression(source, match.end() - 1), mode="eval").body
            if not call.args:
                continue
            where = f"{path.relative_to(PACKAGE)}:{source.count(chr(10), 0, match.start()) + 1}"
            text = flattened(call.args[0])
            written = f"{match[1]}({', '.join(map(ast.unparse, call.args))})"
            found.append(Text(where, match[1], *((text[0], tuple(text[1])) if text else (None, ())), written))
    return found


TEXTS = texts()
HERE = [one for one in TEXTS if one.text is not None]


# What has no value to tell, or no argument, by how its text begins; and why.
EXCEPTIONS = {
    "comm: MPI is not running": "MPI cannot be asked for more",
    "comm: it holds ranks outside": "NVSHMEM knows no names of theirs; MPI_Group_translate gives none either",
    "a Buffer cannot be pickled": "pickle has no arguments",
    "Buffer: __init__ was called twice": "before the ranks know each other",
    "recv_x: this result's memory": "a result outlives its Buffer, and knows no rank",
}
# Constructions whose text is made elsewhere: by a function with the same rules, or another rank's, passed on.
PASSED_ON = {
    "backends/host.pyx": ["CapacityError(text)", "PeerError(text, [rank])"],
    "backends/host_low_latency.pyx": ["HeapError(text)"],
    "backends/nvshmem_epoch.pyx": ["HeapError(text)"],
    "backends/nvshmem_nodes.pyx": [
        "CapacityError(text)",
        "PeerError(text, [rank])",
        "PeerError(found[rank][3], [rank])",
    ],
    "backends/nvshmem_waits.pyx": [
        "CapacityError(text)",
        "PeerError(text, [rank])",
        "PeerError(text.tobytes().partition(b'\\x00')[0].decode(errors='replace'), [rank])",
        "PeerError(r.late_text.decode(errors='replace'), [r.late_rank])",
        "PeerError(verdicts.no_room_for_rows(self.num_calls, r.late_rank, r.late_rows, r.late_limit), [r.late_rank])",
    ],
}  # fmt: skip
WITH_VALUE = {"ArgumentError", "CapacityError", "MismatchError", "HeapError", "NotSupportedError",
              "BackendUnavailableError"}  # fmt: skip


def excepted(one: Text) -> bool:
    return any(one.text.startswith(start) for start in EXCEPTIONS)


def problem(one: Text) -> str | None:
    """What a text lacks."""
    rank_only = not [value for value in one.values if value not in RANKS]
    if one.kind in WITH_VALUE:
        if not NAMED.match(one.text):
            return "a name at its beginning"
        if rank_only and not re.search(r"\bgot [\w{]", one.text):
            return "the value that was seen"
    elif one.kind == "StateError":
        if not NAMED.match(one.text):
            return "a name at its beginning"
        if not one.values:
            return "the rank"
    elif one.kind == "BackendError":
        if rank_only:
            return "what failed"
    elif rank_only or "rank" not in one.text:
        return "who, and in what"
    return None


def test_they_are_found():
    assert len(HERE) > 100 and {one.kind for one in HERE} >= set(CLASSES) - {"BackendError"}


@pytest.mark.parametrize("kind", CLASSES)
def test_name_and_value(kind):
    lacking = [f"{one.where}: {one.text!r} lacks {what}" for one in HERE if one.kind == kind and not excepted(one)
               if (what := problem(one))]  # fmt: skip
    assert not lacking, "\n".join(lacking)


def test_exceptions_are_needed():
    for start in EXCEPTIONS:
        held = [one for one in HERE if one.text.startswith(start)]
        assert held and all(problem(one) for one in held), start


def test_what_is_made_elsewhere():
    seen: dict[str, list[str]] = {}
    for one in TEXTS:
        if one.text is None:
            seen.setdefault(one.where.split(":")[0], []).append(one.call)
    new = {path: set(calls) - set(PASSED_ON.get(path, ())) for path, calls in seen.items()}
    assert not any(new.values()), new


def test_the_rules_find_what_they_shall():
    def lacks(kind: str, source: str) -> str | None:
        return problem(
            Text("here", kind, *(lambda t: (t[0], tuple(t[1])))(flattened(ast.parse(source).body[0].value)))
        )

    assert lacks("ArgumentError", 'f"x: expected (T, H), got {shape} (rank {rank})"') is None
    assert lacks("ArgumentError", 'f"{name}: expected {what}, got " + f"{seen}"') is None
    assert (
        lacks("ArgumentError", 'f"x: expected another shape (rank {self.rank})"') == "the value that was seen"
    )
    assert lacks("ArgumentError", 'f"wrong shape {shape}"') == "a name at its beginning"
    assert lacks("StateError", '"dispatch: not now"') == "the rank"
    assert lacks("PeerError", '"somebody left"') == "who, and in what"


# ---- errors of Python's own are not for users

# The specification: its ValueErrors are described there.
INTERNAL = {"reference.py", "reference_nodes.py", "routing.py", "formats.py", "logfmt.py"}
BUILTIN = re.compile(
    r"raise ((?:Value|Type|Runtime|OS|Key|Index|Overflow|Assertion|Import)Error|Exception)\b(.*)"
)


def test_errors_are_of_epcy():
    """All but those that another layer turns into one, and pickle's TypeError."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py*")):
        inside = str(path.relative_to(PACKAGE))
        if path.suffix not in (".py", ".pyx") or inside in INTERNAL or inside.startswith("bench/"):
            continue
        for match in BUILTIN.finditer(path.read_text(encoding="utf-8")):
            found.append(f"{inside}: {match[0]}")
    assert found == [
        'faults.py: raise OSError(errno.ENOSPC, "says EPCY_FAULTS (os)")',
        'handle.pyx: raise TypeError("an epcy.Handle belongs to its Buffer and cannot be pickled; '
        'keep topk_idx instead")',
        "options.py: raise TypeError",
    ]


def test_bench_says_what_it_saw():
    """The bench's arguments are a command line's: ValueErrors, with the option's name and what came."""
    source = (PACKAGE / "bench" / "workload.py").read_text(encoding="utf-8")
    calls = [ast.parse("f" + expression(source, match.end() - 1), mode="eval").body
             for match in re.finditer(r"raise ValueError\(", source)]  # fmt: skip
    assert len(calls) >= 4
    for call in calls:
        text, values = flattened(call.args[0])
        assert text.startswith("--routing {path.name}: ") and len(values) > 1, text
