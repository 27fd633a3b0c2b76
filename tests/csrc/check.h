// A test harness in one header: TEST(name) { CHECK(condition); }, tests for every kernel table, and a comparison of
// numbers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "pace/dispatch.h"

namespace check {

struct Test {
    const char* name;
    void (*body)();
    void (*table_body)(const pace::KernelTable&);  // for a test of kernels, which has no body
};

std::vector<Test>& tests();

struct Register {
    Register(const char* name, void (*body)()) { tests().push_back({name, body, nullptr}); }
    Register(const char* name, void (*body)(const pace::KernelTable&)) { tests().push_back({name, nullptr, body}); }
};

// Records a failure of the running test, which continues. Prints only the first ten of a test.
void fail(const char* file, int line, const std::string& message);

// Returns the largest excess of |got - expected| over its tolerance, as text; empty if all are within. A NaN or
// infinity in `got` is always an error if `expected` has none, and so is a non-finite or negative tolerance.
std::string compare(const float* got, const double* expected, const double* tolerance, size_t count);

// True if `f` throws std::invalid_argument.
template <class F>
bool refused(F&& f) {
    try {
        f();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

// Fill value for memory that must neither be read into a result nor be left in one.
constexpr float kPoison = __builtin_nanf("");

// Inputs that expose errors: both signs, a heavy tail (one in sixteen is 2^0..2^6 times larger) and some exact zeros.
inline std::vector<float> heavy_tailed(size_t count, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<float> values(count);
    for (float& value : values) {
        const float uniform = float(int32_t(random())) * 0x1p-31f;
        const uint32_t kind = random() % 64;
        value = kind < 4 ? std::ldexp(uniform, int(random() % 7)) : kind == 4 ? 0.0f : uniform;
    }
    return values;
}

// Rows of inputs, one float off alignment, with NaN before, between and behind them.
struct Inputs {
    int64_t rows, k, stride;
    std::vector<float> memory;
    Inputs(int64_t rows, int64_t k, bool at_ends, uint32_t seed)
        : rows(rows), k(k), stride(k + 5), memory(size_t(rows * stride) + 1, kPoison) {
        const std::vector<float> values = heavy_tailed(size_t(rows * k), seed);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < k; ++i) {
                const float value = values[size_t(r * k + i)];
                row(r)[i] = at_ends ? std::copysign(3.5f, r % 2 ? value : 1.0f) : value;
            }
    }
    float* row(int64_t r) { return memory.data() + 1 + r * stride; }
};

}  // namespace check

#define TEST(name)                                                    \
    static void test_##name();                                        \
    static const check::Register register_##name{#name, test_##name}; \
    static void test_##name()

// Runs once for each table that this CPU can run, or for each requested one. `table` is the table in use. Failures
// print its name.
#define TEST_TABLES(name)                                             \
    static void test_##name(const pace::KernelTable& table);          \
    static const check::Register register_##name{#name, test_##name}; \
    static void test_##name([[maybe_unused]] const pace::KernelTable& table)

#define CHECK(condition)                                               \
    do {                                                               \
        if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
    } while (0)

#define CHECK_CLOSE(got, expected, tolerance, count, description)                                               \
    do {                                                                                                        \
        const std::string difference = check::compare(got, expected, tolerance, count);                         \
        if (!difference.empty()) check::fail(__FILE__, __LINE__, std::string(description) + ": " + difference); \
    } while (0)
