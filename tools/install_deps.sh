#!/usr/bin/env bash
# Installs, on Debian 12, everything that building and testing Lockstep needs from the distribution.
# The one owner of the package list: quickstart.sh, test.sh and .ci/run all call it.
# Does nothing when everything is there. Needs root (or sudo) only when something is missing.
set -euo pipefail

# The build gives every action a /tmp of its own, in which a checkout there would not be seen.
case "$(cd "$(dirname "$0")/.." && pwd -P)/" in
  /tmp/*)
    echo "install_deps: this checkout is under /tmp, which the sandbox of the build hides from its actions; if the build says \"No such file or directory\", move it to another folder" >&2
    ;;
esac

packages=(
  bazel-bootstrap bazel-platforms bazel-rules-java bazel-rules-proto bazel-skylib
  g++ make pkg-config git python3 ca-certificates
  libabsl-dev libgrpc++-dev libgrpc-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc
  libgtest-dev libgmock-dev
  nlohmann-json3-dev libpcre2-dev libutf8proc-dev libxxhash-dev libcli11-dev
  prometheus-cpp-dev libssl-dev openssl
  python3-grpcio python3-protobuf
  clang-14 clang-format-14 libclang-rt-14-dev
)

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  [ "$status" = "install ok installed" ] || missing+=("$package")
done
if [ "${#missing[@]}" -eq 0 ]; then
  exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "install_deps: these packages are missing and neither root nor sudo is available:" >&2
    echo "  ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "install_deps: installing ${missing[*]}" >&2
"${as_root[@]}" apt-get update -qq >&2
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
