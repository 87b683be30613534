"""README.zh-CN.md keeps step with README.md: headings, programs and commands, figures of tables, links.

Its tuning guide, which README.md has not, keeps step with docs/tuning.md in the same way.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADINGS = {
    "epcy": "epcy",
    "Use": "用法",
    "Decode": "解码",
    "Install": "安装",
    "Look": "查看",
    "When something goes wrong": "出错的时候",
    "What works where": "哪里能用什么",
    "Measured": "实测",
    "Read on": "继续阅读",
}
GUIDE = "调优指南"  # a section of the twin's own, before the last one
NUMBER = re.compile(r"\d(?:[\d,]*\d)?(?:\.\d+)?")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.S | re.M)


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def prose(text):
    return FENCE.sub("", text)


def headings(text):
    return [(len(marks), title) for marks, title in re.findall(r"^(#+) (.+)$", prose(text), flags=re.M)]


def programs(text):
    """Return language and lines of each fenced block; comments, which are translated, are left out."""
    blocks = []
    for language, body in FENCE.findall(text):
        lines = (re.sub(r"(^|\s+)# .*$|(^|\s+)#$", "", line).rstrip() for line in body.splitlines())
        blocks.append((language, [line for line in lines if line]))
    return blocks


def tables(text):
    """Return each table as rows of cells, the line below its head left out."""
    found = []
    for lines in re.findall(r"(?:^\|.*\|\n)+", prose(text), flags=re.M):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines.splitlines()]
        found.append([row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)])
    return found


def figures(table):
    """Return the numbers of each cell, and what stands in backquotes: both are the same in any language."""
    return [
        [(sorted(NUMBER.findall(cell)), sorted(re.findall(r"`([^`]+)`", cell))) for cell in row]
        for row in table
    ]


def without_guide(text):
    return re.sub(rf"^## {GUIDE}$.*?(?=^## )", "", text, flags=re.S | re.M)


def guide(text):
    return re.search(rf"^## {GUIDE}$.*?(?=^## )", text, flags=re.S | re.M).group()


ENGLISH, CHINESE = read("README.md"), read("README.zh-CN.md")


def test_headings():
    expected = [
        (level, HEADINGS.get(title, f"(no translation of {title!r})")) for level, title in headings(ENGLISH)
    ]
    assert headings(without_guide(CHINESE)) == expected
    assert headings(CHINESE)[-1] == expected[-1] and (2, GUIDE) in headings(CHINESE)


def test_programs_and_commands():
    expected, found = programs(ENGLISH), programs(without_guide(CHINESE))
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == theirs


def test_commands_within_the_text():
    def commands(text):
        return {
            " ".join(word.split())
            for word in re.findall(r"`((?:mpiexec|make|pip|python)\b[^`]*)`", prose(text))
        }

    assert commands(without_guide(CHINESE)) == commands(ENGLISH)
    assert commands(guide(CHINESE)) >= {"python -m epcy tune"}


def test_figures_of_tables():
    expected, found = tables(ENGLISH), tables(without_guide(CHINESE))
    assert [len(table) for table in found] == [len(table) for table in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert figures(mine) == figures(theirs)


def test_dates_and_figures_around_the_tables():
    def around(text, title):
        section = re.search(rf"^## {title}$(.*?)(?=^## )", text, flags=re.S | re.M).group(1)
        return sorted(NUMBER.findall(re.sub(r"^\|.*\n", "", section, flags=re.M)))

    assert around(CHINESE, HEADINGS["Measured"]) == around(ENGLISH, "Measured")


def test_links():
    def links(text):
        return set(re.findall(r"\]\(([^)]+)\)", prose(text))) - {"README.md", "README.zh-CN.md"}

    assert links(CHINESE) == links(ENGLISH)
    assert all((ROOT / link).exists() for link in links(CHINESE))
    assert "(README.zh-CN.md)" in ENGLISH and "(README.md)" in CHINESE


def test_the_guide_has_the_tables_of_docs():
    """Starting values and knobs are those of docs/tuning.md, row by row; so is the program."""
    english, mine = read("docs/tuning.md"), tables(guide(CHINESE))
    theirs = {len(table[0]): table for table in tables(english) if table[0][0] in ("knob", "job")}
    assert len(mine) == len(theirs) == 2
    for table in mine:
        assert figures(table) == figures(theirs[len(table[0])])
    assert all(block in programs(english) for block in programs(guide(CHINESE)))


@pytest.mark.parametrize(
    "value", ["num_max_nvl_peers = 16", "allow_nvlink_for_low_latency_mode = True", "num_qps_per_rank = 4"]
)
def test_the_guide_has_the_usual_starting_values(value):
    assert value in guide(CHINESE) and value in read("docs/tuning.md")


def test_what_would_be_noticed():
    """The comparison itself: a figure, a flag, a heading or a row that only one of the two has."""
    table = "| a | b |\n| --- | --- |\n| x | 187 us |\n"
    assert figures(tables(table)[0]) != figures(tables(table.replace("187", "188"))[0])
    assert figures(tables(table)[0]) != figures(tables(table + "| y | |\n")[0])
    block = "```sh\nmake demo    # see\n```\n"
    assert (
        programs(block) == programs(block.replace("# see", "# 看")) != programs(block.replace("demo", "test"))
    )
    assert headings("# a\n## b\n") != headings("# a\n### b\n")
    assert headings("```sh\n# no heading\n```\n") == []
