// Inputs of quantised weights: from a row of fp32 to int8 codes and a scale for each group of them.
//
// SHAPES      x: K fp32 -> QuantizedInput (pace/kernels.h). It has k_padded codes as int8. If the table multiplies
//             int16, it also has them as int16 in the table's order. Each group of `weight.input_group()` inputs has a
//             scale, the sum of its codes, and the initial value of its sums of products. Super-blocks have a scale for
//             each 128 inputs, and sums of 16 codes each.
//
// DEFINITION  For each group:  scale = max|x| / 127;  code = round(x / scale), -127 to 127, ties to even.
//
//             With token_inputs, for the row:  factor = 1 / max(max|x|, 1e-5) * 127;  code = round(x factor), and its
//             scale is 1 / factor. BitNet is trained with this rounding.
//
// NUMERICS    As for int8 keys and values (kv_cache.inl). If all inputs of a group are zero, or so small that the scale
//             is zero, the scale and the codes are zero. If an input is not finite, the scale is NaN and the codes are
//             zero, so that its row of outputs becomes NaN. The error of a code is at most half: 1/254 of the largest
//             input of its group. The last group may be shorter; codes beyond K are zero.
//
// WHY THIS WAY  Every product with a quantised weight waits for it, but it is only K elements compared with N * K. A
//               group's scale takes a maximum over all its lanes, about 20 cycles; the processor overlaps those of
//               neighbouring groups.

// Stores codes, which are scaled(x) rounded, of one group; returns their sum.
template <class Scaled>
static float quantize_group(const float* x, int64_t count, const Scaled& scaled, int8_t* codes) {
    F32 sum = zero();
    for (int64_t k = 0; k < count; k += kLanes) {
        const int n = count - k < kLanes ? int(count - k) : kLanes;
        const F32 code = scaled(load_lanes(x + k, n));
        store_lanes(codes + k, code, n);
        sum = sum + to_f32(to_int(code));  // exact: at most 128 * 127
    }
    return reduce_add(sum);
}

// The sum of sixteen codes.
static int16_t sum_of_codes(const int8_t* codes) {
    const __m128i moved = _mm_xor_si128(_mm_loadu_si128((const __m128i*)codes), _mm_set1_epi8((char)0x80));
    const __m128i halves = _mm_sad_epu8(moved, _mm_setzero_si128());
    return int16_t(_mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - 16 * 128);
}

static void spread_row(const PackedHeader& h, void* row) {
    const int8_t* const codes = (const int8_t*)row;
    int16_t* const wide = (int16_t*)QuantizedInput::wide_codes(row, h);
    for (int64_t k = 0; k < h.k_padded; k += 16) spread_inputs(codes + k, wide + k);
}

static void quantize_input_of_super_blocks(const float* x, const PackedHeader& h, void* row) {
    int8_t* const codes = (int8_t*)row;
    float* const scales = (float*)QuantizedInput::scales(row, h);
    int16_t* const sums = (int16_t*)QuantizedInput::short_sums(row, h);
    for (int64_t k = 0; k < h.k; k += kInputGroup) {
        const float scale = scales[k / kInputGroup] = int8_scale(x + k, kInputGroup);
        for (int64_t i = k; i < k + kInputGroup; i += kLanes) store(codes + i, over_scale<int8_t>(load(x + i), scale));
    }
    for (int64_t k = 0; k < h.k; k += kInputSum) sums[k / kInputSum] = sum_of_codes(codes + k);
    if (std::is_same_v<InputCode, int16_t>) spread_row(h, row);
}

// Writes the scale of a row with token_inputs, and returns its inverse. Both are NaN if an input is not finite.
static float factor_of_token(const float* x, const PackedHeader& h, void* row) {
    const float largest = largest_magnitude(x, h.k), factor = 1.0f / (largest < 1e-5f ? 1e-5f : largest) * 127.0f;
    *(float*)QuantizedInput::token_scale(row, h) = 1.0f / factor;
    return factor;
}

static void quantize_input(const float* x, const PackedHeader& h, void* row) {
    if (h.in_super_blocks()) return quantize_input_of_super_blocks(x, h, row);
    const bool distances = h.multiplies_distances();
    int8_t* const codes = (int8_t*)row;
    float* const scales = (float*)QuantizedInput::scales(row, h);
    float* const sums = (float*)QuantizedInput::sums(row, h);
    int32_t* const starts = (int32_t*)QuantizedInput::starts(row, h);
    const int32_t offset = distances ? -h.min_level() : kSignedOffset;
    const int64_t group = h.input_group();
    const F32 token_factor = broadcast(h.token_inputs ? factor_of_token(x, h, row) : 0.0f);
    for (int64_t k = h.k; k < h.k_padded; ++k) codes[k] = 0;
    for (int64_t g = 0, k = 0; k < h.k_padded; ++g, k += group) {
        const int64_t rest = h.k > k ? h.k - k : 0, count = rest < group ? rest : group;
        if (h.token_inputs) {
            const auto scaled = [&](F32 v) { return select(less(zero(), token_factor), v * token_factor, zero()); };
            scales[g] = 1.0f;
            sums[g] = quantize_group(x + k, count, scaled, codes + k);
        } else {
            const float scale = scales[g] = int8_scale(x + k, count);
            sums[g] = quantize_group(x + k, count, [&](F32 v) { return over_scale<int8_t>(v, scale); }, codes + k);
        }
        starts[g] = -offset * int32_t(sums[g]);
        if (kPairsOfProducts && !distances)
            starts[g] -= own_products(codes + k, h.k_padded - k < group ? h.k_padded - k : group);
    }
    if (std::is_same_v<InputCode, int16_t> || (std::is_same_v<UnpackedInputCode, int16_t> && !distances))
        spread_row(h, row);
}
