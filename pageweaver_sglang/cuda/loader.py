"""Builds the kernel library with nvcc on first use, keeps it in a cache keyed by content, and loads it through TVM FFI.

There is one library per GPU architecture: for Hopper with all kernels, for others with those that come before attention
(:mod:`.portable` attends there).

The key covers the CUDA sources, the compiler flags (with the target architecture), the version of apache-tvm-ffi and
the version of nvcc. A cached library whose other parts match is used where there is no nvcc at all, so a cache filled
with ``python -m pageweaver_sglang.build`` serves images without a CUDA toolkit.

Environment: ``PAGEWEAVER_NVCC`` (compiler to use), ``CUDA_HOME``, ``PAGEWEAVER_CACHE_DIR`` (default
``~/.cache/pageweaver``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .._paths import kernels_dir

ARCHITECTURE = "sm_90a"
"""Hopper's, which all kernels are written for."""
LIBRARY = "libpageweaver_kernels.so"
LOG = "build.log"
MIN_NVCC = (12, 4)

_FLAGS = (
    *("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v"),
    *("-shared", "-cudart", "static"),
)
_MAX_SHOWN = 6000  # characters of nvcc's output in an error
_INSTALL = (
    "Install the CUDA toolkit 12.4 or newer (12.8 or newer recommended), put its nvcc on PATH or set CUDA_HOME, or set "
    "PAGEWEAVER_NVCC to the nvcc to use."
)

_modules: dict[str, Any] = {}  # by architecture
_module_lock = threading.Lock()


class KernelBuildError(RuntimeError):
    """The kernel library cannot be built or loaded; the text says why and what to do."""


# -------------------------------------------------------------------------------------------------- Architecture
def architecture_of(capability: tuple[int, int]) -> str:
    """The architecture that a GPU of this compute capability gets its library for."""
    return ARCHITECTURE if capability == (9, 0) else "sm_{}{}".format(*capability)


@functools.lru_cache(maxsize=64)
def architecture_on(device: torch.device) -> str:
    """The architecture of a CUDA device; :data:`ARCHITECTURE` for other devices."""
    return architecture_of(torch.cuda.get_device_capability(device)) if device.type == "cuda" else ARCHITECTURE


def _flags(architecture: str) -> tuple[str, ...]:
    flags = (*_FLAGS, f"-gencode=arch={architecture.replace('sm_', 'compute_')},code={architecture}")
    if architecture != ARCHITECTURE:
        flags += ("-DPW_PLAN_ONLY",)
    if int(re.sub(r"\D", "", architecture)) < 90:
        flags += ("-DPW_BEFORE_SM90",)
    return flags


