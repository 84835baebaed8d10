"""The doctor: what it tells, the two ways in which it tells it, and its exit codes."""

import json
from pathlib import Path

import pytest

from pinpool import _doctor, cli
from pinpool._doctor import Finding, Report, Section
from pinpool._pinpool import doctor

# For a process of its own: the report and the exit code of the command line.
EXAMINE = """
import contextlib, io, json
from pinpool import cli

cli._parser().format_help()  # imports what a process without rights may not be able to read any more

def examine():
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = cli.main(["doctor", "--json"])
    report = json.loads(output.getvalue())
    assert code == report["verdict"], (code, report)
    return report

def finding(report, title, topic):
    [section] = [section for section in report["sections"] if section["title"] == title]
    [found] = [found for found in section["findings"] if found["topic"] == topic]
    return found
"""


def findings_of(report):
    return [finding for section in report["sections"] for finding in section["findings"]]


def report_of(*severities):
    findings = [
        {"topic": f"topic {severity}", "fact": f"fact {place}", "severity": severity, "remedy": "do; so"}
        for place, severity in enumerate(severities)
    ]
    verdict = max((list(_doctor.MARKS).index(severity) for severity in severities), default=0)
    return {"verdict": verdict, "sections": [{"title": "anything", "findings": findings}]}


# What it tells


def test_the_keys_are_those_that_are_documented():
    report = doctor(None, None)
    assert set(report) == Report.__required_keys__
    assert all(set(section) == Section.__required_keys__ for section in report["sections"])
    findings = findings_of(report)
    assert all(set(finding) == Finding.__required_keys__ for finding in findings)
    assert all(finding["severity"] in _doctor.MARKS for finding in findings)
    documented = (Path(cli.__file__).parent / "_pinpool.pyi").read_text().partition("def doctor(")[2]
    for keys in (Report, Section, Finding):
        assert all(f"`{key}`" in documented for key in keys.__required_keys__)


def test_every_topic_is_there_and_whatever_is_bad_has_a_remedy():
    report = doctor(None, None)
    topics = {(section["title"], finding["topic"]) for section in report["sections"] for finding in section["findings"]}
    system = {("system", topic) for topic in ("pinpool", "kernel", "io_uring")}
    limits = {("limits", topic) for topic in ("memlock", "memory", "control group", "mappings", "default pool")}
    pages = {("pages", topic) for topic in ("base page", "transparent huge", "huge pages 2m", "huge pages 1g")}
    rest = {("NUMA", "node 0"), ("trial", "pin 4 MiB"), ("CUDA", "library"), ("Level Zero", "library")}
    assert topics >= system | limits | pages | rest
    bad = [finding for finding in findings_of(report) if finding["severity"] != "ok"]
    assert all(finding["remedy"] for finding in bad)


def test_nothing_stays_locked(locked):
    before = locked()
    doctor(None, None)
    assert locked() == before


# How it tells it


@pytest.fixture
def told(monkeypatch):
    """The reports that the command line gets."""
    reports = []
    monkeypatch.setattr(cli, "doctor", lambda *libraries: reports.append(doctor(*libraries)) or reports[-1])
    return reports


def test_the_json_is_the_report(told, capsys):
    code = cli.main(["doctor", "--json"])
    output = capsys.readouterr()
    assert json.loads(output.out) == told[0]
    assert (code, output.err) == (told[0]["verdict"], "")


def test_the_text_says_what_the_report_says(told, capsys):
    code = cli.main(["doctor"])
    output = capsys.readouterr()
    assert (code, output.err) == (told[0]["verdict"], "")
    lines = output.out.splitlines()
    assert [line for line in lines[:-1] if line and line[0] != " "] == [part["title"] for part in told[0]["sections"]]
    findings = findings_of(told[0])
    width = max(len(finding["topic"]) for finding in findings)
    for finding in findings:
        line = f"  {_doctor.MARKS[finding['severity']]:<4}  {finding['topic']:<{width}}  {finding['fact']}"
        start = lines.index(line) + 1
        parts = finding["remedy"].split("; ") if finding["remedy"] else []
        assert [told.strip().removeprefix("-> ") for told in lines[start : start + len(parts)]] == parts


@pytest.mark.parametrize(
    ("severities", "code", "last"),
    [
        ([], 0, "memory can be pinned, and nothing is in the way"),
        (["ok", "ok"], 0, "memory can be pinned, and nothing is in the way"),
        (["ok", "warning"], 1, "memory can be pinned, with 1 warning"),
        (["warning", "ok", "warning"], 1, "memory can be pinned, with 2 warnings"),
        (["ok", "warning", "failure"], 2, "memory cannot be pinned"),
    ],
)
def test_the_worst_finding_is_the_exit_code(monkeypatch, capsys, severities, code, last):
    monkeypatch.setattr(cli, "doctor", lambda *_libraries: report_of(*severities))
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_marks_and_remedies_are_easy_to_see():
    assert _doctor.text(report_of("ok", "warning", "failure")).splitlines() == [
        "anything",
        "  ok    topic ok       fact 0",
        "                       -> do",
        "                          so",
        "  warn  topic warning  fact 1",
        "                       -> do",
        "                          so",
        "  FAIL  topic failure  fact 2",
        "                       -> do",
        "                          so",
        "",
        "memory cannot be pinned",
    ]


