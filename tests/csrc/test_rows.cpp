// Norms, rotary embedding and the sampling kernels of every table against float64, at vector edges.
#include <algorithm>
#include <cstring>

#include "check.h"
#include "pace/kernels.h"

using namespace pace;

namespace {

constexpr double kEps = 0x1p-24;
const int64_t kSizes[] = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129, 257};

// `size` values at an odd address, with poison on both sides that must stay unchanged.
struct Guarded {
    std::vector<float> memory;
    explicit Guarded(int64_t size) : memory(size + 34, check::kPoison) {}
    explicit Guarded(const std::vector<float>& values) : Guarded(int64_t(values.size())) {
        std::copy(values.begin(), values.end(), data());
    }
    float* data() { return memory.data() + 17; }
    bool intact() const {
        const auto poisoned = [](float value) { return std::isnan(value); };
        return std::all_of(memory.begin(), memory.begin() + 17, poisoned) &&
               std::all_of(memory.end() - 17, memory.end(), poisoned);
    }
};

}  // namespace

// Division, tanh and product have errors of some ulp of a result that is at most x and at most the cap.
TEST_TABLES(softcap_of_every_length_and_the_whole_range) {
    for (const int64_t count : kSizes) {
        for (const float cap : {0.5f, 30.0f}) {
            Guarded x(check::heavy_tailed(count, 5));
            x.data()[count / 2] = count % 2 ? 1e30f : -1e-20f;
            std::vector<double> expected(count), tolerance(count);
            for (int64_t i = 0; i < count; ++i) {
                expected[i] = cap * std::tanh(double(x.data()[i]) / cap);
                tolerance[i] = 8 * kEps * std::fabs(expected[i]) + 1e-37;
            }
            table.softcap(x.data(), count, cap);
            CHECK(x.intact());
            CHECK_CLOSE(x.data(), expected.data(), tolerance.data(), size_t(count), "softcap");
        }
    }
}

TEST_TABLES(norms_of_every_length) {
    for (const int64_t k : kSizes) {
        for (const bool layer : {false, true}) {
            Guarded x(check::heavy_tailed(k, 1)), weight(check::heavy_tailed(k, 3));
            Guarded bias(check::heavy_tailed(k, 4)), y(k);
            const float eps = 1e-5f;
            const NormRow row = {x.data(), weight.data(), layer ? bias.data() : nullptr, y.data()};
            (layer ? table.layer_norm : table.rms_norm)(row, k, eps);
            CHECK(y.intact());

            const std::vector<double> s(x.data(), x.data() + k);
            std::vector<double> expected(k), tolerance(k);
            double mean = 0, absolute = 0, squares = 0;
            for (int64_t i = 0; i < k; ++i) {
                mean += layer ? s[i] / k : 0;
                absolute += std::fabs(s[i]) / k;
            }
            for (int64_t i = 0; i < k; ++i) squares += (s[i] - mean) * (s[i] - mean) / k;
            const double deviation = std::sqrt(squares + eps);
            // The sums have k additions and their roundings; the mean's own error moves every element.
            for (int64_t i = 0; i < k; ++i) {
                const double scaled = (s[i] - mean) / deviation;
                const double shift = layer ? (k + 2) * kEps * absolute / deviation : 0;
                expected[i] = scaled * weight.data()[i] + (layer ? bias.data()[i] : 0);
                tolerance[i] = (shift * (1 + std::fabs(scaled) * (1 + shift)) +
                                (k / 2.0 + 8) * kEps * (std::fabs(scaled) + std::fabs(s[i]) / deviation)) *
                                   std::fabs(weight.data()[i]) +
                               2 * kEps * std::fabs(expected[i]) + (layer ? 2 * kEps * std::fabs(bias.data()[i]) : 0);
            }
            CHECK_CLOSE(y.data(), expected.data(), tolerance.data(), k, layer ? "layer_norm" : "rms_norm");
        }
    }
}

