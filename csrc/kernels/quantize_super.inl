// Rows of floats to super-blocks, for the K types of pace/quant/k_types.py. The bits are the same as there, on every
// table.
//
// SHAPES    QuantizeRow (pace/kernels.h): k floats of a row, a multiple of 256 -> k codes, a byte each. Each group has
//           an integer scale, and one for its minimum if any. Each super-block has a float16, and one for minima.
//
// NUMERICS  As in quantize_weights.inl: each operation there is one fp32 operation here, and sums are `ordered_sum`.

// Parameters of a K type with minima.
struct AffineKType {
    int max_code, max_scale, group;  // upper bounds of codes and of the groups' integers; the group size
    float first, step;               // start and step of the search
    int steps;
    bool by_magnitude;
};
constexpr AffineKType kQ2K = {3, 15, 16, -0.5f, 0.1f, 15, true}, kQ4K = {15, 63, 32, -1.0f, 0.1f, 20, false},
                      kQ5K = {31, 63, 32, -0.5f, 0.1f, 15, false};
constexpr float kLeastScale = 1e-15f;
constexpr int kMostGroups = 16, kMostGroup = 32;

// The sum of f(i) over the vectors of a group, at elements i.
template <class F>
PACE_INLINE float sum_of_group(int group, const F& f) {
    F32 sums[kParts];
    for (int p = 0; p < kParts; ++p) sums[p] = zero();
    for (int i = 0; i < group; i += 16)
        for (int p = 0; p < kParts; ++p) sums[p] = sums[p] + f(i + p * kLanes);
    return total_of(sums);
}

// The smallest and the largest element, as torch's amin and amax for finite numbers.
PACE_INLINE void ends_of_group(const float* x, int group, float& low, float& high) {
    F32 lowest = load(x), highest = lowest;
    for (int i = kLanes; i < group; i += kLanes) {
        const F32 v = load(x + i);
        lowest = min(v, lowest), highest = max(v, highest);
    }
    low = -reduce_max(negate(lowest)), high = reduce_max(highest);
}

// `fit_affine`: a group's scale, and the distance of its minimum below zero.
static void fit_affine(const AffineKType& type, const float* x, float& best_scale, float& best_low) {
    const int group = type.group;
    float low, high;
    ends_of_group(x, group, low, high);
    if (low > 0.0f) low = 0.0f;
    if (high == low) {
        best_scale = 0.0f, best_low = -low;
        return;
    }
    const float length = high - low, highest = float(type.max_code);
    alignas(64) float weights[kMostGroup], above[kMostGroup], levels[kMostGroup];
    const float spread_of_all =
        type.by_magnitude
            ? 0.0f
            : __builtin_sqrtf(sum_of_group(group, [&](int i) { return load(x + i) * load(x + i); }) / float(group));
    for (int i = 0; i < group; i += kLanes) {
        store(weights + i, type.by_magnitude ? abs(load(x + i)) : broadcast(spread_of_all) + abs(load(x + i)));
        store(above + i, load(x + i) - broadcast(low));
    }
    const auto set_levels = [&](float inverse) {
        for (int i = 0; i < group; i += kLanes)
            store(levels + i, rounded_within(broadcast(inverse) * load(above + i), 0.0f, highest));
    };
    const auto error = [&](float scale, float start) {
        return sum_of_group(group, [&](int i) {
            const F32 off = broadcast(scale) * load(levels + i) + broadcast(start) - load(x + i);
            return load(weights + i) * (type.by_magnitude ? abs(off) : off * off);
        });
    };
    const float sum_w = sum_of_group(group, [&](int i) { return load(weights + i); });
    const float sum_x = sum_of_group(group, [&](int i) { return load(weights + i) * load(x + i); });
    const float inverse = highest / length;
    set_levels(inverse);
    best_scale = 1.0f / inverse;
    float start = low, best_error = error(best_scale, start);
    for (int step = 0; step <= type.steps; ++step) {
        set_levels((type.first + type.step * float(step) + highest) / length);
        const auto weighted = [&](int i) { return load(weights + i) * load(levels + i); };
        const float sum_l = sum_of_group(group, weighted);
        const float sum_l2 = sum_of_group(group, [&](int i) { return weighted(i) * load(levels + i); });
        const float sum_xl = sum_of_group(group, [&](int i) { return weighted(i) * load(x + i); });
        const float spread = sum_w * sum_l2 - sum_l * sum_l;
        if (!(spread > 0.0f)) continue;
        float scale = (sum_w * sum_xl - sum_x * sum_l) / spread, begin = (sum_l2 * sum_x - sum_l * sum_xl) / spread;
        if (begin > 0.0f) scale = sum_xl / sum_l2, begin = 0.0f;
        const float found = error(scale, begin);
        if (found < best_error) best_scale = scale, start = begin, best_error = found;
    }
    best_low = -start;
}

