// pace_tests [--tables NAME,...] [PATTERN...]: runs the tests whose name contains one of the patterns, or all. With
// --tables it runs only kernel tests, on these tables. The exit status is 1 if any test fails or none ran, 2 if a table
// is unavailable.
#include <chrono>
#include <cstring>
#include <exception>
#include <set>
#include <sstream>

#include "check.h"

namespace check {

namespace {
int failures_of_test = 0;
std::string current_table;
std::set<std::string> tested_tables;
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

namespace {

void run(const check::Test& test, const std::vector<const pace::KernelTable*>& tables) {
    try {
        if (test.body) return test.body();
        for (const pace::KernelTable* table : tables) {
            check::current_table = table->name;
            pace::select_isa(table->name);
            test.table_body(*table);
            if (&pace::kernels() != table)
                check::fail(__FILE__, __LINE__, "ran on " + std::string(pace::kernels().name));
            check::tested_tables.insert(pace::kernels().name);
        }
    } catch (const std::exception& error) {
        check::fail(__FILE__, __LINE__, std::string("exception: ") + error.what());
    }
    check::current_table.clear();
}

}  // namespace

int main(int count, char** arguments) {
    const pace::KernelTable& best = pace::kernels();
    std::vector<const pace::KernelTable*> tables;
    std::printf("chosen %s; tables:", best.name);
    for (const std::string& name : pace::available_isas()) {
        pace::select_isa(name);
        tables.push_back(&pace::kernels());
        std::printf(" %s", name.c_str());
    }
    pace::select_isa(best.name);
    std::printf("\n");

    std::vector<std::string> patterns(arguments + 1, arguments + count);
    const bool only_kernels = patterns.size() >= 2 && patterns[0] == "--tables";
    if (only_kernels) {
        std::istringstream names(patterns[1] + ",");  // an empty list then has one empty name, which is refused
        tables.clear();
        try {
            for (std::string name; std::getline(names, name, ',');) {
                pace::select_isa(name);
                tables.push_back(&pace::kernels());
            }
        } catch (const std::invalid_argument& error) {
            std::printf("%s\n", error.what());
            return 2;
        }
        patterns.erase(patterns.begin(), patterns.begin() + 2);
    }

    int failed = 0, ran = 0;
    for (const check::Test& test : check::tests()) {
        bool wanted = patterns.empty();
        for (const std::string& pattern : patterns) wanted |= std::strstr(test.name, pattern.c_str()) != nullptr;
        if (!wanted || (only_kernels && !test.table_body)) continue;
        check::failures_of_test = 0;
        const auto begin = std::chrono::steady_clock::now();
        run(test, tables);
        const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
        pace::select_isa(best.name);
        ++ran;
        failed += check::failures_of_test > 0;
        std::printf("%s %s (%.0f ms)\n", check::failures_of_test ? "FAIL" : "ok  ", test.name, took.count());
        std::fflush(stdout);
    }
    std::printf("%d of %d tests passed; kernels tested:", ran - failed, ran);
    for (const std::string& name : check::tested_tables) std::printf(" %s", name.c_str());
    std::printf("\n");
    return failed > 0 || ran == 0;
}