# ------------------------------------------------------------------------------------------------------ Compiler
def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _pip_nvcc() -> Iterator[Path]:
    """The nvcc of NVIDIA's Python packages (nvidia/cu13/bin/nvcc, nvidia/cuda_nvcc/bin/nvcc)."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations if spec else None) or ():
        yield from sorted(Path(root).glob("*/bin/nvcc"))


def nvcc_path() -> Path | None:
    """The nvcc that a build would use, or None.

    ``PAGEWEAVER_NVCC`` when set, and nothing else then; otherwise CUDA_HOME, PATH, /usr/local/cuda, NVIDIA's Python
    packages. The file may be a script that runs an nvcc elsewhere.
    """
    if chosen := os.environ.get("PAGEWEAVER_NVCC"):
        found = shutil.which(os.path.expanduser(chosen))
        return Path(found) if found else None
    if (home := os.environ.get("CUDA_HOME")) and _executable(Path(home) / "bin" / "nvcc"):
        return Path(home) / "bin" / "nvcc"
    if on_path := shutil.which("nvcc"):
        return Path(on_path)
    for candidate in (Path("/usr/local/cuda/bin/nvcc"), *_pip_nvcc()):
        if _executable(candidate):
            return candidate
    return None


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise KernelBuildError(f"cannot run {command[0]}: {error.strerror or error}. {_INSTALL}") from error


@functools.lru_cache(maxsize=8)
def _nvcc_version(nvcc: Path) -> str:
    """Version of ``nvcc``, such as ``13.0.88``. Raises KernelBuildError when it does not run or is too old."""
    result = _run([str(nvcc), "--version"])
    found = re.search(r"release (\d+)\.(\d+)(?:, V(\d[\d.]*))?", result.stdout)
    if result.returncode != 0 or not found:
        said = (result.stderr or result.stdout).strip()[:_MAX_SHOWN]
        raise KernelBuildError(f"{nvcc} --version failed (exit status {result.returncode}): {said or 'no output'}")
    if (int(found[1]), int(found[2])) < MIN_NVCC:
        raise KernelBuildError(
            f"{nvcc} is release {found[1]}.{found[2]}; the kernels need {'.'.join(map(str, MIN_NVCC))} or newer. "
            + _INSTALL
        )
    return found[3] or f"{found[1]}.{found[2]}"


def _require_nvcc() -> Path:
    nvcc = nvcc_path()
    if nvcc is not None:
        return nvcc
    if chosen := os.environ.get("PAGEWEAVER_NVCC"):
        raise KernelBuildError(f"PAGEWEAVER_NVCC={chosen} is not an executable file. {_INSTALL}")
    raise KernelBuildError(f"the CUDA kernels have to be compiled once and no nvcc was found. {_INSTALL}")


# --------------------------------------------------------------------------------------------------------- Cache
def cache_dir() -> Path:
    """Folder of the built libraries: ``PAGEWEAVER_CACHE_DIR`` or ``~/.cache/pageweaver``.

    Raises KernelBuildError when that leads to a home directory which does not exist.
    """
    chosen = os.environ.get("PAGEWEAVER_CACHE_DIR") or "~/.cache/pageweaver"
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:  # no home directory, or a user who does not exist
        raise KernelBuildError(
            f"cannot use the kernel cache {chosen}: {error} Set PAGEWEAVER_CACHE_DIR to a writable folder."
        ) from error


def _source_key(architecture: str) -> str:
    """Digest of everything that decides what is built, apart from nvcc itself."""
    digest = hashlib.sha256()
    for part in (*_flags(architecture), importlib.metadata.version("apache-tvm-ffi")):
        digest.update(part.encode() + b"\0")
    folder = kernels_dir()
    for source in sorted(path for path in folder.rglob("*") if path.suffix in (".cu", ".cuh")):
        content = source.read_bytes()
        digest.update(f"{source.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _build_folder(nvcc: Path, architecture: str) -> Path:
    return cache_dir() / f"{_source_key(architecture)}-{architecture}-nvcc{_nvcc_version(nvcc)}"


def library_path(architecture: str = ARCHITECTURE) -> Path | None:
    """The cached library that :func:`load` would use, or None when it has to be built first. Never raises for a
    missing or unusable nvcc.
    """
    nvcc = nvcc_path()
    if nvcc is not None:
        with contextlib.suppress(KernelBuildError):
            library = _build_folder(nvcc, architecture) / LIBRARY
            return library if library.is_file() else None
    try:
        others = cache_dir().glob(f"{_source_key(architecture)}-{architecture}-nvcc*/{LIBRARY}")
    except KernelBuildError:  # no such folder can be; a build says so
        return None
    return max(others, key=lambda path: path.stat().st_mtime, default=None)


def is_built(architecture: str = ARCHITECTURE) -> bool:
    """Whether the library for these sources is in the cache, so that :func:`load` compiles nothing."""
    return library_path(architecture) is not None


# --------------------------------------------------------------------------------------------------------- Build
@contextlib.contextmanager
def _progress(text: str, verbose: bool) -> Iterator[None]:
    """Shows ``text`` on stderr while the block runs: a spinner on a terminal, otherwise a line; then the time taken."""
    if not verbose:
        yield
        return
    started = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield
    else:
        print(f"pageweaver: {text} ...", file=sys.stderr, flush=True)
        yield
    print(f"pageweaver: kernels compiled in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _exclusive(lock_file: Path, verbose: bool) -> Iterator[None]:
    """Holds ``lock_file`` against other processes and threads."""
    from filelock import FileLock, Timeout

    lock = FileLock(str(lock_file))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if verbose:
            print("pageweaver: waiting for another process that compiles the kernels ...", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _nvcc_command(nvcc: Path, output: Path, architecture: str) -> list[str]:
    from tvm_ffi import libinfo

    includes = dict.fromkeys([str(kernels_dir()), libinfo.find_include_path(), libinfo.find_dlpack_include_path()])
    libraries = [Path(libinfo.find_libtvm_ffi()).parent]
    toolkit_lib = nvcc.resolve().parent.parent / "lib"
    if (toolkit_lib / "libcudart_static.a").is_file():  # NVIDIA's Python packages; nvcc itself looks in lib64 only
        libraries.append(toolkit_lib)
    return [
        *(str(nvcc), *_flags(architecture), *(f"-I{folder}" for folder in includes)),
        *("-o", str(output), str(kernels_dir() / "bindings.cu")),
        *(*(f"-L{folder}" for folder in libraries), "-ltvm_ffi"),
    ]


def _compile(nvcc: Path, folder: Path, architecture: str) -> None:
    """Compiles into a temporary folder and moves the log, then the library, into ``folder``."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder.parent) as temporary:
        output = Path(temporary) / LIBRARY
        command = _nvcc_command(nvcc, output, architecture)
        result = _run(command)
        said = (result.stdout + result.stderr).strip()
        if result.returncode != 0 or not output.is_file():
            shown = said if len(said) <= _MAX_SHOWN else said[:_MAX_SHOWN] + "\n[...]"
            hint = "" if shutil.which("g++") else "\nnvcc needs a C++ compiler; g++ is not on PATH."
            raise KernelBuildError(
                f"nvcc failed (exit status {result.returncode}).\nCommand: {shlex.join(command)}\n"
                f"{shown or 'nvcc printed nothing.'}{hint}"
            )
        log = Path(temporary) / LOG
        log.write_text(f"{shlex.join(command)}\n{said}\n", encoding="utf-8")
        folder.mkdir(exist_ok=True)
        os.replace(log, folder / LOG)
        os.replace(output, folder / LIBRARY)  # last: the library's presence says that the build is complete