def test_the_help_names_the_exit_codes_and_the_keys(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("exit code is 0", "--json", "verdict", "findings", "severity", "remedy"))


def test_it_takes_no_torch(run):
    run(f"""
        sys.modules["torch"] = None
        exec({EXAMINE!r})
        examine()
    """)


# What this process may lock


def test_a_small_memlock_limit_is_a_warning_with_the_remedies(run):
    run(f"""
        exec({EXAMINE!r})
        become_unprivileged(memlock=8 * MIB)
        report = examine()
        assert report["verdict"] == 1, report
        found = finding(report, "limits", "memlock")
        assert found["severity"] == "warning" and "limit 8 MiB, hard limit 8 MiB" in found["fact"], found
        for remedy in ("/etc/security/limits.conf", "docker run --ulimit memlock=-1:-1", "CAP_IPC_LOCK"):
            assert remedy in found["remedy"], found
        assert "8 MiB (RLIMIT_MEMLOCK)" in finding(report, "limits", "default pool")["fact"], report
        assert finding(report, "trial", "pin 4 MiB")["severity"] == "ok", report
    """)


@pytest.mark.parametrize("memlock", [0, 1])
def test_next_to_no_lockable_memory_is_a_failure_with_the_remedies(run, memlock):
    run(f"""
        exec({EXAMINE!r})
        become_unprivileged(memlock={memlock} * MIB)
        report = examine()
        assert report["verdict"] == 2, report
        for title, topic in (("limits", "memlock"), ("trial", "pin 4 MiB")):
            found = finding(report, title, topic)
            assert found["severity"] == "failure" and "limits.conf" in found["remedy"], found
        assert status("VmLck") == 0
    """)


def test_a_soft_limit_can_be_raised_in_the_shell(run):
    run(f"""
        import resource
        exec({EXAMINE!r})
        become_unprivileged(memlock=8 * MIB)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (6 * MIB, 8 * MIB))
        remedy = finding(examine(), "limits", "memlock")["remedy"]
        assert remedy.startswith("`ulimit -l 8192`"), remedy
    """)


def test_capabilities_in_a_user_namespace_lift_no_limit(run):
    done = run(f"""
        import ctypes
        exec({EXAMINE!r})
        become_unprivileged(memlock=8 * MIB)
        if ctypes.CDLL(None).unshare(0x10000000) != 0:
            print("no user namespace can be had here")
            raise SystemExit
        report = examine()
        found = finding(report, "limits", "memlock")
        assert report["verdict"] == 1 and "rootless container" in found["fact"], found
    """)
    if done:
        pytest.skip(done.strip())


# Drivers


@pytest.mark.parametrize(
    ("variable", "title"), [("PINPOOL_CUDA_LIBRARY", "CUDA"), ("PINPOOL_LEVEL_ZERO_LIBRARY", "Level Zero")]
)
def test_a_library_that_is_named_and_missing_is_a_warning(run, variable, title):
    run(f"""
        os.environ["{variable}"] = "/no/such/library.so"
        exec({EXAMINE!r})
        report = examine()
        found = finding(report, "{title}", "library")
        assert report["verdict"] >= 1 and found["severity"] == "warning", found
        assert "/no/such/library.so" in found["fact"] and "install" in found["remedy"], found
    """)


def test_devices_are_listed_and_no_context_is_made(run, fake_libcuda):
    run(f"""
        import ctypes
        os.environ.update(PINPOOL_CUDA_LIBRARY="{fake_libcuda}", FAKE_CUDA="devices=2,ats@1=1,register_supported@1=0")
        exec({EXAMINE!r})
        report = examine()
        assert finding(report, "CUDA", "library")["fact"] == "{fake_libcuda} loaded, 2 devices", report
        first, second = (finding(report, "CUDA", f"cuda:{{ordinal}}") for ordinal in range(2))
        assert first["severity"] == "ok" and "registers by cuMemHostRegister" in first["fact"], first
        assert re.search("UUID [0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}};", first["fact"]), first
        assert second["severity"] == "warning" and "registers no memory" in second["fact"], second
        assert "devices=None" in second["remedy"], second
        driver = ctypes.CDLL("{fake_libcuda}")
        driver.fake_contexts_made.restype = driver.fake_wrong.restype = ctypes.c_uint64
        assert [driver.fake_contexts_made(ordinal) for ordinal in range(2)] == [0, 0]
        assert driver.fake_wrong() == 0
    """)


@pytest.mark.parametrize(("code", "part"), [(999, "cuInit answered 999"), (803, "different versions")])
def test_a_driver_that_does_not_start_is_a_warning(run, fake_libcuda, code, part):
    run(f"""
        os.environ.update(PINPOOL_CUDA_LIBRARY="{fake_libcuda}", FAKE_CUDA="init_code={code}")
        exec({EXAMINE!r})
        report = examine()
        found = finding(report, "CUDA", "library")
        assert report["verdict"] >= 1 and found["severity"] == "warning", found
        assert "{part}" in found["fact"] and "nvidia-smi" in found["remedy"], found
    """)
