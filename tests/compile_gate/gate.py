"""The gate that every shipped kernel passes on every supported GPU, none of which is needed."""

from sparseformer.kernels.common.compilation import (
    SHARED_LIMITS,
    CompileCase,
    Compiled,
    compile_kernel,
)

ARCHITECTURES = (80, 89, 90, 100)


def check_compiles(case: CompileCase, arch: int) -> Compiled:
    """Compile a case and hold it to no spills and to the card's shared memory."""
    compiled = compile_kernel(case.kernel, arch, case.types, case.constants, case.launch.options())
    assert compiled.spilled == 0, f"{case.name} spills {compiled.spilled} bytes on sm_{arch}"
    limit = SHARED_LIMITS[arch]
    assert compiled.shared <= limit, (
        f"{case.name} needs {compiled.shared} bytes of shared memory, sm_{arch} has {limit}"
    )
    return compiled
