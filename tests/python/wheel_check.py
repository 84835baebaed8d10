"""Installs a built wheel where there is nothing else, and uses it. `make wheel-test` runs this; pytest does not.

    python tests/python/wheel_check.py dist/pinpool-*.whl

Tries every Python of 3.11 or newer that it finds, with the pip of the one that runs it.
"""

import glob
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

LARGEST = 2_000_000
TAG = re.compile(r"-cp311-abi3-manylinux(2014|_2_17)_[a-z0-9_.]+\.whl$")


def check_file(wheel: Path) -> None:
    """Name, size and metadata of the wheel."""
    size = wheel.stat().st_size
    assert TAG.search(wheel.name), f"not a manylinux wheel for the stable ABI of Python 3.11: {wheel.name}"
    assert size < LARGEST, f"{wheel.name} has {size:,} bytes, more than {LARGEST:,}"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        fields = HeaderParser().parsestr(archive.read(metadata).decode())
    needed = fields.get_all("Requires-Dist") or []
    assert not [line for line in needed if "extra ==" not in line], f"the wheel has dependencies: {needed}"
    missing = {"pinpool/py.typed", "pinpool/_pinpool.pyi"} - set(names)
    assert not missing, f"the wheel lacks {sorted(missing)}"
    print(f"{wheel.name}: {size:,} bytes, no dependencies")


def pythons() -> list[str]:
    """One interpreter a version, from 3.11 up: this one, those on the PATH, those of pyenv."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    names = [sys.executable, *(shutil.which(f"python3.{minor}") for minor in range(11, 20))]
    names += sorted(glob.glob(f"{pyenv}/versions/3.*/bin/python3"))
    found: dict[tuple[int, int], str] = {}
    for name in filter(None, names):
        ask = "import sys, sysconfig, venv; free = sysconfig.get_config_var('Py_GIL_DISABLED'); "
        ask += "print(*sys.version_info[:2], int(bool(free)))"
        answer = subprocess.run([name, "-c", ask], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            major, minor, free_threaded = map(int, answer.stdout.split())
            if (major, minor) >= (3, 11) and not free_threaded:  # which has no stable ABI to build for
                found.setdefault((major, minor), name)
    return list(found.values())


def check_install(wheel: Path, python: str) -> None:
    """Installs the wheel alone in a new environment, and runs `use_pinpool` and the command line there."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        inside = f"{folder}/bin/python"
        pip = [sys.executable, "-m", "pip", "--python", inside, "install", "--quiet", "--no-index", str(wheel)]
        subprocess.run(pip, check=True)
        subprocess.run([inside, "-I", __file__, "--inside"], check=True)
        subprocess.run([f"{folder}/bin/pinpool", "--help"], check=True, stdout=subprocess.DEVNULL)


def use_pinpool() -> None:
    """What the wheel has to do with nothing else installed."""
    found = sorted(distribution.name for distribution in importlib.metadata.distributions())
    assert found == ["pinpool"], f"the environment is not empty: {found}"

    import pinpool

    with pinpool.PinnedPool(devices=None, max_bytes=4 << 20) as pool:
        array = pool.empty((3, 1000), "uint8")
        assert array.shape == (3, 1000)
        assert pool.is_pinned(array)
        view = memoryview(array)
        assert view.nbytes == 3000
        assert not view.readonly
        view.cast("B")[:] = bytes(range(250)) * 12
        assert view.tobytes() == bytes(range(250)) * 12

        child = os.fork()  # old C libraries keep the hook that we need in a part of their own
        if child == 0:
            os._exit(pool.is_pinned(array))
        assert os.waitpid(child, 0)[1] == 0, "a forked child takes the memory for its own"

        stats = pool.stats()
        assert stats["requested_bytes"] == 3000, stats
        assert min(stats["allocated_bytes"], stats["locked_bytes"], stats["reserved_bytes"]) >= 3000, stats
        del view, array
        assert pool.stats()["allocated_bytes"] == 0, pool.stats()
        assert pool.trim() > 0
        assert pool.stats()["reserved_bytes"] == 0, pool.stats()

    assert importlib.metadata.version("pinpool") == pinpool.__version__
    assert not {"torch", "numpy"} & set(sys.modules)
    print(f"Python {sys.version.split()[0]} uses pinpool {pinpool.__version__}")


def main() -> int:
    """Runs all checks, prints how many passed, and answers with the exit status."""
    if sys.argv[1:] == ["--inside"]:
        use_pinpool()
        return 0
    (wheel,) = (Path(name).resolve() for name in sys.argv[1:])
    passed = failed = 0
    checks = [lambda: check_file(wheel), *(lambda python=python: check_install(wheel, python) for python in pythons())]
    for check in checks:
        try:
            check()
            passed += 1
        except (AssertionError, subprocess.CalledProcessError) as error:  # whose output is above
            print(f"FAILED: {error}", file=sys.stderr)
            failed += 1
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
