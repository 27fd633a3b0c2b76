// Rows of floats to codes and scales, in the formats of pace/quant. The bits are the same as there, on every table.
//
// SHAPES      QuantizeRow (pace/kernels.h): k floats of a row -> k codes, a byte each. Each group has a scale, and a
//             minimum if any.
//
// DEFINITION  `_quantize` of the Format that a Quantizer is named after (pace/quant/int8.py, int4.py, nf4.py,
//             microscaling.py, fp8.py).
//
// NUMERICS    Each operation there is one fp32 operation here. A sum over a group is sixteen sums, of every sixteenth
//             element, k ascending; then halves are added: `ordered_sum` of pace/quant/format.py. Integers are rounded
//             to nearest even.
//
// WHY THIS WAY  A group is widened into a stage that stays in the first-level cache while it is read about ten times.
//               The time then goes into reading the row.

// STEPS_TO_LARGEST and SHARES_OF_RANGE of pace/quant/int4.py.
constexpr float kStepsToLargest[] = {7.0f, 7.5f, 8.0f, 8.5f, 9.0f};
constexpr double kSharesOfRange[] = {1.0, 0.95, 0.9};

constexpr int kParts = 16 / kLanes;  // number of vectors with sixteen lanes in all

// The total of sixteen sums: halves are added, as in reduce_add().
PACE_INLINE float total_of(const F32 (&sums)[kParts]) {
    if constexpr (kParts == 1) {
        return reduce_add(sums[0]);
    } else if constexpr (kParts == 2) {
        return reduce_add(sums[0] + sums[kParts - 1]);
    } else {
        return reduce_add((sums[0] + sums[kParts / 2]) + (sums[1] + sums[kParts - 1]));
    }
}

// One group in its stage: `padded` floats, a multiple of 16; the first `count` are weights.
struct WeightGroup {
    float* x;
    int64_t count, padded;
    float low, high;

    float largest() const { return __builtin_fabsf(high < -low ? low : high); }
    void pad_with(float value) const {
        for (int64_t i = count; i < padded; ++i) x[i] = value;
    }
};

PACE_INLINE F32 rounded_within(F32 v, float low, float high) {
    return to_f32(to_int(min(max(v, broadcast(low)), broadcast(high))));
}

PACE_INLINE float one_if_zero(float scale) { return scale == 0.0f ? 1.0f : scale; }

// Widens `count` elements from element k on; returns false if one is not finite.
static bool stage_group(const QuantizeRow& a, int64_t k, int64_t count, WeightGroup& group) {
    group = {a.stage, count, (count + 15) / 16 * 16, 0.0f, 0.0f};
    stage_row(a.source_dtype, a.source, k, group.x, count);
    group.pad_with(group.x[count - 1]);  // does not change the minimum or maximum
    F32 low = load(group.x), high = low, spoilt = zero();
    for (int64_t i = 0; i < group.padded; i += kLanes) {
        const F32 v = load(group.x + i);
        low = min(v, low), high = max(v, high);
        spoilt = fma(v, zero(), spoilt);  // NaN if v is not finite
    }
    group.low = -reduce_max(negate(low)), group.high = reduce_max(high);
    return !any(is_nan(spoilt));
}

static void divide(const WeightGroup& group, float divisor) {
    const F32 by = broadcast(divisor);
    for (int64_t i = 0; i < group.padded; i += kLanes) store(group.x + i, load(group.x + i) / by);
}

// `normalize` of pace/quant/format.py.
static float normalize(const WeightGroup& group) {
    const float largest = group.largest();
    divide(group, one_if_zero(largest));
    return largest;
}

// Codes of levels 0, 1, ..: clamp(round((x - min) / scale), -8, 7) + 8.
static void int4_codes(const WeightGroup& group, float min_, float scale, int8_t* codes) {
    const F32 start = broadcast(min_), by = broadcast(one_if_zero(scale));
    for (int64_t i = 0; i < group.padded; i += kLanes)
        store(codes + i, rounded_within((load(group.x + i) - start) / by, -8.0f, 7.0f) + broadcast(8.0f));
}

// The number of bounds (ascending) below each lane.
PACE_INLINE F32 count_below(F32 v, const float* bounds, int count) {
    F32 below = zero();
    for (int b = 0; b < count; ++b) below = below + select(less(broadcast(bounds[b]), v), broadcast(1.0f), zero());
    return below;
}

