"""Installs NVRTC, the compiler of kernels, from its wheel into a build folder: `python3 wheels.py target`.

Kernels include no CUDA header, so the wheels of the runtime and of CCCL are not needed. A second run finds the wheel and
does nothing; runs at the same time wait for each other; an installation that was cut off is done again.
"""

import fcntl
import os
import shutil
import subprocess
import sys

WHEEL = "nvidia-cuda-nvrtc==13.0.88"


def main():
    build = os.path.abspath(sys.argv[1])
    wheels = os.path.join(build, "cuda-wheels")
    os.makedirs(build, exist_ok=True)
    with open(os.path.join(build, "cuda-wheels.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # gone with this process, however it ends
        if stamped(wheels):
            return
        partial = wheels + ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        install(build, partial)
        with open(os.path.join(partial, "installed"), "w") as stamp:
            stamp.write(WHEEL)
        shutil.rmtree(wheels, ignore_errors=True)
        os.rename(partial, wheels)


def stamped(wheels):
    try:
        with open(os.path.join(wheels, "installed")) as stamp:
            return stamp.read() == WHEEL
    except OSError:
        return False


def install(build, folder):
    """With this Python's pip, or with that of a virtual environment where it has none."""
    said = []
    for python in (lambda: sys.executable, lambda: environment(build, said)):
        python = python()
        if python and run([python, "-m", "pip", "--version"], said):
            pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
            if run(pip + ["--no-deps", "--target", folder, WHEEL], said):
                return
    sys.exit(
        f"{WHEEL} could not be installed. The test command compiles every kernel and needs NVRTC: install pip for "
        f"{sys.executable} (on Debian: python3-pip, or python3-venv) and have a package index within reach, or install "
        "the CUDA 13 toolkit, or name a folder with libnvrtc.so.13 in HIGHWATER_CUDA (or by --cuda where highwater is run by "
        "hand). What was tried:\n" + "\n".join(said)
    )


def environment(build, said):
    folder = os.path.join(build, "cuda-venv")
    shutil.rmtree(folder, ignore_errors=True)
    if run([sys.executable, "-m", "venv", folder], said):
        return os.path.join(folder, "bin", "python3")
    return None


def run(command, said):
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ran.returncode != 0:
        said.append(f"$ {' '.join(command)}\n{ran.stdout.strip()}")
    return ran.returncode == 0


main()
