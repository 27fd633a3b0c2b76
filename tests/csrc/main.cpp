// pace_tests [PATTERN...]: runs the tests whose name contains one of the patterns, or all. Exit status 1 if any fails.
#include <cstring>
#include <exception>

#include "check.h"

namespace check {

namespace {
int failures_of_test = 0;
std::string current_table;
}  // namespace

std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

void fail(const char* file, int line, const std::string& message) {
    const char* name = std::strrchr(file, '/');
    if (++failures_of_test <= 10)
        std::printf("  %s:%d %s%s\n", name ? name + 1 : file, line,
                    current_table.empty() ? "" : ("[" + current_table + "] ").c_str(), message.c_str());
}

void for_each_table(const std::function<void(const pace::KernelTable&)>& body) {
    const pace::IsaList isas = pace::available_isas();
    const std::string before = pace::kernels().name;
    for (int i = 0; i < isas.count; ++i) {
        current_table = isas.tables[i]->name;
        pace::select_isa(isas.tables[i]->name);
        body(*isas.tables[i]);
    }
    current_table.clear();
    pace::select_isa(before.c_str());
}

std::string compare(const float* got, const double* expected, const double* tolerance, size_t count) {
    double worst = 0;
    std::string message;
    for (size_t i = 0; i < count; ++i) {
        const bool same = got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]));
        double excess = std::fabs(got[i] - expected[i]) / tolerance[i];
        if (!(tolerance[i] >= 0) || std::isinf(tolerance[i]) || std::isnan(excess)) excess = HUGE_VAL;
        if (same && tolerance[i] >= 0) excess = 0;
        if (excess > 1 && excess > worst) {
            worst = excess;
            char text[160];
            std::snprintf(text, sizeof text, "element %zu is %.9g, expected %.9g +- %.3g (%.3g times the tolerance)", i,
                          double(got[i]), expected[i], tolerance[i], excess);
            message = text;
        }
    }
    return message;
}

}  // namespace check

int main(int count, char** patterns) {
    int failed = 0, ran = 0;
    std::string tables;
    const pace::IsaList isas = pace::available_isas();
    for (int i = 0; i < isas.count; ++i) tables += std::string(" ") + isas.tables[i]->name;
    std::printf("chosen %s; tables:%s\n", pace::kernels().name, tables.c_str());
    for (const check::Test& test : check::tests()) {
        bool wanted = count < 2;
        for (int i = 1; i < count; ++i) wanted |= std::strstr(test.name, patterns[i]) != nullptr;
        if (!wanted) continue;
        check::failures_of_test = 0;
        try {
            test.body();
        } catch (const std::exception& error) {
            check::fail(__FILE__, __LINE__, std::string("exception: ") + error.what());
        }
        ++ran;
        failed += check::failures_of_test > 0;
        std::printf("%s %s\n", check::failures_of_test ? "FAIL" : "ok  ", test.name);
        std::fflush(stdout);
    }
    std::printf("%d of %d tests passed\n", ran - failed, ran);
    return failed > 0 || ran == 0;
}