TEST_TABLES(rotary_rotates_pairs_and_nothing_else) {
    for (const int64_t half : {1, 2, 5, 8, 16, 19}) {
        for (const bool interleaved : {false, true}) {
            const int64_t heads = 2, stride = 2 * half + 3;
            const std::vector<float> before = check::heavy_tailed(heads * stride, 5),
                                     cosine = check::heavy_tailed(half, 6), sine = check::heavy_tailed(half, 7);
            Guarded x(before), cos(cosine), sin(sine);
            table.rotary(x.data(), heads, stride, cos.data(), sin.data(), half, interleaved);
            CHECK(x.intact());
            std::vector<float> expected = before;
            for (int64_t h = 0; h < heads; ++h) {
                for (int64_t i = 0; i < half; ++i) {
                    const int64_t first = h * stride + (interleaved ? 2 * i : i),
                                  second = first + (interleaved ? 1 : half);
                    const float a = before[first], b = before[second];
                    const float ac = a * cosine[i], bs = b * sine[i], bc = b * cosine[i], as = a * sine[i];
                    expected[first] = ac - bs;
                    expected[second] = bc + as;
                }
            }
            CHECK(std::memcmp(x.data(), expected.data(), expected.size() * sizeof(float)) == 0);
        }
    }
}

TEST_TABLES(argmax_finds_the_first_of_equals_and_nan) {
    for (const int64_t n : kSizes) {
        for (int64_t place = 0; place < n; place += 1 + n / 5) {
            Guarded x(std::vector<float>(n, -2.0f));
            x.data()[n - 1] = 3.0f;
            x.data()[place] = 3.0f;
            CHECK(table.argmax(x.data(), n) == place);
            x.data()[place] = check::kPoison;
            CHECK(table.argmax(x.data(), n) == -1);
        }
        CHECK(table.argmax(std::vector<float>(n, -HUGE_VALF).data(), n) == 0);
    }
}

TEST_TABLES(softmax_of_every_length) {
    for (const int64_t n : kSizes) {
        std::vector<float> values = check::heavy_tailed(n, 8);
        for (float& value : values) value *= 4;
        Guarded x(values), y(n);
        const ExpSum total = table.exp_sum(x.data(), n);
        table.softmax(x.data(), n, total, y.data());
        CHECK(y.intact());
        const double largest = *std::max_element(values.begin(), values.end());
        double sum = 0;
        for (const float value : values) sum += std::exp(value - largest);
        std::vector<double> expected(n), tolerance(n);
        for (int64_t i = 0; i < n; ++i) {
            const double relative = (20 + largest - values[i] + n / 16.0) * kEps;
            expected[i] = std::exp(values[i] - largest) / sum;
            tolerance[i] = relative * expected[i] + 1e-37;
        }
        CHECK_CLOSE(y.data(), expected.data(), tolerance.data(), n, "softmax");
    }
}

TEST_TABLES(find_at_least_finds_all_in_order_and_goes_on_where_it_stopped) {
    for (const int64_t n : kSizes) {
        std::vector<float> values = check::heavy_tailed(n, 9);
        if (n > 4) values[n / 2] = check::kPoison;
        Guarded x(values);
        for (const int capacity : {16, 40, 1000}) {
            std::vector<int32_t> found, expected, buffer(capacity);
            for (int64_t position = 0; position < n;) {
                const int count = table.find_at_least(x.data(), n, 0.1f, &position, buffer.data(), capacity);
                CHECK(count <= capacity);
                found.insert(found.end(), buffer.begin(), buffer.begin() + count);
            }
            for (int64_t i = 0; i < n; ++i) {
                if (values[i] >= 0.1f) expected.push_back(int32_t(i));
            }
            CHECK(found == expected);
        }
    }
}

TEST_TABLES(block_peaks_are_of_all_elements_and_tell_nan) {
    for (const int64_t n : {int64_t(1), int64_t(17), kPeakBlock - 1, kPeakBlock, kPeakBlock + 1, 2 * kPeakBlock + 33}) {
        const int64_t blocks = (n + kPeakBlock - 1) / kPeakBlock;
        for (int64_t place = 0; place < n; place += 1 + n / 7) {
            std::vector<float> values = check::heavy_tailed(n, 11);
            for (float& value : values) value -= 100;
            values[place] = -1.0f;
            Guarded x(values), maxima(blocks);
            CHECK(table.block_peaks(x.data(), n, maxima.data()) && maxima.intact());
            for (int64_t b = 0; b < blocks; ++b) {
                const auto begin = values.begin() + b * kPeakBlock;
                CHECK(maxima.data()[b] == *std::max_element(begin, std::min(values.end(), begin + kPeakBlock)));
            }
            x.data()[place] = check::kPoison;
            CHECK(!table.block_peaks(x.data(), n, maxima.data()));
        }
    }
}

