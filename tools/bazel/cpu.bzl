"""cpu_simd_library: one source compiled for every instruction set of the CPU arms.

The source includes only headers that are safe under any -m flag (kernels/base/simd.h, plain structs)
and puts everything in `namespace lockstep { namespace LOCKSTEP_ISA { ... } }`, where LOCKSTEP_ISA is
generic, avx2 or avx512. The caller declares the three and picks by GetCpuIsa().
"""

_ISAS = {
    "generic": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mfma",
        "-mprefer-vector-width=512",
        # The compiler's own intrinsics pass undefined vectors on purpose.
        "-Wno-maybe-uninitialized",
        "-Wno-uninitialized",
    ],
}

def cpu_simd_library(name, srcs, hdrs = [], deps = [], copts = []):
    parts = []
    for isa, isa_copts in _ISAS.items():
        part = "%s_%s" % (name, isa)
        native.cc_library(
            name = part,
            srcs = srcs,
            textual_hdrs = hdrs,
            # Comparisons may be done for lanes that do not need them, so that loops with a choice in
            # them become vectors: no value depends on it, only exception flags, which nobody reads.
            copts = ["-O3", "-fno-trapping-math"] + isa_copts + copts,
            local_defines = [
                "LOCKSTEP_ISA=" + isa,
                "LOCKSTEP_ISA_%s=1" % isa.upper(),
            ],
            visibility = ["//visibility:private"],
            deps = deps,
        )
        parts.append(":" + part)
    native.cc_library(
        name = name,
        visibility = ["//visibility:private"],
        deps = parts,
    )
