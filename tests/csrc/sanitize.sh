#!/bin/sh
# Builds the C++ tests with sanitizers and runs them: ASan + UBSan for all, TSan for the threads. Needs cmake and ninja in PATH.
# A pattern as argument restricts the first of the two to tests whose name contains it.
set -eu
cd "$(dirname "$0")/../.."

build() { # directory, sanitizers
    cmake -S . -B "$1" -G Ninja -DPACE_PYTHON=OFF -DPACE_TESTS=ON "-DPACE_SANITIZE=$2" >/dev/null
    cmake --build "$1" --target pace_tests
}

build build/asan "address;undefined"
build/asan/pace_tests "$@"
build build/tsan thread
build/tsan/pace_tests thread chunk phase callers run