TEST_TABLES(weights_and_their_sums_of_every_length) {
    for (const int64_t n : kSizes) {
        std::vector<float> values = check::heavy_tailed(n, 12);
        if (n > 4) values[n / 2] = -HUGE_VALF;
        if (n > 8) values[n / 3] = -1e30f;
        const float shift = *std::max_element(values.begin(), values.end()), scale = 1.7f;
        Guarded x(values), w(n);
        table.weigh(x.data(), n, shift, scale, w.data());
        CHECK(w.intact());
        std::vector<double> expected(n), tolerance(n);
        for (int64_t i = 0; i < n; ++i) {
            const double t = (double(values[i]) - shift) * scale;
            expected[i] = t < -126 ? 0 : std::exp2(t);
            tolerance[i] = (8 + 4 * std::min(126.0, std::fabs(t))) * kEps * expected[i];
        }
        CHECK_CLOSE(w.data(), expected.data(), tolerance.data(), size_t(n), "weigh");
        for (const float least : {-std::numeric_limits<float>::max(), -0.25f, 0.25f, shift, shift + 1}) {
            double sum = 0, kept = 0;
            for (int64_t i = 0; i < n; ++i) kept += values[i] >= least ? w.data()[i] : 0.0f;
            sum = table.sum_likely(x.data(), n, shift, scale, least);
            CHECK(std::fabs(sum - kept) <= 64 * kEps * kept);
            sum = table.sum_from(x.data(), w.data(), n, least);
            CHECK(std::fabs(sum - kept) <= 64 * kEps * kept);
        }
    }
}

// Shifts below and above the largest element, with keys of both kinds.
TEST_TABLES(a_survey_finds_maxima_and_sums_and_lists_what_is_near) {
    const float kInfinity = HUGE_VALF, lowest = -std::numeric_limits<float>::max();
    for (const int64_t n : {int64_t(1), int64_t(17), int64_t(65), kPeakBlock - 1, kPeakBlock, 2 * kPeakBlock + 33}) {
        std::vector<float> values = check::heavy_tailed(n, 15);
        if (n > 4) values[n / 2] = -kInfinity;
        if (n > 8) values[n / 3] = -1e30f;
        const int64_t blocks = (n + kPeakBlock - 1) / kPeakBlock;
        Guarded x(values), peaks(blocks), maxima(blocks);
        CHECK(table.block_peaks(x.data(), n, peaks.data()));
        const float peak = *std::max_element(values.begin(), values.end()), scale = 1.3f;
        for (const float shift : {peak, peak - 20.0f, peak + 5.0f}) {
            double all = 0, surplus = 0, magnitude = 0;
            std::vector<double> weights(n);
            for (int64_t i = 0; i < n; ++i) {
                const double t = (double(values[i]) - shift) * scale;
                all += weights[i] = t < -126 ? 0 : std::exp2(t);
                if (weights[i] > 0) surplus += t * weights[i], magnitude += std::fabs(t) * weights[i];
            }
            const double tolerance = 256 * kEps * (all + magnitude);
            for (const bool wants_surplus : {false, true}) {
                const PieceSums sums =
                    table.survey_piece(x.data(), n, shift, scale, wants_surplus, nullptr, maxima.data(), nullptr);
                CHECK(std::memcmp(maxima.data(), peaks.data(), size_t(blocks) * sizeof(float)) == 0);
                CHECK(maxima.intact() && sums.near == 0 && std::fabs(sums.all - all) <= 256 * kEps * all);
                CHECK(std::fabs(sums.surplus - (wants_surplus ? surplus : 0)) <= tolerance);
            }
            for (const KeyLimits& limits :
                 {KeyLimits{false, 0, 0.25f, -0.5f}, KeyLimits{true, peak - 0.5f, -0.2f, -0.6f},
                  KeyLimits{false, 0, kInfinity, lowest}, KeyLimits{true, peak, kInfinity, lowest}}) {
                double sure = 0;
                std::vector<float> near(n + 16), expected;
                for (int64_t i = 0; i < n; ++i) {
                    const float key = limits.typical ? -std::fabs(values[i] - limits.centre) : values[i];
                    if (key >= limits.sure) sure += weights[i];
                    if (key < limits.sure && key >= limits.least) expected.push_back(values[i]);
                }
                const PieceSums sums =
                    table.survey_piece(x.data(), n, shift, scale, false, &limits, maxima.data(), near.data());
                near.resize(sums.near);
                CHECK(near == expected);
                CHECK(std::memcmp(maxima.data(), peaks.data(), size_t(blocks) * sizeof(float)) == 0);
                CHECK(std::fabs(sums.all - all) <= 256 * kEps * all && std::fabs(sums.sure - sure) <= 256 * kEps * all);
            }
        }
        x.data()[n - 1] = check::kPoison;
        CHECK(std::isnan(table.survey_piece(x.data(), n, peak, scale, false, nullptr, maxima.data(), nullptr).all));
    }
}

