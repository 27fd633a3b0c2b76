#!/bin/sh
# Builds the C++ tests twice and runs them, with AddressSanitizer + UndefinedBehaviorSanitizer and with ThreadSanitizer.
# Needs cmake and ninja in PATH. Arguments go to pace_tests, for example a pattern for the names of tests.
set -eu
cd "$(dirname "$0")/../.."

run_with() { # sanitizers, directory, arguments of pace_tests
    sanitizers=$1 directory=$2
    shift 2
    cmake -S . -B "$directory" -G Ninja -DPACE_PYTHON=OFF -DPACE_TESTS=ON "-DPACE_SANITIZE=$sanitizers" >/dev/null
    cmake --build "$directory" --target pace_tests
    "$directory/pace_tests" "$@"
}

run_with "address;undefined" build/asan "$@"
run_with thread build/tsan "$@"
