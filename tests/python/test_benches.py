"""The benchmarks in Python run to their end; what they measure is no test's business."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[2] / "benches"
OFFLOAD = BENCHES / "offload.py"
COMPARE = BENCHES / "compare.py"
HAVE_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.mark.locks(600 << 20)
def test_the_offload_benchmark_measures_every_row_or_says_what_it_left_out(tmp_path):
    picture = tmp_path / "table.png"
    options = ["--plot", picture] if HAVE_MATPLOTLIB else []
    command = [sys.executable, OFFLOAD, "--quick", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "left out: the rest of" not in done.stdout
    assert ("left out, as torch finds no device" in done.stdout) != ("H2D, 7 partitions" in done.stdout)
    for row in (
        "reuse, 64 MiB",
        "second lap, ZeRO-3, 7B",
        "reserved / requested, ZeRO-2",
        "locked",
        "step on the host",
    ):
        assert row in done.stdout
    if HAVE_MATPLOTLIB:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(run, tmp_path):
    run(
        f"""
        import contextlib, io, runpy

        sys.modules["matplotlib"] = None
        sys.path.insert(0, {str(BENCHES)!r})
        sys.argv = ["offload.py", "--plot", {str(tmp_path / "table.png")!r}]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                runpy.run_path({str(OFFLOAD)!r}, run_name="__main__")
        except SystemExit as done:
            assert done.code == 2
        assert "--plot needs matplotlib: pip install matplotlib" in said.getvalue()
        assert "measuring" not in said.getvalue()
        """
    )


@pytest.mark.locks(400 << 20)
def test_the_rows_of_swap_copy_nothing_name_absent_peers_and_leave_no_file(tmp_path):
    command = [sys.executable, COMPARE, "--quick", "--rows", "swap", "--swap-dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "not here: rows swap" not in done.stdout
    assert "not here: DeepSpeed's aio: not asked for" in done.stdout
    copied = [line for line in done.stdout.splitlines() if line.startswith("bytes copied by the CPU")]
    assert len(copied) == 3
    assert all(line.endswith("met") for line in copied)
    for row in ("swap write, 32 MiB, auto pages", "swap read, 32 MiB, threads", "70B optimizer", "swap delete, 4 KiB"):
        assert row in done.stdout
    assert not list(tmp_path.iterdir())