// Rounds to the nearest E4M3 float, ties to even; returns its code as a signed byte. Inputs are at most 448.
PACE_INLINE F32 e4m3_code(F32 v) {
    const F32 magnitude = abs(v), start = broadcast(0x1p14f);  // its last bit is 2^-9, the unit of subnormals
    const I32 subnormal = bits(magnitude + start) - bits(start);
    const I32 odd = shift_right<20>(bits(magnitude)) & broadcast_int(1);
    const I32 normal = shift_right<20>(bits(magnitude) + broadcast_int(0x7ffff) + odd) - broadcast_int(120 << 3);
    const I32 code = bits(select(less(magnitude, broadcast(0x1p-6f)), from_bits(subnormal), from_bits(normal)));
    return to_f32(code - (shift_right<24>(bits(v)) & broadcast_int(0x80)));
}

static void e4m3_codes(const WeightGroup& group, float factor, int8_t* codes) {
    for (int64_t i = 0; i < group.padded; i += kLanes) {
        const F32 v = load(group.x + i) * broadcast(factor);
        store(codes + i, e4m3_code(min(max(v, broadcast(-448.0f)), broadcast(448.0f))));
    }
}

// The exponent e of m 2^e, 0.5 <= m < 1; 0 for zero.
PACE_INLINE int frexp_exponent(float magnitude) {
    if (magnitude == 0.0f) return 0;
    const bool small = magnitude < 0x1p-126f;
    return int(float_bits(small ? magnitude * 0x1p64f : magnitude) >> 23) - 126 - (small ? 64 : 0);
}

PACE_INLINE float exact_power_of_two(int n) {
    return bits_float(n > -127 ? uint32_t(n + 127) << 23 : 1u << 22);
}  // n >= -127

// The exponent of the standard's shared scale, for elements whose largest number has the exponent `largest_exponent`.
static int microscaling_exponent(const WeightGroup& group, int largest_exponent) {
    const int exponent = frexp_exponent(group.largest()) - 1 - largest_exponent;
    return exponent < -127 ? -127 : exponent > 127 ? 127 : exponent;
}

// ---- One function for each format: the codes of a padded group, and its scale and minimum.

static void quantize_int8(const QuantizeRow&, const WeightGroup& group, int8_t* codes, float& scale, float&) {
    const float largest = normalize(group);
    for (int64_t i = 0; i < group.padded; i += kLanes) store(codes + i, load(group.x + i) * broadcast(127.0f));
    scale = largest / 127.0f;
}

static void quantize_int4(const QuantizeRow&, const WeightGroup& group, int8_t* codes, float& scale, float&) {
    float largest = -group.low < group.high ? group.high : group.low;
    if (-group.low == group.high) {  // takes the first of the two
        const float* first = group.x;
        while (*first != group.low && *first != group.high) ++first;
        largest = *first;
    }
    divide(group, one_if_zero(largest));
    group.pad_with(0.0f);
    float best = 0.0f, least = 0.0f;
    for (const float steps : kStepsToLargest) {
        F32 squares[kParts], products[kParts];
        for (int p = 0; p < kParts; ++p) squares[p] = products[p] = zero();
        for (int64_t i = 0; i < group.padded; i += 16)
            for (int p = 0; p < kParts; ++p) {
                const F32 v = load(group.x + i + p * kLanes),
                          level = rounded_within(v * broadcast(-steps), -8.0f, 7.0f);
                squares[p] = squares[p] + level * level;
                products[p] = products[p] + v * level;
            }
        const float square = total_of(squares), product = total_of(products);
        const float fitted = product / (square < 1.0f ? 1.0f : square), error = -fitted * product;
        if (error < least) best = fitted, least = error;
    }
    int4_codes(group, 0.0f, best, codes);
    scale = best * largest;
}