TEST_TABLES(elements_are_found_by_their_limits) {
    for (const int64_t n : kSizes) {
        std::vector<float> values = check::heavy_tailed(n, 14);
        if (n > 4) values[n / 2] = -HUGE_VALF;
        const float shift = *std::max_element(values.begin(), values.end());
        Guarded x(values);
        for (const float low : {-std::numeric_limits<float>::max(), -0.25f, 0.25f, shift, shift + 1}) {
            for (const float high : {0.5f, HUGE_VALF}) {
                std::vector<int32_t> found(n + 16), expected;
                for (int64_t i = 0; i < n; ++i) {
                    if (values[i] >= low && values[i] < high) expected.push_back(int32_t(1000 + i));
                }
                found.resize(table.find_between(x.data(), n, low, high, 1000, found.data()));
                CHECK(found == expected);
            }
        }
    }
}

TEST_TABLES(apply_mask_bans_what_has_no_bit) {
    for (const int64_t n : kSizes) {
        for (int kind = 0; kind < 6; ++kind) {  // words of zeros, of ones, and mixed
            std::vector<float> values = check::heavy_tailed(n, 10);
            if (n > 4) values[n / 2] = check::kPoison;
            std::vector<int32_t> words((n + 31) / 32);
            uint32_t state = uint32_t(n) * 6 + kind + 1;
            for (size_t i = 0; i < words.size(); ++i) {
                state = state * 1664525u + 1013904223u;
                words[i] = kind == 0 ? 0 : kind == 1 ? -1 : kind == 2 && i % 2 ? 0 : int32_t(state ^ (state >> 13));
            }
            Guarded x(values), y(std::vector<float>(values.size(), 1.0f));
            table.apply_mask(x.data(), words.data(), n, y.data());
            CHECK(std::memcmp(x.data(), values.data(), size_t(n) * sizeof(float)) == 0);
            table.apply_mask(x.data(), words.data(), n, x.data());
            CHECK(x.intact() && y.intact());
            for (int64_t i = 0; i < n; ++i) {
                const float expected = (words[i / 32] >> (i % 32)) & 1 ? values[i] : -HUGE_VALF;
                CHECK(std::memcmp(x.data() + i, &expected, sizeof(float)) == 0);
                CHECK(std::memcmp(y.data() + i, &expected, sizeof(float)) == 0);
            }
        }
    }
}

TEST_TABLES(limits_read_every_float_and_count_operations) {
    for (const int64_t n : {128, 384}) {
        std::vector<float> x(n + 1, check::kPoison);
        for (int64_t i = 0; i < n; ++i) x[i] = float(i);
        CHECK(table.read_floats(x.data(), n) == float(n * (n - 1) / 2));
    }
    CHECK(table.spin_fma(3) == 2.0 * 12 * table.lanes);
}
