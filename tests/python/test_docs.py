"""Every example in the stub, in the modules and in the documents runs, and every program."""

import ast
import doctest
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

import pinpool

PACKAGE = Path(pinpool.__file__).parent
ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A program is a block that has the name of a file, and is run by the commands in blocks of shell.
FILE = re.compile(r"^```python (\S+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = [document for document in DOCUMENTS if FILE.search((ROOT / document).read_text())]
LAUNCHERS = {"torchrun": "torch.distributed.run"}


def docstrings(path):
    """The docstrings of a source file or a stub, by the names of what they document."""

    def walk(node, names):
        text = ast.get_docstring(node)
        if text:
            yield ".".join(names), text
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from walk(child, [*names, child.name])

    return walk(ast.parse(path.read_text()), [path.stem])


SOURCES = sorted([*PACKAGE.rglob("*.pyi"), *PACKAGE.rglob("*.py")])
EXAMPLES = [
    pytest.param(path, name, text, id=name) for path in SOURCES for name, text in docstrings(path) if ">>>" in text
]


def run_examples(text, names, name, path):
    test = doctest.DocTestParser().get_doctest(text, names, name, str(path), 0)
    report = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert test.examples
    assert not report, "".join(report)


@pytest.mark.parametrize(("path", "name", "text"), EXAMPLES)
def test_the_examples_of_a_docstring_run(path, name, text):
    names = {}
    if path.suffix == ".py":  # there, an example may use the names of its module
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        names = dict(vars(importlib.import_module(module)))
    run_examples(text, names, name, path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_the_python_blocks_of_a_document_run(document, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / document).read_text()
    names = {"__name__": "__main__"}  # a reader goes from top to bottom
    for block in BLOCK.finditer(text):
        if ">>>" in block[1]:
            run_examples(block[1], names, str(document), document)
        else:
            above = "\n" * text.count("\n", 0, block.start(1))  # so that a traceback has the document's line numbers
            exec(compile(above + block[1], str(ROOT / document), "exec"), names)


@pytest.mark.parametrize("document", PROGRAMS, ids=str)
def test_the_programs_of_a_document_run_as_it_says(document, tmp_path):
    text = (ROOT / document).read_text()
    for name, program in FILE.findall(text):
        (tmp_path / name).write_text(program)
    commands = [shlex.split(line) for lines in COMMANDS.findall(text) for line in lines.splitlines()]
    assert commands
    for launcher, *arguments in commands:
        command = [sys.executable, "-m", LAUNCHERS[launcher], *arguments]
        done = run_program(command, tmp_path)
        if done.returncode != 0 and UNJOINED in done.stderr:
            done = run_program(command, tmp_path)
        assert done.returncode == 0, done.stderr


# Now and then a C++ thread of torch's distributed part (2.15) is not joined at the end of a process, which then aborts.
UNJOINED = "terminate called without an active exception"


def run_program(command, directory):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=directory, env=environment
    )


@pytest.mark.parametrize("kind", [pinpool.PinnedPool, pinpool.PinnedArray, pinpool.Registration])
def test_what_is_public_is_documented_in_the_stub(kind):
    documented = dict(docstrings(PACKAGE / "_pinpool.pyi"))
    public = [name for name in dir(kind) if not name.startswith("_")]
    assert [name for name in public if f"_pinpool.{kind.__name__}.{name}" not in documented] == []


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()


STUB = {name.partition(".")[2]: text for name, text in docstrings(PACKAGE / "_pinpool.pyi") if "." in name}


def test_help_says_what_the_stub_says():
    silent = [name for name, text in STUB.items() if runtime_doc(name) not in (text, None)]
    assert silent == []


def runtime_doc(name):
    """What `help` shows; None for what Python documents by itself, and for exceptions, whose text is shorter."""
    found = attrgetter(name)(pinpool._pinpool)
    if (isinstance(found, type) and issubclass(found, Exception)) or isinstance(found, type(str.__str__)):
        return None
    return inspect.getdoc(found)