static void quantize_affine_int4(const QuantizeRow&, const WeightGroup& group, int8_t* codes, float& scale,
                                 float& min_) {
    const float largest = normalize(group), by = one_if_zero(largest), low = group.low / by, high = group.high / by;
    const float range = high - low, length = range < 0x1p-126f ? 0x1p-126f : range;
    float* const unit = group.x + group.padded;
    for (int64_t i = 0; i < group.padded; i += kLanes)
        store(unit + i, (load(group.x + i) - broadcast(low)) / broadcast(length));
    for (int64_t i = group.count; i < group.padded; ++i) unit[i] = 0.0f;
    F32 units[kParts];
    for (int p = 0; p < kParts; ++p) units[p] = zero();
    for (int64_t i = 0; i < group.padded; i += 16)
        for (int p = 0; p < kParts; ++p) units[p] = units[p] + load(unit + i + p * kLanes);
    const float size = float(group.count), total = total_of(units);
    float best = 0.0f, start = 0.0f, least = __builtin_inff();
    for (const double share : kSharesOfRange) {
        const F32 steps = broadcast(float(15 / share)), offset = broadcast(float(7.5 * (1 - 1 / share)));
        F32 sums[kParts], squares[kParts], products[kParts];
        for (int p = 0; p < kParts; ++p) sums[p] = squares[p] = products[p] = zero();
        for (int64_t i = 0; i < group.padded; i += 16)
            for (int p = 0; p < kParts; ++p) {
                const F32 u = load(unit + i + p * kLanes), level = rounded_within(u * steps + offset, 0.0f, 15.0f);
                sums[p] = sums[p] + level;
                squares[p] = squares[p] + level * level;
                products[p] = products[p] + u * level;
            }
        const float sum = total_of(sums), square = total_of(squares), product = total_of(products);
        const float spread = size * square - sum * sum;
        const float slope = (size * product - total * sum) / (spread < 1.0f ? 1.0f : spread);
        const float begin = (total - slope * sum) / size, error = -slope * product - begin * total;
        if (error < least) best = slope, start = begin, least = error;
    }
    best = eleven_bits(best * length);
    start = eleven_bits(start * length + low + 8.0f * best);
    int4_codes(group, start, best, codes);
    scale = best * largest, min_ = start * largest;
}

static void quantize_to_codebook(const QuantizeRow& a, const WeightGroup& group, int8_t* codes, float& scale, float&) {
    scale = normalize(group);
    for (int64_t i = 0; i < group.padded; i += kLanes)
        store(codes + i, count_below(load(group.x + i), a.bounds, a.bound_count));
    if (a.code_of_level)
        for (int64_t i = 0; i < group.count; ++i) codes[i] = int8_t(a.code_of_level[codes[i]]);
}

static void quantize_mxfp4(const QuantizeRow& a, const WeightGroup& group, int8_t* codes, float& scale, float&) {
    const int exponent = microscaling_exponent(group, 2);
    const F32 inverse = broadcast(exact_power_of_two(-exponent));
    scale = exact_power_of_two(exponent);
    for (int64_t i = 0; i < group.padded; i += kLanes) {
        const F32 v = load(group.x + i) * inverse, sign = select(less(v, zero()), broadcast(8.0f), zero());
        store(codes + i, count_below(abs(v), a.bounds, a.bound_count) + sign);
    }
}

static void quantize_mxfp8(const QuantizeRow&, const WeightGroup& group, int8_t* codes, float& scale, float&) {
    const int exponent = microscaling_exponent(group, 8);
    scale = exact_power_of_two(exponent);
    e4m3_codes(group, exact_power_of_two(-exponent), codes);
}

static void quantize_fp8(const QuantizeRow&, const WeightGroup& group, int8_t* codes, float& scale, float&) {
    const float largest = normalize(group);
    e4m3_codes(group, 448.0f, codes);
    scale = largest / 448.0f;
}

static bool quantize_super_blocks(const QuantizeRow& a);

template <auto rule>
static bool quantize_groups(const QuantizeRow& a) {
    for (int64_t k = 0, g = 0; k < a.k; k += a.group, ++g) {
        WeightGroup group;
        if (!stage_group(a, k, a.k - k < a.group ? a.k - k : a.group, group)) return false;
        float scale = 0.0f, min_ = 0.0f;
        rule(a, group, (int8_t*)a.codes + k, scale, min_);
        a.scales[g] = a.rounds_scales ? eleven_bits(scale) : scale;
        if (a.mins) a.mins[g] = a.rounds_scales ? eleven_bits(min_) : min_;
    }
    return true;
}

static bool quantize_row(const QuantizeRow& a) {
    switch (a.quantizer) {
        case Quantizer::Q2K:
        case Quantizer::Q3K:
        case Quantizer::Q4K:
        case Quantizer::Q5K:
        case Quantizer::Q6K:
            return quantize_super_blocks(a);
        case Quantizer::Int8:
            return quantize_groups<quantize_int8>(a);
        case Quantizer::Int4:
            return quantize_groups<quantize_int4>(a);
        case Quantizer::AffineInt4:
            return quantize_groups<quantize_affine_int4>(a);
        case Quantizer::Codebook:
            return quantize_groups<quantize_to_codebook>(a);
        case Quantizer::MXFP4:
            return quantize_groups<quantize_mxfp4>(a);
        case Quantizer::MXFP8:
            return quantize_groups<quantize_mxfp8>(a);
        case Quantizer::FP8:
            return quantize_groups<quantize_fp8>(a);
    }
    __builtin_unreachable();
}
