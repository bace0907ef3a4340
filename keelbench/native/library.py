"""The C kernels, compiled on first use and kept in a cache, on torch's own BLAS."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from keelbench.errors import KeelbenchError

FOLDER = Path(__file__).parent
FLAGS = ["-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fPIC", "-shared"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
if sys.platform == "linux":
    FLAGS.append("-Wl,-Bsymbolic")  # float and double have functions of the same names

COMPILE_SECONDS = 120
"""After this long the compiler is given up on; it normally takes one or two seconds."""

REALS = {torch.float32: ("float", "sgemm_"), torch.float64: ("double", "dgemm_")}
ARGUMENTS = {
    "multiply": "iiipipipi",
    "rms_forward": "ppppnnnnd",
    "rms_backward": "ppppppnnnnn",
    "ffn_forward": "pppppnnnnnn",
    "ffn_backward": "ppppppppnnnnnnnn",
    "attend_forward": "ppppnnnnn",
    "attend_backward": "ppppppnnnnn",
    "run_forward": "pnpppppp",
    "run_backward": "pnppppppp",
}
"""Of each function: p a pointer, i an int, n a long, d a double."""

TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "n": ctypes.c_long, "d": ctypes.c_double}


class NativeUnavailableError(KeelbenchError):
    """The C kernels cannot be used on this machine; the message says why."""


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The compiled kernels for a dtype, with torch's own BLAS underneath.

    Raises:
        NativeUnavailableError: without a working C compiler, a place for the result or a BLAS.
    """
    real, gemm = REALS[dtype]
    path = _compiled(real)
    try:
        loaded = ctypes.CDLL(str(path))
        blas = ctypes.CDLL(str(next(Path(torch.__path__[0], "lib").glob("libtorch_cpu.*"))))
        loaded.use_gemm(getattr(blas, gemm))
    except (OSError, AttributeError, StopIteration) as error:
        raise NativeUnavailableError(f"cannot load {path.name} and {gemm}: {error}") from error
    for name, kinds in ARGUMENTS.items():
        getattr(loaded, name).argtypes = [TYPES[kind] for kind in kinds]
    if not _multiplies(loaded, dtype):
        raise NativeUnavailableError(f"{gemm} of {blas} does not multiply as expected")
    return loaded


def _multiplies(loaded: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Whether the BLAS takes the arguments that are handed to it (32-bit sizes)."""
    numbers = torch.arange(15, dtype=dtype).sin()
    a, b = numbers.view(3, 5), numbers[:10].view(5, 2)
    c = torch.empty(3, 2, dtype=dtype)
    loaded.multiply(3, 2, 5, a.data_ptr(), 0, b.data_ptr(), 0, c.data_ptr(), 0)
    return torch.allclose(c, a @ b)


def _compiled(real: str) -> Path:
    """The shared library, compiled unless this source was before on such a processor."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NativeUnavailableError("no C compiler (cc, or the one named in CC)")
    sources = sorted(FOLDER.glob("*.c"))
    command = [compiler, f"-DREAL={real}", *FLAGS]
    texts = [path.read_text(encoding="utf-8") for path in (*sources, FOLDER / "kernels.h")]
    key = "\0".join((*texts, *command, platform.machine(), _cpu_flags()))
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"kernels-{real}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    path = home / "keelbench" / name
    if not path.exists():
        _compile([*command, *map(str, sources)], path)
    return path


def _compile(command: list[str], path: Path) -> None:
    """Run the compiler; the result appears at once or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            subprocess.run(
                [*command, "-o", str(built), "-lm"],
                check=True,
                capture_output=True,
                text=True,
                timeout=COMPILE_SECONDS,
            )
            built.replace(path)
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or ["no message"]
        raise NativeUnavailableError(f"{command[0]} failed: {last[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"cannot compile into {path.parent}: {error}") from error


def _cpu_flags() -> str:
    """What -march=native depends on: a cache may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), "")


def is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can compute on this device and in this dtype."""
    return device.type == "cpu" and dtype in REALS and problem(dtype) is None


@cache
def problem(dtype: torch.dtype = torch.float32) -> str | None:
    """Why the kernels cannot be used here; None if they can."""
    if os.environ.get("KEELBENCH_NATIVE") == "0":
        return "KEELBENCH_NATIVE=0"
    try:
        library(dtype)
    except NativeUnavailableError as error:
        return str(error)
    return None


def describe(device: str, dtype: str) -> str:
    """For records: ``native``, or ``plain`` and why."""
    kind = getattr(torch, dtype)
    if device != "cpu" or kind not in REALS:
        return f"plain: {dtype} on {device}"
    reason = problem(kind)
    return "native" if reason is None else f"plain: {reason}"