// `as_numbers`: integers, and the factor for them.
static F16 as_numbers(const float* values, int groups, int highest, int8_t* numbers) {
    float largest = values[0];
    for (int g = 1; g < groups; ++g) largest = values[g] > largest ? values[g] : largest;
    F16 super;
    const float step = largest / float(highest);
    from_float(largest > 0.0f ? step : 0.0f, super);
    const bool some = to_float(super) > 0.0f;  // if not, `inverse` may be infinite
    const float inverse = some ? float(highest) / largest : 0.0f;
    for (int g = 0; g < groups; ++g) {
        const float number = __builtin_rintf(inverse * values[g]);
        numbers[g] = int8_t(number < float(highest) ? number : float(highest));
    }
    return super;
}

PACE_INLINE bool is_finite(F16 half) { return (half.bits & 0x7c00) != 0x7c00; }

// Codes of a group: round((x + low) / scale), clamped to [lowest, highest], plus `offset`.
PACE_INLINE void super_codes(const float* x, int group, float scale, float low, float lowest, float highest,
                             float offset, int8_t* codes) {
    for (int i = 0; i < group; i += kLanes) {
        const F32 code =
            scale == 0.0f ? zero() : rounded_within((load(x + i) + broadcast(low)) / broadcast(scale), lowest, highest);
        store(codes + i, code + broadcast(offset));
    }
}

// Quantises a staged super-block; returns false if its scales do not fit a float16.
static bool quantize_affine_super_block(const AffineKType& type, const float* x, int8_t* codes, int8_t* scales,
                                        int8_t* mins, F16& super_scale, F16& super_min) {
    const int groups = int(kSuperBlock) / type.group;
    float of_groups[kMostGroups], lows[kMostGroups];
    for (int g = 0; g < groups; ++g) fit_affine(type, x + g * type.group, of_groups[g], lows[g]);
    super_scale = as_numbers(of_groups, groups, type.max_scale, scales);
    const F16 low = as_numbers(lows, groups, type.max_scale, mins);
    super_min = F16{uint16_t(low.bits ^ 0x8000)};
    if (!is_finite(super_scale) || !is_finite(low)) return false;
    for (int g = 0; g < groups; ++g)
        super_codes(x + g * type.group, type.group, float(scales[g]) * to_float(super_scale),
                    float(mins[g]) * to_float(low), 0.0f, float(type.max_code), 0.0f, codes + g * type.group);
    return true;
}

// The element of largest magnitude, the first of several.
PACE_INLINE float largest_of(const float* x, int count) {
    float largest = x[0];
    for (int i = 1; i < count; ++i)
        if (__builtin_fabsf(x[i]) > __builtin_fabsf(largest)) largest = x[i];
    return largest;
}

// Scales of groups of 16 for Q6_K and Q3_K: `fit` in k_types.py.
static float fit_q6(const float* x) {
    const float largest = largest_of(x, 16);
    if (__builtin_fabsf(largest) < kLeastScale) return 0.0f;
    float scale = 0.0f, best = 0.0f;
    for (int turn = 0; turn < 19; ++turn) {
        const int step = turn == 0 ? 0 : turn <= 9 ? turn - 10 : turn - 9;
        const F32 inverse = broadcast(-(0.1f * float(step) + 32.0f) / largest);
        const auto level = [&](int i) { return rounded_within(inverse * load(x + i), -32.0f, 31.0f); };
        const auto square = [&](int i) { return load(x + i) * load(x + i); };
        const float products = sum_of_group(16, [&](int i) { return square(i) * load(x + i) * level(i); });
        const float squares = sum_of_group(16, [&](int i) { return square(i) * level(i) * level(i); });
        if (squares > 0.0f && (step == 0 || products * products > best * squares)) {
            scale = products / squares;
            best = scale * products;
        }
    }
    return scale;
}

