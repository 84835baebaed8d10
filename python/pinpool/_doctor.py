"""The doctor's report: its shape, and how it reads on a terminal."""

from collections.abc import Iterator
from typing import Literal, TypedDict

Severity = Literal["ok", "warning", "failure"]


class Finding(TypedDict):
    """One fact, and what to do about it.

    `topic`: what it is about, in a word or two. `fact`: what is the case. `severity`: "ok", "warning" (pinning works,
    but less of it, slower, or without a device that is there) or "failure" (nothing can be pinned). `remedy`: what
    helps, or None; a warning and a failure always have one, and beside "ok" it is how to get more.
    """

    topic: str
    fact: str
    severity: Severity
    remedy: str | None


class Section(TypedDict):
    """The findings on one subject. `title`: "system", "limits", "pages", "NUMA", "trial", or a driver's name."""

    title: str
    findings: list[Finding]


class Report(TypedDict):
    """All that the doctor found. `verdict`: 0 all is fine, 1 pinning works with warnings, 2 nothing can be pinned."""

    verdict: Literal[0, 1, 2]
    sections: list[Section]


MARKS: dict[Severity, str] = {"ok": "ok", "warning": "warn", "failure": "FAIL"}
INDENT = "  "
REMEDIES = "; "
"""Between the parts of a remedy; each gets a line, so that commands stay whole."""


def text(report: Report) -> str:
    """Write a report in aligned columns: mark, topic and fact, with the remedy on lines of its own.

    >>> finding: Finding = {"topic": "memlock", "fact": "no limit", "severity": "warning", "remedy": "as root; or not"}
    >>> print(text({"verdict": 1, "sections": [{"title": "limits", "findings": [finding]}]}))
    limits
      warn  memlock  no limit
                     -> as root
                        or not
    <BLANKLINE>
    memory can be pinned, with 1 warning
    """
    findings = [finding for section in report["sections"] for finding in section["findings"]]
    width = max((len(finding["topic"]) for finding in findings), default=0)
    lines = [line for section in report["sections"] for line in _section(section, width)]
    return "\n".join([*lines, _verdict(report["verdict"], findings)])


def _section(section: Section, width: int) -> Iterator[str]:
    yield section["title"]
    for finding in section["findings"]:
        start = f"{INDENT}{MARKS[finding['severity']]:<4}{INDENT}{finding['topic']:<{width}}{INDENT}"
        yield start + finding["fact"]
        for part, remedy in enumerate((finding["remedy"] or "").split(REMEDIES)):
            if remedy:
                yield " " * len(start) + ("   " if part else "-> ") + remedy
    yield ""


def _verdict(verdict: int, findings: list[Finding]) -> str:
    if verdict == 0:
        return "memory can be pinned, and nothing is in the way"
    if verdict == 1:
        warnings = sum(finding["severity"] == "warning" for finding in findings)
        return f"memory can be pinned, with {warnings} warning{'s' * (warnings > 1)}"
    return "memory cannot be pinned"
