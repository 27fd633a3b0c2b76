// RMSNorm and LayerNorm of one row.
//
// SHAPES      x, y [k]; weight, bias [k].
// DEFINITION  rms:    y = x / sqrt(mean(x^2) + eps) * weight.
//             layer:  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias.
// LAYOUT      Rows are contiguous; y may be x itself.
// NUMERICS    fp32. Sums use 4 * lanes running totals that are added in a fixed tree. The order depends only on k and
//             the instruction set. The variance is computed around the mean, in a second pass.
//
// Why four totals: an addition takes four cycles, and a single total would wait for itself. The row (about 64 KB at
// most) stays in the nearest caches between the passes.

constexpr int kNormTotals = 4;

// The sum of term(i, n) over the row, for n lanes from element i on. n < kLanes only at the end; the other lanes must
// then be 0.
template <class Term>
PACE_INLINE float sum_over_row(int64_t k, const Term& term) {
    F32 totals[kNormTotals];
    PACE_EACH(t, kNormTotals) totals[t] = zero();
    int64_t i = 0;
    for (; i + kNormTotals * kLanes <= k; i += kNormTotals * kLanes) {
        PACE_EACH(t, kNormTotals) totals[t] = totals[t] + term(i + t * kLanes, kLanes);
    }
    for (; i < k; i += kLanes) totals[0] = totals[0] + term(i, k - i < kLanes ? int(k - i) : kLanes);
    return reduce_add((totals[0] + totals[1]) + (totals[2] + totals[3]));
}

// 1 / sqrt(v), with exactly two roundings: the approximate instruction differs between processors.
PACE_INLINE float inverse_sqrt(float v) {
    float lanes[kLanes];
    store(lanes, broadcast(1.0f) / sqrt(broadcast(v)));
    return lanes[0];
}

static void rms_norm(const NormRow& row, int64_t k, float eps) {
    const float squares = sum_over_row(k, [&](int64_t i, int n) __attribute__((always_inline)) {
        const F32 x = load_lanes(row.x + i, n);
        return x * x;
    });
    const F32 scale = broadcast(inverse_sqrt(squares / float(k) + eps));
    for (int64_t i = 0; i < k; i += kLanes) {
        const int n = k - i < kLanes ? int(k - i) : kLanes;
        store_lanes(row.y + i, load_lanes(row.x + i, n) * scale * load_lanes(row.weight + i, n), n);
    }
}

static void layer_norm(const NormRow& row, int64_t k, float eps) {
    const float total =
        sum_over_row(k, [&](int64_t i, int n) __attribute__((always_inline)) { return load_lanes(row.x + i, n); });
    const F32 mean = broadcast(total / float(k));
    const float squares = sum_over_row(k, [&](int64_t i, int n) __attribute__((always_inline)) {
        const F32 centred = load_lanes(row.x + i, n) - mean;
        const F32 inside = n == kLanes ? centred : select(less(lane_numbers(), broadcast(float(n))), centred, zero());
        return inside * inside;
    });
    const F32 scale = broadcast(inverse_sqrt(squares / float(k) + eps));
    for (int64_t i = 0; i < k; i += kLanes) {
        const int n = k - i < kLanes ? int(k - i) : kLanes;
        F32 y = (load_lanes(row.x + i, n) - mean) * scale;
        if (row.weight) y = y * load_lanes(row.weight + i, n);
        if (row.bias) y = y + load_lanes(row.bias + i, n);
        store_lanes(row.y + i, y, n);
    }
}
