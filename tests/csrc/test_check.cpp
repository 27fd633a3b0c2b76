// The comparison itself, with planted errors: a harness that cannot fail proves nothing.
#include "check.h"

TEST(compare_finds_planted_errors) {
    const std::vector<double> expected = {1.0, -2.0, 0.0, -1e-3};
    const std::vector<double> tolerance(4, 1e-6);
    const std::vector<float> right = {1.0f, -2.0f, 0.0f, -1e-3f};
    auto difference = [&](std::vector<float> got) {
        return check::compare(got.data(), expected.data(), tolerance.data(), got.size());
    };
    CHECK(difference(right).empty());
    for (size_t i = 0; i < right.size(); ++i) {
        for (const float wrong : {right[i] + 1e-3f, right[i] - 1e-3f, check::kPoison, HUGE_VALF, -HUGE_VALF}) {
            std::vector<float> got = right;
            got[i] = wrong;
            CHECK(difference(got).find("element " + std::to_string(i)) == 0);
        }
    }
    // Two negative numbers with the wrong magnitude, and a lost sign.
    CHECK(!difference({1.0f, -2.1f, 0.0f, -1e-3f}).empty());
    CHECK(!difference({1.0f, 2.0f, 0.0f, -1e-3f}).empty());
}

TEST(compare_refuses_useless_tolerances) {
    const double expected = 1.0;
    const float got = 1.5f;
    for (const double tolerance : {HUGE_VAL, double(check::kPoison), -1.0})
        CHECK(!check::compare(&got, &expected, &tolerance, 1).empty());
}

TEST(dispatch_picks_the_best_and_refuses_nonsense) {
    const std::string best = pace::available_isas().front();
    CHECK(pace::kernels().name == best);
    for (const char* name : {"", "avx1024", "AVX2"}) {
        bool refused = false;
        try {
            pace::select_isa(name);
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        CHECK(refused);
    }
    CHECK(pace::kernels().name == best);
}
