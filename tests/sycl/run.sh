#!/usr/bin/env bash
# Asks Intel's SYCL runtime, by way of dpctl, what it thinks of memory that pinpool registered: check.py, on two
# simulated devices of Intel's real driver. No GPU is needed.
#
#     tests/sycl/run.sh [PYTHON]
#
# Needs pinpool built (make develop), a C compiler, and Debian's libze1 and intel-opencl-icd. Makes an environment of
# some 530 MB in target/sycl, and uses it again the next time.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3} here=tests/sycl made=target/sycl

wheels=(dpctl==0.17.0 intel-sycl-rt==2024.2.2 intel-cmplr-lib-rt==2024.2.2 intel-cmplr-lib-ur==2024.2.2 numpy==1.26.4)

for library in libze_loader.so.1 libze_intel_gpu.so.1; do
    "$python" -c "import ctypes; ctypes.CDLL('$library')" 2>/dev/null || {
        echo "test-sycl needs $library: apt-get install libze1 intel-opencl-icd" >&2
        exit 1
    }
done

mkdir -p "$made"
cc -shared -fPIC -O1 -o "$made/libzeshim.so" "$here/shim.c"
if [ "$(cat "$made/wheels" 2>/dev/null)" != "${wheels[*]}" ]; then
    rm -rf "$made/venv"
    "$python" -m venv "$made/venv"
    # Without their dependencies: the compiler packages are not needed, and some would bring a loader of their own.
    "$made/venv/bin/pip" install --quiet --no-deps "${wheels[@]}"
    echo "${wheels[*]}" > "$made/wheels"
fi

# The driver's debug keys make it work on devices that it simulates. Making memory resident crashes it there.
env NEOReadDebugKeys=1 SetCommandStreamReceiver=1 ProductFamilyOverride=pvc CreateMultipleRootDevices=2 \
    AUBDumpCaptureFileName=/dev/null SYCL_PI_LEVEL_ZERO_USM_RESIDENT=0 ONEAPI_DEVICE_SELECTOR='level_zero:*' \
    LD_LIBRARY_PATH="$PWD/$made/venv/lib" LD_PRELOAD="$PWD/$made/libzeshim.so" PYTHONPATH="$PWD/python" \
    timeout 120 "$made/venv/bin/python" -W error::UserWarning "$here/check.py"
