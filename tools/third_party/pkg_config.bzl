"""One external repository per system library, described by pkg-config."""

def _tuple(v):
    out = []
    for part in v.strip().split("."):
        if not part.isdigit():
            break
        out.append(int(part))
    return out

def _ask(rctx, tool, args):
    r = rctx.execute([tool] + args)
    if r.return_code:
        fail("pkg-config %s: %s" % (" ".join(args), r.stderr))
    return r.stdout.strip()

def _impl(rctx):
    tool = rctx.which("pkg-config")
    if not tool:
        fail("pkg-config is not installed")
    first = rctx.attr.modules[0]
    version = _ask(rctx, tool, ["--modversion", first])
    if _tuple(version) < _tuple(rctx.attr.min_version):
        fail("%s %s found, %s or newer needed" % (first, version, rctx.attr.min_version))
    libs = []
    for flag in _ask(rctx, tool, ["--libs"] + rctx.attr.modules).split(" "):
        if flag and (not libs or libs[-1] != flag):
            libs.append(flag)
    include = _ask(rctx, tool, ["--variable=includedir", first]) or "/usr/include"
    for tree in rctx.attr.header_trees:
        rctx.symlink(include + "/" + tree, "include/" + tree)
    globs = [
        "include/" + t + ("" if t.endswith(".h") else "/**")
        for t in rctx.attr.header_trees
    ]
    build = """
package(default_visibility = ["//visibility:public"])
cc_library(
    name = "{name}",
    hdrs = glob({globs}, allow_empty = False),
    includes = ["include"],
    linkopts = {libs},
)
""".format(
        name = rctx.name,
        globs = repr(globs),
        libs = repr(libs + rctx.attr.extra_libs),
    )
    if rctx.attr.main_module:
        build += """
cc_library(
    name = "gtest_main",
    linkopts = {libs},
    deps = [":{name}"],
)
""".format(
            name = rctx.name,
            libs = repr(_ask(rctx, tool, ["--libs", rctx.attr.main_module]).split(" ")),
        )
    rctx.file("BUILD", build)

pkg_config_repository = repository_rule(
    implementation = _impl,
    attrs = {
        "modules": attr.string_list(mandatory = True),
        "min_version": attr.string(mandatory = True),
        # Folders, or single headers by their name with ".h", below pkg-config's includedir.
        "header_trees": attr.string_list(),
        # Libraries of the same package that it has no module for.
        "extra_libs": attr.string_list(),
        # A module with a main(): becomes the target "gtest_main".
        "main_module": attr.string(),
    },
    environ = ["PKG_CONFIG_PATH"],
    local = True,
    configure = True,
)
