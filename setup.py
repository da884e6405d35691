"""Builds the native kernels; everything else about the package stands in pyproject.toml.

The kernels use PyTorch's stable ABI and Python's limited API, so one wheel serves every Python from 3.10 and every
torch from 2.10. Without torch or without a working compiler the package installs all the same, and the pure PyTorch
reference computes. For wheels that is a fault: BLOCKGATE_REQUIRE_KERNELS=1 makes it an error.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from setuptools import setup

# Contraction is part of the kernels' promise of equal bits: every multiply-add fuses where the machine can.
FLAGS = ["-O3", "-ffp-contract=fast", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wno-psabi"]

# By the value of BLOCKGATE_SANITIZE, which `make sanitize` and `make sanitize-threads` set: kernels that report bad
# memory accesses and undefined behaviour, or threads that race. OpenMP's own library can't be watched, so that threads
# of ours take its place there.
SANITIZE = {
    "1": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1"],
    "threads": ["-fsanitize=thread", "-DBLOCKGATE_OWN_THREADS", "-fno-omit-frame-pointer", "-O1"],
}

# Includes name their folder from here: "isa/vec.h", "host/buffer.h".
NATIVE = "src/blockgate/csrc"

PYTHON_3_10 = "0x030A0000"
TORCH_2_10 = "0x020a000000000000"


# Wheels and sdists for others are made with this: a package without kernels would install, and be slow, in silence.
REQUIRED = os.environ.get("BLOCKGATE_REQUIRE_KERNELS", "") not in {"", "0"}


def without_kernels(reason: object) -> None:
    """Tells why the package comes without kernels, and goes on, unless they are required."""
    if REQUIRED:
        raise SystemExit(f"blockgate: BLOCKGATE_REQUIRE_KERNELS is set, and there are no native kernels ({reason})")
    print(
        f"blockgate: installing WITHOUT native kernels ({reason}); the reference backend will compute", file=sys.stderr
    )


def native_build() -> dict[str, object]:
    """The setuptools arguments that build `blockgate._C`; none when torch can't be imported here."""
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except Exception as error:
        without_kernels(f"torch is not importable at build time: {error}")
        return {}

    class OptionalBuild(BuildExtension):  # type: ignore[misc, no-any-unimported]
        """Turns a failed compilation into an installation without kernels."""

        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as error:
                without_kernels(f"compiling failed: {error}")
                return
            missing = [e.name for e in self.extensions if not Path(self.get_ext_fullpath(e.name)).exists()]
            if missing:
                without_kernels(f"the build left no file for {', '.join(missing)}")

        def copy_extensions_to_source(self) -> None:
            self.extensions = [e for e in self.extensions if self._built(e.name).exists()]
            super().copy_extensions_to_source()

        def _built(self, name: str) -> Path:
            return Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(name)))

    windows = platform.system() == "Windows"
    flags = ["/O2", "/std:c++20"] if windows else FLAGS.copy()
    if not windows:
        # Messages name a source file; they need not name this machine's folders.
        for folder in (Path(torch.__file__).parents[1], Path(__file__).parent.resolve()):
            flags.append(f"-ffile-prefix-map={folder}=.")
    sanitize = SANITIZE.get(os.environ.get("BLOCKGATE_SANITIZE", ""), [])
    extension = CppExtension(
        "blockgate._C",
        sorted(str(source) for source in Path(NATIVE).glob("**/*.cpp")),
        include_dirs=[str(Path(NATIVE).resolve())],
        define_macros=[("Py_LIMITED_API", PYTHON_3_10), ("TORCH_TARGET_VERSION", TORCH_2_10)],
        extra_compile_args={"cxx": [*flags, *sanitize]},
        extra_link_args=sanitize,
        py_limited_api=True,
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": OptionalBuild},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**native_build())
