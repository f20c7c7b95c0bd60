"""fuzz_test: one harness (LLVMFuzzerTestOneInput), two programs.

NAME_test runs the harness over the inputs in corpus/NAME and small changes of them, with any compiler:
a regression test. NAME_fuzzer is a libFuzzer program, which --config=fuzz builds (clang-14).
"""

def fuzz_test(name, srcs, deps):
    native.cc_library(
        name = name + "_harness",
        testonly = True,
        srcs = srcs,
        visibility = ["//visibility:private"],
        deps = deps,
        alwayslink = True,
    )
    native.cc_test(
        name = name + "_test",
        size = "small",
        args = ["--corpus=tests/fuzz/corpus/" + name],
        data = native.glob(["corpus/%s/*" % name]),
        deps = [
            ":" + name + "_harness",
            ":corpus_main",
        ],
    )
    native.cc_binary(
        name = name + "_fuzzer",
        testonly = True,
        linkopts = ["-fsanitize=fuzzer"],
        target_compatible_with = select({
            "//tools/bazel:fuzz": [],
            "//conditions:default": ["@platforms//:incompatible"],
        }),
        deps = [
            ":" + name + "_harness",
            ":quiet",
        ],
    )