static float fit_q3(const float* x) {
    const float largest = largest_of(x, 16);
    if (__builtin_fabsf(largest) < kLeastScale) return 0.0f;
    alignas(64) float levels[16];
    for (int i = 0; i < 16; i += kLanes)
        store(levels + i, rounded_within(broadcast(-4.0f / largest) * load(x + i), -4.0f, 3.0f));
    const auto square = [&](int i) { return load(x + i) * load(x + i); };
    float products = sum_of_group(16, [&](int i) { return square(i) * load(x + i) * load(levels + i); });
    float squares = sum_of_group(16, [&](int i) { return square(i) * load(levels + i) * load(levels + i); });
    for (int turn = 0; turn < 5; ++turn) {
        bool changed = false;
        for (int i = 0; i < 16; ++i) {
            const float weight = x[i] * x[i], level = levels[i];
            const float others = products - weight * x[i] * level, squares_of_others = squares - weight * level * level;
            if (!(others > 0.0f)) continue;
            const float ideal = x[i] * squares_of_others / others;
            const float moved = ideal <= -4.0f ? -4.0f : ideal >= 3.0f ? 3.0f : __builtin_rintf(ideal);
            const float new_products = others + weight * x[i] * moved,
                        new_squares = squares_of_others + weight * moved * moved;
            if (moved != level && new_squares > 0.0f &&
                new_products * new_products * squares > products * products * new_squares) {
                levels[i] = moved, products = new_products, squares = new_squares;
                changed = true;
            }
        }
        if (!changed) break;
    }
    return squares > 0.0f ? products / squares : 0.0f;
}

static bool quantize_symmetric_super_block(bool six, const float* x, int8_t* codes, int8_t* scales, F16& super_scale) {
    constexpr int kGroup = 16, kGroups = int(kSuperBlock) / kGroup;
    const float half = six ? 32.0f : 4.0f, highest = six ? 128.0f : 32.0f;
    float of_groups[kGroups];
    for (int g = 0; g < kGroups; ++g) of_groups[g] = six ? fit_q6(x + g * kGroup) : fit_q3(x + g * kGroup);
    for (const float scale : of_groups)
        if (!(__builtin_fabsf(scale) <= 3.4e38f)) return false;
    const float largest = largest_of(of_groups, kGroups);
    const bool some = __builtin_fabsf(largest) >= kLeastScale;
    const float inverse = -highest / (some ? largest : 1.0f);
    from_float(some ? 1.0f / inverse : 0.0f, super_scale);
    if (!is_finite(super_scale)) return false;
    for (int g = 0; g < kGroups; ++g) {
        const float number = __builtin_rintf(inverse * of_groups[g]);
        scales[g] = int8_t(!some                     ? 0.0f
                           : number < -highest       ? -highest
                           : number > highest - 1.0f ? highest - 1.0f
                                                     : number);
        super_codes(x + g * kGroup, kGroup, float(scales[g]) * to_float(super_scale), 0.0f, -half, half - 1.0f, half,
                    codes + g * kGroup);
    }
    return true;
}

static bool quantize_super_blocks(const QuantizeRow& a) {
    for (int64_t b = 0; b < a.k / kSuperBlock; ++b) {
        WeightGroup block;
        if (!stage_group(a, b * kSuperBlock, kSuperBlock, block)) return false;
        int8_t* const codes = (int8_t*)a.codes + b * kSuperBlock;
        int8_t* const scales = a.group_scales + b * (kSuperBlock / a.group);
        int8_t* const mins = a.group_mins ? a.group_mins + b * (kSuperBlock / a.group) : nullptr;
        const auto affine = [&](const AffineKType& type) {
            return quantize_affine_super_block(type, block.x, codes, scales, mins, a.super_scales[b], a.super_mins[b]);
        };
        bool fits;
        switch (a.quantizer) {
            case Quantizer::Q2K:
                fits = affine(kQ2K);
                break;
            case Quantizer::Q4K:
                fits = affine(kQ4K);
                break;
            case Quantizer::Q5K:
                fits = affine(kQ5K);
                break;
            default:
                fits = quantize_symmetric_super_block(a.quantizer == Quantizer::Q6K, block.x, codes, scales,
                                                      a.super_scales[b]);
        }
        if (!fits) return false;
    }
    return true;
}