def build(force: bool = False, verbose: bool = True, architecture: str = ARCHITECTURE) -> Path:
    """Compiles an architecture's library unless the cache has it, and returns its path; ``build.log`` lies beside it.

    Processes that start together compile once. ``force`` compiles in any case, ``verbose`` reports progress on stderr.
    Raises KernelBuildError when there is no usable nvcc, when compilation fails or the cache cannot be written.
    """
    if not force and (library := library_path(architecture)) is not None:
        return library
    nvcc = _require_nvcc()
    folder = _build_folder(nvcc, architecture)
    library = folder / LIBRARY
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.with_name(folder.name + ".lock"), verbose):
            if force or not library.is_file():
                text = f"compiling the CUDA kernels for {architecture} with nvcc {_nvcc_version(nvcc)}, once"
                with _progress(text, verbose):
                    _compile(nvcc, folder, architecture)
    except OSError as error:
        raise KernelBuildError(
            f"cannot write the kernel cache {folder.parent}: {error}. Set PAGEWEAVER_CACHE_DIR to a writable folder."
        ) from error
    return library


def load(architecture: str = ARCHITECTURE) -> Any:
    """The TVM FFI module of an architecture's library, built on first use.

    It has the functions ``pw_regroup`` and ``pw_union_prep``, and Hopper's ``pw_value_tiles`` and ``pw_attention``.

    Raises KernelBuildError as :func:`build` does, or when the built library cannot be loaded.
    """
    module = _modules.get(architecture)
    if module is not None:
        return module
    with _module_lock:
        if architecture not in _modules:
            library = build(architecture=architecture)
            import tvm_ffi

            try:
                _modules[architecture] = tvm_ffi.load_module(str(library))
            except Exception as error:  # TVM FFI raises several types
                rebuild = "python -m pageweaver_sglang.build --force"
                if architecture != ARCHITECTURE:
                    rebuild += f" --architecture {architecture}"
                raise KernelBuildError(f"cannot load {library}: {error}. Rebuild it: {rebuild}") from error
        return _modules[architecture]
